"""What recurrent layers cost in a layout: runs of documents, bytes and seconds.

Such layers run in the layout of attention, or tokens move to a contiguous layout for them and back. In a layout with
more runs more maps of the state travel, each of a whole state or larger. Pure.

Seconds are those of a step: compute at attention's rate, which is a guess, because no kernel of these layers was
measured; maps in float32; the rows before runs for the convolution; and moves between layouts, one there and one back
for each change between recurrent and attention layers. Of one batch row, or of all where their layouts differ.
"""

# P ranks

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from spanwise.layouts import document_runs
from spanwise.layouts.balancers import contiguous
from spanwise.layouts.layout import Layout
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning import documents
from spanwise.planning.plan_data import PlanData, PlanT
from spanwise.planning.recurrence import Recurrence

_WIDE_BYTES = 4  # an element of a gradient on its way


class Costs(NamedTuple):
    """One kind of recurrent layers in a layout.

    Attributes:
        runs: most runs of documents on a rank.
        maps: maps that travel, all ranks together, in a forward of one layer.
        recv_bytes: ``[P]``, bytes that each rank receives in a forward of one layer: maps and rows of the halo.
        seconds: of a step, all layers, without moves between layouts.
        moving: seconds of a step for moves between layouts.
    """

    runs: int
    maps: int
    recv_bytes: Float64
    seconds: float
    moving: float


def layout_of(plan: PlanData) -> Layout:
    """The layout in which the plan's recurrent layers run."""
    return contiguous(plan.seq_len, plan.num_ranks) if plan.relayout else plan.layout


def changes(plan: PlanData) -> dict[str, Any]:
    """Fields of the plan in whose layout the recurrent layers run that differ from those of `plan`."""
    if not plan.relayout:
        return {}
    layout = layout_of(plan)
    return {"layout": layout, "kv_layout": layout, "balancer": "contiguous", "relayout": False}


def variants(plans: list[PlanT]) -> list[PlanT]:
    """The plans, each followed by one whose recurrent layers run in a contiguous layout; only where there are any."""
    found = []
    for plan in plans:
        found.append(plan)
        if plan.recurrences and plan.num_ranks > 1:
            moved = plan.replace(relayout=True)
            found += [moved] if layout_of(moved) != plan.layout else []
    return found


def seconds(plan: PlanData) -> float:
    """Seconds of a step of all recurrent layers of the plan."""
    return sum(each.seconds + each.moving for each in costs(plan).values())


def costs(plan: PlanData) -> dict[str, Costs]:
    """Of each kind of recurrent layers of the plan, where the plan runs them."""
    layout, num_ranks, rates = layout_of(plan), plan.num_ranks, plan.hardware
    everyone = document_runs.find(layout, documents.packings(plan, state=True))
    travel, composed = document_runs.map_traffic(everyone, num_ranks)
    back, composed_back = document_runs.map_traffic(everyone.backwards(), num_ranks)
    length = (everyone.stop - everyone.start).astype(np.float64)
    tokens, carried, middle = (
        np.bincount(everyone.rank, length * which, num_ranks)
        for which in (np.ones(len(length)), ~everyone.opens, ~(everyone.opens | everyone.closes))
    )
    moved = _moved(plan.layout, layout)

    def exchanged(table: Float64 | Int64) -> float:
        copies = rates.copy_seconds(2 * float(table.sum(axis=1).max(initial=0)))
        return rates.all_to_all_seconds(table) + copies

    def of_kind(of: Recurrence) -> Costs:
        state = 2.0 * of.heads * of.key_dim * of.value_dim  # FLOPs of one product with a state
        run = state * (3 if of.delta_rule else 2)
        # Before its state is known a run is computed with key_dim more columns; then the state is applied.
        opened = state + (run * of.key_dim / of.value_dim if of.delta_rule else 0)
        join = state * of.key_dim if of.delta_rule else state
        forward = rates.attention_seconds(tokens * run + carried * opened + composed * join, backward=False)
        backward = rates.attention_seconds(tokens * 3 * run + middle * run + composed_back * join, backward=True)
        halo, row = document_runs.halo_traffic(everyone, num_ranks, of.conv_width - 1), of.channels * plan.itemsize
        tables = (travel * of.map_bytes, halo * row, back * of.map_bytes, halo.T * of.channels * _WIDE_BYTES)
        layer = float(np.max(forward) + np.max(backward)) + sum(map(exchanged, tables))
        moves = sum(2 * exchanged(moved * of.hidden * size) for size in (plan.itemsize, _WIDE_BYTES))
        return Costs(
            runs=int(np.bincount(everyone.rank, minlength=num_ranks).max(initial=0)),
            maps=int(travel.sum()),
            recv_bytes=(travel * of.map_bytes + halo * row).sum(axis=1).astype(np.float64),
            seconds=of.layers * layer,
            moving=min(of.layers, sum(plan.weights.values())) * moves,
        )

    return {name: of_kind(recurrence) for name, recurrence in (plan.recurrences or {}).items()}


def _moved(before: Layout, after: Layout) -> Int64:
    """Tokens that move from one layout to another, int64 ``[receivers, senders]``; 0 on the diagonal."""
    table = np.zeros((before.num_ranks, before.num_ranks), dtype=np.int64)
    for row in range(before.batch_size):
        pieces = after.pieces(row if after.batch_size > 1 else 0)
        piece, sender, both = before.owners_of(pieces[:, 1:], row)
        np.add.at(table, (pieces[piece, 0], sender), both[:, 1] - both[:, 0])
    np.fill_diagonal(table, 0)
    return table
