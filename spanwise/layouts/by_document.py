"""Spread documents over hosts and ranks without a search: for more ranks than `local` can search in time.

First the hosts are filled with documents, then the ranks of each host with what it has got (`filling`). A document lies
whole on a host, and there whole on a rank, where work and tokens permit. A longer one takes as few hosts as possible.
They share it in ascending parts, or folded: each gets a head and a tail (`WAYS`).
"""

from __future__ import annotations

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

# Share of the slack that the work of a host may use; the rest is for the ranks inside it.
_HOST_SLACK = 0.9


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
        return fill(documents[:-1], documents[1:], before, sizes, np.ones(num_ranks), bound, folded[1])
    first = np.arange(0, num_ranks, host_size)
    ranks = np.diff(np.append(first, num_ranks))
    of_hosts = fill(
        documents[:-1], documents[1:], before, np.add.reduceat(sizes, first), ranks.astype(np.float64),
        1 + _HOST_SLACK * (bound - 1), folded[0],
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
        pieces = fill(items[:, 0].copy(), items[:, 1].copy(), before, own, np.ones(len(own)), allowed, folded[1])
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
