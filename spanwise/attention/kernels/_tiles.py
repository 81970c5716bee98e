"""Plan of the CPU kernel: which keys each tile of query rows multiplies with, and where a mask is needed.

A tile is a few consecutive query rows. Its runs of keys hold the keys that a row reads, and short gaps between them.
Long runs that all rows read need no mask. `sdpa` executes the plan; the largest score of a mask is here. Letters of
shapes: see `base`; R rows of a tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spanwise import _torch

# Found by measuring; none changes results beyond rounding.
_LONG = 512  # a run of keys that all rows read is a run of its own from this length on
_MOST_KEYS = 1024  # of a run without mask
_EVEN = 32  # long runs are cut to multiples of it
_GAP = 32  # gaps between runs up to this length are masked
_MAX_ROWS = 128  # of a tile
_MIN_SAVING = 1_500_000  # of a cut between tiles, which adds calls: pairs x heads x head dim
_MOST_SCORES = 1 << 18  # of all heads, up to which one call with a dense mask is faster


class Run(NamedTuple):
    """Keys ``[first, stop)`` of a tile, and whether rows of the tile skip any."""

    first: int
    stop: int
    masked: bool


class Tile(NamedTuple):
    """Query rows ``[first, stop)`` and the keys that they read, at least one run, ascending."""

    first: int
    stop: int
    runs: list[Run]


def plan_tiles(start: np.ndarray, end: np.ndarray, *, max_rows: int, min_saving: int) -> Iterator[Tile]:
    """Tiles that cover every (query, key) pair of the mask once.

    Args:
        start: First key of each span, integer ``[N, Q]``; the spans of a row are disjoint, in any order.
        end: One past the last key of each span, same shape; ``end <= start`` is an empty span.
        max_rows: Most rows of a tile.
        min_saving: Pairs that a cut between two tiles must avoid computing to be worth its overhead.

    Yields:
        Tiles in ascending order; rows without keys may be missing.
    """
    cuts = _cut_rows(start, end, max_rows, min_saving)
    tiles, k0, k1, is_full = _intervals(start, end, cuts)
    bounds = np.searchsorted(tiles, np.arange(len(cuts))).tolist()
    intervals = list(zip(k0.tolist(), k1.tolist(), is_full.tolist(), strict=True))
    rows = cuts.tolist()
    for i in range(len(rows) - 1):
        if bounds[i] < bounds[i + 1]:
            yield Tile(rows[i], rows[i + 1], _runs(intervals[bounds[i] : bounds[i + 1]]))


def _cut_rows(start: np.ndarray, end: np.ndarray, max_rows: int, min_saving: int) -> np.ndarray:
    """Tile bounds ``[num_tiles + 1]``: cut where the keys read jump, then evenly."""
    q_len = start.shape[1]
    if q_len == 0:
        return np.zeros(1, dtype=np.int64)
    # Keys by which two neighbouring rows differ, at most: too many where spans change places, which costs time only.
    jump = np.abs(np.diff(start, axis=1)).sum(0, dtype=np.int64) + np.abs(np.diff(end, axis=1)).sum(0, dtype=np.int64)
    candidates = np.flatnonzero(jump * max_rows >= min_saving)
    segments = [0]
    for row, size in zip((candidates + 1).tolist(), jump[candidates].tolist(), strict=True):
        if min(row - segments[-1], max_rows) * size >= min_saving:
            segments.append(row)
    segments.append(q_len)
    cuts = [np.arange(first, stop, max_rows) for first, stop in pairwise(segments)]
    return np.append(np.concatenate(cuts), q_len)


def _intervals(
    start: np.ndarray, end: np.ndarray, cuts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Key intervals read by each tile: tile index, first key, last key + 1, whether every row reads all of it.

    One sweep over the span ends of all tiles: the number of open spans is the number of rows that read a key.
    """
    heights = np.diff(cuts)
    tile = np.repeat(np.arange(len(heights)), heights)
    is_span = end > start
    stride = int(end.max(initial=0)) + 1
    opens = (tile * stride + start)[is_span]
    closes = (tile * stride + end)[is_span]
    events, inverse = np.unique(np.concatenate((opens, closes)), return_inverse=True)
    num_opened, num_closed = (np.bincount(x, minlength=len(events)) for x in np.split(inverse, 2))
    num_open = np.cumsum(num_opened - num_closed)
    used = np.flatnonzero(num_open > 0)
    left, right = events[used], events[used + 1]
    tile = left // stride
    is_full = num_open[used] == heights[tile]
    is_first = np.ones(len(used), dtype=bool)
    is_first[1:] = (left[1:] != right[:-1]) | (is_full[1:] != is_full[:-1])
    is_last = np.append(is_first[1:], True) if len(used) else is_first
    tile = tile[is_first]
    return tile, left[is_first] - tile * stride, right[is_last] - tile * stride, is_full[is_first]


def _runs(intervals: list[tuple[int, int, bool]]) -> list[Run]:
    """The intervals of one tile; short ones that nearly touch are one masked run.

    Long ones keep an even length, with which torch's kernel is a tenth faster, and are cut: gradients of all keys of a
    run are one temporary tensor.
    """
    runs: list[Run] = []
    grows = False  # whether the last run takes what follows
    for first, stop, is_full in intervals:
        if is_full and stop - first >= _LONG:
            even = stop - (stop - first) % _EVEN
            runs += [Run(x, min(x + _MOST_KEYS, even), False) for x in range(first, even, _MOST_KEYS)]
            first, grows = even, False
        if grows and first - runs[-1].stop <= _GAP:
            runs[-1] = Run(runs[-1].first, stop, True)
        elif first < stop:
            runs.append(Run(first, stop, not is_full))
            grows = True
    return runs


