"""Seconds of a plan on a hardware: from exact areas and bytes to a timeline. Pure; `plan` calls it.

Compute is the attention kernel's FLOPs over its rate, and what packing, merging and summing copy over the memory's.
Traffic is the exact bytes of every pair of ranks on the levels of the network. What is taken for granted: pieces (but
for a ring's) read keys in proportion to their tokens, and every rank begins each pass at the same time.
"""

# P ranks, n remote pieces

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanwise import cost, counting, footprint, timeline
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
    heads, _, qk_dim, v_dim = plan.attention_shape
    heads //= plan.inner  # what follows is one rank's share of the heads, over the tokens of its group
    kv_bytes = footprint.kv_token_bytes(plan).astype(np.float64)  # of each rank
    grad_bytes = kv_bytes / plan.itemsize * plan.sum_itemsize
    out_bytes = heads * v_dim * plan.itemsize
    tokens, keys = (
        plan.batch_size * np.repeat(layout.tokens_per_rank.astype(np.float64), plan.inner)
        for layout in (plan.groups, plan.kv_groups)
    )
    work, own = plan.inner * plan.work(mask).astype(np.float64), plan.inner * plan.local_work(mask).astype(np.float64)

    def attention(area: Float64, *, backward: bool) -> Float64:
        a_pair = cost.attention_flops(1.0, heads, qk_dim, v_dim, backward=backward)
        return hardware.attention_seconds(area * a_pair, backward=backward)

    def copy(num_bytes: Float64) -> Float64:
        return np.asarray(hardware.copy_seconds(1.0) * num_bytes)

    arriving = _arriving(plan, mask)
    pieces = len(arriving)
    received = arriving.sum(axis=2).T
    sent = arriving.sum(axis=(0, 1)) if plan.exchange == "needed" else keys * bool(pieces)
    if plan.exchange == "all_gather" and plan.inner == 1:
        shard = plan.batch_size * float(plan.kv_layout.tokens_per_rank.max())
        to_go = [hardware.all_gather_seconds(shard * kv_bytes[0], plan.num_ranks)] * pieces
        to_come = [hardware.reduce_scatter_seconds(shard * grad_bytes[0], plan.num_ranks)] * pieces
    else:
        to_go = [hardware.all_to_all_seconds(x * kv_bytes[:, None]) for x in arriving]
        to_come = [hardware.all_to_all_seconds(x.T * grad_bytes[:, None]) for x in arriving]
    if plan.exchange == "ring":
        layouts = plan.groups, plan.kv_groups
        areas = counting.ring_areas(plan.hops(mask), plan.mask(mask), *layouts, plan.batch_size)
        remote = np.repeat(areas, plan.inner, axis=0)
    else:
        remote = (work - own)[:, None] * received / np.maximum(received.sum(axis=1, keepdims=True), 1.0)
    # At the mask's edge the kernel computes more pairs than the mask shows.
    edge = np.where(own > 0, hardware.edge_pairs * tokens, 0.0)
    area = np.concatenate([(own + edge)[:, None], remote], axis=1)
    merged = copy((pieces + 1) * out_bytes * tokens) * bool(pieces)

    # K and V side by side, and the rows that go; then each piece padded and put in order, and the parts merged.
    forward = attention(area, backward=False)
    forward[:, 1:] += copy(2 * kv_bytes[:, None] * received)
    forward[:, -1] += merged
    pack = copy(kv_bytes * (keys * bool(pieces) + sent))
    # Backward, the merge's comes first; each piece's gradients go into the order of their departure.
    backward = attention(area, backward=True)
    backward[:, 1:] += copy(2 * grad_bytes[:, None] * received)
    backward[:, -1] += 2 * merged
    unpack = copy(2 * grad_bytes * sent + kv_bytes * keys * bool(pieces))
    again = None if plan.keep_kv else np.array(to_go)
    passes = (
        timeline.forward(pack, forward, np.array(to_go), ring=plan.exchange == "ring"),
        timeline.backward(backward, np.array(to_come), unpack, again),
    )
    if plan.inner == 1:
        return timeline.Timeline(*passes)
    seconds = [
        [hardware.all_to_all_seconds(_over_ranks(x)) for x in footprint.traded_bytes(plan, backward=backward)]
        for backward in (False, True)
    ]
    return timeline.Timeline(
        timeline.between_trades(passes[0], *seconds[0]), timeline.between_trades(passes[1], *reversed(seconds[1]))
    )


def _arriving(plan: Plan, mask: str) -> Float64:
    """K/V tokens that each rank gets from each other one, piece by piece: ``[pieces, receivers, senders]``."""
    pieces, groups = plan.num_pieces(mask), plan.num_groups
    arriving = np.zeros((pieces, groups, groups))
    if pieces and plan.exchange == "needed":
        tokens_of_lists, alike = plan.lists(mask)
        arriving[:] = alike * piece_tokens(tokens_of_lists, pieces, plan.block_size)
    elif plan.exchange == "ring":
        arriving[:] = counting.ring_traffic(plan.hops(mask), plan.batch_size * plan.kv_groups.tokens_per_rank)
    elif pieces:  # an all_gather, of padded shards
        arriving[:] = plan.batch_size * plan.kv_groups.tokens_per_rank.max() * (1 - np.eye(groups))
    return arriving if plan.inner == 1 else np.asarray(np.kron(arriving, np.eye(plan.inner)), np.float64)


def _over_ranks(of_groups: np.ndarray) -> np.ndarray:
    """Tables of each group ``[groups, inner, inner]`` as one table of all ranks."""
    groups, inner, _ = of_groups.shape
    table = np.zeros((groups, inner, groups, inner))
    table[np.arange(groups), :, np.arange(groups), :] = of_groups
    return table.reshape(groups * inner, groups * inner)
