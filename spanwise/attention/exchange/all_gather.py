"""All-gather of per-token tensors over the cp axis, with a reduce-scatter as its backward.

Start and wait are two autograd functions, so that a caller can compute between them, forward and backward alike:

    forward    start gather | local attention | wait | remote attention
    backward   remote attention | start reduce-scatter | local attention | wait

Autograd runs nodes that are ready in the reverse order of their creation, which is what puts the local backward
between the two halves of the reduce-scatter.
"""

# R rows (batch row, token) a rank, padded to the same number on all ranks;  P ranks;  F features of a row

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned


class Pending(NamedTuple):
    """A gather under way. ``data_PR_F`` is not readable before :func:`wait`."""

    data_PR_F: torch.Tensor
    anchor_R_F: torch.Tensor


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_R_F: torch.Tensor, num_ranks: int, name: str, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtype, ctx.name, ctx.label = x_R_F.dtype, name, label
        data = failure.start(f"all-gather of {label}", name, _torch.start_all_gather, x_R_F, num_ranks, name)
        ctx.mark_non_differentiable(data)
        return data, anchor(x_R_F.shape, x_R_F)

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad_R_F = failure.wait(grad_pending, f"reduce-scatter of gradients, {ctx.label}", ctx.name)
        return grad_R_F.to(ctx.dtype), None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, data_PR_F: torch.Tensor, anchor_R_F: torch.Tensor, num_ranks: int, name: str, label: str
    ) -> torch.Tensor:
        ctx.num_ranks, ctx.name, ctx.label, ctx.sum_dtype = num_ranks, name, label, anchor_R_F.dtype
        return failure.wait(data_PR_F, f"all-gather of {label}", name)

    @staticmethod
    def backward(ctx: Any, grad_PR_F: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        check_first_order()
        # Summed in float32 whatever the inputs are: a bf16 sum over many ranks drifts (ring-flash-attention #42).
        what = f"reduce-scatter of gradients, {ctx.label}"
        sent_PR_F = grad_PR_F.to(ctx.sum_dtype)
        pending = failure.start(what, ctx.name, _torch.start_reduce_scatter, sent_PR_F, ctx.num_ranks, ctx.name)
        return None, returned(pending), None, None, None


def start(x_R_F: torch.Tensor, num_ranks: int, name: str, label: str) -> Pending:
    """Start gathering ``x_R_F``; every rank passes the same number of rows.

    Args:
        name: of the group.
        label: what is exchanged, in words, for errors.
    """
    return Pending(*_Start.apply(x_R_F, num_ranks, name, label))


def wait(pending: Pending, num_ranks: int, name: str, label: str) -> torch.Tensor:
    """Wait for the gather; returns rank 0's rows, then rank 1's, … as ``[P * R, F]``."""
    return _Wait.apply(pending.data_PR_F, pending.anchor_R_F, num_ranks, name, label)


def pad_tokens(x_BTF: torch.Tensor, length: int) -> torch.Tensor:
    """`x_BTF` with zero tokens at the end, up to `length` tokens: every rank has to send the same number of rows."""
    return torch.nn.functional.pad(x_BTF, (0, 0, 0, length - x_BTF.shape[1]))
