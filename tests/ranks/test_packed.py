"""packed_attention on threaded ranks against dense float64 attention, sequence by sequence: results on every rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise import SpanMask
from spanwise.layouts.packing import Packing
from tests.pairs import named
from tests.ranks.harness import run_ranks
from tests.ranks.packed_problem import check, covering_ways, cumulative, make_packed, run, slots_for

KERNELS = ["reference", "sdpa"]
LENS = [0, 1, 13, 2, 0, 30, 21]
BALANCERS = ["contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local", "auto"]
READS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "causal window": {"causal": True, "window": (5, 0)},
    "window": {"causal": False, "window": (3, 4)},
    "window ahead": {"causal": False, "window": (0, 6)},
}


def ranks_of(num_ranks: int | tuple[int, int]) -> int:
    return math.prod(num_ranks) if isinstance(num_ranks, tuple) else num_ranks


# ---------------------------------------------------------------- without padding


@pytest.mark.parametrize(("num_ranks", "exchange", "reads"), covering_ways((2, 3, 4), list(READS.values())), ids=named)
def test_documents_of_any_length(num_ranks: Any, exchange: dict[str, Any], reads: dict[str, Any]) -> None:
    cu_seqlens = cumulative(LENS)
    problem = make_packed(Packing(cu_seqlens), **reads)
    plan = spanwise.make_plan(
        SpanMask.documents(cu_seqlens, **reads), num_ranks, balancer="head_tail", **exchange, block_size=8
    )
    check(problem, plan, run(problem, plan, kernel="sdpa"), 1e-10)


@pytest.mark.parametrize(("num_ranks", "exchange", "balancer"), covering_ways((3, 4), BALANCERS), ids=named)
def test_every_balancer(num_ranks: Any, exchange: dict[str, Any], balancer: str) -> None:
    packing = Packing(cumulative(LENS))
    problem = make_packed(packing)
    plan = spanwise.make_plan(packing.mask(), num_ranks, packing=packing, balancer=balancer, **exchange, block_size=8)
    check(problem, plan, run(problem, plan, kernel="sdpa"), 1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "lens", "kernel"), covering_ways((4,), [[1], [1, 0, 1, 1], [3, 2]], KERNELS), ids=named
)
def test_ranks_without_tokens(num_ranks: Any, exchange: dict[str, Any], lens: list[int], kernel: str) -> None:
    packing = Packing(cumulative(lens))
    problem = make_packed(packing)
    plan = spanwise.make_plan(packing.mask(), num_ranks, balancer="contiguous", **exchange, block_size=1)
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


# ---------------------------------------------------------------- with padding


def padded(num_ranks: Any, lens: list[int] = LENS) -> Packing:
    """Slots of a multiple of 2 P rows, and padding before the first and after the last."""
    multiple = 2 * ranks_of(num_ranks)
    offsets = cumulative(slots_for(lens, multiple), multiple)
    return Packing(cumulative(lens), cu_seqlens_q_padded=offsets, q_len=int(offsets[-1]) + 2 * multiple)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "reads", "kernel", "poison"),
    covering_ways((2, 3, 4), list(READS.values()), KERNELS, [math.nan, -math.inf]),
    ids=named,
)
def test_padding_is_zero_whatever_it_holds(
    num_ranks: Any, exchange: dict[str, Any], reads: dict[str, Any], kernel: str, poison: float
) -> None:
    packing = padded(num_ranks)
    plan = spanwise.make_plan(packing.mask(**reads), num_ranks, packing=packing, balancer="dual_chunk", **exchange)
    problem = make_packed(packing, **reads, poison=poison, with_grad_lse=True)
    assert not problem.q.isfinite().all() and not problem.grad_out.isfinite().all()
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "balancer"),
    covering_ways((3,), ["local", "lpt", "ptrr", "contiguous", "per_document_head_tail", "auto"]),
    ids=named,
)
def test_padding_with_other_balancers(num_ranks: Any, exchange: dict[str, Any], balancer: str) -> None:
    """They need no multiple of anything."""
    offsets = cumulative([0, 3, 17, 2, 4, 31, 25], first=5)
    packing = Packing(cumulative(LENS), cu_seqlens_q_padded=offsets, q_len=int(offsets[-1]) + 3)
    problem = make_packed(packing, poison=math.inf)
    plan = spanwise.make_plan(packing.mask(), num_ranks, packing=packing, balancer=balancer, **exchange, block_size=8)
    check(problem, plan, run(problem, plan, kernel="sdpa"), 1e-10)


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "balancer", "kernel"),
    covering_ways((2,), ["dual_chunk", "contiguous"], KERNELS),
    ids=named,
)
def test_nothing_but_padding(num_ranks: Any, exchange: dict[str, Any], balancer: str, kernel: str) -> None:
    packing = padded(num_ranks, [0, 0])
    problem = make_packed(packing)
    plan = spanwise.make_plan(packing.mask(), num_ranks, packing=packing, balancer=balancer, **exchange, block_size=2)
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


# ---------------------------------------------------------------- cross attention

Q_LENS, KV_LENS = [5, 0, 7, 1, 12, 3], [9, 4, 0, 1, 6, 3]
CROSS_READS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "top-left": {"causal": True, "align": "top_left"},
    "bottom-right": {"causal": True, "align": "bottom_right"},
    "window": {"causal": False, "window": (2, 3), "align": "bottom_right"},
}


def crossed(num_ranks: Any, balancer: str) -> Packing:
    """Queries and keys with lengths, slots, and storage before and after them of their own."""
    multiple = 2 * ranks_of(num_ranks) if balancer == "dual_chunk" else 1
    extra = 0 if balancer == "dual_chunk" else 2  # slots of the others need no multiple
    q_offsets = cumulative([n + extra for n in slots_for(Q_LENS, multiple)], multiple)
    kv_offsets = cumulative([n + extra * (s % 2) for s, n in enumerate(slots_for(KV_LENS, multiple))])
    return Packing(
        cumulative(Q_LENS),
        cu_seqlens_q_padded=q_offsets,
        cu_seqlens_kv=cumulative(KV_LENS),
        cu_seqlens_kv_padded=kv_offsets,
        kv_len=int(kv_offsets[-1]) + multiple,
    )


@pytest.mark.parametrize(
    ("num_ranks", "exchange", "balancer", "reads", "kernel"),
    covering_ways((2, 3, 4), ["dual_chunk", "contiguous"], list(CROSS_READS.values()), KERNELS),
    ids=named,
)
def test_cross_attention(
    num_ranks: Any, exchange: dict[str, Any], balancer: str, reads: dict[str, Any], kernel: str
) -> None:
    packing = crossed(num_ranks, balancer)
    problem = make_packed(packing, **reads)
    plan = spanwise.make_plan(packing.mask(**reads), num_ranks, packing=packing, balancer=balancer, **exchange)
    assert plan.seq_len != plan.kv_len
    check(problem, plan, run(problem, plan, kernel=kernel), 1e-10)


# ---------------------------------------------------------------- examples of TransformerEngine's convention


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring", "ulysses"])
def test_the_worked_example(exchange: str) -> None:
    """Lengths 5 and 8 padded to 8 and 8 on two ranks: who holds what, and what each chunk's queries read."""
    packing = Packing([0, 5, 13], cu_seqlens_q_padded=[0, 8, 16])
    plan = spanwise.make_plan(packing.mask(), 2, packing=packing, balancer="dual_chunk", exchange=exchange)
    tokens = [plan.shard(torch.arange(16), rank, dim=0).tolist() for rank in range(2)]
    assert tokens == [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]

    # Rank, chunk, cumulative valid queries and visible keys of the two sequences, causal from the bottom right.
    table = [
        (0, 0, [0, 2, 4], [0, 2, 4]),
        (0, 3, [0, 0, 2], [0, 5, 13]),
        (1, 1, [0, 2, 4], [0, 4, 8]),
        (1, 2, [0, 1, 3], [0, 5, 11]),
    ]
    weights = [torch.zeros(8, 16, dtype=torch.float64) for _ in range(2)]
    for rank, chunk, cu_q, cu_kv in table:
        for s in range(2):
            queries, keys = cu_q[s + 1] - cu_q[s], cu_kv[s + 1] - cu_kv[s]
            for i in range(queries):
                seen = keys - queries + 1 + i
                weights[rank][tokens[rank].index(8 * s + 2 * chunk + i), 8 * s : 8 * s + seen] = 1 / seen
    for rank, got in enumerate(weights_of(plan, 2)):
        torch.testing.assert_close(got, weights[rank], rtol=1e-12, atol=0)


