"""Local search on a layout for few ranks: swaps of units between ranks, priced for all partners of a unit at once.

It starts from any layout and knows nothing of documents, so that masks with several spans a row (trees, shared
prefixes, video with global tokens, block diffusion) gain most. Pure numpy. Matrix products hold whole numbers, and work
is summed in order, so that the answer is the same on every host.
"""

# n units; P ranks. A unit is a run of tokens. Unit a reads unit b if a row of a reads a key of b.

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.span_mask import SpanMask

# Passes over all units. In the first ones a swap may bring as many tokens as a unit has; work beyond the bound costs
# `_SOFT` times the tokens that have as much work in the mean, later `_HARD` times.
_PASSES, _FIRST, _SOFT, _HARD = 12, 4, 4.0, 100.0
_GOLDEN = (math.sqrt(5) - 1) / 2


def unit_reads(mask: SpanMask, edges: Int64) -> Float64:
    """1 where a unit reads another one, else 0: ``[n, n]``; of a mask of one batch row, units between `edges`."""
    num_units = len(edges) - 1
    unit = np.repeat(np.arange(num_units), np.diff(edges))
    opened = np.zeros((num_units, num_units + 1), np.int64)
    for start, end in zip(mask.start[0], mask.end[0], strict=True):
        reads = end > start
        np.add.at(opened, (unit[reads], np.searchsorted(edges, start[reads], side="right") - 1), 1)
        np.add.at(opened, (unit[reads], np.searchsorted(edges, end[reads], side="left")), -1)
    return (np.cumsum(opened, axis=1)[:, :-1] > 0).astype(np.float64)


def start_from(held: Int64, sizes: Int64) -> Int64:
    """Owners of units, the rank that holds most of each; equally many for each rank, and long ones, or one more.

    Args:
        held: tokens of each unit that each rank holds, ``[P, n]``; n is a multiple of P.
        sizes: tokens of each unit, of two numbers at most.
    """
    owner, num_ranks = held.argmax(axis=0), len(held)
    num_long = int((sizes > sizes.min()).sum())
    long = num_long // num_ranks + (np.arange(num_ranks) < num_long % num_ranks)
    for units, wanted in (
        (np.flatnonzero(sizes > sizes.min()), long),
        (np.flatnonzero(sizes == sizes.min()), len(sizes) // num_ranks - long),
    ):
        spare = np.bincount(owner[units], minlength=num_ranks) - wanted
        while spare.any():
            giver, taker = int(spare.argmax()), int(spare.argmin())
            own = units[owner[units] == giver]
            owner[own[np.argmax(held[taker, own] - held[giver, own])]] = taker
            spare[[giver, taker]] += -1, 1
    return owner


def improve(
    owner: Int64, reads: Sequence[Float64], weights: Sequence[float], sizes: Int64, work: Float64, bound: float
) -> Int64:
    """Owners ``[n]`` with fewer tokens received, and work within the bound where swaps can reach it.

    Args:
        owner: the rank of each unit.
        reads: of each mask, as `unit_reads` makes them.
        weights: of the masks.
        sizes: tokens of each unit; only units of equal size change places.
        work: of each unit.
        bound: work that a rank may have.
    """
    search = _Search(owner.copy(), reads, weights, sizes, work, bound)
    for number in range(_PASSES):
        order = np.argsort((np.arange(len(owner)) * _GOLDEN + number * _GOLDEN**2) % 1, kind="stable")
        price, tolerance = (_SOFT, float(sizes.max())) if number < _FIRST else (_HARD, 0.0)
        if not sum([search.swap(int(unit), price, tolerance) for unit in order]):
            break
    return search.owner


class _Search:
    """A layout of units, and how many units of each rank read each unit, by mask: ``counts[mask][rank, unit]``."""

    def __init__(
        self,
        owner: Int64,
        reads: Sequence[Float64],
        weights: Sequence[float],
        sizes: Int64,
        work: Float64,
        bound: float,
    ) -> None:
        self.owner, self._reads, self._weights, self._sizes, self._work = owner, reads, weights, sizes, work
        self._ranks, self._bound, self._token = np.arange(owner.max() + 1), bound, sizes.sum() / max(work.sum(), 1.0)
        own = (owner == self._ranks[:, None]).astype(np.float64)
        self._counts = [own @ each for each in reads]
        self._total: Float64 = np.bincount(owner, work).astype(np.float64)
        self._own_reads = [each.diagonal() for each in reads]
        self._alone = [np.empty_like(each) for each in reads]  # what of its rank only a unit reads, of other ranks
        self._update(np.arange(len(owner)))

    def _update(self, units: Int64) -> None:
        rank = self.owner[units]
        away = rank[:, None] != self.owner
        for each, counts, alone in zip(self._reads, self._counts, self._alone, strict=True):
            alone[units] = each[units] * ((counts[rank] == 1) & away)

    def swap(self, unit: int, price: float, tolerance: float) -> bool:
        """Swap a unit with the best partner if that costs less than `tolerance` tokens."""
        tables = zip(self._reads, self._counts, self._own_reads, self._alone, strict=True)
        cost = sum(weight * self._received(unit, *each) for weight, each in zip(self._weights, tables, strict=True))
        before, after = self._total[self.owner], self._total[self.owner] + self._work[unit] - self._work
        mine = self._total[self.owner[unit]]
        excess = self._beyond(after) - self._beyond(before) + self._beyond(mine - self._work[unit] + self._work)
        cost = cost + price * self._token * (excess - self._beyond(mine))
        cost[(self.owner == self.owner[unit]) | (self._sizes != self._sizes[unit])] = np.inf
        partner = int(np.argmin(cost))
        if not cost[partner] < tolerance or cost[partner] == 0:
            return False
        rank, other = self.owner[[unit, partner]]
        for each, counts in zip(self._reads, self._counts, strict=True):
            counts[rank] += each[partner] - each[unit]
            counts[other] += each[unit] - each[partner]
        self._total[[rank, other]] += (self._work[partner] - self._work[unit]) * np.array([1, -1])
        self.owner[[unit, partner]] = other, rank
        self._update(np.flatnonzero((self.owner == rank) | (self.owner == other)))
        return True

    def _beyond(self, work: Float64) -> Float64:
        return np.maximum(work - self._bound, 0.0)

    def _received(self, unit: int, reads: Float64, counts: Float64, own_reads: Float64, alone: Float64) -> Float64:
        """Tokens that two ranks receive more of one mask after the swap of a unit with each other one, ``[n]``."""
        owner, sizes, row = self.owner, self._sizes, reads[unit]
        away = owner != self._ranks[:, None]
        received = ((counts > 0) & away) @ sizes
        mine, kept, free = owner[unit], counts[owner[unit]] - row > 0, away[owner[unit]].copy()
        free[unit] = True
        # The unit's rank: what its other units read, and what the partner reads; the partner is its own then.
        here = (sizes * (kept & free)).sum() + reads @ (sizes * (~kept & free)) - sizes * (kept | (own_reads > 0))
        # The partner's rank: without what only the partner read, with what the unit reads and no other unit.
        lost, gained = alone @ (sizes * (1 - row)), (((counts == 0) & away) @ (sizes * row))[owner]
        own_unit = counts[owner, unit] - reads[:, unit] + row[unit] > 0
        lost_partner = counts[owner, np.arange(len(owner))] - own_reads + row > 0
        there = received[owner] - lost + gained - sizes[unit] * own_unit + sizes * lost_partner
        return here + there - received[mine] - received[owner]
