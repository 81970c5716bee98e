"""Figures of an optimized graph, and the text that says them: what was gained, what is left, and why.

    optimize ─► Result ─► figures ─► report (text) | `spanwise overlap`: tables, HTML, JSON

Figures are read off a `Result` once; text, tables and pages show these and compute none of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from spanwise.overlap.costs.flops import node_flops
from spanwise.overlap.explain.reasons import Reason, Why, duration, hidden_counts, hideable, reasons
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import tensors_of
from spanwise.overlap.ir.bounds import Bounds, lower_bounds
from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.simulate import Timeline

if TYPE_CHECKING:
    from spanwise.overlap.optimize import Result

#: Rows of the table of collectives in a text.
MOST = 10


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a timeline.

    Attributes:
        start: its number in the timeline's dag.
        name: of the node that starts it.
        operator: what it does; "" where that is not known.
        group: its process group, by the name that a reader knows it by.
        members: how many collectives of the given graph it stands for.
        num_bytes: of its operands or its results, whichever are more; None where they are not known.
        ms: what it takes; `begin`: when it begins on its stream, `issued`: when compute hands it over.
        reason: why it is exposed; None if it is hidden.
        spread: of merged ones, milliseconds from when the first of its members could have been issued alone, all else
            being as it is, until the last could; what the bucket makes the first wait.
    """

    start: int
    name: str
    operator: str
    group: str
    members: int
    num_bytes: int | None
    ms: float
    begin: float
    issued: float
    reason: Reason | None
    spread: float = 0.0

    @property
    def why(self) -> str:
        """Why it is exposed, in words; "" if it is hidden."""
        if self.reason is None:
            return ""
        # Of no account beside what is exposed, nor where it would have been hidden anyhow.
        late = self.spread if Why.DEPENDENCY in self.reason.parts else 0.0
        bucket = f"; of its {self.members}, the first was ready {duration(late)} before the last"
        return str(self.reason) + (bucket if late > 0.01 * self.exposed else "")

    @property
    def exposed(self) -> float:
        """Milliseconds for which compute waits for it."""
        return self.reason.exposed if self.reason else 0.0


@dataclasses.dataclass(frozen=True)
class OrderFigures:
    """One order of a graph: milliseconds, bytes, counts.

    Attributes:
        name: what made it.
        compute: all work of the compute stream.
        bound: what no order of these nodes can beat; `bound_by`: which bound that is. Other buckets have other nodes.
        counts: of the hideable launches, how many are "hidden", "partly", "exposed"; a bucket is one.
        given_counts: the same of the given graph's collectives, each of which is what the launch that it became part of
            is; None where others have merged them.
        launches: collectives that are started, a bucket as one.
        why: exposed milliseconds by reason, the most first.
        seconds: that it took to find; None where that is not known.
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
        """Launches that take time and for which there are independent matrix products, convolutions or attention."""
        return sum(self.counts.values())

    @property
    def left(self) -> float:
        """Milliseconds that are left to gain at most, by other orders of the same nodes."""
        left = self.makespan - self.bound
        return left if left > 1e-9 * self.makespan else 0.0  # less is rounding


@dataclasses.dataclass(frozen=True)
class Figures:
    """All that a report says of a `Result`.

    Attributes:
        collectives: of the new graph, in the order in which they are issued.
        budget: bytes that the new order was allowed.
    """

    before: OrderFigures
    after: OrderFigures
    collectives: tuple[Collective, ...]
    budget: int

    @property
    def most_exposed(self) -> list[Collective]:
        """Those that are exposed, the longest first."""
        found = [one for one in self.collectives if one.reason is not None]
        return sorted(found, key=lambda one: (-one.exposed, one.start))

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON holds it; milliseconds, bytes and seconds."""
        return {
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "budget_bytes": self.budget,
            "collectives": [_collective_dict(one) for one in self.collectives],
        }


def figures(result: Result, groups: Mapping[str, str] | None = None) -> Figures:
    """What a report says of `result`.

    Args:
        groups: what process groups are called, by the names that the graph has for them; others keep theirs.
    """
    names = groups or {}
    heavy = arithmetic(result.graph_module)
    starts = [node for node in result.graph_module.graph.nodes if node.target in operators.STARTS]
    issued = [i for i in result.timeline.order.tolist() if result.timeline.dag.nodes[i].kind == Kind.START]
    nodes = dict(zip(issued, starts, strict=True))
    why = reasons(result.timeline, budget=result.budget)
    spread = _spread(result)
    given_counts = hidden_counts(result.timeline, _hideable(result.before.dag, heavy), result.members)
    return Figures(
        before=order_figures("as given", result.before, heavy, names=names, budget=result.budget),
        after=order_figures(
            "spanwise", result.timeline, heavy, names=names, bounds=result.bounds, why=why, given_counts=given_counts
        ),
        collectives=tuple(
            _collective(result.timeline, i, nodes[i], len(result.members[i]), names, why.get(i), spread.get(i, 0.0))
            for i in issued
        ),
        budget=result.budget,
    )


def arithmetic(gm: fx.GraphModule) -> set[str]:
    """Names of the nodes that multiply matrices, convolve or attend: those that count as compute which hides.

    As PyTorch's pass has it (pytorch/pytorch#163215): a cast that nothing needs makes no collective hideable.
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
        heavy: names of the nodes that count as compute which hides.
        names: as `figures` has it.
        bounds, why: where they are known; `budget` is for `reasons`.
        given_counts: of the collectives that were merged, if that is known. If none were, it is left out.
        merged: whether some may have been, of which nothing is known.
    """
    dag = timeline.dag
    bounds = lower_bounds(dag) if bounds is None else bounds
    why = reasons(timeline, budget=budget) if why is None else why
    parts: dict[str, float] = {}
    for reason in why.values():
        for one, ms in reason.parts.items():
            parts[one.value] = parts.get(one.value, 0.0) + ms
    counts = hidden_counts(timeline, _hideable(dag, heavy))
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


