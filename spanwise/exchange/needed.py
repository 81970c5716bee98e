"""Only the K/V rows that the mask reads, by an uneven all-to-all; the gradients come home the same way.

Start and wait are two autograd functions, as in `all_gather`, so that local attention stands between them in both
directions. What each pair of ranks exchanges follows from the plan, which every rank has whole: no sizes travel.
"""

# R rows of a shard, S rows sent (a row may go to several ranks), N rows received, F features of a row

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from spanwise import _compat


@dataclasses.dataclass(frozen=True)
class Route:
    """Which rows one rank sends and receives in one exchange; a pytree of tensors.

    Attributes:
        send: int64 ``[S]``, rows of the shard, those for rank 0 first, then those for rank 1, …
        order: int64 ``[keys]``, which of the N received rows (rank 0's first) each key of the stage is. N itself, one
            past the last, is a row of zeros, for spare keys that no span reads.
        send_sizes, recv_sizes: for each rank a tensor ``[rows, 0]``; only its shape means something.
    """

    send: torch.Tensor
    order: torch.Tensor
    send_sizes: tuple[torch.Tensor, ...]
    recv_sizes: tuple[torch.Tensor, ...]


_compat.register_pytree_dataclass(Route)


class Pending(NamedTuple):
    """An exchange under way: see `all_gather.Pending`. The anchor has the shape of the rows sent."""

    data_NF: torch.Tensor
    anchor_SF: torch.Tensor


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RF: torch.Tensor, send: torch.Tensor, send_sizes: list[int], recv_sizes: list[int], name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(send)
        ctx.num_rows, ctx.dtype = x_RF.shape[0], x_RF.dtype
        sent_SF = x_RF.index_select(0, send)
        data = _compat.start_all_to_all(sent_SF, recv_sizes, send_sizes, name)
        sum_dtype = torch.promote_types(x_RF.dtype, torch.float32)
        anchor = torch.zeros((), dtype=sum_dtype, device=x_RF.device).expand(sent_SF.shape)
        ctx.mark_non_differentiable(data)
        return data, anchor

    @staticmethod
    def backward(ctx: Any, _: Any, grad_pending: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (send,) = ctx.saved_tensors
        grad_SF = _compat.wait(grad_pending)
        # A row that went to several ranks gets several gradients: summed in float32, cast once.
        total = grad_SF.new_zeros(ctx.num_rows, grad_SF.shape[1]).index_add_(0, send, grad_SF)
        return total.to(ctx.dtype), None, None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        data_NF: torch.Tensor,
        anchor_SF: torch.Tensor,
        send_sizes: list[int],
        recv_sizes: list[int],
        name: str,
    ) -> torch.Tensor:
        ctx.send_sizes, ctx.recv_sizes, ctx.name, ctx.sum_dtype = send_sizes, recv_sizes, name, anchor_SF.dtype
        return _compat.wait(data_NF)

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        pending = _compat.start_all_to_all(grad_NF.to(ctx.sum_dtype), ctx.send_sizes, ctx.recv_sizes, ctx.name)
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            _compat.wait(pending)  # anomaly mode looks for nan in what a backward returns, so reads it
        return None, pending, None, None, None


def _sizes(sizes: tuple[torch.Tensor, ...]) -> list[int]:
    return [x.shape[0] for x in sizes]


def start(x_RF: torch.Tensor, route: Route, name: str) -> Pending:
    """Start sending the rows of `x_RF` that other ranks read."""
    return Pending(*_Start.apply(x_RF, route.send, _sizes(route.send_sizes), _sizes(route.recv_sizes), name))


def wait(pending: Pending, route: Route, name: str) -> torch.Tensor:
    """Wait for the rows; returns the stage's keys in order, ``[keys, F]``."""
    arrived_NF = _Wait.apply(*pending, _sizes(route.send_sizes), _sizes(route.recv_sizes), name)
    return torch.nn.functional.pad(arrived_NF, (0, 0, 0, 1)).index_select(0, route.order)
