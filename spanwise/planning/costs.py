"""What a plan costs: seconds, bytes held and received, tokens between hosts. All are readings of its route. Pure.

Compute is the attention kernel's FLOPs over its rate. Traffic is the exact bytes of every pair of ranks on the levels
of the network. Copies are bytes over the memory's rate:

- K/V packed to leave, and received K/V put in order;
- the merge of each received chunk (two results read, one written, in float32 at least);
- gradients packed and summed;
- under Ulysses q, K, V and the output, split by head and put in order.

Assumptions: the work of a chunk is in proportion to its tokens, unless the exchange computes it exactly. Every rank
begins each pass at the same time. A collective, also a hop of a ring, begins when all ranks have started it.
"""

# P ranks, G groups, n chunks

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.hardware import attention_flops
from spanwise.layouts import traffic
from spanwise.layouts.layout import Layout
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import heads, recurrent, timeline
from spanwise.planning.plan_data import PlanData
from spanwise.routes.route import RECEIVER, ROW, START, Route

PARTS = (
    "compute_forward", "compute_backward", "exchange_forward", "exchange_backward",
    "exposed_forward", "exposed_backward", "total",
)  # fmt: skip


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


def simulate(plan: PlanData, mask: str) -> timeline.Timeline:
    """Timeline of one layer that uses ``mask``."""
    plan.mask(mask)
    plan.require_shape("timeline()")
    inner, route = plan.inner, plan.route(mask)
    kv_bytes = kv_token_bytes(plan).astype(np.float64)  # of a token, [P]
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    forward, backward = _attention(plan, mask, route)

    # Copies; `copy` is the seconds of a byte. Query rows and keys are those of the rank's group.
    copy, steps = plan.hardware.copy_seconds(1.0), len(route.sources) > 0
    num_heads, v_dim = plan.attention_shape[0] // inner, plan.attention_shape[3]
    queries, keys, sent = (np.repeat(each, inner) for each in (plan.query_rows, route.held, route.packed.sum(axis=0)))
    received = np.repeat(route.received, inner, axis=1).T
    pack = copy * (kv_bytes * (keys * steps + sent))  # K and V of a token become one row, which is sent
    unpack = copy * (2 * grad_bytes * sent + kv_bytes * keys * steps)
    merged = copy * (1.5 * num_heads * v_dim * plan.sum_itemsize * queries)  # two results read, one written
    # Passes over a chunk's K/V as it arrives, and over its gradients as they leave; whole shards stay where they came.
    arrived, leaving = (0.0, 1.5) if route.of_shards else (2.0, 2.0)
    forward[:, 1:] += copy * (arrived * kv_bytes[:, None] * received) + merged[:, None]
    backward[:, 1:] += copy * (leaving * grad_bytes[:, None] * received)
    backward[:, -1] += copy * (num_heads * v_dim * plan.itemsize * queries) * steps  # output times its gradient
    if is_compact(plan):  # a product a token; again in the backward twice, and the gradients of its two operands
        expanding = 2.0 * int(kv_bytes[0]) / plan.itemsize * plan.attention_shape[1] * (plan.attention_shape[2] + v_dim)
        seconds = expanding / plan.hardware.matmul_flops
        forward[:, 1:] += seconds * received
        backward[:, 1:] += 4 * seconds * received
    if inner > 1:
        traded, output = (copy * num_bytes for num_bytes in heads.copied(plan, kv_bytes))
        pack, unpack = pack + traded, unpack + traded
        forward[:, -1] += output
        backward[:, -1] += output

    fetched, home = _exchange(plan, route, kv_bytes, grad_bytes)
    refetch = None if plan.keep_kv else _exchange(plan, route.direct, kv_bytes, grad_bytes)[0]
    group = np.repeat(route.joined, inner, axis=1)  # a rank meets those at its place in other groups
    joined = np.where(group < 0, -1, group * inner + np.arange(plan.num_ranks) % inner)
    passes = [
        timeline.forward(pack, forward, fetched, chained=route.chained, joined=joined),
        timeline.backward(backward, home, unpack, refetch, chained=route.chained, joined=joined),
    ]
    if inner > 1:
        there, back = (heads.trade_seconds(plan, backward=backward) for backward in (False, True))
        passes = [timeline.between_trades(passes[0], *there), timeline.between_trades(passes[1], *reversed(back))]
    return timeline.Timeline(*passes)


def _exchange(plan: PlanData, route: Route, kv_bytes: Float64, grad_bytes: Float64) -> tuple[Float64, Float64]:
    """Seconds of each step of a route, and of the collectives that bring its gradients home; ``[n]`` each.

    Args:
        kv_bytes, grad_bytes: ``[P]``, bytes of a token on each rank; equal at the same place of all groups.
    """
    rates = plan.hardware
    if route.gathered and plan.inner == 1:
        shard = float(route.padded.max())
        forward = rates.all_gather_seconds(shard * kv_bytes[0], plan.num_ranks)
        return np.array([forward]), np.array([rates.reduce_scatter_seconds(shard * grad_bytes[0], plan.num_ranks)])
    loads = []
    for table in route.padded:  # between ranks: each trades with its place in other groups
        loads.append(rates.loads(table if plan.inner == 1 else np.kron(table, np.eye(plan.inner, dtype=np.int64))))
    # Gradients travel the other way, and what ranks receive and send changes places: the busiest has as much.
    there, home = (np.array([rates.loads_seconds(load * x) for load in loads]) for x in (kv_bytes, grad_bytes))
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
    """(query, key) pairs of each step's keys, ``[P, n]``: exact where keys come that nobody reads.

    Elsewhere in proportion to tokens; every chunk has nearly the proportions of the whole.
    """
    tokens = np.repeat(route.tokens.sum(axis=2), plan.inner, axis=1).T
    if len(route.sources) > 1 and not route.exact and tokens.sum() > plan.needed_tokens(mask).sum():
        areas = []
        for step in route.steps:
            rows = [step.moves[step.moves[:, ROW] == row] for row in range(int(step.moves[:, ROW].max()) + 1)]
            keys = [moves[:, [RECEIVER, START, START + 1]] for moves in rows]  # by group
            areas.append(traffic.pairs_over(plan.mask(mask), plan.groups, keys, plan.batch_size))
        return np.repeat(np.stack(areas, axis=1), plan.inner, axis=0).astype(np.float64)
    remote = plan.inner * (plan.work(mask) - plan.local_work(mask)).astype(np.float64)
    return remote[:, None] * tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0)


