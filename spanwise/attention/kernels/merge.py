"""Merge partial attention results over disjoint key sets into the result over their union.

Each part is an output and a logsumexp over its own keys. The union's output is the mean of the parts' weighted by
``exp(lse_i - lse)``, as in ring attention (Liu et al., 2023) and FlashAttention-2's split-K. The running result takes
one part after another; nothing of a part is kept.

The backward of ring attention needs nothing of a part either. With P_i = exp(scores_i - lse), lse of the *union*,

    dv_i = P_i^T grad_out,    dscores_i = P_i * (grad_out v_i^T - rowsum(grad_out * out) + grad_lse),

where out, grad_out and grad_lse are the union's, too. So a part brings four *anchors*, tensors without memory, and the
merge sends back along them, as if they were gradients, **grad_out, out, grad_lse and lse of the union**: what the
backward of a whole attention takes. What is saved is one output and one lse, whatever the number of parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise import _torch

# out [B, H, T, Dv] and lse [B, H, T], without gradients; then the anchors for grad_out, out, grad_lse and lse.
Part = tuple[Tensor, ...]


class Merging:
    """A merge of parts as they come; at most two outputs live at a time.

    Args:
        dtype: of the merged output; kernels may give their parts in a wider one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._union: list[Tensor] = []  # out and lse
        self._anchors: list[Tensor] = []
        self._dtype = dtype

    def add(self, part: Part) -> None:
        """Add a part; its lse is −inf where a row has no key."""
        out, lse, *anchors = part
        self._anchors.extend(anchors)
        if self._union:
            out, lse = union(self._union[0], self._union[1], out, lse)
        self._union[:] = out, lse

    def result(self) -> tuple[Tensor, Tensor]:
        """out ``[B, H, T, Dv]`` and lse ``[B, H, T]``, differentiable; see `merge`."""
        out, lse = self._union
        return _Result.apply(self._dtype, out, lse, *self._anchors)


def merge(parts: Sequence[Part], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merge partial results; exact up to rounding, in float32 (float64 stays float64).

    Args:
        parts: one or more: of `Kernel.attend_part`, or out ``[B, H, T, Dv]`` and lse ``[B, H, T]``, −inf where a row
            has no key, both differentiable.
        dtype: of the merged output; default: that of the first part.

    Returns:
        out ``[B, H, T, Dv]``, lse ``[B, H, T]``. A row without a key in any part keeps
        out 0 and lse −inf, and passes no gradient on.

    >>> scores, values = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 8, 2)
    >>> halves = zip(scores.split(4, -1), values.split(4, 2))
    >>> out, lse = merge([(s.softmax(-1) @ v, s.logsumexp(-1)) for s, v in halves])
    >>> torch.allclose(out, scores.softmax(-1) @ values, atol=1e-6)
    True
    """
    merging = Merging(parts[0][0].dtype if dtype is None else dtype)
    for part in parts:
        merging.add(part_of(*part) if len(part) == 2 else part)
    return merging.result()


@torch.no_grad()
def union(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial results as one, the output in float32 (float64 for float64)."""
    # Where neither has a key, the difference would be nan. A nan in an lse stays.
    weight = torch.sigmoid(new_lse - lse).masked_fill(new_lse == -torch.inf, 0).unsqueeze(-1)
    wide = lse_dtype(out)
    return torch.lerp(out.to(wide), new_out.to(wide), weight.to(wide)), torch.logaddexp(lse, new_lse)


