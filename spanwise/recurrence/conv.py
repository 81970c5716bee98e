"""causal_conv: a short causal convolution along a sharded sequence. Only the rows before each run travel, its halo."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spanwise.recurrence.route import RecurrenceRoute


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
        spanwise.MismatchError: ranks make different calls.
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
    """
    from spanwise.batch.sharding import shard, unshard

    weight = weight.flatten(1)
    width = weight.shape[1]
    flat = x.dim() == 2
    x_BTC = x.unsqueeze(0) if flat else x
    full = unshard(route.local, None, x_BTC)
    ids = route.ids.unsqueeze(-1)
    out = torch.zeros_like(full)
    for d in range(min(width, full.shape[1])):
        same = (ids[:, d:] == ids[:, : ids.shape[1] - d]) & (ids[:, d:] >= 0)
        part = torch.where(same, full[:, : full.shape[1] - d] * weight[:, width - 1 - d], 0.0)
        out = out + F.pad(part, (0, 0, d, 0))
    if bias is not None:
        out = torch.where(ids >= 0, out + bias, 0.0)
    if activation is not None:
        out = F.silu(out)
    result: torch.Tensor = shard(route.local, None, out.to(x.dtype))
    return result.squeeze(0) if flat else result
