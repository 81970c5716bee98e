"""Seconds of a plan on a hardware: from exact areas and bytes to a timeline. Pure; `plan` calls it.

Compute is the attention kernel's FLOPs over its rate, and what packing, merging and summing copy over the memory's.
Traffic is the exact bytes of every pair of ranks on the levels of the network. What is taken for granted: pieces read
keys in proportion to their tokens, and every rank begins each pass at the same time.
"""

# P ranks, n remote pieces

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanwise import cost, timeline
from spanwise.pieces import piece_tokens

if TYPE_CHECKING:
    from spanwise.plan import Plan

Float64 = NDArray[np.float64]
PARTS = (
    "compute_forward", "compute_backward", "exchange_forward", "exchange_backward",
    "exposed_forward", "exposed_backward", "total",
)  # fmt: skip


def predict(plan: Plan) -> dict[str, float]:
    """Seconds of attention in one step, all masks by weight; see `Plan.predict`."""
    parts = dict.fromkeys(PARTS, 0.0)
    for name, weight in plan.weights.items():
        simulated = simulate(plan, name)
        for key, one in (("forward", simulated.forward), ("backward", simulated.backward)):
            parts[f"compute_{key}"] += weight * one.compute
            parts[f"exchange_{key}"] += weight * one.exchange
            parts[f"exposed_{key}"] += weight * one.exposed
        parts["total"] += weight * simulated.seconds
    return parts


def simulate(plan: Plan, mask: str) -> timeline.Timeline:
    """Timeline of one layer that uses ``mask``; the plan has the attention's shape."""
    hardware = plan.hardware
    heads, kv_heads, qk_dim, v_dim = plan.attention_shape
    kv_bytes, grad_bytes = kv_heads * (qk_dim + v_dim) * plan.itemsize, kv_heads * (qk_dim + v_dim) * plan.sum_itemsize
    out_bytes = heads * v_dim * plan.itemsize
    tokens = plan.batch_size * plan.layout.tokens_per_rank.astype(np.float64)
    work, own = plan.work(mask).astype(np.float64), plan.local_work(mask).astype(np.float64)

    def attention(area: Float64, *, backward: bool) -> Float64:
        a_pair = cost.attention_flops(1.0, heads, qk_dim, v_dim, backward=backward)
        return hardware.attention_seconds(area * a_pair, backward=backward)

    def copy(num_bytes: Float64) -> Float64:
        return np.asarray(hardware.copy_seconds(1.0) * num_bytes)

    pieces = plan.num_pieces(mask)
    if plan.exchange == "needed":
        arriving = np.zeros((pieces, plan.num_ranks, plan.num_ranks))
        if pieces:
            tokens_of_lists, alike = plan.lists(mask)
            arriving[:] = alike * piece_tokens(tokens_of_lists, pieces, plan.block_size)
        received, sent = arriving.sum(axis=2).T, arriving.sum(axis=(0, 1))
        to_go = [hardware.all_to_all_seconds(x * kv_bytes) for x in arriving]
        to_come = [hardware.all_to_all_seconds(x.T * grad_bytes) for x in arriving]
    else:
        shard = plan.batch_size * float(plan.layout.tokens_per_rank.max())
        received = np.full((plan.num_ranks, pieces), (plan.num_ranks - 1) * shard)
        sent = tokens * bool(pieces)
        to_go = [hardware.all_gather_seconds(shard * kv_bytes, plan.num_ranks)] * pieces
        to_come = [hardware.reduce_scatter_seconds(shard * grad_bytes, plan.num_ranks)] * pieces
    share = received / np.maximum(received.sum(axis=1, keepdims=True), 1.0)
    # At the mask's edge the kernel computes more pairs than the mask shows.
    edge = np.where(own > 0, hardware.edge_pairs * tokens, 0.0)
    area = np.concatenate([(own + edge)[:, None], (work - own)[:, None] * share], axis=1)
    merged = copy((pieces + 1) * out_bytes * tokens) * bool(pieces)

    # K and V side by side, and the rows that go; then each piece padded and put in order, and the parts merged.
    forward = attention(area, backward=False)
    forward[:, 1:] += copy(2 * kv_bytes * received)
    forward[:, -1] += merged
    pack = copy(kv_bytes * (tokens * bool(pieces) + sent))
    # Backward, the merge's comes first; each piece's gradients go into the order of their departure.
    backward = attention(area, backward=True)
    backward[:, 1:] += copy(2 * grad_bytes * received)
    backward[:, -1] += 2 * merged
    unpack = copy(2 * grad_bytes * sent + kv_bytes * tokens * bool(pieces))
    again = None if plan.keep_kv else np.array(to_go)
    return timeline.Timeline(
        timeline.forward(pack, forward, np.array(to_go)),
        timeline.backward(backward, np.array(to_come), unpack, again),
    )
