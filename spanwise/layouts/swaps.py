"""Local search on a layout for few ranks: swaps of units, runs of tokens, between ranks.

It starts from any layout and knows nothing of documents, so that masks with several spans a row (trees, shared
prefixes, video with global tokens, block diffusion) gain most. Matrix products hold whole numbers, and work is summed
in order, so that the answer is the same on every host.
"""

# n units; P ranks. A unit reads another one if a row of it reads a key of that one.

from __future__ import annotations

import math

import numpy as np

from spanwise.layouts.problem import LayoutProblem
from spanwise.masks import even_runs
from spanwise.masks.arrays import Float64, Int64

# Units of a rank, and of all. Tokens received on 4 ranks, block diffusion of 16,384 and of 65,536 tokens: without swaps
# 4,184 and 33,008, so 3,616 and 26,848, with twice the units 3,632 and 30,976.
_PER_RANK, _UNITS = 16, 128
# Passes over all units. In the first ones a swap may bring as many tokens as a unit has; work beyond the bound costs
# `_SOFT` times the tokens that have as much work in the mean, later `_HARD` times.
_PASSES, _FIRST, _SOFT, _HARD = 12, 4, 4.0, 100.0
_GOLDEN = (math.sqrt(5) - 1) / 2


def swapped(problem: LayoutProblem, row: int, num_ranks: int, pieces: Int64, bound: float) -> list[Int64]:
    """The pieces after swaps, with work within the bound where swaps reach it; none if units were less than a block.

    Every rank gets equally many units, and long ones, or one more.
    """
    per_rank = min(_PER_RANK, _UNITS // num_ranks, problem.seq_len // (num_ranks * problem.block_size))
    if per_rank < 2:
        return []
    number = per_rank * num_ranks
    long = np.arange(number) < problem.seq_len % number
    edges = np.append(0, np.cumsum(problem.seq_len // number + long))
    held = np.zeros((num_ranks, number), np.int64)
    for rank, start, stop in pieces:
        held[rank] += np.maximum(np.minimum(edges[1:], stop) - np.maximum(edges[:-1], start), 0)
    owner, wanted = held.argmax(axis=0), long.sum() // num_ranks + (np.arange(num_ranks) < long.sum() % num_ranks)
    for units, each in ((np.flatnonzero(long), wanted), (np.flatnonzero(~long), per_rank - wanted)):
        while (spare := np.bincount(owner[units], minlength=num_ranks) - each).any():
            giver, taker = int(spare.argmax()), int(spare.argmin())
            own = units[owner[units] == giver]
            owner[own[np.argmax(held[taker, own] - held[giver, own])]] = taker
    search = _Search(problem, row, edges, owner, bound)
    for one in range(_PASSES):
        order = np.argsort((np.arange(number) * _GOLDEN + one * _GOLDEN**2) % 1, kind="stable")
        price, tolerance = (_SOFT, float(np.diff(edges).max())) if one < _FIRST else (_HARD, 0.0)
        if not sum([search.swap(int(unit), price, tolerance) for unit in order]):
            break
    return [np.column_stack([search.owner, edges[:-1], edges[1:]])]


def unit_reads(slots: tuple[even_runs.EvenRuns, ...], edges: Int64) -> Float64:
    """1 where a unit reads another one, else 0: ``[n, n]``; of a mask's even runs, units between `edges`."""
    number, stride = len(edges) - 1, int(edges[-1]) + 1
    line = even_runs.keys_read(slots, np.column_stack([edges[:-1], edges[1:]]), np.arange(number), stride)
    unit = line[:, 0] // stride
    start, end = (line - unit[:, None] * stride).T
    opened = np.zeros((number, number + 1), np.int64)
    np.add.at(opened, (unit, np.searchsorted(edges, start, side="right") - 1), 1)
    np.add.at(opened, (unit, np.searchsorted(edges, end, side="left")), -1)
    return (np.cumsum(opened, axis=1)[:, :-1] > 0).astype(np.float64)


class _Search:
    """A layout of units, and how many units of each rank read each unit, by mask: ``counts[mask][rank, unit]``."""

    def __init__(self, problem: LayoutProblem, row: int, edges: Int64, owner: Int64, bound: float) -> None:
        self.owner, self.sizes, self.bound = owner, np.diff(edges).astype(np.float64), bound
        self.ranks = np.arange(owner.max() + 1)
        self.work = np.diff(problem.work_before[row][edges])
        self.total: Float64 = np.bincount(owner, self.work).astype(np.float64)
        self.token = self.sizes.sum() / max(self.work.sum(), 1.0)
        own = (owner == self.ranks[:, None]).astype(np.float64)
        reads = {name: unit_reads(problem.masks[name].even_runs(row), edges) for name in sorted(problem.masks)}
        self.masks = [(float((problem.weights or {})[name]), each, own @ each) for name, each in reads.items()]

    def swap(self, unit: int, price: float, tolerance: float) -> bool:
        """Swap a unit with the best partner if that costs less than `tolerance` tokens."""
        owner, mine = self.owner, self.owner[unit]
        excess = self._beyond(self.total[owner] + self.work[unit] - self.work) - self._beyond(self.total[owner])
        excess += self._beyond(self.total[mine] - self.work[unit] + self.work) - self._beyond(self.total[mine])
        cost = price * self.token * excess
        # Units that are not a rank's own: of all ranks, and for each partner of the unit's rank and of the partner's
        # rank after the swap.
        away = owner != self.ranks[:, None]
        here, there = np.repeat(away[mine : mine + 1], len(owner), axis=0), away[owner]
        here[:, unit], there[:, unit] = True, False
        np.fill_diagonal(here, False)
        np.fill_diagonal(there, True)
        for weight, reads, counts in self.masks:
            now = ((counts > 0) & away) @ self.sizes
            received = ((reads + (counts[mine] - reads[unit]) > 0) & here) @ self.sizes
            received += ((counts[owner] - reads + reads[unit] > 0) & there) @ self.sizes
            cost += weight * (received - now[mine] - now[owner])
        cost[(owner == mine) | (self.sizes != self.sizes[unit])] = np.inf
        partner = int(np.argmin(cost))
        if not cost[partner] < tolerance or cost[partner] == 0:
            return False
        other = owner[partner]
        for _, reads, counts in self.masks:
            counts[mine] += reads[partner] - reads[unit]
            counts[other] += reads[unit] - reads[partner]
        self.total[[mine, other]] += (self.work[partner] - self.work[unit]) * np.array([1, -1])
        owner[[unit, partner]] = other, mine
        return True

    def _beyond(self, work: Float64) -> Float64:
        return np.maximum(work - self.bound, 0.0)
