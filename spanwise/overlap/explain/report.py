"""Result of `optimize`, and its report: the gain, the rest, and the reasons.

optimize ─► Result ─► figures ─► report (text) | `spanwise overlap`
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping

from torch import fx

from spanwise.overlap.bounds import Bounds
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.explain.figures import Collective, Figures, OrderFigures, arithmetic, hideable_by, order_figures
from spanwise.overlap.explain.reasons import Reason, hidden_counts, reasons
from spanwise.overlap.explain.trace import save_chrome_trace
from spanwise.overlap.explain.units import milliseconds, num_bytes
from spanwise.overlap.fx.operators import is_start, tensors_of
from spanwise.overlap.fx.sizes import Sizes, assumed
from spanwise.overlap.split.choose import Split

#: Most rows of the table of collectives in a text.
MOST = 10


@dataclasses.dataclass(frozen=True)
class Doubts:
    """What a result rests on: operators by name, once for each node.

    Attributes:
        barriers: nothing moves across these, and the bounds hold given that.
        guesses: their cost is a guess.
    """

    barriers: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()


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
        doubts: barriers, and costs that are guesses.
        sizes: numbers that symbolic sizes stood for; None if the graph has none.
        split: what was cut into pieces, or why nothing was; None without ``split=True``.
        links: what process groups share under the assumption that was not made; None if they share nothing anyway.
    """

    graph_module: fx.GraphModule
    timeline: Timeline
    before: Timeline
    bounds: Bounds
    members: tuple[tuple[int, ...], ...]
    budget: int
    doubts: Doubts = Doubts()
    sizes: Sizes | None = None
    split: Split | None = None
    links: Mapping[str, str] | None = None

    @property
    def given(self) -> Dag:
        """The nodes that were scheduled, in their own order: of the given graph, or of that graph in pieces."""
        return self.before.dag if self.split is None or self.split.dag is None else self.split.dag

    def report(self, groups: Mapping[str, str] | None = None) -> str:
        """Text of about twenty lines: the gain, the rest, and the most exposed collectives with reasons.

        Args:
            groups: labels of process groups, by their names in the graph.
        """
        found = figures(self, groups)
        facts = summary(found)
        width = max(map(len, facts))
        return "\n".join([*(f"{name:<{width}}  {text}" for name, text in facts.items()), *_exposed_rows(found)])

    def save_chrome_trace(self, path: str | os.PathLike[str], groups: Mapping[str, str] | None = None) -> None:
        """Write both timelines as Chrome trace events for Perfetto (ui.perfetto.dev); see `trace`.

        Args:
            groups: labels of process groups, by their names in the graph.
        """
        timelines = {"as given": self.before, "optimized": self.timeline}
        save_chrome_trace(path, timelines, budget=self.budget, groups=groups)


def figures(result: Result, groups: Mapping[str, str] | None = None) -> Figures:
    """All figures of a result; `groups` has labels of process groups by their names in the graph."""
    if result.sizes is not None:
        with assumed(result.graph_module, result.sizes):
            return figures(dataclasses.replace(result, sizes=None), groups)
    names = groups or {}
    timeline, heavy = result.timeline, arithmetic(result.graph_module)
    split = result.split
    starts = list(filter(is_start, result.graph_module.graph.nodes))
    issued = [i for i in timeline.order.tolist() if timeline.dag.nodes[i].kind == Kind.START]
    why = reasons(timeline, budget=result.budget)
    given_counts = hidden_counts(timeline, hideable_by(result.given, heavy), result.members)
    return Figures(
        before=order_figures(
            "as given",
            result.before,
            split.heavy if split is not None and split.is_cut else heavy,
            names=names,
            budget=result.budget,
        ),
        after=order_figures(
            "spanwise", timeline, heavy, names=names, bounds=result.bounds, why=why, given_counts=given_counts
        ),
        collectives=tuple(
            _collective(result, i, node, names, why.get(i)) for i, node in zip(issued, starts, strict=True)
        ),
        budget=result.budget,
        barriers=dict(Counter(result.doubts.barriers)),
        guesses=dict(Counter(result.doubts.guesses)),
        split=split and dataclasses.replace(split, group=names.get(split.group, split.group)),
        shared=any(node.link for node in timeline.dag.nodes),
        other=None if result.links is None else tuple(_linked(of, result.links) for of in (result.before, timeline)),
    )


def _linked(timeline: Timeline, links: Mapping[str, str]) -> float:
    """The makespan of the same order if groups share these links."""
    return simulate(timeline.dag.with_links(links), timeline.order.tolist()).makespan


