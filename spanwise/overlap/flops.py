"""FLOPs of fx nodes, by the formulas of ``torch.utils.flop_counter``; what `costs` divides by a device's rate.

Formulas are found by operator; those that others register with torch (``register_flop_formula``) are found as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from spanwise import _compat
from spanwise.overlap.operators import arguments, nodes_in, tensors_of, traits

_aten = torch.ops.aten

# Attention of torch's own kernels, by the names of its forward and backward. The CPU's are not in torch's registry.
_CPU_ATTENTION: dict[Any, Callable[..., float]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop_count,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop_count,
}
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm})
_ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
    }
)
_ATTENTION_BACKWARD = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_cudnn_attention_backward,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    }
)


def is_attention(node: fx.Node) -> bool:
    """Whether its FLOPs are those of attention, forward or backward; torch's, FlexAttention's, spanwise's."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
        return True
    name = str(getattr(packet, "__name__", packet))
    return name in ("flex_attention", "flex_attention_backward") or _is_ours(node)


def is_attention_backward(node: fx.Node) -> bool:
    """Whether its FLOPs are those of the backward of attention."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION_BACKWARD:
        return True
    return is_attention(node) and str(getattr(packet, "__name__", packet)).endswith("_backward")


def _is_ours(node: fx.Node) -> bool:
    """What this package registers FLOPs for is attention."""
    return isinstance(node.target, _compat.OpOverload) and node.target.namespace == "spanwise"


def node_flops(node: fx.Node) -> float:
    """Floating-point operations of a matrix product, convolution or attention, a multiply and an add being two.

    By the formulas of ``torch.utils.flop_counter``; 0 for all else. Attention that is causal counts the scores that the
    mask shows, aligned at the top left. ``spanwise::sdpa`` counts what its spans show if their contents are known: in
    ``meta["known"]`` of their nodes, or because ``meta["val"]`` is real. FlexAttention, and spanwise's where they are
    not known, count all scores but ``meta["custom"]["sparsity_hint"]`` of them (``torch.fx.traceback.annotate``).
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    if packet in _CPU_ATTENTION:
        first = 1 if packet in _ATTENTION_BACKWARD else 0
        given = [tensors_of(n)[0].shape for n in nodes_in(node.args)]
        shapes = given[first : first + 3]
        flops = float(_CPU_ATTENTION[packet](*(given[:1] if first else ()), *shapes))
    elif packet in _PRODUCTS and not node.kwargs:
        # Not by torch's formulas, which insist on one length of what is summed over: of sizes that a graph leaves open
        # it may have two, as of the tokens that an all-to-all brings back, whatever is taken for them (`sizes`).
        *_, left, right = (tensors_of(n)[0].shape for n in nodes_in(node.args))
        flops = float(2 * math.prod(left) * right[-1])
    elif packet in flop_registry:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("known", n.meta.get("val")))
        if isinstance(packet, _compat.HigherOrderOperator):
            kwargs = {**kwargs, "_node_meta": node.meta}
        flops = float(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))
        if _is_ours(node) and not _spans_are_known(node):
            flops *= 1 - min(1.0, max(0.0, (node.meta.get("custom") or {}).get("sparsity_hint", 0.0)))
    else:
        return 0.0
    if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
        named = dict(arguments(node, traits(node)))
        if named.get("is_causal"):
            q_len, kv_len = (tensors_of(named[name])[0].shape[-2] for name in ("query", "key"))
            seen = min(q_len, kv_len)
            flops *= (seen * (seen + 1) / 2 + (q_len - seen) * kv_len) / (q_len * kv_len)
    return flops


def _spans_are_known(node: fx.Node) -> bool:
    named = dict(arguments(node, traits(node)))
    spans = [named[name].meta for name in ("start", "end") if name in named]
    return bool(spans) and not any(map(_compat.is_fake, (meta.get("known", meta.get("val")) for meta in spans)))
