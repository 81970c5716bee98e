"""Rows enter a host once: owners send them to one reader on each host, which passes them on to the other readers there.

Two uneven all-to-alls bring the K/V rows that the mask reads. In the first each owner sends a row to the readers on its
own host and to one reader, the *relay*, on each other host. In the second the relays pass rows on inside their hosts.
It travels while attention computes what the first brought. The backward is the mirror image: readers send gradients to
the relay, which adds them to its own, and one row goes home:

    forward    start 1 | local attention | wait 1, start 2 | attention 1 | wait 2 | attention 2
    backward   attention 2 | start 2 | attention 1 | wait 2, add, start 1 | local attention | wait 1, sum

So a rank receives the same rows as with "needed", and only the way of some of them differs. Every rank computes all
relays from the plan (`planning.relays`): no sizes travel. Where nothing is passed on, there is one all-to-all.
"""

# S rows sent, N rows received in the first all-to-all, M rows passed on, F features of a row

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import Chunk, ChunkBuilder
from spanwise.attention.exchange import failure, needed
from spanwise.attention.exchange._gradients import anchor, check_first_order, returned
from spanwise.attention.exchange.base import KV, Exchange, Peers
from spanwise.attention.exchange.refetch import Fetched, Refetch
from spanwise.attention.exchange.rows import by_head
from spanwise.masks.arrays import Int64
from spanwise.planning import relays
from spanwise.planning.chunking import RECEIVER, ROW, SENDER, START
from spanwise.planning.plan_data import PlanData


@dataclasses.dataclass(frozen=True)
class Hierarchical(Exchange):
    """Every rank gets the K/V that its queries read; a row of another host enters the rank's host once.

    Hosts are those of the plan's hardware: the innermost level of links that joins several ranks, but not all.
    """

    name: ClassVar[str] = "hierarchical"
    receives: ClassVar[str] = (
        "exactly those that the rank's rows read and it does not hold; those of other hosts enter its host once"
    )
    arrival: ClassVar[str] = "from their owners, then from ranks of the same host that pass them on"
    exact: ClassVar[bool] = True
    chained: ClassVar[bool] = True
    by_host: ClassVar[bool] = True

    def moved(self, plan: PlanData, mask: str) -> Int64:
        return relays.tokens(plan, mask)

    def most_held(self, plan: PlanData, mask: str) -> Int64:
        own, tokens = plan.kv_held, plan.moved(mask)
        came, both = tokens.sum(axis=2), tokens.sum(axis=2) + tokens.sum(axis=1)
        # Own rows by token, then K and V side by side; the rows to send; then each chunk as received, and in order.
        moments = [2 * own, own + both[0], 2 * came[0] + both[1:].sum(axis=0)]
        moments += [plan.keep_kv * came[0] + 2 * chunk for chunk in came[1:]]
        return np.asarray(np.max(moments, axis=0))

    def joined(self, plan: PlanData, mask: str) -> Int64 | None:
        tokens, rank = plan.moved(mask), np.arange(plan.num_ranks)
        takes_part = np.repeat((tokens.sum(axis=1) + tokens.sum(axis=2)) > 0, plan.inner, axis=1)
        host = rank // (relays.places(plan) * plan.inner)
        return np.where(takes_part, np.arange(len(tokens))[:, None] * host, -1)  # the second chunk stays inside hosts

    def chunks(self, builder: ChunkBuilder, mask: str) -> tuple[Chunk, ...]:
        group, chunks, held = builder.group, [builder.own(mask)], needed.own_keys(builder, mask)
        for moves in relays.moves(builder.plan, mask):
            if len(moves) == 0:
                break  # for all ranks alike
            comes, leaves = moves[moves[:, RECEIVER] == group], moves[moves[:, SENDER] == group]
            leaves = leaves[np.lexsort((leaves[:, START], leaves[:, ROW], leaves[:, RECEIVER]))]
            chunk, held = needed.arriving(builder, mask, comes, leaves, held)  # what has come is passed on
            chunks.append(chunk)
        return tuple(chunks)

    def start(
        self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str
    ) -> Iterator[KV]:
        batch, routes = k.shape[0], [chunk.route for chunk in chunks]
        labels = f"{label}, from their owners", f"{label}, passed on inside hosts"
        pending: list[Any] = needed.start(needed.token_rows(k, v), routes[:1], peers.name, labels[0])

        def arrived(i: int) -> torch.Tensor:
            one = pending.pop()
            if i + 1 == len(routes):
                return needed.wait(one, routes[i], peers.name, labels[i])
            keys, passing = pass_on(one, (routes[i], routes[i + 1]), peers.name, labels)
            pending.append(passing)
            return keys

        return (by_head(needed.by_batch(arrived(i), batch), k, v) for i in range(len(routes)))

    def refetch(self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str) -> Refetch:
        if len(chunks) == 1:
            return super().refetch(k, v, chunks, peers, label)
        k, v, before = k.detach(), v.detach(), []

        def both() -> Fetched:
            """Fetches the first chunk, of which the second is passed on; the backward wants it next."""
            arriving = self.start(k, v, chunks, peers, label)
            before.append(tuple(x.contiguous() for x in next(arriving)))
            return lambda: tuple(x.contiguous() for x in next(arriving))

        fetches: list[Callable[[], Fetched]] = [lambda: before.pop, both]
        return Refetch(fetches)


class _PassOn(torch.autograd.Function):
    """Waits for the first all-to-all and starts the second with rows of it.

    Backward: waits for the gradients of the second, adds them to those of the first, and starts these on their way.
    Arguments: data and anchor of the first, rows to pass on, sizes of both, name, labels of both.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        data_NF, anchor_SF, send, sizes, next_sizes, name, labels = args
        ctx.save_for_backward(send)
        ctx.sizes, ctx.name, ctx.labels, ctx.sum_dtype = sizes, name, labels, anchor_SF.dtype
        arrived_NF = failure.wait(data_NF, f"all-to-all of {labels[0]}", name)
        passed_MF = arrived_NF.index_select(0, send)
        send_sizes, recv_sizes = needed.halves(next_sizes)
        what = f"all-to-all of {labels[1]}"
        data = failure.start(what, name, _torch.start_all_to_all, passed_MF, recv_sizes, send_sizes, name)
        ctx.mark_non_differentiable(data)
        return arrived_NF, data, anchor(passed_MF.shape, passed_MF)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        check_first_order()
        grad_NF, _, pending = grads
        (send,) = ctx.saved_tensors
        send_sizes, recv_sizes = needed.halves(ctx.sizes)
        passed_MF = failure.wait(pending, f"all-to-all of gradients, {ctx.labels[1]}", ctx.name)
        total_NF = grad_NF.to(ctx.sum_dtype).index_add(0, send, passed_MF)
        what = f"all-to-all of gradients, {ctx.labels[0]}"
        home = failure.start(what, ctx.name, _torch.start_all_to_all, total_NF, send_sizes, recv_sizes, ctx.name)
        return None, returned(home), None, None, None, None, None


def pass_on(
    pending: needed.Pending, routes: tuple[needed.Route, needed.Route], name: str, labels: tuple[str, str]
) -> tuple[torch.Tensor, needed.Pending]:
    """Wait for the first chunk and start to pass rows of it on; returns its keys in order, and the second chunk.

    Args:
        routes: of both chunks; `send` of the second are rows of the first as they arrive.
        labels: name the two transfers in errors.
    """
    route, then = routes
    arrived_NF, *passing = _PassOn.apply(*pending, then.send, route.sizes, then.sizes, name, labels)
    return needed.in_order(arrived_NF, route), needed.Pending(*passing)
