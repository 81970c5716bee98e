"""relayout: tokens move between the layouts of two plans, exactly, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

import spanwise
from tests.ranks.harness import run_ranks

BALANCERS = ("contiguous", "head_tail", "lpt", "local")


def _plan(length: int, ranks: int, balancer: str, block_size: int = 2, seed: int = 0) -> spanwise.Plan:
    rng = np.random.default_rng(seed)
    cuts = np.unique(np.concatenate([[0, length], rng.integers(0, length + 1, 3)]))
    mask = spanwise.SpanMask.documents(cuts)
    return spanwise.make_plan(mask, ranks, balancer=balancer, exchange="needed", block_size=block_size)


def _move(rank: int, mesh: Any, plans: Any, x: torch.Tensor, cotangent: torch.Tensor, dim: int) -> Any:
    before, after = plans
    mine = before.shard(x, rank, dim=dim).clone().requires_grad_(x.dtype.is_floating_point)
    moved = spanwise.relayout(mine, before, after, mesh, dim=dim)
    if mine.requires_grad:
        moved.backward(after.shard(cotangent, rank, dim=dim))
    return moved.detach(), mine.grad


def _check(plans: Any, shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float64) -> None:
    generator = torch.Generator().manual_seed(1)
    x, cotangent = (100 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    results = run_ranks(plans[0].num_ranks, _move, plans, x.to(dtype), cotangent.to(dtype), dim)
    for rank, (moved, grad) in enumerate(results):
        assert torch.equal(moved, plans[1].shard(x.to(dtype), rank, dim=dim))
        if dtype.is_floating_point:
            assert torch.equal(grad, plans[0].shard(cotangent.to(dtype), rank, dim=dim))


@settings(max_examples=40)
@given(
    length=st.integers(1, 40), ranks=st.integers(1, 4), block_size=st.integers(1, 9), seed=st.integers(0, 9),
    balancers=st.tuples(st.sampled_from(BALANCERS), st.sampled_from(BALANCERS)),
    place=st.sampled_from([((2, -1, 3), 1), ((-1,), 0), ((2, 5, -1), 2), ((2, -1), -1), ((-1, 2, 1, 3), 0)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]),
)  # fmt: skip
def test_any_two_layouts(
    length: int, ranks: int, block_size: int, seed: int, balancers: Any, place: Any, dtype: torch.dtype
) -> None:
    plans = [_plan(length, ranks, name, block_size, seed) for name in balancers]
    _check(plans, tuple(length if n == -1 else n for n in place[0]), place[1], dtype)


def test_rows_with_layouts_of_their_own() -> None:
    masks = [spanwise.SpanMask.documents([0, *cuts, 24]) for cuts in ((3, 9), (20,))]
    both = spanwise.SpanMask.stack(masks)
    apart = spanwise.make_plan(both, 3, balancer="local", exchange="needed", block_size=2)
    assert apart.layout.batch_size == 2
    together = _plan(24, 3, "contiguous")
    for plans in ([apart, together], [together, apart]):
        _check(plans, (2, 24, 5), dim=1)


def _bytes_moved(rank: int, mesh: Any, plans: Any) -> tuple[int, int]:
    way = spanwise.relayout_route(*plans, mesh)
    sent = [x.shape[0] for x in way.step.send_sizes]
    return sum(sent) - sent[rank], len(np.setdiff1d(plans[0].layout.indices(rank), plans[1].layout.indices(rank)))


def test_only_tokens_that_change_their_rank_travel() -> None:
    plans = [_plan(40, 4, "head_tail"), _plan(40, 4, "contiguous")]
    for sent, must in run_ranks(4, _bytes_moved, plans):
        assert sent == must
