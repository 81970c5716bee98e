"""Seconds of a plan on a hardware: from exact areas and bytes to a timeline. Pure.

Compute is the attention kernel's FLOPs over its rate. Traffic is the exact bytes of every pair of ranks on the levels
of the network. Copies are bytes over the memory's rate:

- K/V packed to leave, and received K/V put in order;
- the merge of each received chunk (two results read, one written, in float32 at least);
- gradients packed and summed;
- under Ulysses q, K, V and the output, split by head and put in order.

Assumptions: the work of a chunk is in proportion to its tokens, unless the exchange computes it exactly. Every rank
begins each pass at the same time. A collective, also a hop of a ring, begins when all ranks have started it.
"""

# P ranks, n chunks

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.hardware import attention_flops
from spanwise.layouts.traffic import pairs_over
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import heads, recurrent, timeline
from spanwise.planning.memory import kv_token_bytes
from spanwise.planning.plan_data import PlanData
from spanwise.routes.route import RECEIVER, ROW, START, Route, gathers

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
    route, kv_bytes = plan.route(mask), kv_token_bytes(plan).astype(np.float64)
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    compute, copies = _compute(plan, mask), _copies(plan, mask, kv_bytes, grad_bytes)
    forward, backward = compute.forward, compute.backward
    forward[:, 1:] += copies.arrived + copies.merged[:, None]
    backward[:, 1:] += copies.gradients
    backward[:, -1] += copies.output_grad
    pack, unpack = copies.pack, copies.unpack
    if plan.inner > 1:
        copy = plan.hardware.copy_seconds(1.0)
        queries, output = (copy * num_bytes for num_bytes in heads.copied(plan, kv_bytes))
        pack, unpack = pack + queries, unpack + queries
        forward[:, -1] += output
        backward[:, -1] += output
    to_come = exchange_seconds(plan, route, kv_bytes, gradients=False)
    to_return = exchange_seconds(plan, route, grad_bytes, gradients=True)
    refetch = None if plan.keep_kv else exchange_seconds(plan, route.direct, kv_bytes, gradients=False)
    joined = _joined(plan, route)
    passes = (
        timeline.forward(pack, forward, to_come, chained=route.chained, joined=joined),
        timeline.backward(backward, to_return, unpack, refetch, chained=route.chained, joined=joined),
    )
    if plan.inner == 1:
        return timeline.Timeline(*passes)
    seconds = [heads.trade_seconds(plan, backward=backward) for backward in (False, True)]
    return timeline.Timeline(
        timeline.between_trades(passes[0], *seconds[0]), timeline.between_trades(passes[1], *reversed(seconds[1]))
    )


def over_ranks(plan: PlanData, of_groups: Int64) -> Int64:
    """Tables between groups ``[…, G, G]`` as tables between ranks: a rank meets those at its place in other groups."""
    return of_groups if plan.inner == 1 else np.kron(of_groups, np.eye(plan.inner, dtype=np.int64))


def exchange_seconds(plan: PlanData, route: Route, token_bytes: Float64, *, gradients: bool) -> Float64:
    """Seconds of each step of a route, ``[n]``.

    Args:
        token_bytes: ``[P]``, bytes of a token on each rank.
        gradients: of the collectives that bring gradients home, instead.
    """
    found, rates = [], plan.hardware
    for step, table in zip(route.steps, over_ranks(plan, route.padded), strict=True):
        if gathers(step) and plan.inner == 1:
            one = rates.reduce_scatter_seconds if gradients else rates.all_gather_seconds
            found.append(one(float(table.max()) * token_bytes[0], plan.num_ranks))
        else:
            found.append(rates.all_to_all_seconds((table.T if gradients else table) * token_bytes[:, None]))
    return np.array(found)


def _joined(plan: PlanData, route: Route) -> Int64:
    """Which ranks wait for one another in each step: those with equal numbers, int64 ``[n, P]``; -1 for no part."""
    place = np.arange(plan.num_ranks) % plan.inner  # a rank meets those at its place in other groups
    group = np.repeat(route.joined(), plan.inner, axis=1)
    return np.where(group < 0, -1, group * plan.inner + place)