class Piece(NamedTuple):
    """Keys ``[first, stop)`` of a tile, and its mask.

    Attributes:
        bias: a summand, ``[G * R, keys]`` or ``[B, 1, G * R, keys]``; None where all rows read all keys.
        is_empty: rows without a key, ``[G * R]`` or ``[B, 1, G * R]``; None if there are none.
    """

    first: int
    stop: int
    bias: Tensor | None
    is_empty: Tensor | None


def whole(q: Tensor, k: Tensor, start: Tensor, end: Tensor) -> Piece | None:
    """All keys and rows of a small problem, None of others."""
    if not 0 < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= _MOST_SCORES:
        return None
    return Piece(0, k.shape[2], *_mask_of(start.numpy(), end.numpy(), q, k, k.shape[2]))


def tiles(q: Tensor, k: Tensor, start: Tensor, end: Tensor) -> Iterator[tuple[slice, slice, list[Piece]]]:
    """Batch rows, query rows, and the pieces of keys that these read, for every tile."""
    batch, heads, q_len, dim = q.shape
    piece = whole(q, k, start, end)
    if piece is not None:
        yield slice(0, batch), slice(0, q_len), [piece]
        return
    for row, (start_row, end_row) in enumerate(zip(start.numpy(), end.numpy(), strict=True)):
        batch_rows = slice(row, row + 1) if start.shape[0] > 1 else slice(0, batch)
        for tile in plan_tiles(start_row, end_row, max_rows=_MAX_ROWS, min_saving=_MIN_SAVING // (heads * dim)):
            rows, pieces = slice(tile.first, tile.stop), []
            for first, stop, is_masked in tile.runs:
                mask: tuple[Tensor | None, Tensor | None] = None, None
                if is_masked:  # as seen from the run, so that tiles of one pattern share it
                    start_here, end_here = ((x[:, rows] - first).clip(0, stop - first) for x in (start_row, end_row))
                    mask = _mask_of(start_here, end_here, q, k, stop - first)
                pieces.append(Piece(first, stop, *mask))
            yield batch_rows, rows, pieces


def _mask_of(start: np.ndarray, end: np.ndarray, q: Tensor, k: Tensor, num_keys: int) -> tuple[Tensor, Tensor | None]:
    """`Piece.bias` and `Piece.is_empty` of spans ``[N, R]`` or ``[B or 1, N, R]``; small ones are kept for a while."""
    group = q.shape[1] // k.shape[1]
    kept = _mask if start.size * group * num_keys <= _MOST_SCORES else _mask.__wrapped__
    dtype = torch.promote_types(q.dtype, torch.float32)
    return kept(start.tobytes(), end.tobytes(), start.shape, start.dtype.str, num_keys, group, dtype)


@functools.lru_cache(maxsize=16)  # tiles, layers, their forwards and backwards have the same few masks
def _mask(
    start: bytes, end: bytes, shape: tuple[int, ...], kind: str, num_keys: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """`_mask_of`, with the spans as bytes."""
    first, last = (np.frombuffer(x, kind).reshape(*shape, 1) for x in (start, end))
    key = np.arange(num_keys, dtype=kind)
    with _torch.without_modes():  # selective checkpoints count operators, and the cache may have forgotten a mask
        reads = torch.from_numpy(((first <= key) & (key < last)).any(-3))
        reads = reads.repeat(group, 1) if reads.dim() == 2 else reads.repeat(1, group, 1).unsqueeze(1)
        is_empty = ~reads.any(-1)
        return torch.where(reads, 0.0, -math.inf).to(dtype), is_empty if is_empty.any() else None


def alike(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype and with one head dim, as torch's kernel wants them."""
    dtype, dim = torch.promote_types(tensors[0].dtype, torch.float32), max(x.shape[3] for x in tensors)
    padded = [(F.pad(x, (0, dim - x.shape[3])) if x.shape[3] < dim else x).to(dtype) for x in tensors]
    return [x if x.stride(3) == 1 else x.contiguous() for x in padded]


def folded(x: Tensor, kv_heads: int) -> Tensor:
    """``[B, H, R, …]`` as ``[B, K, G * R, …]``: query heads of one key/value head become rows."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def unfolded(x: Tensor, heads: int) -> Tensor:
    """The inverse of `folded`."""
    return x if x.shape[1] == heads else x.unflatten(2, (heads // x.shape[1], -1)).flatten(1, 2)


@torch.no_grad()
def max_logit(q: Tensor, k: Tensor, start: Tensor, end: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """Largest score that the mask admits, per head: ``[H]``, dtype of the lse, -inf for a head without any."""
    wide_q, wide_k = alike(q, k)
    top = wide_q.new_full(q.shape[1:2], -math.inf)
    with torch.autocast(q.device.type, enabled=False):  # or its products would be rounded to bfloat16
        for b, rows, pieces in tiles(q, k, start, end):
            q_tile = folded(wide_q[b, :, rows], k.shape[1])
            for piece in pieces:
                scores = q_tile @ wide_k[b, :, piece.first : piece.stop].mT * scale
                scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
                scores = scores if piece.bias is None else scores + piece.bias
                torch.maximum(top, unfolded(scores, q.shape[1]).amax((0, 2, 3)), out=top)
    return top
