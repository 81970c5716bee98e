"""Drawings of timelines: a lane for the compute stream and one for each process group.

`lanes` cuts a timeline into bars; `draw` draws all of them, neighbours too thin to see as one bar. The page's script
``overlap.js`` draws parts of a timeline by the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from spanwise.cli.report import units
from spanwise.cli.report.svg import Drawing, number, ticks
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.reasons import Reason
from spanwise.overlap.explain.trace import in_order

# CSS pixels.
WIDTH, LEFT, RIGHT = 1030, 96, 22
LANE, BAR, AXIS = 30, 20, 24
#: Bars of fewer pixels are drawn as one with the next bars of their kind.
THIN = 1.0

#: Classes of bars: compute, a collective, the part of it that compute waits for.
KINDS = ("local", "exchange", "waited")


@dataclasses.dataclass(frozen=True)
class Bar:
    """Work of a stream from `begin` to `end`, milliseconds; `kind` is an index into `KINDS`."""

    begin: float
    end: float
    kind: int
    name: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """Bars of one stream in order of their begin, without those that take no time."""

    label: str
    bars: tuple[Bar, ...]

    def as_list(self) -> list[object]:
        """The label, and numbers and names of the bars for the page's script, rounded to nanoseconds."""
        return [self.label, [[round(b.begin, 6), round(b.end - b.begin, 6), b.kind, b.name] for b in self.bars]]


def lanes(timeline: Timeline, labels: Mapping[str, str], why: Mapping[int, Reason] | None = None) -> list[Lane]:
    """Lanes of compute and of each group, by its label. A bar of exposed time lies over its collective."""
    dag = timeline.dag
    groups = in_order(dag.groups, labels)
    bars: dict[str, list[Bar]] = {"": [], **{group: [] for group in groups}}
    begin, end = timeline.begin.tolist(), timeline.end.tolist()
    for i in timeline.order.tolist():
        node = dag.nodes[i]
        if node.kind == Kind.WAIT:
            start = dag.nodes[node.start]
            if end[i] > begin[i]:
                reason = f"; {why[node.start]}" if why and node.start in why else ""
                waits = f"waits for {start.name} ({labels.get(start.group, start.group)}){reason}"
                bars[""].append(Bar(begin[i], end[i], 2, waits))
                late = max(begin[i], begin[node.start])
                bars[start.group].append(Bar(late, end[i], 2, f"{start.name}, exposed{reason}"))
        elif end[i] > begin[i]:
            bars[node.group].append(Bar(begin[i], end[i], int(node.kind == Kind.START), node.name))
    named = {"": "compute", **{group: labels.get(group, group) for group in groups}}
    return [
        Lane(named[stream], tuple(sorted(of_stream, key=lambda bar: (bar.begin, bar.kind))))
        for stream, of_stream in bars.items()
    ]


def merged(bars: tuple[Bar, ...], per_pixel: float) -> list[tuple[Bar, int]]:
    """Bars to draw at so many milliseconds a pixel, and the number of bars that each stands for."""
    found: list[tuple[Bar, int]] = []
    open_: dict[int, int] = {}  # by kind: the bar of thin ones that may take one more
    for bar in bars:
        thin = bar.end - bar.begin < THIN * per_pixel
        at = open_.get(bar.kind) if thin else None
        if at is not None and bar.end - found[at][0].begin < 2 * THIN * per_pixel:
            first, count = found[at]
            found[at] = dataclasses.replace(first, end=max(first.end, bar.end)), count + 1
            continue
        found.append((bar, 1))
        if thin:
            open_[bar.kind] = len(found) - 1
        else:
            open_.pop(bar.kind, None)
    return found


def draw(key: str, title: str, lanes: list[Lane], most: float) -> Drawing:
    """All of a timeline, `most` milliseconds wide; `key` begins the ids inside."""
    height = LANE * len(lanes) + AXIS
    drawing = Drawing(f"lanes-{key}", f"Timeline of the {title}", _described(lanes), WIDTH, height)
    scale = (WIDTH - LEFT - RIGHT) / most if most else 0.0
    for tick in ticks(most, 10):
        x = LEFT + tick * scale
        drawing.line(x, 0, x, LANE * len(lanes), "grid")
        drawing.text(x, height - 8, f"{tick:g}" + (" ms" if tick == 0 else ""), "tiny muted", "middle")
    for row, lane in enumerate(lanes):
        y = row * LANE + (LANE - BAR) / 2
        drawing.text(LEFT - 8, y + BAR / 2 + 4, lane.label, "small", "end")
        drawing.line(LEFT, y + BAR, WIDTH - RIGHT, y + BAR, "grid")
        for bar, count in merged(lane.bars, 1 / scale if scale else 0.0):
            x, width = LEFT + bar.begin * scale, max((bar.end - bar.begin) * scale, 0.5)
            apart = " apart" if width > 5 else ""
            drawing.rect(x, y, width, BAR, f"bar {KINDS[bar.kind]}{apart}", _tip(bar, count))
    return drawing


def _tip(bar: Bar, count: int) -> str:
    more = f" and {count - 1:,} more" if count > 1 else ""
    return f"{bar.name}{more}: {units.milliseconds(bar.end - bar.begin)}, from {number(bar.begin)} ms"


def _described(lanes: list[Lane]) -> str:
    waits = sum(bar.end - bar.begin for bar in lanes[0].bars if bar.kind == 2)
    busy = sum(bar.end - bar.begin for bar in lanes[0].bars if bar.kind == 0)
    return (
        f"Compute is busy for {units.milliseconds(busy)} and waits for {units.milliseconds(waits)}; lanes: "
        f"{', '.join(lane.label for lane in lanes)}."
    )
