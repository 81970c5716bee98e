"""The loss of a sharded batch: one mean over the valid tokens of all ranks.

A mean of the ranks' means would weight the tokens of different ranks differently. So the sum over all ranks is divided
by their number of valid tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange.expectation import Call
from spanwise.attention.rank_plan import mesh_ranks

IGNORE_INDEX = -100
_COMPARED = ("dtype", "requires grad", "num_valid", "weighted")


class _GlobalMean(torch.autograd.Function):
    """Sum over ranks divided by `count`; the backward scales by the mesh size, because reducers average gradients."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor | None, mesh: DeviceMesh | None) -> torch.Tensor:
        size = 1 if mesh is None else mesh.size()
        ctx.scale = size if count is None else size / count
        total = total.clone() if mesh is None else failure.all_reduce(total, "sum", mesh, "the loss")
        return total if count is None else total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.scale, None, None


def global_sum(total: torch.Tensor, count: torch.Tensor | None, mesh: DeviceMesh | None) -> torch.Tensor:
    """`total` summed over the ranks of `mesh` and divided by `count`, if that is given.

    Averaging parameter gradients over `mesh` gives the gradient of the result.
    """
    return _GlobalMean.apply(total, None if count is None else count.masked_fill(count == 0, 1).to(total.dtype), mesh)


def check_count(num_valid: float | torch.Tensor | None) -> None:
    """``ValueError`` for a number that is not a number of tokens; a tensor is not read."""
    if num_valid is None or isinstance(num_valid, torch.Tensor):
        return
    if not (math.isfinite(num_valid) and num_valid >= 0):
        raise ValueError(f"num_valid must be a number of tokens, got {num_valid}")


def check_weights(weights: torch.Tensor | None, labels: torch.Tensor) -> None:
    """``ValueError`` for weights of another shape, or with a gradient."""
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights must have the shape of labels, got {tuple(weights.shape)} and labels {tuple(labels.shape)}"
        )
    if weights is not None and weights.requires_grad:
        raise ValueError("weights are constants of the loss, got a tensor that requires a gradient; use detach()")


def compare_loss(
    name: str,
    x: torch.Tensor,
    num_valid: float | torch.Tensor | None,
    weights: torch.Tensor | None,
    mesh: DeviceMesh | None,
) -> None:
    """Compare a loss across the ranks of `mesh` before its all-reduces; not in compiled code.

    They are small and look alike: those of two calls, or with a count of the rank's own, would add up without an error.

    Args:
        x: logits or hidden states, of which ranks may have different numbers.
    """
    if mesh is None or mesh.size() == 1 or torch.compiler.is_compiling() or _torch.is_fake(x):
        return
    kind = None if num_valid is None else "a tensor" if isinstance(num_valid, torch.Tensor) else "a number"
    values = (x.dtype, torch.is_grad_enabled() and x.requires_grad, kind, weights is not None)
    amount = float(num_valid) if kind == "a number" else None  # type: ignore[arg-type]
    failure.compare(Call(b"", name, _COMPARED, values, amount), *mesh_ranks(mesh))


def valid_tokens(
    labels: torch.Tensor,
    num_valid: float | torch.Tensor | None,
    mesh: DeviceMesh | None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`num_valid` on the device of `labels`; without it the valid tokens, or their weights, of all ranks of `mesh`."""
    if num_valid is None:
        valid = labels != IGNORE_INDEX
        count = valid.sum() if weights is None else weights.masked_fill(~valid, 0).sum()
        return count if mesh is None else failure.all_reduce(count, "sum", mesh, "the token count")
    if isinstance(num_valid, torch.Tensor):
        return num_valid.to(labels.device, non_blocking=labels.device.type != "cpu")
    # `full` writes on the device; `as_tensor` would copy, and the host would wait.
    return torch.full((), num_valid, device=labels.device)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    mesh: DeviceMesh | None,
    *,
    num_valid: float | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy over the valid tokens of all ranks of `mesh`; the same value on every rank.

    Its gradient is scaled so that averaging parameter gradients over `mesh`, as FSDP2 and DDP do, gives the gradient of
    that mean. Call it on every rank.

    Args:
        logits: ``[…, vocab]``, any floating dtype; computed in float32 at least.
        labels: int64 ``[…]``; −100 is ignored.
        mesh: all axes over which parameter gradients are averaged: dp × cp, or cp alone; None on one device.
        num_valid: valid tokens of all ranks and all micro-batches, for gradient accumulation: the sum of the
            micro-batches' losses is then the mean over all of them. Default: counted over `mesh`.
        weights: ``[…]``, of each label, without a gradient: the mean is the weighted sum over the sum of the weights of
            valid tokens, or over `num_valid`; give that where weights may be negative.

    Returns:
        A scalar, float32 at least; 0 with gradient 0 if no rank has a valid token.

    Raises:
        ValueError: shapes that do not match, weights with a gradient, or a `num_valid` that is not a number of tokens.
        spanwise.MismatchError: ranks make different calls, or give other numbers of tokens; not in compiled code.
        spanwise.ExchangeError: a rank is gone or too late.

    >>> import torch, spanwise
    >>> spanwise.cross_entropy(torch.zeros(1, 3, 8), torch.tensor([[2, -100, 5]]), mesh=None)
    tensor(2.0794)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be [*labels.shape, vocab], got logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    scores = logits.flatten(0, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    check_weights(weights, labels)
    check_count(num_valid)
    compare_loss("cross_entropy", logits, num_valid, weights, mesh)
    losses = torch.nn.functional.cross_entropy(
        scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum" if weights is None else "none"
    )
    total = losses if weights is None else (losses * weights.flatten().to(losses.dtype)).sum()
    return global_sum(total, valid_tokens(labels, num_valid, mesh, weights), mesh)
