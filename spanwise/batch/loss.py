"""The loss of a sharded batch, from logits or from hidden states: one mean over the valid tokens of all ranks.

A mean of the ranks' means would weight the tokens of different ranks differently. So the sum over all ranks is divided
by their number of valid tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention import executor
from spanwise.attention.compare import Compare, compare_call, compared, plain, scalar, tells_refusals
from spanwise.attention.rank_plan import check_mesh
from spanwise.batch.token_scores import IGNORE_INDEX, Scoring, check_labels, check_vocabulary, score


@tells_refusals
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
        labels: int64 ``[…]``, the target of each position, shifted as `shard_batch` does; −100 is ignored.
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

    >>> import torch, spanwise
    >>> spanwise.cross_entropy(torch.zeros(1, 3, 8), torch.tensor([[2, -100, 5]]), mesh=None)
    tensor(2.0794)
    """
    _check(labels, num_valid, weights)
    _torch.check_transforms(logits)
    check_labels(labels, "logits", logits)
    check_vocabulary(labels, logits.shape[-1])
    # Not `score`: on a CPU it takes 1.3 to 5 times as long, because torch fuses the softmax of all logits.
    scores = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(labels.shape)
    return _over_ranks("cross_entropy", losses, logits, labels, mesh, num_valid, weights)


@tells_refusals
def linear_cross_entropy(
    hidden: torch.Tensor,
    vocab_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mesh: DeviceMesh | None,
    vocab_mesh: DeviceMesh | None = None,
    num_valid: float | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """`cross_entropy` of ``hidden @ vocab_weight.T + bias``, without the logits of all tokens.

    The logits of one chunk of tokens exist at a time; the backward computes them again. All sums are in float32 at
    least, also under autocast and for bfloat16 inputs.

    Args:
        hidden: ``[…, D]``, any floating dtype.
        vocab_weight: ``[V, D]``.
        labels: as in `cross_entropy`; the loss and gradients of −100 are 0, whatever `hidden` holds there.
        loss_mesh: all axes over which parameter gradients are averaged, as in `cross_entropy`: dp × cp, or cp alone;
            None on one device. Leave the axis of tensor parallelism out.
        vocab_mesh, softcap, bias, chunk: as in `token_logprobs`.
        num_valid, weights: as in `cross_entropy`.

    Returns:
        A scalar, the same on every rank, float32 at least; 0 with gradient 0 if no rank has a valid token.

    Raises:
        ValueError: as `token_logprobs` and `cross_entropy`.
        NotImplementedError: second or forward-mode derivatives, and transforms of `torch.func`.

    >>> import torch, spanwise
    >>> hidden, weight = torch.zeros(1, 3, 4), torch.ones(8, 4)
    >>> spanwise.linear_cross_entropy(hidden, weight, torch.tensor([[2, -100, 5]]), loss_mesh=None)
    tensor(2.0794)
    """
    _check(labels, num_valid, weights)
    name = "linear_cross_entropy"
    caller, amount = name if weights is None else f"{name}, weighted", None if vocab_mesh is None else num_valid
    scoring = Scoring(softcap=softcap, chunk=chunk, mesh=vocab_mesh)
    losses = -score(hidden, labels, vocab_weight, bias, scoring, caller, amount)
    return _over_ranks(name, losses, hidden, labels, loss_mesh, num_valid, weights, {"softcap": plain(softcap)})


def _check(labels: torch.Tensor, num_valid: Any, weights: torch.Tensor | None) -> None:
    """``ValueError`` for a wrong number of tokens, if it can be read without a wait, and for wrong weights."""
    if isinstance(num_valid, torch.Tensor):
        num_valid = num_valid.item() if _torch.is_readable(num_valid) else None
    if num_valid is not None and (isinstance(num_valid, str) or not 0 <= num_valid < math.inf):
        raise ValueError(f"num_valid must be a number of tokens, got {num_valid!r}")
    if num_valid == 0 and _torch.is_readable(labels) and (valid := int((labels != IGNORE_INDEX).sum())):
        raise ValueError(f"num_valid is 0, and this rank has {valid} valid labels: give that of all ranks, or None")
    if weights is not None and weights.requires_grad:
        raise ValueError("weights are constants of the loss, and these require a gradient: use detach()")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights must have the shape of labels, {tuple(labels.shape)}, got {tuple(weights.shape)}")


def _over_ranks(
    name: str, losses: torch.Tensor, x: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh | None,
    num_valid: float | torch.Tensor | None, weights: torch.Tensor | None,
    facts: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The mean of losses over the ranks of `mesh`; compares the call `name` first.

    Args:
        x: logits or hidden states, of which ranks may have different numbers.
        facts: more of what must be equal on all ranks.
    """
    check_mesh(mesh)
    mesh, compare = None if mesh is None or mesh.size() == 1 else mesh, None
    if mesh is not None:  # after the labels were checked: a rank that raises has not made the call
        kind = None if num_valid is None else "a tensor" if isinstance(num_valid, torch.Tensor) else "a number"
        grad = torch.is_grad_enabled() and x.requires_grad
        own = {"dtype": x.dtype, "requires grad": grad, "num_valid": kind, "weighted": weights is not None}
        sizes = ("last dim", x.shape[-1:])
        compare = compare_call(name, own | (facts or {}), mesh, [x], sizes=sizes, amount=num_valid)
    if weights is not None:
        losses = losses * weights.to(losses.dtype)
    total, count = losses.sum(), None
    if num_valid is None:
        valid = labels != IGNORE_INDEX
        count = valid.sum() if weights is None else weights.masked_fill(~valid, 0).sum()
    sums = torch.stack([x.to(torch.float64) for x in (total, count) if x is not None])
    if mesh is not None:
        sums = _SumOverRanks.apply(sums, mesh, compare)
    if isinstance(num_valid, torch.Tensor):
        count = num_valid.to(labels.device, non_blocking=labels.device.type != "cpu")
    else:
        count = sums[1] if num_valid is None else scalar(num_valid, labels.device)
    # Without a valid token the sum is 0, and so is the loss.
    return (sums[0] / count.masked_fill((count == 0) & (sums[0] == 0), 1)).to(total.dtype)


class _SumOverRanks(torch.autograd.Function):
    """Sums over ranks; the backward scales by the mesh size, because reducers average gradients."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, mesh: DeviceMesh, compare: Compare | None) -> torch.Tensor:
        ctx.scale = mesh.size()
        (sums,) = compared((sums,), compare)  # compiled code cannot start the all-reduce before it has compared
        return executor.all_reduce(sums, "sum", mesh, "the loss")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.scale, None, None
