"""Rows that travel in place of K and V, expanded where they arrive: outputs and all gradients against one device."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import AuxRequest, SpanMask
from tests.oracle import dense_attention
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


@dataclasses.dataclass
class Expected:
    """Whole tensors in float64: inputs, cotangents, and what one device makes of them."""

    inputs: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    expansion: Expansion
    results: list[torch.Tensor]


def expected(mask: SpanMask, batch: int) -> Expected:
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
    request = AuxRequest(lse=True)
    attend = spanwise.context_parallel_attention if attend is None else attend
    out, aux = attend(*own, plan.local(mesh), expand=expansion, return_aux=request, **options)
    lse = aux.lse.masked_fill(aux.lse.isinf(), 0)
    living = sum(made() is not None for made in expansion.made)
    torch.autograd.backward([out, lse], [spanwise.shard(plan, mesh, x.to(dtype), dim=2) for x in whole.cotangents])
    return [out.detach(), *(x.grad for x in own)], [x.grad for x in expansion.parameters()], living


def check(whole: Expected, plan: spanwise.Plan, results: list[Any], tolerance: float) -> None:
    for rank, (got, _, living) in enumerate(results):
        assert living == 0  # nothing that was expanded is saved
        for x, reference in zip(got, whole.results, strict=True):
            error = (x.double() - plan.shard(reference, rank, dim=2)).abs()
            assert float(error.max() if error.numel() else 0) <= tolerance * max(1.0, float(reference.abs().max())), (
                rank
            )
    for i, parameter in enumerate(whole.expansion.parameters()):
        total = sum(weights[i].double() for _, weights, _ in results if weights[i] is not None)
        assert float((total - parameter.grad).abs().max()) <= tolerance * max(1.0, float(parameter.grad.abs().max()))


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
    results = run_ranks(num_ranks, lambda rank, mesh: step(whole, plan, mesh, dtype, kernel=kernel))
    check(whole, plan, results, tolerance)


def test_one_token_a_rank_in_batch_rows_of_their_own() -> None:
    mask = SpanMask.stack([SpanMask.causal(3), SpanMask.full(3)])
    whole = expected(mask, 2)
    plan = spanwise.make_plan(mask, 3, balancer="contiguous", exchange="needed", block_size=1)
    results = run_ranks(3, lambda rank, mesh: step(whole, plan, mesh, torch.float32, kernel="sdpa"))
    check(whole, plan, results, 1e-5)


@pytest.mark.parametrize("exchange", [{"exchange": "needed", "stages": 2}, {"exchange": "ring"}], ids=named)
def test_absorbed(exchange: dict[str, Any]) -> None:
    """Queries in the space of latents, of which all heads read the one that travels."""
    mask = MASKS["documents"]
    whole = expected(mask, 1)
    plan = spanwise.make_plan(mask, 3, **exchange, block_size=8)
    with torch.no_grad():  # a bias of K shifts all scores of a row alike; that of V is not absorbed
        whole.expansion.up.bias.zero_()
        weight = whole.expansion.up.weight.unflatten(0, (HEADS, -1)).clone()
    into, back = weight.split([NOPE, V_DIM], dim=1)
    leaves = [x.detach().requires_grad_() for x in whole.inputs]
    want = dense_attention(leaves[0], *whole.expansion(*leaves[1:]), torch.from_numpy(mask.dense()))[0]
    wanted = [want, *torch.autograd.grad(want, leaves, whole.cotangents[0])]

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        own = [spanwise.shard(plan, mesh, x.detach(), dim=2).requires_grad_() for x in whole.inputs]
        q = torch.cat([own[0][..., :NOPE] @ into, own[0][..., NOPE:]], dim=-1)
        out = spanwise.context_parallel_attention(
            q, *own[1:], plan.local(mesh), kernel="reference", scale=(NOPE + ROPE) ** -0.5,
            expand=lambda latents, rotary: (torch.cat([latents, rotary], dim=-1), latents),
        )  # fmt: skip
        out = out @ back.mT
        return [out, *torch.autograd.grad(out, own, spanwise.shard(plan, mesh, whole.cotangents[0], dim=2))]

    for rank, results in enumerate(run_ranks(3, on_rank)):
        for got, reference in zip(results, wanted, strict=True):
            torch.testing.assert_close(got, plan.shard(reference, rank, dim=2), rtol=1e-10, atol=1e-10)


def test_under_a_checkpoint() -> None:
    mask = SpanMask.documents([0, 20, 67])
    whole, plan = expected(mask, 1), spanwise.make_plan(mask, 2, exchange="needed", stages=2, block_size=4)

    def attend(*tensors: Any, **options: Any) -> Any:
        def call(*tensors: Any) -> Any:
            return spanwise.context_parallel_attention(*tensors, kernel="reference", **options)

        return checkpoint(call, *tensors, use_reentrant=False)

    results = run_ranks(2, lambda rank, mesh: step(whole, plan, mesh, torch.float64, attend))
    check(whole, plan, results, 1e-10)


def compiled_step(rank: int, mesh: DeviceMesh, num_plans: int) -> tuple[list[Any], int]:
    """`step` of several plans through one compiled function; and the number of its graphs."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, example)

    attend = torch.compile(spanwise.context_parallel_attention, fullgraph=True, backend=backend)
    found = []
    for i in range(num_plans):
        whole, plan = case(i)
        found.append(step(whole, plan, mesh, torch.float32, attend))
    return found, graphs


def case(i: int) -> tuple[Expected, spanwise.Plan]:
    mask = SpanMask.documents([0, 20 + 5 * i, 67])
    return expected(mask, 1), spanwise.make_plan(mask, 2, exchange="needed", stages=2, block_size=4)


def test_autocast_holds_where_rows_are_expanded_again() -> None:
    mask = SpanMask.documents([0, 20, 67])
    whole, plan = expected(mask, 1), spanwise.make_plan(mask, 2, exchange="needed", stages=2, block_size=4)

    def attend(*args: Any, **options: Any) -> Any:
        *tensors, rank_plan = args
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = (x.bfloat16() for x in tensors)
            return spanwise.context_parallel_attention(q, k, v, rank_plan, **options)

    check(whole, plan, run_ranks(2, lambda rank, mesh: step(whole, plan, mesh, torch.float32, attend)), 5e-2)


def test_nothing_in_padding_spreads() -> None:
    packing = spanwise.Packing([0, 20, 60], cu_seqlens_q_padded=[0, 24, 67])
    mask = packing.mask()
    whole, plan = expected(mask, 1), spanwise.make_plan(mask, 2, packing=packing, exchange="all_gather", block_size=4)

    def results() -> list[Any]:
        return run_ranks(2, lambda rank, mesh: step(whole, plan, mesh, torch.float64, kernel="reference"))

    before = results()
    check(whole, plan, before, 1e-10)
    for x in whole.inputs:
        x.data[:, :, torch.from_numpy(~packing.valid_q)] = torch.nan
    for (x, weights, _), (y, others, _) in zip(before, results(), strict=True):
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


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(2, compiled_step, 3)
    for i in range(3):
        check(*case(i), [found[i] for found, _ in results], 1e-5)
    assert max(graphs for _, graphs in results) <= 2
