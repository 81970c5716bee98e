"""Result of `optimize`, its figures and its report: the gain, the rest, and the reasons.

    optimize ─► Result ─► figures ─► report | `spanwise overlap`: tables, HTML, JSON

Texts, tables and pages show these figures and compute none themselves.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from spanwise.overlap.bounds import Bounds, lower_bounds
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.explain.reasons import Reason, reasons
from spanwise.overlap.explain.trace import save_chrome_trace
from spanwise.overlap.fx.operators import is_start, operator_name, tensors_of
from spanwise.overlap.fx.sizes import Sizes, assumed
from spanwise.overlap.offload import Offloaded
from spanwise.overlap.split.choose import Split
from spanwise.units import milliseconds, num_bytes

#: Most rows of the table of collectives in a text.
MOST = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Result of `optimize`; see there for an example.

    Attributes:
        graph_module: the new graph; it shares parameters and attributes with the given one.
        timeline: timeline of the new graph. Its nodes are those of `before`, with the starts and waits of a bucket
            as one.
        before: timeline of the given graph in its own order.
        bounds: lower bounds of all orders of the new graph's nodes, memory aside.
        members: for each node of `timeline.dag`, the nodes of `given` that it replaces.
        budget: byte limit of the new order.
        barriers: operators that nothing moves across, once for each node; the bounds hold given that.
        guesses: operators with a cost that is a guess, once for each node.
        sizes: numbers that symbolic sizes stood for; None if the graph has none.
        split: what was cut into pieces, or why nothing was; None without ``split=True``.
        offloaded: what waits in the host's memory between forward and backward; None if nothing does.
        links: what process groups share under the assumption that was not made; None if they share nothing anyway.
    """

    graph_module: fx.GraphModule
    timeline: Timeline
    before: Timeline
    bounds: Bounds
    members: tuple[tuple[int, ...], ...]
    budget: int
    barriers: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    sizes: Sizes | None = None
    split: Split | None = None
    offloaded: Offloaded | None = None
    links: Mapping[str, str] | None = None

    @property
    def given(self) -> Dag:
        """The nodes that were scheduled, in their own order: of the graph as given, in pieces, or with offloads."""
        if self.offloaded is not None:
            return self.offloaded.dag
        return self.before.dag if self.split is None or self.split.dag is None else self.split.dag

    def report(self, groups: Mapping[str, str] | None = None) -> str:
        """Text of about twenty lines: the gain, the rest, and the most exposed collectives with reasons.

        Args:
            groups: labels of process groups, by their names in the graph.
        """
        found = figures(self, groups)
        facts = summary(found)
        width = max(map(len, facts))
        lines = [f"{name:<{width}}  {text}" for name, text in facts.items()]
        rows = [("most exposed", "group", "size", "takes", "exposed", "why")]
        for one in found.most_exposed[:MOST]:
            times = milliseconds(one.ms), milliseconds(one.exposed)
            rows.append((one.name, one.group, num_bytes(one.num_bytes), *times, one.why))
        if len(rows) > 1:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["", *("  ".join(map("{:{}{}}".format, row, "<<>>><", widths)).rstrip() for row in rows)]
        return "\n".join(lines)

    def save_chrome_trace(self, path: str | os.PathLike[str], groups: Mapping[str, str] | None = None) -> None:
        """Write both timelines as Chrome trace events for Perfetto (ui.perfetto.dev); see `trace`.

        Args:
            groups: labels of process groups, by their names in the graph.
        """
        timelines = {"as given": self.before, "optimized": self.timeline}
        save_chrome_trace(path, timelines, budget=self.budget, groups=groups)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a timeline.

    Attributes:
        start: number of its start in the timeline's dag. `name`: name of that node.
        operator: the operator's name. `group`: label of its process group.
        members: number of collectives of the given graph that it replaces.
        num_bytes: the larger of its operands and its results.
        ms: its time. `begin`: when it begins on its stream.
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
        of = self.reason.moves if self.reason else {}
        moves = {why.value: dataclasses.asdict(move) for why, move in of.items()}
        return {**found, "exposed": self.exposed, "why": {w.value: m.hides for w, m in of.items()}, "moves": moves}


