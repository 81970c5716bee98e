"""Timelines drawn: a lane for the compute stream and one for each process group; bars too thin to see become one.

`lanes` takes a timeline apart; `draw` draws all of it, and the page's script draws parts of it by the same rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from spanwise.cli.report import units
from spanwise.cli.report.svg import Drawing, number, ticks
from spanwise.overlap.explain.reasons import Reason
from spanwise.overlap.explain.trace import in_order
from spanwise.overlap.ir.dag import Kind
from spanwise.overlap.ir.simulate import Timeline

# CSS pixels.
WIDTH, LEFT, RIGHT = 1030, 96, 22
LANE, BAR, AXIS = 30, 20, 24
#: Bars of fewer pixels are drawn together with the next ones of their kind.
THIN = 1.0

#: Classes of bars: compute, a collective, what of it compute waits for.
KINDS = ("local", "exchange", "waited")


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a stream does from `begin` to `end`, milliseconds; kind: an index into `KINDS`."""

    begin: float
    end: float
    kind: int
    name: str


@dataclasses.dataclass(frozen=True)
class Lane:
    """Bars of one stream, by when they begin; those that take no time are left out."""

    label: str
    bars: tuple[Bar, ...]

    def as_list(self) -> list[object]:
        """For the page's script: the label, and the numbers and names of the bars; nanoseconds are enough."""
        return [self.label, [[round(b.begin, 6), round(b.end - b.begin, 6), b.kind, b.name] for b in self.bars]]


def lanes(timeline: Timeline, labels: Mapping[str, str], why: Mapping[int, Reason] | None = None) -> list[Lane]:
    """Compute, then each group; on each, what is exposed lies over it.

    Args:
        labels: what groups are called, by their names; others keep theirs.
        why: of collectives by their starts, why they are exposed.
    """
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
    """Bars as they are drawn, and how many each stands for.

    Args:
        per_pixel: milliseconds.
    """
    found: list[tuple[Bar, int]] = []
    open_: dict[int, int] = {}  # of each kind, the bar of thin ones that is still as thin
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
    """All of a timeline.

    Args:
        key: for the ids inside, unique in a page.
        most: milliseconds that the width stands for.
    """
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
    return f"{bar.name}{more}: {units.seconds((bar.end - bar.begin) / 1e3)}, from {number(bar.begin)} ms"


def _described(lanes: list[Lane]) -> str:
    waits = sum(bar.end - bar.begin for bar in lanes[0].bars if bar.kind == 2)
    busy = sum(bar.end - bar.begin for bar in lanes[0].bars if bar.kind == 0)
    return (
        f"Compute is busy for {units.seconds(busy / 1e3)} and waits for {units.seconds(waits / 1e3)}; lanes: "
        f"{', '.join(lane.label for lane in lanes)}."
    )
