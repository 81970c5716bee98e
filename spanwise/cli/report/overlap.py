"""Optimized graphs as people read them: tables for a terminal, and one self-contained HTML page with both timelines.

optimize ─► overlap.report: figures ─► show | render
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup
from rich.table import Table

from spanwise.cli.report import overlap_drawing, terminal, units
from spanwise.hardware import Hardware
from spanwise.overlap.explain.reasons import reasons
from spanwise.overlap.explain.report import Collective, Figures, OrderFigures, summary
from spanwise.overlap.ir.simulate import Timeline
from spanwise.overlap.optimize import Result

#: What the tables of orders count.
COUNTED = "of the launches that compute could hide at all; collectives that were merged are one launch"

#: Rows of a table of exposed collectives, on a terminal and on a page.
MOST, MOST_HTML = 10, 40


@dataclasses.dataclass(frozen=True)
class Peer:
    """An order beside ours, of the same graph at the same costs."""

    figures: OrderFigures
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class GraphFigures:
    """One graph of a page.

    Attributes:
        nodes: of the fx graph.
        peers: orders beside; `note`: why there are none, or not all.
    """

    name: str
    nodes: int
    result: Result
    figures: Figures
    peers: tuple[Peer, ...] = ()
    note: str = ""

    @property
    def orders(self) -> tuple[OrderFigures, ...]:
        """All orders: as given, those beside, ours."""
        return (self.figures.before, *(peer.figures for peer in self.peers), self.figures.after)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Of each of `orders`."""
        return (self.result.before, *(peer.timeline for peer in self.peers), self.result.timeline)

    def by_group(self) -> list[dict[str, Any]]:
        """Collectives of each process group in the new order: how many, milliseconds, of them exposed."""
        found: dict[str, dict[str, Any]] = {}
        for one in self.figures.collectives:
            row = found.setdefault(
                one.group, {"group": one.group, "launches": 0, "members": 0, "ms": 0.0, "exposed": 0.0}
            )
            row["launches"] += 1
            row["members"] += one.members
            row["ms"] += one.ms
            row["exposed"] += one.exposed
        return list(found.values())


@dataclasses.dataclass(frozen=True)
class Page:
    """What is shown: graphs, and how they came about.

    Attributes:
        what: the graphs in words.
        command: what a shell runs to get this again.
        ranks, labels: of process groups, by the names that graphs have for them: their ranks, and what they are called.
    """

    what: str
    command: str
    hardware: Hardware
    ranks: Mapping[str, Sequence[int]]
    labels: Mapping[str, str]
    graphs: tuple[GraphFigures, ...]

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON holds them; milliseconds, bytes and seconds."""
        return {
            "what": self.what,
            "command": self.command,
            "hardware": self.hardware.to_dict(),
            "groups": {self.labels.get(name, name): list(ranks) for name, ranks in self.ranks.items()},
            "graphs": {
                one.name: {
                    "nodes": one.nodes,
                    **one.figures.as_dict(),
                    "peers": [dataclasses.asdict(peer.figures) for peer in one.peers],
                    "note": one.note,
                }
                for one in self.graphs
            },
        }


def show(page: Page) -> None:
    """Print the report."""
    console = terminal.console()
    for line in (page.what, f"on {page.hardware.name}; groups: {groups(page)}"):
        console.print(line, highlight=False)
    for one in page.graphs:
        console.print()
        console.print(_order_table(one))
        if one.note:
            console.print(one.note, highlight=False)
        facts = summary(one.figures)
        for name in ("bound", "hideable", "peak memory", "exposed for"):
            if name in facts:
                console.print(f"{name}: {facts[name]}", highlight=False)
        if one.figures.collectives:
            console.print(_group_table(one))
        if one.figures.most_exposed:
            console.print(_collective_table(one.figures))
    console.print(f"\n{page.command}", highlight=False)


def groups(page: Page) -> str:
    """Process groups in words."""
    named = [f"{page.labels.get(name, name)} {listed(ranks)}" for name, ranks in page.ranks.items()]
    return ", ".join(named) or "none"


def listed(ranks: Sequence[int]) -> str:
    """Ranks as --group takes them: "0-7", "0-56:8" or "0,2"."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def counted(order: OrderFigures) -> str:
    """Hideable launches that are hidden, partly hidden, exposed."""
    return " / ".join(f"{order.counts[key]:,}" for key in ("hidden", "partly", "exposed"))


