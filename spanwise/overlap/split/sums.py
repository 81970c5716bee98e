"""Sums over tokens, such as gradients of weights: the sum of the results of pieces, added in the order of the tokens.

    node whose arguments have cuts ─► `sum_over` ─► cut of its operands ─► `SUMS`, rules as in `rules` ─► a piece's call

Pieces of low precision are made and added in float32 and rounded once: rounded pieces would add an error of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from spanwise.overlap.fx.operators import arguments, tensors_of, traits
from spanwise.overlap.split.cut import Cut
from spanwise.overlap.split.rules import Arguments, Legal, Rule, is_transposed, together

_aten = torch.ops.aten
_LOW = frozenset({torch.bfloat16, torch.float16})


def sum_over(node: fx.Node, cuts: Mapping[fx.Node, Cut], tokens: int) -> Cut | None:
    """The cut over whose tokens `node` sums, if all its arguments with one of `cuts` agree; else None."""
    if node.op != "call_function" or node.target not in SUMS:
        return None
    given = dict(arguments(node, traits(node)))
    for at, arg in enumerate(node.all_input_nodes):
        if arg not in cuts:
            continue
        cut = cuts[arg]
        if node.target is _aten.mm.default:
            cut = dataclasses.replace(cut, dim=cut.dim - (at == 0))
        found = dataclasses.replace(cut, summed=True)
        known = SUMS[node.target](node, given, found, tokens)
        agree = known is not None and all(cuts.get(other, of) == of for other, of in known.cuts.items())
        return found if agree else None
    return None


def _product(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """A transposed left operand has features as rows, and tokens are summed over: the gradient of a weight."""
    left, right = given["self"], given["mat2"]
    if cut.dim != 0 or not is_transposed(left) or tensors_of(right)[0].shape[0] != cut.size(tokens):
        return None
    rows = dataclasses.replace(cut, summed=False)
    columns = dataclasses.replace(rows, dim=1)
    if not _is_low(node):
        return together((left, columns), (right, rows))
    if tensors_of(node)[0].device.type != "cuda":
        return None  # torch has no product in bfloat16 with a result in float32 there
    args: Arguments = (left, right, torch.float32), {}
    return together((left, columns), (right, rows), resized=lambda n: args, target=_aten.mm.dtype)


def _sum(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """A sum over the tokens' dim, and maybe others: the gradient of a bias, or of the weight of a norm."""
    source = given["self"]
    shape, dims = tensors_of(source)[0].shape, given.get("dim") or []
    if cut.dim not in {dim % len(shape) for dim in dims} or shape[cut.dim] != cut.size(tokens):
        return None
    rows = dataclasses.replace(cut, summed=False)
    if _is_low(node):
        args: Arguments = (source, dims, given.get("keepdim", False)), {"dtype": torch.float32}
        return together((source, rows), resized=lambda n: args)
    return together((source, rows))


def _is_low(node: Any) -> bool:
    return tensors_of(node)[0].dtype in _LOW


#: Rules of operators that sum over tokens, by the cut of their operands; of a product, that of the right one.
SUMS: dict[Any, Rule] = {_aten.mm.default: _product, _aten.sum.dim_IntList: _sum}
