"""Hugging Face models with layers that carry a state along the sequence."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import DynamicCache
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

import spanwise
from spanwise import recurrence
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import mixers
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


def test_gates_that_underflow() -> None:
    """RecurrentGemma multiplies a state by 0; the logarithm of that has no gradient."""
    model = tiny.model_of("recurrent_gemma")
    with torch.no_grad():
        model.model.layers[0].temporal_block.rg_lru.recurrent_param[::3] = 60.0
    tiny.check(run_ranks(2, _train, tiny.copies(model, 2), BATCH), tiny.reference(model, DOCUMENTS))


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


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _halves() -> dict[str, tuple[Any, Any, list[torch.Tensor], list[int | None], int]]:
    """transformers' function and ours, arguments in bfloat16, their dims of 60 tokens, and that of the result."""
    q, k, v = (_normal(1, 60, 4, 8, seed=seed) for seed in range(3))
    decay, beta = -0.1 * _normal(1, 60, 4).abs().float(), _normal(1, 60, 4).sigmoid()
    x, weight = _normal(1, 12, 60), _normal(12, 4)
    wide, rates = _normal(1, 60, 4, 16), -_normal(4).abs().float()
    return {
        "delta rule": (
            lambda *args: modeling_qwen3_next.torch_chunk_gated_delta_rule(*args, use_qk_l2norm_in_kernel=True)[0],
            lambda *args: mixers.delta_rule(*args, use_qk_l2norm_in_kernel=True)[0],
            [q, k, v, decay, beta], [1] * 5, 1,
        ),
        "convolution": (
            lambda x, weight: modeling_qwen3_next.causal_conv1d_fn(x, weight, None, "silu"),
            lambda route, x, weight: mixers.causal_conv1d(route, x, weight, None, "silu"),
            [x, weight], [2, None], 2,
        ),
        "Mamba-2": (
            lambda *args: modeling_mamba2.mamba2_chunk_scan(*args, chunk_size=16),
            lambda *args: mixers.mamba2_chunk_scan(*args, chunk_size=16),
            [wide, decay.neg(), rates, q, k], [1, 1, None, 1, 1], 1,
        ),
        "Mamba": (
            modeling_mamba.mamba_selective_scan, mixers.mamba_selective_scan,
            [x, x.abs(), -_normal(12, 8).abs().float(), *_normal(2, 1, 8, 60).unbind()], [2, 2, None, 2, 2], 2,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["delta rule", "convolution", "Mamba-2", "Mamba"])
def test_bfloat16_rounds_no_more_than_on_one_device(name: str) -> None:
    """Outputs and gradients: the root mean square error is at most 1.1 of that of transformers' function."""
    theirs, ours, args, dims, out_dim = _halves()[name]
    plan = spanwise.make_plan(spanwise.SpanMask.causal(60), 2, balancer="head_tail", block_size=4)

    def alone(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(torch.promote_types(x.dtype, dtype)).requires_grad_() for x in args]
        out = theirs(*leaves)
        return [out, *torch.autograd.grad((out.float() * cotangent).sum(), leaves)]

    def on_rank(rank: int, mesh: Any) -> Any:
        leaves = [x if d is None else plan.shard(x, rank, dim=d) for x, d in zip(args, dims, strict=True)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = ours(recurrence.recurrence_route(plan, mesh), *leaves)
        loss = (out.float() * plan.shard(cotangent, rank, dim=out_dim)).sum()
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    cotangent = torch.ones(())
    cotangent = torch.randn(alone(torch.float32)[0].shape, generator=torch.Generator().manual_seed(9))
    exact, rounded, results = alone(torch.float32), alone(torch.bfloat16), run_ranks(2, on_rank)
    for number, (want, one) in enumerate(zip(exact, rounded, strict=True)):
        dim = [out_dim, *dims][number]
        parts = [result[number].float() for result in results]
        if dim is None:
            got = parts[0] + parts[1]
        else:
            restore = plan.layout.restore_indices()[0]
            got = torch.cat(parts, dim=dim).index_select(dim, restore)
        errors = [(x.float() - want).square().mean().sqrt().item() for x in (got, one)]
        assert errors[0] <= 1.1 * errors[1] + 1e-6 * want.square().mean().sqrt().item(), (name, number, errors)


@pytest.mark.parametrize(("name", "argument"), [("qwen3_next", "past_key_values"), ("mamba2", "cache_params")])
def test_a_state_cache_with_a_plan(name: str, argument: str) -> None:
    model = tiny.model_of(name)

    def on_rank(rank: int, mesh: Any) -> None:
        cache = {argument: DynamicCache(config=model.config)}
        prepared = hf.context_parallel(model, mesh)
        with pytest.raises(ValueError, match=f"{argument} does not go with context parallelism: a KV cache"):
            hf.prepare(BATCH | cache, prepared)
        with pytest.raises(ValueError, match="trains behind a KV cache.*use LoRA"):
            prepared(**BATCH, **cache)

    run_ranks(1, on_rank)


class OwnMixer(modeling_qwen3_next.Qwen3NextGatedDeltaNet):
    """A mixer whose forward is not that of transformers."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states.cumsum(dim=1), **kwargs)


def test_a_mixer_that_is_not_known() -> None:
    model = tiny.model_of("qwen3_next")
    model.model.layers[0].linear_attn.__class__ = OwnMixer
    with pytest.raises(ValueError, match=r"Qwen3NextModel has layers of type .linear_attention., in a module"):
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
    monkeypatch.setattr(mixers, "_BEHIND", ())
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
