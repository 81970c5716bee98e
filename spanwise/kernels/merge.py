"""Merge partial attention results over disjoint key sets into the result over their union.

Each part is ``(out, lse)`` over its own keys; the union's result is the average of the parts weighted by
``exp(lse_i - lse)``, the numerics of ring attention (Liu et al., 2023) and FlashAttention-2's split-K. Plain torch
operations, so that the gradient of the merge is autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial results; exact up to rounding, in float32 (float64 stays float64).

    Args:
        parts: one or more pairs of out ``[B, H, T, Dv]`` and lse ``[B, H, T]``; lse is −inf where a row has no key.

    Returns:
        out ``[B, H, T, Dv]`` in the dtype of the first part, lse ``[B, H, T]``. A row without a key in any part keeps
        out 0 and lse −inf, and passes no gradient on.
    """
    if len(parts) == 1:
        return parts[0]
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
