"""Token-wise operators: which arguments must be pieces where the result of a node is one.

    node, cut of its result ─► `legal` ─► cuts of its arguments | None: the node stops the cut

Views are read off their strides. `TABLE` says of all other operators which dims of which arguments are those of the
result. Other operators, random ones and those that write stop the cut.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import WAIT, Role, arguments, tensors_in, tensors_of, traits

_aten, _ops = torch.ops.aten, _torch.functional_collectives

ALL_GATHER = _ops.all_gather_into_tensor.default
REDUCE_SCATTER = _ops.reduce_scatter_tensor.default
ALL_REDUCE = _ops.all_reduce.default
COLLECTIVES = frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE})


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where a tensor has the tokens: its dim `dim` has size ``blocks * tokens * unit``.

    A region of a graph has one axis of `tokens` rows on each rank. Piece i takes the same tokens of each block, so that
    pieces of a gathered tensor are rank-interleaved.

    Attributes:
        blocks: how often the axis repeats, such as once for each gathered rank.
        unit: elements of the dim for one token of a block, where other dims are flattened into it.
    """

    dim: int
    blocks: int = 1
    unit: int = 1

    def size(self, tokens: int) -> int:
        """Size of the dim in a piece of that many tokens of each block."""
        return self.blocks * tokens * self.unit


