"""Keep NaN and inf out of dense products: a weight of 0 times NaN is NaN, in rows that do not read the NaN too.

Two functions stand around finite attention. `enter` replaces tokens that are not finite by zeros; `leave` makes NaN of
the results of rows that have or read such a token. Their backwards do the same to gradients. `leave` tells `enter`
which rows have NaN: as the gradient of `marker`, a tensor of zeros that passes from `enter` to `leave`. All of it costs
several passes over each tensor and a product with one column for each head. In a graph and on a device nothing depends
on whether there is NaN, so graphs neither break nor wait. Eager code on a CPU looks first: a sum of each tensor.
Letters of shapes: see `_checks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spanwise import _torch


def enter(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, has_key: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Finite q, k and v; bool ``[B, H, Q]``, rows whose lse is NaN, then whose out is; and `marker` for `leave`.

    `mask`, bool ``[B or 1, Q, T]``, says whether a row reads a key, `has_key` ``[B or 1, Q]`` whether it reads any.
    Keys that no row reads become 0, whatever they hold.
    """
    made: tuple[Tensor, ...] = _Enter.apply(q, k, v, mask, has_key)
    q, k, v, no_lse, no_out, marker = made
    return q, k, v, no_lse, no_out, marker


def leave(out: Tensor, lse: Tensor, no_lse: Tensor, no_out: Tensor, marker: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, H, Q, V]`` and ``lse`` ``[B, H, Q]`` with NaN in the named rows; arguments after from `enter`."""
    left: tuple[Tensor, Tensor] = _Leave.apply(out, lse, no_lse, no_out, marker)
    return left


def _is_finite(x: Tensor) -> Tensor:
    """Whether all of the last dim is finite; a tenth of the time of ``x.isfinite().all(-1)`` on a CPU."""
    return (x - x).sum(-1) == 0


def _known_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite: False in graphs and on devices, or if a sum overflows."""
    return all(_torch.is_readable(x) and bool(x.sum().isfinite()) for x in tensors)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, has_key: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(mask)
        marker = q.new_zeros(q.shape[:3])
        if _known_finite(q, k, v):
            no_lse, no_out = marker.new_zeros(2, *marker.shape, dtype=torch.bool)
            ctx.mark_non_differentiable(no_lse, no_out)
            return q, k, v, no_lse, no_out, marker
        is_read = mask.any(1)[:, None]
        good_q, good_k, good_v = (_is_finite(x) for x in (q, k, v))
        bad = torch.stack((~good_k, ~good_k | ~good_v), 1).to(torch.float32)
        read_bad = ((bad @ mask[:, None].to(torch.float32).mT) > 0).repeat_interleave(q.shape[1] // k.shape[1], 2)
        no_lse, no_out = (read_bad | (~good_q & has_key[:, None])[:, None]).unbind(1)
        ctx.mark_non_differentiable(no_lse, no_out)
        keep = (good_q, good_k & is_read, good_v & is_read)
        finite = (torch.where(good[..., None], x, 0) for x, good in zip((q, k, v), keep, strict=True))
        return *finite, no_lse, no_out, marker

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, _: Any, __: Any, rows: Tensor) -> tuple[Any, ...]:
        (mask,) = ctx.saved_tensors
        if _torch.is_readable(rows) and not bool(rows.any()):
            return dq, dk, dv, None, None
        keys = rows.unflatten(1, (dk.shape[1], -1)).sum(2) @ mask.to(rows.dtype) > 0
        nan = float("nan")
        dk, dv = (x.masked_fill(keys[..., None], nan) for x in (dk, dv))
        return dq.masked_fill((rows > 0)[..., None], nan), dk, dv, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, no_lse: Tensor, no_out: Tensor, marker: Tensor
    ) -> tuple[Tensor, Tensor]:
        if _known_finite(out, lse) and not bool(no_out.any()):
            ctx.save_for_backward(no_out, lse > float("-inf"))
            return out, lse
        # Scores of finite numbers can overflow, too.
        is_exact = _is_finite(out) & (lse < float("inf"))
        ctx.save_for_backward(no_out | ~is_exact, lse > float("-inf"))
        nan = float("nan")
        return out.masked_fill(no_out[..., None], nan), lse.masked_fill(no_lse, nan)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        no_out, has_key = ctx.saved_tensors
        if _known_finite(grad_out, grad_lse) and not bool(no_out.any()):
            return grad_out, grad_lse, None, None, torch.zeros_like(grad_lse)
        is_exact = _is_finite(grad_out) & grad_lse.isfinite()
        rows = no_out | (~is_exact & has_key)
        grad_out = torch.where((is_exact & ~no_out)[..., None], grad_out, 0)
        return grad_out, torch.where(is_exact & ~no_out, grad_lse, 0), None, None, rows.to(grad_lse.dtype)
