"""Only the K/V rows that the mask reads, by uneven all-to-alls; the gradients come home the same way.

The rows travel in one or several pieces. All pieces are started before the caller computes anything, and waited for one
by one, so that each is computed on while the next ones travel; the backward is the mirror image:

    forward    start 1 … n | local attention | wait 1 | attention 1 | … | wait n | attention n
    backward   attention n | start n | attention n-1 | start n-1 | … | local attention | wait n … 1, sum

Autograd runs nodes that are ready in the reverse order of their creation, which is what puts the local backward before
the waits. What each pair of ranks exchanges follows from the plan, which every rank has whole: no sizes travel.
"""

# R rows of a shard, S rows sent (a row may go to several ranks), N rows received, F features of a row

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned


@dataclasses.dataclass(frozen=True)
class Route:
    """Which rows one rank sends and receives in one piece; a pytree of tensors.

    Attributes:
        send: int64 ``[S]``, rows of the shard, those for rank 0 first, then those for rank 1, …
        order: int64 ``[keys]``, which of the N received rows (rank 0's first) each key of the stage is.
        send_sizes, recv_sizes: for each rank a tensor ``[rows, 0]``; only its shape means something.
        spare: whether `order` may also hold N, one past the last: a row of zeros, for spare keys that no span reads.
    """

    send: torch.Tensor
    order: torch.Tensor
    send_sizes: tuple[torch.Tensor, ...]
    recv_sizes: tuple[torch.Tensor, ...]
    spare: bool

    @property
    def sizes(self) -> list[int]:
        """Rows sent to rank 0, 1, …, then rows received from them."""
        return [x.shape[0] for x in (*self.send_sizes, *self.recv_sizes)]


_torch.register_pytree_dataclass(Route, static=("spare",))


class Pending(NamedTuple):
    """A piece under way. ``data_NF`` is not readable before :func:`wait`; the anchor has the shape of the rows sent."""

    data_NF: torch.Tensor
    anchor_SF: torch.Tensor


class _Start(torch.autograd.Function):
    """Starts all pieces; its backward waits for the gradients of all.

    Its arguments: x_RF, sizes, name, label, and the rows to send of each piece.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        # Named, two pieces would be as many arguments as names, and torch.compile without gradients would pass no ctx.
        x_RF, sizes, name, label, *sends = args
        ctx.save_for_backward(*sends)
        ctx.num_rows, ctx.dtype, ctx.name, ctx.label = x_RF.shape[0], x_RF.dtype, name, label
        num_ranks = len(sizes) // (2 * len(sends))
        data, anchors = [], []
        for i, send in enumerate(sends):
            sent_SF = x_RF.index_select(0, send)
            send_sizes, recv_sizes = _halves(sizes[2 * num_ranks * i : 2 * num_ranks * (i + 1)])
            what = f"all-to-all of {label}, piece {i + 1} of {len(sends)}"
            data.append(failure.start(what, name, _torch.start_all_to_all, sent_SF, recv_sizes, send_sizes, name))
            anchors.append(anchor(sent_SF.shape, x_RF))
        ctx.mark_non_differentiable(*data)
        return (*data, *anchors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        sends = ctx.saved_tensors
        pending = grads[len(sends) :]
        # A row that went to several ranks gets several gradients: summed in float32 at least, cast once.
        total = pending[0].new_zeros(ctx.num_rows, pending[0].shape[1])
        for send, grad_SF in zip(reversed(sends), reversed(pending), strict=True):  # in the order of their departure
            total.index_add_(0, send, failure.wait(grad_SF, f"all-to-all of gradients, {ctx.label}", ctx.name))
        return total.to(ctx.dtype), None, None, None, *(None for _ in sends)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, data_NF: torch.Tensor, anchor_SF: torch.Tensor, sizes: list[int], name: str, label: str
    ) -> torch.Tensor:
        ctx.sizes, ctx.name, ctx.label, ctx.sum_dtype = sizes, name, label, anchor_SF.dtype
        return failure.wait(data_NF, f"all-to-all of {label}", name)

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        check_first_order()
        send_sizes, recv_sizes = _halves(ctx.sizes)
        what = f"all-to-all of gradients, {ctx.label}"
        sent_NF = grad_NF.to(ctx.sum_dtype)
        pending = failure.start(what, ctx.name, _torch.start_all_to_all, sent_NF, send_sizes, recv_sizes, ctx.name)
        return None, returned(pending), None, None, None


def _halves(sizes: list[int]) -> tuple[list[int], list[int]]:
    return sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]


def start(x_RF: torch.Tensor, routes: Sequence[Route], name: str, label: str) -> list[Pending]:
    """Start sending the rows of `x_RF` that other ranks read, piece after piece.

    Args:
        name: of the group.
        label: what is exchanged, in words, for errors.
    """
    sizes = [n for route in routes for n in route.sizes]
    started = _Start.apply(x_RF, sizes, name, label, *(route.send for route in routes))
    return [Pending(*pair) for pair in zip(started[: len(routes)], started[len(routes) :], strict=True)]


def wait(pending: Pending, route: Route, name: str, label: str) -> torch.Tensor:
    """Wait for one piece; returns the stage's keys in order, ``[keys, F]``."""
    arrived_NF = _Wait.apply(*pending, route.sizes, name, label)
    if route.spare:
        arrived_NF = torch.nn.functional.pad(arrived_NF, (0, 0, 0, 1))
    return arrived_NF.index_select(0, route.order)
