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
from spanwise.layouts import document_runs, traffic
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import documents, memory
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


class Pass:
    """A forward or a backward, simulated step by step: a compute stream and an exchange stream for each rank.

    Attributes:
        names: of the compute steps of a rank, in order; `exchange_names`: of the collectives.
        now: when the compute of each rank has ended, ``[P]`` seconds from the beginning of the pass.
        free: when its last collective has ended.
    """

    def __init__(self, num_ranks: int) -> None:
        self.now, self.free = np.zeros((2, num_ranks))
        self.names: list[str] = []
        self.exchange_names: list[str] = []
        self._steps: list[tuple[Float64, Float64]] = []
        self._sent: list[tuple[float, float]] = []

    def run(self, name: str, seconds: Float64, after: Float64 | float = 0.0) -> None:
        """The next compute step of all ranks, not before `after`."""
        start = np.maximum(self.now, after)
        self.now = start + seconds
        self.names.append(name)
        self._steps.append((start, self.now))

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
        self.exchange_names.append(name)
        self._sent.append((last - seconds, last))
        return self.free

    @property
    def steps(self) -> Float64:
        """Start and end of the compute steps, ``[2, P, len(names)]``."""
        return np.stack([np.stack(each, axis=1) for each in zip(*self._steps, strict=True)])

    @property
    def sent(self) -> Float64:
        """Start and end of the collectives, ``[2, len(exchange_names)]``."""
        return np.array(self._sent).reshape(-1, 2).T

    @property
    def busy(self) -> Float64:
        """Compute seconds of each rank, ``[P]``."""
        start, end = self.steps
        return np.asarray((end - start).sum(axis=1))

    @property
    def seconds(self) -> float:
        """Seconds until the last rank is done."""
        return float(self.now.max())

    @property
    def compute(self) -> float:
        """Compute seconds of the busiest rank."""
        return float(self.busy.max())

    @property
    def exchange(self) -> float:
        """Seconds of the collectives."""
        start, end = self.sent
        return float((end - start).sum())

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
            sent = (one.sent + offset).T.tolist()
            for rank, steps in enumerate((one.steps + offset).transpose(1, 2, 0).tolist()):
                for stream, names, times in (("compute", one.names, steps), ("exchange", one.exchange_names, sent)):
                    found += [
                        Interval(rank, stream, name, *time)
                        for name, time in zip(names, times, strict=True)
                        if time[1] > time[0]
                    ]
        return tuple(found)


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
        joined: ``[n, P]``, for each chunk's collective as in `Pass.send`.
        trades: seconds of the exposed trade of heads for tokens before, and of the trade back after.
    """
    one, arrived = _begin(len(pack), trades), list[Float64]()
    one.run("pack", pack)
    for i in range(len(exchange) + 1):
        begin = np.maximum(one.now, arrived[i - 1] if i else 0.0)
        first, stop = (i, i + 1) if chained else (0, len(exchange) if i == 0 else 0)
        for sent in range(first, min(stop, len(exchange))):
            ranks = None if joined is None else joined[sent]
            arrived.append(one.send(f"K/V, chunk {sent + 1}", begin, float(exchange[sent]), ranks))
        one.run(f"attention, chunk {i}" if i else "local attention", attention[:, i], begin)
    return _end(one, trades)


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
            this one begins.
        chained: a chunk's gradients are added to those of the chunk after it; a rank waits for these first.
        joined, trades: as in `forward`.
    """
    one, num_chunks = _begin(len(attention), trades), len(exchange)
    home, arrived = np.zeros(len(attention)), [np.zeros(len(attention))] * num_chunks
    for i in range(num_chunks - 1, -1, -1):
        if refetch is not None:
            for j in ([i] if i == num_chunks - 1 else []) + ([i - 1] if i else []):
                arrived[j] = one.send(f"K/V refetched, chunk {j + 1}", one.now, float(refetch[j]))
        one.run(f"attention backward, chunk {i + 1}", attention[:, i + 1], arrived[i])
        if chained:
            one.now = np.maximum(one.now, home)
        home = one.send(f"dK/dV, chunk {i + 1}", one.now, float(exchange[i]), None if joined is None else joined[i])
    one.run("local attention backward", attention[:, 0])
    one.run("sum gradients", unpack, home)
    return _end(one, trades)


def _begin(num_ranks: int, trades: tuple[float, float] | None) -> Pass:
    one = Pass(num_ranks)
    if trades is not None:
        one.now = one.send("heads for tokens", 0.0, trades[0])
    return one


def _end(one: Pass, trades: tuple[float, float] | None) -> Pass:
    if trades is not None:
        one.run("traded", np.zeros_like(one.now), one.send("tokens for heads", one.now.max(), trades[1]))
    return one


# ---------------------------------------------------------------- of a plan


