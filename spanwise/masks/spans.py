"""Array functions behind `SpanMask`: canonical form, set operations and runs.

A mask is a pair ``start, end`` of int32 arrays ``[batch, num_spans, q_len]``: row ``i`` of batch row ``b`` reads the
keys ``start[b, j, i] <= k < end[b, j, i]`` of every slot ``j``. In *canonical* form the non-empty spans of a row come
first, ascending, disjoint and not touching; empty slots are ``(0, 0)``; no trailing slot is empty in every row. Two
masks are equal exactly when their canonical arrays are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks.arrays import Bool, Int32, Int64, IntArray
from spanwise.masks.checks import MAX_LENGTH, check_length, check_positive, check_shape, int_array

_NO_SPAN = np.iinfo(np.int64).max  # sorts behind every packed span


# ---------------------------------------------------------------- canonical form


def canonicalise(start: IntArray, end: IntArray) -> tuple[Int32, Int32]:
    """Canonical form of ``[batch, num_spans, q_len]`` spans that ascend by start within each row.

    Empty slots (``end <= start``) may stand anywhere. Touching spans are merged; overlapping ones, and spans out of
    order, raise ``ValueError``. Never sorts.
    """
    filled = start < end
    ready = not bool((~filled & (end != 0)).any())
    if ready and start.shape[1] > 1:
        apart = filled[:, :-1] & (start[:, 1:] > end[:, :-1])
        ready = bool(filled[:, -1].any()) and not bool((filled[:, 1:] & ~apart).any())
    if ready:
        return np.ascontiguousarray(start, np.int32), np.ascontiguousarray(end, np.int32)
    slots = zip(start.swapaxes(0, 1), end.swapaxes(0, 1), strict=True)
    return gather_spans(slots, start.shape[1], start.shape[0], start.shape[2], allow_overlap=False)


def gather_spans(
    slots: Iterable[tuple[IntArray, IntArray]], capacity: int, batch: int, q_len: int, *, allow_overlap: bool
) -> tuple[Int32, Int32]:
    """Canonical arrays from slots ``(start, end)`` of ``[batch, q_len]``; each row's spans ascend from slot to slot.

    ``capacity`` is the most spans that a row can have in the result. Slots may come from a generator.
    """
    rows = batch * q_len
    out_start, out_end = np.zeros((capacity, rows), np.int32), np.zeros((capacity, rows), np.int32)
    slot_of = np.full(rows, -1, np.int32)  # slot of the row's latest span
    reach = np.full(rows, -1, np.int32)  # its end
    for j, (s, e) in enumerate(slots):
        s, e = s.reshape(-1), e.reshape(-1)
        filled = s < e
        if j == 0:  # nothing to merge with: whole-array operations
            np.multiply(s, filled, out=out_start[0], casting="unsafe")
            np.multiply(e, filled, out=out_end[0], casting="unsafe")
            np.subtract(filled, 1, out=slot_of, dtype=np.int32)
            np.subtract(out_end[0], ~filled, out=reach)
            continue
        at = np.flatnonzero(filled)
        s, e, before = s[at], e[at], reach[at]
        for n in np.flatnonzero(s < before)[:1] if not allow_overlap else ():
            b, i = divmod(int(at[n]), q_len)
            raise ValueError(
                f"the spans of a row must ascend and not overlap, but in row {i} of batch row {b} span {j} is [{s[n]}, "
                f"{e[n]}) after a span that ends at {before[n]}; join masks with `|`"
            )
        fresh = s > before
        slot_of[at] += fresh
        target = slot_of[at]
        out_start[target[fresh], at[fresh]] = s[fresh]
        out_end[target, at] = reach[at] = np.maximum(before, e)
    used = max(int(slot_of.max(initial=0)) + 1, 1)
    shape = (used, batch, q_len)
    starts, ends = out_start[:used].reshape(shape), out_end[:used].reshape(shape)
    return np.ascontiguousarray(starts.swapaxes(0, 1)), np.ascontiguousarray(ends.swapaxes(0, 1))


def from_single_spans(
    row: IntArray, start: IntArray, end: IntArray, batch: int, q_len: int, max_spans: int = MAX_LENGTH
) -> tuple[Int32, Int32]:
    """Canonical arrays from flat arrays of disjoint, non-empty spans, sorted by row (``b * q_len + i``), then start.

    ``ValueError`` for a row that needs more than `max_spans`.
    """
    fresh = np.ones(len(row), np.bool_)
    fresh[1:] = (row[1:] != row[:-1]) | (start[1:] != end[:-1])
    first = np.flatnonzero(fresh)
    row, start = row[first], start[first]
    end = end[np.append(first[1:], len(end))[: len(first)] - 1]
    count = np.bincount(row, minlength=batch * q_len)
    slot = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    used = max(int(count.max(initial=0)), 1)
    for at in np.flatnonzero(count > max_spans)[:1]:
        raise ValueError(f"row {at % q_len} needs {count[at]} spans, more than max_spans={max_spans}; pass {used}")
    out = np.zeros((2, batch, used, q_len), np.int32)
    b, i = np.divmod(row, max(q_len, 1))
    out[0, b, slot, i] = start
    out[1, b, slot, i] = end
    return out[0].copy(), out[1].copy()


def true_runs(cells: Bool) -> tuple[Int64, Int64, Int64]:
    """Maximal runs of True along the rows of ``[rows, columns]``: (row, start, end), sorted by row, then start."""
    rows, columns = cells.shape
    padded = np.zeros((rows, columns + 2), np.bool_)
    padded[:, 1:-1] = cells
    edges = np.flatnonzero(padded[:, 1:] != padded[:, :-1])  # up, down, up, down, … in every row
    row, column = np.divmod(edges, columns + 1)
    return row[::2], column[::2], column[1::2]


# ---------------------------------------------------------------- set operations


def intersect(a: tuple[Int32, Int32], b: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
    """Intersection of two canonical masks of equal q_len; batch dims equal or 1."""
    (a_start, a_end), (b_start, b_end) = a, b
    batch, q_len = max(len(a_start), len(b_start)), a_start.shape[2]
    # Pairs in lexicographic order ascend: spans of one mask are disjoint and ascending.
    slots = (
        (np.maximum(a_start[:, i], b_start[:, j]), np.minimum(a_end[:, i], b_end[:, j]))
        for i in range(a_start.shape[1])
        for j in range(b_start.shape[1])
    )
    return gather_spans(slots, a_start.shape[1] + b_start.shape[1] - 1, batch, q_len, allow_overlap=False)


def unite(a: tuple[Int32, Int32], b: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
    """Union of two canonical masks of equal q_len; batch dims equal or 1."""
    batch, q_len = max(len(a[0]), len(b[0])), a[0].shape[2]
    # A span as one integer sorts by start, then end; empty spans last.
    masks = (np.where(start < end, (start.astype(np.int64) << 32) | end, _NO_SPAN) for start, end in (a, b))
    packed = np.concatenate([np.broadcast_to(m, (batch, *m.shape[1:])) for m in masks], axis=1)
    packed.sort(axis=1)
    packed[packed == _NO_SPAN] = 0
    slots = ((span >> 32, span & 0xFFFFFFFF) for span in packed.swapaxes(0, 1))
    return gather_spans(slots, packed.shape[1], batch, q_len, allow_overlap=True)


# ---------------------------------------------------------------- slices and runs


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
    check_shape(kind, "types", "num_slices")
    for at in np.flatnonzero((kind < 0) | (kind > 3))[:1]:
        raise ValueError(f"types must be from 0 to 3, but types[{at}] = {kind[at]}")
    q, rows = _ranges(q_ranges, "q", q_len, None)
    k, keys = _ranges(k_ranges, "k", kv_len, rows)
    if not len(q) == len(k) == len(kind):
        raise ValueError(
            f"q_ranges, k_ranges and types must have an entry for each slice, got {len(q)}, {len(k)} and {len(kind)}"
        )
    limit = check_positive(max_spans, "max_spans")
    # The spans of all rows of all slices, by row and then by key.
    height = q[:, 1] - q[:, 0]
    of = np.repeat(np.arange(len(q)), height)
    row = np.arange(len(of)) - np.repeat(np.cumsum(height) - height - q[:, 0], height)
    start = k[of, 0] + (kind[of] >> 1) * (row - q[of, 0])
    end = k[of, 1] - (kind[of] & 1) * (q[of, 1] - 1 - row)
    filled = np.flatnonzero(start < end)
    order = filled[np.argsort(row[filled] * (keys + 1) + start[filled], kind="stable")]
    of, row, start, end = of[order], row[order], start[order], end[order]
    for n in np.flatnonzero((row[1:] == row[:-1]) & (start[1:] < end[:-1]))[:1]:
        shown = [f"{s} (queries {q[s].tolist()}, keys {k[s].tolist()}, type {kind[s]})" for s in sorted(of[n : n + 2])]
        raise ValueError(
            f"slices must not overlap, but slices {' and '.join(shown)} both hold key {start[n + 1]} of row {row[n]}; "
            f"make a mask from each and join them with `|`"
        )
    found = from_single_spans(row, start, end, 1, rows, limit)
    return *found, keys


def _ranges(ranges: Any, side: str, given: SupportsIndex | None, default: int | None) -> tuple[Int64, int]:
    """Checked ranges, int64 ``[num_slices, 2]``, and the length of their side; by default it ends with them."""
    name, length_name = f"{side}_ranges", f"{'q' if side == 'q' else 'kv'}_len"
    array = int_array(ranges, name).astype(np.int64)
    array = array.reshape(0, 2) if array.size == 0 else array
    check_shape(array, name, "num_slices", 2)
    if given is None:
        given = int(array[:, 1].max(initial=0)) if default is None else default
    length = check_length(given, length_name)
    wrong = (array[:, 0] < 0) | (array[:, 0] > array[:, 1]) | (array[:, 1] > length)
    for at in np.flatnonzero(wrong)[:1]:
        raise ValueError(
            f"{name} must be [start, stop) with 0 <= start <= stop <= {length_name} = {length}, but {name}[{at}] = "
            f"{array[at].tolist()}"
        )
    return array, length


def positions_in_runs(positions: Int32, runs: Int64) -> Int32:
    """Number of tokens of ``runs`` before each global position: the position's index in the buffer of the runs."""
    starts, lengths = runs[:, 0].astype(np.int32), (runs[:, 1] - runs[:, 0]).astype(np.int32)
    if len(runs) == 0:
        return np.zeros_like(positions)
    before = np.cumsum(lengths, dtype=np.int32) - lengths
    at = np.searchsorted(starts, positions, side="right") - 1
    local = before[at] + np.minimum(positions - starts[at], lengths[at])
    return np.where(at < 0, np.int32(0), local)
