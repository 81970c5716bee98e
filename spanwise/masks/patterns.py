"""The named masks as canonical span arrays, and the checks of the arguments they are made from.

Each pattern function takes checked arguments and returns ``start, end``, int32 ``[num_spans, q_len]``, already in the
canonical form of ``_spans``: nothing is sorted or validated again.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from spanwise.masks import spans as _spans
from spanwise.masks.spans import Int32, Int64

Spans = tuple[Int32, Int32]

# ---------------------------------------------------------------- checks


def int_array(values: Any, name: str) -> npt.NDArray[np.integer]:
    """A list, numpy array or torch tensor as an integer numpy array (no copy where none is needed)."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype} of shape {list(array.shape)}")
    return array


def check_length(value: SupportsIndex, name: str) -> int:
    length = operator.index(value)
    if not 0 <= length <= _spans.MAX_LENGTH:
        raise ValueError(f"{name} must be between 0 and 2**30 = {_spans.MAX_LENGTH}, got {length}")
    return length


def check_positive(value: SupportsIndex, name: str) -> int:
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def check_window(window: Any, seq_len: int, *, causal: bool = True) -> tuple[np.int32, np.int32]:
    """``(left, right)``, cut to the sequence length; -1 is no limit.

    Without `causal`, ``(-1, 0)`` is refused: to FlashAttention it is a causal mask, and TransformerEngine's
    ``check_set_window_size`` makes ``(-1, -1)`` of it.
    """
    try:
        left, right = (operator.index(side) for side in window)
    except (TypeError, ValueError):
        raise ValueError(f"window must be two integers (left, right), got {window!r}") from None
    if left < -1 or right < -1:
        raise ValueError(
            f"a window's left and right must be tokens, at least 0, or -1 for no limit on a side, got ({left}, {right})"
        )
    if (left, right) == (-1, 0) and not causal:
        raise ValueError(
            "window (-1, 0) with causal=False means a causal mask to FlashAttention and no limit at all to "
            "TransformerEngine; give causal=True for the first, window=None for the second"
        )
    left, right = (seq_len if side == -1 else min(side, seq_len) for side in (left, right))
    return np.int32(left), np.int32(right)


def check_offsets(values: Any, name: str = "cu_seqlens", *, start_at_zero: bool = True) -> Int64:
    """Offsets from 0 on (or later, without `start_at_zero`) that never decrease: read-only int64 ``[n + 1]``."""
    offsets = np.array(int_array(values, name), dtype=np.int64)
    if offsets.ndim != 1 or len(offsets) == 0:
        batch = f"; {name}.squeeze(0) takes the batch dim off" if offsets.ndim == 2 and len(offsets) == 1 else ""
        raise ValueError(
            f"{name} must be offsets of shape [number of sequences + 1], got shape {list(offsets.shape)}{batch}"
        )
    if offsets[0] < 0:
        raise ValueError(f"{name} must not be negative, got {offsets[0]} at position 0")
    if start_at_zero and offsets[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {offsets[0]} at position 0")
    for s in np.flatnonzero(offsets[1:] < offsets[:-1])[:1] + 1:
        tail = offsets[s:]
        cure = ""
        if (tail == tail[0]).all() and tail[0] <= 0:
            what = f"the {len(tail)} entries from there on look" if len(tail) > 1 else "that entry looks"
            cure = f"; {what} like filling: cut off the tail, {name}[:{s}]"
        raise ValueError(f"{name} must not decrease, got {tail[0]} after {offsets[s - 1]} at position {s}{cure}")
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
    lengths = int_array(values, name).astype(np.int64)
    if lengths.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {list(lengths.shape)}")
    if bool((lengths < 0).any()):
        at = int(np.argmax(lengths < 0))
        raise ValueError(f"{name} must not be negative, got {lengths[at]} at position {at}")
    return lengths


# ---------------------------------------------------------------- patterns


def _next_key(seq_len: int) -> Int32:
    """The end of a causal row: ``i + 1``."""
    return np.arange(1, seq_len + 1, dtype=np.int32)


def full(q_len: int, kv_len: int) -> Spans:
    return np.zeros((1, q_len), np.int32), np.full((1, q_len), kv_len, np.int32)


def sliding_window(seq_len: int, left: np.int32, right: np.int32) -> Spans:
    row = np.arange(seq_len, dtype=np.int32)
    start = np.maximum(row - left, np.int32(0))
    end = np.minimum(row + (right + np.int32(1)), np.int32(seq_len))
    return start[None], end[None]


def documents(cu: Int64, causal: bool, window: tuple[np.int32, np.int32] | None) -> Spans:
    seq_len, lengths = int(cu[-1]), np.diff(cu)
    start = np.repeat(cu[:-1].astype(np.int32), lengths)
    end = _next_key(seq_len) if causal else np.repeat(cu[1:].astype(np.int32), lengths)
    if window is not None:
        near_start, near_end = sliding_window(seq_len, *window)
        np.maximum(start, near_start[0], out=start)
        np.minimum(end, near_end[0], out=end)
    return start[None], end[None]


def prefix_lm(cu: Int64, prefix_lens: Int64) -> Spans:
    start, end = documents(cu, True, None)
    prefix_end = np.repeat((cu[:-1] + prefix_lens).astype(np.int32), np.diff(cu))
    np.maximum(end[0], prefix_end, out=end[0])
    return start, end


def shared_prefix(prefix_len: int, suffix_lens: Int64) -> Spans:
    ends = prefix_len + np.cumsum(suffix_lens)
    seq_len = int(ends[-1]) if len(ends) else prefix_len
    own = np.zeros(seq_len, np.int32)  # where the row's own part begins
    own[prefix_len:] = np.repeat((ends - suffix_lens).astype(np.int32), suffix_lens)
    end = _next_key(seq_len)
    # The prefix, and the answer that follows it, are one causal piece; later answers have the prefix apart.
    apart = own > prefix_len
    if prefix_len == 0:
        return own[None], end[None]
    if not apart.any():
        return np.zeros((1, seq_len), np.int32), end[None]
    starts = np.stack([np.zeros(seq_len, np.int32), own * apart])
    return starts, np.stack([np.where(apart, np.int32(prefix_len), end), end * apart])


def block_causal(seq_len: int, block_len: int, num_previous: int | None, global_tokens: int) -> Spans:
    size, reach = np.int32(min(block_len, max(seq_len, 1))), np.int32(global_tokens)
    block = np.arange(seq_len, dtype=np.int32) // size
    zero, end = np.zeros(seq_len, np.int32), np.minimum((block + np.int32(1)) * size, np.int32(seq_len))
    if num_previous is None:
        return zero[None], np.maximum(end, reach)[None]
    start = np.maximum(block - np.int32(min(num_previous, seq_len)), np.int32(0)) * size
    if global_tokens == 0:
        return start[None], end[None]
    apart = start > reach  # otherwise the global tokens and the row's own blocks are one span
    if not apart.any():
        return zero[None], np.maximum(end, reach)[None]
    first_end = np.where(apart, reach, np.maximum(end, reach))
    return np.stack([zero, start * apart]), np.stack([first_end, end * apart])