# ---------------------------------------------------------------- bytes


def is_compact(plan: PlanData) -> bool:
    """Whether rows travel in place of K and V; ranks that trade heads expand them first."""
    return plan.kv_row_dim is not None and plan.inner == 1


def kv_token_bytes(plan: PlanData) -> Int64:
    """Bytes of K and V of one token, or of its row in their place, between groups; int64 ``[num_ranks]``.

    All heads, or under Ulysses the heads that the rank computes.
    """
    if is_compact(plan):
        assert plan.kv_row_dim is not None
        return np.full(plan.num_ranks, plan.kv_row_dim * plan.itemsize)
    num_heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    held = kv_heads if plan.inner == 1 else heads.kv_heads_held(num_heads, kv_heads, plan.inner)
    return np.full(plan.num_ranks, held * (qk_dim + v_dim) * plan.itemsize, np.int64)


def received(plan: PlanData, mask: str) -> Int64:
    """The bytes of `Plan.recv_bytes`."""
    plan.mask(mask)
    plan.require_shape("recv_bytes()")
    tokens = plan.route(mask).padded.sum(axis=(0, 2))
    exchanged = np.repeat(tokens, plan.inner) * kv_token_bytes(plan)
    return exchanged if plan.inner == 1 else exchanged + heads.received(plan)


def resident_and_saved(plan: PlanData, mask: str, what: str = "resident_bytes()") -> tuple[Int64, Int64]:
    """The bytes of `Plan.resident_bytes` and of `Plan.saved_bytes`."""
    plan.mask(mask)
    plan.require_shape(what)
    route, token_bytes = plan.route(mask), kv_token_bytes(plan)
    kept = route.tokens.sum(axis=(0, 2)) * plan.keep_kv
    most = np.maximum(route.most_held(keep=plan.keep_kv), kept) if route.sources else kept
    exchanging, after = (np.repeat(tokens, plan.inner) * token_bytes for tokens in (most, kept))
    if is_compact(plan) and route.sources:  # K and V of one chunk at a time
        _, kv_heads, qk_dim, v_dim = plan.attention_shape
        exchanging = exchanging + route.tokens.sum(axis=2).max(axis=0) * kv_heads * (qk_dim + v_dim) * plan.itemsize
    if plan.inner == 1:
        return exchanging, after
    return heads.resident_and_saved(plan, exchanging, after)


def held(plan: PlanData) -> int:
    """Bytes that the busiest rank holds for exchanges: saved by all layers, plus the transient bytes of one."""
    found = {name: resident_and_saved(plan, name) for name in plan.masks}
    kept = sum(weight * found[name][1] for name, weight in plan.weights.items())
    transient = np.max([resident - saved for resident, saved in found.values()], axis=0)
    return int(np.ceil(np.max(kept + np.maximum(transient, 0))))


# ---------------------------------------------------------------- hosts


class HostTraffic(NamedTuple):
    """K/V tokens that all ranks receive in a forward, by where they come from.

    Attributes:
        host_size: ranks of a host.
        inside: from ranks of the same host.
        between: from other hosts; a token counts for each rank that receives it.
        once: tokens that some rank of a host reads and none holds; each counts once a host.
    """

    host_size: int
    inside: int
    between: int
    once: int


def host_size(plan: PlanData) -> int | None:
    """Ranks of a host; None without hosts smaller than the plan."""
    return plan.hardware.groups_on_a_host(plan.num_ranks)


def host_traffic(plan: PlanData, mask: str, size: int | None = None) -> HostTraffic:
    """The counts of `Plan.host_traffic`."""
    size = size or host_size(plan)
    if size is None or size < 1:
        raise ValueError(
            f"the plan's hardware {plan.hardware.name!r} has no hosts smaller than {plan.num_ranks} ranks: give "
            f"host_size, or make the plan with hardware that has hosts, such as spanwise.H100"
        )
    tokens, host = plan.traffic(mask), np.arange(plan.num_ranks) // size
    inside = int(tokens[host[:, None] == host].sum())
    return HostTraffic(size, inside, int(tokens.sum()) - inside, _entering(plan, mask, host))


def _entering(plan: PlanData, mask: str, host: Int64) -> int:
    """Tokens that some rank of a host reads and none holds, summed over hosts."""

    def by_host(layout: Layout) -> Layout:
        pieces = [layout.pieces(row) for row in range(layout.batch_size)]
        tables = [np.column_stack([host[each[:, 0]], each[:, 1:]]) for each in pieces]
        return Layout(tables, int(host[-1]) + 1, layout.seq_len)

    held = by_host(plan.kv_layout)
    rows = traffic.needs(plan.mask(mask), by_host(plan.layout), held)
    return plan.batch_size // len(rows) * int(sum((runs[:, 1] - runs[:, 0]).sum() for row in rows for runs in row))