def predict(plan: PlanData) -> dict[str, float]:
    """Seconds of attention in one step, all masks by weight: the result of `Plan.predict`."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name, weight in plan.weights.items():
        layer = timeline(plan, name)
        for key, one in (("forward", layer.forward), ("backward", layer.backward)):
            parts[f"compute_{key}"] += weight * one.compute
            parts[f"exchange_{key}"] += weight * one.exchange
            parts[f"exposed_{key}"] += weight * one.exposed
        parts["total"] += weight * layer.seconds
    if plan.recurrences:
        parts["recurrent"] = sum(seconds for _, seconds in recurrent(plan).values())
        parts["total"] += parts["recurrent"]
    return parts


def recurrent(plan: PlanData) -> dict[str, tuple[int, float]]:
    """For each kind of recurrent layers the maps that travel in a forward, all ranks together; seconds of a step.

    Seconds are those of what travels: the maps of runs, ahead and back, and tokens that move between the two layouts,
    once there and once back for each change between recurrent and attention layers.
    """
    own, rates = plan.recurrent(), plan.hardware
    runs = document_runs.find(own.layout, documents.packings(plan, state=True))
    ahead = document_runs.map_traffic(runs, plan.num_ranks)
    moved = np.zeros_like(ahead)  # tokens, receivers by senders
    for row in range(plan.layout.batch_size if plan.relayout else 0):
        pieces = own.layout.pieces(row)
        piece, sender, both = plan.layout.owners_of(pieces[:, 1:], row)
        np.add.at(moved, (pieces[piece, 0], sender), both[:, 1] - both[:, 0])
    np.fill_diagonal(moved, 0)
    found = {}
    for name, of in (plan.recurrences or {}).items():
        layer = rates.all_to_all_seconds(ahead * of.map_bytes) + rates.all_to_all_seconds(ahead.T * of.map_bytes)
        moves = sum(2 * rates.all_to_all_seconds(moved * of.hidden * size) for size in (plan.itemsize, 4))
        found[name] = int(ahead.sum()), of.layers * layer + min(of.layers, sum(plan.weights.values())) * moves
    return found


def timeline(plan: PlanData, mask: str) -> Timeline:
    """Timeline of one layer that uses ``mask``."""
    num_heads, kv_heads, qk_dim, v_dim = shape = plan.attention_shape("predict() and timeline()")
    inner, route, rates = plan.inner, plan.route(mask), plan.hardware
    kv_bytes = float(memory.kv_token_bytes(plan, shape))
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    pairs = _pairs(plan, mask, route)
    # A rank's fraction of the heads, over the tokens of its group.
    per_pair = [attention_flops(1.0, num_heads // inner, qk_dim, v_dim, backward=each) for each in (False, True)]
    ahead, back = (rates.attention_seconds(pairs * each, backward=i == 1) for i, each in enumerate(per_pair))

    # Copies; `copy` is the seconds of a byte. Query rows and keys are those of the rank's group.
    copy, steps = rates.copy_seconds(1.0), len(route.sources) > 0
    rows = plan.batch_size * plan.groups.tokens_per_rank
    queries, keys, sent = (np.repeat(each, inner) for each in (rows, route.own_tokens, route.copied.sum(axis=0)))
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
        shard = float(route.wire_tokens.max())
        ahead = rates.all_gather_seconds(shard * kv_bytes, plan.num_ranks)
        return np.array([ahead]), np.array([rates.reduce_scatter_seconds(shard * grad_bytes, plan.num_ranks)])
    tables = route.wire_tokens
    if plan.inner > 1:  # between ranks: each trades with its place in other groups
        tables = np.kron(tables, np.eye(plan.inner, dtype=np.int64))
    there, home = rates.steps_seconds(tables, kv_bytes, grad_bytes)
    return there, home


def _pairs(plan: PlanData, mask: str, route: Route) -> Float64:
    """(query, key) pairs of the rank's own keys, then of each step's, ``[P, n + 1]``.

    Exact where keys travel that nobody reads; elsewhere in proportion to tokens, as every chunk has nearly the
    proportions of the whole.
    """
    work, own = plan.work(mask), plan.local_work(mask)
    local = plan.inner * own.astype(np.float64)
    # At the mask's edge the kernel also computes pairs that the mask hides.
    rows = np.repeat(plan.batch_size * plan.groups.tokens_per_rank, plan.inner)
    local += np.where(local > 0, plan.hardware.edge_pairs * rows, 0.0)
    tokens = np.repeat(route.tokens.sum(axis=2), plan.inner, axis=1).T
    if len(route.sources) > 1 and not route.exact and tokens.sum() > plan.needed_tokens(mask).sum():
        areas = []
        for step in route.steps:
            rows_of = [step.moves[step.moves[:, ROW] == row] for row in range(int(step.moves[:, ROW].max()) + 1)]
            keys = [moves[:, [RECEIVER, START, STOP]] for moves in rows_of]  # by group
            areas.append(traffic.pairs_over(plan.mask(mask), plan.groups, keys, plan.batch_size))
        away = np.repeat(np.stack(areas, axis=1), plan.inner, axis=0).astype(np.float64)
    else:
        remote = plan.inner * (work - own).astype(np.float64)
        away = remote[:, None] * tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0)
    return np.concatenate([local[:, None], away], axis=1)
