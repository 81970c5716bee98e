"""Masks as slices: rectangles of queries and keys, each full or cut along one or both diagonals.

MagiAttention and its flexible flash attention describe masks in this language. Between two neighbouring edges of the
slices' query ranges lies a *band* of rows: each row of it has the same slices in the same order, and the ends of a
slice's span move by 0 or 1 key a row. So all checks take bands, never single rows.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks import spans
from spanwise.masks.arrays import Int32, Int64
from spanwise.masks.checks import check_length, check_positive, int_array
from spanwise.masks.even_runs import EvenRuns, even_runs_of, span_arrays


def from_slices(
    q_ranges: Any,
    k_ranges: Any,
    types: Any,
    q_len: SupportsIndex | None,
    kv_len: SupportsIndex | None,
    max_spans: SupportsIndex,
) -> tuple[Int32, Int32, int]:
    """Canonical ``start, end`` ``[1, num_spans, q_len]`` and kv_len; see `SpanMask.from_slices`."""
    kind = int_array(types, "types").astype(np.int64)
    if kind.ndim != 1:
        raise ValueError(f"types must be integers [num_slices], got shape {list(kind.shape)}")
    for at in np.flatnonzero((kind < 0) | (kind > 3))[:1]:
        names = "0 full, 1 causal, 2 inverse causal, 3 bi-causal"
        raise ValueError(f"types must be {names}, but types[{at}] = {kind[at]}")
    q, rows = _ranges(q_ranges, "q", q_len, None)
    k, keys = _ranges(k_ranges, "k", kv_len, rows)
    if not len(q) == len(k) == len(kind):
        raise ValueError(
            f"q_ranges, k_ranges and types must have an entry for each slice, got {len(q)}, {len(k)} and {len(kind)}"
        )
    limit = check_positive(max_spans, "max_spans")
    band, of = _bands(q, k, kind, rows)
    count = np.unique(band, return_counts=True)[1]
    if count.max(initial=0) > limit:
        at = int((np.cumsum(count) - count)[np.argmax(count > limit)])
        raise ValueError(
            f"rows {of.first[at]} to {of.stop[at] - 1} need {count[count > limit][0]} spans, more than "
            f"max_spans={limit}; pass max_spans={count.max()}, which takes {8 * int(count.max()) * rows:,} bytes"
        )
    slot = np.arange(len(band)) - np.repeat(np.cumsum(count) - count, count)
    slots = [EvenRuns(*(x[slot == j] for x in of)) for j in range(max(int(count.max(initial=0)), 1))]
    start, end = span_arrays(slots, rows)
    # Neighbours may still touch in the first or the last row of a band.
    return *spans.canonicalise(start[None], end[None]), keys


def _ranges(ranges: Any, side: str, given: SupportsIndex | None, default: int | None) -> tuple[Int64, int]:
    """Checked ranges, int64 ``[num_slices, 2]``, and the length of their side; by default it ends with them."""
    name, length_name = f"{side}_ranges", "q_len" if side == "q" else "kv_len"
    array = int_array(ranges, name).astype(np.int64)
    array = array.reshape(0, 2) if array.size == 0 else array
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} must be integers [num_slices, 2], got shape {list(array.shape)}")
    for at in np.flatnonzero((array[:, 0] < 0) | (array[:, 0] > array[:, 1]))[:1]:
        raise ValueError(
            f"{name} must be [start, stop) with 0 <= start <= stop, but {name}[{at}] = {array[at].tolist()}"
        )
    if given is None:
        given = int(array[:, 1].max(initial=0)) if default is None else default
        default_name = " (by default q_len)"
    else:
        default_name = ""
    length = check_length(given, length_name)
    for at in np.flatnonzero(array[:, 1] > length)[:1]:
        raise ValueError(
            f"{name}[{at}] = {array[at].tolist()} ends after {length_name}={length}{default_name}; pass the right "
            f"{length_name}"
        )
    return array, length


def _bands(q: Int64, k: Int64, kind: Int64, rows: int) -> tuple[Int64, EvenRuns]:
    """The spans of all bands, by band and then by key, and the band of each; ``ValueError`` if slices overlap."""
    # A slice that is taller than wide has rows without a key: the first ones if causal, the last ones if inverse
    # causal, all if both. Without them, slices have a key in every row, and disjoint ones never change their order.
    height, width = q[:, 1] - q[:, 0], k[:, 1] - k[:, 0]
    without = np.maximum(height - width, 0)
    first, stop = q[:, 0] + without * (kind & 1), q[:, 1] - without * (kind >> 1)
    filled = np.flatnonzero((first < stop) & (width > 0) & ((kind < 3) | (without == 0)))
    edges = np.unique(np.concatenate([first[filled], stop[filled], [0, rows]]))
    # Spans that touch in every row of a band are joined. Of those that touch in its first or its last row only, each
    # row between needs both. So without bands of two rows, the fullest row of a band needs as many spans as remain.
    edges = np.union1d(edges, edges[:-1][np.diff(edges) == 2] + 1)

    low = np.searchsorted(edges, first[filled])
    count = np.searchsorted(edges, stop[filled]) - low
    band = np.repeat(low - np.cumsum(count) + count, count) + np.arange(count.sum())
    of = np.repeat(filled, count)
    start = k[of, 0] + (kind[of] >> 1) * (edges[band] - q[of, 0])
    order = np.lexsort((start, band))
    band, of, start = band[order], of[order], start[order]
    end = k[of, 1] - (kind[of] & 1) * (q[of, 1] - 1 - edges[band])
    found = EvenRuns(edges[band], edges[np.minimum(band + 1, len(edges) - 1)], start, end, kind[of] >> 1, kind[of] & 1)

    # Keys between neighbours of a band, in its first and in its last row; the gap is linear in the row.
    same, last_start = band[1:] == band[:-1], start + found.start_step * (found.stop - found.first - 1)
    gap, last_gap = start[1:] - end[:-1], last_start[1:] - found.last_end[:-1]
    for n in np.flatnonzero(same & (np.minimum(gap, last_gap) < 0))[:1]:
        later = max(int(gap[n]) + 1, 0)  # rows until the gap, which shrinks by one key a row, is negative
        row, key = found.first[n] + later, start[n + 1] + later * found.start_step[n + 1]
        shown = [f"{s} (queries {q[s].tolist()}, keys {k[s].tolist()}, type {kind[s]})" for s in sorted(of[n : n + 2])]
        raise ValueError(
            f"slices must not overlap, but slices {' and '.join(shown)} both hold key {key} of row {row}; make a mask "
            f"from each and join them with `|`"
        )
    head = np.flatnonzero(np.append(True, ~same | (gap != 0) | (last_gap != 0))[: len(band)])
    tail = np.append(head[1:], len(band))[: len(head)] - 1
    found = EvenRuns(*(x[head] for x in found))._replace(end=end[tail], end_step=found.end_step[tail])
    return band[head], found


def to_slices(start: Int32, end: Int32) -> tuple[Int32, Int32, Int32]:
    """Slices of canonical spans ``[num_spans, q_len]``; see `SpanMask.to_slices`.

    A span goes on in the next row where each of its ends moves by 0 or 1 key: at most one span of that row fits,
    because spans of a row do not touch. A slice takes rows as long as the move stays the same. That makes as few slices
    as can be.
    """
    slots = [even_runs_of(s, e) for s, e in zip(start, end, strict=True)]
    every = np.concatenate([np.column_stack([*of, of.last_end]) for of in slots])
    found: list[list[int]] = []  # first row, stop row, first key, last end, move (-1 in slices of one row)
    reached: dict[tuple[int, int, int], list[int]] = {}  # each slice by its stop row and the span before that
    by_row = every[np.argsort(every[:, 0], kind="stable")]
    for first, stop, low, high, low_step, high_step, last_high in by_row.tolist():
        last, own = (stop, low + low_step * (stop - first - 1), last_high), 2 * low_step + high_step
        before = ((move, (first, low - (move >> 1), high - (move & 1))) for move in range(4))
        move, key = next((pair for pair in before if pair[1] in reached), (-1, last))
        slice_ = reached.get(key, [0, 0, 0, 0, -2])
        taken = slice_[4] in (-1, move)
        if taken:  # that slice takes the first row
            slice_[1], slice_[3:] = first + 1, [high, move]
            first, low, high = first + 1, low + low_step, high + high_step
        if taken and own == move and first < stop:  # and the others
            slice_[1], slice_[3] = stop, last_high
        elif first < stop:
            slice_ = [first, stop, low, last_high, own if stop - first > 1 else -1]
            found.append(slice_)
        reached[last] = slice_
    rows = np.array(found, np.int32).reshape(-1, 5)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 0]))]
    return rows[:, :2].copy(), rows[:, 2:4].copy(), np.maximum(rows[:, 4], 0)
