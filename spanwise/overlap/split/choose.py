"""Which nodes to cut, and into how many pieces: tried with the scheduler, so that all else is as in `optimize`.

regions ─► all segments in 2, 4, 8 pieces ─► without one kind of segment after another
        ─► the shortest schedule
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.bounds import Bounds, lower_bounds
from spanwise.overlap.dag import Dag, GraphError, Node
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.graph import Captured, to_dag
from spanwise.overlap.fx.operators import Cost, operator_name
from spanwise.overlap.quotient import Quotient
from spanwise.overlap.search import Schedule
from spanwise.overlap.split.cut import Cut
from spanwise.overlap.split.price import SENSITIVITY, PieceCost, slower
from spanwise.overlap.split.record import Split
from spanwise.overlap.split.region import Region, chosen, find_regions
from spanwise.overlap.split.rewrite import Made, rewrite
from spanwise.overlap.split.tokenwise import COLLECTIVES, is_product_of_rows
from spanwise.overlap.split.values import CannotSplit, Values

PIECES = (2, 4, 8)
#: A cut graph must be this much shorter than the uncut one: costs are estimates.
WORTH = 0.995


class Searches(NamedTuple):
    """The scheduler and the buckets of `optimize`, with its limits.

    Attributes:
        schedule: ``(captured, most orders or None, bounds)``; ``ValueError`` if no order fits the budget.
        bucket: ``(captured, cost, schedule, quick)``: buckets, and the schedule with them.
    """

    schedule: Callable[[Captured, int | None, Bounds], Schedule]
    bucket: Callable[[Captured, Cost, Schedule, bool], tuple[Quotient, Schedule]]


#: Orders of a quick schedule. With 4 in place of 8, four layers of Llama-8B gain 3.2 % rather than 9.3 %.
QUICK = 8
#: A trial whose schedule without buckets is that much longer than the best trial's gets no buckets. Of eight trials of
#: eight layers of Llama-8B that are two, and the choice is the same.
HOPELESS = 1.02


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A cut graph and its result.

    Attributes:
        kinds: of segments that were cut.
        cuts: of the nodes that were cut, by name.
        module, captured, cost, bounds: the cut graph in its own order, its dag, and its costs.
        merged, found: buckets and schedule of the cut graph.
    """

    region: Region
    kinds: frozenset[str]
    cuts: Mapping[str, Cut]
    pieces: int
    made: Made
    module: fx.GraphModule
    captured: Captured
    cost: PieceCost
    bounds: Bounds
    merged: Quotient
    found: Schedule

    @property
    def makespan(self) -> float:
        return float(self.found.timeline.makespan)


def find_split(gm: fx.GraphModule, cost: Cost, searches: Searches, whole: Timeline) -> Trial | None:
    """The best cut graph; None if none is shorter than `whole`, the best schedule of `gm`, by more than `WORTH`."""
    trials = _Trials(gm, cost, searches, WORTH * whole.makespan)
    for region in find_regions(gm.graph):
        part = trials.best is not None and set(region.collectives) < set(trials.best.region.collectives)
        if not part and _floor(whole.dag, region.group) < trials.makespan:
            trials.region(region)
    best = trials.best
    if best is None:
        return None
    merged, found = searches.bucket(
        best.captured, best.cost, searches.schedule(best.captured, None, best.bounds), False
    )
    better = found.timeline.makespan <= best.makespan
    return dataclasses.replace(best, merged=merged, found=found) if better else best


def _floor(dag: Dag, group: str) -> float:
    """Milliseconds of compute or of another group's collectives, whichever is more: no cut makes these less."""
    streams = [
        sum(dag.nodes[i].ms for i in dag.starts if dag.nodes[i].group == other)
        for other in dag.groups
        if other != group
    ]
    return max(dag.compute_ms, *streams, 0.0)