def _hideable(dag: Dag, heavy: Iterable[str]) -> set[int]:
    """Starts that the nodes of these names could hide."""
    chosen = frozenset(heavy)
    return hideable(dag, [i for i, node in enumerate(dag.nodes) if node.name in chosen])


def bound_by(bounds: Bounds, names: Mapping[str, str]) -> str:
    """Which of the bounds is the largest, in words."""
    known = [("all compute", bounds.compute), ("the longest path", bounds.path)]
    for stream, ms in bounds.streams.items():
        what = "compute, and what must come before and after it"
        known.append((what if stream == "compute" else f"the stream of {names.get(stream, stream)}", ms))
    # The first of equals: all compute is the plainest.
    return next(what for what, ms in known if math.isclose(ms, bounds.makespan, rel_tol=1e-12))


def _spread(result: Result) -> dict[int, float]:
    """`Collective.spread` of the merged ones, by their starts."""
    timeline, given = result.timeline, result.before.dag
    became = {i: unit for unit, members in enumerate(result.members) for i in members}
    is_start = timeline.dag.kinds == Kind.START
    there = np.where(is_start, timeline.issued, timeline.end)  # whoever depends on a start needs it issued
    found = {}
    for start in timeline.dag.starts:
        if len(result.members[start]) > 1:
            ready = [
                max((float(there[became[dep]]) for dep in given.nodes[i].deps), default=0.0)
                for i in result.members[start]
            ]
            found[start] = max(ready) - min(ready)
    return found


def _collective(
    timeline: Timeline,
    i: int,
    node: fx.Node,
    members: int,
    names: Mapping[str, str],
    reason: Reason | None,
    spread: float,
) -> Collective:
    start = timeline.dag.nodes[i]
    given = [t for arg in node.all_input_nodes for t in tensors_of(arg)]
    num_bytes = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (given, tensors_of(node)))
    operator = str(node.target).removeprefix("_c10d_functional.").removeprefix("c10d_functional.").split(".")[0]
    begin, issued = float(timeline.begin[i]), float(timeline.issued[i])
    group = names.get(start.group, start.group)
    return Collective(i, start.name, operator, group, members, num_bytes, start.ms, begin, issued, reason, spread)


def _collective_dict(one: Collective) -> dict[str, Any]:
    found = {field.name: getattr(one, field.name) for field in dataclasses.fields(one) if field.name != "reason"}
    parts = {why.value: ms for why, ms in one.reason.parts.items()} if one.reason else {}
    return {**found, "exposed": one.exposed, "why": parts}


def report(result: Result, groups: Mapping[str, str] | None = None) -> str:
    """What was gained, what is left, and why: text of some twenty lines.

    Args:
        groups: what process groups are called, by the names that the graph has for them.
    """
    found = figures(result, groups)
    facts = summary(found)
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {text}" for name, text in facts.items()]
    rows = [
        (one.name, one.group, _bytes(one.num_bytes), duration(one.ms), duration(one.exposed), one.why)
        for one in found.most_exposed[:MOST]
    ]
    if rows:
        lines += ["", *_table(("most exposed", "group", "size", "takes", "exposed", "why"), rows, "<<>>><")]
    return "\n".join(lines)


def summary(found: Figures) -> dict[str, str]:
    """What there is to say of all, in words, by what it is about."""
    before, after = found.before, found.after
    bucketed = after.launches < before.launches
    bound = (
        f"{duration(after.bound)}, by {after.bound_by}; {duration(after.left)}{_share(after.left, after.bound)} left "
    )
    if bucketed:  # what was merged is merged: of other buckets the bound says nothing
        bound += f"to gain at most with these buckets; without buckets the bound is {duration(before.bound)}"
    else:
        bound += "to gain at most"
    facts = {
        "makespan": f"{duration(after.makespan)}, was {duration(before.makespan)}"
        f"{_times(before.makespan, after.makespan)}",
        "bound": bound,
        "compute": duration(after.compute),
        "exposed": f"{duration(after.exposed)}, was {duration(before.exposed)}",
        "hideable": f"{before.hideable:,} of {before.launches:,} collectives: {_counted(after)}; were "
        f"{_counted(before)}",
        "launches": f"{after.launches:,}, were {before.launches:,} before bucketing",
        "peak memory": f"{_bytes(after.peak_bytes)}, was {_bytes(before.peak_bytes)}; budget {_bytes(found.budget)}",
    }
    if after.why:
        facts["exposed for"] = ", ".join(f"{why} {duration(ms)}" for why, ms in after.why.items())
    return facts


def _counted(order: OrderFigures) -> str:
    counts = order.given_counts or order.counts
    return f"{counts['hidden']:,} hidden, {counts['partly']:,} partly, {counts['exposed']:,} exposed"


def _times(before: float, after: float) -> str:
    return f" ({before / after:.2f} x)" if after > 0 else ""


def _share(ms: float, of: float) -> str:
    return f" ({ms / of:.1%})" if of > 0 else ""


def _bytes(value: int | None) -> str:
    if value is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value} B"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (heads, *rows)
    ]
