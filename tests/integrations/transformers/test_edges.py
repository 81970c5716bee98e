"""What context parallelism must not change, what a newcomer does first, and what shards could get wrong in silence."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.batches import find_documents
from spanwise.integrations.transformers.inputs import check_same
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)
IDS = torch.stack(tiny.documents_of((17, 17)))
MASK = torch.ones_like(IDS).index_fill_(1, torch.arange(4), 0)  # padding on the left


@torch.no_grad()
def _all_of(model: Any, folder: Path) -> dict[str, Any]:
    """Results of a model without a plan."""
    short = {"inputs": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 1]])}  # masks as small as empty ones
    found = dict(trained=model.generate(IDS, max_new_tokens=4, do_sample=False))
    model.eval()
    found["padded"] = model(input_ids=IDS, attention_mask=MASK).logits[:, 4:]
    found["labelled"] = model(input_ids=IDS, labels=IDS).loss
    found["generated"] = model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
    found["short"] = model.generate(**short, max_new_tokens=6, do_sample=False)
    first = model(input_ids=IDS[:, :9], use_cache=True)
    found["cached"] = model(input_ids=IDS[:, 9:], past_key_values=first.past_key_values).logits
    model.save_pretrained(folder)
    return found | dict(again=AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"), ("llama", "eager"), ("gemma3", "eager"), ("gpt2", "sdpa"), ("qwen3_next", "sdpa"),
        ("jamba", "eager"), ("lfm2", "sdpa"), ("deepseek_v32", "sdpa"), ("deepseek_v32", "eager"), ("hy_v4", "eager"),
    ],
)  # fmt: skip
def test_without_a_plan(name: str, attention: str, tmp_path: Path) -> None:
    model = tiny.model_of(name, attention=attention)
    want = _all_of(copy.deepcopy(model), tmp_path / "before")
    (got,) = run_ranks(1, lambda rank, mesh: _all_of(hf.context_parallel(model, mesh), tmp_path / "after"))
    for key, value in want.items():
        assert torch.equal(got[key], value), key
    assert (tmp_path / "before/config.json").read_text() == (tmp_path / "after/config.json").read_text()


@pytest.mark.parametrize("name", ["mixtral, auxiliary loss", "qwen3_next"])
def test_two_models_of_one_class(name: str) -> None:
    """One under context parallelism changes neither another of its class nor their module."""
    model, other = tiny.model_of(name), tiny.model_of(name, seed=7)
    names = dict(vars(sys.modules[type(model).__module__]))
    loss, gradients = tiny.step(copy.deepcopy(other), BATCH)
    for *_, unchanged in tiny.train(model, BATCH, act=lambda mine, x: (*tiny.step(mine, x), copy.deepcopy(other))):
        got = tiny.step(unchanged, BATCH)
        assert got[0] == loss and all(torch.equal(got[1][n], x) for n, x in gradients.items())
    assert all(vars(sys.modules[type(model).__module__])[n] is x for n, x in names.items())


def _loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("name", "again"),
    [("llama, YaRN", copy.deepcopy), ("qwen3_next", _loaded), ("mamba", copy.deepcopy), ("jamba", _loaded)],
)
def test_copies_and_pickles(name: str, again: Any) -> None:
    """Their mixers are theirs, and know of plans."""

    def act(mine: Any, batch: Any) -> Any:
        result = tiny.step(again(mine), batch)
        assert tiny.gradients(mine) == {}
        return result

    model = tiny.model_of(name)
    tiny.check(tiny.train(model, BATCH, 1, act), tiny.reference(model, DOCUMENTS))


def test_a_mask_of_ones_and_a_plan_made_by_hand() -> None:
    """Masks of one's own stay as they are."""
    model, batch = tiny.model_of("llama"), BATCH | {"attention_mask": torch.ones(1, 64, dtype=torch.long)}
    want = tiny.reference(model, DOCUMENTS)
    tiny.check(tiny.train(model, batch), want)
    plan = spanwise.make_plan({"full_attention": spanwise.SpanMask.documents([0, 23, 64])}, 2)
    tiny.check(tiny.train(model, BATCH, act=lambda mine, x: tiny.step(mine, hf.prepare(x, mine, plan))), want)


