"""Table of token-wise operators: one rule an operator, from a cut of its result to the cuts of its arguments.

`tokenwise` looks rules up, and refuses what no rule may allow. A new operator is a line in `TABLE`, and a rule if none
fits.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import WAIT, tensors_of
from spanwise.overlap.split.cut import Cut, through_view

_aten, _ops = torch.ops.aten, _torch.functional_collectives

ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Legal:
    """How a node gives a piece of its result.

    Attributes:
        cuts: of arguments that must be pieces; all others are whole.
        resized: arguments of the node for a piece of a given number of tokens; None if they stay.
    """

    cuts: Mapping[fx.Node, Cut]
    resized: Callable[[int], Arguments] | None = None


Rule = Callable[[Any, dict[str, Any], Cut, int], Legal | None]


def together(*pairs: tuple[Any, Cut | None], resized: Callable[[int], Arguments] | None = None) -> Legal | None:
    """`Legal` of arguments with cuts, None for whole ones; None if a node is there with two cuts."""
    found: dict[fx.Node, Cut | None] = {}
    for arg, cut in pairs:
        if isinstance(arg, fx.Node) and found.setdefault(arg, cut) != cut:
            return None
    return Legal({arg: cut for arg, cut in found.items() if cut is not None}, resized)


def _shape(node: Any) -> list[int]:
    return list(tensors_of(node)[0].shape)


def _all_nodes(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments."""
    return [arg for arg in node.all_input_nodes if tensors_of(arg)]


