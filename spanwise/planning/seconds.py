"""Predicted seconds of a plan's attention: a simulated timeline of every rank, read from masks, layout and route.

Each rank has a compute stream and an exchange stream, both in order. A collective, also a hop of a ring, begins when
all ranks that it joins have started it and their previous one has ended. Every rank begins each pass at the same time.

    forward    pack · local · chunk 1 (waits for its arrival) · … · chunk n
    backward   chunk n · (its gradients depart) · … · chunk 1 · local · sum (waits for the last gradients)

Compute is the attention kernel's FLOPs over its rate. The work of a chunk is in proportion to its tokens, unless the
exchange brings keys that nobody reads. Traffic is the exact bytes of every pair of ranks on the levels of the network.
Copies are bytes over the memory's rate: K/V packed to leave and put in order, the merge of each received chunk,
gradients packed and summed, and under Ulysses q, K, V and the output, split by head and put in order.
"""

# P ranks, G groups, n chunks

from __future__ import annotations

import dataclasses

import numpy as np

from spanwise.hardware import attention_flops
from spanwise.layouts import traffic
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import memory, recurrent
from spanwise.planning.plan_data import PlanData
from spanwise.routes.route import RECEIVER, ROW, START, STOP, Route

PARTS = (
    "compute_forward", "compute_backward", "exchange_forward", "exchange_backward",
    "exposed_forward", "exposed_backward", "total",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """One operation on a stream of a rank; ``start`` and ``end`` in seconds from the beginning of the forward."""

    rank: int
    stream: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward.

    Attributes:
        names: of the compute steps of a rank, in order.
        start, end: ``[P, len(names)]``, seconds from the beginning of the pass.
        exchange_names: of the collectives, in order.
        exchange_start, exchange_end: ``[len(exchange_names)]``.
    """

    names: tuple[str, ...]
    start: Float64
    end: Float64
    exchange_names: tuple[str, ...]
    exchange_start: Float64
    exchange_end: Float64

    @property
    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return float(self.end[:, -1].max())

    @property
    def compute(self) -> float:
        """Compute seconds of the busiest rank."""
        return float((self.end - self.start).sum(axis=1).max())

    @property
    def exchange(self) -> float:
        """Seconds of the collectives."""
        return float((self.exchange_end - self.exchange_start).sum())

    @property
    def exposed(self) -> float:
        """Seconds of the pass beyond the compute of the busiest rank."""
        return max(0.0, self.seconds - self.compute)


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Forward and backward of one attention layer; the backward begins when every rank has finished the forward."""

    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Everything that takes time, rank by rank; streams are "compute" and "exchange"."""
        found = []
        for one, offset in ((self.forward, 0.0), (self.backward, self.forward.seconds)):
            for rank in range(len(one.start)):
                for stream, names, start, end in (
                    ("compute", one.names, one.start[rank], one.end[rank]),
                    ("exchange", one.exchange_names, one.exchange_start, one.exchange_end),
                ):
                    found += [
                        Interval(rank, stream, name, offset + float(a), offset + float(b))
                        for name, a, b in zip(names, start, end, strict=True)
                        if b > a
                    ]
        return tuple(found)


# ---------------------------------------------------------------- one pass, simulated


class _Streams:
    """The two streams of every rank while a pass is simulated.

    Attributes:
        now: when the compute of each rank ends, ``[P]``; `free`: when its last collective ends.
    """

    def __init__(self, num_ranks: int) -> None:
        self.now, self.free = np.zeros((2, num_ranks))
        self._steps: list[tuple[str, Float64, Float64]] = []
        self._sent: list[tuple[str, float, float]] = []

    def compute(self, name: str, seconds: Float64, after: Float64 | float = 0.0) -> None:
        """The next compute step of all ranks, not before `after`."""
        start = np.maximum(self.now, after)
        self.now = start + seconds
        self._steps.append((name, start, self.now))

    def send(self, name: str, ready: Float64 | float, seconds: float, joined: Int64 | None = None) -> Float64:
        """The next collective, when it ends on each rank, ``[P]``.

        Args:
            ready: when each rank can start it.
            joined: ``[P]``: ranks with equal numbers wait for one another, one with a negative number takes no part;
                None: all wait for all.
        """
        begin = np.maximum(ready, self.free)
        if joined is None:
            self.free = np.full_like(begin, begin.max() + seconds)
        else:
            latest = np.zeros(int(joined.max(initial=0)) + 1)
            np.maximum.at(latest, joined[joined >= 0], begin[joined >= 0])
            self.free = np.where(joined < 0, begin, latest[joined] + seconds)
        last = float(self.free.max())
        self._sent.append((name, last - seconds, last))
        return self.free

    def done(self) -> Pass:
        """The pass."""
        names, start, end = zip(*self._steps, strict=True)
        sent, begin, through = zip(*self._sent, strict=True) if self._sent else ((), (), ())
        return Pass(
            names, np.stack(start, axis=1), np.stack(end, axis=1), sent, np.array(begin), np.array(through)
        )  # fmt: skip


def forward(
    pack: Float64, attention: Float64, exchange: Float64, *, chained: bool = False, joined: Int64 | None = None,
    trades: tuple[float, float] | None = None,
) -> Pass:  # fmt: skip
    """Simulate a forward.

    Args:
        pack: ``[P]`` seconds before a rank can start its collectives.
        attention: ``[P, n + 1]`` seconds of the local part and of each chunk.
        exchange: ``[n]`` seconds of each chunk's collective.
        chained: ranks pass a chunk on (ring). Its collective starts when the ranks begin the previous chunk; otherwise
            all collectives start first.
        joined: ``[n, P]``, for each chunk's collective as in `_Streams.send`.
        trades: seconds of the exposed trade of heads for tokens before, and of the trade back after.
    """
    streams, arrived = _begin(len(pack), trades), list[Float64]()
    streams.compute("pack", pack)
    for i in range(len(exchange) + 1):
        begin = np.maximum(streams.now, arrived[i - 1] if i else 0.0)
        first, stop = (i, i + 1) if chained else (0, len(exchange) if i == 0 else 0)
        for sent in range(first, min(stop, len(exchange))):
            ranks = None if joined is None else joined[sent]
            arrived.append(streams.send(f"K/V, chunk {sent + 1}", begin, float(exchange[sent]), ranks))
        streams.compute(f"attention, chunk {i}" if i else "local attention", attention[:, i], begin)
    return _end(streams, trades)


def backward(
    attention: Float64, exchange: Float64, unpack: Float64, refetch: Float64 | None = None, *,
    chained: bool = False, joined: Int64 | None = None, trades: tuple[float, float] | None = None,
) -> Pass:  # fmt: skip
    """Simulate a backward.

    Args:
        attention: ``[P, n + 1]`` seconds of the backward of the local part and of each chunk, in forward order.
        exchange: ``[n]`` seconds of the collective that brings each chunk's gradients home.
        unpack: ``[P]`` seconds to sum them.
        refetch: ``[n]`` seconds of each chunk's K/V collective if the backward refetches: the next chunk departs when
            this one's turn begins.
        chained: a chunk's gradients are added to those of the chunk after it; a rank waits for these first.
        joined, trades: as in `forward`.
    """
    streams, num_chunks = _begin(len(attention), trades), len(exchange)
    home, arrived = np.zeros(len(attention)), [np.zeros(len(attention))] * num_chunks
    for i in range(num_chunks - 1, -1, -1):
        if refetch is not None:
            for j in ([i] if i == num_chunks - 1 else []) + ([i - 1] if i else []):
                arrived[j] = streams.send(f"K/V refetched, chunk {j + 1}", streams.now, float(refetch[j]))
        streams.compute(f"attention backward, chunk {i + 1}", attention[:, i + 1], arrived[i])
        if chained:
            streams.now = np.maximum(streams.now, home)
        ranks = None if joined is None else joined[i]
        home = streams.send(f"dK/dV, chunk {i + 1}", streams.now, float(exchange[i]), ranks)
    streams.compute("local attention backward", attention[:, 0])
    streams.compute("sum gradients", unpack, home)
    return _end(streams, trades)


def _begin(num_ranks: int, trades: tuple[float, float] | None) -> _Streams:
    streams = _Streams(num_ranks)
    if trades is not None:
        streams.now = streams.send("heads for tokens", 0.0, trades[0])
    return streams


def _end(streams: _Streams, trades: tuple[float, float] | None) -> Pass:
    if trades is not None:
        all_done = np.full_like(streams.now, streams.now.max())
        streams.compute("traded", np.zeros_like(all_done), streams.send("tokens for heads", all_done, trades[1]))
    return streams.done()


# ---------------------------------------------------------------- of a plan


def predict(plan: PlanData) -> dict[str, float]:
    """Seconds of attention in one step, all masks by weight: the result of `Plan.predict`."""
    plan.require_shape("predict()")
    parts = dict.fromkeys(PARTS, 0.0)
    for name, weight in plan.weights.items():
        simulated = simulate(plan, name)
        for key, one in (("forward", simulated.forward), ("backward", simulated.backward)):
            parts[f"compute_{key}"] += weight * one.compute
            parts[f"exchange_{key}"] += weight * one.exchange
            parts[f"exposed_{key}"] += weight * one.exposed
        parts["total"] += weight * simulated.seconds
    if plan.recurrences:
        parts["recurrent"] = recurrent.seconds(plan)
        parts["total"] += parts["recurrent"]
    return parts


def simulate(plan: PlanData, mask: str) -> Timeline:
    """Timeline of one layer that uses ``mask``."""
    plan.require_shape("timeline()")
    inner, route, rates = plan.inner, plan.route(mask), plan.hardware
    kv_bytes = float(memory.kv_token_bytes(plan))
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    ahead, back = _attention(plan, mask, route)

    # Copies; `copy` is the seconds of a byte. Query rows and keys are those of the rank's group.
    copy, steps = rates.copy_seconds(1.0), len(route.sources) > 0
    num_heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    queries, keys, sent = (np.repeat(each, inner) for each in (plan.query_rows, route.held, route.packed.sum(axis=0)))
    received = np.repeat(route.received, inner, axis=1).T
    pack = copy * (kv_bytes * (keys * steps + sent))  # K and V of a token become one row, which is sent
    unpack = copy * (2 * grad_bytes * sent + kv_bytes * keys * steps)
    output = num_heads // inner * v_dim * queries
    merged = copy * (1.5 * plan.sum_itemsize * output)  # two results read, one written
    # Passes over a chunk's K/V as it arrives, and over its gradients as they leave; whole shards stay where they came.
    arrived, leaving = (0.0, 1.5) if route.of_shards else (2.0, 2.0)
    ahead[:, 1:] += copy * (arrived * kv_bytes * received) + merged[:, None]
    back[:, 1:] += copy * (leaving * grad_bytes * received)
    back[:, -1] += copy * (plan.itemsize * output) * steps  # output times its gradient
    if memory.is_compact(plan):  # a product a token; again in the backward twice, and the gradients of its two operands
        expanding = 2.0 * kv_bytes / plan.itemsize * kv_heads * (qk_dim + v_dim) / rates.matmul_flops
        ahead[:, 1:] += expanding * received
        back[:, 1:] += 4 * expanding * received
    trades = None
    if inner > 1:
        # All heads of a rank's own tokens on one side, its heads of all the group's tokens on the other.
        own_q, own_kv = (
            plan.batch_size * (own.tokens_per_rank + np.repeat(group.tokens_per_rank, inner) / inner)
            for own, group in ((plan.layout, plan.groups), (plan.kv_layout, plan.kv_groups))
        )
        split = copy * (own_q * num_heads * qk_dim * plan.itemsize + own_kv * inner * kv_bytes)
        pack, unpack = pack + split, unpack + split
        ahead[:, -1] += copy * (own_q * num_heads * v_dim * plan.itemsize)
        back[:, -1] += copy * (own_q * num_heads * v_dim * plan.itemsize)
        trades = _trade_seconds(plan, backward=False)

    fetched, home = _exchange(plan, route, kv_bytes, grad_bytes)
    refetch = None if plan.keep_kv else _exchange(plan, route.direct, kv_bytes, grad_bytes)[0]
    group = np.repeat(route.joined, inner, axis=1)  # a rank meets those at its place in other groups
    joined = np.where(group < 0, -1, group * inner + np.arange(plan.num_ranks) % inner)
    trades_back = None if trades is None else _trade_seconds(plan, backward=True)[::-1]
    return Timeline(
        forward(pack, ahead, fetched, chained=route.chained, joined=joined, trades=trades),
        backward(back, home, unpack, refetch, chained=route.chained, joined=joined, trades=trades_back),
    )


def _trade_seconds(plan: PlanData, *, backward: bool) -> tuple[float, float]:
    """Seconds of heads for tokens and of the way back, ``into, back`` of `memory.trades`; all groups at one time."""
    group, of_ranks = np.arange(plan.num_groups), np.zeros((2, *(plan.num_groups, plan.inner) * 2))
    for table, of_groups in zip(of_ranks, memory.trades(plan, backward=backward), strict=True):
        table[group, :, group, :] = of_groups
    into, back = map(plan.hardware.all_to_all_seconds, of_ranks.reshape(2, plan.num_ranks, plan.num_ranks))
    return into, back


def _exchange(plan: PlanData, route: Route, kv_bytes: float, grad_bytes: float) -> tuple[Float64, Float64]:
    """Seconds of each step of a route, and of the collectives that bring its gradients home; ``[n]`` each."""
    rates = plan.hardware
    if route.gathered and plan.inner == 1:
        shard = float(route.padded.max())
        ahead = rates.all_gather_seconds(shard * kv_bytes, plan.num_ranks)
        return np.array([ahead]), np.array([rates.reduce_scatter_seconds(shard * grad_bytes, plan.num_ranks)])
    tables = route.padded
    if plan.inner > 1:  # between ranks: each trades with its place in other groups
        tables = np.kron(tables, np.eye(plan.inner, dtype=np.int64))
    there, home = rates.steps_seconds(tables, kv_bytes, grad_bytes)
    return there, home


def _attention(plan: PlanData, mask: str, route: Route) -> list[Float64]:
    """Seconds of forward and of backward on the rank's own keys, then on each chunk; ``[P, n + 1]`` each."""
    own = plan.inner * plan.local_work(mask).astype(np.float64)
    # At the mask's edge the kernel also computes pairs that the mask hides.
    own += np.where(own > 0, plan.hardware.edge_pairs * np.repeat(plan.query_rows, plan.inner), 0.0)
    pairs, found = np.concatenate([own[:, None], _chunk_pairs(plan, mask, route)], axis=1), []
    num_heads, _, qk_dim, v_dim = plan.attention_shape
    for backward in (False, True):  # a rank's fraction of the heads, over the tokens of its group
        per_pair = attention_flops(1.0, num_heads // plan.inner, qk_dim, v_dim, backward=backward)
        found.append(plan.hardware.attention_seconds(pairs * per_pair, backward=backward))
    return found


def _chunk_pairs(plan: PlanData, mask: str, route: Route) -> Float64:
    """(query, key) pairs of each step's keys, ``[P, n]``: exact where keys travel that nobody reads.

    Elsewhere in proportion to tokens; every chunk has nearly the proportions of the whole.
    """
    tokens = np.repeat(route.tokens.sum(axis=2), plan.inner, axis=1).T
    if len(route.sources) > 1 and not route.exact and tokens.sum() > plan.needed_tokens(mask).sum():
        areas = []
        for step in route.steps:
            rows = [step.moves[step.moves[:, ROW] == row] for row in range(int(step.moves[:, ROW].max()) + 1)]
            keys = [moves[:, [RECEIVER, START, STOP]] for moves in rows]  # by group
            areas.append(traffic.pairs_over(plan.mask(mask), plan.groups, keys, plan.batch_size))
        return np.repeat(np.stack(areas, axis=1), plan.inner, axis=0).astype(np.float64)
    remote = plan.inner * (plan.work(mask) - plan.local_work(mask)).astype(np.float64)
    return remote[:, None] * tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0)
