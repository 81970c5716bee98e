"""Spread documents over hosts and ranks without a search: for more ranks than `local` can search in time.

First the hosts are filled with documents, then the ranks of each host with what it has got (`filling`). A document lies
whole on a host, and there whole on a rank, where work and tokens permit. A longer one takes as few hosts as possible.
They share it in ascending parts, or folded: each gets a head and a tail (`WAYS`). The ranks of a host share its head
of a document over many hosts evenly, because all ranks with a later part read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanwise.layouts import traffic
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Float64, Int64

Folded = tuple[bool, bool]

#: Ways to share long documents, see `pieces_of_ranks`. Ascending parts need the fewest bytes, but the first ranks of a
#: document send most of them: with folds the busiest rank sends 0.3 to 1.0 times as much, for up to 6 % more bytes
#: (lognormal documents, 32 to 1,024 ranks).
WAYS: tuple[Folded, ...] = ((False, False), (False, True), (True, True))


def ways(num_ranks: int, host_size: int | None) -> list[Folded]:
    """Those of `WAYS` that differ: where all links are alike there are no hosts to share a document by folds."""
    return [way for way in WAYS if 1 < (host_size or 1) < num_ranks or not way[0]]


@dataclass(frozen=True)
class ByDocument:
    """Documents over ranks with equal links: the busiest moves least, within `max_imbalance` (busiest to mean work)."""

    max_imbalance: float

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        def largest(layout: Layout) -> float:
            return float(np.max(priced_tokens(layout, problem, None, 1.0)))

        found = (assign(problem, num_ranks, None, self.max_imbalance, way) for way in ways(num_ranks, None))
        return min(found, key=largest)


# Share of the slack that the work of a host may use; the rest is for the ranks inside it.
_HOST_SLACK = 0.9
# Work of a document over that of a host from which on its heads are split. Predicted steps with heads split and whole,
# 96 to 256 ranks: 86 and 300 ms, 107 and 343, 80 and 99. Smaller values gain more on 128 ranks (49 ms in place of 70),
# but bytes between hosts then exceed 1.5 of their bound.
_WIDE = 3.0


def assign(
    problem: LayoutProblem, num_ranks: int, host_size: int | None, bound: float, folded: Folded = (False, False)
) -> Layout:
    """The layout of every batch row, see `pieces_of_ranks`; ranks hold equally many tokens, or one more."""
    sizes = problem.seq_len // num_ranks + (np.arange(num_ranks) < problem.seq_len % num_ranks)
    parts = zip(problem.documents, problem.work_before, strict=True)
    tables = [pieces_of_ranks(*each, sizes, host_size or 1, bound, folded) for each in parts]
    return Layout(tables, num_ranks, problem.seq_len)


def busiest(layout: Layout, problem: LayoutProblem) -> Float64:
    """Work of the busiest rank by the sum of the masks, and by each mask alone; ``[batch, num_bounds]``."""
    return _work(layout, problem).max(axis=2)


def mean_work(problem: LayoutProblem, num_ranks: int) -> Float64:
    """The mean work of a rank, as `busiest`."""
    whole = Layout([[(0, 0, problem.seq_len)]], 1, problem.seq_len)
    return _work(whole, problem)[:, :, 0] / num_ranks


def priced_tokens(
    layout: Layout, problem: LayoutProblem, host_size: int | None, host_price: float
) -> tuple[Float64, Float64]:
    """K/V tokens that each rank receives, and sends; all masks by weight, those inside a host at their price."""
    recv, sent = np.zeros(layout.num_ranks), np.zeros(layout.num_ranks)
    for name in sorted(problem.masks):
        rows = traffic.needs(problem.masks[name], layout, layout, problem.batch_size)
        receiver, sender, tokens = traffic.needed_pairs(rows, layout)
        near = receiver // (host_size or 1) == sender // (host_size or 1)
        weight = (problem.weights or {})[name]
        for price, part in ((weight * host_price, near), (weight, ~near)):
            recv += price * np.bincount(receiver[part], tokens[part], layout.num_ranks)
            sent += price * np.bincount(sender[part], tokens[part], layout.num_ranks)
    return recv, sent


def _work(layout: Layout, problem: LayoutProblem) -> Float64:
    """Work of each rank by the sum of the masks, and by each mask alone; ``[batch, num_bounds, ranks]``."""
    names, weights = sorted(problem.masks), problem.weights or {}
    found = []
    for row in range(problem.batch_size):
        alone = {name: traffic.row_area(problem.masks[name], layout, row) for name in names}
        every = [np.sum([weights[name] * alone[name] for name in names], axis=0)]
        found.append(every + [alone[name] for name in problem.masks if len(names) > 1])
    return np.array(found, dtype=np.float64)


def pieces_of_ranks(
    documents: Int64,
    before: Float64,
    sizes: Int64,
    host_size: int,
    bound: float,
    folded: Folded = (False, False),
) -> Int64:
    """Assigns documents to ranks.

    Args:
        documents: offsets of the documents, int64 ``[num_documents + 1]``, ascending; from 0 to the units (tokens or
            blocks) of the sequence.
        before: work before each unit, ``[num_units + 1]``.
        sizes: units that each rank gets, ``[num_ranks]``.
        host_size: ranks of a host; 1 if all links are alike.
        bound: work that a rank may have, over the mean.
        folded: whether hosts, and the ranks of a host, share a document that is too long for one by heads and tails.

    Returns:
        int64 ``[num_pieces, 3]``: rank, first unit and end of each piece.
    """
    from spanwise.layouts.filling import fill  # loads numba, a compiler

    num_ranks, mean = len(sizes), before[-1] / len(sizes)
    if not 1 < host_size < num_ranks:
        even = np.ones(num_ranks), np.zeros(num_ranks)
        return fill(documents[:-1], documents[1:], before, sizes, *even, bound, folded[1])
    first = np.arange(0, num_ranks, host_size)
    ranks = np.diff(np.append(first, num_ranks))
    of_hosts = fill(
        documents[:-1], documents[1:], before, np.add.reduceat(sizes, first), ranks.astype(np.float64),
        np.zeros(len(first)), 1 + _HOST_SLACK * (bound - 1), folded[0],
    )  # fmt: skip
    of_hosts = _joined(of_hosts)
    edges = np.searchsorted(of_hosts[:, 0], np.arange(len(first) + 1))
    found = []
    for host in range(len(first)):
        items = _cut_at(of_hosts[edges[host] : edges[host + 1], 1:], documents)
        if len(items) == 0:
            continue
        own = sizes[first[host] : first[host] + ranks[host]]
        work = (before[items[:, 1]] - before[items[:, 0]]).sum()
        allowed = max(bound * mean * ranks[host] / work, 1.0) if work > 0 else 1.0
        heads, others = _split_heads(items, documents, before, len(own))
        if (np.bincount(heads[:, 0], heads[:, 2] - heads[:, 1], len(own)) > own).any():
            heads, others = heads[:0], items
        had = np.bincount(heads[:, 0], before[heads[:, 2]] - before[heads[:, 1]], len(own)).astype(np.float64)
        left = own - np.bincount(heads[:, 0], heads[:, 2] - heads[:, 1], len(own)).astype(np.int64)
        rest = fill(others[:, 0].copy(), others[:, 1].copy(), before, left, np.ones(len(own)), had, allowed, folded[1])
        pieces = np.concatenate([heads, rest])
        pieces[:, 0] += first[host]
        found.append(pieces)
    return np.concatenate(found)


def _joined(pieces: Int64) -> Int64:
    """Pieces sorted by bin and position, adjacent ones of a bin as one."""
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    opens = np.ones(len(pieces), dtype=bool)
    opens[1:] = (pieces[1:, 0] != pieces[:-1, 0]) | (pieces[1:, 1] != pieces[:-1, 2])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(pieces)) - 1
    return np.column_stack([pieces[first, :2], pieces[last, 2]])


def _split_heads(items: Int64, documents: Int64, before: Float64, num_ranks: int) -> tuple[Int64, Int64]:
    """Heads of the document whose tail fills most of the host, cut evenly over its ranks.

    Whole, a head would make one rank send it to all ranks with a later part of the document.

    Returns:
        pieces of heads (rank, first unit, end), int64 ``[n, 3]``; all other items, ``[m, 2]``.
    """
    work = before[items[:, 1]] - before[items[:, 0]]
    document = np.searchsorted(documents, items[:, 0], side="right")
    tail = int(np.argmax(work))
    whole = before[documents[document[tail]]] - before[documents[document[tail] - 1]]
    is_head = (document == document[tail]) & (items[:, 0] < items[tail, 0])
    if 2 * work[tail] < work.sum() or whole < _WIDE * work.sum() or not is_head.any():
        return np.empty((0, 3), np.int64), items
    edges = [begin + np.arange(num_ranks + 1) * (end - begin) // num_ranks for begin, end in items[is_head].tolist()]
    heads = np.concatenate([np.column_stack([np.arange(num_ranks), edge[:-1], edge[1:]]) for edge in edges])
    return heads[heads[:, 1] < heads[:, 2]], items[~is_head]


def _cut_at(runs: Int64, offsets: Int64) -> Int64:
    """Ascending runs ``[n, 2]``, cut at the offsets that lie inside them."""
    inside = [
        offsets[low:high]
        for low, high in zip(
            np.searchsorted(offsets, runs[:, 0], side="right"), np.searchsorted(offsets, runs[:, 1]), strict=True
        )
    ]
    edges = np.unique(np.concatenate([runs.ravel(), *inside])) if len(runs) else np.empty(0, np.int64)
    run = np.searchsorted(runs[:, 0], edges[:-1], side="right") - 1
    kept = edges[:-1] < runs[run, 1] if len(runs) else np.zeros(0, bool)
    return np.column_stack([edges[:-1][kept], edges[1:][kept]])
