"""Documents over hosts and ranks so that few rows enter a host, where each enters once: for exchange "hierarchical".

`host_filling` gives documents to hosts. The ranks of a host then share the parts of wide documents evenly, so that all
of them read, relay and send as much; `filling` gives them the rest.
"""

# H hosts, P ranks of a host

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanwise.layouts import by_document
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Bool, Float64, Int64

# Found by trial on the lognormal documents of benchmarks/plan_scale.py. Share of the slack that the work of a host may
# use before documents are exchanged; proposals of a search; how much worse one may be at first, the best result is
# taken; units that a host sends, over those of the longest document. Without the last one a step of 1,024 ranks takes
# 1.13 to 1.28 times as long (95 and 84 ms, 265 and 207), and 3 to 5 % fewer rows cross.
_HOST_SLACK, _STEPS, _THRESHOLDS, _MOST_SENT = 0.6, 6_000_000, (0.0, 0.05, 0.1, 0.2), 1.2
_STEPS_OF_ITEM = 50_000
_MOST_WIDE = 0.75  # share of the tokens in wide documents beyond which the others cannot fill up the hosts
_UNEVEN = 1.01  # work of a rank over that of the busiest host


@dataclass(frozen=True)
class ByHost:
    """Documents over hosts: few rows enter one, in sum over hosts; ranks hold equal tokens, or one more.

    Args:
        host_size: ranks of a host; rank r is on host ``r // host_size``.
        max_imbalance: work that a rank may have over the mean.
    """

    host_size: int
    max_imbalance: float = 1.05

    def suits(self, problem: LayoutProblem, num_ranks: int) -> bool:
        """Whether some documents need several hosts, and others are enough to fill these up."""
        hosts = -(-num_ranks // self.host_size)
        for documents, before in zip(problem.documents, problem.work_before, strict=True):
            work = np.diff(before[documents])
            wide = work > self.max_imbalance * before[-1] / hosts
            if not 0 < np.diff(documents)[wide].sum() <= _MOST_WIDE * problem.seq_len:
                return False
        return 1 < self.host_size < num_ranks

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        sizes = problem.seq_len // num_ranks + (np.arange(num_ranks) < problem.seq_len % num_ranks)
        parts = zip(problem.documents, problem.work_before, strict=True)
        tables = [pieces_of_ranks(*each, sizes, self.host_size, self.max_imbalance) for each in parts]
        return Layout(tables, num_ranks, problem.seq_len)


def pieces_of_ranks(documents: Int64, before: Float64, sizes: Int64, host_size: int, bound: float) -> Int64:
    """Assigns documents to ranks; arguments and result as of `by_document.pieces_of_ranks`."""
    from spanwise.layouts.filling import fill  # loads numba, a compiler

    first = np.arange(0, len(sizes), host_size)
    ranks = np.diff(np.append(first, len(sizes)))
    mean = before[-1] / len(sizes)
    goal = (1 + _HOST_SLACK * (bound - 1)) * (mean or 1.0) * ranks
    of_hosts = np.add.reduceat(sizes, first)
    pieces, is_wide = _pieces_of_hosts(documents, before, of_hosts, goal) if of_hosts.min() > 0 else (None, None)
    if pieces is None or is_wide is None:
        return by_document.pieces_of_ranks(documents, before, sizes, host_size, bound, (True, True))
    busiest = float((_sums(pieces, before, len(first)) / ranks).max())
    found = []
    for host in range(len(first)):
        own = sizes[first[host] : first[host] + ranks[host]]
        mine = pieces[:, 0] == host
        parts, rest = _shared(pieces[mine & is_wide, 1:], len(own))
        others = np.concatenate([pieces[mine & ~is_wide, 1:], rest])
        others = others[np.argsort(others[:, 0])]
        work = _sums(pieces[mine], before, len(first))[host]
        allowed = max(min(bound * mean, _UNEVEN * busiest) * len(own) / work, 1.0) if work > 0 else 1.0
        left = own - np.bincount(parts[:, 0], parts[:, 2] - parts[:, 1], len(own)).astype(np.int64)
        had = _sums(parts, before, len(own))
        given = fill(others[:, 0].copy(), others[:, 1].copy(), before, left, np.ones(len(own)), had, allowed, True)
        both = np.concatenate([parts, given])
        both[:, 0] += first[host]
        found.append(both)
    return np.concatenate(found)


def _pieces_of_hosts(
    documents: Int64, before: Float64, sizes: Int64, goal: Float64
) -> tuple[Int64, Bool] | tuple[None, None]:
    """Host, first unit and end of each piece, int64 ``[m, 3]``, and whether its document is wide; None without room."""
    from spanwise.layouts import host_filling  # loads numba, a compiler

    start, stop = documents[:-1][np.diff(documents) > 0], documents[1:][np.diff(documents) > 0]
    work, units = before[stop] - before[start], stop - start
    is_wide = (work > goal.max()) | (units > sizes.max())
    wide, others = np.flatnonzero(is_wide), np.flatnonzero(~is_wide)
    wide = wide[np.argsort(-work[wide], kind="stable")]
    by_weight = others[np.argsort(work[others] / units[others], kind="stable")]
    light = np.zeros((2, len(others) + 1))
    light[0, 1:], light[1, 1:] = np.cumsum(units[by_weight]), np.cumsum(work[by_weight])
    most_sent = _MOST_SENT * float(units.max())
    cut, left = host_filling.cut_wide(start[wide], stop[wide], before, sizes, goal, light, most_sent)
    if len(wide) and not len(cut):
        return None, None
    left = left[left[:, 0] < left[:, 1]]
    items = np.concatenate([np.column_stack([start[others], stop[others]]), left])
    units, work = items[:, 1] - items[:, 0], before[items[:, 1]] - before[items[:, 0]]
    given, had = np.bincount(cut[:, 0], cut[:, 2] - cut[:, 1], len(sizes)), _sums(cut, before, len(sizes))
    given, full = given.astype(np.int64), int(cut[:, 0].max()) + 1 if len(cut) else 0
    begun = host_filling.place(units, work, sizes, goal, given, had, full)
    is_whole = np.repeat([False, True, False], [len(cut), len(others), len(left)])
    steps = min(_STEPS, _STEPS_OF_ITEM * len(items))
    found = []
    for threshold in _THRESHOLDS:
        host = host_filling.exchange(begun, units, work, sizes, goal, given, had, steps, threshold)
        pieces = np.concatenate([cut, np.column_stack([host, items])])
        pieces = host_filling.even_out(pieces, sizes, is_whole)
        document = np.searchsorted(start, pieces[:, 1], side="right") - 1
        busiest = float((_sums(pieces, before, len(sizes)) / goal).max())
        crossing = _crossing(pieces, document, start)
        found.append((max(busiest, _UNEVEN), crossing, threshold, pieces, is_wide[document]))
    return min(found, key=lambda each: each[:3])[3:]


def _sums(pieces: Int64, before: Float64, bins: int) -> Float64:
    """Work of each bin, float64 ``[bins]``."""
    return np.bincount(pieces[:, 0], before[pieces[:, 2]] - before[pieces[:, 1]], bins).astype(np.float64)


def _crossing(pieces: Int64, document: Int64, start: Int64) -> int:
    """Rows before the last one of each document on each host that the host does not hold."""
    key = pieces[:, 0] * len(start) + document
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(key[order]) > 0))
    last = np.maximum.reduceat((pieces[:, 2] - start[document])[order], first)
    return int(last.sum() - (pieces[:, 2] - pieces[:, 1]).sum())


def _shared(runs: Int64, num_ranks: int) -> tuple[Int64, Int64]:
    """A slice from the start and one from the end of each run for every rank; and what is left in the middle.

    All slices of a run are equally long.

    Returns:
        rank, first unit and end of each slice, int64 ``[n, 3]``; first unit and end of what is left, ``[m, 2]``.
    """
    units = (runs[:, 1] - runs[:, 0]) // (2 * num_ranks)
    runs, rest, units = runs[units > 0], runs[units == 0], units[units > 0]
    rank = np.arange(num_ranks)
    heads = runs[:, :1] + units[:, None] * rank
    tails = runs[:, 1:] - units[:, None] * (rank + 1)
    first = np.concatenate([heads, tails]).ravel()
    every = np.tile(rank, 2 * len(runs))
    middle = np.column_stack([runs[:, 0] + units * num_ranks, runs[:, 1] - units * num_ranks])
    slices = np.column_stack([every, first, first + np.tile(np.repeat(units, num_ranks), 2)])
    rest = np.concatenate([rest, middle])
    return slices, rest[rest[:, 0] < rest[:, 1]]