@pytest.mark.parametrize("balancer", ["dual_chunk", "contiguous", "local"])
@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring", "ulysses"])
def test_two_sided_windows_see_both_sides_in_every_sequence(balancer: str, exchange: str) -> None:
    """Lengths 8 and 32, window (4, 4): on rank 1 position 4 of the short sequence reads all of it."""
    packing = Packing([0, 8, 40])
    mask = packing.mask(causal=False, window=(4, 4))
    plan = spanwise.make_plan(mask, 2, packing=packing, balancer=balancer, exchange=exchange, block_size=4)
    weights = torch.zeros(40, 40, dtype=torch.float64)
    for start, length in ((0, 8), (8, 32)):
        for i in range(length):
            low, high = max(0, i - 4), min(length, i + 5)
            weights[start + i, start + low : start + high] = 1 / (high - low)
    got = weights_of(plan, 2)
    for rank in range(2):
        torch.testing.assert_close(got[rank], plan.shard(weights, rank, dim=0), rtol=1e-12, atol=0)
    if balancer == "dual_chunk":
        row = plan.shard(torch.arange(40), 1, dim=0).tolist().index(4)
        assert np.flatnonzero(got[1][row]).tolist() == list(range(8))


def weights_of(plan: spanwise.Plan, num_ranks: int) -> list[torch.Tensor]:
    """Softmax weights of each rank's rows over all keys, for equal scores: values are unit vectors."""
    q, v = torch.zeros(plan.seq_len, 2, 8, dtype=torch.float64), torch.eye(plan.kv_len, dtype=torch.float64)

    def on_rank(rank: int, mesh: object) -> torch.Tensor:
        zeros, values = (spanwise.shard(plan, mesh, x, dim=0) for x in (q, v[:, None].expand(-1, 2, -1)))
        out = spanwise.packed_attention(zeros, zeros, values, plan, mesh, kernel="reference")
        assert torch.equal(out[:, 0], out[:, 1])
        return out[:, 0]

    return run_ranks(num_ranks, on_rank)