def anchors(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The anchors of a part; ``dtype`` is that in which it takes the union's grad_out and out."""
    of_out, of_lse = out.new_empty((), dtype=dtype), lse.new_empty(())
    return (*(of_out.expand(out.shape) for _ in range(2)), *(of_lse.expand(lse.shape) for _ in range(2)))  # type: ignore[return-value]


def part_of(out: Tensor, lse: Tensor, whole_out: list[Tensor] | None = None) -> Part:
    """A differentiable result as a part. Its own gradients are computed from the union's.

    Args:
        whole_out: gets the union's output in the backward, for a kernel that then reads it in place of its own.
    """
    return _Part.apply(out, lse, whole_out)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, whole_out: list[Tensor] | None) -> Part:
        # Not the inputs themselves. Selective checkpoints do not count detach, unlike other aliases.
        values = out.detach(), lse.detach()
        ctx.mark_non_differentiable(*values)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.whole_out = out.dtype, whole_out
        ctx.save_for_backward(*(values if whole_out is None else values[1:]))
        return *values, *anchors(out, lse, out.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad_out: Any, whole_out: Any, grad_lse: Any, whole_lse: Any) -> Any:
        *out, lse = ctx.saved_tensors
        share = torch.where(lse == -torch.inf, 0, torch.exp(lse - whole_lse))
        of_out, of_lse = None, grad_lse
        if ctx.whole_out is not None:
            ctx.whole_out[:] = [whole_out]
        if grad_out is not None:
            of_out = (grad_out * share.unsqueeze(-1)).to(ctx.dtype)
            if out:  # the kernel subtracts the product with its own output, not with the union's
                wide = grad_out.to(lse.dtype)
                delta = (wide * (out[0].to(lse.dtype) - whole_out.to(lse.dtype))).sum(-1)
                of_lse = delta if grad_lse is None else delta + grad_lse
        return of_out, None if of_lse is None else torch.where(share == 0, 0, of_lse * share), None


class OperatorPart(torch.autograd.Function):
    """A part from a pair of operators, which keeps neither its out nor its lse.

    Arguments: the operators, q without gradient, a tensor that takes its gradient, k, v, and what the operators take
    besides: tensors, then options. The first gives out and lse. The second takes the union's grad_out and grad_lse,
    each perhaps None, q, k, v, the union's out and lse, and the rest; it gives the gradients of q, k and v.
    """

    # *args: without gradients, torch.compile passes no ctx to a function of as many names as arguments.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Part:
        (attend, ctx.backward_of), q, _, *rest = args
        tensors = [x for x in rest if isinstance(x, Tensor)]
        ctx.save_for_backward(q, *tensors)
        ctx.set_materialize_grads(False)
        ctx.options = rest[len(tensors) :]
        with torch.autocast(q.device.type, enabled=False):  # or products of a softcap would be rounded to bfloat16
            out, lse = attend(q, *rest)
        ctx.mark_non_differentiable(out, lse)
        return out, lse, *anchors(out, lse, q.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad_out: Any, out: Tensor, grad_lse: Any, lse: Tensor) -> tuple[Any, ...]:
        q, k, v, *tables = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.backward_of(grad_out, grad_lse, q, k, v, out, lse, *tables, *ctx.options)
        return None, None, *grads, *[None] * (len(tables) + len(ctx.options))


