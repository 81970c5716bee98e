"""Spread: ranks take equal seconds of a step, not equal tokens; long documents lie on as few ranks as they need.

Seconds of a token are those of its attention and of the linear layers. A document that takes longer than a rank may is
cut over several consecutive ranks, head and tail, which balances a causal mask. The other documents fill what is left
on the ranks, longest first; few are cut. Ranks of long documents hold few tokens then, the others more, up to a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.arrays import Float64, Int64

# Ranks of a long document over the fewest that its seconds need. More ranks leave each more room for short documents,
# which helps where `max_tokens` binds.
_WIDER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0)
_CLOSE = 1.01  # stop where the busiest rank has at most this multiple of the mean
_BISECTIONS = 14  # of the seconds of the busiest rank, to 1/16384 of the range


@dataclass(frozen=True)
class Spread:
    """Balances the seconds of a step with unequal tokens. Needs ``problem.cu_seqlens`` and batch 1.

    Args:
        pair_seconds: of one (query, key) pair, forward and backward.
        token_seconds: of one token in all linear layers, forward and backward.
        max_tokens: most tokens of a rank.
        host_size: ranks of a host, which a long document then crosses only if it needs more; None: all links are alike.

    Raises:
        ValueError: seconds that are negative or both 0, or a limit below 1.
    """

    pair_seconds: float
    token_seconds: float
    max_tokens: int
    host_size: int | None = None

    def __post_init__(self) -> None:
        seconds = (self.pair_seconds, self.token_seconds)
        if not all(math.isfinite(x) and x >= 0 for x in seconds) or not any(seconds):
            raise ValueError(f"pair_seconds and token_seconds must be at least 0 and not both 0, got {seconds}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.host_size is not None and self.host_size < 1:
            raise ValueError(
                f"host_size must be at least 1, or None for links that are all alike, got {self.host_size}"
            )

    def assign(self, problem: LayoutProblem, num_ranks: int) -> Layout:
        if problem.cu_seqlens_rows is None or problem.batch_size > 1:
            raise ValueError(
                "Spread needs cu_seqlens and masks of batch 1: give make_plan the offsets of the documents"
            )
        if self.max_tokens * num_ranks < problem.seq_len:
            raise ValueError(
                f"{problem.seq_len} tokens do not fit on {num_ranks} ranks of at most max_tokens={self.max_tokens}"
            )
        offsets = np.unique(problem.cu_seqlens_rows[0])
        seconds = problem.area[0] * self.pair_seconds + self.token_seconds
        filling = _Filling(offsets, np.append(0.0, np.cumsum(seconds)), num_ranks, self)
        return Layout([_no_rank_empty(filling.best(), num_ranks)], num_ranks, problem.seq_len)


class _Filling:
    """Ways to fill the ranks, each for a bound on the seconds of a rank; ``below[i]``: of the first ``i`` tokens."""

    def __init__(self, offsets: Int64, below: Float64, num_ranks: int, given: Spread) -> None:
        self.offsets, self.below, self.num_ranks, self.max_tokens = offsets, below, num_ranks, given.max_tokens
        self.host_size = min(given.host_size or num_ranks, num_ranks)
        self.lengths = np.diff(offsets)
        self.seconds = np.diff(below[offsets])
        self.by_seconds = np.argsort(-self.seconds, kind="stable")

    def best(self) -> Int64:
        """Pieces of the filling whose busiest rank has least seconds, int ``[n, 3]``."""
        mean = float(self.below[-1]) / self.num_ranks
        least, found = math.inf, None
        for wider in _WIDER:
            low, high = mean, min(least, 16 * mean)
            pieces = self.fill(high, wider)
            if pieces is None:
                continue
            found, least = pieces, high
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                pieces = self.fill(middle, wider)
                if pieces is None:
                    low = middle
                else:
                    found, least, high = pieces, middle, middle
            if least <= _CLOSE * mean:
                break
        return self.even() if found is None else found

    def even(self) -> Int64:
        """Consecutive chunks of equal tokens: there is a limit that nothing else keeps."""
        cuts = np.arange(self.num_ranks + 1) * int(self.offsets[-1]) // self.num_ranks
        return np.column_stack([np.arange(self.num_ranks), cuts[:-1], cuts[1:]])

    def fill(self, bound: float, wider: float) -> Int64 | None:
        """Pieces such that no rank exceeds `bound` seconds or the limit of tokens; None if some tokens are left."""
        room = np.full(self.num_ranks, bound * (1 + 1e-9))
        space = np.full(self.num_ranks, self.max_tokens)
        pieces: list[Int64] = []
        used, is_short = [0] * -(-self.num_ranks // self.host_size), np.ones(len(self.lengths), dtype=bool)
        for document in self.by_seconds.tolist():
            if self.seconds[document] * wider <= bound and self.lengths[document] <= self.max_tokens:
                break
            is_short[document] = False
            ranks, chunks = self._chunks(document, bound, wider, used)
            np.subtract.at(room, ranks, self.below[chunks[:, 1]] - self.below[chunks[:, 0]])
            np.subtract.at(space, ranks, chunks[:, 1] - chunks[:, 0])
            pieces.append(np.column_stack([ranks, chunks]))
        if room.min() < 0 or space.min() < 0:
            return None
        rest = self._fill_short(self.by_seconds[is_short[self.by_seconds]], room, space)
        return None if rest is None else np.concatenate([*pieces, rest])

    def _chunks(self, document: int, bound: float, wider: float, used: list[int]) -> tuple[Int64, Int64]:
        """Head and tail chunks of a long document, and their ranks; adds these to `used`, ranks of each host."""
        start, length = int(self.offsets[document]), int(self.lengths[document])
        needed = max(wider * float(self.seconds[document]) / bound, length / self.max_tokens)
        count = min(self.num_ranks, max(1, math.ceil(needed)), length)
        cuts = start + np.arange(2 * count + 1) * length // (2 * count)
        place = np.arange(2 * count)
        ranks = (self._first_rank(count, used) + np.minimum(place, 2 * count - 1 - place)) % self.num_ranks
        return ranks, np.column_stack([cuts[:-1], cuts[1:]])

    def _first_rank(self, count: int, used: list[int]) -> int:
        """Where `count` ranks begin: inside one host if it has so many left (the fullest such), else on empty hosts."""
        size, hosts = self.host_size, len(used)
        inside = [host for host in range(hosts) if size - used[host] >= count]
        if inside:
            host = max(inside, key=lambda one: (used[one], -one))
            used[host] += count
            return host * size + used[host] - count
        wide = -(-count // size)
        empty = (host for host in range(hosts - wide + 1) if not any(used[host : host + wide]))
        # Otherwise behind all others, around the ranks: long documents then share some.
        first = next((host * size for host in empty), sum(used) % self.num_ranks)
        for rank in range(first, first + count):
            used[rank % self.num_ranks // size] += 1
        return first

    def _fill_short(self, documents: Int64, room: Float64, space: Int64) -> Int64 | None:
        """The documents, end to end, over what is left on each rank in turn; None if they do not fit.

        Longest documents first, on the ranks with most room: short ones fill what long ones leave, and few are cut.
        """
        order = np.argsort(-room, kind="stable")
        start = self.offsets[documents]
        seconds = np.append(0.0, np.cumsum(self.seconds[documents]))
        tokens = np.append(0, np.cumsum(self.lengths[documents]))
        cuts = [0]  # in tokens of the documents laid end to end
        for left, free in zip(room[order].tolist(), space[order].tolist(), strict=True):
            if cuts[-1] == tokens[-1]:
                break
            here = int(np.searchsorted(tokens, cuts[-1], side="right")) - 1
            used = self.below[start[here] + cuts[-1] - tokens[here]] - self.below[start[here]]
            limit = seconds[here] + used + left
            last = int(np.searchsorted(seconds, limit, side="right")) - 1
            cut = int(tokens[last])
            if last < len(documents):  # part of the next one fits
                whole = self.below[start[last] : start[last] + self.lengths[documents[last]] + 1]
                cut += int(np.searchsorted(whole, whole[0] + limit - seconds[last], side="right")) - 1
            cuts.append(max(cuts[-1], min(cut, cuts[-1] + free)))
        if cuts[-1] < tokens[-1]:
            return None
        edges = np.unique(np.append(tokens, cuts))
        rank = order[np.searchsorted(cuts, edges[:-1], side="right") - 1]
        document = np.searchsorted(tokens, edges[:-1], side="right") - 1
        begin = start[document] + edges[:-1] - tokens[document]
        return np.column_stack([rank, begin, begin + np.diff(edges)])


def _no_rank_empty(pieces: Int64, num_ranks: int) -> Int64:
    """The pieces, after each rank without a token has taken half of the longest piece of the others.

    Where all pieces are single tokens, it takes one of the rank that holds most.
    """
    pieces = pieces[pieces[:, 1] < pieces[:, 2]]
    for rank in np.setdiff1d(np.arange(num_ranks), pieces[:, 0]).tolist():
        longest = int(np.argmax(pieces[:, 2] - pieces[:, 1]))
        _, start, stop = pieces[longest].tolist()
        if stop - start < 2:
            held = np.bincount(pieces[:, 0], minlength=num_ranks)
            if held.max() < 2:
                break  # fewer tokens than ranks
            pieces[np.flatnonzero(pieces[:, 0] == held.argmax())[-1], 0] = rank
            continue
        middle = (start + stop) // 2
        pieces[longest, 2] = middle
        pieces = np.append(pieces, [[rank, middle, stop]], axis=0)
    return pieces
