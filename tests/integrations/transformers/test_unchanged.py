"""What context parallelism must not change: models without a plan, copies, saved models, other models."""

from __future__ import annotations

import copy
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
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


_NAMES = ("gemma3", "gpt2", "qwen3_next", "jamba", "lfm2", "deepseek_v32")


@pytest.mark.parametrize(("name", "attention"), [*product(_NAMES, ("sdpa", "eager")), ("hy_v4", "eager")])
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
    def generate(mine: Any, ids: Any) -> Any:
        return mine.train().generate(ids, max_new_tokens=4, do_sample=False)

    model = tiny.model_of("llama")
    assert torch.equal(tiny.train(model, IDS, 1, generate)[0], generate(model, IDS))


@pytest.mark.parametrize("name", ["mixtral, auxiliary loss", "qwen3_next"])
def test_two_models_of_one_class(name: str) -> None:
    """One under context parallelism changes neither another of its class nor their module."""
    documents = tiny.documents_of((23, 41))
    model, other, batch = tiny.model_of(name), tiny.model_of(name, seed=7), tiny.packed(documents)
    names = dict(vars(sys.modules[type(model).__module__]))
    loss, gradients = tiny.step(copy.deepcopy(other), batch)
    results = tiny.train(model, batch, act=lambda mine, given: (*tiny.step(mine, given), copy.deepcopy(other)))
    for *_, unchanged in results:
        got = tiny.step(unchanged, batch)
        assert got[0] == loss and all(torch.equal(got[1][n], x) for n, x in gradients.items())
    assert all(vars(sys.modules[type(model).__module__])[n] is x for n, x in names.items())
    tiny.check([result[:2] for result in results], tiny.reference(model, documents))
