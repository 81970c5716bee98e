"""Only the K/V rows that the mask reads, by uneven all-to-alls; the gradients come home the same way.

The rows travel in one or several chunks. All start before the caller computes anything. The caller waits for them one
by one and computes with each while the next ones travel. The backward is the mirror image:

    forward    start 1 … n | local attention | wait 1 | attention 1 | … | wait n | attention n
    backward   attention n | start n | attention n-1 | start n-1 | … | local attention | wait n … 1, sum

Autograd runs ready nodes in the reverse order of their creation, so the local backward comes before the waits. Every
rank has the whole plan and knows the rows of each pair of ranks: no sizes travel.
"""

# R rows of a shard, S rows sent (a row may go to several ranks), N rows received, F features of a row

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import Chunk, ChunkBuilder, index_rows, on_device, size
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned
from spanwise.attention.exchange.base import KV, Exchange, Peers, route
from spanwise.attention.exchange.rows import by_head, side_by_side
from spanwise.layouts.runs import overlaps, places_in, ragged_arange
from spanwise.layouts.traffic import num_rows, row_of
from spanwise.masks.arrays import Int64
from spanwise.masks.spans import merge_runs
from spanwise.planning import chunking
from spanwise.planning.chunking import RECEIVER, ROW, SENDER, START, STOP
from spanwise.planning.plan_data import PlanData


@route(static=("spare",))
@dataclasses.dataclass(frozen=True)
class Route:
    """Rows that one rank sends and receives in one chunk; a pytree of tensors.

    Attributes:
        send: int64 ``[S]``, rows of the shard, those for rank 0 first, then those for rank 1, …
        order: int64 ``[keys]``, for each key of the chunk its place among the N received rows (rank 0's first).
        send_sizes, recv_sizes: for each rank a tensor ``[rows, 0]``; carries a size in its shape.
        spare: whether `order` may also hold N, the index of a row of zeros: spare keys that no span reads.
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


@dataclasses.dataclass(frozen=True)
class Needed(Exchange):
    """Every rank gets the K/V that its queries read, in one or several chunks."""

    name: ClassVar[str] = "needed"
    receives: ClassVar[str] = "exactly those that the rank's rows read and it does not hold"
    exact: ClassVar[bool] = True

    def chunk_counts(self, stages: int | None) -> tuple[int, ...]:
        return (1, 2, 4) if stages is None else (stages,)

    def num_chunks(self, plan: PlanData, mask: str) -> int:
        return chunking.num_chunks(_lists(plan, mask)[0], plan.stages, plan.block_size)

    def moved(self, plan: PlanData, mask: str) -> Int64:
        lists, alike = _lists(plan, mask)
        num_chunks = chunking.num_chunks(lists, plan.stages, plan.block_size)
        if num_chunks == 0:
            return np.zeros((0, *lists.shape), np.int64)
        return alike * chunking.chunk_tokens(lists, num_chunks, plan.block_size)

    def traffic(self, plan: PlanData, mask: str) -> Int64:
        return plan.needed_traffic(mask)

    def most_held(self, plan: PlanData, mask: str) -> Int64:
        own, tokens = plan.kv_held, plan.moved(mask)
        came, left = tokens.sum(axis=2), tokens.sum(axis=1)
        later = (came + left)[::-1].cumsum(axis=0)[::-1] - came - left  # under way while each chunk is used
        before = came.cumsum(axis=0) - came if plan.keep_kv else np.zeros_like(came)
        # Own rows by token, then K and V side by side; the rows to send; then each chunk as received, and in order.
        moments = [2 * own, own + (came + left).sum(axis=0), *(before + 2 * came + later)]
        return np.asarray(np.max(moments, axis=0))

    def chunks(self, builder: ChunkBuilder, mask: str) -> tuple[Chunk, ...]:
        chunks, held = [builder.own(mask)], own_keys(builder, mask)
        plan = builder.plan
        num_chunks = self.num_chunks(plan, mask)
        if num_chunks == 0:
            return tuple(chunks)  # no rank reads keys of another, so no rank starts a collective
        comes, comes_in = chunking.cut(_receives(builder, mask), num_chunks, plan.block_size)
        leaves, leaves_in = chunking.cut(_sends(builder, mask), num_chunks, plan.block_size)
        for i in range(num_chunks):
            chunks.append(arriving(builder, mask, comes[comes_in == i], leaves[leaves_in == i], held)[0])
        return tuple(chunks)

    def start(
        self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str
    ) -> Iterator[KV]:
        batch, routes = k.shape[0], [chunk.route for chunk in chunks]
        pending: list[Any] = start(token_rows(k, v), routes, peers.name, label)

        def arrived(i: int) -> torch.Tensor:
            one, pending[i] = pending[i], None  # otherwise the buffer lives while the caller works on the chunk
            return wait(one, routes[i], peers.name, f"{label}, chunk {i + 1} of {len(routes)}")

        return (by_head(by_batch(arrived(i), batch), k, v) for i in range(len(routes)))


def token_rows(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[T, F]``, all batch rows of a token in one row.

    They go to the same ranks; where they do not, the batch is 1.
    """
    return side_by_side(k, v).transpose(0, 1).flatten(1)


