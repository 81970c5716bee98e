"""Regions: token-wise nodes that can be cut together, and their collectives.

    graph, a process group, a dim of tokens ─► collectives of activations ─► what they lead to, and what leads to them

A gather of activations leads to a product of rows with a matrix, a reduce-scatter comes from one. Gathers of parameters
lead to the right side of a product, and reduce-scatters of their gradients come from products with a transposed left
side: neither is cut.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from spanwise.overlap.fx.operators import STARTS, WAIT, group_of, storage_of, tensors_of, traits
from spanwise.overlap.split import tokenwise
from spanwise.overlap.split.tokenwise import ALL_GATHER, COLLECTIVES, REDUCE_SCATTER, Cut, candidates, legal

# Dims of a collective's operand that are tried as the tokens' dim; with 1, [batch, tokens, hidden] tensors stay whole.
_DIMS = 2


@dataclasses.dataclass(frozen=True)
class Region:
    """Nodes that can be cut together.

    Attributes:
        group: the process group of its collectives.
        tokens: size of its token axis on a rank.
        cuts: of the result of each node, in the order of the graph.
    """

    group: str
    tokens: int
    cuts: Mapping[fx.Node, Cut]

    @property
    def collectives(self) -> list[fx.Node]:
        return [node for node in self.cuts if node.target in COLLECTIVES]

    @property
    def by_name(self) -> dict[str, Cut]:
        """The cuts by the names of nodes, which copies of the graph share."""
        return {node.name: cut for node, cut in self.cuts.items()}


def find_regions(graph: fx.Graph) -> list[Region]:
    """Regions of a graph, the largest first: one for each process group and possible dim of tokens."""
    stops = _stops(graph)
    groups: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in COLLECTIVES and node not in stops:
            groups.setdefault(group_of(node), []).append(node)
    found: list[Region] = []
    for group, starts in groups.items():
        # Token axes are dims of operands of gathers and of results of reduce-scatters.
        local = [start if start.target is REDUCE_SCATTER else start.all_input_nodes[0] for start in starts]
        shapes = [tensors_of(node)[0].shape for node in local]
        for dim in range(_DIMS):
            for tokens in dict.fromkeys(shape[dim] for shape in shapes if len(shape) > dim and shape[dim] > 1):
                cuts = _Growth(graph, tokens, group, stops).region(starts, dim)
                if cuts and all(cuts.keys() != region.cuts.keys() for region in found):
                    found.append(Region(group, tokens, cuts))
    found = [region for region in found if region.collectives]
    return sorted(found, key=lambda region: -len(region.collectives))


def _stops(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are never cut: random ones, what touches memory that is written, symbolic sizes, odd collectives."""
    near: dict[Any, list[Any]] = {}  # nodes and storages that may share memory
    written: set[Any] = set()

    def join(a: Any, b: Any) -> None:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)

    for node in graph.nodes:
        known = traits(node)
        for value in tensors_of(node):
            if (storage := storage_of(value)) is not None:
                join(node, storage)
        if node.op == "call_function" and (known.is_alias or node.target in (operator.getitem, WAIT)):
            for arg in node.all_input_nodes:
                join(node, arg)
        if known.writes:
            written.update((node, *node.all_input_nodes))
    todo = list(written)
    while todo:
        found = set(near.get(todo.pop(), ())) - written
        written |= found
        todo += found
    return {
        node
        for node in graph.nodes
        if any(one in written for one in (node, *node.all_input_nodes))
        or any(type(size) is not int for x in tensors_of(node) for size in (*x.shape, *x.stride()))
        or (node.target in STARTS and (node.target not in COLLECTIVES or [u.target for u in node.users] != [WAIT]))
    }


class _Growth:
    """Cuts of nodes while a region grows."""

    def __init__(self, graph: fx.Graph, tokens: int, group: str, stops: set[fx.Node]) -> None:
        self.graph, self.tokens, self.group, self.stops = graph, tokens, group, stops
        self.cuts: dict[fx.Node, Cut] = {}

    def region(self, starts: Sequence[fx.Node], dim: int) -> dict[fx.Node, Cut]:
        """Cuts of all that can be cut with these collectives if `dim` of their results has the tokens."""
        for start in starts:
            shape = tensors_of(start)[0].shape
            if start in self.cuts or dim >= len(shape) or not shape[dim] or shape[dim] % self.tokens:
                continue
            cut = Cut(dim, shape[dim] // self.tokens)
            if legal(start, cut, self.tokens) is None:
                continue
            gathers = start.target is ALL_GATHER
            found = self.forward({start: cut}) if gathers else self.behind({start: cut})
            counts = tokenwise.is_product_of_rows if gathers else tokenwise.makes_rows
            if any(counts(*pair) for pair in found.items()):
                self.cuts.update(found if gathers else self.forward(found))
        self.cuts.update(self.behind(self.cuts))
        items = {n for n in self.cuts if n.target is operator.getitem and n.args[0] not in self.cuts}
        return {node: self.cuts[node] for node in self.graph.nodes if node in self.cuts and node not in items}

    def allows(self, node: fx.Node) -> bool:
        if node in self.stops or node.op != "call_function":
            return False
        return node.target not in COLLECTIVES or group_of(node) == self.group

    def forward(self, cuts: Mapping[fx.Node, Cut]) -> dict[fx.Node, Cut]:
        """These nodes and all that follow from them token by token."""
        found, todo = dict(cuts), list(cuts)
        for source in todo:
            for user in source.users:
                if user in found or user in self.cuts or not self.allows(user):
                    continue
                for maybe in candidates(user, source, found[source], self.tokens):
                    known = legal(user, maybe, self.tokens)
                    if known is not None and known.get(source) == found[source]:
                        found[user] = maybe
                        todo.append(user)
                        break
        return found

    def behind(self, cuts: Mapping[fx.Node, Cut]) -> dict[fx.Node, Cut]:
        """These nodes and all that only they, or other nodes of the region, read."""
        found, todo = dict(cuts), list(cuts)
        for reader in todo:
            for node in reader.all_input_nodes:
                waits = node.target in COLLECTIVES or node.target is WAIT
                if node in found or node in self.cuts or waits or not self.allows(node):
                    continue
                of_users = [found.get(user) or self.cuts.get(user) for user in node.users]
                if all(of_users):
                    known = [legal(user, of, self.tokens) for user, of in zip(node.users, of_users, strict=True)]  # type: ignore[arg-type]
                    (cut, *more) = {(one or {}).get(node) for one in known}
                    if cut is not None and not more and legal(node, cut, self.tokens) is not None:
                        found[node] = cut
                        todo.append(node)
        return found