def _collective(result: Result, i: int, node: fx.Node, names: Mapping[str, str], reason: Reason | None) -> Collective:
    timeline = result.timeline
    start = timeline.dag.nodes[i]
    given = [t for arg in node.all_input_nodes for t in tensors_of(arg)]
    size = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (given, tensors_of(node)))
    operator = str(node.target).removeprefix("_c10d_functional.").removeprefix("c10d_functional.").split(".")[0]
    begin, issued = float(timeline.begin[i]), float(timeline.issued[i])
    group, members = names.get(start.group, start.group), len(result.members[i])
    return Collective(i, start.name, operator, group, members, size, start.ms, begin, issued, reason)


def summary(found: Figures) -> dict[str, str]:
    """Facts about both orders in words, by topic."""
    before, after = found.before, found.after
    bucketed = after.launches < before.launches
    left = f"{milliseconds(after.left)}{_share(after.left, after.bound)}"
    bound = f"{milliseconds(after.bound)}, by {after.bound_by}; {left} left "
    if bucketed:  # the bound holds for these buckets only
        bound += f"to gain at most with these buckets; without buckets the bound is {milliseconds(before.bound)}"
    else:
        bound += "to gain at most"
    facts = {
        "makespan": f"{milliseconds(after.makespan)}, was {milliseconds(before.makespan)}"
        f"{_times(before.makespan, after.makespan)}",
        "bound": bound,
        "compute": milliseconds(after.compute),
        "exposed": f"{milliseconds(after.exposed)}, was {milliseconds(before.exposed)}",
        "hideable": f"{before.hideable:,} of {before.launches:,} collectives: {_counted(after)}; were "
        f"{_counted(before)}",
        "launches": f"{after.launches:,}, were {before.launches:,} before bucketing",
        "peak memory": f"{num_bytes(after.peak_bytes)}, was {num_bytes(before.peak_bytes)}; "
        f"budget {num_bytes(found.budget)}",
    }
    if found.other is not None:
        how = "no groups shared links" if found.shared else "groups of a level of links ran one after the other"
        facts["links"] = f"{milliseconds(found.other[1])}, was {milliseconds(found.other[0])}, if {how}"
    facts |= _split_text(found)
    if found.barriers:
        count = sum(found.barriers.values())
        facts["barriers"] = f"{count:,}, which nothing crosses; the bound holds given them: {_named(found.barriers)}"
    if found.guesses:
        count = sum(found.guesses.values())
        facts["guesses"] = f"cost{'s' * (count > 1)} of {count:,} node{'s' * (count > 1)}: {_named(found.guesses)}"
    if after.why:
        facts["exposed for"] = ", ".join(f"{why} {milliseconds(ms)}" for why, ms in after.why.items())
    return facts


def _split_text(found: Figures) -> dict[str, str]:
    """What was cut, what it gained, the bound before and the makespan at other rates; nothing without `split`."""
    split, after = found.split, found.after
    if split is None:
        return {}
    if not split.is_cut:
        return {"split": f"nothing: {split.why}"}
    gain, cut = split.unsplit - after.makespan, _named(split.collectives)
    others = ", ".join(f"{milliseconds(ms)} at M / (M + {n})" for n, ms in split.sensitivity.items())
    return {
        "split": f"{cut} of {split.group} and {split.products:,} matrix products in "
        f"{split.pieces} pieces; {milliseconds(gain)} ({gain / split.unsplit:.1%}) shorter than "
        f"{milliseconds(split.unsplit)}, the best without, whose bound is {milliseconds(split.unsplit_bound)}",
        "pieces": f"copies take {milliseconds(split.copies)}; products of M rows run at "
        f"M / (M + {split.half_rate}) of the rate; this order takes {others}",
    }


def _counted(order: OrderFigures) -> str:
    counts = order.given_counts or order.counts
    return f"{counts['hidden']:,} hidden, {counts['partly']:,} partly, {counts['exposed']:,} exposed"


def _named(counts: Mapping[str, int]) -> str:
    """Operators with their counts, the most frequent first."""
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(name if count == 1 else f"{name} ({count:,})" for name, count in ranked)


def _times(before: float, after: float) -> str:
    return f" ({before / after:.2f} x)" if after > 0 else ""


def _share(ms: float, of: float) -> str:
    return f" ({ms / of:.1%})" if of > 0 else ""


def _exposed_rows(found: Figures) -> list[str]:
    """Lines of the table of the most exposed collectives; none if none is exposed."""
    rows = [("most exposed", "group", "size", "takes", "exposed", "why")]
    for one in found.most_exposed[:MOST]:
        times = milliseconds(one.ms), milliseconds(one.exposed)
        rows.append((one.name, one.group, num_bytes(one.num_bytes), *times, one.why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map("{:{}{}}".format, row, "<<>>><", widths)).rstrip() for row in rows]
    return ["", *lines] if len(rows) > 1 else []
