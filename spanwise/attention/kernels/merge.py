"""Merge partial attention results over disjoint key sets into the result over their union.

Each part is ``(out, lse)`` over its own keys; the union's result is the average of the parts weighted by
``exp(lse_i - lse)``, the numerics of ring attention (Liu et al., 2023) and FlashAttention-2's split-K.

A part that is a pair is merged by plain torch operations. Their gradient is autograd's, which keeps every out_i. A
kernel that recomputes its scores in the backward needs no out_i: with P_i = exp(scores_i - lse), lse of the *union*,

    dv_i = P_i^T grad_out,    dscores_i = P_i * (grad_out v_i^T + rows),    rows = grad_lse - rowsum(grad_out * out),

the backward of ring attention: out_i and lse_i cancel. So a part may also be a triple: out, lse, and a token of lse's
shape without memory. Then the tensors sent back along the three are not their gradients. They are, in this order, the
**grad_out, rows and lse of the union**, which the kernel needs. They pass through every merge unchanged, and only the
union's out and lse are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.attention.kernels._checks import lse_dtype

# (out, lse) with their gradients, or (out, lse, token): see the module docstring.
Part = tuple[Tensor, ...]


class Merging:
    """A merge of parts as they come. Of parts with a token, at most two outputs live at a time.

    Args:
        dtype: of the merged output; kernels may give their parts in a wider one.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._pairs: list[Part] = []
        self._union: Part | None = None
        self._dtype = dtype

    def add(self, part: Part) -> None:
        """Add out ``[B, H, T, Dv]``, lse ``[B, H, T]`` (−inf where a row has no key), and maybe a token."""
        if len(part) == 2:
            self._pairs.append(part)
        elif self._union is None:
            self._union = part
        else:
            self._union = _Union.apply(*self._union, *part)

    def result(self) -> tuple[Tensor, Tensor]:
        """out ``[B, H, T, Dv]`` and lse ``[B, H, T]``, differentiable; see `merge`."""
        if self._union is None:
            return _merge_pairs(self._pairs, self._dtype)
        assert not self._pairs, "parts of one merge come from one kernel"
        return _Result.apply(*self._union, self._dtype)


def merge(parts: Sequence[Part], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merge partial results; exact up to rounding, in float32 (float64 stays float64).

    Args:
        parts: one or more, of one kernel: out ``[B, H, T, Dv]``, lse ``[B, H, T]``, −inf where a row has no key, and
            a token if they are from `sdpa_part`.
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
        merging.add(part)
    return merging.result()


def _merge_pairs(parts: Sequence[Part], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0][0].to(dtype), parts[0][1]
    lses = torch.stack([lse for _, lse in parts])
    top = lses.detach().amax(dim=0)
    # In rows without a key exp(-inf - -inf) would be nan, in the value and in the gradient.
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = torch.exp(lses - top)
    total = weights.sum(dim=0)
    empty = total == 0
    safe_total = torch.where(empty, torch.ones_like(total), total)
    weights = weights / safe_total
    out = weights[0].unsqueeze(-1) * parts[0][0]
    for weight, (part, _) in zip(weights[1:], parts[1:], strict=True):
        out = out + weight.unsqueeze(-1) * part
    lse = torch.where(empty, torch.full_like(total, -torch.inf), top + torch.log(safe_total))
    return out.to(dtype), lse


class _Union(torch.autograd.Function):
    """Two parts with tokens as one, out in float32 (float64 for float64)."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, token: Tensor, new_out: Tensor, new_lse: Tensor, new_token: Tensor
    ) -> Part:
        ctx.dtypes = out.dtype, new_out.dtype
        # Where neither has a key, the difference would be nan. A nan in an lse stays.
        weight = torch.where(new_lse == -torch.inf, 0, torch.sigmoid(new_lse - lse)).unsqueeze(-1)
        wide = lse_dtype(out)
        merged = torch.lerp(out.to(wide), new_out.to(wide), weight.to(wide))
        return merged, torch.logaddexp(lse, new_lse), lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, rows: Tensor, lse: Tensor) -> Part:
        before, new = (grad_out.to(dtype) for dtype in ctx.dtypes)
        return before, rows, lse, new, rows, lse


class _Result(torch.autograd.Function):
    """Out and lse of the last union; turns their gradients into grad_out, rows and lse for the parts."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, token: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.dtype = out.dtype
        # Do not return the inputs themselves. Selective checkpoints do not count detach, unlike other aliases.
        out, lse = out.detach().to(dtype), lse.detach()
        ctx.save_for_backward(out, lse)
        return out, lse.to(lse_dtype(out), copy=True)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
        out, lse = ctx.saved_tensors
        rows = torch.where(lse == -torch.inf, 0, grad_lse)
        rows = rows - (grad_out.to(rows.dtype) * out.to(rows.dtype)).sum(-1)
        return grad_out.to(ctx.dtype), rows, lse, None
