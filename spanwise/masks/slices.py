"""Masks as slices: rectangles of queries and keys, each full or cut along one or both diagonals.

MagiAttention and its flexible flash attention describe masks in this language. Between two neighbouring edges of the
slices' query ranges lies a *band* of rows: each row of it has the same slices in the same order, and the ends of a
slice's span move by 0 or 1 key a row. So all checks look at bands, never at single rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from spanwise.masks import spans
from spanwise.masks.arrays import Bool, Int32, Int64
from spanwise.masks.checks import check_length, check_positive, int_array
from spanwise.masks.stretches import Stretches, span_arrays

_PAIRS_AT_ONCE = 2**21
"""Pairs of a band and a slice that are looked at together; they take about 300 MiB."""

_NAMES = "0 full, 1 causal, 2 inverse causal, 3 bi-causal"


class _Pairs(NamedTuple):
    """A band and a slice that covers it, int64 ``[pairs]`` each, by band and then by key."""

    band: Int64
    slice: Int64
    start: Int64  # of the span in the first row of the band
    end: Int64
    start_step: Int64  # keys that it moves by from row to row: 0 or 1
    end_step: Int64

    def take(self, at: Int64) -> _Pairs:
        return _Pairs(*(x[at] for x in self))


def from_slices(
    q_ranges: Any,
    k_ranges: Any,
    types: Any,
    q_len: SupportsIndex | None,
    kv_len: SupportsIndex | None,
    max_spans: SupportsIndex,
) -> tuple[Int32, Int32, int]:
    """Canonical ``start, end`` ``[1, num_spans, q_len]`` and kv_len; see `SpanMask.from_slices`."""
    q, k, kind = _check_ranges(q_ranges, "q_ranges"), _check_ranges(k_ranges, "k_ranges"), _check_types(types)
    if not len(q) == len(k) == len(kind):
        raise ValueError(
            f"q_ranges, k_ranges and types must have an entry for each slice, got {len(q)}, {len(k)} and {len(kind)}"
        )
    rows = _length(q, q_len, int(q[:, 1].max(initial=0)), "q")
    keys = _length(k, kv_len, rows, "k")
    limit = check_positive(max_spans, "max_spans")
    # A slice that is taller than wide has rows without a key: the first ones if causal, the last ones if inverse
    # causal, all if both. Without them, slices have a key in every row, and disjoint ones never change their order.
    height, width = q[:, 1] - q[:, 0], k[:, 1] - k[:, 0]
    without = np.maximum(height - width, 0)
    first, stop = q[:, 0] + without * (kind & 1), q[:, 1] - without * (kind >> 1)
    some = np.flatnonzero((first < stop) & (width > 0) & ((kind < 3) | (without == 0)))
    edges = np.unique(np.concatenate([first[some], stop[some], [0, rows]]))

    low, high = np.searchsorted(edges, first[some]), np.searchsorted(edges, stop[some])
    found = []
    for begin, end in _groups(low, high, len(edges) - 1):
        found.append(_of_bands(begin, end, some, low, high, edges, (q, k, kind)))
    pairs = _Pairs(*map(np.concatenate, zip(*found, strict=True)))
    _check_spans(pairs, edges, limit)
    return *_rows(pairs, edges, rows), keys


def _groups(low: Int64, high: Int64, num_bands: int) -> Iterable[tuple[int, int]]:
    """Cuts the bands where about `_PAIRS_AT_ONCE` pairs of a band and a slice have come together."""
    slices_of = np.bincount(low, minlength=num_bands + 1) - np.bincount(high, minlength=num_bands + 1)
    pairs = np.cumsum(np.cumsum(slices_of)[:num_bands])
    total = int(pairs[-1]) if len(pairs) else 0
    cuts = np.searchsorted(pairs, np.arange(_PAIRS_AT_ONCE, total, _PAIRS_AT_ONCE), side="right")
    return itertools.pairwise(np.unique([0, *cuts.tolist(), max(num_bands, 1)]).tolist())


def _of_bands(
    begin: int, end: int, some: Int64, low: Int64, high: Int64, edges: Int64, slices: tuple[Int64, Int64, Int64]
) -> _Pairs:
    """The spans of the bands ``[begin, end)``: pairs that touch in every row of a band are one.

    Args:
        some: slices with a key.
        low, high: of each of them the first band, and one past the last.

    Raises:
        ValueError: two slices overlap.
    """
    q, k, kind = slices
    from_band = np.maximum(low, begin)
    count = np.maximum(np.minimum(high, end) - from_band, 0)
    band = np.repeat(from_band - np.cumsum(count) + count, count) + np.arange(count.sum())
    of = np.repeat(some, count)
    start_step, end_step = kind[of] >> 1, kind[of] & 1
    start = k[of, 0] + start_step * (edges[band] - q[of, 0])
    stop = k[of, 1] - end_step * (q[of, 1] - 1 - edges[band])
    pairs = _Pairs(band, of, start, stop, start_step, end_step).take(np.lexsort((start, band)))
    gap, last_gap = _gaps(pairs, edges)
    for n in np.flatnonzero(np.minimum(gap, last_gap) < 0)[:1]:
        _refuse_overlap(pairs, int(n), int(gap[n]), edges, slices)
    return _joined(pairs, (gap == 0) & (last_gap == 0))


def _check_ranges(ranges: Any, name: str) -> Int64:
    array = int_array(ranges, name).astype(np.int64)
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} must be integers [num_slices, 2], got shape {list(array.shape)}")
    wrong = (array[:, 0] < 0) | (array[:, 0] > array[:, 1])
    if bool(wrong.any()):
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{name} must be [start, stop) with 0 <= start <= stop, but {name}[{at}] = {array[at].tolist()}"
        )
    return array


def _check_types(types: Any) -> Int64:
    kind = int_array(types, "types").astype(np.int64)
    if kind.ndim != 1:
        raise ValueError(f"types must be integers [num_slices], got shape {list(kind.shape)}")
    wrong = (kind < 0) | (kind > 3)
    if bool(wrong.any()):
        at = int(np.argmax(wrong))
        raise ValueError(f"types must be {_NAMES}, but types[{at}] = {kind[at]}")
    return kind


def _length(ranges: Int64, given: SupportsIndex | None, default: int, side: str) -> int:
    name = "q_len" if side == "q" else "kv_len"
    length = check_length(default if given is None else given, name)
    if len(ranges) and ranges[:, 1].max() > length:
        at = int(np.argmax(ranges[:, 1] > length))
        which = f"{name}={length}" + (" (by default q_len)" if given is None else "")
        raise ValueError(f"{side}_ranges[{at}] = {ranges[at].tolist()} ends after {which}; pass the right {name}")
    return length


def _gaps(pairs: _Pairs, edges: Int64) -> tuple[Int64, Int64]:
    """Keys between each pair and the next one of its band, in the first and in the last row; else 1.

    The gap is linear in the row.
    """
    same = pairs.band[1:] == pairs.band[:-1]
    gap = pairs.start[1:] - pairs.end[:-1]
    steps = np.diff(edges)[pairs.band[1:]] - 1 if len(pairs.band) else gap
    last_gap = gap + steps * (pairs.start_step[1:] - pairs.end_step[:-1])
    return np.where(same, gap, 1), np.where(same, last_gap, 1)


def _refuse_overlap(pairs: _Pairs, n: int, gap: int, edges: Int64, slices: tuple[Int64, Int64, Int64]) -> None:
    q, k, kind = slices
    later = max(gap + 1, 0)  # rows until the gap, which shrinks by one key a row, is negative
    row, key = edges[pairs.band[n]] + later, pairs.start[n + 1] + later * pairs.start_step[n + 1]
    shown = [
        f"{s} (queries {q[s].tolist()}, keys {k[s].tolist()}, type {kind[s]})" for s in sorted(pairs.slice[n : n + 2])
    ]
    raise ValueError(
        f"slices must not overlap, but slices {' and '.join(shown)} both hold key {key} of row {row}; make a mask from "
        f"each and join them with `|`"
    )


def _joined(pairs: _Pairs, touching: Bool) -> _Pairs:
    """The pairs, where neighbours that touch in every row of a band are one."""
    first = np.flatnonzero(np.concatenate([[True], ~touching]))[: len(pairs.band)]
    last = np.append(first[1:], len(pairs.band))[: len(first)] - 1
    return pairs.take(first)._replace(end=pairs.end[last], end_step=pairs.end_step[last])


def _check_spans(pairs: _Pairs, edges: Int64, limit: int) -> None:
    """Refuses rows of more than ``limit`` spans before any memory is taken for them."""
    count = np.bincount(pairs.band, minlength=len(edges) - 1)
    # Neighbours may still touch in the first or in the last row of a band. Only where a band has no other row is every
    # row left with fewer spans than the band has pairs.
    touching = (np.bincount(pairs.band[1:][gap == 0], minlength=len(count)) for gap in _gaps(pairs, edges))
    count -= np.where(np.diff(edges) == 2, np.minimum(*touching), 0)
    if count.max(initial=0) > limit:
        band = int(np.argmax(count > limit))
        raise ValueError(
            f"rows {edges[band]} to {edges[band + 1] - 1} need {count[band]} spans, more than max_spans={limit}; "
            f"pass max_spans={count.max()}, which takes {8 * int(count.max()) * int(edges[-1]):,} bytes"
        )


def _rows(pairs: _Pairs, edges: Int64, q_len: int) -> tuple[Int32, Int32]:
    """Canonical arrays ``[1, num_spans, q_len]`` of the bands."""
    count = np.bincount(pairs.band, minlength=max(len(edges) - 1, 1))
    slot = np.arange(len(pairs.band)) - (np.cumsum(count) - count)[pairs.band]
    slots = []
    for j in range(max(int(count.max(initial=0)), 1)):
        of = pairs.take(np.flatnonzero(slot == j))
        slots.append(Stretches(edges[of.band], edges[of.band + 1], of.start, of.end, of.start_step, of.end_step))
    start, end = span_arrays(slots, q_len)
    start, end = spans.canonicalise(start[None], end[None])
    return spans.trim(start.copy(), end.copy())


class _Knots(NamedTuple):
    """Spans where a chain begins, ends or changes its move, and their neighbours; integers ``[knots]`` each."""

    row: Int64
    low: Int64
    high: Int64
    move: Int64  # type of the slice that holds this span and the next one of its chain; -1 at the end of a chain


def to_slices(start: Int32, end: Int32) -> tuple[Int32, Int32, Int32]:
    """Slices of canonical spans ``[num_spans, q_len]``; see `SpanMask.to_slices`.

    A span continues in the next row if each of its ends moves by 0 or 1 key there: at most one span of that row fits,
    because spans of a row do not touch. Along such a *chain* of spans, each stretch of equal moves is a slice.
    """
    slots = [_knots(s, e) for s, e in zip(start, end, strict=True)]
    row, low, high, move = _in_chains(slots)
    first = np.flatnonzero(_begins(move))
    last = np.append(first[1:], len(row))[: len(first)] - 1
    kind = np.where(last > first, move[first], 0)
    q = np.stack([row[first], row[last] + 1], axis=1)
    k = np.stack([low[first], high[last]], axis=1)
    order = np.lexsort((k[:, 0], q[:, 0]))
    return q[order].astype(np.int32), k[order].astype(np.int32), kind[order].astype(np.int32)


def _knots(start: Int32, end: Int32) -> _Knots:
    """The knots of one slot ``[q_len]``, by row."""
    filled = start < end
    low_step, high_step = np.diff(start), np.diff(end)
    fits = ((low_step | high_step).view(np.uint32) <= 1) & filled[1:] & filled[:-1]  # both steps are 0 or 1
    move = np.where(fits, 2 * low_step + high_step, -1).astype(np.int8)
    knots = filled.copy()
    # Within a stretch, its second span is a knot, too: the stretch may have to leave its first one to another.
    knots[2:-1] &= (move[2:] != move[1:-1]) | (move[1:-1] != move[:-2]) | (move[2:] < 0)
    row = np.flatnonzero(knots)
    return _Knots(
        row, start[row].astype(np.int64), end[row].astype(np.int64), np.append(move, -1)[row].astype(np.int64)
    )


def _in_chains(slots: list[_Knots]) -> _Knots:
    """The knots of all slots, in an order in which each chain is contiguous."""
    row, low, high, move = (np.concatenate(x) for x in zip(*slots, strict=True))
    last = np.flatnonzero(move < 0)
    first = np.concatenate([[0], last[:-1] + 1])[: len(last)]
    # Where a chain changes its slot, because other spans begin or end, it goes on with another such section.
    before = np.arange(len(last))
    begin = 0
    for slot in slots:
        next_ = np.searchsorted(slot.row, row[last] + 1)
        of = np.flatnonzero(next_ < len(slot.row))
        a, b = last[of], next_[of] + begin
        begin += len(slot.row)
        low_step, high_step = low[b] - low[a], high[b] - high[a]
        fits = (row[b] == row[a] + 1) & (low_step >> 1 == 0) & (high_step >> 1 == 0)
        move[a[fits]] = (2 * low_step + high_step)[fits]
        before[np.searchsorted(first, b[fits])] = of[fits]
    while bool((before[before] != before).any()):  # each time twice as far, to the first section of the chain
        before = before[before]
    sections = np.lexsort((row[first], before))
    length = (last - first + 1)[sections]
    order = np.repeat(first[sections] - np.cumsum(length) + length, length) + np.arange(len(row))
    return _Knots(row[order], low[order], high[order], move[order])


def _begins(move: Int64) -> Bool:
    """Which knots begin a slice, given the moves of knots in chains; as few as can be.

    A span between two stretches of equal moves may belong to either. The earlier one takes it, if that has a slice: a
    stretch of one move whose first span is taken has none, and leaves its second span to the next stretch.
    """
    knots, move = len(move), move[:-1]  # from each knot to the next one
    first = np.flatnonzero(np.concatenate([[True], (move[1:] != move[:-1]) | (move[1:] < 0)]))[: len(move)]
    short = np.diff(np.append(first, len(move))) == 1
    fresh = np.concatenate([[True], move[first[1:] - 1] < 0])[: len(first)]  # the first stretch of a chain
    known = fresh | np.concatenate([[True], ~short])[: len(first)]
    since = np.maximum.accumulate(np.where(known, np.arange(len(first)), 0))
    taken = ~fresh[since] ^ ((np.arange(len(first)) - since) % 2 == 1)
    together = move >= 0
    together[first[taken]] = False
    return np.concatenate([[True], ~together])[:knots]
