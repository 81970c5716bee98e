"""Spread documents over ranks, or over hosts and their ranks, without a search: in time for thousands of ranks.

A document lies whole on a rank where work and tokens permit. A longer one is folded over as few ranks as possible: each
gets a head and a tail of it (`filling`). So the busiest rank sends, too, little more than the mean: with ascending
parts, which need up to 6 % fewer bytes, the first ranks of a document send most of them.

With hosts the hosts are filled so, and a document that lies on several hosts is spread evenly over the ranks of each:
all of them read, relay and send as much. Each row that enters a host then enters it once (exchange "hierarchical").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanwise.layouts.balancers import head_tail_pieces
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Float64, Int64

# Share of the slack that the work of a host may use; the rest is for the ranks inside it.
_HOST_SLACK = 0.75
# Share of a document up to which what a fold leaves to the next host is its first tokens instead: they read nothing of
# this host. Predicted step with 0.25, 0.1, 0.05 and without, lognormal documents on 128 ranks: median 6k 28.5, 28.7,
# 28.7, 31.5 ms, median 16k 115.7, 108.0, 108.0, 108.0. Among the ranks of a host it costs up to 13 %.
_LITTLE = 0.1


@dataclass(frozen=True)
class ByDocument:
    """Documents over ranks; ranks hold equally many tokens, or one more.

    Args:
        max_imbalance: work that a rank may have over the mean; by the weighted sum of the masks.
        host_size: ranks of a host, where few rows are to enter a host; rank r is on host ``r // host_size``. None:
            all links are alike.
    """

    max_imbalance: float = 1.02
    host_size: int | None = None

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        sizes = problem.seq_len // num_ranks + (np.arange(num_ranks) < problem.seq_len % num_ranks)
        parts = zip(problem.documents, problem.work_before, strict=True)
        tables = [pieces_of_ranks(*each, sizes, self.host_size or 1, self.max_imbalance) for each in parts]
        return Layout(tables, num_ranks, problem.seq_len)


def pieces_of_ranks(documents: Int64, before: Float64, sizes: Int64, host_size: int, bound: float) -> Int64:
    """Assigns documents to ranks.

    Args:
        documents: offsets of the documents, int64 ``[num_documents + 1]``, ascending; from 0 to the units (tokens or
            blocks) of the sequence.
        before: work before each unit, ``[num_units + 1]``.
        sizes: units that each rank gets, ``[num_ranks]``.
        host_size: ranks of a host; 1 if all links are alike.
        bound: work that a rank may have, over the mean.

    Returns:
        int64 ``[num_pieces, 3]``: rank, first unit and end of each piece.
    """
    from spanwise.layouts.filling import fill  # loads numba, a compiler

    num_ranks, mean = len(sizes), before[-1] / len(sizes)
    items, cuts = np.column_stack([documents[:-1], documents[1:]]), np.append(0, np.cumsum(sizes))
    if len(items) == 1 and np.diff(before[cuts]).max() <= bound * mean:  # windows: one piece a rank reads least
        return np.column_stack([np.arange(num_ranks), cuts[:-1], cuts[1:]])
    if not 1 < host_size < num_ranks:
        return fill(items, before, sizes, np.ones(num_ranks), np.zeros(num_ranks), bound, 0.0)
    first = np.arange(0, num_ranks, host_size)
    ranks = np.diff(np.append(first, num_ranks))
    of_hosts = fill(
        items, before, np.add.reduceat(sizes, first), ranks.astype(np.float64), np.zeros(len(first)),
        1 + _HOST_SLACK * (bound - 1), _LITTLE,
    )  # fmt: skip
    document = np.searchsorted(documents, of_hosts[:, 1], side="right") - 1
    whole = of_hosts[:, 2] - of_hosts[:, 1] == np.diff(documents)[document]
    found = []
    for host in range(len(first)):
        own = sizes[first[host] : first[host] + ranks[host]]
        mine = of_hosts[:, 0] == host
        shared, others = _shared(of_hosts[mine & ~whole, 1:], len(own)), of_hosts[mine & whole, 1:]
        had = np.bincount(shared[:, 0], before[shared[:, 2]] - before[shared[:, 1]], len(own)).astype(np.float64)
        work = had.sum() + (before[others[:, 1]] - before[others[:, 0]]).sum()
        allowed = max(bound * mean * len(own) / work, 1.0) if work > 0 else 1.0
        left = own - np.bincount(shared[:, 0], shared[:, 2] - shared[:, 1], len(own)).astype(np.int64)
        given = fill(others, before, left, np.ones(len(own)), had, allowed, 0.0)
        both = np.concatenate([shared, given])
        both[:, 0] += first[host]
        found.append(both)
    return np.concatenate(found)


def _shared(runs: Int64, num_ranks: int) -> Int64:
    """A head and a tail of each run for every rank, as many tokens for all: rank, first unit, end; int64 ``[n, 3]``."""
    offsets = np.append(0, np.cumsum(runs[:, 1] - runs[:, 0]))
    pieces = head_tail_pieces(offsets, num_ranks)
    pieces = pieces[pieces[:, 1] < pieces[:, 2]]
    run = np.searchsorted(offsets, pieces[:, 1], side="right") - 1
    pieces[:, 1:] += (runs[run, 0] - offsets[run])[:, None]
    return pieces
