"""Which nodes to cut, and into how many pieces: tried with the scheduler, so that all else is as in `optimize`.

regions ─► each in 2, 4, 8 pieces, while that helps ─► the shortest schedule
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.buckets import WORTH
from spanwise.overlap.dag import Dag, GraphError
from spanwise.overlap.engine import Timeline
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost, operator_name
from spanwise.overlap.search import FEWEST
from spanwise.overlap.split.region import Region, find_regions
from spanwise.overlap.split.rewrite import CannotSplit, rewrite
from spanwise.overlap.split.tokenwise import COLLECTIVES, Cut, is_product_of_rows

PIECES = (2, 4, 8)
#: A product of M rows runs at M / (M + HALF_RATE) of the rate. Assumed.
HALF_RATE = 256


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
        unsplit: milliseconds of the best schedule found without cuts.
        half_rate: a product of M rows was assumed to run at M / (M + half_rate) of the rate.
        dag: the cut graph in its own order; `Result.members` refers to it.

    >>> Split(pieces=2, cuts={"mm": Cut(0, blocks=8)}).is_cut
    True
    """

    pieces: int = 1
    why: str = ""
    group: str = ""
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    products: int = 0
    tokens: int = 0
    cuts: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    unsplit: float = 0.0
    half_rate: int = 0
    dag: Dag | None = None

    @property
    def is_cut(self) -> bool:
        """Whether anything was cut."""
        return bool(self.cuts)

    def as_dict(self) -> dict[str, Any]:
        """What a report shows, for JSON."""
        shown = ("pieces", "group", "collectives", "products", "unsplit", "half_rate") if self.is_cut else ("why",)
        return {name: getattr(self, name) for name in shown}


class PieceCost:
    """Costs of the nodes of a cut graph: the given ones, with products of few rows at a lower rate.

    Args:
        cost: of the given graph's nodes, and of nodes like them. Its attribute ``half_rate``, if any, replaces
            `HALF_RATE`.
        rows: of pieces of products, by name: rows of the left operand.
    """

    def __init__(self, cost: Cost, rows: Mapping[str, int]) -> None:
        self._cost, self._rows = functools.cache(cost), rows  # two walks over a graph ask for each cost
        self._given, self.half_rate = cost, getattr(cost, "half_rate", HALF_RATE)

    def __getattr__(self, name: str) -> Any:  # merged, is_guess, link
        return getattr(self._given, name)

    def __call__(self, node: fx.Node) -> float:
        rows = self._rows.get(node.name)
        return self._cost(node) * (1.0 if rows is None else (rows + self.half_rate) / rows)


# The `explain.report.Result` for a cut graph and its costs, with at most so many orders (None: as many as usual).
Optimizer = Callable[[fx.GraphModule, Cost, int | None], Any]


class _Trial(NamedTuple):
    """A graph with a region in pieces, and the result for it."""

    region: Region
    pieces: int
    module: fx.GraphModule
    cost: PieceCost
    result: Any


def find_split(gm: fx.GraphModule, cost: Cost, optimize: Optimizer, whole: Timeline) -> tuple[Split, Any]:
    """The best cut graph and the result for it.

    None if no cut graph is shorter than `whole`, the best schedule of `gm`, by more than `WORTH`.
    """
    best: _Trial | None = None
    limit = WORTH * whole.makespan
    for region in find_regions(gm.graph):
        if best is not None and set(region.collectives) < set(best.region.collectives):
            continue
        last = math.inf
        for pieces in PIECES:  # more and more, while that helps
            found = _tried(gm, cost, optimize, region, pieces, limit) if pieces <= region.tokens else None
            if found is None:
                continue
            makespan = found.result.timeline.makespan
            if makespan < limit:
                best, limit = found, makespan
            if makespan >= last:
                break
            last = makespan
    if best is None:
        return Split(why="no cut makes it shorter", unsplit=whole.makespan), None
    result = optimize(best.module, best.cost, None)
    result = result if result.timeline.makespan <= limit else best.result
    cuts = best.region.cuts
    split = Split(
        pieces=best.pieces,
        group=best.region.group,
        collectives=Counter(operator_name(node).split(".")[-1] for node in cuts if node.target in COLLECTIVES),
        products=sum(is_product_of_rows(node, cut) for node, cut in cuts.items()),
        tokens=best.region.tokens,
        cuts=best.region.by_name,
        unsplit=whole.makespan,
        half_rate=best.cost.half_rate,
        dag=result.before.dag,
    )
    return split, result


def _tried(
    gm: fx.GraphModule, cost: Cost, optimize: Optimizer, region: Region, pieces: int, limit: float
) -> _Trial | None:
    """A quick schedule with `region` in pieces; None if it cannot be below `limit` or within the budget."""
    module = _torch.copy_module(gm)
    try:
        rows = rewrite(module.graph, region.by_name, region.tokens, pieces)
    except CannotSplit:
        return None
    priced = PieceCost(cost, rows)
    bounds = lower_bounds(to_dag(module, priced).contracted.dag)
    # Buckets shorten the work of a group's stream, but no collective, and so neither of these.
    if max(bounds.path, bounds.streams["compute"]) >= limit:
        return None
    try:
        return _Trial(region, pieces, module, priced, optimize(module, priced, FEWEST))
    except GraphError:
        raise
    except ValueError:  # no order within the budget
        return None