def ms(value: float) -> str:
    """Milliseconds, with the unit that suits."""
    return units.seconds(value / 1e3)


def _order_table(one: GraphFigures) -> Table:
    table = Table(
        title=f"{one.name[0].upper()}{one.name[1:]}, {one.nodes:,} nodes",
        title_justify="left",
        caption=f"Hidden, partly, exposed: {COUNTED}.",
        caption_justify="left",
    )
    table.add_column("order")
    heads = ("makespan", "exposed", "bound", "above it", "hidden / partly / exposed", "launches", "peak memory", "took")
    for head in heads:
        table.add_column(head, justify="right")
    for order in one.orders:
        table.add_row(
            order.name,
            ms(order.makespan),
            ms(order.exposed),
            ms(order.bound),
            f"{order.left / order.bound:.1%}" if order.bound else "–",
            f"{counted(order)} of {order.hideable:,}",
            f"{order.launches:,}",
            units.num_bytes(order.peak_bytes),
            "" if order.seconds is None else units.seconds(order.seconds),
            style="bold" if order is one.figures.after else None,
        )
    return table


def _group_table(one: GraphFigures) -> Table:
    table = Table(title="Collectives by process group", title_justify="left")
    for head in ("group", "launches", "of", "take", "exposed", "hidden"):
        table.add_column(head, justify="left" if head == "group" else "right")
    for row in one.by_group():
        table.add_row(
            row["group"],
            f"{row['launches']:,}",
            f"{row['members']:,}",
            ms(row["ms"]),
            ms(row["exposed"]),
            f"{1 - row['exposed'] / row['ms']:.0%}" if row["ms"] else "–",
        )
    return table


def _collective_table(found: Figures) -> Table:
    most = found.most_exposed
    table = Table(
        title="Most exposed collectives",
        caption=f"{MOST} of {len(most):,} that are exposed" if len(most) > MOST else None,
        title_justify="left",
    )
    table.add_column("collective")
    for head in ("group", "size", "takes", "exposed", "why"):
        table.add_column(head, justify="right" if head in ("size", "takes", "exposed") else "left")
    for one in most[:MOST]:
        size = "" if one.num_bytes is None else units.num_bytes(one.num_bytes)
        table.add_row(named(one), one.group, size, ms(one.ms), ms(one.exposed), one.why)
    return table


def named(one: Collective) -> str:
    """A collective by its node, and how many it stands for."""
    return one.name if one.members == 1 else f"{one.operator} of {one.members}"


def render(page: Page) -> str:
    """The page as text; it loads nothing."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(ms=ms, bytes=units.num_bytes, seconds=units.seconds, count=lambda n: f"{n:,.0f}")
    files = resources.files("spanwise.cli.report")
    template = environment.from_string(files.joinpath("overlap.html.jinja").read_text("utf-8"))
    drawings = [_drawings(str(index), one, page.labels) for index, one in enumerate(page.graphs)]
    return template.render(
        page=page,
        groups=groups(page),
        style=Markup(files.joinpath("plan.css").read_text("utf-8") + files.joinpath("overlap.css").read_text("utf-8")),
        script=Markup(files.joinpath("overlap.js").read_text("utf-8")),
        graphs=list(zip(page.graphs, drawings, strict=True)),
        summary=summary,
        counted=counted,
        counted_are=COUNTED,
        named=named,
        most=MOST_HTML,
    )


def _drawings(key: str, one: GraphFigures, labels: Mapping[str, str]) -> dict[str, Any]:
    most = max(timeline.makespan for timeline in one.timelines)
    drawn: list[dict[str, Any]] = []
    data = []
    known = {collective.start: collective.reason for collective in one.figures.collectives if collective.reason}
    for order, timeline in zip(one.orders, one.timelines, strict=True):
        ours = timeline is one.result.timeline
        why = known if ours else reasons(timeline, budget=one.result.budget)
        lanes = overlap_drawing.lanes(timeline, labels, why)
        svg = overlap_drawing.draw(f"{key}-{len(drawn)}", f"{one.name}, {order.name}", lanes, most)
        drawn.append({"svg": Markup(str(svg)), "name": order.name, "end": timeline.makespan})
        data.append([lane.as_list() for lane in lanes])
    # "<" would end the script that holds the names.
    text = json.dumps({"most": most, "timelines": data}, separators=(",", ":")).replace("<", "\\u003c")
    return {"timelines": drawn, "data": Markup(text)}
