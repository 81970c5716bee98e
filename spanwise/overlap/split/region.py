"""Regions: token-wise nodes that can be cut together, and the segments between their collectives.

    graph, a process group, a dim of tokens ─► collectives of activations ─► what they lead to, and what leads to them

A gather of activations leads to a product of rows with a matrix, a reduce-scatter comes from one. Gathers of parameters
lead to the right side of a product, and reduce-scatters of their gradients come from products with a transposed left
side: neither is cut.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from spanwise.overlap.fx.operators import STARTS, WAIT, group_of, storage_of, tensors_of, traits
from spanwise.overlap.split.cut import Cut
from spanwise.overlap.split.rules import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from spanwise.overlap.split.tokenwise import COLLECTIVES, candidates, is_product_of_rows, legal, makes_rows

# Dims of a collective's operand that are tried as the tokens' dim; with 1, [batch, tokens, hidden] tensors stay whole.
_DIMS = 2


@dataclasses.dataclass(frozen=True)
class Region:
    """Nodes that can be cut together.

    Attributes:
        group: the process group of its collectives.
        tokens: size of its token axis on a rank.
        cuts: of the result of each node, in the order of the graph.
        segments: nodes between its collectives, by kind of segment: equal layers have segments of one kind.
    """

    group: str
    tokens: int
    cuts: Mapping[fx.Node, Cut]
    segments: Mapping[str, tuple[tuple[fx.Node, ...], ...]]

    @property
    def collectives(self) -> list[fx.Node]:
        return [node for node in self.cuts if node.target in COLLECTIVES]


def find_regions(graph: fx.Graph) -> list[Region]:
    """Regions of a graph, the largest first: one for each process group and possible dim of tokens."""
    stops = _stops(graph)
    groups: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target in COLLECTIVES and node not in stops:
            groups.setdefault(group_of(node), []).append(node)
    found: list[Region] = []
    for group, starts in groups.items():
        for dim in range(_DIMS):
            for tokens in dict.fromkeys(_tokens(starts, dim)):
                region = _region(graph, group, starts, dim, tokens, stops)
                if region is not None and all(set(region.cuts) != set(other.cuts) for other in found):
                    found.append(region)
    return sorted(found, key=lambda region: -len(region.collectives))


def _tokens(starts: Sequence[fx.Node], dim: int) -> Iterator[int]:
    """Sizes of token axes: of operands of gathers, results of reduce-scatters."""
    for start in starts:
        local = start if start.target is REDUCE_SCATTER else start.all_input_nodes[0]
        shape = tensors_of(local)[0].shape
        if len(shape) > dim and shape[dim] > 1:
            yield shape[dim]


def _stops(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are never cut: random ones, what touches memory that is written, symbolic sizes, odd collectives."""
    groups = _Groups()  # nodes and storages that may share memory
    written: set[fx.Node] = set()
    for node in graph.nodes:
        known = traits(node)
        values = tensors_of(node)
        for value in values:
            groups.join(node, storage_of(value))
        if node.op == "call_function" and (known.is_alias or node.target in (operator.getitem, WAIT)):
            for arg in node.all_input_nodes:
                groups.join(node, arg)
        if known.writes:
            written.update((node, *node.all_input_nodes))
    roots = {groups.root(node) for node in written}
    return {
        node
        for node in graph.nodes
        if groups.root(node) in roots
        or any(groups.root(arg) in roots for arg in node.all_input_nodes)
        or any(type(size) is not int for x in tensors_of(node) for size in (*x.shape, *x.stride()))
        or (node.target in STARTS and (node.target not in COLLECTIVES or [u.target for u in node.users] != [WAIT]))
    }


