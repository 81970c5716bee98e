"""Rows that travel in place of K and V, expanded where they arrive: outputs and all gradients against one device."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import AuxRequest, SpanMask
from tests.oracle import dense_attention, make_problem
from tests.pairs import covering, named
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, LENGTH
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

# Latents [B, 1, T, LATENT] and rotary keys [B, 1, T, ROPE] travel.
HEADS, NOPE, ROPE, V_DIM, LATENT = 12, 6, 2, 5, 3
KERNELS = {"reference": (torch.float64, 1e-10), "sdpa": (torch.float32, 1e-5)}  # dtype and tolerance
MASKS = {
    "causal": SpanMask.causal(LENGTH),
    "documents": SpanMask.documents(CU_SEQLENS),
    "window": SpanMask.sliding_window(LENGTH, 9, 2),
    "two spans": SpanMask.block_causal(LENGTH, 8, num_previous=1, global_tokens=3),
    "nothing": SpanMask(np.zeros((1, LENGTH), int), np.zeros((1, LENGTH), int), LENGTH),
}


class Expansion(torch.nn.Module):
    """As in multi-head latent attention: K and V from latents, and a rotary part of K that heads share."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = torch.nn.Linear(LATENT, HEADS * (NOPE + V_DIM), dtype=dtype)
        self.made: list[weakref.ref[Any]] = []

    def forward(self, latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.up(latents).unflatten(-1, (HEADS, -1)).squeeze(1).transpose(1, 2)
        k, v = both.split([NOPE, V_DIM], dim=-1)
        k = torch.cat([k, rope.expand(-1, HEADS, -1, -1)], dim=-1)
        if not torch.compiler.is_compiling() and k.numel():
            self.made.append(weakref.ref(k.untyped_storage()))
        return k, v


class Expected(NamedTuple):
    """Whole tensors in float64: inputs, cotangents, and what one device makes of them."""

    inputs: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    expansion: Expansion
    results: list[torch.Tensor]


def expected(mask: SpanMask, batch: int = 1) -> Expected:
    torch.manual_seed(0)
    shapes = (HEADS, NOPE + ROPE), (1, LATENT), (1, ROPE)
    inputs = [torch.randn(batch, h, mask.q_len, d, dtype=torch.float64, requires_grad=True) for h, d in shapes]
    expansion = Expansion(torch.float64)
    dense = torch.from_numpy(mask.dense())
    out, lse = dense_attention(inputs[0], *expansion(*inputs[1:]), dense)
    cotangents = [torch.randn_like(out), torch.randn_like(lse) * dense.any(-1)[:, None]]
    torch.autograd.backward([out, lse], cotangents)
    return Expected(inputs, cotangents, expansion, [out.detach(), *(x.grad for x in inputs)])


def step(
    whole: Expected, plan: spanwise.Plan, mesh: Any, dtype: torch.dtype, attend: Any = None, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], int]:
    """out and the gradients of a rank's inputs, those of the weights, and the expanded K that live after a forward."""
    expansion = Expansion(dtype)
    expansion.load_state_dict(whole.expansion.state_dict())
    own = [spanwise.shard(plan, mesh, x.detach().to(dtype), dim=2).requires_grad_() for x in whole.inputs]
    attend = attend or spanwise.context_parallel_attention
    out, aux = attend(*own, plan.local(mesh), expand=expansion, return_aux=AuxRequest(lse=True), **options)
    lse = aux.lse.masked_fill(aux.lse.isinf(), 0)
    living = sum(made() is not None for made in expansion.made)
    torch.autograd.backward([out, lse], [spanwise.shard(plan, mesh, x.to(dtype), dim=2) for x in whole.cotangents])
    return [out.detach(), *(x.grad for x in own)], [x.grad for x in expansion.parameters()], living


def check(whole: Expected, plan: spanwise.Plan, results: list[Any], tolerance: float) -> None:
    def close(x: torch.Tensor, part: torch.Tensor, reference: torch.Tensor) -> None:
        error = (x.double() - part).abs()
        assert float(error.max() if error.numel() else 0) <= tolerance * max(1.0, float(reference.abs().max()))

    for rank, (got, _, living) in enumerate(results):
        assert living == 0  # nothing that was expanded is saved
        for x, reference in zip(got, whole.results, strict=True):
            close(x, plan.shard(reference, rank, dim=2), reference)
    for i, parameter in enumerate(whole.expansion.parameters()):
        close(sum(w[i].double() for _, w, _ in results if w[i] is not None), parameter.grad, parameter.grad)


