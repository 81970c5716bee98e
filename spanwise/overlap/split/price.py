"""Costs of a cut graph: the given costs, with products of few rows at a lower rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.operators import Cost

#: A product of M rows runs at M / (M + HALF_RATE) of the rate. Assumed; `Split.sensitivity` shows what hangs on it.
HALF_RATE = 256
#: Other values for which a result tells the makespan of its order.
SENSITIVITY = (128, 512)


class PieceCost:
    """Costs of the nodes of a cut graph.

    Args:
        cost: of the given graph's nodes, and of nodes like them. Its attribute ``half_rate``, if any, replaces
            `HALF_RATE`.
        rows: of pieces of products, by name: rows of the left operand.
        given: names of the given graph's nodes.
    """

    def __init__(self, cost: Cost, rows: Mapping[str, int], given: frozenset[str]) -> None:
        self._cost, self._rows, self._given = cost, rows, given
        self._known: dict[fx.Node, float] = {}  # two walks over a graph ask for each cost
        if hasattr(cost, "merged"):
            self.merged = self._merged
        self.half_rate = getattr(cost, "half_rate", HALF_RATE)
        self.is_guess = getattr(cost, "is_guess", lambda node: False)
        self.link = getattr(cost, "link", lambda group: ("", False))

    def __call__(self, node: fx.Node) -> float:
        if node not in self._known:
            self._known[node] = self._priced(node)
        return self._known[node]

    def _priced(self, node: fx.Node) -> float:
        try:
            ms = self._cost(node)
        except Exception as error:
            if node.name in self._given:
                raise
            text = f"split=True made it, and cost must give its milliseconds, as a CostModel does: {error}"
            raise GraphError(node.name, text) from error
        return ms * slower(self._rows[node.name], self.half_rate) if node.name in self._rows else ms

    def _merged(self, nodes: Sequence[fx.Node]) -> float:
        return float(self._cost.merged(nodes))  # type: ignore[attr-defined]


def slower(rows: int, half_rate: int = HALF_RATE) -> float:
    """Factor on the milliseconds of a product of that many rows.

    >>> slower(256)
    2.0
    """
    return (rows + half_rate) / rows
