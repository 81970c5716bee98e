"""Cross-entropy from hidden states, without the logits of all tokens at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.compare import compared, plain, tells_refusals
from spanwise.batch import fused
from spanwise.batch.loss import IGNORE_INDEX, check_count, check_weights, compare_loss, counted, over_ranks
from spanwise.batch.token_scores import Scoring, checked, score


@tells_refusals("loss_mesh", "vocab_mesh")
def linear_cross_entropy(
    hidden: torch.Tensor,
    vocab_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    loss_mesh: DeviceMesh | None,
    vocab_mesh: DeviceMesh | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_valid: float | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    chunk: int | None = None,
    kernel: Literal["auto", "chunked", "liger", "cce"] = "auto",
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ vocab_weight.T + bias``, without the logits of all tokens.

    The logits of one chunk of tokens exist at a time; the backward computes them again. Products, sums and softmax are
    in float32 at least, also under autocast and for bfloat16 inputs. So is the weight's gradient, summed over the
    chunks in their order.

    Args:
        hidden: ``[…, D]``, any floating dtype.
        vocab_weight: ``[V, D]``.
        labels: int64 ``[…]``; −100 is ignored: its loss and gradients are 0, whatever `hidden` holds there.
        loss_mesh: all axes over which parameter gradients are averaged, as in `cross_entropy`: dp × cp, or cp alone;
            None on one device. Leave the axis of tensor parallelism out.
        vocab_mesh, softcap, bias, chunk: as in `token_logprobs`.
        reduction: ``"mean"`` over the valid tokens of all ranks of `loss_mesh`, with the gradient of `cross_entropy`.
            ``"sum"`` over these tokens: the gradient is scaled so that averaging parameter gradients over `loss_mesh`
            gives the gradient of that sum. ``"none"``: each token's loss ``[…]``, 0 where ignored, with its own
            gradient, not scaled; the ranks of `loss_mesh` only compare their calls.
        num_valid: for "mean", as in `cross_entropy`.
        weights: ``[…]``, of each label, as in `cross_entropy`; "sum" and "none" multiply by them too.
        kernel: ``"chunked"`` is spanwise's own. ``"liger"`` and ``"cce"`` are fused kernels of Liger-Kernel and
            cut-cross-entropy, for a whole vocabulary on a CUDA device; Liger's cannot do ``"none"``. ``"auto"`` takes
            one of them where it is installed and can do what is asked, else ``"chunked"``. A named one never falls
            back; a rank without tokens needs no kernel.

    Returns:
        A scalar, the same on every rank, or ``[…]`` for "none"; float32 at least. Without any valid token 0, with
        gradient 0.

    Raises:
        ValueError: as `token_logprobs`; a `num_valid` that is not a number of tokens, is 0 with valid labels, or has no
            use; a kernel that cannot do what is asked.
        ImportError: a named kernel is not installed.
        NotImplementedError: second or forward-mode derivatives, and transforms of `torch.func`.
        spanwise.MismatchError: ranks of `vocab_mesh`, or of `loss_mesh` as in `cross_entropy`, make different calls.
        spanwise.ExchangeError: a rank is gone or too late.

    >>> import torch, spanwise
    >>> hidden, weight = torch.zeros(1, 3, 4), torch.ones(8, 4)
    >>> spanwise.linear_cross_entropy(hidden, weight, torch.tensor([[2, -100, 5]]), loss_mesh=None)
    tensor(2.0794)
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    if num_valid is not None and reduction != "mean":
        raise ValueError(f'num_valid divides the sum for reduction="mean"; got {num_valid} for {reduction!r}')
    check_count(num_valid, labels)
    scoring = Scoring(softcap=softcap, chunk=chunk, mesh=vocab_mesh)
    tokens = checked(hidden, labels, vocab_weight, bias, scoring)
    check_weights(weights, labels)
    inner = reduction if weights is None else "none"
    library = fused.resolve(kernel, tokens, inner, vocab_mesh)
    name = f'linear_cross_entropy(reduction="{reduction}")'
    if library is None:
        caller = f"{name}{'' if weights is None else ', weighted'}"
        losses = -score(tokens, scoring, caller, num_valid if vocab_mesh is not None else None)[0]
    else:
        losses = fused.losses(library, tokens, softcap, inner)
    if weights is not None:
        losses = losses * weights.to(losses.dtype)
    # After the labels were checked: a rank that raises has not made the call.
    compare = compare_loss(name, hidden, num_valid, weights, loss_mesh, {"softcap": plain(softcap)})
    if reduction == "none":  # no sum of which the comparison is a part
        (labels,) = compared((labels,), compare)
        return losses.masked_fill(labels == IGNORE_INDEX, 0)
    count = None if reduction == "sum" else counted(labels, num_valid, weights)
    # The sum of one number, where a fused kernel has summed.
    return over_ranks(losses.sum(), count, reduction == "mean" and num_valid is None, loss_mesh, compare)
