"""Drawings: the mask coloured by rank, and timelines with a lane for each stream.

Neighbours of a lane that are too thin to see are drawn as one bar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from spanwise import units
from spanwise.cli.report.svg import RANK_COLORS, Drawing, number, ticks
from spanwise.layouts.layout import Layout
from spanwise.masks.span_mask import SpanMask
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.reasons import Reason
from spanwise.overlap.explain.trace import in_order
from spanwise.planning.plan import Plan

# CSS pixels. Bars of fewer than THIN pixels are drawn as one with the next bars of their kind.
WIDTH, LEFT, RIGHT = 1030, 96, 22
LANE, AXIS = 30, 24
THIN = 1.0


@dataclasses.dataclass(frozen=True)
class Bar:
    """Work of a stream from `begin` to `end`, milliseconds; `kind` is its class, "local", "exchange" or "waited"."""

    begin: float
    end: float
    kind: str
    name: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """Bars of one stream in order of their begin, without those that take no time."""

    label: str
    bars: tuple[Bar, ...]


def lanes(timeline: Timeline, labels: Mapping[str, str], why: Mapping[int, Reason] | None = None) -> list[Lane]:
    """Lanes of compute and of each group, by its label. A bar of exposed time lies over its collective."""
    dag = timeline.dag
    groups = in_order(dag.groups, labels)
    bars: dict[str, list[Bar]] = {"": [], **{group: [] for group in groups}}
    begin, end = timeline.begin.tolist(), timeline.end.tolist()
    for i in timeline.order.tolist():
        node = dag.nodes[i]
        if end[i] <= begin[i]:
            continue
        if node.kind == Kind.WAIT:
            start = dag.nodes[node.start]
            reason = f"; {why[node.start]}" if why and node.start in why else ""
            waits = f"waits for {start.name} ({labels.get(start.group, start.group)}){reason}"
            bars[""].append(Bar(begin[i], end[i], "waited", waits))
            late = max(begin[i], begin[node.start])
            bars[start.group].append(Bar(late, end[i], "waited", f"{start.name}, exposed{reason}"))
        else:
            kind = "exchange" if node.kind == Kind.START else "local"
            bars[node.group].append(Bar(begin[i], end[i], kind, node.name))
    named = {"": "compute", **{group: labels.get(group, group) for group in groups}}
    return [
        Lane(named[stream], tuple(sorted(of_stream, key=lambda bar: (bar.begin, bar.kind))))
        for stream, of_stream in bars.items()
    ]


def merged(bars: Sequence[Bar], per_pixel: float) -> list[tuple[Bar, int]]:
    """Bars to draw at so many milliseconds a pixel, and the number of bars that each stands for."""
    found: list[tuple[Bar, int]] = []
    open_: dict[str, int] = {}  # by kind: the bar of thin ones that may take one more
    for bar in bars:
        at = open_.pop(bar.kind, None)
        if bar.end - bar.begin < THIN * per_pixel:
            if at is not None and bar.end - found[at][0].begin < 2 * THIN * per_pixel:
                first, count = found[at]
                found[at] = dataclasses.replace(first, end=max(first.end, bar.end)), count + 1
                open_[bar.kind] = at
                continue
            open_[bar.kind] = len(found)
        found.append((bar, 1))
    return found


def draw(key: str, title: str, lanes: Sequence[Lane], most: float, lane: int = LANE) -> Drawing:
    """Lanes, `most` milliseconds wide and `lane` pixels tall; `key` begins the ids inside."""
    bottom, tall = lane * len(lanes), lane * 2 / 3
    described = f"{', '.join(one.label for one in lanes)}; {units.milliseconds(most)} in all."
    drawing = Drawing(f"lanes-{key}", f"Timeline of the {title}", described, WIDTH, bottom + AXIS)
    scale = (WIDTH - LEFT - RIGHT) / most if most else 0.0
    for tick in ticks(most, 10):
        x = LEFT + tick * scale
        drawing.line(x, 0, x, bottom, "grid")
        drawing.text(x, bottom + AXIS - 8, f"{tick:g}" + (" ms" if tick == 0 else ""), "tiny muted", "middle")
    for row, one in enumerate(lanes):
        y = row * lane + (lane - tall) / 2
        drawing.text(LEFT - 8, y + tall / 2 + 4, one.label, "small", "end")
        drawing.line(LEFT, y + tall, WIDTH - RIGHT, y + tall, "grid")
        for bar, count in merged(one.bars, 1 / scale if scale else 0.0):
            more = f" and {count - 1:,} more" if count > 1 else ""
            tip = f"{bar.name}{more}: {units.milliseconds(bar.end - bar.begin)}, from {number(bar.begin)} ms"
            drawing.rect(
                LEFT + bar.begin * scale, y, max((bar.end - bar.begin) * scale, 0.5), tall, f"bar {bar.kind}", tip
            )
    return drawing


# CSS pixels; cells of the mask a side.
_MARGIN, _TOP, _SIDE, _CELLS = 64, 18, 640, 320
#: Most ranks of a timeline or table; of more a sample is shown, from the busiest to the idlest.
MOST_RANKS = 16


def owners(layout: Layout, positions: np.ndarray, row: int = 0) -> np.ndarray:
    """Rank that holds the token at each of `positions`."""
    pieces = layout.pieces(row)
    pieces = pieces[np.argsort(pieces[:, 1])]
    return pieces[np.searchsorted(pieces[:, 1], positions, side="right") - 1, 0]


def visible(mask: SpanMask, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Whether each of `rows` reads each of `keys`: bool ``[rows, keys]``, of a mask without a batch."""
    start, end = mask.start[0][:, rows, None], mask.end[0][:, rows, None]
    return ((start <= keys) & (keys < end)).any(axis=0)


