"""FLOPs of fx nodes by the formulas of ``torch.utils.flop_counter``; `roofline` divides them by a device's rate.

Formulas are found by operator, also those that others register with torch (``register_flop_formula``). Graphs that were
not decomposed, such as ``torch.export``'s, have operators defined by others, as ``aten.linear`` is by ``aten.addmm``:
these count the FLOPs of the operators that they run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import Role, attribute, named_arguments, nodes_in, tensors_of, traits

_aten = torch.ops.aten

_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm})
_ATTENTION = frozenset({
    _aten.scaled_dot_product_attention, _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward, _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward
})  # fmt: skip


def is_attention(node: fx.Node) -> bool:
    """Whether a node is attention, forward or backward: torch's, FlexAttention or spanwise's."""
    packet = getattr(node.target, "overloadpacket", node.target)
    flex = getattr(packet, "__name__", "").startswith("flex_attention")
    return packet in _ATTENTION or flex or _is_ours(node)


def hides_its_mask(node: fx.Node) -> bool:
    """Whether attention is counted with all scores because neither its mask nor a hint is in the graph."""
    if not is_attention(node) or "sparsity_hint" in (node.meta.get("custom") or {}):
        return False
    if _is_ours(node):
        return not _spans_are_known(node)
    return getattr(node.target, "__name__", "").startswith("flex_attention")


def _is_ours(node: fx.Node) -> bool:
    """Whether an operator is this package's; all that have FLOPs are attention."""
    return isinstance(node.target, _torch.OpOverload) and node.target.namespace == "spanwise"


def node_flops(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention; a multiply-add is two.

    The formulas are those of ``torch.utils.flop_counter``. Other operators have 0, ``aten.mv`` and ``aten.dot``
    included. A composite operator has the FLOPs of its parts, or 0 if those depend on data. Causal attention counts the
    visible scores, aligned at the top left. ``spanwise::sdpa`` counts the scores of its spans if their contents are
    known: in ``meta["known"]`` of their nodes, or because ``meta["val"]`` is real. Otherwise, and for FlexAttention, a
    share ``meta["custom"]["sparsity_hint"]`` of all scores is left out (``torch.fx.traceback.annotate``).

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(4, 4, device="meta")
    >>> product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> node_flops(product)
    128.0
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    registered = packet in _torch.flop_formulas
    if not registered and not (isinstance(node.target, _torch.OpOverload) and _is_counted(node.target)):
        return 0.0
    if packet in _PRODUCTS and not node.kwargs:
        # torch's formulas insist that the summed dims are equal. With assumed symbolic sizes (`sizes`) they may differ,
        # for example for the tokens that an all-to-all returns.
        *_, left, right = (tensors_of(n)[0].shape for n in nodes_in(node.args))
        flops = float(2 * math.prod(left) * right[-1])
    elif registered:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("known", n.meta.get("val")))
        if isinstance(packet, _torch.HigherOrderOperator):
            kwargs = {**kwargs, "_node_meta": node.meta}
        flops = float(_torch.flop_formulas[packet](*args, **kwargs, out_val=node.meta.get("val")))
        if _is_ours(node) and not _spans_are_known(node):
            flops *= 1 - min(1.0, max(0.0, (node.meta.get("custom") or {}).get("sparsity_hint", 0.0)))
    else:
        flops = _composite_flops(node)
    if packet in _ATTENTION:
        named = named_arguments(node)
        if named.get("is_causal"):
            q_len, kv_len = (tensors_of(named[name])[0].shape[-2] for name in ("query", "key"))
            seen = min(q_len, kv_len)
            flops *= (seen * (seen + 1) / 2 + (q_len - seen) * kv_len) / (q_len * kv_len)
    return flops


@functools.cache
def _is_counted(op: _torch.OpOverload) -> bool:
    """Whether an operator may decompose into operators with FLOPs; pointwise ones have none."""
    return torch.Tag.pointwise not in op.tags and _torch.decomposes(op)


def _composite_flops(node: fx.Node) -> float:
    """FLOPs that torch counts while an operator runs on meta tensors; 0 if it fails, as ones that read contents do."""
    known = traits(node)
    if known.role is not Role.COMPUTE or known.is_alias:  # views and casts; and communication must not run
        return 0.0

    def value(arg: fx.Node) -> Any:
        return attribute(arg) if arg.op == "get_attr" and "val" not in arg.meta else arg.meta.get("val")

    args, kwargs = _torch.tree_map(_on_meta, fx.node.map_arg((node.args, dict(node.kwargs)), value))
    try:
        with _torch.without_modes(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operator may raise anything
        return 0.0
    return float(counter.get_total_flops())


def _on_meta(value: Any) -> Any:
    """A tensor without contents in place of one; None, with which operators fail, for one of symbolic sizes."""
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or any(type(n) is not int for n in (*value.shape, *value.stride())):
        return None
    with _torch.without_modes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _spans_are_known(node: fx.Node) -> bool:
    named = named_arguments(node)
    spans = [named[name].meta for name in ("start", "end") if name in named]
    return bool(spans) and not any(map(_torch.is_fake, (meta.get("known", meta.get("val")) for meta in spans)))
