"""One sequence on several numbers of ranks, to choose the size of the cp axis (the degree)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from spanwise.cli.report import units, wording
from spanwise.planning.plan import Plan

#: Share of linear speed-up that a recommended degree keeps. Below it, use ranks for other sequences.
KEEP = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Degree:
    """One size of the cp axis, with the figures of its plan.

    Attributes:
        total_seconds: attention of all layers in one step, forward and backward, exposed exchange included.
        exposed_seconds: exchange that no computation hides.
        speedup: against one rank, which exchanges nothing; `efficiency`: `speedup` over `ranks`.
        imbalance: busiest over mean rank, all masks by weight.
        recv_bytes: K and V that the busiest receiver gets in one forward, all layers.
        kv_bytes: K and V of one layer on the fullest rank: its own, and those of others that it keeps.
        way: the layout and exchange, in words.
    """

    ranks: int
    balancer: str
    exchange: str
    stages: int
    inner: int
    total_seconds: float
    exposed_seconds: float
    speedup: float
    efficiency: float
    imbalance: float
    recv_bytes: int
    kv_bytes: int
    way: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Degrees, ascending, the recommended one, and why."""

    degrees: tuple[Degree, ...]
    best: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(plan_for: Callable[[int], Plan], ranks: Sequence[int]) -> Comparison:
    """Plan for each number of `ranks` (ascending) and recommend one.

    Recommends the largest degree that keeps `KEEP` of linear speed-up; if none does, the most efficient.
    """
    single = plan_for(1)
    alone = single.predict()["total"]
    degrees = tuple(_degree(single if number == 1 else plan_for(number), alone) for number in ranks)
    return Comparison(degrees, *_recommend(degrees))


def _degree(plan: Plan, alone: float) -> Degree:
    predicted = plan.predict()
    work = sum(plan.weights[name] * plan.work(name) for name in plan.masks)
    assert plan.num_kv_heads and plan.head_dim and plan.v_head_dim
    token = plan.num_kv_heads * (plan.head_dim + plan.v_head_dim) * plan.itemsize
    kv_bytes = max(int((plan.kv_layout.tokens_per_rank * token + plan.saved_bytes(name)).max()) for name in plan.masks)
    received = sum(plan.weights[name] * plan.recv_bytes(name) for name in plan.masks)
    total = predicted["total"]
    speedup = alone / total if total else 1.0
    return Degree(
        ranks=plan.num_ranks,
        balancer=plan.balancer,
        exchange=plan.exchange,
        stages=plan.stages,
        inner=plan.inner,
        total_seconds=total,
        exposed_seconds=predicted["exposed_forward"] + predicted["exposed_backward"],
        speedup=speedup,
        efficiency=speedup / plan.num_ranks,
        imbalance=float(work.max() / work.mean()),  # type: ignore[union-attr]
        recv_bytes=int(received.max()),  # type: ignore[union-attr]
        kv_bytes=kv_bytes,
        way=wording.describe_way(plan),
    )


def _recommend(degrees: tuple[Degree, ...]) -> tuple[int, str]:
    least = units.percent(KEEP)
    efficient = [degree for degree in degrees if degree.efficiency >= KEEP]
    if not efficient:
        best = max(degrees, key=lambda degree: (degree.efficiency, -degree.ranks))
        nearest = f"{best.ranks} ranks come nearest with {units.percent(best.efficiency)}"
        return best.ranks, f"no degree keeps {least} of linear speed-up; {nearest}"
    best = efficient[-1]
    reason = f"the most ranks that keep {least} of linear speed-up: "
    reason += f"{best.speedup:.1f} × at {units.percent(best.efficiency)}"
    after = next((degree for degree in degrees if degree.ranks > best.ranks), None)
    if after is None:
        return best.ranks, f"{reason}; more ranks were not compared"
    gain = best.total_seconds / after.total_seconds
    change = f"{gain:.2f} × as fast" if gain > 1 else "no faster"
    return best.ranks, f"{reason}; {after.ranks} ranks are {change} at {units.percent(after.efficiency)}"