def _starts(positions: torch.Tensor, **more: Any) -> list[int]:
    ids = torch.zeros(1, positions.shape[-1], dtype=torch.long)
    return find_documents({"input_ids": ids, "position_ids": positions, **more}).cu_seqlens.tolist()


def test_three_rows_of_positions_that_start_anew() -> None:
    """Images have tokens with equal times; only where none of three positions grows does a document start."""
    text = torch.arange(5).expand(3, -1)
    image = torch.tensor([[5, 5, 5, 5], [5, 5, 6, 6], [5, 6, 5, 6]])
    document = torch.cat([text, image, torch.arange(7, 10).expand(3, -1)], 1)
    positions = torch.cat([document, torch.zeros(3, 1, dtype=torch.long), document], 1)[:, None]
    counts = torch.cat([torch.arange(12), torch.zeros(1), torch.arange(12)]).long()[None, None]
    assert _starts(positions) == _starts(torch.cat([counts, positions])) == [0, 12, 13, 25]
    frames = torch.tensor([[1, 1, 1, 1], [1, 2, 1, 2], [1, 1, 1, 1]])  # of a video, so fast that they share a time
    assert _starts(torch.cat([torch.zeros(3, 1, dtype=torch.long), frames], 1)[:, None]) == [0, 5]
    unsigned = torch.tensor([[0, 1, 2, 0, 1]], dtype=torch.uint8)  # differences of uint8 are never negative
    assert _starts(unsigned, attention_mask=torch.ones(1, 5)) == _starts(unsigned.expand(3, 1, 5)) == [0, 3, 5]


# --- ranks with different batches of equal lengths, or other parameters: an error on every rank ----------------------

GIVEN = {
    "input_ids": torch.arange(6)[None], "inputs_embeds": torch.zeros(2), "pixels": torch.linspace(-1, 1, 12).view(3, 4),
    "task": "text", "num_items_in_batch": 10,
}  # fmt: skip
# What the last rank has otherwise; equal sums of tokens, and a batch with its rows exchanged, among them.
OTHERS: tuple[dict[str, Any], ...] = (
    {"input_ids": torch.tensor([[0, 1, 2, 3, 4, 6]])}, {"input_ids": torch.tensor([[0, 1, 2, 4, 3, 5]])},
    {"pixels": GIVEN["pixels"] + torch.eye(3, 4) * 1e-6}, {"pixels": GIVEN["pixels"].flip(0)}, {"mask": torch.ones(1)},
    {"num_items_in_batch": 11},
)  # fmt: skip


def test_another_batch_on_one_rank() -> None:
    def checked(rank: int, mesh: DeviceMesh, other: dict[str, Any]) -> None:
        check_same(GIVEN | (other if rank == mesh.size() - 1 else {}), mesh, torch.nn.Module(), None)

    for other in OTHERS:
        with pytest.raises(ValueError, match="got different batches of equal lengths"):
            run_ranks(3, checked, other)
    for equal in ({}, {"inputs_embeds": torch.ones(2)}, {"task": "image"}):
        run_ranks(3, checked, equal)


@pytest.mark.parametrize(("step", "fused"), [(0, True), (1, False), (1, True), (2, True), (4, True)])
def test_gradients_that_nobody_averages(step: int, fused: bool) -> None:
    """Found at the first batch after the first step that nobody averages.

    Fused optimizers, the default of Trainer, do not count versions of parameters on.
    """

    def steps(mine: Any, batch: Any) -> int:
        if step == 0 and torch.distributed.get_rank() == 1:
            mine.lm_head.weight.data[0, 0] += 1e-3
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, fused=fused)
        for i in range(4):
            try:
                tiny.step(mine, batch)
            except ValueError as error:
                assert "parameters differ between ranks of the cp mesh" in str(error)
                return i
            if i != step - 1:
                for x in mine.parameters():
                    torch.distributed.all_reduce(x.grad)
                    x.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
        return 4

    assert tiny.train("llama", BATCH, act=steps) == [step, step]
