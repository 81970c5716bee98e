"""What context parallelism must not change: models without a plan, copies, saved models, other models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import AutoModelForCausalLM

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

IDS = torch.stack(tiny.documents_of((17, 17)))
MASK = torch.ones_like(IDS).index_fill_(1, torch.arange(4), 0)  # padding on the left


def _all_of(model: Any, folder: Path) -> dict[str, Any]:
    """Results of a model in evaluation mode."""
    model.eval()
    with torch.no_grad():
        padded = model(input_ids=IDS, attention_mask=MASK).logits[:, 4:]
        labelled = model(input_ids=IDS, labels=IDS).loss
        generated = model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False)
        first = model(input_ids=IDS[:, :9], use_cache=True)
        cached = model(input_ids=IDS[:, 9:], past_key_values=first.past_key_values).logits
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        again = loaded.eval()(input_ids=IDS).logits
    return dict(padded=padded, labelled=labelled, generated=generated, cached=cached, again=again)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gemma3", "gpt2", "qwen3_next", "jamba", "lfm2"])
def test_without_a_plan(name: str, attention: str, tmp_path: Path) -> None:
    model = tiny.model_of(name, attention=attention)
    want = _all_of(copy.deepcopy(model), tmp_path / "before")

    def on_rank(rank: int, mesh: Any) -> dict[str, Any]:
        return _all_of(hf.context_parallel(model, mesh), tmp_path / "after")

    (got,) = run_ranks(1, on_rank)
    for key, value in want.items():
        assert torch.equal(got[key], value), key
    assert (tmp_path / "before/config.json").read_text() == (tmp_path / "after/config.json").read_text()


def test_decoding_while_the_model_trains() -> None:
    model = tiny.model_of("llama")
    want = copy.deepcopy(model).generate(IDS, max_new_tokens=4, do_sample=False)

    def on_rank(rank: int, mesh: Any) -> Any:
        return hf.context_parallel(model, mesh).train().generate(IDS, max_new_tokens=4, do_sample=False)

    assert torch.equal(run_ranks(1, on_rank)[0], want)


def test_a_copy_trains_its_own_parameters() -> None:
    documents = tiny.documents_of((31, 31))
    model = tiny.model_of("llama, dynamic NTK")
    want = tiny.reference(model, documents)
    models = tiny.copies(model, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        first = hf.context_parallel(models[rank], mesh)
        second = copy.deepcopy(first)
        result = tiny.step(second, tiny.packed(documents))
        assert tiny.gradients(first) == {}
        return result

    tiny.check(run_ranks(2, on_rank), want)


def test_two_models_of_one_class() -> None:
    """One under context parallelism does not change another of its class."""
    documents = tiny.documents_of((23, 41))
    model, other = tiny.model_of("mixtral, auxiliary loss"), tiny.model_of("mixtral, auxiliary loss", seed=7)
    want, other_want = tiny.reference(model, documents), tiny.step(copy.deepcopy(other), tiny.packed(documents))
    models, others = tiny.copies(model, 2), tiny.copies(other, 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        mine = tiny.step(hf.context_parallel(models[rank], mesh), tiny.packed(documents))
        loss, gradients = tiny.step(others[rank], tiny.packed(documents))
        assert loss == other_want[0]
        assert all(torch.equal(gradients[name], x) for name, x in other_want[1].items())
        return mine

    tiny.check(run_ranks(2, on_rank), want)
