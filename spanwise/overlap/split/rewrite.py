"""Rewrite a graph so that chosen nodes become pieces; nothing else knows how pieces are made.

Pieces stand where their node stood, so that what reads and writes memory around them keeps its order. `schedule` moves
them later. A whole tensor is taken apart where a piece needs a part of it; pieces are put together again, in the order
of the whole, where something needs all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from spanwise.overlap.fx.operators import WAIT, is_free, nodes_in, tensors_of
from spanwise.overlap.split.cut import Cut, bounds
from spanwise.overlap.split.rules import Legal
from spanwise.overlap.split.tokenwise import COLLECTIVES, is_product_of_rows, legal
from spanwise.overlap.split.values import CannotSplit, Values, add_call

_aten = torch.ops.aten


@dataclasses.dataclass
class Made:
    """What a rewrite made.

    Attributes:
        rows: of each piece of a matrix product, by name: rows of its left operand.
        copies: names of the nodes that only move data: tensors taken apart and put together.
    """

    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: list[str] = dataclasses.field(default_factory=list)


def rewrite(
    graph: fx.Graph, cuts: Mapping[fx.Node, Cut], tokens: int, pieces: int, values: Values | None = None
) -> Made:
    """Replace each node of `cuts` by its pieces, in place; the graph computes the same.

    Args:
        tokens: size of the region's token axis on a rank. Pieces differ by at most one token.
        values: known from rewrites of other copies of the graph.

    Raises:
        CannotSplit: a piece cannot be made. The graph is then of no use.
    """
    work = _Rewrite(graph, cuts, tokens, bounds(tokens, pieces), values or Values())
    for node in list(graph.nodes):
        if node in cuts:
            work.cut(node)
        else:
            work.keep(node)
    for node in reversed(list(cuts)):
        if not node.users:
            graph.erase_node(node)
    return work.made


class _Rewrite:
    """Pieces and whole tensors of the nodes so far."""

    def __init__(
        self,
        graph: fx.Graph,
        cuts: Mapping[fx.Node, Cut],
        tokens: int,
        of_pieces: list[tuple[int, int]],
        values: Values,
    ) -> None:
        self.graph, self.cuts, self.tokens, self.bounds = graph, cuts, tokens, of_pieces
        values.next_graph()
        self._add = functools.partial(add_call, graph, values)
        self.pieces: dict[fx.Node, list[fx.Node]] = {}
        self.taken: dict[tuple[fx.Node, Cut, int], fx.Node] = {}
        self.opened: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self.restored: dict[fx.Node, fx.Node] = {}
        self.made = Made()

    def keep(self, node: fx.Node) -> None:
        """Give a node that is not cut whole arguments."""
        with self.graph.inserting_before(node):
            for arg in node.all_input_nodes:
                if arg in self.cuts:
                    node.replace_input_with(arg, self.whole(arg, node))

    def cut(self, node: fx.Node) -> None:
        known = legal(node, self.cuts[node], self.tokens)
        if known is None:
            raise CannotSplit(f"{node.name!r} cannot be cut at {self.cuts[node]}")
        # A piece of a collective that has not ended must not be read, nor waited for.
        if node.target in COLLECTIVES and not all(user in self.cuts for user in node.users):
            raise CannotSplit(f"{node.name!r} would be cut without its wait")
        if node.target is WAIT and not all(arg in self.cuts for arg in node.all_input_nodes):
            raise CannotSplit(f"{node.name!r} would be cut without its collective")
        with self.graph.inserting_before(node):
            self.pieces[node] = [self._piece(node, known, i) for i in range(len(self.bounds))]

    def _piece(self, node: fx.Node, known: Legal, i: int) -> fx.Node:
        first, end = self.bounds[i]
        args, kwargs = known.resized(end - first) if known.resized else (node.args, dict(node.kwargs))
        parts: dict[fx.Node, fx.Node] = {}
        for arg in nodes_in([*args, *kwargs.values()]):
            if arg in known.cuts:
                parts[arg] = self._part(arg, known.cuts[arg], i, node)
            elif arg in self.cuts:
                parts[arg] = self.whole(arg, node)
        if node.target in COLLECTIVES:
            parts = {arg: self._compact(part, arg) for arg, part in parts.items()}
        try:
            made = self._call(node, args, kwargs, parts)
        except CannotSplit:  # a view of a part that has gaps
            parts = {arg: self._compact(part, None) for arg, part in parts.items()}
            made = self._call(node, args, kwargs, parts)
        if is_product_of_rows(node, self.cuts[node]):
            left = tensors_of(parts[next(arg for arg in node.all_input_nodes if arg in known.cuts)])[0]
            batches = left.shape[0] if node.target is _aten.bmm.default else 1
            self.made.rows[made.name] = math.prod(left.shape[:-1]) // batches
        return made

    def _call(self, node: fx.Node, args: Any, kwargs: Any, parts: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.node.map_arg((args, kwargs), lambda arg: parts.get(arg, arg))
        return self._add(node, node.target, tuple(args), kwargs)

    def _part(self, arg: fx.Node, cut: Cut, i: int, user: fx.Node) -> fx.Node:
        """Piece `i` of an argument: of a cut node, or taken from a whole tensor."""
        if self.cuts.get(arg) == cut:
            return self.pieces[arg][i]
        source = self.whole(arg, user) if arg in self.cuts else arg
        key = source, cut, i
        if key not in self.taken:
            self.taken[key] = self._take(source, cut, i)
        return self.taken[key]

    def _take(self, source: fx.Node, cut: Cut, i: int) -> fx.Node:
        if not isinstance(source.meta.get("val"), torch.Tensor):
            raise CannotSplit(f"{source.name!r} has several results, of which none can be taken apart")
        first, end = (at * cut.unit for at in self.bounds[i])
        if cut.blocks == 1:
            return self._add(source, _aten.slice.Tensor, (source, cut.dim, first, end))
        shape = list(tensors_of(source)[0].shape)
        before, after = shape[: cut.dim], shape[cut.dim + 1 :]
        if (source, cut) not in self.opened:
            sizes = [*before, cut.blocks, self.tokens * cut.unit, *after]
            self.opened[source, cut] = self._add(source, _aten.view.default, (source, sizes))
        apart = self._add(source, _aten.slice.Tensor, (self.opened[source, cut], cut.dim + 1, first, end))
        copy = self._clone(apart)
        return self._add(source, _aten.view.default, (copy, [*before, cut.blocks * (end - first), *after]))

    def _clone(self, source: fx.Node) -> fx.Node:
        copy = self._add(source, _aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
        self.made.copies.append(copy.name)
        return copy

    def _compact(self, part: fx.Node, like: fx.Node | None) -> fx.Node:
        """`part` without gaps, unless the whole `like` has some too."""
        values = tensors_of(part)
        if len(values) != 1 or values[0].is_contiguous():
            return part
        if like is not None and not tensors_of(like)[0].is_contiguous():
            return part
        return self._clone(part)

    def whole(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """The whole result of a cut node, for a `user` at whose place nodes are inserted."""
        if node not in self.restored:
            if _is_view(node):
                for arg in node.all_input_nodes:
                    if arg in self.cuts:
                        node.replace_input_with(arg, self.whole(arg, user))
                user.prepend(node)
                self.restored[node] = node
            else:
                self.restored[node] = self._put_together(node)
        return self.restored[node]

    def _put_together(self, node: fx.Node) -> fx.Node:
        """All pieces in the order of the whole, with its strides."""
        cut, value = self.cuts[node], node.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise CannotSplit(f"{node.name!r} has several results, and something needs them whole")
        strides = list(value.stride())
        order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
        permuted, at = order != list(range(value.ndim)), order.index(cut.dim)
        shape, parts = [value.shape[dim] for dim in order], []
        for piece, (first, end) in zip(self.pieces[node], self.bounds, strict=True):
            part = self._add(node, _aten.permute.default, (piece, order)) if permuted else piece
            if cut.blocks > 1:
                opened = [*shape[:at], cut.blocks, (end - first) * cut.unit, *shape[at + 1 :]]
                part = self._add(node, _aten.view.default, (part, opened))
            parts.append(part)
        made = self._add(node, _aten.cat.default, (parts, at + (cut.blocks > 1)))
        self.made.copies.append(made.name)
        if cut.blocks > 1:
            made = self._add(node, _aten.view.default, (made, shape))
        if permuted:
            back = [order.index(dim) for dim in range(value.ndim)]
            made = self._add(node, _aten.permute.default, (made, back))
        if not _same_layout(made.meta["val"], value):
            raise CannotSplit(f"{node.name!r} has strides {value.stride()}, which its pieces cannot give")
        return made


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of its argument."""
    given = [arg for arg in node.all_input_nodes if tensors_of(arg)]
    if len(given) != 1 or not is_free(node) or node.target is _aten.empty_like.default:
        return False
    return not isinstance(given[0].meta.get("val"), (list, tuple)) or _is_view(given[0])


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    strides = ((x, y) for x, y, size in zip(a.stride(), b.stride(), b.shape, strict=True) if size > 1)
    return a.shape == b.shape and a.dtype == b.dtype and all(x == y for x, y in strides)
