"""Which nodes to cut, and into how many pieces: tried with the scheduler, so that all else is as in `optimize`.

regions ─► each in 2, 4, 8 pieces, while that helps ─► the shortest schedule
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.dag import Dag, GraphError, Node
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost, operator_name
from spanwise.overlap.split.region import Region, find_regions
from spanwise.overlap.split.rewrite import CannotSplit, Made, rewrite
from spanwise.overlap.split.tokenwise import COLLECTIVES, Cut, is_product_of_rows

PIECES = (2, 4, 8)
#: A cut graph must be this much shorter than the uncut one: costs are estimates.
WORTH = 0.995
#: Orders of a quick schedule. With 4 in place of 8, four layers of Llama-8B gain 3.2 % rather than 9.3 %.
QUICK = 8
#: A product of M rows runs at M / (M + HALF_RATE) of the rate. Assumed; `Split.sensitivity` shows what hangs on it.
HALF_RATE = 256
#: Other values for which a result tells the makespan of its order.
SENSITIVITY = (128, 512)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """What ``optimize(split=True)`` cut into pieces.

    Attributes:
        pieces: pieces of each cut node; 1 if nothing was cut.
        why: why nothing was cut; "" otherwise.
        group: process group of the collectives that were cut.
        collectives: cut collectives by operator, with their number in the given graph.
        products: cut matrix products.
        tokens: tokens of a rank, along the axis that was cut.
        cuts: of each cut node, by name, where its result has the tokens.
        unsplit: milliseconds of the best schedule found without cuts. `unsplit_bound`: the bound of that graph.
        copies: milliseconds of tensors taken apart and put together.
        half_rate: a product of M rows was assumed to run at M / (M + half_rate) of the rate.
        sensitivity: makespan of the order if a product of M rows runs at M / (M + n) of the rate, by n.
        dag: the cut graph in its own order; `Result.members` refers to it.
        heavy: names of the given graph's nodes that count as compute which hides.

    >>> Split(pieces=2, cuts={"mm": Cut(0, blocks=8)}).is_cut, Split(why="no cut makes it shorter").is_cut
    (True, False)
    """

    pieces: int = 1
    why: str = ""
    group: str = ""
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    products: int = 0
    tokens: int = 0
    cuts: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    unsplit: float = 0.0
    unsplit_bound: float = 0.0
    copies: float = 0.0
    half_rate: int = 0
    sensitivity: Mapping[int, float] = dataclasses.field(default_factory=dict)
    dag: Dag | None = None
    heavy: frozenset[str] = frozenset()

    @property
    def is_cut(self) -> bool:
        """Whether anything was cut."""
        return bool(self.cuts)

    def as_dict(self) -> dict[str, Any]:
        """What a report shows, for JSON."""
        if not self.is_cut:
            return {"pieces": self.pieces, "why": self.why}
        hidden = ("why", "tokens", "cuts", "dag", "heavy")
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in hidden}


class PieceCost:
    """Costs of the nodes of a cut graph: the given ones, with products of few rows at a lower rate.

    Args:
        cost: of the given graph's nodes, and of nodes like them. Its attribute ``half_rate``, if any, replaces
            `HALF_RATE`.
        rows: of pieces of products, by name: rows of the left operand.
        given: names of the given graph's nodes.
    """

    def __init__(self, cost: Cost, rows: Mapping[str, int], given: frozenset[str]) -> None:
        self._cost, self._rows, self._given = cost, rows, given
        self._known: dict[fx.Node, float] = {}  # two walks over a graph ask for each cost
        self.half_rate = getattr(cost, "half_rate", HALF_RATE)

    def __getattr__(self, name: str) -> Any:  # merged, is_guess, link
        return getattr(self._cost, name)

    def __call__(self, node: fx.Node) -> float:
        if node not in self._known:
            try:
                ms = self._cost(node)
            except Exception as error:
                if node.name in self._given:
                    raise
                text = f"split=True made it, and cost must give its milliseconds, as a CostModel does: {error}"
                raise GraphError(node.name, text) from error
            rows = self._rows.get(node.name)
            self._known[node] = ms if rows is None else ms * (rows + self.half_rate) / rows
        return self._known[node]


Optimizer = Callable[[fx.GraphModule, Cost, int | None], Any]
"""The `explain.report.Result` for a cut graph and its costs, with at most so many orders; None: as many as usual.
``ValueError`` if no order fits the budget."""


class Trial(NamedTuple):
    """A graph with a region in pieces, and the result for it."""

    region: Region
    pieces: int
    made: Made
    module: fx.GraphModule
    cost: PieceCost
    result: Any


def find_split(gm: fx.GraphModule, cost: Cost, optimize: Optimizer, whole: Timeline) -> Trial | None:
    """The best cut graph; None if none is shorter than `whole`, the best schedule of `gm`, by more than `WORTH`."""
    trials = _Trials(gm, cost, optimize, WORTH * whole.makespan)
    for region in find_regions(gm.graph):
        part = trials.best is not None and set(region.collectives) < set(trials.best.region.collectives)
        if not part and _floor(whole.dag, region.group) < trials.makespan:
            trials.region(region)
    best = trials.best
    if best is None:
        return None
    found = optimize(best.module, best.cost, None)
    return best._replace(result=found) if found.timeline.makespan <= best.result.timeline.makespan else best


def _floor(dag: Dag, group: str) -> float:
    """Milliseconds of compute or of another group's collectives, whichever is more: no cut makes these less."""
    streams = dict.fromkeys(dag.groups, 0.0)
    for i in dag.starts:
        streams[dag.nodes[i].group] += dag.nodes[i].ms
    return max(dag.compute_ms, *(ms for other, ms in streams.items() if other != group), 0.0)


