"""``meta["val"]`` of new nodes: what their operators return on fake tensors. Nothing is computed and nothing sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import WAIT, arguments, tensors_in, traits
from spanwise.overlap.split.rules import ALL_GATHER, REDUCE_SCATTER
from spanwise.overlap.split.tokenwise import COLLECTIVES

# Metadata that tells of one tensor: a new node's is another.
_OF_VALUE = ("val", "tensor_meta", "example_value", "eager_input_vals", "known")


class CannotSplit(ValueError):
    """Pieces of a node cannot be made; the text says why."""


class Values:
    """Values by operator and arguments: copies of one graph, cut in several ways, have most of their new nodes alike.

    In one graph each value belongs to one node, because two results do not share memory.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, Any]] = {}  # with the arguments, which keeps their identities
        self._taken: Counter[Any] = Counter()

    def next_graph(self) -> None:
        """Let nodes of another graph have the known values."""
        self._taken.clear()

    def of(self, node: fx.Node) -> Any:
        """The value of a node; raises whatever its operator raises."""
        given = [arg.meta.get("val") for arg in node.all_input_nodes]
        call = node.target, _hashable(node.args), _hashable(node.kwargs)
        key = call, self._taken[call]
        if key not in self._known:
            self._known[key] = _value(node), given
        self._taken[call] += 1
        return self._known[key][0]


def _hashable(value: Any) -> Any:
    """An argument, with the identities of values for nodes."""
    if isinstance(value, fx.Node):
        return fx.Node, id(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return type(value), value


def add_call(
    graph: fx.Graph,
    values: Values,
    like: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A node before `like`'s place with its metadata, and its value; ``CannotSplit`` if the operator refuses."""
    node = graph.create_node("call_function", target, args, kwargs or {}, name=f"{like.name}_piece")
    node.meta = {name: value for name, value in like.meta.items() if name not in _OF_VALUE}
    try:
        node.meta["val"] = values.of(node)
    except Exception as error:  # an operator may raise anything
        graph.erase_node(node)
        raise CannotSplit(f"{target} of a piece of {like.name!r}: {type(error).__name__}: {error}") from error
    return node


def _value(node: fx.Node) -> Any:
    values = [tensor for arg in node.all_input_nodes for tensor in tensors_in(arg.meta.get("val"))]
    mode, convert = _mode_of(values)
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    if convert:
        args, kwargs = _torch.tree_map(lambda x: _fake(mode, x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    with mode, torch.no_grad():
        if node.target is WAIT:
            return args[0]
        if node.target in COLLECTIVES:
            return _of_collective(node)
        target: Any = node.target
        return target(*args, **kwargs)


def _of_collective(node: fx.Node) -> torch.Tensor:
    given = dict(arguments(node, traits(node)))
    x = given["input"].meta["val"]
    rows, *rest = x.shape if x.ndim else (1,)
    if node.target is ALL_GATHER:
        rows *= given["group_size"]
    elif node.target is REDUCE_SCATTER:
        rows //= given["group_size"]
    return torch.empty([rows, *rest] if x.ndim else [], dtype=x.dtype, device=x.device)


def _mode_of(values: list[torch.Tensor]) -> tuple[Any, bool]:
    """The fake mode of the values, or a new one to which they must be converted."""
    modes = {id(mode): mode for mode in map(_torch.fake_mode_of, values)}
    if len(modes) == 1 and None not in modes.values():
        return next(iter(modes.values())), False
    return _torch.fake_mode(), True


def _fake(mode: Any, x: torch.Tensor) -> torch.Tensor:
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
