"""Seconds of a plan on a hardware: from exact areas and bytes to a timeline. Pure; `plan` calls it.

Compute is the attention kernel's FLOPs over its rate, and what is copied over the memory's: K/V that are packed, those
that arrive brought into order, each part but the first merged (two read, one written, in float32 at least), gradients
packed and summed, and under Ulysses q, K, V and the output dealt out by head and put in order. Traffic is the exact
bytes of every pair of ranks on the levels of the network. What is taken for granted: pieces (but for a ring's) read
keys in proportion to their tokens, every rank begins each pass at the same time, and a collective when all ranks have
started it, also a hop of a ring.
"""

# P ranks, n remote pieces

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanwise import hardware as cost
from spanwise.planning import memory as footprint
from spanwise.planning import timeline
from spanwise.planning import traffic as counting
from spanwise.planning.chunking import piece_tokens

if TYPE_CHECKING:
    from spanwise.planning.plan import Plan

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
    is_ring = plan.exchange == "ring"
    packed = keys * bool(pieces)
    # Packed once more, for those who read them, or padded; a ring's shards travel as they are packed, and are read so.
    sent = arriving.sum(axis=(0, 1)) if plan.exchange == "needed" else packed * (not is_ring)
    if plan.exchange == "all_gather" and plan.inner == 1:
        shard = plan.batch_size * float(plan.kv_layout.tokens_per_rank.max())
        to_go = [hardware.all_gather_seconds(shard * kv_bytes[0], plan.num_ranks)] * pieces
        to_come = [hardware.reduce_scatter_seconds(shard * grad_bytes[0], plan.num_ranks)] * pieces
    else:
        to_go = [hardware.all_to_all_seconds(x * kv_bytes[:, None]) for x in arriving]
        to_come = [hardware.all_to_all_seconds(x.T * grad_bytes[:, None]) for x in arriving]
    if is_ring:
        layouts = plan.groups, plan.kv_groups
        areas = counting.ring_areas(plan.hops(mask), plan.mask(mask), *layouts, plan.batch_size)
        remote = np.repeat(areas, plan.inner, axis=0)
    else:
        remote = (work - own)[:, None] * received / np.maximum(received.sum(axis=1, keepdims=True), 1.0)
    # At the mask's edge the kernel computes more pairs than the mask shows.
    edge = np.where(own > 0, hardware.edge_pairs * tokens, 0.0)
    area = np.concatenate([(own + edge)[:, None], remote], axis=1)
    merged = copy(1.5 * heads * v_dim * plan.sum_itemsize * tokens)  # two read, one written

    # K and V side by side, and the rows that go; then each piece padded and put in order, computed, merged.
    forward = attention(area, backward=False)
    forward[:, 1:] += copy((0 if is_ring else 2) * kv_bytes[:, None] * received) + merged[:, None]
    pack = copy(kv_bytes * (packed + sent))
    # Backward, the output times its gradient comes first; each piece's gradients go into the order of their departure,
    # on a ring into the sum that goes on.
    backward = attention(area, backward=True)
    backward[:, 1:] += copy((1.5 if is_ring else 2) * grad_bytes[:, None] * received)
    backward[:, -1] += copy(out_bytes * tokens) * bool(pieces)
    unpack = copy(2 * grad_bytes * sent + kv_bytes * packed)
    if plan.inner > 1:
        of_queries, of_output = _dealt_bytes(plan, kv_bytes)
        pack += copy(of_queries)
        forward[:, -1] += copy(of_output)
        backward[:, -1] += copy(of_output)
        unpack += copy(of_queries)
    again = None if plan.keep_kv else np.array(to_go)
    passes = (
        timeline.forward(pack, forward, np.array(to_go), ring=is_ring),
        timeline.backward(backward, np.array(to_come), unpack, again, ring=is_ring),
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


def _dealt_bytes(plan: Plan, kv_bytes: Float64) -> tuple[Float64, Float64]:
    """Bytes of q, K and V, and of the output, that a rank deals out by head and puts in order; ``[P]`` each."""
    heads, _, qk_dim, v_dim = plan.attention_shape
    # All heads of its own tokens on one side, its share of the heads of all the group's tokens on the other.
    q, kv = (
        plan.batch_size * (own.tokens_per_rank + np.repeat(group.tokens_per_rank, plan.inner) / plan.inner)
        for own, group in ((plan.layout, plan.groups), (plan.kv_layout, plan.kv_groups))
    )
    return q * heads * qk_dim * plan.itemsize + kv * plan.inner * kv_bytes, q * heads * v_dim * plan.itemsize


def _over_ranks(of_groups: np.ndarray) -> np.ndarray:
    """Tables of each group ``[groups, inner, inner]`` as one table of all ranks."""
    groups, inner, _ = of_groups.shape
    table = np.zeros((groups, inner, groups, inner))
    table[np.arange(groups), :, np.arange(groups), :] = of_groups
    return table.reshape(groups * inner, groups * inner)
