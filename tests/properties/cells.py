"""The cells of a described mask, straight from its definition. Imports nothing of spanwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class MaskCase(NamedTuple):
    """A mask in words.

    Attributes:
        kind: a constructor of a mask, "and", "or" or "stack".
        args: its numbers.
        parts: the masks that "and", "or" and "stack" combine.
    """

    kind: str
    args: dict[str, Any]
    parts: tuple[MaskCase, ...] = ()


def _grid(q_len: int, kv_len: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    i, j = np.ogrid[:q_len, : q_len if kv_len is None else kv_len]
    return i, j


def _near(i: np.ndarray, j: np.ndarray, left: int, right: int) -> np.ndarray:
    """-1 is no limit."""
    return ((left == -1) | (j >= i - left)) & ((right == -1) | (j <= i + right))


def _document_of(cu_seqlens: list[int]) -> np.ndarray:
    return np.array([d for d in range(len(cu_seqlens) - 1) for _ in range(cu_seqlens[d], cu_seqlens[d + 1])], int)


def _full(q_len: int, kv_len: int) -> np.ndarray:
    return np.ones((q_len, kv_len), bool)


def _causal(seq_len: int) -> np.ndarray:
    i, j = _grid(seq_len)
    return j <= i


def _sliding_window(seq_len: int, left: int, right: int) -> np.ndarray:
    i, j = _grid(seq_len)
    return _near(i, j, left, right)


def _documents(cu_seqlens: list[int], causal: bool, window: list[int] | None) -> np.ndarray:
    document = _document_of(cu_seqlens)
    i, j = _grid(len(document))
    cells = document[:, None] == document
    if causal:
        cells = cells & (j <= i)
    return cells if window is None else cells & _near(i, j, *window)


def _prefix_lm(cu_seqlens: list[int], prefix_lens: list[int]) -> np.ndarray:
    document = _document_of(cu_seqlens)
    i, j = _grid(len(document))
    in_prefix = np.array([t - cu_seqlens[d] < prefix_lens[d] for t, d in enumerate(document)], bool)
    return (document[:, None] == document) & ((j <= i) | in_prefix)


def _shared_prefix(prefix_len: int, suffix_lens: list[int]) -> np.ndarray:
    part = np.array([0] * prefix_len + [s + 1 for s, n in enumerate(suffix_lens) for _ in range(n)], int)
    i, j = _grid(len(part))
    return (j <= i) & ((part[:, None] == part) | (part == 0))


def _block_causal(seq_len: int, block_len: int, num_previous: int | None, global_tokens: int) -> np.ndarray:
    i, j = _grid(seq_len)
    back = i // block_len - j // block_len
    return ((back >= 0) & ((num_previous is None) | (back <= (num_previous or 0)))) | (j < global_tokens)


def _spans(start: list[list[int]], end: list[list[int]], kv_len: int) -> np.ndarray:
    cells = np.zeros((len(start[0]), kv_len), bool)
    for starts, ends in zip(start, end, strict=True):
        for row, (low, high) in enumerate(zip(starts, ends, strict=True)):
            cells[row, low:high] = True
    return cells


def _slices(
    q_ranges: list[list[int]], k_ranges: list[list[int]], types: list[int], q_len: int, kv_len: int
) -> np.ndarray:
    cells = np.zeros((q_len, kv_len), bool)
    for q, k, kind in zip(q_ranges, k_ranges, types, strict=True):
        cells |= slice_cells(q, k, kind, q_len, kv_len)
    return cells


def slice_cells(q: list[int], k: list[int], kind: int, q_len: int, kv_len: int) -> np.ndarray:
    """Cells of one slice; types 1 and 3 end at the bottom right corner, 2 and 3 begin at the top left one."""
    i, j = _grid(q_len, kv_len)
    cells = (q[0] <= i) & (i < q[1]) & (k[0] <= j) & (j < k[1])
    if kind in (1, 3):
        cells = cells & (k[1] - 1 - j >= q[1] - 1 - i)
    if kind in (2, 3):
        cells = cells & (j - k[0] >= i - q[0])
    return cells


def _mask_mod(q_len: int, kv_len: int, stride: int, reach: int) -> np.ndarray:
    """Keys at every `stride`-th distance, and those nearby."""
    i, j = _grid(q_len, kv_len)
    return ((i - j) % stride == 0) | (abs(i - j) <= reach)


def _packing(
    q_lens: list[int],
    kv_lens: list[int],
    q_starts: list[int],
    kv_starts: list[int],
    q_len: int,
    kv_len: int,
    causal: bool,
    window: list[int] | None,
    align: str,
) -> np.ndarray:
    """Sequences in padded storage. Query i stands at key i; aligned bottom right, at i + keys - queries."""
    cells = np.zeros((q_len, kv_len), bool)
    for num_q, num_k, q_start, kv_start in zip(q_lens, kv_lens, q_starts, kv_starts, strict=True):
        i, j = _grid(num_q, num_k)
        at = i + (num_k - num_q if align == "bottom_right" else 0)
        reads = np.ones((num_q, num_k), bool)
        if causal:
            reads &= j <= at
        if window is not None:
            reads &= _near(at, j, *window)
        cells[q_start : q_start + num_q, kv_start : kv_start + num_k] = reads
    return cells


_CELLS: dict[str, Callable[..., np.ndarray]] = {
    "full": _full,
    "causal": _causal,
    "sliding_window": _sliding_window,
    "documents": _documents,
    "prefix_lm": _prefix_lm,
    "shared_prefix": _shared_prefix,
    "block_causal": _block_causal,
    "spans": _spans,
    "slices": _slices,
    "mask_mod": _mask_mod,
    "block_mask": _mask_mod,
    "packing": _packing,
}


def cells(mask: MaskCase) -> np.ndarray:
    """Which keys each row reads, bool ``[batch, q_len, kv_len]``."""
    parts = [cells(part) for part in mask.parts]
    if mask.kind == "and":
        return parts[0] & parts[1]
    if mask.kind == "or":
        return parts[0] | parts[1]
    if mask.kind == "stack":
        return np.concatenate(parts)
    return _CELLS[mask.kind](**mask.args)[None]
