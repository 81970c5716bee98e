"""causal_conv: a short causal convolution along a sharded sequence. Only the rows before each run travel, its halo."""

# B batch, T tokens of this rank, R rows of its shard, C channels

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spanwise import _torch
from spanwise.attention.compare import compare_backward, compare_call, eager, tells_refusals
from spanwise.attention.executor import Link, bring
from spanwise.recurrence.route import RecurrenceRoute, check_route, from_rows, to_rows

_ACTIVATIONS = (None, "silu", "swish")


@tells_refusals
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    route: RecurrenceRoute,
    activation: str | None = None,
) -> torch.Tensor:
    """A depthwise causal convolution of this rank's shard, inside documents. Differentiable; collective.

    A token reads the ``width - 1`` tokens before it in its document, zeros before the document's start. One exchange
    brings the rows that lie on other ranks; its backward brings their gradients home.

    Args:
        x: ``[B, T, channels]`` or ``[T, channels]``, this rank's shard.
        weight: ``[channels, width]`` or, as in `torch.nn.Conv1d`, ``[channels, 1, width]``; the last column is the
            token's own weight.
        bias: ``[channels]`` or None.
        route: of the plan; its ``conv_width`` is at least `width`.
        activation: None, or "silu" (also called "swish").

    Returns:
        As `x`. 0 in padding.

    Raises:
        ValueError: shapes that do not fit, a width that the route was not made for, an unknown activation.

    >>> import torch, spanwise
    >>> from spanwise import recurrence
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 2, 4]), num_ranks=1)
    >>> recurrence.causal_conv(torch.ones(4, 1), torch.ones(1, 3), None, recurrence.recurrence_route(plan)).flatten()
    tensor([1., 2., 1., 2.])
    """
    _torch.check_transforms(x, weight)
    check_route(route, {"x": x, "weight": weight, "bias": bias})
    _torch.fix_sizes(*weight.shape)
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {_ACTIVATIONS}, got {activation!r}")
    if weight.dim() == 3 and weight.shape[1] == 1:
        weight = weight.squeeze(1)
    if weight.dim() != 2 or x.dim() not in (2, 3) or x.shape[-1] != weight.shape[0]:
        shapes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        raise ValueError(f"causal_conv needs x [B, T, channels] or [T, channels] and [channels, width], got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape [{weight.shape[0]}], got {tuple(bias.shape)}")
    if not 1 <= weight.shape[1] <= route.conv_width:
        width = weight.shape[1]
        raise ValueError(f"the route is for widths to {route.conv_width}; give recurrence_route conv_width={width}")
    if not x.is_floating_point():
        raise ValueError(f"causal_conv takes floating-point tensors, got {x.dtype}")
    rows_RBC = to_rows("x", x, route, 1)
    stream = [rows_RBC]
    if route.apart and route.conv_width > 1:
        assert route.mesh is not None
        facts = {"dtype": x.dtype, "options": (weight.shape[1], activation, bias is not None)}
        sizes = "shape of a token", rows_RBC.shape[1:]
        call = compare_call("causal_conv", facts, route.mesh, [x], sizes=sizes, plan=route.digest)
        name = _torch.group_name(route.mesh.get_group())
        link = Link(name, route.mesh.size(), "tokens (causal_conv)", eager(call))
        (arrived_NF,) = bring(rows_RBC.flatten(1), [route.halo], link)
        (arrived_NF,) = compare_backward((arrived_NF,), call, travels=True)
        stream.append(arrived_NF.unflatten(1, rows_RBC.shape[1:]))
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    with torch.autocast(x.device.type, enabled=False):  # torch.cat would fail for the other half-precision dtype
        rows_NBC = torch.cat([*stream, rows_RBC.new_zeros(1, *rows_RBC.shape[1:])]).to(dtype)
        bias_C = weight.new_zeros(weight.shape[0]) if bias is None else bias
        skipped = route.conv_width - weight.shape[1]
        out_RBC = _Windows.apply(rows_NBC, weight.to(dtype), bias_C.to(dtype), route.stream, route.outputs, skipped)
        if activation is not None:
            out_RBC = F.silu(out_RBC)
    return from_rows(out_RBC.to(x.dtype), route, x.dim() == 2)


class _Windows(torch.autograd.Function):
    """Weighted sums over windows of a stream of rows, and a bias; 0 for outputs behind all windows.

    By hand, because autograd fills and adds a whole stream for each tap: on one core it took 1.57 of the time of
    transformers' convolution, forward and backward, and this 1.10 (4,096 tokens, 1,536 channels, width 4).
    """

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        # *args: without gradients, torch.compile passes no ctx to a function of as many names as arguments.
        ctx, rows_NBC, weight_CW, bias_C, stream, outputs, skipped = args
        stream_LBC = rows_NBC.index_select(0, stream)
        width = weight_CW.shape[1]
        count = stream_LBC.shape[0] - skipped - width + 1
        out_LBC = bias_C.expand(count + 1, stream_LBC.shape[1], -1).clone()
        out_LBC[-1].zero_()
        for tap in range(width):
            out_LBC.narrow(0, 0, count).addcmul_(stream_LBC.narrow(0, skipped + tap, count), weight_CW[:, tap])
        ctx.save_for_backward(stream_LBC, weight_CW, stream, outputs)
        ctx.num_rows, ctx.skipped = rows_NBC.shape[0], skipped
        return out_LBC.index_select(0, outputs)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        _torch.check_first_order()
        stream_LBC, weight_CW, stream, outputs = ctx.saved_tensors
        width, features = weight_CW.shape[1], stream_LBC.shape[1:]
        count = stream_LBC.shape[0] - ctx.skipped - width + 1
        d_LBC = d_out.new_zeros(count + 1, *features).index_copy_(0, outputs, d_out).narrow(0, 0, count)
        d_stream, d_weight = torch.zeros_like(stream_LBC), torch.empty_like(weight_CW)
        for tap in range(width):
            at = ctx.skipped + tap
            d_stream.narrow(0, at, count).addcmul_(d_LBC, weight_CW[:, tap])
            d_weight[:, tap] = torch.linalg.vecdot(stream_LBC.narrow(0, at, count), d_LBC, dim=0).sum(0)
        d_rows = d_out.new_zeros(ctx.num_rows, *features).index_add_(0, stream, d_stream)
        return d_rows, d_weight, d_LBC.sum((0, 1)), None, None, None