class _Groups:
    """Sets of keys that are joined."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def root(self, key: Any) -> Any:
        while (parent := self._parent.get(key, key)) != key:
            key = parent
        return key

    def join(self, a: Any, b: Any) -> None:
        if a is not None and b is not None:
            self._parent[self.root(a)] = self.root(b)


class _Growth:
    """Cuts of nodes while a region grows."""

    def __init__(self, graph: fx.Graph, tokens: int, group: str, stops: set[fx.Node]) -> None:
        self.graph, self.tokens, self.group, self.stops = graph, tokens, group, stops
        self.cuts: dict[fx.Node, Cut] = {}
        self.place = {node: at for at, node in enumerate(graph.nodes)}

    def allows(self, node: fx.Node) -> bool:
        if node in self.stops or node.op != "call_function":
            return False
        return node.target not in COLLECTIVES or group_of(node) == self.group

    def forward(self, node: fx.Node, cut: Cut) -> dict[fx.Node, Cut]:
        """`node` and all that follow from it token by token."""
        found, todo = {node: cut}, [node]
        for source in todo:
            for user in source.users:
                if user in found or user in self.cuts or not self.allows(user):
                    continue
                for maybe in candidates(user, source, found[source], self.tokens):
                    known = legal(user, maybe, self.tokens)
                    if known is not None and known.cuts.get(source) == found[source]:
                        found[user] = maybe
                        todo.append(user)
                        break
        return found

    def to_product(self, node: fx.Node, cut: Cut) -> dict[fx.Node, Cut]:
        """What leads to `node` from products of rows or look-ups of rows, these included; empty if there are none."""
        seen, todo = {node: cut}, [node]
        for user in todo:
            known = legal(user, seen[user], self.tokens)
            for arg, of_arg in known.cuts.items() if known else ():
                allowed = self.allows(arg) and arg.target not in COLLECTIVES
                if arg not in seen and allowed and legal(arg, of_arg, self.tokens) is not None:
                    seen[arg] = of_arg
                    if not makes_rows(arg, of_arg):
                        todo.append(arg)
        found: dict[fx.Node, Cut] = {}
        for arg in sorted(seen.keys() - {node}, key=self.place.__getitem__):
            if makes_rows(arg, seen[arg]) or any(before in found for before in arg.all_input_nodes):
                found[arg] = seen[arg]
        return found

    def backward(self) -> None:
        """Add nodes that only the region reads."""
        for node in reversed(self.graph.nodes):
            waits = node.target in COLLECTIVES or node.target is WAIT
            if node in self.cuts or not self.allows(node) or waits or not node.users:
                continue
            cuts = set()
            for user in node.users:
                known = legal(user, self.cuts[user], self.tokens) if user in self.cuts else None
                cuts.add(known.cuts.get(node) if known else None)
            (cut, *more) = cuts
            if cut is not None and not more and legal(node, cut, self.tokens) is not None:
                self.cuts[node] = cut


def _region(
    graph: fx.Graph, group: str, starts: Sequence[fx.Node], dim: int, tokens: int, stops: set[fx.Node]
) -> Region | None:
    growth = _Growth(graph, tokens, group, stops)
    for start in starts:
        for cut in _cuts_of(start, dim, tokens):
            if legal(start, cut, tokens) is None:
                continue
            before = {} if start.target is ALL_GATHER else growth.to_product(start, cut)
            if start.target is ALL_GATHER and start not in growth.cuts:
                after = growth.forward(start, cut)
                if not _num_products(after):
                    continue
            elif not before:
                continue
            for node, of_node in before.items():
                if growth.cuts.setdefault(node, of_node) == of_node:
                    growth.cuts.update(growth.forward(node, of_node))
            if start not in growth.cuts:
                growth.cuts.update(growth.forward(start, cut))
            break
    growth.backward()
    cuts: dict[fx.Node, Cut] = {}
    for node in graph.nodes:  # an item is cut with its tuple, and a tuple with all of its items
        if node in growth.cuts and not (node.target is operator.getitem and node.args[0] not in growth.cuts):
            cuts[node] = growth.cuts[node]
    if not any(node.target in COLLECTIVES for node in cuts):
        return None
    return Region(group, tokens, cuts, _segments(cuts))


def _cuts_of(start: fx.Node, dim: int, tokens: int) -> Iterator[Cut]:
    """Cuts of the result of a collective whose local operand or result has the tokens in `dim`."""
    shape = tensors_of(start)[0].shape
    if dim < len(shape) and shape[dim] % tokens == 0 and shape[dim]:
        yield Cut(dim, shape[dim] // tokens)


def _segments(cuts: Mapping[fx.Node, Cut]) -> dict[str, tuple[tuple[fx.Node, ...], ...]]:
    """Connected nodes between collectives that lead to, or come from, more rows than a rank's own."""
    groups, between = _Groups(), [node for node in cuts if node.target not in COLLECTIVES]
    for node in between:
        for arg in node.all_input_nodes:
            if arg in cuts and arg.target not in COLLECTIVES:
                groups.join(node, arg)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in between:
        members.setdefault(groups.root(node), []).append(node)
    found: dict[str, list[tuple[fx.Node, ...]]] = {}
    for of_one in members.values():
        of_nodes = {node: cuts[node] for node in of_one}
        leaves = any(user.target in (REDUCE_SCATTER, ALL_REDUCE) for node in of_one for user in node.users)
        enters = any(arg.target is ALL_GATHER for node in of_one for arg in node.all_input_nodes)
        if leaves or enters or _num_products(of_nodes):
            found.setdefault(_kind(of_nodes), []).append(tuple(of_one))
    return {kind: tuple(of_kind) for kind, of_kind in found.items()}


def _num_products(cuts: Mapping[fx.Node, Cut]) -> int:
    return sum(is_product_of_rows(*pair) for pair in cuts.items())


def _kind(cuts: Mapping[fx.Node, Cut]) -> str:
    """A text that is equal for equal segments."""
    described = [(str(node.target), [tuple(x.shape) for x in tensors_of(node)]) for node in cuts]
    return f"{_num_products(cuts)} products, {hashlib.sha256(repr(described).encode()).hexdigest()[:8]}"


def chosen(region: Region, kinds: frozenset[str]) -> dict[fx.Node, Cut]:
    """Cuts of the nodes to cut if segments of these kinds are: they, their collectives, and nodes between these."""
    found = {node for kind in kinds for segment in region.segments.get(kind, ()) for node in segment}
    others = {node for of_kind in region.segments.values() for segment in of_kind for node in segment} - found
    starts = {
        start
        for start in region.collectives
        if any(
            node in found
            for node in (*start.all_input_nodes, *(user for wait in start.users for user in wait.users), *start.users)
        )
    }
    waits = {wait for start in starts for wait in start.users if wait in region.cuts}
    between = [
        node for node in region.cuts if node not in found | others | starts | waits and node.target not in COLLECTIVES
    ]
    after, before = set(waits), set(starts)
    for node in between:
        if any(arg in after for arg in node.all_input_nodes):
            after.add(node)
    for node in reversed(between):
        if any(user in before for user in node.users):
            before.add(node)
    all_of_them = found | starts | waits | (after & before)
    for node in region.cuts:  # a tuple is cut with all of its items
        if node.target is operator.getitem and node.args[0] in all_of_them:
            all_of_them.add(node)
    return {node: cut for node, cut in region.cuts.items() if node in all_of_them}
