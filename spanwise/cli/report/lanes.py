"""Drawings of timelines: a lane for each stream, neighbours too thin to see drawn as one bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from spanwise.cli.report.svg import Drawing, number, ticks
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain import units
from spanwise.overlap.explain.reasons import Reason
from spanwise.overlap.explain.trace import in_order

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
