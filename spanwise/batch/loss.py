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
from spanwise.attention import failure
from spanwise.attention.compare import Compare, compare_call, compared, scalar, tells_refusals

IGNORE_INDEX = -100


class _OverRanks(torch.autograd.Function):
    """Sum over ranks divided by their count; the backward scales by the mesh size, because reducers average gradients.

    The comparison of compiled code returns what the all-reduces take, so that they cannot start before it.
    """

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, count: torch.Tensor | None, local: bool, mesh: DeviceMesh | None,
        compare: Compare | None,
    ) -> torch.Tensor:  # fmt: skip
        if local and count is not None:
            total, count = compared((total, count), compare)
            count = count if mesh is None else failure.all_reduce(count, "sum", mesh, "the token count")
        else:
            (total,) = compared((total,), compare)
        total = total.clone() if mesh is None else failure.all_reduce(total, "sum", mesh, "the loss")
        ctx.scale = 1 if mesh is None else mesh.size()
        if count is None:
            return total
        count = count.masked_fill((count == 0) & (total == 0), 1).to(total.dtype)
        ctx.scale = ctx.scale / count
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad * ctx.scale, None, None, None, None


def over_ranks(
    total: torch.Tensor, count: torch.Tensor | None, local: bool, mesh: DeviceMesh | None, compare: Compare | None
) -> torch.Tensor:
    """`total` summed over the ranks of `mesh`, divided by `count`.

    Averaging parameter gradients over `mesh` gives the gradient of the result.

    Args:
        count: from `counted`; None divides by nothing.
        local: the count is this rank's, to be summed too.
        compare: from `compare_loss`.
    """
    return _OverRanks.apply(total, count, local, mesh, compare)


def counted(labels: torch.Tensor, num_valid: float | torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
    """`num_valid` on the labels' device; without it this rank's valid tokens, or the sum of their weights."""
    if isinstance(num_valid, torch.Tensor):
        return num_valid.to(labels.device, non_blocking=labels.device.type != "cpu")
    if num_valid is not None:
        return scalar(num_valid, labels.device)
    valid = labels != IGNORE_INDEX
    return valid.sum() if weights is None else weights.masked_fill(~valid, 0).sum()


def check_count(num_valid: Any, labels: torch.Tensor) -> None:
    """``ValueError`` for a number that is not a number of tokens, or 0 with valid labels.

    A tensor is read on the CPU alone, labels too; elsewhere 0 makes the loss infinite.
    """
    if isinstance(num_valid, torch.Tensor):
        num_valid = num_valid.item() if _torch.is_readable(num_valid) else None
    if num_valid is None:
        return
    if isinstance(num_valid, str) or not 0 <= num_valid < math.inf:
        raise ValueError(f"num_valid must be a number of tokens, got {num_valid!r}")
    if num_valid == 0 and _torch.is_readable(labels) and (valid := int((labels != IGNORE_INDEX).sum())):
        raise ValueError(
            f"num_valid is 0, and this rank has {valid} valid labels: give the number of all ranks, or None to count"
        )


def check_labels(labels: torch.Tensor, vocab: torch.Tensor | int | None = None) -> None:
    """``ValueError`` for labels that are no token ids or, on the CPU, outside a vocabulary.

    Elsewhere the host would wait for the device.
    """
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if vocab is None or torch.compiler.is_compiling() or labels.device.type != "cpu" or _torch.is_fake(labels):
        return
    wrong = ((labels < 0) | (labels >= vocab)) & (labels != IGNORE_INDEX)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"labels must be {IGNORE_INDEX} or in [0, {vocab}), the vocabulary; labels{at} is {labels[tuple(at)]}"
        )


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
    options: dict[str, Any] | None = None,
) -> Compare | None:
    """Compare a loss across the ranks of `mesh` before its all-reduces.

    Args:
        x: logits or hidden states, of which ranks may have different numbers.
        options: of the loss, which must be equal.

    Returns:
        an argument for `global_mean`, which compares in compiled code.
    """
    if mesh is None or mesh.size() == 1:
        return None
    kind = None if num_valid is None else "a tensor" if isinstance(num_valid, torch.Tensor) else "a number"
    grad = torch.is_grad_enabled() and x.requires_grad
    facts = {"dtype": x.dtype, "requires grad": grad, "num_valid": kind, "weighted": weights is not None}
    sizes = ("last dim", x.shape[-1:])
    return compare_call(name, facts | (options or {}), mesh, [x], sizes=sizes, amount=num_valid)


@tells_refusals("mesh")
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
        ValueError: shapes that do not match, labels that are not int64 or, on the CPU, outside the vocabulary, weights
            with a gradient, a `num_valid` that is not a number of tokens, or is 0 with valid labels.
        spanwise.MismatchError: ranks make different calls, or give other numbers of tokens.
        spanwise.ExchangeError: a rank is gone or too late.

    >>> import torch, spanwise
    >>> spanwise.cross_entropy(torch.zeros(1, 3, 8), torch.tensor([[2, -100, 5]]), mesh=None)
    tensor(2.0794)
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be [*labels.shape, vocab], got logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    check_labels(labels, logits.shape[-1])
    scores = logits.flatten(0, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    check_weights(weights, labels)
    check_count(num_valid, labels)
    compare = compare_loss("cross_entropy", logits, num_valid, weights, mesh)
    losses = torch.nn.functional.cross_entropy(
        scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum" if weights is None else "none"
    )
    total = losses if weights is None else (losses * weights.flatten().to(losses.dtype)).sum()
    return over_ranks(total, counted(labels, num_valid, weights), num_valid is None, mesh, compare)
