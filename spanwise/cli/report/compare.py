"""One sequence on several numbers of ranks, to choose the size of the cp axis (the degree); and on fixed grids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spanwise.cli.report.page import Table
from spanwise.overlap.explain import units
from spanwise.planning.explain import describe_exchange
from spanwise.planning.grids import Grid
from spanwise.planning.plan import Plan

#: Share of linear speed-up that a recommended degree keeps. Below it, use ranks for other sequences.
KEEP = 0.8


def describe_choice(plan: Plan) -> str:
    """How a plan cuts and moves: "local, exchange needed, chunks 1"."""
    return f"{plan.balancer}, {describe_exchange(plan)}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of each size of the cp axis, ascending; the recommended size, and why.

    Seconds are those of attention of all layers in one step, and the exchange that no computation hides; speed-up is
    against one rank, imbalance is of all masks by weight, received bytes are of the busiest rank in a forward of all
    layers, held ones of one layer on the fullest rank: its own K and V, and those of others that it keeps.
    """

    degrees: tuple[dict[str, Any], ...]
    best: int
    reason: str

    def table(self) -> Table:
        rows = [
            (
                str(one["ranks"]), one["choice"], units.seconds(one["total_seconds"]),
                units.seconds(one["exposed_seconds"]), f"{one['speedup']:.2f} ×", f"{one['efficiency']:.0%}",
                f"{one['imbalance']:.3f}", units.num_bytes(one["recv_bytes"]), units.num_bytes(one["kv_bytes"]),
            )
            for one in self.degrees
        ]  # fmt: skip
        columns = ("ranks", "chosen", "step", "exposed", "speed-up", "efficiency", "imbalance", "received", "K/V held")
        best = [one["ranks"] for one in self.degrees].index(self.best)
        return Table("Ranks compared", columns, rows, best, f"{self.best} ranks: {self.reason}", left=2)


def compare(plan_for: Callable[[int], Plan], ranks: Sequence[int]) -> Comparison:
    """Plan for each number of `ranks` (ascending) and recommend one.

    Recommends the largest degree that keeps `KEEP` of linear speed-up; if none does, the most efficient.
    """
    alone = plan_for(1).predict()["total"]
    degrees = tuple(_degree(plan_for(number), alone) for number in ranks)
    return Comparison(degrees, *_recommend(degrees))


def _degree(plan: Plan, alone: float) -> dict[str, Any]:
    predicted = plan.predict()
    weights = np.array([[weight] for weight in plan.weights.values()])
    work, received = ((weights * [of(n) for n in plan.weights]).sum(0) for of in (plan.work, plan.recv_bytes))
    assert plan.num_kv_heads and plan.head_dim and plan.v_head_dim
    own = plan.kv_layout.tokens_per_rank * plan.num_kv_heads * (plan.head_dim + plan.v_head_dim) * plan.itemsize
    speedup = alone / predicted["total"] if predicted["total"] else 1.0
    return {
        "ranks": plan.num_ranks,
        "choice": describe_choice(plan),
        "total_seconds": predicted["total"],
        "exposed_seconds": predicted["exposed_forward"] + predicted["exposed_backward"],
        "speedup": speedup,
        "efficiency": speedup / plan.num_ranks,
        "imbalance": float(work.max() / work.mean()),
        "recv_bytes": int(received.max()),
        "kv_bytes": max(int((own + plan.saved_bytes(name)).max()) for name in plan.masks),
    }


def _recommend(degrees: Sequence[dict[str, Any]]) -> tuple[int, str]:
    efficient = [one for one in degrees if one["efficiency"] >= KEEP]
    if not efficient:
        best = max(degrees, key=lambda one: (one["efficiency"], -one["ranks"]))
        return best["ranks"], f"no degree keeps {KEEP:.0%} of linear speed-up; this one keeps {best['efficiency']:.0%}"
    best = efficient[-1]
    kept = f"{best['speedup']:.1f} × at {best['efficiency']:.0%}"
    reason = f"the most ranks that keep {KEEP:.0%} of linear speed-up: {kept}"
    after = next((one for one in degrees if one["ranks"] > best["ranks"]), None)
    if after is None:
        return best["ranks"], f"{reason}; more ranks were not compared"
    gain = best["total_seconds"] / after["total_seconds"]
    return best["ranks"], f"{reason}; {after['ranks']} ranks are {gain:.2f} × as fast at {after['efficiency']:.0%}"


def grid_table(grids: Sequence[Grid]) -> Table:
    """One plan over all ranks, and fixed dp × cp grids: seconds of the slowest rank, and the most bytes of any."""
    rows = []
    for grid in grids:
        rank = int((grid.attention + grid.linear + grid.exposed).argmax())
        seconds = (grid.seconds, *(float(part[rank]) for part in (grid.attention, grid.linear, grid.exposed)))
        most = (float(grid.recv_bytes.max()), float(grid.host_bytes.max()), float(grid.held_bytes))
        imbalances = (f"{grid.work_imbalance:.2f}", f"{grid.token_imbalance:.2f}")
        documents = (f"{grid.dp} × {grid.cp}", grid.assignment)
        rows.append((*documents, *map(units.seconds, seconds), *imbalances, *map(units.num_bytes, most)))
    columns = ("dp × cp", "documents", "step", "attention", "linear", "waits", "work", "tokens", "received", "off host",
               "held")  # fmt: skip
    note = (
        f"{summary(grids)}\nseconds of the slowest rank; work, tokens: busiest over mean rank; bytes: most, all layers"
    )
    best = min((i for i, grid in enumerate(grids) if grid.dp == 1), key=lambda i: grids[i].seconds)
    return Table("One plan and fixed dp × cp grids", columns, rows, best, note, left=2)


def summary(grids: Sequence[Grid]) -> str:
    """One plan against the fastest grid, in a sentence."""
    one = min((grid for grid in grids if grid.dp == 1), key=lambda grid: grid.seconds)
    others = [grid for grid in grids if grid.dp > 1]
    if not others:
        return "one rank has no grids"
    best = min(others, key=lambda grid: grid.seconds)
    gain = best.seconds / one.seconds
    found = f"{one.assignment} {units.seconds(one.seconds)} a step, the fastest grid {best.dp} × {best.cp}, "
    found += f"{best.assignment} {units.seconds(best.seconds)}"
    return f"{found}: one plan is {gain:.2f} times as fast" if gain >= 1.005 else f"{found}: no gain from one plan"
