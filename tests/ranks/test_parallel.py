"""ContextParallel as a parallelize_module plan: numbers on every rank, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention

import spanwise
from spanwise import ContextParallel, SpanMask
from tests.oracle import make_problem
from tests.ranks.calls import errors, step
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTH = 37
MASK = SpanMask.documents([0, 1, 20, LENGTH])
PLAN = spanwise.make_plan(MASK, 2, balancer="lpt", block_size=4)
CAUSAL = spanwise.make_plan(SpanMask.causal(LENGTH), 2, block_size=4)


class SDPA(nn.Module):
    def forward(self, q, k, v, attn_mask=None, *, is_causal=False, enable_gqa=True, dropout_p=0.0, **_):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)


class AlwaysCausal(nn.Module):
    def forward(self, query, key, value, is_causal=True):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


class Scaled(nn.Module):
    def forward(self, q, k, v, *, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=0.5)


class Flex(nn.Module):
    def forward(self, q, k, v, block_mask=None, *, score_mod=None):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class TokensFirst(nn.Module):
    def forward(self, q, k, v, *, attn_mask=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True).transpose(1, 2)


class Varlen(nn.Module):
    """As `torch.nn.attention.varlen.varlen_attn`, which is for a GPU, sequence by sequence."""

    def forward(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=None):
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == cu_seq_q.diff().max()
        parts = [[x.transpose(0, 1) for x in y.tensor_split(cu_seq_q[1:-1].tolist())] for y in (query, key, value)]
        options = {"is_causal": (window_size or (-1, 0)) == (-1, 0), "scale": scale, "enable_gqa": True}
        out = [F.scaled_dot_product_attention(*qkv, **options) for qkv in zip(*parts, strict=True)]
        return torch.cat(out, 1).transpose(0, 1)


def run(
    inner: type[nn.Module], style: dict[str, Any], call: Callable[..., Any], plan: spanwise.Plan = PLAN,
    heads: tuple[int, int] = (4, 2), scale: float = 1.0,
) -> None:  # fmt: skip
    """Apply the style and make one call with gradients; `scale` is that of the module, as a factor of the usual one."""
    varlen, dim = style.get("attention_type") == "varlen", style.get("seq_dim", 2)
    problem = make_problem(plan.masks.get(style.get("mask_name"), plan.mask()).dense(), heads=heads)
    problem = problem._replace(q=problem.q / scale, dq=problem.dq * scale)

    def on_rank(rank: int, mesh: Any) -> list[float]:
        model: Any = nn.ModuleDict({"layers": nn.ModuleList([inner()])}).eval()
        mesh = mesh["cp"] if mesh.ndim == 1 else mesh["outer", "inner"]
        applied = ContextParallel(**{"attention_type": "sdpa"} | style)
        parallelize_module(model, mesh, {"layers.*": applied})
        assert applied.num_applied == 1

        def attend(*qkv: Any) -> torch.Tensor:
            given = [x.squeeze(0).transpose(0, 1) if varlen else x.transpose(dim, 2) for x in qkv[:3]]
            out = call(model["layers"][0], given, plan, mesh)
            return out.transpose(0, 1).unsqueeze(0) if varlen else out.transpose(dim, 2)

        return errors(plan, rank, problem, step(plan, mesh, problem, attend))

    axes: dict[str, Any] = {}
    if 1 < plan.inner < plan.num_ranks:  # beside another axis, as beside data parallelism
        axes = {"mesh_shape": (1, plan.num_groups, plan.inner), "mesh_dim_names": ("dp", "outer", "inner")}
    for found in run_ranks(plan.num_ranks, on_rank, **axes):
        assert max(found) <= 1e-10


def on(num_ranks: Any, exchange: str) -> dict[str, Any]:
    return {"plan": spanwise.make_plan(MASK, num_ranks, balancer="lpt", exchange=exchange, block_size=4)}


def with_mask(layer: Any, t: Any, plan: Any, mesh: Any) -> Any:
    return layer(*t, attn_mask=plan)


VARLEN = {"attention_type": "varlen"}
PACKING = spanwise.Packing([0, 5, 5, 12, 13], cu_seqlens_q_padded=[0, 8, 16, 32, 40])
TWO = {"default": MASK, "full": SpanMask.causal(LENGTH)}
# A module, its style, a call, and more of `run`.
RIGHT: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "positional": (SDPA, {}, lambda layer, t, plan, mesh: layer(*t, plan), on((2, 2), "needed")),
    "all keywords, RankPlan": (
        SDPA, {}, lambda layer, t, plan, mesh: layer(q=t[0], k=t[1], v=t[2], attn_mask=plan.local(mesh)), {},
    ),
    "heads traded, tokens first": (TokensFirst, {"seq_dim": 1}, with_mask, on(4, "ulysses")),
    "the style's plan": (
        AlwaysCausal, {"plan": CAUSAL}, lambda layer, t, plan, mesh: layer(*t), {"plan": CAUSAL, "heads": (4, 4)},
    ),
    "a named mask": (SDPA, {"mask_name": "full"}, with_mask, {"plan": spanwise.make_plan(TWO, 2, block_size=4)}),
    "a declared scale": (Scaled, {"scale": 0.5}, with_mask, {"heads": (4, 4), "scale": 0.5 * math.sqrt(8)}),
    "a packing with padding": (SDPA, {}, with_mask, {"plan": spanwise.make_plan(
        PACKING.mask(), (2, 2), balancer="dual_chunk", packing=PACKING, exchange="needed")}),
    "varlen": (Varlen, VARLEN, lambda layer, t, plan, mesh: layer(*t, plan, plan, 20, 20), {}),
    "varlen, keywords, RankPlan": (
        Varlen, VARLEN,
        lambda layer, t, plan, mesh: layer(*t, cu_seq_q=plan.local(mesh), cu_seq_k=None, max_q=0, max_k=0), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_modules(name: str) -> None:
    inner, style, call, more = RIGHT[name]
    run(inner, style, call, **more)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * (kv_idx - q_idx)


def flex_steps(rank: int, mesh: Any, score_mod: Any) -> list[list[torch.Tensor]]:
    """A process of its own: flex_attention compiles for the probe, which other threads would notice.

    PyTorch's flex_attention has no CPU backward; the style runs the sdpa or the reference kernel there.
    """
    module, problem = Flex(), make_problem(MASK.dense())
    parallelize_module(module, mesh["cp"], ContextParallel(attention_type="flex"))
    calls: list[Callable[..., Any]] = [
        lambda *t: module(*t[:4], score_mod=score_mod),
        lambda *t: module(q=t[0], k=t[1], v=t[2], block_mask=PLAN, score_mod=score_mod),
        lambda *t: spanwise.context_parallel_attention(*t, score_mod=score_mod, kernel="reference"),
    ]
    found = [step(PLAN, mesh, problem, call) for call in calls]
    assert score_mod or all(max(errors(PLAN, rank, problem, got)) <= 1e-10 for got in found)
    return found


@pytest.mark.parametrize("score_mod", [None, alibi])
def test_flex_module_on_cpu_with_gradients(gloo_pool: GlooPool, score_mod: Any) -> None:
    """A score_mod of the call sees global positions, as that of the function does."""
    for results in gloo_pool.run(2, flex_steps, score_mod):
        for got in results[:2]:
            for x, y in zip(got, results[2], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- refused


class NotAttention(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return q.sum()


class DropoutInTraining(nn.Module):
    """Called in eval mode here: the dropout of training shows only if the probe runs in training mode as well."""

    def forward(self, q, k, v, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.5 if self.training else 0.0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, attn_mask=None):
        return self.gate * F.scaled_dot_product_attention(q, k, v, attn_mask)


OFFSETS, DENSE = torch.tensor([0, LENGTH]), torch.ones(19, 37, dtype=torch.bool)
# A call that must be refused, what the error names, and of which module under which style.
WRONG: list[tuple[Callable[..., Any], str, type[nn.Module], dict[str, Any]]] = [
    (lambda layer, t, plan, mesh: layer(*t), "without a mask", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, is_causal=True), "is_causal=True", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, is_causal=True), "causal mask", SDPA, {"plan": PLAN}),
    (lambda layer, t, plan, mesh: layer(*t, DENSE), "a Tensor", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, MASK.block_mask("cpu")), "a BlockMask", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, plan, dropout_p=0.1), "dropout_p=0.1", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, plan, window=3), "window=3", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, plan, block_mask=DENSE), "two masks", SDPA, {}),
    (lambda layer, t, plan, mesh: layer(*t, OFFSETS, None, 37, 37), "a Tensor.*cu_seq_q=plan", Varlen, VARLEN),
    (lambda layer, t, plan, mesh: layer(*t, plan, OFFSETS, 37, 37), "cu_seq_k", Varlen, VARLEN),
    (lambda layer, t, plan, mesh: layer(*t, plan, plan, 37, 37, window_size=(9, 0)), "window_size=", Varlen, VARLEN),
    (with_mask, "not an attention call", NotAttention, {}),
    (with_mask, "something other", DropoutInTraining, {}),
    (with_mask, r"\['gate'\]", Gated, {}),
    (with_mask, "something other", Scaled, {}),
]  # fmt: skip


@pytest.mark.parametrize(("call", "names", "inner", "style"), WRONG)
def test_calls_and_modules_that_cannot_be_right_are_refused(
    call: Any, names: str, inner: type[nn.Module], style: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=names):
        run(inner, style, call)


def test_bad_styles() -> None:
    varlen = {"attention_type": "varlen", "seq_dim": 1}
    for options in ({"attention_type": "flash"}, {"seq_dim": 3}, {"plan": MASK}, varlen):
        with pytest.raises(ValueError, match=list(options)[-1]):
            ContextParallel(**options)
