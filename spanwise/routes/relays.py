"""Relays: the ranks through which rows of K/V enter a host, for exchange "hierarchical". Exact; pure arrays.

A row that several ranks of a host read comes from another host once, to one of these ranks: its relay, which passes it
on to the others. A row of the same host goes from its owner to every reader. So each rank receives the rows that it
reads and no others, each once.

The ranks of a host share what enters evenly: rows that the same ranks read are divided among them so that the most
loaded relay gets as little as possible, those with the fewest readers first. All numbers are integers, so every rank
computes the same.
"""

# P places: groups of ranks on a host; H hosts; n pieces: runs of one owner that the same groups of a host read

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.masks.arrays import Int64
from spanwise.routes.route import RouteProblem


class _Pieces(NamedTuple):
    """Runs of keys that groups of one host read and do not hold.

    Attributes:
        host, owner, start, tokens: ``[n]``; the host that reads, the group that holds, the run.
        reads: bool ``[n, P]``, which groups of the host.
    """

    host: Int64
    owner: Int64
    start: Int64
    tokens: Int64
    reads: np.ndarray

    def of(self, index: np.ndarray) -> _Pieces:
        return _Pieces(*(x[index] for x in self))

    def moves(self, sender: Int64, row: int) -> Int64:
        """Moves ``[m, 5]`` of every piece of a batch row from its `sender` to each group that reads it."""
        piece, place = np.nonzero(self.reads)
        receiver, start = self.host[piece] * self.reads.shape[1] + place, self.start[piece]
        return np.column_stack([np.full_like(start, row), receiver, sender[piece], start, start + self.tokens[piece]])


def moves(problem: RouteProblem) -> tuple[Int64, Int64]:
    """How the rows of K/V travel that groups read and do not hold, as moves ``[m, 5]`` in no order.

    Returns:
        From owners, to readers on the same host and to relays on other hosts; and from relays to the other readers on
        their hosts.
    """
    size, direct, passed = problem.host_groups, [], []
    load = np.zeros((-(-problem.num_groups // size), size), np.int64)  # tokens that each group gets from other hosts
    for row, needs in enumerate(problem.needs):
        pieces = _pieces(needs, problem.layout, row, size)
        inside = pieces.owner // size == pieces.host
        near, far, relay = pieces.of(inside), *_relayed(pieces.of(~inside), load)
        alone = np.arange(size) == (relay % size)[:, None]
        direct += [near.moves(near.owner, row), far._replace(reads=alone).moves(far.owner, row)]
        passed.append(far._replace(reads=far.reads & ~alone).moves(relay, row))
    return np.concatenate(direct), np.concatenate(passed)


def _pieces(needs: list[Int64], layout: Layout, row: int, places: int) -> _Pieces:
    """The pieces that the groups of every host read and do not hold, by host, then start."""
    length = layout.seq_len
    reader = np.repeat(np.arange(layout.num_ranks), [len(runs) for runs in needs])
    # The keys of one host come after those of the host before, so that one search serves all hosts.
    runs = np.concatenate(needs) + (reader // places * length)[:, None]
    edges = np.unique(runs)
    left, right = edges[:-1], edges[1:]
    # A position lies inside ascending runs when an odd number of their edges are at or before it.
    of_place = (runs[reader % places == place].ravel() for place in range(places))
    reads = np.stack([np.searchsorted(each, left, side="right") % 2 == 1 for each in of_place], axis=1)
    some = reads.any(axis=1)
    host, start = np.divmod(left[some], length)
    run, owner, both = layout.owners_of(np.column_stack([start, start + (right - left)[some]]), row)
    return _Pieces(host[run], owner, both[:, 0], both[:, 1] - both[:, 0], reads[some][run])


def _relayed(pieces: _Pieces, load: Int64) -> tuple[_Pieces, Int64]:
    """The pieces, cut where their relay changes, and the relay of each; adds to `load`."""
    if len(pieces.host) == 0:
        return pieces, pieces.owner
    # Kinds: the same host, and the same groups of it that read. One after the other, as positions of one line.
    kind = np.column_stack([pieces.host, np.packbits(pieces.reads, axis=1)])
    order = np.lexsort(kind.T[::-1])
    pieces, kind = pieces.of(order), kind[order]
    first = np.flatnonzero(np.append(True, (kind[1:] != kind[:-1]).any(axis=1)))
    amount = np.add.reduceat(pieces.tokens, first)
    cuts = np.cumsum(_shares(pieces.host[first], pieces.reads[first], amount, load))
    begin = np.cumsum(pieces.tokens) - pieces.tokens
    edges = np.unique(np.concatenate([begin, cuts]))  # of no kind all shares are empty, so the last cut is the end
    left = edges[:-1]
    piece = np.searchsorted(begin, left, side="right") - 1
    place = np.searchsorted(cuts, left, side="right") % load.shape[1]
    cut = pieces.of(piece)
    cut = cut._replace(start=cut.start + left - begin[piece], tokens=np.diff(edges))
    return cut, cut.host * load.shape[1] + place


def _shares(host: Int64, reads: np.ndarray, amount: Int64, load: Int64) -> Int64:
    """Tokens of each kind that each group of its host relays, int64 ``[kinds, P]``; adds to `load` ``[H, P]``."""
    order = np.lexsort((reads.sum(axis=1), host))
    first = np.searchsorted(host[order], host[order])
    turn = np.arange(len(order)) - first
    shares = np.zeros(reads.shape, np.int64)
    for i in range(int(turn.max()) + 1):  # one kind of every host at a time
        now = order[turn == i]
        shares[now] = _filled(load[host[now]], reads[now], amount[now])
        load[host[now]] += shares[now]
    return shares


def _filled(load: Int64, may: np.ndarray, amount: Int64) -> Int64:
    """Shares of each amount that bring the lowest of the loads that may grow to one height; int64 ``[n, P]``."""
    height = np.where(may, load, load.max() + amount.max() + 1)  # others lie higher than any can rise
    order = np.argsort(height, axis=1, kind="stable")
    height = np.take_along_axis(height, order, axis=1)
    total, count = np.cumsum(height, axis=1), np.arange(1, height.shape[1] + 1)
    used = (count * height - total <= amount[:, None]).sum(axis=1)  # the first `used` rise
    level, rest = np.divmod(amount + total[np.arange(len(used)), used - 1], used)
    risen = level[:, None] + (count <= rest[:, None]) - height
    shares = np.empty_like(height)
    np.put_along_axis(shares, order, np.where(count <= used[:, None], risen, 0), axis=1)
    return shares