def on_threads(whole: Expected, plan: spanwise.Plan, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(plan.num_ranks, lambda rank, mesh: step(whole, plan, mesh, *args, **options))


@pytest.mark.parametrize(
    ("exchange", "num_ranks", "name", "kernel", "batch"),
    covering(EXCHANGES, [1, 2, 3, 4], sorted(MASKS), sorted(KERNELS), [1, 2]),
    ids=named,
)
def test_matches_one_device(exchange: dict[str, Any], num_ranks: int, name: str, kernel: str, batch: int) -> None:
    dtype, tolerance = KERNELS[kernel]
    mask = MASKS[name] if batch == 1 else SpanMask.stack([MASKS[name], SpanMask.causal(LENGTH)])
    whole = expected(mask, batch)
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", **exchange, block_size=8)
    check(whole, plan, on_threads(whole, plan, dtype, kernel=kernel), tolerance)


@pytest.mark.parametrize("exchange", ["needed", "ring"])
def test_absorbed(exchange: str) -> None:
    """Queries in the space of latents, of which all heads read the one that travels: V is K's first part."""
    mask = MASKS["documents"]
    problem = make_problem(mask.dense(), heads=(HEADS, 1), dims=(LATENT + ROPE, LATENT))
    latents, rope = problem.k.split([LATENT, ROPE], -1)
    visible, plan = torch.from_numpy(mask.dense()), spanwise.make_plan(mask, 3, exchange=exchange, block_size=8)

    def results(attend: Any, place: Any) -> list[torch.Tensor]:
        own = [place(x).requires_grad_() for x in (problem.q, latents, rope)]
        out = attend(*own)
        return [out, *torch.autograd.grad(out, own, place(problem.grad_out))]

    def dense(q: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, torch.cat([latents, rope], -1), latents, visible)[0]

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        attend = functools.partial(
            spanwise.context_parallel_attention, plan=plan.local(mesh), kernel="reference",
            expand=lambda latents, rope: (torch.cat([latents, rope], -1), latents),
        )  # fmt: skip
        return results(attend, lambda x: spanwise.shard(plan, mesh, x.detach(), dim=2))

    wanted = results(dense, lambda x: x.detach().clone())
    for rank, found in enumerate(run_ranks(3, on_rank)):
        for got, reference in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, plan.shard(reference, rank, dim=2), rtol=1e-10, atol=1e-10)


def case(i: int) -> tuple[Expected, spanwise.Plan]:
    mask = SpanMask.documents([0, 20 + 5 * i, 67])
    return expected(mask), spanwise.make_plan(mask, 2, exchange="needed", stages=2, block_size=4)


def test_under_a_checkpoint() -> None:
    def attend(*tensors: Any, **options: Any) -> Any:
        call = functools.partial(spanwise.context_parallel_attention, kernel="reference", **options)
        return checkpoint(call, *tensors, use_reentrant=False)

    check(*case(0), on_threads(*case(0), torch.float64, attend), 1e-10)


def test_autocast_holds_where_rows_are_expanded_again() -> None:
    def attend(*args: Any, **options: Any) -> Any:
        *tensors, rank_plan = args
        with torch.autocast("cpu", torch.bfloat16):
            return spanwise.context_parallel_attention(*(x.bfloat16() for x in tensors), rank_plan, **options)

    check(*case(0), on_threads(*case(0), torch.float32, attend), 5e-2)


def test_nothing_in_padding_spreads() -> None:
    packing = spanwise.Packing([0, 20, 60], cu_seqlens_q_padded=[0, 24, 67])
    mask = packing.mask()
    whole, plan = expected(mask), spanwise.make_plan(mask, 2, packing=packing, exchange="all_gather", block_size=4)
    before = on_threads(whole, plan, torch.float64, kernel="reference")
    check(whole, plan, before, 1e-10)
    for x in whole.inputs:
        x.data[:, :, torch.from_numpy(~packing.valid_q)] = torch.nan
    after = on_threads(whole, plan, torch.float64, kernel="reference")
    for (x, weights, _), (y, others, _) in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x + weights, y + others, strict=True))


@pytest.mark.parametrize(
    ("rows", "expand"),
    [
        ((1, 1), 3),  # no function
        ((1, 2), lambda k, v: (k, v)),  # rows with different heads
        ((1, 1), lambda k, v: k),
        ((1, 1), lambda k, v: (k[:, :, 1:], v[:, :, 1:])),  # other tokens
        ((1, 1), lambda k, v: (k, v)),  # K of another head dim than q
    ],
)
def test_what_is_refused(rows: tuple[int, int], expand: Any) -> None:
    plan = spanwise.make_plan(SpanMask.causal(6), 1)
    k, v = (torch.randn(1, heads, 6, 3) for heads in rows)
    with pytest.raises(ValueError, match=r"expand|head dim"):
        spanwise.context_parallel_attention(torch.randn(1, 2, 6, 4), k, v, plan, None, expand=expand)


def compiled_step(rank: int, mesh: DeviceMesh, num_plans: int) -> tuple[list[Any], int]:
    """`step` of several plans through one compiled function; and the number of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    attend = torch.compile(spanwise.context_parallel_attention, fullgraph=True, backend=counter)
    found = [step(*case(i), mesh, torch.float32, attend) for i in range(num_plans)]
    return found, counter.frame_count


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(2, compiled_step, 3)
    for i in range(3):
        check(*case(i), [found[i] for found, _ in results], 1e-5)
    assert max(graphs for _, graphs in results) <= 2
