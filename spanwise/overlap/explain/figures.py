"""Figures of orders and collectives: makespan, exposed time, bound, counts, memory and reasons.

    timeline ─► reasons ─► figures ─► report | `spanwise overlap`: tables, HTML, JSON

Texts, tables and pages show these figures and compute none themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from spanwise.overlap.bounds import Bounds, lower_bounds
from spanwise.overlap.costs.flops import node_flops
from spanwise.overlap.dag import Dag
from spanwise.overlap.engine import Timeline
from spanwise.overlap.explain.reasons import Reason, hidden_counts, hideable, reasons
from spanwise.overlap.split.choose import Split


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a timeline.

    Attributes:
        start: number of its start in the timeline's dag.
        name: name of that node.
        operator: the operator's name.
        group: label of its process group.
        members: number of collectives of the given graph that it replaces.
        num_bytes: the larger of its operands and its results.
        ms: its time. `begin`: when it begins on its stream. `issued`: when the compute stream reaches its start.
        reason: why it is exposed; None if it is hidden.
    """

    start: int
    name: str
    operator: str
    group: str
    members: int
    num_bytes: int
    ms: float
    begin: float
    issued: float
    reason: Reason | None

    @property
    def why(self) -> str:
        """The reason in words; "" if it is hidden."""
        return str(self.reason or "")

    @property
    def exposed(self) -> float:
        """Milliseconds that compute waits for it."""
        return self.reason.exposed if self.reason else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON; "why" has exposed milliseconds by reason, "moves" what would hide them."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "reason"}
        parts = {why.value: ms for why, ms in self.reason.parts.items()} if self.reason else {}
        moves = {why.value: dataclasses.asdict(move) for why, move in self.reason.moves.items()} if self.reason else {}
        return {**found, "exposed": self.exposed, "why": parts, "moves": moves}


@dataclasses.dataclass(frozen=True)
class OrderFigures:
    """One order of a graph: milliseconds, bytes, counts.

    Attributes:
        name: label of the order.
        compute: all work of the compute stream.
        bound: lower bound of all orders of these nodes; other buckets have other nodes. `bound_by`: which bound it is.
        counts: numbers of hideable launches that are "hidden", "partly" hidden and "exposed"; a bucket is one launch.
        given_counts: the same of the given graph's collectives, where each counts like its bucket; None if unknown.
        launches: number of started collectives; a bucket is one.
        why: exposed milliseconds by reason, largest first.
        seconds: time to find the order; None if unknown.
    """

    name: str
    makespan: float
    exposed: float
    compute: float
    bound: float
    bound_by: str
    counts: dict[str, int]
    given_counts: dict[str, int] | None
    launches: int
    peak_bytes: int
    why: dict[str, float]
    seconds: float | None = None

    @property
    def hideable(self) -> int:
        """Launches that take time and have independent matrix products, convolutions or attention."""
        return sum(self.counts.values())

    @property
    def left(self) -> float:
        """Milliseconds that other orders of the same nodes could gain at most."""
        left = self.makespan - self.bound
        return left if left > 1e-9 * self.makespan else 0.0  # less is rounding


@dataclasses.dataclass(frozen=True)
class Figures:
    """All figures of a `Result`.

    Attributes:
        before, after: the given order and the new one.
        collectives: collectives of the new graph, in the order in which they are issued.
        budget: byte limit of the new order.
        barriers, guesses: operators that nothing crosses, and that have a cost which is a guess, with their counts.
        split: what was cut into pieces; None if nothing should be.
        shared: whether groups share links here.
        other: makespans before and after under the other assumption; None if no groups could share any.
    """

    before: OrderFigures
    after: OrderFigures
    collectives: tuple[Collective, ...]
    budget: int
    barriers: dict[str, int] = dataclasses.field(default_factory=dict)
    guesses: dict[str, int] = dataclasses.field(default_factory=dict)
    split: Split | None = None
    shared: bool = False
    other: tuple[float, ...] | None = None

    @property
    def most_exposed(self) -> list[Collective]:
        """Exposed collectives, the longest first."""
        found = [one for one in self.collectives if one.reason is not None]
        return sorted(found, key=lambda one: (-one.exposed, one.start))

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, in milliseconds, bytes and seconds."""
        return {
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "budget_bytes": self.budget,
            "barriers": self.barriers,
            "guesses": self.guesses,
            **({} if self.split is None else {"split": self.split.as_dict()}),
            **({} if self.other is None else {"makespan_of_other_links": self.other, "links_shared": self.shared}),
            "collectives": [one.as_dict() for one in self.collectives],
        }


def arithmetic(gm: fx.GraphModule) -> set[str]:
    """Names of the nodes that count as compute which hides: matrix products, convolutions and attention.

    PyTorch's pass counts these as well (pytorch/pytorch#163215): an independent cast makes no collective hideable.
    """
    return {node.name for node in gm.graph.nodes if node.op == "call_function" and node_flops(node)}


def order_figures(
    name: str,
    timeline: Timeline,
    heavy: Iterable[str],
    *,
    names: Mapping[str, str] | None = None,
    bounds: Bounds | None = None,
    why: Mapping[int, Reason] | None = None,
    given_counts: dict[str, int] | None = None,
    merged: bool = False,
    budget: int | None = None,
    seconds: float | None = None,
) -> OrderFigures:
    """Figures of one order.

    Args:
        heavy: names of the nodes that count as compute which hides; see `arithmetic`.
        names: labels of process groups by name.
        bounds, why: bounds and reasons if they are known; otherwise computed here, `why` with `budget`.
        given_counts: counts of the given graph's collectives; default: `counts`, or None if `merged`.
        merged: whether some collectives may be merged in a way that is not known.
    """
    dag = timeline.dag
    bounds = lower_bounds(dag) if bounds is None else bounds
    why = reasons(timeline, budget=budget) if why is None else why
    parts: dict[str, float] = {}
    for reason in why.values():
        for one, ms in reason.parts.items():
            parts[one.value] = parts.get(one.value, 0.0) + ms
    counts = hidden_counts(timeline, hideable_by(dag, heavy))
    if given_counts is None and not merged:
        given_counts = dict(counts)
    return OrderFigures(
        name=name,
        makespan=timeline.makespan,
        exposed=timeline.exposed_ms,
        compute=dag.compute_ms,
        bound=bounds.makespan,
        bound_by=bound_by(bounds, names or {}),
        counts=counts,
        given_counts=given_counts,
        launches=len(dag.starts),
        peak_bytes=timeline.peak_bytes,
        why=dict(sorted(parts.items(), key=lambda part: -part[1])),
        seconds=seconds,
    )


def hideable_by(dag: Dag, heavy: Iterable[str]) -> set[int]:
    """Starts that the compute nodes of these names could hide."""
    chosen = frozenset(heavy)
    return hideable(dag, [i for i, node in enumerate(dag.nodes) if node.name in chosen])


def bound_by(bounds: Bounds, names: Mapping[str, str]) -> str:
    """Name the largest of the bounds."""
    known = [("all compute", bounds.compute), ("the longest path", bounds.path)]
    for stream, ms in bounds.streams.items():
        what = "compute, and what must come before and after it"
        known.append((what if stream == "compute" else f"the stream of {names.get(stream, stream)}", ms))
    # The first of equal bounds: all compute is the simplest.
    return next(what for what, ms in known if math.isclose(ms, bounds.makespan, rel_tol=1e-12))
