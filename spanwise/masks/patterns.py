"""The named masks as span arrays.

Each function checks its arguments and returns ``start, end``, int32 ``[1, num_spans, q_len]``, already canonical (see
`spans`): nothing is sorted or validated again. `SpanMask`'s constructors of the same names describe the arguments.
"""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks.arrays import Int32
from spanwise.masks.checks import check_length, check_lengths, check_offsets, check_positive, check_window

Spans = tuple[Int32, Int32]


def full(q_len: int, kv_len: int) -> Spans:
    return np.zeros((1, 1, q_len), np.int32), np.full((1, 1, q_len), kv_len, np.int32)


def causal(seq_len: SupportsIndex) -> Spans:
    return documents([0, check_length(seq_len, "seq_len")], True, None, None)


def sliding_window(seq_len: SupportsIndex, left: SupportsIndex, right: SupportsIndex) -> Spans:
    length = check_length(seq_len, "seq_len")
    start, end = _window(length, *check_window((left, right), length))
    return start[None, None], end[None, None]


def documents(
    cu_seqlens: Any,
    causal: bool,
    window: tuple[SupportsIndex, SupportsIndex] | None,
    chunk: SupportsIndex | None,
) -> Spans:
    cu = check_offsets(cu_seqlens)
    if chunk is not None:  # chunks are documents of their own
        size = min(check_positive(chunk, "chunk"), max(int(cu[-1]), 1))
        counts = -(-np.diff(cu) // size)
        nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        cu = np.append(np.repeat(cu[:-1], counts) + nth * size, cu[-1])
    seq_len, lengths = int(cu[-1]), np.diff(cu)
    limits = None if window is None else check_window(window, seq_len, causal=causal)
    start = np.repeat(cu[:-1].astype(np.int32), lengths)
    end = _next_key(seq_len) if causal else np.repeat(cu[1:].astype(np.int32), lengths)
    if limits is not None:
        window_start, window_end = _window(seq_len, *limits)
        np.maximum(start, window_start, out=start)
        np.minimum(end, window_end, out=end)
    return start[None, None], end[None, None]


def prefix_lm(cu_seqlens: Any, prefix_lens: Any) -> Spans:
    cu, prefixes = check_offsets(cu_seqlens), check_lengths(prefix_lens, "prefix_lens")
    if len(prefixes) != len(cu) - 1:
        raise ValueError(f"prefix_lens needs an entry for each of {len(cu) - 1} documents, got {len(prefixes)}")
    long = prefixes > np.diff(cu)
    if bool(long.any()):
        at = int(np.argmax(long))
        raise ValueError(f"prefix_lens[{at}] = {prefixes[at]}, but document {at} has {cu[at + 1] - cu[at]} tokens")
    start, end = documents(cu, True, None, None)
    prefix_end = np.repeat((cu[:-1] + prefixes).astype(np.int32), np.diff(cu))
    np.maximum(end[0, 0], prefix_end, out=end[0, 0])
    return start, end


def shared_prefix(prefix_len: SupportsIndex, suffix_lens: Any) -> Spans:
    prefix, suffixes = check_length(prefix_len, "prefix_len"), check_lengths(suffix_lens, "suffix_lens")
    seq_len = check_length(prefix + int(suffixes.sum()), "prefix_len + sum(suffix_lens)")
    own = np.zeros(seq_len, np.int32)  # first token of the row's own answer
    own[prefix:] = np.repeat((prefix + np.cumsum(suffixes) - suffixes).astype(np.int32), suffixes)
    end = _next_key(seq_len)
    # The prefix and the first answer are one causal span; in later answers the prefix is a span apart.
    apart = own > prefix
    if prefix == 0:
        return own[None, None], end[None, None]
    if not apart.any():
        return np.zeros((1, 1, seq_len), np.int32), end[None, None]
    starts = np.stack([np.zeros(seq_len, np.int32), own * apart])
    return starts[None], np.stack([np.where(apart, np.int32(prefix), end), end * apart])[None]


def block_causal(
    seq_len: SupportsIndex,
    block_len: SupportsIndex,
    num_previous: SupportsIndex | None,
    global_tokens: SupportsIndex | None,
) -> Spans:
    length = check_length(seq_len, "seq_len")
    previous, shared = (operator.index(x) if x is not None else None for x in (num_previous, global_tokens))
    if previous is not None and previous < 0:
        raise ValueError(f"num_previous must be at least 0, or None for all earlier blocks, got {previous}")
    if shared is None or not 0 <= shared <= length:
        raise ValueError(f"global_tokens must be between 0 and seq_len = {length}, got {shared}")
    size, reach = np.int32(min(check_positive(block_len, "block_len"), max(length, 1))), np.int32(shared)
    block = np.arange(length, dtype=np.int32) // size
    zero, end = np.zeros(length, np.int32), np.minimum((block + np.int32(1)) * size, np.int32(length))
    if previous is None:
        return zero[None, None], np.maximum(end, reach)[None, None]
    start = np.maximum(block - np.int32(min(previous, length)), np.int32(0)) * size
    if shared == 0:
        return start[None, None], end[None, None]
    apart = start > reach  # otherwise the global tokens and the row's own blocks are one span
    if not apart.any():
        return zero[None, None], np.maximum(end, reach)[None, None]
    first_end = np.where(apart, reach, np.maximum(end, reach))
    return np.stack([zero, start * apart])[None], np.stack([first_end, end * apart])[None]


def _next_key(seq_len: int) -> Int32:
    """The end of a causal row: ``i + 1``."""
    return np.arange(1, seq_len + 1, dtype=np.int32)


def _window(seq_len: int, left: np.int32, right: np.int32) -> Spans:
    """One span for each row, int32 ``[q_len]`` each: the keys ``i - left … i + right`` that exist."""
    row = np.arange(seq_len, dtype=np.int32)
    return np.maximum(row - left, np.int32(0)), np.minimum(row + (right + np.int32(1)), np.int32(seq_len))
