"""Shards of K/V go round a ring, hop by hop; their gradients come home the other way round.

Every rank sends a shard to a rank further on and receives another. It attends to that shard and sends it on. At any
time a rank holds its own shard and two more: one that it computes with and sends on, and one that arrives. The gradient
of a shard goes back hop by hop, and each rank adds its part. So no rank holds gradients of more than two shards:

    forward    start 1 | local attention | wait 1, start 2 | attention 1 | … | wait n | attention n
    backward   attention n | start n | attention n-1 | wait n, add, start n-1 | … | local attention | wait 1

Autograd runs ready nodes in the reverse order of their creation. So the backward attention of a chunk runs while the
gradient of the chunk after it travels. Every rank has the whole plan and knows all sizes: no sizes travel. Ring
attention: Liu, Zaharia and Abbeel, 2023 (arXiv 2310.01889).

A hop that no rank reads is left out, and the next stride grows. A hop is an all-to-all in which each rank sends to one
rank and receives from one; on gloo a plain send and receive.
"""

# B batch, H heads of K/V, T tokens of a shard, D head dim (of V: Dv), F features of a token: B * H * (D + Dv)
# A shard in transit is [T, F] by its size only: it holds all of K as [B, H, T, D], then all of V. So both are
# contiguous views of the received buffer, and nothing is copied on the way.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import Chunk, ChunkBuilder, size
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned
from spanwise.attention.exchange.base import KV, Exchange, Peers, route
from spanwise.attention.exchange.refetch import Fetched, Refetch
from spanwise.layouts.layout import Layout
from spanwise.layouts.traffic import local_area
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning.plan_data import PlanData

Dims = tuple[int, int, int, int]  # B, H, D, Dv


@route(static=("stride", "spare"))
@dataclasses.dataclass(frozen=True)
class Hop:
    """The shard that one rank receives in one hop; a pytree of a tensor.

    Attributes:
        received: ``[rows, 0]``, tokens of the shard that arrives; carries a size in its shape.
        stride: number of ranks that shards move on, the same for all ranks. The sum of the strides so far is the
            distance to the rank that owns the shard.
        spare: whether the chunk ends in spare keys, which no span reads.
    """

    received: torch.Tensor
    stride: int
    spare: bool = False


@dataclasses.dataclass(frozen=True)
class Ring(Exchange):
    """Shards of K/V go from rank to rank; two are in memory at a time, and nothing is copied on the way."""

    name: ClassVar[str] = "ring"
    receives: ClassVar[str] = "whole shards, one after the other; {} tokens of them are read, mean"
    arrival: ClassVar[str] = "shard by shard"
    chained: ClassVar[bool] = True
    passes: ClassVar[tuple[float, float]] = (0.0, 1.5)
    keeps_kv: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = True

    def hops(self, plan: PlanData, mask: str) -> tuple[int, ...]:
        """Hops whose shard some group reads: hop h brings group g the shard of group g − h."""
        traffic, group = plan.needed_traffic(mask), np.arange(plan.num_groups)
        return tuple(h for h in range(1, len(group)) if traffic[group, (group - h) % len(group)].any())

    def num_chunks(self, plan: PlanData, mask: str) -> int:
        return len(self.hops(plan, mask))

    def moved(self, plan: PlanData, mask: str) -> Int64:
        hops, held, group = self.hops(plan, mask), plan.kv_held, np.arange(plan.num_groups)
        tokens = np.zeros((len(hops), len(group), len(group)), dtype=np.int64)
        for i, hop in enumerate(hops):
            stride = hop - (hops[i - 1] if i else 0)
            tokens[i, group, (group - stride) % len(group)] = held[(group - hop) % len(group)]
        return tokens

    def most_held(self, plan: PlanData, mask: str) -> Int64:
        arriving = plan.moved(mask).sum(axis=2)
        # The shard that is sent on (first a copy of the rank's own), and the shard that arrives.
        leaving = np.concatenate([plan.kv_held[None], arriving])[:-1]
        return np.asarray((arriving + leaving).max(axis=0))

    def packed(self, plan: PlanData, mask: str) -> Int64:
        return np.zeros(plan.num_groups, np.int64)  # shards travel in the buffer in which they arrived

    def chunk_work(self, plan: PlanData, mask: str) -> Float64:
        """Exact: the area of each group's queries over the shard that each hop brings."""
        hops, layout = self.hops(plan, mask), plan.kv_groups
        areas = np.zeros((plan.num_groups, len(hops)), dtype=np.int64)
        for i, hop in enumerate(hops):
            tables = [layout.pieces(row) for row in range(layout.batch_size)]
            tables = [np.column_stack([(x[:, 0] + hop) % plan.num_groups, x[:, 1:]]) for x in tables]
            passed_on = Layout(tables, layout.num_ranks, layout.seq_len)
            areas[:, i] = local_area(plan.mask(mask), plan.groups, passed_on, plan.batch_size)
        return np.repeat(areas, plan.inner, axis=0).astype(np.float64)

    def chunks(self, builder: ChunkBuilder, mask: str) -> tuple[Chunk, ...]:
        plan, rows, chunks, before = builder.plan, builder.rows(mask), [builder.own(mask)], 0
        for distance in self.hops(plan, mask):
            owner = (builder.group - distance) % plan.num_groups
            tokens = rows * plan.kv_groups.num_tokens(owner)
            hop = Hop(size(tokens, builder.device), stride=distance - before, spare=builder.has_spare)
            chunks.append(builder.chunk(mask, builder.held(owner, rows), hop, spare=builder.spare(tokens)))
            before = distance
        return tuple(chunks)

    def start(
        self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str
    ) -> Iterator[KV]:
        arriving = start(k, v, [chunk.route for chunk in chunks], peers.rank, peers.size, peers.name, label)
        # Without a name for an item: a name would keep it until the hop after next has started.
        return (_with_spare(chunk, *next(arriving)) for chunk in chunks)

    def refetch(self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str) -> Refetch:
        dims, hops = _dims(k, v), [chunk.route for chunk in chunks]
        starts = fetches(k.detach(), v.detach(), hops, peers.rank, peers.size, peers.name, label)
        return Refetch(starts, chained=True, saved=lambda i, buffer: _with_spare(chunks[i], *unpack(buffer, dims)))