def bounds(tokens: int, pieces: int) -> list[tuple[int, int]]:
    """First token and end of each piece; sizes differ by at most one.

    >>> bounds(7, 2)
    [(0, 3), (3, 7)]
    """
    return [(tokens * i // pieces, tokens * (i + 1) // pieces) for i in range(pieces)]


class View(NamedTuple):
    """A view of a contiguous tensor, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def through_view(source: Sequence[int], view: View, cut: Cut, tokens: int) -> Cut | None:
    """The cut of a view of a contiguous tensor of shape `source` that has `cut`; None if no single dim has the tokens.

    >>> through_view([8, 2, 6], View((16, 6), (6, 1)), Cut(0), 8)
    Cut(dim=0, blocks=1, unit=2)
    >>> through_view([16, 6], View((2, 8, 6), (48, 6, 1)), Cut(0, 2), 8)
    Cut(dim=1, blocks=1, unit=1)
    >>> through_view([8, 6], View((4, 2, 6), (12, 6, 1)), Cut(0), 8) is None
    True
    """
    if 0 in source:
        return None
    # Element i of the source is of token i // inside % tokens.
    inside = cut.unit * math.prod(source[cut.dim + 1 :])
    block = tokens * inside
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if not size or not stride or inside % stride or size % (tokens * inside // stride):
            continue
        # Steps along the other dims must stay inside of a token, or go over whole blocks.
        reach = view.offset % block + inside - stride
        for other, (length, step) in enumerate(zip(view.shape, view.strides, strict=True)):
            if other != dim and step % block:
                reach += (length - 1) * step
        if reach < inside:
            return Cut(dim, size * stride // block, inside // stride)
    return None


def _before_view(source: Sequence[int], view: View, cut: Cut, tokens: int) -> Cut | None:
    """The cut of a contiguous tensor whose view has `cut`."""
    inside = view.strides[cut.dim] * cut.unit
    for dim, size in enumerate(source):
        unit, rest = divmod(inside, math.prod(source[dim + 1 :]))
        if not rest and unit and size % (tokens * unit) == 0:
            before = Cut(dim, size // (tokens * unit), unit)
            if through_view(source, view, before, tokens) == cut:
                return before
    return None


def _views(node: fx.Node) -> list[View]:
    """The results of a view of a contiguous argument."""
    given = torch.empty(_shape(node.all_input_nodes[0]), device="meta")
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda arg: given)
    target: Any = node.target
    with _torch.without_modes():
        made = target(*args, **kwargs)
    return [View(tuple(x.shape), x.stride(), int(x.storage_offset())) for x in tensors_in(made)]


Pairs = Iterable[tuple[Any, Cut | None]]
Rule = Callable[[Any, dict[str, Any], Cut], Pairs | None]
"""``(node, its arguments, cut of its result) -> arguments with their cuts``, None for whole ones; or None."""


def _shape(node: Any) -> list[int]:
    return list(tensors_of(node)[0].shape)


def _leading(names: Sequence[str] = (), last: int = 0) -> Rule:
    """Arguments with the leading dims of the result; others, and the `last` dims of the result, are never cut."""

    def rule(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
        if cut.dim >= len(_shape(node)) - last:
            return None
        held = [given.get(name) for name in names] or node.all_input_nodes[:1]
        return [(arg, cut if arg in held else None) for arg in node.all_input_nodes]

    return rule


def _pointwise(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    """Operands are aligned at the right; one of size 1 at the tokens' dim is whole."""
    pairs: list[tuple[Any, Cut | None]] = []
    for arg in node.all_input_nodes:
        shape = _shape(arg)
        dim = cut.dim - len(_shape(node)) + len(shape)
        whole = dim < 0 or shape[dim] == 1 != _shape(node)[cut.dim]
        pairs.append((arg, None if whole else dataclasses.replace(cut, dim=dim)))
    return pairs if any(of for _, of in pairs) else None


def _along(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    """Operators along named dims, which must not have the tokens; the result keeps these dims or loses them."""
    ndim, dims = len(_shape(node.all_input_nodes[0])), given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    gone = {dim % ndim for dim in dims or ()}
    kept = [dim for dim in range(ndim) if len(_shape(node)) == ndim or dim not in gone]
    if not gone or kept[cut.dim] in gone:  # over all dims if it names none
        return None
    return [(arg, dataclasses.replace(cut, dim=kept[cut.dim])) for arg in node.all_input_nodes]


def _norm(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    return _leading(("input", "self"), last=len(given["normalized_shape"]))(node, given, cut)


def _product(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    """Rows of the left operand times a matrix; a transposed one has features there, as for the gradient of a weight."""
    left: Any = given.get("mat1", given.get("input", given.get("self")))
    right = given.get("mat2", given.get("weight", given.get("other")))
    if cut.dim >= len(_shape(node)) - 1 or left.target in _TRANSPOSED or len(_shape(right)) != 2:
        return None
    bias = [arg for arg in node.all_input_nodes if arg not in (left, right)]
    rows = [len(_shape(arg)) == 2 and _shape(arg)[0] != 1 for arg in bias]
    return [(left, cut), (right, None), *((arg, cut if has else None) for arg, has in zip(bias, rows, strict=True))]


def _bmm(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    return None if cut.dim == 2 else [(given["self"], cut), (given["mat2"], cut if cut.dim == 0 else None)]


def _cat(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    """Along another dim than the tokens', or of whole blocks of theirs."""
    tensors = list(given["tensors"])
    if given.get("dim", 0) % len(_shape(node)) != cut.dim:
        return [(x, cut) for x in tensors]
    if cut.blocks % len(tensors):
        return None
    return [(x, dataclasses.replace(cut, blocks=cut.blocks // len(tensors))) for x in tensors]


def _collective(node: Any, given: dict[str, Any], cut: Cut) -> Pairs | None:
    """Dim 0 of what is gathered or scattered has a block for each rank."""
    blocks = cut.blocks
    if cut.dim == 0 and node.target is REDUCE_SCATTER:
        blocks *= given["group_size"]
    elif cut.dim == 0 and node.target is ALL_GATHER:
        if blocks % given["group_size"]:
            return None
        blocks //= given["group_size"]
    return [(given["input"], dataclasses.replace(cut, blocks=blocks))]


RESHAPES = frozenset({
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.flatten.using_ints,
    _aten.unflatten.int
})  # fmt: skip
_TRANSPOSED = frozenset({_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default})
SPLITS = frozenset({_aten.split.Tensor, _aten.split_with_sizes.default})
VIEWS = RESHAPES | _TRANSPOSED | SPLITS | {
    _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.detach.default,
    _aten.alias.default, _aten.chunk.default, _aten.slice.Tensor, _aten.select.int
}  # fmt: skip
ROW_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.linear.default, _aten.matmul.default})
TABLE: dict[Any, Rule] = {
    **dict.fromkeys(COLLECTIVES, _collective),
    **dict.fromkeys(ROW_PRODUCTS, _product),
    **dict.fromkeys((operator.getitem, WAIT, _aten.empty_like.default, _aten.contiguous.default), _leading()),
    **dict.fromkeys((_aten.to.dtype, _aten.view_as_complex.default), _leading()),
    _aten.view_as_real.default: _leading(last=1),
    _aten.embedding.default: _leading(("indices",), last=1),
    _aten.bmm.default: _bmm,
    _aten.cat.default: _cat,
    **dict.fromkeys((_aten.native_layer_norm.default, _aten._fused_rms_norm.default), _norm),
    **dict.fromkeys((_aten.layer_norm.default, _aten.rms_norm.default), _norm),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default), _along),
    **dict.fromkeys((_aten.logsumexp.default, _aten._softmax.default, _aten._log_softmax.default), _along),
    **dict.fromkeys((_aten.softmax.int, _aten.log_softmax.int, _aten._softmax_backward_data.default), _along),
    **dict.fromkeys((_aten._log_softmax_backward_data.default, _aten.gather.default), _along),
    _aten.scatter_add.default: _along,
}


def legal(node: fx.Node, cut: Cut, tokens: int) -> dict[fx.Node, Cut] | None:
    """Cuts of the arguments that give pieces of the result of `node`; all others are whole. None if it has no pieces.

    Args:
        cut: of the result. tokens: size of the region's token axis on a rank.
    """
    results, args = tensors_of(node), node.all_input_nodes
    if not results or not all(map(tensors_of, args)):
        return None
    known = traits(node)
    if known.ordered or known.writes or known.role not in (Role.COMPUTE, Role.FREE, Role.START, Role.WAIT):
        return None
    if not all(_has(x, cut, tokens) for x in results):
        return None
    pairs: Pairs | None = None
    given = dict(arguments(node, known))
    if node.target in VIEWS and len(args) == 1 and given.get("step", 1) == 1:  # `piece_call` keeps no steps
        shape = _shape(args[0])
        views = _views(node)
        before = _before_view(shape, views[0], cut, tokens)
        if before and all(through_view(shape, view, before, tokens) == cut for view in views):
            pairs = [(args[0], before)]
    elif node.target in TABLE:
        pairs = TABLE[node.target](node, given, cut)
    elif known.pointwise and isinstance(node.target, _torch.OpOverload):
        pairs = _pointwise(node, {}, cut)
    if pairs is None:
        return None
    found: dict[fx.Node, Cut | None] = {}
    for arg, of in pairs:
        if isinstance(arg, fx.Node) and found.setdefault(arg, of) != of:
            return None
    cuts = {arg: of for arg, of in found.items() if of is not None}
    held = all(_has(x, of, tokens) for arg, of in cuts.items() for x in tensors_of(arg))
    return cuts if held and found.keys() == set(args) else None


def _has(x: torch.Tensor, cut: Cut, tokens: int) -> bool:
    return cut.dim < x.ndim and x.shape[cut.dim] == cut.size(tokens)


def piece_call(node: fx.Node, cut: Cut, tokens: int, piece: int) -> tuple[Any, Any, Any]:
    """The operator and its arguments that give `piece` tokens of a `legal` node, with whole arguments for pieces."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.target in RESHAPES or node.target is _aten.expand.default:
        sizes = [cut.size(piece) if dim == cut.dim else size for dim, size in enumerate(_shape(node))]
        return _aten.view.default if node.target in RESHAPES else node.target, (args[0], sizes), {}
    given: dict[str, Any] = dict(arguments(node, traits(node)))
    if node.target not in SPLITS | {_aten.slice.Tensor} or given.get("dim", 0) % len(_shape(node)) != cut.dim:
        return node.target, args, kwargs
    if node.target in SPLITS:
        sizes = [cut.size(piece)] * len(tensors_of(node))
        return _aten.split_with_sizes.default, (given["self"], sizes, cut.dim), {}
    start, end, _ = slice(given.get("start"), given.get("end")).indices(_shape(given["self"])[cut.dim])
    return node.target, (given["self"], cut.dim, start * piece // tokens, end * piece // tokens), {}


def candidates(node: fx.Node, arg: fx.Node, cut: Cut, tokens: int) -> Iterable[Cut]:
    """Cuts that the result of `node` may have if its argument `arg` has `cut`; `legal` decides."""
    results, given = tensors_of(node), tensors_of(arg)
    if not results or not given:
        return
    if node.target in VIEWS:
        found = through_view(_shape(arg), _views(node)[0], cut, tokens) if len(node.all_input_nodes) == 1 else None
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
    if node.target is not _aten.bmm.default:
        return node.target in ROW_PRODUCTS
    (left,) = tensors_of(node.all_input_nodes[0])
    return cut.dim == 1 and (left.stride(-1) == 1 or left.shape[-1] == 1)


def makes_rows(node: fx.Node, cut: Cut) -> bool:
    """Whether a node computes rows of activations from others, or looks them up in a table."""
    return is_product_of_rows(node, cut) or node.target is _aten.embedding.default
