"""Fixed dp × cp grids against one plan over all ranks, for the documents of a global batch. Pure.

In a grid, each of dp replicas gets documents of its own and shares them over cp ranks. Two ways to assign documents are
compared: in their order, and longest first. Every replica has the plan that `make_plan` finds for its documents. The
step of a grid is that of its slowest replica, because all wait for one another where gradients are summed.

    lengths -> documents of each replica -> plan of each replica -> seconds, tokens and bytes of every rank
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.checks import check_lengths, check_positive
from spanwise.masks.span_mask import SpanMask
from spanwise.planning import memory
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

IN_ORDER, LONGEST_FIRST, ONE_PLAN = "in order", "longest first", "one plan"


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """A way to spread a global batch over all ranks, and what a step of it costs.

    Attributes:
        dp, cp: replicas, and ranks that share the documents of one.
        assignment: "in order" or "longest first"; "one plan" where cp is all ranks.
        work: (query, key) pairs of each rank, all masks by weight; `tokens`: tokens it holds; ``[ranks]`` each.
        attention, linear: predicted seconds that each rank computes in a step, forward and backward; ``[ranks]``.
        exposed: seconds in which each rank waits for the exchange of its replica; ``[ranks]``.
        recv_bytes: what each rank receives in a forward, all layers; ``[ranks]``.
        held_bytes: what the fullest rank holds for exchanges, as `make_plan` compares with a memory budget.
    """

    dp: int
    cp: int
    assignment: str
    work: Float64
    tokens: Int64
    attention: Float64
    linear: Float64
    exposed: Float64
    recv_bytes: Float64
    held_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step: attention and linear layers of the busiest rank, and its replica's exchange."""
        return float((self.attention + self.linear + self.exposed).max())

    @property
    def work_imbalance(self) -> float:
        """Attention work of the busiest rank over the mean of all."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def token_imbalance(self) -> float:
        """Tokens of the fullest rank over the mean of all."""
        return float(self.tokens.max() / self.tokens.mean())

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON."""
        ratios = ("seconds", "work_imbalance", "token_imbalance")
        names = (*(field.name for field in dataclasses.fields(self)), *ratios)
        return {name: np.asarray(getattr(self, name)).tolist() for name in names}


def compare_grids(
    lengths: Any,
    num_ranks: int,
    *,
    linear_flops: float,
    mask: Callable[[Int64], Any] = SpanMask.documents,
    weights: Mapping[str, float] | None = None,
    whole: Plan | None = None,
    **options: Any,
) -> tuple[Grid, ...]:
    """Every grid with a cp degree that divides `num_ranks`, and one plan over all ranks.

    Seconds of a replica are those of one whose first rank is the first of a host.

    Args:
        lengths: tokens of each document, int ``[num_documents]``; empty ones are left out.
        num_ranks: dp × cp.
        linear_flops: floating-point operations of all linear layers for a token, forward and backward.
        mask: from the offsets of documents to a mask, or to masks by name; default: causal.
        weights: layers that use each mask, as in `make_plan`.
        whole: the plan over all ranks, if it was made.
        options: for `make_plan`, with the attention's shape.

    Returns:
        One plan first; then the grids from the largest cp to 1, each in order and longest first.

    >>> import spanwise
    >>> shape = dict(num_q_heads=8, num_kv_heads=2, head_dim=64)
    >>> for grid in compare_grids([9000, 300, 500, 2200], 4, linear_flops=1e9, **shape):
    ...     print(grid.dp, grid.cp, grid.assignment, f"{grid.work_imbalance:.2f} {grid.token_imbalance:.2f}")
    1 4 one plan 1.00 1.00
    2 2 in order 1.88 1.50
    2 2 longest first 1.88 1.50
    4 1 in order 3.76 3.00
    4 1 longest first 3.76 3.00
    """
    documents = check_lengths(lengths, "lengths")
    documents = documents[documents > 0]
    size = check_positive(num_ranks, "num_ranks")
    if len(documents) == 0:
        raise ValueError("a comparison needs a document with a token, got none")

    def plan(which: Int64, ranks: int) -> Plan:
        cu_seqlens = np.append(0, np.cumsum(documents[which]))
        return make_plan(mask(cu_seqlens), ranks, weights=weights, cu_seqlens=cu_seqlens, **options)

    one = whole or plan(np.arange(len(documents)), size)
    found = [_grid(ONE_PLAN, [one], size, linear_flops)]
    area = np.sum([weight * one.mask(name).area()[0] for name, weight in one.weights.items()], axis=0)
    work = np.add.reduceat(area, np.cumsum(documents) - documents).astype(np.float64)
    for cp in (degree for degree in range(size - 1, 0, -1) if size % degree == 0):
        dp = size // cp
        for name, owner in ((IN_ORDER, in_order(documents, dp)), (LONGEST_FIRST, longest_first(work, dp))):
            owned = (np.flatnonzero(owner == replica) for replica in range(dp))
            plans = [plan(which, cp) if len(which) else None for which in owned]
            found.append(_grid(name, plans, cp, linear_flops))
    return tuple(found)


def in_order(documents: Int64, dp: int) -> Int64:
    """The replica of each document: each takes consecutive ones, about as many tokens as the others; int64 ``[n]``.

    >>> in_order(np.array([4, 4, 1, 7]), 2).tolist()
    [0, 0, 1, 1]
    """
    ends = np.cumsum(documents)
    return (2 * ends - documents) * dp // (2 * int(ends[-1]))


def longest_first(work: Float64, dp: int) -> Int64:
    """The replica of each document: most work first, each to the replica with the least so far; int64 ``[n]``.

    >>> longest_first(np.array([4.0, 5, 3, 7]), 2).tolist()
    [1, 1, 0, 0]
    """
    owner = np.empty(len(work), dtype=np.int64)
    heap = [(0.0, replica) for replica in range(dp)]
    for document in np.argsort(-work, kind="stable").tolist():
        load, replica = heap[0]
        owner[document] = replica
        heapq.heapreplace(heap, (load + float(work[document]), replica))
    return owner


def _grid(assignment: str, plans: list[Plan | None], cp: int, linear_flops: float) -> Grid:
    """The figures of replicas with these plans; None is a replica without a document."""
    work, tokens, attention, linear, exposed, received = np.zeros((6, len(plans), cp))
    for replica, plan in enumerate(plans):
        if plan is None:
            continue
        tokens[replica] = plan.layout.tokens_per_rank
        linear[replica] = tokens[replica] * linear_flops / plan.hardware.matmul_flops
        for name, weight in plan.weights.items():
            work[replica] += weight * plan.work(name)
            received[replica] += weight * plan.recv_bytes(name)
            layer = plan.timeline(name)
            for one in (layer.forward, layer.backward):
                attention[replica] += weight * one.busy
                exposed[replica] += weight * one.exposed
    return Grid(
        len(plans), cp, assignment, work.ravel(), tokens.ravel().astype(np.int64), attention.ravel(), linear.ravel(),
        exposed.ravel(), received.ravel(), max((memory.held(plan) for plan in plans if plan is not None), default=0),
    )  # fmt: skip
