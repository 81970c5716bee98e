"""Values of nodes, ``meta["val"]``: sizes, dtypes and aliases. Made from a graph's inputs where they are missing.

saved or hand-made fx graph, example inputs ─► fill_values ─► the same graph, with fake tensors at its nodes
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import Role, Traits, tensors_in, traits

#: Start of the error for a node without a value.
NO_VALUE = 'it has no meta["val"], which gives sizes and aliases'


def lacks_value(node: fx.Node, known: Traits) -> bool:
    """Whether a call has no value and needs one: it may return tensors."""
    if "val" in node.meta or (known.role is Role.BARRIER and not node.users):
        return False
    if isinstance(node.target, _torch.OpOverload):
        return any("Tensor" in str(result.type) for result in node.target._schema.returns)
    if node.target is operator.getitem:  # tracing gives items that are no tensors no value: None, sizes
        source, key = node.args
        whole = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(whole, (list, tuple)) and isinstance(key, int) and key < len(whole):
            return bool(tensors_in(whole[key]))
    return True


def fill_values(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give all nodes of `gm` values, in place, if one lacks its own.

    `inputs` are what the graph is called with, real or fake, perhaps in a pytree; without any it stays as it is.
    ``ValueError`` if it has another number of inputs, or does not run with these.
    """
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    missing = [node for node in given if "val" not in node.meta and node.users]
    missing += [node for node in calls if lacks_value(node, traits(node))]
    leaves = _torch.tree_leaves(list(inputs))
    if not missing or not leaves:
        return
    # A loaded graph takes trees, which make_fx had made flat.
    whole = leaves if len(leaves) == len(given) else list(inputs)
    if len(whole) != len(given):
        text = f"node {missing[0].name!r} has no value, and none can be made: "
        raise ValueError(f"{text}the graph has {len(given)} inputs, and example_inputs has {len(leaves)}")
    try:
        _torch.propagate_fake(gm, whole)
    except Exception as error:
        shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]
        text = f"the graph does not run on fake tensors of example_inputs {shapes}: {type(error).__name__}: {error}"
        raise ValueError(text) from error