def draw_mask(key: str, plan: Plan, name: str) -> Drawing:
    """The mask, sampled: colour is the rank that computes, paler where it receives the key."""
    count = min(_CELLS, plan.seq_len)
    at = np.arange(count) * plan.seq_len // count
    of_rows, of_keys = owners(plan.layout, at), owners(plan.kv_layout, at)
    seen = visible(plan.mask(name), at, at)
    own = seen & (of_rows[:, None] == of_keys)
    described = f"{plan.seq_len:,} query rows down, the same keys to the right, {plan.num_ranks} ranks."
    drawing = Drawing(f"mask-{key}", "Who computes which part of the mask", described, _SIDE + 90, _SIDE + 60)
    scale = _SIDE / count
    drawing.rect(_MARGIN, _TOP, _SIDE, _SIDE, "plot")
    for color in range(min(plan.num_ranks, len(RANK_COLORS))):
        rows, keys = (of % len(RANK_COLORS) == color for of in (of_rows, of_keys))
        for kind, cells in (("own", own), ("received", seen & ~own)):
            drawing.cells(cells & rows[:, None], _MARGIN, _TOP, scale, f'class="{kind} c{color}"')
        drawing.cells(np.repeat(rows[:, None], 4, axis=1), _MARGIN - 12, _TOP, scale, f'class="own c{color}"')
        drawing.cells(np.repeat(keys[None], 4, axis=0), _MARGIN, _TOP - 12, scale, f'class="own c{color}"')
    for tick in ticks(plan.seq_len, 8):
        x = _MARGIN + tick / plan.seq_len * _SIDE
        drawing.line(x, _TOP + _SIDE, x, _TOP + _SIDE + 4, "axis")
        drawing.text(x, _TOP + _SIDE + 17, f"{tick:,.0f}", "small muted", "middle")
    drawing.text(
        _MARGIN + _SIDE / 2, _TOP + _SIDE + 36, "keys (token position); rows the same", "small muted", "middle"
    )
    return drawing


def draw_timeline(key: str, plan: Plan, name: str) -> Drawing:
    """Compute and exchange of each rank in one layer, forward and backward; a rank that waits is marked."""
    intervals = plan.timeline(name).intervals
    most = 1e3 * max((one.end for one in intervals), default=0.0)
    found = []
    for rank in sample_ranks(plan.work(name), MOST_RANKS):
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