def pointwise(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Operands are aligned at the right; one of size 1 at the tokens' dim is whole."""
    ndim, pairs = len(_shape(node)), []
    for arg in _all_nodes(node):
        if len(tensors_of(arg)) != 1:
            return None
        shape = _shape(arg)
        dim = cut.dim - ndim + len(shape)
        whole = dim < 0 or (shape[dim] == 1 != cut.size(tokens))
        if not whole and shape[dim] != cut.size(tokens):
            return None
        pairs.append((arg, None if whole else dataclasses.replace(cut, dim=dim)))
    return together(*pairs) if any(of for _, of in pairs) else None


def _view(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """`view`, `reshape`: the new sizes are those of the whole with the piece's at the tokens' dim."""
    source, new = given["self"], _shape(node)
    before = through_view(new, _shape(source), cut, tokens)
    if before is None or through_view(_shape(source), new, before, tokens) != cut:
        return None
    return together((source, before), resized=lambda n: ((source, [*_resized(new, cut, n)]), {}))


def _resized(shape: list[int], cut: Cut, tokens: int) -> list[int]:
    return [cut.size(tokens) if dim == cut.dim else size for dim, size in enumerate(shape)]


def _flatten(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """`flatten`, and `unflatten` of dims without the tokens: their arguments stay."""
    known = _view(node, given, cut, tokens)
    if known is None:
        return None
    ((source, before),) = known.cuts.items()
    cuts_inside = "sizes" in given and given["dim"] % len(_shape(source)) == before.dim
    return None if cuts_inside else Legal(known.cuts)


def _chunk(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Only along another dim than the tokens': it counts parts, not rows."""
    along = given.get("dim", 0) % tensors_of(node)[0].ndim
    return None if along == cut.dim else together((given["self"], cut))


def _expand(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    source, new = given["self"], _shape(node)
    dim = cut.dim - len(new) + len(_shape(source))
    if dim < 0 or _shape(source)[dim] != new[cut.dim] or given.get("implicit"):
        return None
    before = dataclasses.replace(cut, dim=dim)
    return together((source, before), resized=lambda n: ((source, [*_resized(new, cut, n)]), {}))


def _permute(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    source, dims = given["self"], [dim % len(_shape(node)) for dim in given["dims"]]
    return together((source, dataclasses.replace(cut, dim=dims[cut.dim])))


def _transpose(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    ndim = len(_shape(node))
    if ndim < 2:
        return together((given["self"], cut))
    pair = [given.get("dim0", 0) % ndim, given.get("dim1", 1) % ndim]
    dim = pair[1 - pair.index(cut.dim)] if cut.dim in pair else cut.dim
    return together((given["self"], dataclasses.replace(cut, dim=dim)))


def _unsqueeze(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    at = given["dim"] % len(_shape(node))
    if at == cut.dim:
        return None
    return together((given["self"], dataclasses.replace(cut, dim=cut.dim - (at < cut.dim))))


def _squeeze(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Only dims that are named, and not the tokens'."""
    shape, dims = _shape(given["self"]), given["dim"]
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    gone = {dim % len(shape) for dim in dims if shape[dim] == 1}
    left = [dim for dim in range(len(shape)) if dim not in gone]
    if shape[left[cut.dim]] == 1:
        return None
    return together((given["self"], dataclasses.replace(cut, dim=left[cut.dim])))


def _reduction(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Sums, means, maxima over named dims without the tokens'."""
    source = given["self"]
    dims, ndim = given.get("dim"), len(_shape(source))
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or ndim == 0:
        return None
    gone = {dim % ndim for dim in dims}
    left = [dim for dim in range(ndim) if given.get("keepdim") or dim not in gone]
    dim = left[cut.dim]
    return None if dim in gone else together((source, dataclasses.replace(cut, dim=dim)))


def _along(*names: str) -> Rule:
    """Operators along one dim, ``dim``, whose tensors `names` and result have the same dims."""

    def rule(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
        tensors = [given[name] for name in names if isinstance(given.get(name), fx.Node)]
        along = given.get("dim", -1)
        ndim = len(_shape(node))
        if not isinstance(along, int) or along % ndim == cut.dim:
            return None
        whole = _shape(node)[cut.dim]
        if any(len(_shape(x)) != ndim or _shape(x)[cut.dim] != whole for x in tensors):
            return None
        return together(*((x, cut) for x in tensors)) if len(tensors) == len(_all_nodes(node)) else None

    return rule


def _norm(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Layer and RMS norm, whose dims are the last ones."""
    first = given.get("input", given.get("self"))
    if cut.dim >= len(_shape(first)) - len(given["normalized_shape"]):
        return None
    others = [arg for arg in _all_nodes(node) if arg is not first]
    return together((first, cut), *((arg, None) for arg in others))


def _is_transposed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in _TRANSPOSED


def _mm(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Rows of the left operand; a transposed one has features there, as for the gradient of a weight."""
    bias, left, right = given.get("self"), given.get("mat1"), given.get("mat2")
    if left is None:
        bias, left = None, given["self"]
    if cut.dim != 0 or _is_transposed(left):
        return None
    rows = None
    if isinstance(bias, fx.Node) and len(_shape(bias)) == 2 and _shape(bias)[0] != 1:
        rows = cut
    return together((left, cut), (right, None), (bias, rows))


def _bmm(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    left, right = given["self"], given["mat2"]
    if cut.dim == 2:
        return None
    return together((left, cut), (right, cut if cut.dim == 0 else None))


def _linear(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """`linear`, and `matmul` with a matrix at the right."""
    left = given.get("input", given.get("self"))
    right = given.get("weight", given.get("other"))
    if cut.dim >= len(_shape(node)) - 1 or len(_shape(right)) != 2 or _is_transposed(left):
        return None
    if len(_shape(left)) != len(_shape(node)):
        return None
    return together((left, cut), (right, None), (given.get("bias"), None))


def _embedding(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    if cut.dim >= len(_shape(given["indices"])):
        return None
    return together((given["indices"], cut), (given["weight"], None))


def _cat(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    tensors = list(given["tensors"])
    along = given.get("dim", 0) % len(_shape(node))
    if any(len(_shape(x)) != len(_shape(node)) for x in tensors):
        return None
    if along != cut.dim:
        return together(*((x, cut) for x in tensors))
    sizes = {_shape(x)[along] for x in tensors}
    if len(sizes) > 1 or cut.blocks % len(tensors):
        return None
    return together(*((x, dataclasses.replace(cut, blocks=cut.blocks // len(tensors))) for x in tensors))


def _split(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """`split` into equal parts along the tokens' dim, or into any parts along another."""
    source, results = given["self"], tensors_of(node)
    along = given.get("dim", 0) % results[0].ndim
    if along != cut.dim:
        return together((source, cut))
    size: Any = given.get("split_size", given.get("split_sizes"))
    several = isinstance(size, (list, tuple))

    def parts(n: int) -> Any:
        return [cut.size(n)] * len(results) if several else cut.size(n)

    same = (list(size) if several else size) == parts(tokens)
    before = dataclasses.replace(cut, blocks=cut.blocks * len(results))
    if not same or _shape(source)[along] != before.size(tokens):
        return None
    return together((source, before), resized=lambda n: ((source, parts(n), along), {}))


def _slice(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Along another dim, or whole blocks of the tokens' dim."""
    source = given["self"]
    along = given.get("dim", 0) % len(_shape(node))
    if along != cut.dim:
        return together((source, cut))
    size, block = _shape(source)[along], tokens * cut.unit
    first, end = given.get("start") or 0, given.get("end")
    first = first + size if first < 0 else first
    end = size if end is None or end > size else end + size if end < 0 else end
    if given.get("step", 1) != 1 or size % block or first % block or end - first != cut.size(tokens):
        return None
    before = Cut(along, size // block, cut.unit)
    at = first // block

    def args(n: int) -> Arguments:
        return (source, along, at * n * cut.unit, (at + cut.blocks) * n * cut.unit), {}

    return together((source, before), resized=args)


def _select(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    source = given["self"]
    at = given["dim"] % len(_shape(source))
    return together((source, dataclasses.replace(cut, dim=cut.dim + (at <= cut.dim))))


def _same(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Items of tuples, waits, all-reduces: the one tensor argument has the cut of the result."""
    return together((node.all_input_nodes[0], cut))


def _complex(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """Views between complex numbers and pairs in the last dim."""
    pair = len(_shape(node)) if len(_shape(node)) > len(_shape(given["self"])) else -1
    return None if cut.dim == pair - 1 else together((given["self"], cut))


def _gather(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    """All-gather along dim 0 of another axis, or of the tokens'."""
    size = given["group_size"]
    if cut.dim != 0:
        return together((given["input"], cut))
    if cut.blocks % size:
        return None
    return together((given["input"], dataclasses.replace(cut, blocks=cut.blocks // size)))


def _scatter(node: Any, given: dict[str, Any], cut: Cut, tokens: int) -> Legal | None:
    if cut.dim != 0:
        return together((given["input"], cut))
    return together((given["input"], dataclasses.replace(cut, blocks=cut.blocks * given["group_size"])))


VIEWS = frozenset({_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default})
_TRANSPOSED = frozenset({_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default})
ROW_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.linear.default, _aten.matmul.default})

#: Rules of views of all sizes.
VIEW_RULES = (_view, _flatten)
TABLE: dict[Any, Rule] = {
    **dict.fromkeys(VIEWS, _view),
    _aten.expand.default: _expand,
    _aten.permute.default: _permute,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    **dict.fromkeys((_aten.detach.default, _aten.alias.default, _aten.empty_like.default), _same),
    **dict.fromkeys((_aten.contiguous.default, _aten.to.dtype), _same),
    **dict.fromkeys((_aten.flatten.using_ints, _aten.unflatten.int), _flatten),
    **dict.fromkeys((_aten.view_as_complex.default, _aten.view_as_real.default), _complex),
    **dict.fromkeys(
        (_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default, _aten.logsumexp.default),
        _reduction,
    ),
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _along("self")),
    **dict.fromkeys((_aten.softmax.int, _aten.log_softmax.int), _along("self")),
    _aten._softmax_backward_data.default: _along("grad_output", "output"),
    _aten._log_softmax_backward_data.default: _along("grad_output", "output"),
    _aten.gather.default: _along("self", "index"),
    _aten.scatter_add.default: _along("self", "index", "src"),
    **dict.fromkeys((_aten.native_layer_norm.default, _aten._fused_rms_norm.default), _norm),
    **dict.fromkeys((_aten.layer_norm.default, _aten.rms_norm.default), _norm),
    **dict.fromkeys((_aten.mm.default, _aten.addmm.default), _mm),
    _aten.bmm.default: _bmm,
    **dict.fromkeys((_aten.linear.default, _aten.matmul.default), _linear),
    _aten.embedding.default: _embedding,
    _aten.cat.default: _cat,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default), _split),
    _aten.chunk.default: _chunk,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    operator.getitem: _same,
    WAIT: _same,
    ALL_REDUCE: _same,
    ALL_GATHER: _gather,
    REDUCE_SCATTER: _scatter,
}