def _with_spare(chunk: Chunk, k: torch.Tensor, v: torch.Tensor) -> KV:
    """K and V as the kernel takes them: a padded copy if the chunk has spare keys."""
    if not chunk.route.spare:
        return k, v
    spare = chunk.kv_pos.shape[1] - k.shape[2]
    return torch.nn.functional.pad(k, (0, 0, 0, spare)), torch.nn.functional.pad(v, (0, 0, 0, spare))


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One buffer ``[T, F]`` that holds `k` ``[B, H, T, D]`` and then `v` ``[B, H, T, Dv]``; a copy."""
    dims = _dims(k, v)
    buffer_TF = k.new_empty(k.shape[2], _features(dims))
    for part, x in zip(unpack(buffer_TF, dims), (k, v), strict=True):
        part.copy_(x)
    return buffer_TF


def unpack(buffer_TF: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a buffer, contiguous views of it."""
    batch, heads, k_dim, v_dim = dims
    tokens = buffer_TF.shape[0]
    k_flat, v_flat = buffer_TF.view(-1).split([batch * heads * tokens * d for d in (k_dim, v_dim)])
    return k_flat.view(batch, heads, tokens, k_dim), v_flat.view(batch, heads, tokens, v_dim)


def _dims(k: torch.Tensor, v: torch.Tensor) -> Dims:
    return k.shape[0], k.shape[1], k.shape[3], v.shape[3]


def _features(dims: Dims) -> int:
    batch, heads, k_dim, v_dim = dims
    return batch * heads * (k_dim + v_dim)


class _Ring(NamedTuple):
    """Values that all hops of a call share; `torch.compile` makes one graph for each of them.

    Attributes:
        strides: of each hop.
        name: of the process group.
        label: names the transfer in errors.
    """

    strides: tuple[int, ...]
    rank: int
    num_ranks: int
    name: str
    label: str


def _send(ring: _Ring, x_TF: torch.Tensor, stride: int, rows: int, what: str) -> torch.Tensor:
    """Start sending `x_TF` `stride` ranks on; returns the `rows` rows that arrive, not readable before a wait."""
    send_sizes, recv_sizes = [0] * ring.num_ranks, [0] * ring.num_ranks
    send_sizes[(ring.rank + stride) % ring.num_ranks] = x_TF.shape[0]
    recv_sizes[(ring.rank - stride) % ring.num_ranks] = rows
    return failure.start(what, ring.name, _torch.start_all_to_all, x_TF, recv_sizes, send_sizes, ring.name)


def _what(ring: _Ring, i: int, of: str = "") -> str:
    return f"hop {i + 1} of {len(ring.strides)} of {of}{ring.label}"


def _without_zeros(ctx: Any) -> None:
    """Keep autograd from making zeros as large as a shard, as the gradient of a buffer under way."""
    if not torch.compiler.is_compiling():  # a graph drops unread zeros
        ctx.set_materialize_grads(False)


