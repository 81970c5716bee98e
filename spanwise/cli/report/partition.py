"""The parts of a mask that each rank computes, as the lines of a drawing: exact counts at any resolution.

Counts come from the spans, without an S×S table. For a set of rows, the number of (query, key) pairs with a key below x
is a sum of ramps, ``Σ max(0, x - start) - Σ max(0, x - end)``; two sorted arrays give it for any x.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.masks.span_mask import SpanMask

#: Heights of a cell: its share of visible pairs, in eighths of a line.
STEPS = 8


def pairs_below(start: np.ndarray, end: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Pairs of the rows with these spans (empty ones add nothing) whose key is below each of `keys`; int64."""
    total = np.zeros(len(keys), dtype=np.int64)
    for edges, sign in ((start, 1), (end, -1)):
        ordered = np.sort(edges, axis=None).astype(np.int64)
        before = np.concatenate(([0], np.cumsum(ordered)))
        count = np.searchsorted(ordered, keys)
        total += sign * (count * keys - before[count])
    return total


@dataclass(frozen=True, slots=True)
class Piece:
    """Cells ``[start, stop)`` of a line, drawn ``height / STEPS`` high, at the line's bottom or its top."""

    start: int
    stop: int
    height: int
    at_bottom: bool
    is_local: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a drawing, and the rank of its rows; pieces ascend and do not overlap."""

    rank: int
    pieces: tuple[Piece, ...]

    def area(self, local_only: bool = False) -> float:
        """The drawn area, in cells."""
        return sum((p.stop - p.start) * p.height for p in self.pieces if p.is_local or not local_only) / STEPS


def lines(mask: SpanMask, layout: Layout, count: int, window: tuple[int, int] | None = None) -> list[Line]:
    """The mask of one sequence as `count` lines of `count` cells, each with the rank that computes it.

    A line stands for ``1 / count`` of the rows. If several ranks hold rows of a line, it shows the rank whose drawn
    area lags most behind its work, and counts the rows of that rank alone. So areas stay in proportion to work. A cell
    is drawn wholly as local or wholly as received; rounding is carried to the rank's next cell.

    Args:
        mask: unbatched and square.
        layout: one batch row.
        count: at most the window's length.
        window: the tokens to show, as rows and as keys; default: all.
    """
    first, last = window or (0, mask.q_len)
    edges = first + np.arange(count + 1) * (last - first) // count
    owners = layout.pieces()
    owners = owners[np.argsort(owners[:, 1])]
    spans = np.clip(mask.start[0], first, last), np.clip(mask.end[0], first, last)
    below = np.concatenate(([0], np.cumsum((spans[1] - spans[0]).sum(axis=0, dtype=np.int64))))
    owed = np.zeros(layout.num_ranks)
    carried = np.zeros((layout.num_ranks, 2))
    result = []
    for low, high in itertools.pairwise(edges.tolist()):
        begin, stop = np.searchsorted(owners[:, 1], [low + 1, high])  # past the run that holds `low`; past the last one
        ranks, starts, stops = owners[begin - 1 : stop].T
        starts, stops = np.maximum(starts, low), np.minimum(stops, high)
        np.add.at(owed, ranks, below[stops] - below[starts])
        rank = int(ranks[np.argmax(owed[ranks])])
        mine = ranks == rank
        rows = np.concatenate([np.arange(a, b) for a, b in zip(starts[mine], stops[mine], strict=True)])
        local, received = _cells(spans[0][:, rows], spans[1][:, rows], edges, layout.runs(rank))
        owed[rank] -= float((local + received).sum()) * (high - low) / len(rows)
        area = len(rows) * np.diff(edges)
        result.append(Line(rank, _pieces(local / area, received / area, carried[rank])))
    return result


def _cells(start: np.ndarray, end: np.ndarray, edges: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of some rows in each cell of keys, on keys in the runs `own` and on others; int64 ``[num_cells]``."""
    points = np.union1d(edges, own[(own > edges[0]) & (own < edges[-1])])
    pairs = np.diff(pairs_below(start, end, points))
    cell = np.searchsorted(edges, points[:-1], side="right") - 1
    is_own = np.searchsorted(own.ravel(), points[:-1], side="right") % 2 == 1
    counts = np.zeros((2, len(edges) - 1), dtype=np.int64)
    np.add.at(counts, (is_own.astype(int), cell), pairs)
    return counts[1], counts[0]


def _pieces(local: np.ndarray, received: np.ndarray, carried: np.ndarray) -> tuple[Piece, ...]:
    """Pieces of a line from the shares of its cells; `carried` is the area still to draw, in all and local."""
    pieces: list[Piece] = []
    visible = local + received
    seen = np.flatnonzero(visible)
    # Where a row's keys end inside a line, the rows below it reach further; where they begin, the rows above it do.
    ends = np.diff(seen, append=len(visible) + 1) > 1
    to_draw, local_to_draw = carried.tolist()
    columns = (seen.tolist(), visible[seen].tolist(), local[seen].tolist(), ends.tolist())
    for cell, share, local_share, at_bottom in zip(*columns, strict=True):
        to_draw += share
        local_to_draw += local_share
        height = STEPS if share >= 1 else min(max(round(to_draw * STEPS), 0), STEPS)
        drawn = height / STEPS
        is_local = local_share > 0 and local_to_draw >= drawn / 2
        to_draw -= drawn
        local_to_draw -= drawn if is_local else 0.0
        if height == 0:
            continue
        before = pieces[-1] if pieces else None
        if (
            before
            and (before.stop, before.height, before.is_local) == (cell, height, is_local)
            and (before.at_bottom == at_bottom or height == STEPS)
        ):
            pieces[-1] = Piece(before.start, cell + 1, height, before.at_bottom, is_local)
        else:
            pieces.append(Piece(cell, cell + 1, height, at_bottom, is_local))
    carried[:] = to_draw, local_to_draw
    return tuple(pieces)


def closer_look(mask: SpanMask, layout: Layout, drawn: list[Line]) -> tuple[int, int] | None:
    """Tokens to draw separately: about four typical documents, where most keys are received.

    None if `drawn`, the drawing of all tokens, shows as much.
    """
    area = mask.area()[0]
    # Keys of the row of a typical pair.
    typical = 2.0 * float((area.astype(np.float64) ** 2).sum()) / max(float(area.sum()), 1.0)
    length = max(int(4 * typical), 2 * len(drawn))
    if length * 3 > mask.q_len:
        return None
    received = np.array([line.area() - line.area(local_only=True) for line in drawn])
    across = max(1, round(length / mask.q_len * len(drawn)))
    below = np.concatenate(([0.0], np.cumsum(received)))
    first = int(np.argmax(below[across:] - below[:-across])) * mask.q_len // len(drawn)
    return min(first, mask.q_len - length), min(first, mask.q_len - length) + length