class _Result(torch.autograd.Function):
    """Out and lse of the union; its backward sends the anchors of all parts what they stand for."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, out: Tensor, lse: Tensor, *anchors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.parts = len(anchors) // 4
        out, lse = out.detach().to(dtype), lse.detach()
        ctx.save_for_backward(out, lse)
        return out, lse.to(lse_dtype(out), copy=True)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        _torch.check_first_order()  # on every rank, before an exchange of K/V
        out, lse = ctx.saved_tensors
        if grad_lse is not None:
            grad_lse = torch.where(lse == -torch.inf, 0, grad_lse)
        return None, None, None, *(grad_out, out, grad_lse, lse) * ctx.parts


def with_lse_gradient(grad_out: Tensor, out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """A grad_out and an out that make flash's backward account for a gradient of the lse.

    The backward is ``ds = p * (dp - delta)`` with ``delta = (grad_out * out).sum(-1)``, and a gradient of the lse
    enters as ``delta - grad_lse``. The kernel computes delta itself and reads out for nothing else. So instead of out
    it gets the multiple of grad_out whose product with grad_out is that difference. All terms of the product have one
    sign, so rounding costs the difference no more than its relative precision.

    If a row's grad_out is zero, or very small compared to the difference, the dtype cannot represent the multiple. Then
    the row's first element is raised to 2**-56 of the difference (2**-14 in float16, whose range ends at 2**16). That
    changes the row's gradient of v by less than rounding changes its other gradients. Rows without a gradient stay
    unchanged.

    Args:
        grad_out, out: ``[B, H, Q, V]``.
        grad_lse: ``[B, H, Q]``.
    """
    wide = lse_dtype(out)
    exact = grad_out.to(wide, copy=True)
    delta = (torch.linalg.vecdot(exact, out.to(wide)) - grad_lse.to(wide)).unsqueeze(-1)
    # 2**-22 is below float16's normal numbers, and four times its least.
    share, floor = (2.0**-14, 2.0**-22) if out.dtype == torch.float16 else (2.0**-56, torch.finfo(out.dtype).tiny)
    least = torch.where(delta == 0, 0, (delta.abs() * share).clamp(min=floor)).to(out.dtype)
    is_small = exact.abs().amax(-1, keepdim=True) < least
    grad_out = grad_out.clone()
    grad_out[..., :1] = torch.where(is_small, least, grad_out[..., :1])
    exact[..., :1] = grad_out[..., :1]
    top = exact.abs().amax(-1, keepdim=True)
    is_zero = top == 0
    direction = exact.div_(top.masked_fill(is_zero, 1))  # or the square of a small number would be 0
    square = torch.linalg.vecdot(direction, direction).unsqueeze(-1)
    size = torch.where(is_zero, 0, delta / (top * square).masked_fill(is_zero, 1))
    return grad_out, direction.mul_(size).to(out.dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out ``[B, H, T, Dv]`` and lse ``[B, H, T]`` after sinks ``[H]`` or ``[H, n]`` join each row's denominator."""
    sinks = sinks.to(lse.dtype)
    if sinks.dim() == 2:
        none = (sinks == -torch.inf).all(-1)  # there logsumexp has the gradient nan
        sinks = sinks.masked_fill(none.unsqueeze(-1), 0).logsumexp(-1).masked_fill(none, -torch.inf)
    sink = sinks.view(1, -1, 1)
    # Rows without a key keep output 0, also for a sink of -inf.
    # Not torch.sigmoid: its gradient has 1 - kept, which is all rounding error where the sink weighs little.
    kept = torch.exp(torch.nn.functional.logsigmoid(torch.where(lse == -torch.inf, lse, lse - sink)))
    return (out * kept.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink.expand_as(lse))


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the lse for queries ``q``: float32, float64 for float64."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def not_saving() -> Iterator[Callable[[Sequence[Tensor], Callable[[], Sequence[Tensor]]], None]]:
    """Inside, autograd saves tensors by hooks. Call the function at the end of the block with tensors not to keep.

    Its second argument gives them in the backward, in the same strides. Hooks that are active outside, of checkpoints
    or offloading, get all other tensors.
    """
    outer, notes = _torch.saved_tensor_hooks(), list[list[Any]]()

    def pack(x: Tensor) -> list[Any]:
        notes.append([x, x._version, None])
        return notes[-1]

    def forget(tensors: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> None:
        held = [(_torch.storage_id(x), x.storage_offset(), x.numel()) for x in tensors]
        for note in notes:
            x = note[0]
            at = _torch.storage_id(x), x.storage_offset()
            for which, (of, first, count) in enumerate(held):
                if x.numel() and at[0] == of and first <= at[1] < first + count:
                    note[:] = None, again, (which, x.shape, x.stride(), at[1] - first)
                    break
            else:
                if outer is not None:
                    note[:] = outer[0](x), None, outer[1]
        notes.clear()

    def unpack(note: list[Any]) -> Tensor:
        saved, version, how = note
        if isinstance(how, tuple):
            which, shape, stride, offset = how
            x = version()[which]
            return x.as_strided(shape, stride, x.storage_offset() + offset)
        if how is not None:
            return how(saved)
        if saved._version != version:  # autograd's own check does not run under hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(saved.shape)} that attention needs for its backward was changed in place "
                f"after the forward (version {saved._version}, expected {version})"
            )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield forget
