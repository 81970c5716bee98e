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
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import recurrent, timeline
from spanwise.planning.memory import kv_token_bytes
from spanwise.planning.plan_data import PlanData

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
    exchange, kv_bytes = plan.kv_exchange, kv_token_bytes(plan).astype(np.float64)
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    compute, copies = _compute(plan, mask), _copies(plan, mask, kv_bytes, grad_bytes)
    forward, backward = compute.forward, compute.backward
    forward[:, 1:] += copies.arrived + copies.merged[:, None]
    backward[:, 1:] += copies.gradients
    backward[:, -1] += copies.output_grad
    pack, unpack = copies.pack, copies.unpack
    if plan.head_exchange is not None:
        copy = plan.hardware.copy_seconds(1.0)
        queries, output = (copy * num_bytes for num_bytes in plan.head_exchange.copied(plan, kv_bytes))
        pack, unpack = pack + queries, unpack + queries
        forward[:, -1] += output
        backward[:, -1] += output
    to_come = exchange.seconds(plan, mask, kv_bytes, gradients=False)
    to_return = exchange.seconds(plan, mask, grad_bytes, gradients=True)
    refetch, joined = None if plan.keep_kv else to_come, exchange.joined(plan, mask)
    passes = (
        timeline.forward(pack, forward, to_come, chained=exchange.chained, joined=joined),
        timeline.backward(backward, to_return, unpack, refetch, chained=exchange.chained, joined=joined),
    )
    if plan.head_exchange is None:
        return timeline.Timeline(*passes)
    seconds = [plan.head_exchange.trade_seconds(plan, backward=backward) for backward in (False, True)]
    return timeline.Timeline(
        timeline.between_trades(passes[0], *seconds[0]), timeline.between_trades(passes[1], *reversed(seconds[1]))
    )


def over_ranks(plan: PlanData, of_groups: Int64) -> Int64:
    """Tables between groups ``[…, G, G]`` as tables between ranks: a rank meets those at its place in other groups."""
    return of_groups if plan.inner == 1 else np.kron(of_groups, np.eye(plan.inner, dtype=np.int64))


class _Compute(NamedTuple):
    """Seconds of the attention kernel, ``[P, n + 1]``: on the rank's own keys, then on each chunk."""

    forward: Float64
    backward: Float64


def _compute(plan: PlanData, mask: str) -> _Compute:
    heads, _, qk_dim, v_dim = plan.attention_shape
    own = plan.inner * plan.local_work(mask).astype(np.float64)
    # At the mask's edge the kernel also computes pairs that the mask hides.
    edge = np.where(own > 0, plan.hardware.edge_pairs * _query_tokens(plan), 0.0)
    pairs = np.concatenate([(own + edge)[:, None], plan.kv_exchange.chunk_work(plan, mask)], axis=1)

    def seconds(backward: bool) -> Float64:
        # One rank's share of the heads, over the tokens of its group.
        per_pair = attention_flops(1.0, heads // plan.inner, qk_dim, v_dim, backward=backward)
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
    exchange, copy = plan.kv_exchange, plan.hardware.copy_seconds(1.0)
    heads, v_dim = plan.attention_shape[0] // plan.inner, plan.attention_shape[3]
    tokens, keys = _query_tokens(plan), np.repeat(plan.kv_held.astype(np.float64), plan.inner)
    received = over_ranks(plan, plan.moved(mask)).sum(axis=2).T
    some = plan.num_chunks(mask) > 0
    side_by_side = keys * some  # K and V of a token become one row
    sent = np.repeat(exchange.packed(plan, mask), plan.inner)
    forward, backward = exchange.passes
    return _Copies(
        pack=copy * (kv_bytes * (side_by_side + sent)),
        unpack=copy * (2 * grad_bytes * sent + kv_bytes * side_by_side),
        arrived=copy * (forward * kv_bytes[:, None] * received),
        gradients=copy * (backward * grad_bytes[:, None] * received),
        merged=copy * (1.5 * heads * v_dim * plan.sum_itemsize * tokens),  # two read, one written
        output_grad=copy * (heads * v_dim * plan.itemsize * tokens) * some,
    )


def _query_tokens(plan: PlanData) -> Float64:
    """Query rows that each rank computes, those of its group; ``[P]``."""
    return plan.batch_size * np.repeat(plan.groups.tokens_per_rank.astype(np.float64), plan.inner)
