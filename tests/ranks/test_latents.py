"""Rows that travel in place of K and V, expanded where they arrive: outputs and all gradients against one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import spanwise
from spanwise import SpanMask
from tests.oracle import dense_attention, expanded, make_problem, relative_error
from tests.pairs import covering
from tests.properties.cases import Case, check
from tests.ranks.calls import CU_SEQLENS, EXCHANGES
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import Setting

DOCUMENTS = SpanMask.documents(CU_SEQLENS)


CELLS = covering(
    EXCHANGES, [(1, 1), (2, 1), (3, 1), (4, 1)],
    ["causal", "documents", "windows", "two spans", "nothing", "three tokens", "rows", "padded"],
    ["contiguous", "head_tail"], [("reference", "float64"), ("sdpa", "float32")],
    [{}, {"sinks": 1}, {"gradients": False}, {"softcap": 3.0}, {"rank_plan": False}],
    [((12, 12), (8, 6)), ((24, 6), (7, 4))], ["eager", "checkpoint", "twice", "some"],
    possible=lambda *cell: Setting(*cell).possible(),
)  # fmt: skip


@pytest.mark.parametrize("setting", [Setting(*cell) for cell in CELLS], ids=str)
def test_matches_one_device(setting: Setting) -> None:
    """Heads share the rotary part of K, whose dim is that of q less that of V. Padding holds NaN."""
    check(dataclasses.replace(setting.case(), latents=3), run_ranks)


@pytest.mark.parametrize("exchange", ["needed", "ring"])
def test_absorbed(exchange: str) -> None:
    """Queries in the space of latents, of which all heads read the one that travels: V is K's first part."""
    mask = SpanMask.documents(CU_SEQLENS)
    problem = make_problem(mask.dense(), heads=(12, 1), dims=(5, 3))
    latents, rope = problem.k.split([3, 2], -1)
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


def test_autocast_holds_where_rows_are_expanded_again() -> None:
    """A weight of float32 beside rows of bfloat16."""
    plan = spanwise.make_plan(DOCUMENTS, 2, exchange="needed", stages=2, block_size=4)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 67, 8), (1, 1, 67, 3), (1, 1, 67, 2), (1, 4, 67, 6), (4, 3, 12)
    q, latents, rope, cotangent, up = (torch.randn(shape, generator=generator) for shape in shapes)

    def results(place: Any, attend: Any) -> list[torch.Tensor]:
        own = [x.requires_grad_() for x in (*(place(x) for x in (q, latents, rope)), up.clone())]
        out = attend(*own)
        return torch.autograd.grad(out, own, place(cotangent).to(out.dtype))

    def dense(q: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, *expanded(latents, rope, up), torch.from_numpy(DOCUMENTS.dense()))[0]

    def attend(local: Any, q: Any, latents: Any, rope: Any, up: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):

            def expand(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return expanded(torch.nn.functional.linear(latents, torch.eye(3)), rope, up)

            return spanwise.context_parallel_attention(
                q.bfloat16(), latents.bfloat16(), rope.bfloat16(), local, expand=expand
            )

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        call = functools.partial(attend, plan.local(mesh))
        return results(lambda x: spanwise.shard(plan, mesh, x.detach(), dim=2), call)

    wanted, found = results(lambda x: x.detach().double(), dense), run_ranks(2, on_rank)
    for rank, got in enumerate(found):
        for x, want in zip(got[:3], wanted[:3], strict=True):
            assert relative_error(x, plan.shard(want, rank, dim=2)) <= 5e-2
    assert relative_error(sum(got[3] for got in found), wanted[3]) <= 5e-2


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
@pytest.mark.parametrize("exchange", ["needed", "ulysses"])
def test_compiled(gloo_pool: GlooPool, exchange: str) -> None:
    case = Case({"default": DOCUMENTS}, levels=(2, 1), exchange=exchange, style="compiled by aot_eager", latents=3)
    check(case, gloo_pool.run)
