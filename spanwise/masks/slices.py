"""Masks as slices: rectangles of queries and keys, each full or cut along one or both diagonals.

MagiAttention and its flexible flash attention describe masks in this language. Each row of a slice is a span.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks import spans
from spanwise.masks.arrays import Int32, Int64
from spanwise.masks.checks import check_length, check_positive, check_shape, int_array


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
    found = spans.from_single_spans(row, start, end, 1, rows, limit)
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
