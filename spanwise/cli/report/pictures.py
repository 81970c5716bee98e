"""Drawings of a plan: the mask coloured by rank, traffic between ranks, and a layer's predicted timeline."""

from __future__ import annotations

import numpy as np

from spanwise.cli.report.lanes import Bar, Lane, draw
from spanwise.cli.report.page import pairs
from spanwise.cli.report.svg import RANK_COLORS, Drawing, ticks
from spanwise.layouts.layout import Layout
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan import Plan

# CSS pixels; cells of the mask a side; levels of the heat map.
_LEFT, _TOP, _SIDE = 64, 18, 640
_CELLS, _LEVELS = 320, 12
#: Most ranks of a timeline.
_MOST = 16


def owners(layout: Layout, positions: np.ndarray, row: int = 0) -> np.ndarray:
    """Rank that holds the token at each of `positions`."""
    pieces = layout.pieces(row)
    pieces = pieces[np.argsort(pieces[:, 1])]
    return pieces[np.searchsorted(pieces[:, 1], positions, side="right") - 1, 0]


def visible(mask: SpanMask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether each of `rows` reads each of `keys`: bool ``[rows, keys]``, of a mask without a batch."""
    start, end = mask.start[0][:, rows, None], mask.end[0][:, rows, None]
    return ((start <= keys) & (keys < end)).any(axis=0)


def draw_mask(key: str, plan: Plan, name: str, window: tuple[int, int]) -> Drawing:
    """The mask inside `window`, sampled: colour is the rank that computes, paler where it receives the key."""
    first, last = window
    count = min(_CELLS, last - first)
    at = first + np.arange(count) * (last - first) // count
    of_rows, of_keys = owners(plan.layout, at), owners(plan.kv_layout, at)
    seen = visible(plan.mask(name), at, at)
    own = seen & (of_rows[:, None] == of_keys)
    described = f"Query rows {first:,} to {last:,} down, the same keys to the right, {plan.num_ranks} ranks."
    drawing = Drawing(f"mask-{key}", "Who computes which part of the mask", described, _SIDE + 90, _SIDE + 60)
    scale = _SIDE / count
    drawing.rect(_LEFT, _TOP, _SIDE, _SIDE, "plot")
    for color in range(min(plan.num_ranks, len(RANK_COLORS))):
        rows, keys = (of % len(RANK_COLORS) == color for of in (of_rows, of_keys))
        for kind, cells in (("own", own), ("received", seen & ~own)):
            drawing.cells(cells & rows[:, None], _LEFT, _TOP, scale, f'class="{kind} c{color}"')
        drawing.cells(np.repeat(rows[:, None], 4, axis=1), _LEFT - 12, _TOP, scale, f'class="own c{color}"')
        drawing.cells(np.repeat(keys[None], 4, axis=0), _LEFT, _TOP - 12, scale, f'class="own c{color}"')
    for tick in ticks(last - first, 8):
        x = _LEFT + tick / (last - first) * _SIDE
        drawing.line(x, _TOP + _SIDE, x, _TOP + _SIDE + 4, "axis")
        drawing.text(x, _TOP + _SIDE + 17, f"{first + tick:,.0f}", "small muted", "middle")
    drawing.text(_LEFT + _SIDE / 2, _TOP + _SIDE + 36, "keys (token position); rows the same", "small muted", "middle")
    return drawing


def draw_traffic(key: str, traffic: np.ndarray) -> Drawing:
    """A heat map of K/V tokens, receivers down, senders to the right."""
    count, most = len(traffic), int(traffic.max())
    cell = min(44.0, 560 / count)
    described = f"{count} ranks; the busiest pair moves {most:,} tokens."
    side = cell * count
    drawing = Drawing(f"traffic-{key}", "Traffic between ranks", described, max(side, 300) + 2 * _LEFT, side + 50)
    drawing.rect(_LEFT, 40, side, side, "plot")
    levels = np.ceil(traffic / max(most, 1) * _LEVELS).astype(int)
    for level in range(1, _LEVELS + 1):
        drawing.cells(levels == level, _LEFT, 40, cell, f'class="heat" fill-opacity="{level / _LEVELS:.3f}"')
    for rank in range(0, count, -(-count // 24)):
        drawing.text(_LEFT - 6, 44 + (rank + 0.5) * cell, str(rank), "small", "end")
        drawing.text(_LEFT + (rank + 0.5) * cell, 34, str(rank), "small", "middle")
    for receiver, sender in np.argwhere(traffic > 0).tolist() if count <= 12 else ():
        strong = "on-heat" if levels[receiver, sender] > _LEVELS / 2 else ""
        value = pairs(int(traffic[receiver, sender]))
        drawing.text(_LEFT + (sender + 0.5) * cell, 44 + (receiver + 0.5) * cell, value, f"tiny {strong}", "middle")
    drawing.text(_LEFT, 14, "sender to the right, receiver down", "small muted")
    return drawing


def draw_timeline(key: str, plan: Plan, name: str) -> Drawing:
    """Compute and exchange of each rank in one layer, forward and backward; a rank that waits is marked."""
    intervals = plan.timeline(name).intervals
    most = 1e3 * max((one.end for one in intervals), default=0.0)
    found = []
    for rank in sample_ranks(plan.work(name), _MOST):
        bars: dict[str, list[Bar]] = {"compute": [], "exchange": []}
        for one in (one for one in intervals if one.rank == rank):
            kind = "local" if "local" in one.name else "remote" if "attention" in one.name else "copy"
            bar = Bar(1e3 * one.start, 1e3 * one.end, kind if one.stream == "compute" else "exchange", one.name)
            before = bars["compute"][-1].end if bars["compute"] else 0.0
            if one.stream == "compute" and bar.begin > before:
                bars["compute"].append(Bar(before, bar.begin, "waited", "waits"))
            bars[one.stream].append(bar)
        found.append(Lane(f"rank {rank}", tuple(sorted(bars["compute"], key=lambda bar: bar.begin))))
        found.append(Lane("", tuple(bars["exchange"])))
    return draw(f"{key}-layer", "forward and backward of one layer", found, most, lane=16)


def sample_ranks(values: np.ndarray, most: int) -> list[int]:
    """Ranks to show, ascending: all, or `most` of them evenly from the largest value to the smallest."""
    if len(values) <= most:
        return list(range(len(values)))
    order = np.argsort(-values, kind="stable")
    return sorted(order[np.linspace(0, len(order) - 1, most).round().astype(int)].tolist())