@dataclasses.dataclass(frozen=True)
class OrderFigures:
    """One order of a graph: milliseconds, bytes, counts.

    Attributes:
        name: label of the order.
        compute: all work of the compute stream.
        bound: lower bound of all orders of these nodes; other buckets have other nodes. `bound_by`: which bound it is.
        counts: numbers of launches that are "hidden", "partly" hidden and "exposed". A bucket is one launch.
        launches: number of started collectives.
        why: exposed milliseconds by reason, largest first.
    """

    name: str
    makespan: float
    exposed: float
    compute: float
    bound: float
    bound_by: str
    counts: dict[str, int]
    launches: int
    peak_bytes: int
    why: dict[str, float]

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
        offloaded: bytes of each activation that waits in the host's memory.
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
    offloaded: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shared: bool = False
    other: tuple[float, ...] | None = None

    @property
    def most_exposed(self) -> list[Collective]:
        """Exposed collectives, the longest first."""
        found = [one for one in self.collectives if one.reason is not None]
        return sorted(found, key=lambda one: (-one.exposed, one.start))

    def as_dict(self) -> dict[str, Any]:
        """All figures for JSON, in milliseconds and bytes."""
        return {
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "budget_bytes": self.budget,
            "barriers": self.barriers,
            "guesses": self.guesses,
            **({} if self.split is None else {"split": self.split.as_dict()}),
            **({"offloaded_bytes": dict(self.offloaded)} if self.offloaded else {}),
            **({} if self.other is None else {"makespan_of_other_links": self.other, "links_shared": self.shared}),
            "collectives": [one.as_dict() for one in self.collectives],
        }


def order_figures(name: str, timeline: Timeline, why: Mapping[int, Reason], names: Mapping[str, str]) -> OrderFigures:
    """Figures of one order.

    Args:
        why: `reasons` of its exposed collectives.
        names: labels of process groups by name.
    """
    dag, parts, bounds = timeline.dag, dict[str, float](), lower_bounds(timeline.dag)
    for reason in why.values():
        for one, move in reason.moves.items():
            parts[one.value] = parts.get(one.value, 0.0) + move.hides
    return OrderFigures(
        name=name,
        makespan=timeline.makespan,
        exposed=timeline.exposed_ms,
        compute=dag.compute_ms,
        bound=bounds.makespan,
        bound_by=bound_by(bounds, names),
        counts=timeline.counts(),
        launches=len(dag.starts),
        peak_bytes=timeline.peak_bytes,
        why=dict(sorted(parts.items(), key=lambda part: -part[1])),
    )


def bound_by(bounds: Bounds, names: Mapping[str, str]) -> str:
    """Name the largest of the bounds."""
    known = [("all compute", bounds.compute), ("the longest path", bounds.path)]
    for stream, ms in bounds.streams.items():
        what = "compute, and what must come before and after it"
        known.append((what if stream == "compute" else f"the stream of {names.get(stream, stream)}", ms))
    # The first of equal bounds: all compute is the simplest.
    return next(what for what, ms in known if math.isclose(ms, bounds.makespan, rel_tol=1e-12))


