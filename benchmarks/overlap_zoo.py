"""Schedules of many graphs: `spanwise.overlap`, PyTorch's own pass and a greedy list scheduler at the same costs.

    python benchmarks/overlap_zoo.py --out benchmarks/results/overlap-zoo.json     # all families, about 15 minutes
    python benchmarks/overlap_zoo.py --families dlrm dit --links slow

The families (`overlap_zoo_models`) are training steps on fake ranks. None of them chose a constant of the search. Every
graph is priced by `CostModel` on an H100 with three networks. Orders: the graph's own, a list schedule by longest tail
("greedy"), PyTorch's pass with and without buckets, `optimize` with and without them; all simulated. A greedy order
that needs more memory than the budget of `optimize` is not compared. Printed is in how many cases ours is longer than
another by more than 0.5 %, and the worst and the mean of the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from overlap_peers import CALIBRATED, Known
from overlap_zoo_greedy import by_longest_tail
from overlap_zoo_models import FAMILIES
from torch import fx

from benchmarks.publish import write
from spanwise.hardware import Link
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.optimize import optimize
from spanwise.overlap.pytorch_pass import pytorch_order

LINKS = {
    "fast": CALIBRATED,  # NVLink inside a host of 8, 400 Gb/s a GPU between hosts
    "middle": dataclasses.replace(CALIBRATED, links=(Link(200e9, 10e-6, ranks=8), Link(12e9, 30e-6))),
    "slow": dataclasses.replace(CALIBRATED, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6))),
}
OURS = {"spanwise": False, "spanwise, buckets": True}  # whether they bucket
MARGIN = 1.005
# Graphs of more nodes are timed several times: single times scatter by a third.
LARGE, RUNS = 2_000, 3


@dataclasses.dataclass(frozen=True)
class Order:
    """One order: milliseconds, gigabytes, number of collectives, CPU seconds of the pass."""

    makespan: float
    peak: float
    launches: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """All orders of one graph on one network; `bound` is the lower bound of the given graph, in milliseconds."""

    family: str
    graph: str
    links: str
    nodes: int
    bound: float
    budget: float
    orders: dict[str, Order]


def order_of(timeline: Timeline, seconds: float = 0.0) -> Order:
    return Order(timeline.makespan, timeline.peak_bytes / 1e9, len(timeline.dag.starts), seconds)


def fastest(before: Order | None, now: Order) -> Order:
    """The order of the run that took the least time; all runs make the same order."""
    return now if before is None or now.seconds < before.seconds else before


def case_of(
    family: str, name: str, gm: fx.GraphModule, ranks: Mapping[str, Sequence[int]], links: str, *, peers: bool
) -> Case:
    """All orders of one graph."""
    model = CostModel(LINKS[links], ranks=ranks)
    cost = Known(gm, model)
    dag = cost.captured.dag
    orders = {"own": order_of(simulate(dag)), "greedy": order_of(simulate(dag, by_longest_tail(dag)))}
    budget = 0
    for _ in range(RUNS if len(gm.graph.nodes) > LARGE else 1):  # in turns, so that both see the same machine
        for bucket in (False, True) if peers else ():
            what = "PyTorch, buckets" if bucket else "PyTorch"
            try:
                timeline, seconds = pytorch_order(gm, cost, model.latency, ranks=ranks, bucket=bucket)
            except RuntimeError as error:  # it refuses graphs in which its own buckets would wait for one another
                print(f"{what} on {family}, {name}, {links}: {str(error)[:100]}")
                continue
            orders[what] = fastest(orders.get(what), order_of(timeline, seconds))
        for what, bucket in OURS.items():
            began = time.process_time()
            result = optimize(gm, cost, bucket=bucket)
            orders[what] = fastest(orders.get(what), order_of(result.timeline, time.process_time() - began))
            budget = budget or result.budget
    return Case(family, name, links, len(gm.graph.nodes), lower_bounds(dag).makespan, budget / 1e9, orders)


def cases(families: Sequence[str], links: Sequence[str], *, peers: bool = True) -> Iterator[Case]:
    """All cases of graphs with collectives."""
    for family in families:
        traced = FAMILIES[family]()
        for name, gm in traced.graphs.items():
            if any("c10d" in str(node.target) for node in gm.graph.nodes):
                for one in links:
                    yield case_of(family, name, gm, traced.ranks, one, peers=peers)


PAIRS = (
    ("spanwise", "own"), ("spanwise", "greedy"), ("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets"),
    ("spanwise, buckets", "greedy"), ("spanwise", "bound"), ("spanwise, buckets", "bound"), ("PyTorch", "bound"),
    ("greedy", "bound"),
)  # fmt: skip


def losses(found: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of each pair of orders: cases, in how many ours is longer by more than `MARGIN`, the worst ratio, the mean."""
    rows = {}
    for ours, theirs in PAIRS:
        ratios = [
            case.orders[ours].makespan / (case.bound if theirs == "bound" else case.orders[theirs].makespan)
            for case in found
            if ours in case.orders
            and (theirs == "bound" or theirs in case.orders)
            and (theirs != "greedy" or case.orders[theirs].peak <= case.budget)
        ]
        if ratios:
            over = sum(ratio > MARGIN for ratio in ratios)
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            rows[f"{ours} / {theirs}"] = {"cases": len(ratios), "longer": over, "worst": max(ratios), "mean": mean}
    return rows


def times(found: Sequence[Case]) -> Iterator[str]:
    """Times of the passes."""
    for ours, theirs in (("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets")):
        small = [c for c in found if c.nodes < 500 and ours in c.orders]
        if small:
            most = max(c.orders[ours].seconds for c in small)
            yield f"{ours}: at most {most:.2f} s below 500 nodes"
        large = [c for c in found if c.nodes > LARGE and theirs in c.orders and ours in c.orders]
        if large:
            ratios = [c.orders[ours].seconds / c.orders[theirs].seconds for c in large]
            mean = sum(ratios) / len(ratios)
            yield f"{ours}: at most {max(ratios):.2f} x {theirs} above 2,000 nodes, {mean:.2f} x in the mean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--out", type=Path, help="JSON file of all cases")
    args = parser.parse_args()
    found: list[Case] = []
    for case in cases(args.families, args.links):
        found.append(case)
        ratios = {what: round(order.makespan / case.bound, 3) for what, order in case.orders.items()}
        print(f"{case.family}, {case.graph}, {case.links}, {case.nodes} nodes, over the bound: {ratios}", flush=True)
    result: dict[str, Any] = {"torch": torch.__version__, "summary": losses(found), "times": list(times(found))}
    write(result | {"cases": [dataclasses.asdict(case) for case in found]}, args.out)
    for pair, row in losses(found).items():
        print(f"{pair:<44}{row['cases']:5} {row['longer']:6} {row['worst']:7.3f} {row['mean']:7.3f}")
    print(*times(found), sep="\n")


if __name__ == "__main__":
    main()