class _Trials:
    """The best trial so far, and what it must be shorter than."""

    def __init__(self, gm: fx.GraphModule, cost: Cost, optimize: Optimizer, makespan: float) -> None:
        self.gm, self.cost, self.optimize, self.makespan = gm, cost, optimize, makespan
        self.names = frozenset(node.name for node in gm.graph.nodes)
        self.best: Trial | None = None

    def region(self, region: Region) -> None:
        """Try more and more pieces while that helps."""
        last = math.inf
        for pieces in PIECES:
            found = self.trial(region, pieces) if pieces <= region.tokens else math.inf
            if found >= last:
                break
            last = found

    def trial(self, region: Region, pieces: int) -> float:
        """Milliseconds of the cut graph, or a bound that is no better; infinite if it has no order in the budget."""
        module = _torch.copy_module(self.gm)
        try:
            made = rewrite(module.graph, region.by_name, region.tokens, pieces)
        except CannotSplit:
            return math.inf
        cost = PieceCost(self.cost, made.rows, self.names)
        bounds = lower_bounds(to_dag(module, cost).contracted.dag)
        # Buckets shorten the work of a group's stream, but no collective, and so neither of these.
        if (least := max(bounds.path, bounds.streams["compute"])) >= self.makespan:
            return least
        try:
            result = self.optimize(module, cost, QUICK)
        except GraphError:
            raise
        except ValueError:  # no order within the budget
            return math.inf
        if result.timeline.makespan < self.makespan:
            self.makespan = result.timeline.makespan
            self.best = Trial(region, pieces, made, module, cost, result)
        return result.timeline.makespan


def cut_graphs(gm: fx.GraphModule, pieces: Iterable[int] = PIECES) -> Iterator[fx.GraphModule]:
    """All of `gm` that can be cut, in each number of pieces.

    Costs that are measured must know what is in them (`costs.measure`).
    """
    for region in find_regions(gm.graph):
        for number in pieces:
            module = _torch.copy_module(gm)
            with contextlib.suppress(CannotSplit):
                rewrite(module.graph, region.by_name, region.tokens, number)
                yield module


def described(trial: Trial | None, whole: Timeline, bound: float, heavy: Iterable[str]) -> Split:
    """The record of the trial that was chosen in place of the timeline `whole`, or that none was."""
    if trial is None:
        return Split(why="no cut makes it shorter", unsplit=whole.makespan)
    dag = trial.result.before.dag
    cuts = trial.region.cuts
    copies = set(trial.made.copies)
    return Split(
        pieces=trial.pieces,
        group=trial.region.group,
        collectives=Counter(operator_name(node).split(".")[-1] for node in cuts if node.target in COLLECTIVES),
        products=sum(is_product_of_rows(node, cut) for node, cut in cuts.items()),
        tokens=trial.region.tokens,
        cuts=trial.region.by_name,
        unsplit=whole.makespan,
        unsplit_bound=bound,
        copies=sum(node.ms for node in dag.nodes if node.name in copies),
        half_rate=trial.cost.half_rate,
        sensitivity={n: _with_half_rate(trial, n) for n in SENSITIVITY},
        dag=dag,
        heavy=frozenset(heavy),
    )


def _with_half_rate(trial: Trial, half_rate: int) -> float:
    """Makespan of the same order if products of few rows are slower, or less slow, than assumed."""
    timeline, rows = trial.result.timeline, trial.made.rows

    def ms(node: Node) -> float:
        of_node = rows.get(node.name)
        return node.ms if of_node is None else node.ms * (of_node + half_rate) / (of_node + trial.cost.half_rate)

    nodes = tuple(dataclasses.replace(node, ms=ms(node)) for node in timeline.dag.nodes)
    return simulate(Dag(nodes), timeline.order.tolist()).makespan
