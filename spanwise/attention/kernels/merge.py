"""Merge partial attention results over disjoint key sets into the result over their union.

Each part is ``(out, lse)`` over its own keys; the union's result is the average of the parts weighted by
``exp(lse_i - lse)``, the numerics of ring attention (Liu et al., 2023) and FlashAttention-2's split-K.

Parts that are pairs are merged by plain torch operations whose gradient is autograd's, which keeps every out_i. The
backward of a kernel that recomputes its scores needs none of them: with P_i = exp(scores_i - lse), lse of the *union*,

    dv_i = P_i^T grad_out,    dscores_i = P_i * (grad_out v_i^T + rows),    rows = grad_lse - rowsum(grad_out * out),

the backward of ring attention: out_i and lse_i cancel. So a part may be a triple, out, lse and a token of lse's shape
that has no memory, and then what goes back along the three is not their gradients but, in this order, what the kernel
needs: **grad_out, rows and lse of the union**. It passes through every merge unchanged, and nothing is kept but the
union's out and lse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# (out, lse) with their gradients, or (out, lse, token): see the module docstring.
Part = tuple[torch.Tensor, ...]


class Merging:
    """A merge under way. Of parts with a token, two outputs live at a time, whatever the number of parts."""

    def __init__(self) -> None:
        self._pairs: list[Part] = []
        self._union: Part | None = None
        self._dtype: torch.dtype | None = None

    def add(self, part: Part) -> None:
        """Add out ``[B, H, T, Dv]``, lse ``[B, H, T]`` (−inf where a row has no key), and maybe a token."""
        if len(part) == 2:
            self._pairs.append(part)
        elif self._union is None:
            self._union, self._dtype = part, part[0].dtype
        else:
            self._union = _Union.apply(*self._union, *part)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out ``[B, H, T, Dv]`` in the dtype of the first part and lse ``[B, H, T]``, differentiable; see `merge`."""
        if self._union is None:
            return _merge_pairs(self._pairs)
        assert not self._pairs, "parts of one merge come from one kernel"
        return _Result.apply(*self._union, self._dtype)


def merge(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results; exact up to rounding, in float32 (float64 stays float64).

    Args:
        parts: one or more, of one kernel: out ``[B, H, T, Dv]``, lse ``[B, H, T]``, −inf where a row has no key, and
            a token if they are from `sdpa_part`.

    Returns:
        out ``[B, H, T, Dv]`` in the dtype of the first part, lse ``[B, H, T]``. A row without a key in any part keeps
        out 0 and lse −inf, and passes no gradient on.
    """
    merging = Merging()
    for part in parts:
        merging.add(part)
    return merging.result()


def _merge_pairs(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(parts) == 1:
        return parts[0][0], parts[0][1]
    lses = torch.stack([lse for _, lse in parts])
    top = lses.detach().amax(dim=0)
    # Rows without any key: exp(-inf - -inf) would be nan, in the value and in the gradient.
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
    return out.to(parts[0][0].dtype), lse


class _Union(torch.autograd.Function):
    """Two parts with tokens as one, out in the dtype of lse."""

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        lse: torch.Tensor,
        token: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        new_token: torch.Tensor,
    ) -> Part:
        ctx.dtypes = out.dtype, new_out.dtype
        # Where neither has a key the difference would be nan; a nan that is in an lse stays.
        weight = torch.where(new_lse == -torch.inf, 0, torch.sigmoid(new_lse - lse)).unsqueeze(-1)
        merged = torch.lerp(out.to(lse.dtype), new_out.to(lse.dtype), weight)
        return merged, torch.logaddexp(lse, new_lse), lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor) -> Part:
        before, new = (grad_out.to(dtype) for dtype in ctx.dtypes)
        return before, rows, lse, new, rows, lse


class _Result(torch.autograd.Function):
    """Out and lse of the last union, whose true gradients are turned into what the parts are sent."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, lse: torch.Tensor, token: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype = out.dtype
        # What is returned must not be what was given. detach is the one alias that selective checkpoints do not count.
        out, lse = out.detach().to(dtype), lse.detach()
        ctx.save_for_backward(out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[Any, ...]:
        out, lse = ctx.saved_tensors
        rows = torch.where(lse == -torch.inf, 0, grad_lse)
        rows = rows - (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        return grad_out.to(ctx.dtype), rows, lse, None
