"""What attention refuses besides shapes: transforms, senseless scales, wrong sinks; and sizes that it fixes."""

from __future__ import annotations

import math
import operator

import torch

from spanwise import _torch
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.masks.checks import check_finite

_NO_TRANSFORM = (
    "context parallelism does not run inside torch.func (vmap, grad, vjp, jvp, jacrev, …): its collectives and kernels "
    "have no rules for them; use the batch dim in place of vmap, and torch.autograd.grad or backward() in place of "
    "torch.func.grad"
)


def check_transforms(*tensors: torch.Tensor) -> None:
    """``NotImplementedError`` inside a transform of `torch.func`, or for a tensor with a forward-mode tangent.

    Compiled code sees only vmap here; other transforms meet what Dynamo refuses.
    """
    if torch.compiler.is_compiling():
        if any([_torch.is_batched(x) for x in tensors]):
            raise NotImplementedError(_NO_TRANSFORM)
        return
    if _torch.inside_transform():
        raise NotImplementedError(_NO_TRANSFORM)
    if any(_torch.has_tangent(x) for x in tensors):
        raise NotImplementedError(
            "context parallelism has no forward-mode derivatives; use torch.autograd.grad or backward()"
        )


def fix_sizes(*sizes: int) -> None:
    """Make heads and feature dims constants of compiled code, which has symbols for them under ``dynamic=True``."""
    if torch.compiler.is_compiling():
        for size in sizes:
            operator.index(size)


def check_numbers(options: AttentionOptions) -> None:
    """``ValueError`` for a scale or softcap that is not a usable number, or for options that exclude each other."""
    if options.scale is not None:
        check_finite(options.scale, "scale", like="; None is 1 / sqrt(head_dim)")
    if options.softcap is not None and options.score_mod is not None:
        raise ValueError("softcap and score_mod cannot be combined; apply the cap inside the score_mod")
    if options.softcap is not None:
        check_finite(options.softcap, "softcap", positive=True)


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """``ValueError`` unless `sinks` is None, ``[Hq]`` or ``[Hq, n]``."""
    if sinks is not None and (sinks.dim() not in (1, 2) or sinks.shape[0] != num_heads):
        raise ValueError(
            f"sinks must be one logit a query head, [{num_heads}], or several, [{num_heads}, n], got "
            f"{tuple(sinks.shape)}"
        )


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``[B, H, T, Dv]`` and lse ``[B, H, T]`` after sinks ``[H]`` or ``[H, n]`` join each row's denominator."""
    sinks = sinks.to(lse.dtype)
    if sinks.dim() == 2:
        none = (sinks == -math.inf).all(-1)  # there logsumexp has the gradient nan
        sinks = sinks.masked_fill(none.unsqueeze(-1), 0).logsumexp(-1).masked_fill(none, -math.inf)
    sink = sinks.view(1, -1, 1)
    # Rows without a key keep output 0, also for a sink of -inf.
    # Not torch.sigmoid: its gradient has 1 - kept, which is all rounding error where the sink weighs little.
    kept = torch.exp(torch.nn.functional.logsigmoid(torch.where(lse == -math.inf, lse, lse - sink)))
    return (out * kept.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink.expand_as(lse))