def _chunk_pairs(plan: PlanData, mask: str, route: Route) -> Float64:
    """(query, key) pairs of each step's keys, ``[P, n]``: exact where keys come that nobody reads.

    Elsewhere in proportion to tokens; every chunk has nearly the proportions of the whole.
    """
    received = over_ranks(plan, route.tokens).sum(axis=2).T
    unread = received.sum() > plan.needed_tokens(mask).sum()
    if len(route.steps) > 1 and unread:
        areas = [pairs_over(plan.mask(mask), plan.groups, _by_row(step.moves), plan.batch_size) for step in route.steps]
        return np.repeat(np.stack(areas, axis=1), plan.inner, axis=0).astype(np.float64)
    remote = plan.inner * (plan.work(mask) - plan.local_work(mask)).astype(np.float64)
    return remote[:, None] * received / np.maximum(received.sum(axis=1, keepdims=True), 1.0)


def _by_row(moves: Int64) -> list[Int64]:
    """What each group receives, int64 ``[m, 3]`` for each batch row: receiver, start, stop."""
    return [moves[moves[:, ROW] == row][:, [RECEIVER, START, START + 1]] for row in range(int(moves[:, ROW].max()) + 1)]


class _Compute(NamedTuple):
    """Seconds of the attention kernel, ``[P, n + 1]``: on the rank's own keys, then on each chunk."""

    forward: Float64
    backward: Float64


def _compute(plan: PlanData, mask: str) -> _Compute:
    num_heads, _, qk_dim, v_dim = plan.attention_shape
    own = plan.inner * plan.local_work(mask).astype(np.float64)
    # At the mask's edge the kernel also computes pairs that the mask hides.
    edge = np.where(own > 0, plan.hardware.edge_pairs * _query_tokens(plan), 0.0)
    pairs = np.concatenate([(own + edge)[:, None], _chunk_pairs(plan, mask, plan.route(mask))], axis=1)

    def seconds(backward: bool) -> Float64:
        # One rank's share of the heads, over the tokens of its group.
        per_pair = attention_flops(1.0, num_heads // plan.inner, qk_dim, v_dim, backward=backward)
        return plan.hardware.attention_seconds(pairs * per_pair, backward=backward)

    return _Compute(seconds(False), seconds(True))


class _Copies(NamedTuple):
    """Seconds of copies on each rank.

    Attributes:
        pack, unpack: ``[P]``, before K/V leave, and after the last gradients have arrived.
        arrived, gradients: ``[P, n]``, each chunk as it arrives, and its gradients as they leave.
        merged: ``[P]``, the merge of one partial result.
        output_grad: ``[P]``, output times its gradient, first in the backward.
    """

    pack: Float64
    unpack: Float64
    arrived: Float64
    gradients: Float64
    merged: Float64
    output_grad: Float64


def _copies(plan: PlanData, mask: str, kv_bytes: Float64, grad_bytes: Float64) -> _Copies:
    route, copy = plan.route(mask), plan.hardware.copy_seconds(1.0)
    num_heads, v_dim = plan.attention_shape[0] // plan.inner, plan.attention_shape[3]
    tokens, keys = _query_tokens(plan), np.repeat(route.held.astype(np.float64), plan.inner)
    received = over_ranks(plan, route.padded).sum(axis=2).T
    some = len(route.steps) > 0
    side_by_side = keys * some  # K and V of a token become one row
    sent = np.repeat(route.copied(), plan.inner)
    # Passes over a chunk's K/V as it arrives, and over its gradients as they leave; whole shards stay where they came.
    forward, backward = (0.0, 1.5) if route.of_shards else (2.0, 2.0)
    return _Copies(
        pack=copy * (kv_bytes * (side_by_side + sent)),
        unpack=copy * (2 * grad_bytes * sent + kv_bytes * side_by_side),
        arrived=copy * (forward * kv_bytes[:, None] * received),
        gradients=copy * (backward * grad_bytes[:, None] * received),
        merged=copy * (1.5 * num_heads * v_dim * plan.sum_itemsize * tokens),  # two read, one written
        output_grad=copy * (num_heads * v_dim * plan.itemsize * tokens) * some,
    )


def _query_tokens(plan: PlanData) -> Float64:
    """Query rows that each rank computes, those of its group; ``[P]``."""
    return plan.batch_size * np.repeat(plan.groups.tokens_per_rank.astype(np.float64), plan.inner)