def by_batch(rows_KF: torch.Tensor, batch: int) -> torch.Tensor:
    """``[B, K, F]``, the inverse of `token_rows` for received rows."""
    return rows_KF.unflatten(1, (batch, -1)).transpose(0, 1)


def _lists(plan: PlanData, mask: str) -> tuple[Int64, int]:
    """Tokens in the list of each pair, which is cut into chunks, and the number of batch rows that share a list.

    One list serves all batch rows, unless mask or layout differ between them.
    """
    alike = plan.batch_size // num_rows(plan.mask(mask), plan.layout)
    return plan.needed_traffic(mask) // alike, alike


class Held(NamedTuple):
    """Keys that a group can send: `runs` int64 ``[n, 2]``, all batch rows on one line, and the `place` of each run."""

    runs: Int64
    place: Int64


def own_keys(builder: ChunkBuilder, mask: str) -> Held:
    """The keys that the group holds; they lie batch row after batch row."""
    held = builder.held(builder.group, builder.rows(mask))
    runs = _on_line(builder, np.repeat(np.arange(len(held)), [len(runs) for runs in held]), np.concatenate(held))
    length = runs[:, 1] - runs[:, 0]
    return Held(runs, np.cumsum(length) - length)


def _on_line(builder: ChunkBuilder, row: Int64, runs: Int64) -> Int64:
    return runs + (row * builder.plan.kv_len)[:, None]


def _receives(builder: ChunkBuilder, mask: str) -> Int64:
    """Moves of the keys that the group receives, by batch row, then start."""
    plan, group, found = builder.plan, builder.group, []
    for row in range(builder.rows(mask)):
        runs = plan.needs(group * plan.inner, mask, row)
        run, sender, tokens = plan.kv_groups.owners_of(runs, row_of(plan.kv_groups, row))
        before = np.cumsum(tokens) - tokens
        start = runs[run, 0] + before - before[np.searchsorted(run, run)]
        found.append(_moves(row, group, sender, np.column_stack([start, start + tokens])))
    return np.concatenate(found)


def _sends(builder: ChunkBuilder, mask: str) -> Int64:
    """Moves of the keys that other groups read, by batch row, reader, then start."""
    plan, group, found = builder.plan, builder.group, []
    for row, own in enumerate(builder.held(group, builder.rows(mask))):
        needs = plan.needs_of_all(mask, row)
        reader = np.repeat(np.arange(plan.num_groups), [len(runs) for runs in needs])
        run, read = overlaps(np.concatenate(needs), own)
        found.append(_moves(row, reader[run], group, read))
    return np.concatenate(found)


def _moves(row: int, receiver: Int64 | int, sender: Int64 | int, runs: Int64) -> Int64:
    peers = (np.broadcast_to(each, len(runs)) for each in (row, receiver, sender))
    return np.column_stack([*peers, runs])


def arriving(builder: ChunkBuilder, mask: str, comes: Int64, leaves: Int64, held: Held) -> tuple[Chunk, Held]:
    """The chunk of the keys that the moves `comes` bring, and where these lie on arrival.

    Rows arrive by sending group, then batch row, then token; a chunk has them by batch row, then token. Index tensors
    are written once, from runs: a rank of a thousand may receive 16M keys.

    Args:
        leaves: moves of what the group sends meanwhile, by receiver, then batch row, then start.
        held: where the keys of `leaves` lie.
    """
    comes = comes[np.lexsort((comes[:, START], comes[:, ROW]))]
    length, by_sender = comes[:, STOP] - comes[:, START], np.argsort(comes[:, SENDER], kind="stable")
    place = np.empty_like(length)
    place[by_sender] = np.cumsum(length[by_sender]) - length[by_sender]
    spare = builder.spare(int(length.sum()))
    order = index_rows([np.column_stack([place, place + length])], spare, int(length.sum()))[0]
    send = ragged_arange(places_in(_on_line(builder, leaves[:, ROW], leaves[:, START:]), *held))
    # With spare keys the size is never 0 or 1, and kernels must know that it is not 0.
    mark = _torch.mark_dynamic if builder.has_spare else _torch.mark_unbacked
    route = Route(
        # Unbacked: if torch.compile saw 1 row, autograd would sum the gradient before it has arrived.
        send=_torch.mark_unbacked(on_device(send, builder.device), 0),
        order=mark(on_device(order, builder.device), 0),
        send_sizes=_sizes(builder, leaves, RECEIVER),
        recv_sizes=_sizes(builder, comes, SENDER),
        spare=builder.has_spare,
    )
    of_rows = [comes[comes[:, ROW] == row, START:] for row in range(builder.rows(mask))]
    chunk = builder.chunk(mask, [merge_runs(*runs.T) for runs in of_rows], route, spare=spare)
    return chunk, Held(_on_line(builder, comes[:, ROW], comes[:, START:]), place)