def figures(result: Result, groups: Mapping[str, str] | None = None) -> Figures:
    """All figures of a result; `groups` has labels of process groups by their names in the graph."""
    if result.sizes is not None:
        with assumed(result.graph_module, result.sizes):
            return figures(dataclasses.replace(result, sizes=None), groups)
    names, timeline, split = groups or {}, result.timeline, result.split
    starts = list(filter(is_start, result.graph_module.graph.nodes))
    why = reasons(timeline, budget=result.budget)
    why_before = reasons(result.before, budget=result.budget)
    issued = [i for i in timeline.order.tolist() if timeline.dag.nodes[i].kind == Kind.START]
    collectives = []
    for i, node in zip(issued, starts, strict=True):
        start, given = timeline.dag.nodes[i], [t for arg in node.all_input_nodes for t in tensors_of(arg)]
        size = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (given, tensors_of(node)))
        operator, group = operator_name(node).split(".")[-1], names.get(start.group, start.group)
        begin, members = float(timeline.begin[i]), len(result.members[i])
        collectives.append(Collective(i, start.name, operator, group, members, size, start.ms, begin, why.get(i)))
    other = None
    if result.links is not None:
        both = (result.before, timeline)
        other = tuple(simulate(of.dag.with_links(result.links), of.order.tolist()).makespan for of in both)
    return Figures(
        before=order_figures("as given", result.before, why_before, names),
        after=order_figures("spanwise", timeline, why, names),
        collectives=tuple(collectives),
        budget=result.budget,
        barriers=dict(Counter(result.barriers)),
        guesses=dict(Counter(result.guesses)),
        split=split and dataclasses.replace(split, group=names.get(split.group, split.group)),
        offloaded={} if result.offloaded is None else result.offloaded.num_bytes,
        shared=any(node.link for node in timeline.dag.nodes),
        other=other,
    )


def summary(found: Figures) -> dict[str, str]:
    """Facts about both orders in words, by topic."""
    before, after = found.before, found.after
    times = f" ({before.makespan / after.makespan:.2f} x)" if after.makespan else ""
    left = milliseconds(after.left) + (f" ({after.left / after.bound:.1%})" if after.bound else "")
    bound = f"{milliseconds(after.bound)}, by {after.bound_by}; {left} left to gain at most"
    if after.launches < before.launches:  # the bound holds for these buckets only
        bound += f" with these buckets; without buckets the bound is {milliseconds(before.bound)}"
    facts = {
        "makespan": f"{milliseconds(after.makespan)}, was {milliseconds(before.makespan)}{times}",
        "bound": bound,
        "compute": milliseconds(after.compute),
        "exposed": f"{milliseconds(after.exposed)}, was {milliseconds(before.exposed)}",
        "launches": "; were ".join(
            f"{of.launches:,}: {', '.join(f'{count:,} {how}' for how, count in of.counts.items())}"
            for of in (after, before)
        ),
        "peak memory": f"{num_bytes(after.peak_bytes)}, was {num_bytes(before.peak_bytes)}; "
        f"budget {num_bytes(found.budget)}",
    }
    if found.other is not None:
        how = "no groups shared links" if found.shared else "groups that share a network level ran one after the other"
        facts["links"] = f"{milliseconds(found.other[1])}, was {milliseconds(found.other[0])}, if {how}"
    if found.offloaded:
        facts["offloaded"] = f"{len(found.offloaded):,} activations, {num_bytes(sum(found.offloaded.values()))}"
    if (split := found.split) is not None:
        gain = split.unsplit - after.makespan
        facts["split"] = f"nothing: {split.why}"
        if split.is_cut:
            facts["split"] = (
                f"{_named(split.collectives)} of {split.group} and {split.products:,} matrix products in "
                f"{split.pieces} pieces; {milliseconds(gain)} ({gain / split.unsplit:.1%}) shorter than "
                f"{milliseconds(split.unsplit)}, the best without; "
                f"products of M rows run at M / (M + {split.half_rate})"
            )
    if found.barriers:
        count = sum(found.barriers.values())
        facts["barriers"] = f"{count:,}, which nothing crosses; the bound holds given them: {_named(found.barriers)}"
    if found.guesses:
        facts["guesses"] = f"costs of {sum(found.guesses.values()):,} nodes: {_named(found.guesses)}"
    if after.why:
        facts["exposed for"] = ", ".join(f"{why} {milliseconds(ms)}" for why, ms in after.why.items())
    return facts


def _named(counts: Mapping[str, int]) -> str:
    """Operators with their counts, the most frequent first."""
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(name if count == 1 else f"{name} ({count:,})" for name, count in ranked)
