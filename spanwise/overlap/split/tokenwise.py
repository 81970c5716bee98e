"""Which operators work token by token: for a cut of a result, the cuts of the arguments that give it.

    node, cut of its result ─► `legal` ─► cuts of its arguments, and its arguments as a piece | None: it stops the cut

The table is by `OpOverload` (`rules`); an operator that is not in it stops the cut. So do random operators, operators
that write or communicate, and a node that needs one argument both whole and in pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import Role, arguments, tensors_of, traits
from spanwise.overlap.split.cut import Cut, through_view
from spanwise.overlap.split.rules import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    ROW_PRODUCTS,
    TABLE,
    VIEW_RULES,
    Legal,
    Rule,
    pointwise,
)

COLLECTIVES = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE})


def legal(node: fx.Node, cut: Cut, tokens: int) -> Legal | None:
    """How `node` gives pieces of its result with `cut`, along an axis of so many tokens; None if it cannot."""
    rule = _rule(node)
    results = tensors_of(node)
    if rule is None or not results:
        return None
    if any(arg.op == "get_attr" and not tensors_of(arg) for arg in node.all_input_nodes):
        return None  # its shape is not known
    known = traits(node)
    if known.ordered or known.writes or known.role not in (Role.COMPUTE, Role.FREE, Role.START, Role.WAIT):
        return None
    if not all(cut.dim < x.ndim and x.shape[cut.dim] == cut.size(tokens) for x in results):
        return None
    if node.target is operator.getitem:
        return rule(node, {}, cut, tokens)
    given = dict(arguments(node, known))
    return rule(node, given, cut, tokens)


def candidates(node: fx.Node, arg: fx.Node, cut: Cut, tokens: int) -> Iterable[Cut]:
    """Cuts that the result of `node` may have if its argument `arg` has `cut`; `legal` decides."""
    results, given = tensors_of(node), tensors_of(arg)
    if not results or not given:
        return
    if TABLE.get(node.target) in VIEW_RULES:
        found = through_view(list(given[0].shape), list(results[0].shape), cut, tokens)
        if found is not None:
            yield found
        return
    axis = tokens * cut.unit
    for dim in sorted(range(results[0].ndim), key=lambda dim: dim != cut.dim):
        size = results[0].shape[dim]
        if size and size % axis == 0:
            yield Cut(dim, size // axis, cut.unit)


def is_product_of_rows(node: fx.Node, cut: Cut) -> bool:
    """Whether a node multiplies rows with a matrix: the heavy compute between collectives of activations.

    A product of batches does if its rows have the tokens, as in the products that einsums become. A batch may be that
    of experts, whose gathered weights are parameters. A transposed left operand gives gradients of these.
    """
    if node.target is not torch.ops.aten.bmm.default:
        return node.target in ROW_PRODUCTS
    (left,) = tensors_of(node.all_input_nodes[0])
    return cut.dim == 1 and (left.stride(-1) == 1 or left.shape[-1] == 1)


def makes_rows(node: fx.Node, cut: Cut) -> bool:
    """Whether a node computes rows of activations from others, or looks them up in a table."""
    return is_product_of_rows(node, cut) or node.target is torch.ops.aten.embedding.default


def _rule(node: fx.Node) -> Rule | None:
    if node.op != "call_function":
        return None
    found = TABLE.get(node.target)
    if found is None and isinstance(node.target, _torch.OpOverload) and traits(node).pointwise:
        return pointwise
    return found