class _Trials:
    """The best trial so far, and what it must be shorter than."""

    def __init__(self, gm: fx.GraphModule, cost: Cost, searches: Searches, makespan: float) -> None:
        self.gm, self.cost, self.searches, self.makespan = gm, cost, searches, makespan
        self.unmerged = math.inf  # milliseconds of the best trial before its buckets
        self.values = Values()
        self.names = frozenset(node.name for node in gm.graph.nodes)
        self.best: Trial | None = None

    def region(self, region: Region) -> None:
        """Try more and more pieces while that helps, then without each kind of segment; if all is in vain, one kind."""
        kinds, last, pieces = frozenset(region.segments), math.inf, PIECES[0]
        for number in PIECES:
            found = self.trial(region, kinds, number) if number <= region.tokens else math.inf
            if found >= last:
                break
            last, pieces = found, number
        before = self.best
        for kind in sorted(kinds):
            if len(kinds) > 1 and self.tried(region, kinds - {kind}, pieces):
                kinds -= {kind}
        if self.best is before and len(kinds) > 2:
            for kind in sorted(kinds):
                self.trial(region, frozenset({kind}), pieces)

    def tried(self, region: Region, kinds: frozenset[str], pieces: int) -> bool:
        """Whether a trial is better than all before."""
        before = self.best
        self.trial(region, kinds, pieces)
        return self.best is not before

    def trial(self, region: Region, kinds: frozenset[str], pieces: int) -> float:
        """Milliseconds of the cut graph, or a bound that is no better; infinite if it has no order in the budget."""
        cuts = {node.name: cut for node, cut in chosen(region, kinds).items()}
        if not cuts:
            return math.inf
        module = _torch.copy_module(self.gm)
        try:
            made = apply(module.graph, cuts, region.tokens, pieces, self.values)
        except CannotSplit:
            return math.inf
        cost = PieceCost(self.cost, made.rows, self.names)
        captured = to_dag(module, cost)
        if captured.dag.compute_ms >= self.makespan:
            return math.inf
        bounds = lower_bounds(captured.contracted.dag)
        # Buckets shorten the work of a group's stream, but no collective, and so neither of these.
        if (least := max(bounds.path, bounds.streams["compute"])) >= self.makespan:
            return least
        try:
            found = self.searches.schedule(captured, QUICK, bounds)
        except GraphError:
            raise
        except ValueError:  # no order within the budget
            return math.inf
        if (unmerged := found.timeline.makespan) > HOPELESS * self.unmerged:
            return unmerged
        merged, found = self.searches.bucket(captured, cost, found, True)
        trial = Trial(region, kinds, cuts, pieces, made, module, captured, cost, bounds, merged, found)
        if trial.makespan < self.makespan:
            self.best, self.makespan, self.unmerged = trial, trial.makespan, unmerged
        return trial.makespan


def apply(graph: fx.Graph, cuts: Mapping[str, Cut], tokens: int, pieces: int, values: Values | None = None) -> Made:
    """Cut the nodes of these names, in place; equal graphs become equal; ``CannotSplit`` if a piece cannot be made."""
    of_nodes = {node: cuts[node.name] for node in graph.nodes if node.name in cuts}
    return rewrite(graph, of_nodes, tokens, pieces, values)


def cut_graphs(gm: fx.GraphModule, pieces: Iterable[int] = PIECES) -> Iterator[fx.GraphModule]:
    """All of `gm` that can be cut, in each number of pieces.

    Costs that are measured must know what is in them (`costs.measure`).
    """
    for region in find_regions(gm.graph):
        for number in pieces:
            cuts = {node.name: cut for node, cut in chosen(region, frozenset(region.segments)).items()}
            module = _torch.copy_module(gm)
            with contextlib.suppress(CannotSplit):
                apply(module.graph, cuts, region.tokens, number)
                yield module


def described(gm: fx.GraphModule, trial: Trial) -> Split:
    """The record of the trial that was chosen."""
    dag = trial.captured.dag
    cut = [node for node in gm.graph.nodes if node.name in trial.cuts]
    copies = set(trial.made.copies)
    return Split(
        pieces=trial.pieces,
        group=trial.region.group,
        collectives=Counter(operator_name(node).split(".")[-1] for node in cut if node.target in COLLECTIVES),
        products=sum(is_product_of_rows(node, trial.cuts[node.name]) for node in cut),
        tokens=trial.region.tokens,
        cuts=trial.cuts,
        copies=sum(node.ms for node in dag.nodes if node.name in copies),
        half_rate=trial.cost.half_rate,
        sensitivity={n: _with_half_rate(trial, n) for n in SENSITIVITY},
        dag=dag,
    )


def _with_half_rate(trial: Trial, half_rate: int) -> float:
    """Makespan of the same order if products of few rows are slower, or less slow, than assumed."""
    timeline, rows = trial.found.timeline, trial.made.rows

    def ms(node: Node) -> float:
        if node.name not in rows:
            return node.ms
        return node.ms * slower(rows[node.name], half_rate) / slower(rows[node.name], trial.cost.half_rate)

    nodes = tuple(dataclasses.replace(node, ms=ms(node)) for node in timeline.dag.nodes)
    return simulate(Dag(nodes), timeline.order.tolist()).makespan
