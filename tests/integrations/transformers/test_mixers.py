"""Hugging Face models with layers that carry a state along the sequence."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import DynamicCache
from transformers.models.qwen3_next import modeling_qwen3_next

from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers.mixers import table
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

# One of each way in which mixers compute, and in which plans reach them.
NAMES = ("qwen3_next", "kimi_linear", "mamba2", "mamba", "jamba", "lfm2", "minimax", "recurrent_gemma")
LENGTHS = (23, 41, 7, 30, 1)
DOCUMENTS = tiny.documents_of(LENGTHS)
BATCH = tiny.packed(DOCUMENTS)


def _train(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any], **options: Any) -> Any:
    return tiny.step(hf.context_parallel(models[rank], mesh, **options), batch)


def _compare(name: str, ranks: int, batch: dict[str, Any], **options: Any) -> None:
    model = tiny.model_of(name)
    results = run_ranks(ranks, _train, tiny.copies(model, ranks), batch, **options)
    tiny.check(results, tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str) -> None:
    _compare(name, 2, BATCH)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_forms_of_a_batch(name: str) -> None:
    for batch in (
        tiny.packed(DOCUMENTS, "cu_seq_lens_q"),
        *(tiny.padded(DOCUMENTS, side) for side in ("left", "right")),
    ):
        _compare(name, 2, batch)


@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local"])
def test_balancers(balancer: str) -> None:
    _compare("qwen3_5", 3, BATCH, balancer=balancer, block_size=4)


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "ulysses"])
def test_exchanges(exchange: str) -> None:
    _compare("bamba", 2, BATCH, exchange=exchange)


def _relaid(rank: int, mesh: Any, models: list[Any]) -> Any:
    """The mixers of a head-tail plan run in a contiguous layout."""
    model = hf.context_parallel(models[rank], mesh)
    plan = hf.make_plan(BATCH, model.config, mesh.size(), balancer="head_tail", block_size=4).replace(relayout=True)
    return tiny.step(model, hf.prepare(BATCH, model, plan))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "minimax", "recurrent_gemma"])
def test_mixers_in_a_layout_of_their_own(name: str) -> None:
    model = tiny.model_of(name)
    tiny.check(run_ranks(3, _relaid, tiny.copies(model, 3)), tiny.reference(model, DOCUMENTS))


def test_plans_price_states() -> None:
    config = tiny.config_of("qwen3_next")
    (each,) = (hf.make_plan(BATCH, config, 2).recurrences or {}).values()
    assert (each.layers, each.heads, each.key_dim, each.value_dim, each.conv_width) == (1, 4, 8, 12, 4)
    assert hf.make_plan(BATCH, config, 2, recurrences=None).recurrences is None
    for name in NAMES:
        assert hf.make_plan(BATCH, tiny.config_of(name), 2).recurrences is not None, name
    assert hf.make_plan(BATCH, tiny.config_of("llama"), 2).recurrences is None


def test_a_model_without_attention_is_cut_into_runs() -> None:
    """Nothing speaks against one run a rank, and the fewest states travel."""
    plan = hf.make_plan(BATCH, tiny.config_of("mamba2"), 4)
    assert sorted(plan.masks) == ["linear_attention"]
    assert [len(plan.layout.runs(rank)) for rank in range(4)] == [1] * 4
    assert plan.layout.tokens_per_rank.max() <= 26


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "jamba"])
def test_copies_and_pickles(name: str) -> None:
    """Their mixers are theirs, and know of plans."""
    model = tiny.model_of(name)
    models, want = tiny.copies(model, 2), tiny.reference(model, DOCUMENTS)

    def on_rank(rank: int, mesh: Any) -> Any:
        prepared = hf.context_parallel(models[rank], mesh)
        file = io.BytesIO()
        torch.save(prepared, file)
        file.seek(0)
        others = copy.deepcopy(prepared), torch.load(file, weights_only=False)
        results = [tiny.step(other, BATCH) for other in others]
        assert tiny.gradients(prepared) == {}
        return results

    results = run_ranks(1, on_rank)
    for index in range(2):
        tiny.check([result[index] for result in results], want)


@pytest.mark.parametrize(
    "name", ["qwen3_next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba2", "jamba"))]
)
def test_models_are_verified(name: str) -> None:
    models = tiny.copies(tiny.model_of(name), 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        return hf.verify(hf.context_parallel(models[rank], mesh), BATCH)

    for report in run_ranks(2, on_rank):
        assert report.ok, str(report)
        assert report.probed == (22, 23) and max(report.errors.values()) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_document_does_not_reach_others(name: str) -> None:
    """Not by a bit: logits of all other documents are the same when one changes."""
    other = copy.deepcopy(BATCH)
    other["input_ids"][:, 23:64] = tiny.documents_of((41,), seed=9)[0]
    models = tiny.copies(tiny.model_of(name), 2)

    def on_rank(rank: int, mesh: Any) -> Any:
        model = hf.context_parallel(models[rank], mesh)
        with torch.no_grad():
            return [model(**hf.prepare(batch, model)).logits for batch in (BATCH, other)]

    plan = hf.make_plan(BATCH, models[0].config, 2)
    for rank, (before, after) in enumerate(run_ranks(2, on_rank)):
        tokens = torch.cat([torch.arange(a, b) for a, b in plan.layout.runs(rank).tolist()])
        changed = (before != after).any(dim=-1)[0]
        assert not changed[(tokens < 23) | (tokens >= 64)].any()
        assert changed[(tokens >= 23) & (tokens < 64)].any()


@pytest.mark.parametrize(("name", "argument"), [("qwen3_next", "past_key_values"), ("mamba2", "cache_params")])
def test_a_state_cache_with_a_plan(name: str, argument: str) -> None:
    model = tiny.model_of(name)

    def on_rank(rank: int, mesh: Any) -> None:
        cache = {argument: DynamicCache(config=model.config)}
        prepared = hf.context_parallel(model, mesh)
        with pytest.raises(ValueError, match="a KV cache does not go with context parallelism"):
            hf.prepare(BATCH | cache, prepared)
        with pytest.raises(ValueError, match="a batch behind a KV cache cannot be cut"):
            prepared(**BATCH, **cache)

    run_ranks(1, on_rank)


class OwnMixer(modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    """A mixer whose forward is not that of transformers."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states.cumsum(dim=1), **kwargs)


