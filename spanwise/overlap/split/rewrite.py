"""Rewrite a graph so that chosen nodes become pieces; nothing else knows how pieces are made.

Pieces stand where their node stood; `schedule` moves them later. A whole tensor is taken apart where a piece needs a
part of it; pieces are put together again, in the order of the whole, where something needs all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import WAIT, is_free, nodes_in, tensors_in, tensors_of
from spanwise.overlap.split.tokenwise import COLLECTIVES, Cut, bounds, is_product_of_rows, legal, piece_call

_aten = torch.ops.aten

# Metadata about the one tensor of a node: a new node has another.
_OF_VALUE = ("val", "tensor_meta", "example_value", "eager_input_vals", "known")


class CannotSplit(ValueError):
    """Pieces of a node cannot be made; the text says why."""


def _value(node: fx.Node) -> Any:
    """What an operator returns for the values of its arguments; collectives of fake tensors send nothing."""
    values = [tensor for arg in node.all_input_nodes for tensor in tensors_in(arg.meta.get("val"))]
    modes = {id(mode): mode for mode in map(_torch.fake_mode_of, values)}
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    mode = next(iter(modes.values())) if len(modes) == 1 else None
    target: Any = node.target
    with mode or _torch.fake_mode(), torch.no_grad():
        if mode is None:  # real tensors, or those of several modes
            args, kwargs = _torch.tree_map(_fake, (args, kwargs))
        return args[0] if target is WAIT else target(*args, **kwargs)


def _fake(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def rewrite(graph: fx.Graph, cuts: Mapping[str, Cut], tokens: int, pieces: int) -> dict[str, int]:
    """Replace each node that `cuts` names by its pieces, in place; equal graphs become equal, and compute the same.

    Returns the rows of the left operand of each piece of a matrix product, by name.

    Args:
        tokens: size of the region's token axis on a rank. Pieces differ by at most one token.

    Raises:
        CannotSplit: a piece cannot be made. The graph is then of no use.
    """
    nodes = list(graph.nodes)
    work = _Rewrite(graph, {node: cuts[node.name] for node in nodes if node.name in cuts}, tokens, pieces)
    for node in nodes:
        if node in work.cuts:
            work.cut(node)
        else:
            work.keep(node)
    for node in reversed(list(work.cuts)):
        if not node.users:
            graph.erase_node(node)
    return work.rows


class _Rewrite:
    """Pieces and whole tensors of the nodes so far."""

    def __init__(self, graph: fx.Graph, cuts: Mapping[fx.Node, Cut], tokens: int, pieces: int) -> None:
        self.graph, self.cuts, self.tokens, self.bounds = graph, cuts, tokens, bounds(tokens, pieces)
        self.pieces: dict[fx.Node, list[fx.Node]] = {}
        self.taken: dict[tuple[fx.Node, Cut, int], fx.Node] = {}
        self.opened: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self.restored: dict[fx.Node, fx.Node] = {}
        self.rows: dict[str, int] = {}

    def keep(self, node: fx.Node) -> None:
        """Give a node that is not cut whole arguments."""
        with self.graph.inserting_before(node):
            for arg in node.all_input_nodes:
                if arg in self.cuts:
                    node.replace_input_with(arg, self.whole(arg, node))

    def cut(self, node: fx.Node) -> None:
        """Make the pieces of a node."""
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

    def _add(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node with the metadata of `like`, and a value; ``CannotSplit`` if the operator refuses."""
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=f"{like.name}_piece")
        node.meta = {name: value for name, value in like.meta.items() if name not in _OF_VALUE}
        try:
            node.meta["val"] = _value(node)
        except Exception as error:  # an operator may raise anything
            self.graph.erase_node(node)
            raise CannotSplit(f"{target} of a piece of {like.name!r}: {type(error).__name__}: {error}") from error
        return node

    def _piece(self, node: fx.Node, known: Mapping[fx.Node, Cut], i: int) -> fx.Node:
        cut, size = self.cuts[node], self.bounds[i][1] - self.bounds[i][0]
        call = piece_call(node, cut, self.tokens, size)
        parts: dict[fx.Node, fx.Node] = {}
        for arg in nodes_in([*call[1], *call[2].values()]):
            if arg in known:
                parts[arg] = self._part(arg, known[arg], i, node)
            elif arg in self.cuts:
                parts[arg] = self.whole(arg, node)
        if node.target in COLLECTIVES:
            parts = {arg: self._compact(part, arg) for arg, part in parts.items()}
        try:
            made = self._call(node, call, parts)
        except CannotSplit:  # a view of a part that has gaps
            parts = {arg: self._compact(part, None) for arg, part in parts.items()}
            made = self._call(node, call, parts)
        for whole, piece in zip(tensors_of(node), tensors_of(made), strict=True):
            if list(piece.shape) != [cut.size(size) if d == cut.dim else n for d, n in enumerate(whole.shape)]:
                raise CannotSplit(f"a piece of {node.name!r} has the shape {tuple(piece.shape)}")
        if is_product_of_rows(node, cut):
            left = tensors_of(parts[next(arg for arg in node.all_input_nodes if arg in known)])[0]
            batches = left.shape[0] if node.target is _aten.bmm.default else 1
            self.rows[made.name] = math.prod(left.shape[:-1]) // batches
        return made

    def _call(self, node: fx.Node, call: tuple[Any, Any, Any], parts: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.node.map_arg(call[1:], lambda arg: parts.get(arg, arg))
        return self._add(node, call[0], tuple(args), kwargs)

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
        return self._add(
            source, _aten.view.default, (self._clone(apart), [*before, cut.blocks * (end - first), *after])
        )

    def _clone(self, source: fx.Node) -> fx.Node:
        return self._add(source, _aten.clone.default, (source,), {"memory_format": torch.contiguous_format})

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
        order = sorted(range(value.ndim), key=lambda dim: -value.stride()[dim])
        permuted, at = order != list(range(value.ndim)), order.index(cut.dim)
        shape, parts = [value.shape[dim] for dim in order], []
        for piece, (first, end) in zip(self.pieces[node], self.bounds, strict=True):
            part = self._add(node, _aten.permute.default, (piece, order)) if permuted else piece
            if cut.blocks > 1:
                opened = [*shape[:at], cut.blocks, (end - first) * cut.unit, *shape[at + 1 :]]
                part = self._add(node, _aten.view.default, (part, opened))
            parts.append(part)
        made = self._add(node, _aten.cat.default, (parts, at + (cut.blocks > 1)))
        if cut.blocks > 1:
            made = self._add(node, _aten.view.default, (made, shape))
        if permuted:
            back = [order.index(dim) for dim in range(value.ndim)]
            made = self._add(node, _aten.permute.default, (made, back))
        found = made.meta["val"]
        strides = [(x, y) for x, y, size in zip(found.stride(), value.stride(), value.shape, strict=True) if size > 1]
        if found.shape != value.shape or found.dtype != value.dtype or any(x != y for x, y in strides):
            raise CannotSplit(f"{node.name!r} has strides {value.stride()}, which its pieces cannot give")
        return made


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of its argument."""
    given = [arg for arg in node.all_input_nodes if tensors_of(arg)]
    if len(given) != 1 or not is_free(node) or node.target is _aten.empty_like.default:
        return False
    return not isinstance(given[0].meta.get("val"), (list, tuple)) or _is_view(given[0])