class _Start(torch.autograd.Function):
    """Starts the first hop; the backward waits for the gradient of this rank's shard."""

    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, ring: _Ring, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _without_zeros(ctx)
        ctx.dims, ctx.dtype, ctx.ring = _dims(k, v), k.dtype, ring
        own_TF = pack(k, v)
        data = _send(ring, own_TF, ring.strides[0], rows, _what(ring, 0))
        ctx.mark_non_differentiable(data)
        return data, anchor(own_TF.shape, own_TF)

    @staticmethod
    def backward(ctx: Any, _: Any, pending: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total_TF = failure.wait(pending, _what(ctx.ring, 0, "gradients, "), ctx.ring.name)
        grad_k, grad_v = unpack(total_TF, ctx.dims)
        return grad_k.to(ctx.dtype), grad_v.to(ctx.dtype), None, None


class _Step(torch.autograd.Function):
    """Waits for hop `i` and starts the next. Backward: waits for the next hop's gradient, adds, sends it home."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, sent: torch.Tensor, dims: Dims, ring: _Ring, i: int, next_rows: int | None
    ) -> tuple[torch.Tensor, ...]:
        # `sent` is the anchor of the shard that this rank sent in the hop: its gradient comes back.
        _without_zeros(ctx)
        ctx.dims, ctx.ring, ctx.i, ctx.rows_sent, ctx.sum_dtype = dims, ring, i, sent.shape[0], sent.dtype
        arrived_TF = failure.wait(data, _what(ring, i), ring.name)
        chunk = unpack(arrived_TF, dims)
        if next_rows is None:
            return chunk
        pending = _send(ring, arrived_TF, ring.strides[i + 1], next_rows, _what(ring, i + 1))
        ctx.mark_non_differentiable(pending)
        return *chunk, pending, anchor(arrived_TF.shape, arrived_TF)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        check_first_order()
        ring, i = ctx.ring, ctx.i
        of_chunk = grads[:2]
        if len(grads) > 2 and grads[3] is not None:
            total_TF = failure.wait(grads[3], _what(ring, i + 1, "gradients, "), ring.name)
        else:
            one = next(grad for grad in of_chunk if grad is not None)  # autograd runs the node only if there is one
            total_TF = one.new_zeros(one.shape[2], _features(ctx.dims), dtype=ctx.sum_dtype)
        for part, grad in zip(unpack(total_TF, ctx.dims), of_chunk, strict=True):
            if grad is not None:
                part.add_(grad)
        pending = _send(ring, total_TF, -ring.strides[i], ctx.rows_sent, _what(ring, i, "gradients, "))
        return None, returned(pending), None, None, None, None


def start(
    k: torch.Tensor, v: torch.Tensor, hops: Sequence[Hop], rank: int, num_ranks: int, name: str, label: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Start sending this rank's shard round in process group `name`; an item is K and V of a hop, as they arrive.

    As `Exchange.start`, for at least one hop; items are contiguous views of one buffer. An item comes after the start
    of the next hop. At most two shards live in addition to the rank's own, if the caller drops an item before it asks
    for the next and autograd does not keep it.
    """
    ring = _Ring(tuple(hop.stride for hop in hops), rank, num_ranks, name, label)
    rows = [hop.received.shape[0] for hop in hops]
    return _arriving(_Start.apply(k, v, ring, rows[0]), _dims(k, v), ring, rows)


def _arriving(
    pending: tuple[torch.Tensor, ...], dims: Dims, ring: _Ring, rows: list[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for i in range(len(rows)):
        k, v, *pending = _Step.apply(*pending, dims, ring, i, rows[i + 1] if i + 1 < len(rows) else None)
        yield k, v
        del k, v  # otherwise this chunk lives until the one after next has started


def fetches(
    k: torch.Tensor, v: torch.Tensor, hops: Sequence[Hop], rank: int, num_ranks: int, name: str, label: str
) -> list[Callable[..., Fetched]]:
    """For a chained `Refetch`: functions that start fetching each chunk again, the last one first.

    The last chunk comes from its owner, by one hop. Every other chunk comes by sending the chunk after it a hop back.
    """
    ring = _Ring(tuple(hop.stride for hop in hops), rank, num_ranks, name, label)

    def fetch(i: int, later: tuple[torch.Tensor, ...] | None = None) -> Fetched:
        held_TF, stride = (pack(k, v), sum(ring.strides)) if later is None else (later[0], -ring.strides[i + 1])
        data = _send(ring, held_TF, stride, hops[i].received.shape[0], _what(ring, i))
        return functools.partial(_arrived, data, _what(ring, i), name)

    return [functools.partial(fetch, i) for i in range(len(hops))]


def _arrived(data: torch.Tensor, what: str, name: str) -> tuple[torch.Tensor]:
    return (failure.wait(data, what, name),)