def _sizes(builder: ChunkBuilder, moves: Int64, peer: int) -> tuple[torch.Tensor, ...]:
    """Tokens of the moves from or to each group, as `size` carries them."""
    tokens = np.zeros(builder.plan.num_groups, np.int64)
    np.add.at(tokens, moves[:, peer], moves[:, STOP] - moves[:, START])
    return tuple(size(n, builder.device) for n in tokens.tolist())


class Pending(NamedTuple):
    """A chunk under way. Do not read ``data_NF`` before :func:`wait`; the anchor has the shape of the rows sent."""

    data_NF: torch.Tensor
    anchor_SF: torch.Tensor


class _Start(torch.autograd.Function):
    """Starts all chunks; its backward waits for the gradients of all.

    Arguments: x_RF, sizes, name, label, and the rows to send of each chunk.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        # Not named: with as many arguments as names, torch.compile without gradients passes no ctx.
        x_RF, sizes, name, label, *sends = args
        ctx.save_for_backward(*sends)
        ctx.num_rows, ctx.dtype, ctx.name, ctx.label = x_RF.shape[0], x_RF.dtype, name, label
        num_ranks = len(sizes) // (2 * len(sends))
        data, anchors = [], []
        for i, send in enumerate(sends):
            sent_SF = x_RF.index_select(0, send)
            send_sizes, recv_sizes = halves(sizes[2 * num_ranks * i : 2 * num_ranks * (i + 1)])
            what = f"all-to-all of {label}, chunk {i + 1} of {len(sends)}"
            data.append(failure.start(what, name, _torch.start_all_to_all, sent_SF, recv_sizes, send_sizes, name))
            anchors.append(anchor(sent_SF.shape, x_RF))
        ctx.mark_non_differentiable(*data)
        return (*data, *anchors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        sends = ctx.saved_tensors
        pending = grads[len(sends) :]
        # A row sent to several ranks gets several gradients: sum them in float32 at least, cast once.
        total = pending[0].new_zeros(ctx.num_rows, pending[0].shape[1])
        for send, grad_SF in zip(reversed(sends), reversed(pending), strict=True):  # in order of departure
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
        send_sizes, recv_sizes = halves(ctx.sizes)
        what = f"all-to-all of gradients, {ctx.label}"
        sent_NF = grad_NF.to(ctx.sum_dtype)
        pending = failure.start(what, ctx.name, _torch.start_all_to_all, sent_NF, send_sizes, recv_sizes, ctx.name)
        return None, returned(pending), None, None, None


def halves(sizes: list[int]) -> tuple[list[int], list[int]]:
    """Rows sent and rows received, of `Route.sizes`."""
    return sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]


def start(x_RF: torch.Tensor, routes: Sequence[Route], name: str, label: str) -> list[Pending]:
    """Start sending the rows of `x_RF` that other ranks read, chunk after chunk, in process group `name`."""
    sizes = [n for route in routes for n in route.sizes]
    started = _Start.apply(x_RF, sizes, name, label, *(route.send for route in routes))
    return [Pending(*pair) for pair in zip(started[: len(routes)], started[len(routes) :], strict=True)]


def wait(pending: Pending, route: Route, name: str, label: str) -> torch.Tensor:
    """Wait for one chunk; returns its keys in order, ``[keys, F]``."""
    return in_order(_Wait.apply(*pending, route.sizes, name, label), route)


def in_order(arrived_NF: torch.Tensor, route: Route) -> torch.Tensor:
    """The keys of a chunk, ``[keys, F]``, from its rows as they arrived."""
    if route.spare:
        arrived_NF = torch.nn.functional.pad(arrived_NF, (0, 0, 0, 1))
    return arrived_NF.index_select(0, route.order)
