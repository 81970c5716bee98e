"""All figures of a report of optimized graphs. Text, HTML and JSON show these.

optimize ─► explain.report: figures ─► Page ─► overlap_text | overlap_html | JSON
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.hardware import Hardware
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.report import Figures, OrderFigures
from spanwise.overlap.optimize import Result


@dataclasses.dataclass(frozen=True)
class Peer:
    """An order to compare with ours: the same graph at the same costs."""

    figures: OrderFigures
    timeline: Timeline


@dataclasses.dataclass(frozen=True)
class GraphFigures:
    """One graph of a page.

    Attributes:
        nodes: number of nodes of the fx graph.
        peers: orders to compare with.
        note: remarks on costs, and on peers that are missing.
    """

    name: str
    nodes: int
    result: Result
    figures: Figures
    peers: tuple[Peer, ...] = ()
    note: str = ""

    @property
    def orders(self) -> tuple[OrderFigures, ...]:
        """All orders: as given, peers, ours."""
        return (self.figures.before, *(peer.figures for peer in self.peers), self.figures.after)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timeline of each of `orders`."""
        return (self.result.before, *(peer.timeline for peer in self.peers), self.result.timeline)

    def by_group(self) -> list[dict[str, Any]]:
        """Collectives of each process group in the new order: number, milliseconds, and exposed ones of them."""
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
    """Graphs, and how they were made.

    Attributes:
        what: the graphs in words.
        command: the shell command that makes this page.
        hardware: prices the collectives.
        ranks, labels: ranks and labels of process groups, by the names of the groups in graphs.
    """

    what: str
    command: str
    hardware: Hardware
    ranks: Mapping[str, Sequence[int]]
    labels: Mapping[str, str]
    graphs: tuple[GraphFigures, ...]

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, in milliseconds, bytes and seconds."""
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

    @property
    def groups(self) -> str:
        """Process groups in words."""
        return ", ".join(f"{self.labels.get(name, name)} {list_ranks(of)}" for name, of in self.ranks.items()) or "none"


def list_ranks(ranks: Sequence[int]) -> str:
    """Ranks as --group takes them.

    >>> list_ranks(range(8)), list_ranks(range(0, 64, 8)), list_ranks((0, 2))
    ('0-7', '0-56:8', '0,2')
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))