def test_a_mixer_that_is_not_known() -> None:
    model = tiny.model_of("qwen3_next")
    model.model.layers[0].linear_attn.__class__ = OwnMixer
    with pytest.raises(ValueError, match=r"Qwen3NextModel has layers of type \['linear_attention'\], in a module"):
        run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh))


def test_a_convolution_that_is_not_known() -> None:
    model = tiny.model_of("llama")
    model.model.layers[1].mlp.conv = torch.nn.Conv1d(64, 64, 4, groups=64)
    with pytest.raises(ValueError, match=r"has a convolution, layers\.1\.mlp\.conv, in a module"):
        run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh))


def test_a_mixer_whose_forward_was_replaced() -> None:
    model = tiny.model_of("bamba")
    mixer = model.model.layers[0].mamba
    mixer.forward = mixer.forward
    with pytest.raises(ValueError, match="the forward of a BambaMixer was replaced"):
        run_ranks(1, lambda rank, mesh: hf.context_parallel(model, mesh))


def test_a_mixer_that_no_plan_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute on a shard as if that were a whole batch."""
    monkeypatch.setattr(table, "_BEHIND", ())
    models = tiny.copies(tiny.model_of("jamba"), 2)
    with pytest.raises(ValueError, match="JambaMambaMixer was called without the plan of its batch"):
        run_ranks(2, _train, models, BATCH)


def test_classes_stay_as_they_were() -> None:
    """A second model of the class, without context parallelism, computes with transformers' functions."""
    functions = dict(vars(modeling_qwen3_next))
    model, other = tiny.model_of("qwen3_next"), tiny.model_of("qwen3_next", seed=7)
    want = tiny.step(copy.deepcopy(other), BATCH)
    run_ranks(1, lambda rank, mesh: tiny.step(hf.context_parallel(model, mesh), BATCH))
    got = tiny.step(other, BATCH)
    assert got[0] == want[0] and all(torch.equal(got[1][name], x) for name, x in want[1].items())
    assert all(vars(modeling_qwen3_next)[name] is x for name, x in functions.items())
