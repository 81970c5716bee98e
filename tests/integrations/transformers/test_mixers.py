"""Hugging Face models with layers that carry a state along the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

import spanwise
from spanwise import recurrence
from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import mixers
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_exact import MIXERS
from tests.ranks.harness import run_ranks

LENGTHS = (23, 41, 7, 30, 1)
DOCUMENTS = tiny.documents_of(LENGTHS)
BATCH = tiny.packed(DOCUMENTS)


def test_plans_price_states() -> None:
    config = tiny.config_of("qwen3_next")
    (each,) = (hf.make_plan(BATCH, config, 2).recurrences or {}).values()
    assert (each.layers, each.heads, each.key_dim, each.value_dim) == (2, 4, 8, 12)
    assert hf.make_plan(BATCH, config, 2, recurrences=None).recurrences is None
    for name in (*MIXERS, "llama"):
        priced = hf.make_plan(BATCH, tiny.config_of(name), 2).recurrences
        assert (priced is not None) == (name not in ("minimax", "llama")), name


def test_plans_price_latents() -> None:
    """Beside the states of other layers, too."""
    for name, row in (("deepseek_v3", 24), ("kimi_linear", 24), ("llama", None)):
        plan = hf.make_plan(BATCH, tiny.config_of(name), 2, num_q_heads=4, head_dim=24, v_head_dim=16)
        sent = plan.recv_tokens("full_attention") * 2 * (row or 4 * (24 + 16))
        assert plan.kv_row_dim == row and (plan.recv_bytes("full_attention") == sent).all() and sent.any(), name
    both = [tiny.config_of(name) for name in ("deepseek_v3", "llama")]
    assert hf.make_plan(BATCH, both, 2).kv_row_dim is None


def test_a_model_without_attention_is_cut_into_runs() -> None:
    """Nothing speaks against one run a rank, and the fewest states travel."""
    plan = hf.make_plan(BATCH, tiny.config_of("mamba2"), 4)
    assert sorted(plan.masks) == ["linear_attention"]
    assert [len(plan.layout.runs(rank)) for rank in range(4)] == [1] * 4
    assert plan.layout.tokens_per_rank.max() <= 26


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
