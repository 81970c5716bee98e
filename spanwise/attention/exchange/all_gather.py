"""All-gather of per-token tensors over the cp axis, with a reduce-scatter as its backward.

Start and wait are two autograd functions, so that a caller can compute between them, forward and backward alike:

    forward    start gather | local attention | wait | remote attention
    backward   remote attention | start reduce-scatter | local attention | wait

Autograd runs ready nodes in the reverse order of their creation. So the local backward runs between the two halves of
the reduce-scatter.
"""

# R rows (batch row, token) a rank, padded to the same number on all ranks;  P ranks;  F features of a row

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import Chunk, ChunkBuilder, index_rows, on_device
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned
from spanwise.attention.exchange.base import KV, Exchange, Peers, route
from spanwise.attention.exchange.rows import by_head, side_by_side
from spanwise.layouts.runs import count_tokens, places_in, subtract_runs
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning.plan_data import PlanData


@route(static=("batched",))
@dataclasses.dataclass(frozen=True)
class Gathered:
    """Places of the keys of a chunk among the gathered shards; a pytree of tensors.

    Attributes:
        take: int64 ``[B, keys]``, slots among the padded shards ``[rank, row, token]``, flattened.
        padded: ``[padded shard length, 0]``; carries a size in its shape.
        batched: whether batch rows have different layouts.
    """

    take: torch.Tensor
    padded: torch.Tensor
    batched: bool


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """Every rank gets all K/V, in one chunk."""

    name: ClassVar[str] = "all_gather"
    receives: ClassVar[str] = "all of the other ranks; {} of them are read, mean"
    arrival: ClassVar[str] = "in one chunk"
    baseline: ClassVar[bool] = True

    def num_chunks(self, plan: PlanData, mask: str) -> int:
        return min(1, plan.num_groups - 1)

    def moved(self, plan: PlanData, mask: str) -> Int64:
        groups, padded = plan.num_groups, int(plan.kv_held.max())
        return (padded * (1 - np.eye(groups, dtype=np.int64)))[None][: self.num_chunks(plan, mask)]

    def traffic(self, plan: PlanData, mask: str) -> Int64:
        tokens = np.tile(plan.kv_held, (plan.num_groups, 1))
        np.fill_diagonal(tokens, 0)
        return tokens

    def most_held(self, plan: PlanData, mask: str) -> Int64:
        own = plan.kv_held
        padded, others = int(own.max()), own.sum() - own
        # All gathered shards; first also the own padded shard, then also the K/V of others in order.
        return plan.num_groups * padded + np.maximum(padded, others)

    def packed(self, plan: PlanData, mask: str) -> Int64:
        return plan.kv_held * self.num_chunks(plan, mask)

    def seconds(self, plan: PlanData, mask: str, token_bytes: Float64, *, gradients: bool) -> Float64:
        if plan.inner > 1:  # several gathers at the same time
            return super().seconds(plan, mask, token_bytes, gradients=gradients)
        shard = float(plan.kv_held.max()) * token_bytes[0]
        one = plan.hardware.reduce_scatter_seconds if gradients else plan.hardware.all_gather_seconds
        return np.array([one(shard, plan.num_ranks)] * self.num_chunks(plan, mask))

    def chunks(self, builder: ChunkBuilder, mask: str) -> tuple[Chunk, ...]:
        plan, layout = builder.plan, builder.plan.kv_groups
        own = builder.held(builder.group, layout.batch_size)
        local = builder.chunk_side_by_side(mask, own)
        if plan.num_groups == 1:
            return (local,)
        everything = np.array([[0, plan.kv_len]], dtype=np.int64)
        others = [subtract_runs(everything, runs) for runs in own]
        spare = builder.spare(count_tokens(others[0]))
        slots = [places_in(runs, *layout.slot_runs(row)) for row, runs in enumerate(others)]
        take = on_device(index_rows(slots, spare), builder.device)
        padded = torch.empty(int(layout.tokens_per_rank.max()), 0, device=builder.device)
        route = Gathered(_torch.mark_dynamic(take, 1), _torch.mark_dynamic(padded, 0), layout.batch_size > 1)
        return local, builder.chunk_side_by_side(mask, others, route, spare=spare)

    def start(
        self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str
    ) -> Iterator[KV]:
        (chunk,) = chunks
        route, batch = chunk.route, k.shape[0]
        padded = route.padded.shape[0]
        kv_RF = pad_tokens(side_by_side(k, v), padded).flatten(0, 1)
        pending = [start(kv_RF, peers.size, peers.name, label)]

        def arrived() -> torch.Tensor:
            gathered_PRF = wait(pending.pop(), peers.size, peers.name, label)
            at = spread_slots(route.take, route.batched, padded, batch).flatten()
            return gathered_PRF.index_select(0, at).unflatten(0, (batch, -1))

        return (by_head(arrived(), k, v) for _ in chunks)


class Pending(NamedTuple):
    """A gather under way. Do not read ``data_PR_F`` before :func:`wait`."""

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
        # Sum in float32 for inputs of any dtype: a bf16 sum over many ranks drifts (ring-flash-attention #42).
        what = f"reduce-scatter of gradients, {ctx.label}"
        sent_PR_F = grad_PR_F.to(ctx.sum_dtype)
        pending = failure.start(what, ctx.name, _torch.start_reduce_scatter, sent_PR_F, ctx.num_ranks, ctx.name)
        return None, returned(pending), None, None, None


def start(x_R_F: torch.Tensor, num_ranks: int, name: str, label: str) -> Pending:
    """Start gathering ``x_R_F`` in process group `name`; every rank passes the same number of rows."""
    return Pending(*_Start.apply(x_R_F, num_ranks, name, label))


def wait(pending: Pending, num_ranks: int, name: str, label: str) -> torch.Tensor:
    """Wait for the gather; returns rank 0's rows, then rank 1's, … as ``[P * R, F]``."""
    return _Wait.apply(pending.data_PR_F, pending.anchor_R_F, num_ranks, name, label)


def pad_tokens(x_BTF: torch.Tensor, length: int) -> torch.Tensor:
    """`x_BTF` with zero tokens at the end, up to `length` tokens: all ranks must send the same number of rows."""
    return torch.nn.functional.pad(x_BTF, (0, 0, 0, length - x_BTF.shape[1]))


def spread_slots(slots: torch.Tensor, batched: bool, padded: int, batch: int) -> torch.Tensor:
    """Slots among the gathered rows ``[rank, batch row, token]`` of `batch` rows.

    Args:
        slots: int64 ``[B, tokens]``, from `Layout.slots`, for the rows of the layout.
        batched: whether batch rows have different layouts; otherwise one layout row serves all.
        padded: length of the gathered shards.
    """
    if batched or batch == 1:
        return slots
    rank, token = slots // padded, slots % padded
    row = torch.arange(batch, device=slots.device).unsqueeze(1)
    return (rank * batch + row) * padded + token
