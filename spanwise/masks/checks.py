"""Checks of the arguments that masks, layouts and packings are made from; each returns the checked value."""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks.arrays import Int64, IntArray

MAX_LENGTH = 2**30
"""Longest sequence in tokens: twice it, plus one, still fits int32."""


def int_array(values: Any, name: str) -> IntArray:
    """A list, numpy array or torch tensor as an integer numpy array; copies only where it must."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype} of shape {list(array.shape)}")
    return array


def check_index(value: SupportsIndex, name: str) -> int:
    """An integer, and no bool."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be an integer, got {value!r}")


def check_length(value: SupportsIndex, name: str) -> int:
    """A number of tokens between 0 and `MAX_LENGTH`."""
    length = check_index(value, name)
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"{name} must be between 0 and 2**30 = {MAX_LENGTH}, got {length}")
    return length


def check_positive(value: SupportsIndex, name: str) -> int:
    """An integer of at least 1."""
    number = check_index(value, name)
    if not 0 < number < 2**63:
        raise ValueError(f"{name} must be {'at least 1' if number < 1 else 'below 2**63'}, got {number}")
    return number


def check_below(value: SupportsIndex, stop: int, name: str, of: str = "") -> int:
    """An integer of ``[0, stop)``; `of` ends the sentence that says so."""
    number = check_index(value, name)
    if not 0 <= number < stop:
        raise ValueError(f"{name} must be in [0, {stop}){of}, got {number}")
    return number


def check_row(value: SupportsIndex, rows: int) -> int:
    """The row out of `rows` that serves a batch row; a single one serves all."""
    index = check_index(value, "row")
    return 0 if rows == 1 and index >= 0 else check_below(index, rows, "row")


def check_finite(value: Any, name: str, *, positive: bool = False, like: str = "") -> None:
    """``ValueError`` unless `value` is a finite number, above 0 if `positive`; `like` ends the message."""
    if not (0 if positive else -math.inf) < value < math.inf:
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, got {value}{like}")


def check_shape(x: Any, name: str, *wanted: int | str, like: str = "") -> None:
    """``ValueError`` unless an array or tensor has the sizes `wanted`; a name stands for any size."""
    given = tuple(x.shape)
    if len(given) != len(wanted) or any(not isinstance(w, str) and w != n for w, n in zip(wanted, given, strict=True)):
        raise ValueError(f"{name} must be [{', '.join(map(str, wanted))}]{like}, got {given}")


def check_window(window: Any, seq_len: int, *, causal: bool = True) -> tuple[np.int32, np.int32]:
    """``(left, right)`` in tokens, clipped to the sequence length; -1 means no limit on that side.

    Without `causal`, ``(-1, 0)`` is refused: FlashAttention reads it as a causal mask, and TransformerEngine's
    ``check_set_window_size`` turns it into ``(-1, -1)``.
    """
    try:
        left, right = (operator.index(side) for side in window)
    except (TypeError, ValueError):
        raise ValueError(f"window must be two integers (left, right), got {window!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"window must be tokens, or -1 for no limit on a side, got ({left}, {right})")
    if (left, right) == (-1, 0) and not causal:
        raise ValueError("window (-1, 0) with causal=False is ambiguous; give causal=True, or window=None for no limit")
    left, right = (seq_len if side == -1 else min(side, seq_len) for side in (left, right))
    return np.int32(left), np.int32(right)


def check_offsets(values: Any, name: str = "cu_seqlens", *, start_at_zero: bool = True) -> Int64:
    """Offsets that never decrease, read-only int64 ``[n + 1]``; the first is 0 unless `start_at_zero` is False."""
    offsets = np.array(int_array(values, name), dtype=np.int64)
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ValueError(f"{name} must be offsets of shape [number of sequences + 1], got shape {list(offsets.shape)}")
    if offsets[0] < 0 or (start_at_zero and offsets[0] != 0):
        raise ValueError(f"{name} must begin with 0, got {offsets[0]}: for lengths give [0, *cumsum(lengths)]")
    for s in np.flatnonzero(offsets[1:] < offsets[:-1])[:1] + 1:
        raise ValueError(f"{name} must not decrease, got {offsets[s]} after {offsets[s - 1]} at position {s}")
    check_length(int(offsets[-1]), f"the last entry of {name}")
    offsets.setflags(write=False)
    return offsets


def check_offset_rows(cu_seqlens: Any, seq_len: int) -> tuple[Int64, ...]:
    """Document offsets of each batch row, from one array or one array per row; each must end with ``seq_len``."""
    rows = tuple(check_offsets(row) for row in (cu_seqlens if np.ndim(next(iter(cu_seqlens), 0)) else [cu_seqlens]))
    for row in rows:
        if row[-1] != seq_len:
            raise ValueError(f"cu_seqlens must end with seq_len {seq_len}, got {row[-1]}")
    return rows


def check_lengths(values: Any, name: str) -> Int64:
    """Lengths in tokens, int64 ``[n]``, at least 0."""
    lengths = int_array(values, name).astype(np.int64)
    if lengths.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {list(lengths.shape)}")
    for at in np.flatnonzero(lengths < 0)[:1]:
        raise ValueError(f"{name} must not be negative, got {lengths[at]} at position {at}")
    if (total := float(lengths.sum(dtype=np.float64))) >= 2.0**63:  # the sum of int64 would wrap around
        raise ValueError(f"{name} must sum to less than 2**63 tokens, got {total:.3g}")
    return lengths


def check_spans(start: Any, end: Any, kv_len: int) -> tuple[IntArray, IntArray]:
    """Span arrays as ``[batch, num_spans, q_len]`` with ``0 <= start <= end <= kv_len`` and at least one slot."""
    starts, ends = int_array(start, "start"), int_array(end, "end")
    if starts.shape != ends.shape or starts.ndim not in (2, 3):
        wanted = "[num_spans, q_len] or [batch, num_spans, q_len]"
        raise ValueError(f"start and end must both be {wanted}, got {list(starts.shape)} and {list(ends.shape)}")
    starts, ends = (x[None] if x.ndim == 2 else x for x in (starts, ends))
    if starts.shape[0] == 0:
        raise ValueError(f"a mask needs at least one batch row, got shape {list(starts.shape)}")
    if starts.shape[1] == 0:  # no slot: every row reads nothing
        starts = ends = np.zeros((starts.shape[0], 1, starts.shape[2]), np.int32)
    if starts.size and (int(starts.min()) < 0 or int(ends.max()) > kv_len or bool((starts > ends).any())):
        wrong = (starts < 0) | (ends > kv_len) | (starts > ends)
        b, j, i = (int(index[0]) for index in np.nonzero(wrong))
        span = f"[{starts[b, j, i]}, {ends[b, j, i]})"
        raise ValueError(f"spans must lie in [0, kv_len = {kv_len}], but span {j} of row {i} (batch row {b}) is {span}")
    return starts, ends


def check_runs(runs: object, length: int, name: str) -> Int64:
    """Token runs as int64 ``[n, 2]``; ``ValueError`` unless ascending, disjoint, and inside ``[0, length)``."""
    given = int_array(runs, name)
    array: Int64 = (given if given.size else given.reshape(0, 2)).astype(np.int64)
    check_shape(array, name, "num_runs", 2)
    before = np.append(0, array[:-1, 1])
    for at in np.flatnonzero((array[:, 0] < before) | (array[:, 1] < array[:, 0]) | (array[:, 1] > length))[:1]:
        after = f" after {array[at - 1].tolist()}" if at else ""
        raise ValueError(f"{name} must be ascending runs in [0, {length}), but run {at} is {array[at].tolist()}{after}")
    return array
