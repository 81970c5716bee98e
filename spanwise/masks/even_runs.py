"""Even runs: a mask as intervals of rows in which both ends of a span move evenly, by 0 or 1 key a row.

Masks in use have a few of them for each document, frame or window. What an even run reads, its pairs and the tokens
that it joins have closed forms. So work, needs and documents of a plan take time by even runs, not by tokens. A mask
without such structure has as many even runs as spans, and the results are the same.

`SpanArrays.even_runs` finds them once for each mask, slot by slot: the j-th spans of all rows are slot j.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from spanwise.masks.arrays import Int32, Int64, IntArray

_ROWS_AT_ONCE = 2**15  # fits a core's cache: 16M rows of documents take 25 ms, 45 ms with 2**13, 60 in one go


class EvenRuns(NamedTuple):
    """Even runs of spans, int64 ``[n]`` each; none is empty.

    Attributes:
        first, stop: rows ``[first, stop)``.
        start, end: the span of the first row.
        start_step, end_step: keys by which its ends move from row to row, 0 or 1.
    """

    first: Int64
    stop: Int64
    start: Int64
    end: Int64
    start_step: Int64
    end_step: Int64

    @property
    def last_end(self) -> Int64:
        """End of the last row's span; the rows together read all keys from `start` to here."""
        return self.end + self.end_step * (self.stop - self.first - 1)

    @property
    def pairs(self) -> Int64:
        """(query, key) pairs of each even run."""
        rows = self.stop - self.first
        return rows * (self.end - self.start) + (self.end_step - self.start_step) * (rows * (rows - 1) // 2)

    @property
    def crossed(self) -> Int64:
        """Positions ``[low, high)`` between two tokens of which one reads the other or both are read; ``[n, 2]``."""
        low, high = np.minimum(self.start, self.first) + 1, np.maximum(self.last_end, self.stop)
        # Rows that read themselves alone cross nothing; in all other even runs the rows' intervals overlap or touch.
        alone = (self.start == self.first) & (self.end == self.first + 1) & (self.start_step + self.end_step == 2)
        return np.column_stack([low, np.where(alone, low, high)])

    @property
    def joined(self) -> Int64:
        """Tokens ``[low, high)`` that read the token before them, then those that it reads; ``[2 n, 2]``."""
        found = []
        for key in (-1, 1):  # row i reads token i + key; the later one of the two is joined
            at, later = self.first + key, max(key, 0)
            low = np.where(self.start_step == 1, np.where(self.start <= at, self.first, self.stop), self.start - key)
            high = np.where(self.end_step == 1, np.where(self.end > at, self.stop, self.first), self.end - key)
            found.append(np.column_stack([np.maximum(low, self.first), np.minimum(high, self.stop)]) + later)
        return np.concatenate(found)


def even_runs_of(start: Int32, end: Int32) -> EvenRuns:
    """The even runs of one slot ``[q_len]``, ascending; rows with an empty span are in none."""
    found = [np.zeros(min(len(start), 1), np.int64)]
    for low in range(0, len(start), _ROWS_AT_ONCE):
        begin = max(low - 2, 0)
        s, e = start[begin : low + _ROWS_AT_ONCE], end[begin : low + _ROWS_AT_ONCE]
        filled, start_step, end_step = s < e, s[1:] - s[:-1], e[1:] - e[:-1]
        fits = (start_step | end_step).view(np.uint32) <= 1  # both are 0 or 1
        fits &= filled[1:] == filled[:-1]
        move = 2 * start_step + end_step
        opens = ~fits
        opens[1:] |= fits[:-1] & (move[1:] != move[:-1])
        rows = np.flatnonzero(opens) + (begin + 1)
        found.append(rows[np.searchsorted(rows, max(low, 1)) :])
    first = np.concatenate(found)
    stop = np.append(first[1:], len(start))[: len(first)]
    filled = start[first] < end[first]
    first, stop = first[filled], stop[filled]
    second = np.minimum(first + 1, stop - 1)
    start_at, end_at = start[first].astype(np.int64), end[first].astype(np.int64)
    return EvenRuns(first, stop, start_at, end_at, start[second] - start_at, end[second] - end_at)


def span_arrays(slots: Sequence[EvenRuns], q_len: int) -> tuple[Int32, Int32]:
    """``start, end`` ``[num_slots, q_len]`` of the even runs of each slot; (0, 0) in rows of none."""
    found = np.empty((2, len(slots), q_len), np.int32)
    for j, of in enumerate(slots):
        rows = np.append(0, np.column_stack([of.first, of.stop]))  # each run, and the gap behind it
        length = np.diff(rows, append=q_len)
        for side, (begin, step) in enumerate(((of.start, of.start_step), (of.end, of.end_step))):
            value, steps = (np.append(0, np.column_stack([x, np.zeros_like(x)])) for x in (begin, step))
            last = value + steps * (length - 1)
            some = np.flatnonzero(length)
            changes = np.repeat(steps.astype(np.int32), length)
            changes[rows[some]] = value[some] - np.append(0, last[some[:-1]])[: len(some)]
            np.cumsum(changes, dtype=np.int32, out=found[side, j])
    return found[0], found[1]


def cut(slots: Sequence[EvenRuns], runs: Int64) -> tuple[Int64, EvenRuns]:
    """Even runs cut where they leave runs of rows ``[m, 2]``; each part with the index of its run, ``[n]``.

    Runs may stand in any order and overlap; parts are sorted by slot, then by run.
    """
    found, parts = [np.zeros(0, np.int64)], [EvenRuns(*np.zeros((6, 0), np.int64))]
    for of in slots:
        low = np.searchsorted(of.stop, runs[:, 0], side="right")
        count = np.maximum(np.searchsorted(of.first, runs[:, 1], side="left") - low, 0)
        count[runs[:, 0] >= runs[:, 1]] = 0
        run = np.repeat(np.arange(len(runs)), count)
        at = np.arange(len(run)) + np.repeat(low - np.cumsum(count) + count, count)
        part = EvenRuns(*(x[at] for x in of))
        first = np.maximum(part.first, runs[run, 0])
        later = first - part.first
        found.append(run)
        parts.append(
            part._replace(
                first=first,
                stop=np.minimum(part.stop, runs[run, 1]),
                start=part.start + later * part.start_step,
                end=part.end + later * part.end_step,
            )
        )
    return np.concatenate(found), EvenRuns(*map(np.concatenate, zip(*parts, strict=True)))


def keys_read(slots: Sequence[EvenRuns], runs: Int64, owner: Int64, stride: int) -> Int64:
    """Union of the keys that the rows of each owner read, as runs ``[n, 2]`` on one line: ``owner * stride + key``.

    Args:
        runs: rows, int64 ``[m, 2]``; their owners ``[m]``.
        stride: more than the number of keys, so that runs of two owners never touch.
    """
    run, of = cut(slots, runs)
    before = owner[run] * stride
    return merge_runs(before + of.start, before + of.last_end)


def merge_runs(start: IntArray, end: IntArray) -> Int64:
    """Union of non-empty intervals as ascending, disjoint, non-touching runs, int64 ``[n, 2]``."""
    if len(start) == 0:
        return np.zeros((0, 2), np.int64)
    start, end = start.astype(np.int64), end.astype(np.int64)
    if bool((start[1:] < start[:-1]).any()):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.append(first[1:], len(start)) - 1
    return np.stack([start[first], reach[last]], axis=1)


def by_owner(line: Int64, num_owners: int, stride: int) -> list[Int64]:
    """The runs of each owner, from the line of `keys_read`."""
    owner = line[:, :1] // stride
    edges = np.searchsorted(owner[:, 0], np.arange(num_owners + 1)).tolist()
    runs = line - owner * stride
    return [runs[low:high] for low, high in itertools.pairwise(edges)]


def outside(intervals: Iterable[Int64], length: int) -> Int64:
    """What of ``[1, length)`` lies in none of the intervals ``[n, 2]``: runs, ascending."""
    every = np.concatenate([np.zeros((0, 2), np.int64), *intervals])
    every = every[every[:, 0] < every[:, 1]]
    merged = merge_runs(every[:, 0], every[:, 1])
    gaps = np.column_stack([np.append(1, merged[:, 1]), np.append(merged[:, 0], length)])
    return gaps[gaps[:, 0] < gaps[:, 1]]
