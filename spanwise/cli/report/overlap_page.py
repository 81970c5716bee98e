"""The report of optimized graphs: text, a page with a timeline of every order, and all figures as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.cli.report.page import Block, Heading, Legend, Preformatted, Table, render_page
from spanwise.cli.report.pictures import draw, lanes
from spanwise.hardware import Hardware
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.report import Figures, OrderFigures, summary
from spanwise.overlap.optimize import Result
from spanwise.units import milliseconds, num_bytes

#: Most rows of a table of exposed collectives.
MOST = 40

_LEGEND = Legend(
    (("local", "compute"), ("exchange", "collective under way"), ("waited", "compute waits for a collective"))
)
_SCALE = (
    "All to the same scale: the compute stream, and the stream of each process group. Neighbours too thin to see are "
    "one bar. To zoom, write --trace and open it in Perfetto (ui.perfetto.dev)."
)
_SIMULATED = (
    "Simulated, not measured: one in-order compute stream, one in-order stream for each process group; a wait keeps "
    "compute until its collective has ended. Costs are a roofline of the device and α–β times of the network's levels. "
    "A reason is a change that was tried for one collective alone; its milliseconds are those that it hides:"
)
_REASONS = {
    "no independent compute": "all compute that neither leads to its start nor depends on its wait takes less time",
    "stream is saturated": "it has a stream of its own",
    "order of compute": "what leads to it goes earlier and what follows it later; the step may get longer",
    "memory budget": "the same with more memory",
    "dependency": "it starts with the graph and depends on nothing",
    "no single change": "none of these hides it",
    "not tried": "others are exposed longer",
}


@dataclasses.dataclass(frozen=True)
class Graph:
    """One graph of a report.

    Attributes:
        nodes: number of nodes of the fx graph.
        peers: orders to compare with, of the same graph at the same costs.
        note: remark on peers that are missing.
    """

    name: str
    nodes: int
    result: Result
    figures: Figures
    peers: tuple[tuple[OrderFigures, Timeline], ...] = ()
    note: str = ""

    @property
    def orders(self) -> list[tuple[OrderFigures, Timeline]]:
        """All orders: as given, peers, ours."""
        figures, result = self.figures, self.result
        return [(figures.before, result.before), *self.peers, (figures.after, result.timeline)]

    def order_table(self) -> Table:
        """All orders compared."""
        rows = [
            (
                order.name, milliseconds(order.makespan), milliseconds(order.exposed),
                f"{order.left / order.bound:.1%}" if order.bound else "–",
                " / ".join(f"{order.counts[key]:,}" for key in ("hidden", "partly", "exposed")),
                f"{order.launches:,}", num_bytes(order.peak_bytes),
            )
            for order, _ in self.orders
        ]  # fmt: skip
        columns = ("order", "makespan", "exposed", "above its bound", "hidden / partly / exposed", "launches",
                   "peak memory")  # fmt: skip
        note = "A bucket is one launch."
        return Table("Orders compared", columns, rows, len(rows) - 1, note)

    def tables(self) -> list[Table]:
        """Orders, and the most exposed collectives."""
        exposed = [
            (
                one.name if one.members == 1 else f"{one.operator} of {one.members}", one.group, one.why,
                num_bytes(one.num_bytes), milliseconds(one.begin), milliseconds(one.ms), milliseconds(one.exposed),
            )
            for one in self.figures.most_exposed
        ]  # fmt: skip
        more = f"{MOST} of {len(exposed)} that are exposed" if len(exposed) > MOST else ""
        columns = ("collective", "group", "why", "size", "begins", "takes", "exposed")
        return [
            self.order_table(),
            *([Table("Most exposed collectives", columns, exposed[:MOST], note=more, left=3)] if exposed else []),
        ]


@dataclasses.dataclass(frozen=True)
class Report:
    """Graphs, and how they were made.

    Attributes:
        what: the graphs in words.
        command: the shell command that makes this report.
        hardware: prices the collectives.
        ranks, labels: ranks and labels of process groups, by the names of the groups in graphs.
    """

    what: str
    command: str
    hardware: Hardware
    ranks: Mapping[str, Sequence[int]]
    labels: Mapping[str, str]
    graphs: tuple[Graph, ...]

    @property
    def groups(self) -> str:
        """Process groups in words."""
        return ", ".join(f"{self.labels.get(name, name)} {list_ranks(of)}" for name, of in self.ranks.items()) or "none"

    def text(self) -> str:
        """What the command prints: `Result.report` of each graph, and the orders it is compared with."""
        parts = [f"{self.what}\non {self.hardware.name}; groups: {self.groups}"]
        for one in self.graphs:
            parts.append(f"{_upper(one.name)}, {one.nodes:,} nodes")
            parts += [one.note] if one.note else []
            parts += [str(one.order_table())] if one.peers else []
            parts.append(one.result.report(self.labels))
        return "\n\n".join([*parts, self.command])

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, in milliseconds and bytes."""
        return {
            "what": self.what,
            "command": self.command,
            "hardware": self.hardware.to_dict(),
            "groups": {self.labels.get(name, name): list(ranks) for name, ranks in self.ranks.items()},
            "graphs": {
                one.name: {
                    "nodes": one.nodes,
                    **one.figures.as_dict(),
                    "peers": [dataclasses.asdict(order) for order, _ in one.peers],
                    "note": one.note,
                }
                for one in self.graphs
            },
        }

    def html(self) -> str:
        """The page."""
        gains = (
            f"{one.name} {milliseconds(one.figures.before.makespan)} → {milliseconds(one.figures.after.makespan)}"
            for one in self.graphs
        )
        blocks: list[Block] = [
            Heading(1, f"Hidden communication: {', '.join(gains)}"),
            f"{self.what}. On {self.hardware.name}; process groups: {self.groups}.",
        ]
        for key, one in enumerate(self.graphs):
            blocks += [Heading(2, _upper(one.name)), summary(one.figures), *filter(None, [one.note]), _LEGEND]
            blocks += [*self._drawings(key, one), _SCALE, *one.tables()]
        blocks += [Heading(2, "How the numbers come about"), _SIMULATED, _REASONS, Preformatted(self.command)]
        return render_page(f"spanwise overlap: {self.what}", blocks)

    def _drawings(self, key: int, one: Graph) -> list[Block]:
        """Drawings of all orders, to one scale."""
        most = max(timeline.makespan for _, timeline in one.orders)
        found: list[Block] = []
        why = {each.start: each.reason for each in one.figures.collectives if each.reason}
        for index, (order, timeline) in enumerate(one.orders):
            shown = lanes(timeline, self.labels, why if timeline is one.result.timeline else None)
            found.append(Heading(3, f"{_upper(order.name)}: {milliseconds(timeline.makespan)}"))
            found.append(draw(f"{key}-{index}", f"{one.name}, {order.name}", shown, most))
        return found


def _upper(name: str) -> str:
    return name[0].upper() + name[1:]


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks as --group takes them.

    >>> list_ranks(range(8)), list_ranks(range(0, 64, 8)), list_ranks((0, 2))
    ('0-7', '0-56:8', '0,2')
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))
