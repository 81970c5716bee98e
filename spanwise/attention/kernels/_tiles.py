"""Plan of the CPU kernel: which keys each tile of query rows multiplies with, and where a mask is needed.

Pure numpy on the spans of one batch row; `sdpa` executes the plan. A tile is a few consecutive query rows. Its
columns are exactly the keys that some row reads, so no empty block is computed and no unread key is touched. Columns
that all rows read need no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

Run = tuple[int, int]


class Strip(NamedTuple):
    """Columns of a tile that are multiplied at once, left to right."""

    runs: tuple[Run, ...]  # key intervals, ascending and disjoint; the columns are their concatenation
    masked: tuple[tuple[int, int, int], ...]  # (column, first key, last key + 1): inside one run, to be masked

    @property
    def width(self) -> int:
        return sum(k1 - k0 for k0, k1 in self.runs)


class Tile(NamedTuple):
    """Query rows ``[first, stop)`` and the strips of keys that they read, at least one."""

    first: int
    stop: int
    strips: tuple[Strip, ...]


def plan_tiles(
    start: np.ndarray, end: np.ndarray, *, max_rows: int, max_columns: int, min_saving: int
) -> Iterator[Tile]:
    """Tiles that cover every (query, key) pair of the mask once.

    Args:
        start: First key of each span, integer ``[N, Q]``; the spans of a row are disjoint, in any order.
        end: One past the last key of each span, same shape; ``end <= start`` is an empty span.
        max_rows: Most rows of a tile.
        max_columns: Most columns of a strip.
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
            yield Tile(rows[i], rows[i + 1], tuple(_strips(intervals[bounds[i] : bounds[i + 1]], max_columns)))


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
    cuts = [
        np.linspace(first, stop, -(-(stop - first) // max_rows), endpoint=False, dtype=np.int64)
        for first, stop in pairwise(segments)
    ]
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


def _strips(intervals: list[tuple[int, int, bool]], max_columns: int) -> Iterator[Strip]:
    """The intervals of one tile, cut into strips of about the same width."""
    total = sum(k1 - k0 for k0, k1, _ in intervals)
    width = -(-total // -(-total // max_columns))
    width = min(max_columns, -(-width // 16) * 16)
    runs: list[list[int]] = []
    masked: list[list[int]] = []
    column = 0
    for first, stop, is_full in intervals:
        while first < stop:
            last = min(stop, first + width - column)
            if runs and runs[-1][1] == first:
                runs[-1][1] = last
            else:
                runs.append([first, last])
            if not is_full:
                # A short unmasked stretch between two masked ones costs less as part of one masked call.
                if masked and masked[-1][1] >= runs[-1][0] and first - masked[-1][2] < 64:
                    masked[-1][2] = last
                else:
                    masked.append([column, first, last])
            column += last - first
            first = last
            if column == width:
                yield Strip(tuple((a, b) for a, b in runs), tuple((a, b, c) for a, b, c in masked))
                runs, masked, column = [], [], 0
    if runs:
        yield Strip(tuple((a, b) for a, b in runs), tuple((a, b, c) for a, b, c in masked))
