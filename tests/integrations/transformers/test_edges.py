"""What a newcomer does first, and what would be wrong on shards without an error."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.batches import find_documents
from tests.integrations.transformers import tiny

DOCUMENTS = tiny.documents_of((23, 41))
BATCH = tiny.packed(DOCUMENTS)


@pytest.mark.parametrize("name", ["llama", "mamba2"])  # Mamba passes no positions on
def test_packed_batches_in_evaluation(name: str) -> None:
    model = tiny.model_of(name).eval()
    act = torch.no_grad()(lambda mine, batch: mine(**hf.prepare(batch, mine)).loss.item())
    assert tiny.train(model, BATCH, act=act) == pytest.approx([tiny.reference(model, DOCUMENTS)[0]] * 2, rel=3e-6)


def test_packed_beside_a_mask_of_ones() -> None:
    model, batch = tiny.model_of("llama"), BATCH | {"attention_mask": torch.ones(1, 64, dtype=torch.long)}
    tiny.check(tiny.train(model, batch), tiny.reference(model, DOCUMENTS))


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


def test_positions_without_a_sign() -> None:
    """Differences of uint8 are never negative."""
    positions = torch.tensor([[0, 1, 2, 0, 1]], dtype=torch.uint8)
    assert _starts(positions, attention_mask=torch.ones(1, 5)) == _starts(positions.expand(3, 1, 5)) == [0, 3, 5]


def test_plans_made_by_hand() -> None:
    """Masks of one's own stay as they are."""
    model, plan = tiny.model_of("llama"), spanwise.make_plan({"full_attention": _spans()}, 2)
    results = tiny.train(model, BATCH, act=lambda mine, batch: tiny.step(mine, hf.prepare(batch, mine, plan)))
    tiny.check(results, tiny.reference(model, DOCUMENTS))


def _spans() -> spanwise.SpanMask:
    return spanwise.SpanMask.documents([0, 23, 64])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generating_from_short_prompts(attention: str) -> None:
    """The masks of transformers are as small as the empty ones of planned batches."""
    model = tiny.model_of("llama", attention=attention).eval()
    batch = {"inputs": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[0, 1]])}

    def generate(mine: Any, batch: Any) -> torch.Tensor:
        return mine.generate(**batch, max_new_tokens=6, do_sample=False)

    assert torch.equal(tiny.train(model, batch, 1, generate)[0], generate(model, batch))


def _loaded(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", ["llama, YaRN", "qwen3_next", "mamba", "jamba"])
@pytest.mark.parametrize("again", [copy.deepcopy, _loaded])
def test_copies_and_pickles(name: str, again: Any) -> None:
    """Their mixers are theirs, and know of plans."""

    def act(mine: Any, batch: Any) -> Any:
        result = tiny.step(again(mine), batch)
        assert tiny.gradients(mine) == {}
        return result

    model = tiny.model_of(name)
    tiny.check(tiny.train(model, BATCH, 1, act), tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("longer", [False, True], ids=["alone", "a longer batch before the backward"])
def test_a_checkpoint_around_a_model_whose_frequencies_depend_on_the_length(longer: bool) -> None:
    """transformers keeps the frequencies of the longest batch so far; recomputed ones differ as on one device."""
    model = tiny.model_of("llama, dynamic NTK")
    short, long = ({"input_ids": d[None], "labels": d[None], "use_cache": False} for d in tiny.documents_of((24, 60)))

    def step(model: Any, batch: Any) -> Any:
        loss = checkpoint(lambda: model(**batch).loss, use_reentrant=False)
        if longer:
            model(**long)
        loss.backward()
        return loss.item(), tiny.gradients(model)

    tiny.check(tiny.train(model, short, act=step), step(copy.deepcopy(model), short))
