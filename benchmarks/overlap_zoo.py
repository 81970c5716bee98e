"""Schedules of many graphs: `spanwise.overlap`, PyTorch's own pass and a greedy list scheduler at the same costs.

    python -m benchmarks.overlap_zoo --out benchmarks/results/overlap-zoo.json     # all families, about 15 minutes
    python -m benchmarks.overlap_zoo --families dlrm dit --links slow

The families (`zoo_models`) are training steps on fake ranks. None of them chose a constant of the search. Every graph
is priced by `CostModel` on an H100 with three networks. Orders: the graph's own, a list schedule by longest tail
("greedy"), PyTorch's pass with and without buckets, `optimize` with and without them; all simulated. A greedy order
that needs more memory than the budget of `optimize` is not compared. Printed is in how many cases ours is longer than
another by more than 0.5 %, and the worst and the mean of the ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from benchmarks.publish import write
from benchmarks.zoo_models import FAMILIES
from spanwise.hardware import H100, Hardware, Link
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import optimize
from spanwise.overlap.pytorch_pass import pytorch_order

# The preset with less of the data sheet reached, as in a training run rather than a benchmark of one kernel. Assumed:
# 600 of 989 TFLOP/s in matrix products, 2.5 of 3.35 TB/s; in collectives 350 of the 450 GB/s that NVLink has each way,
# 45 of the 50 GB/s of a 400 Gb/s card for each GPU, and 10 and 20 µs.
CALIBRATED = dataclasses.replace(
    H100, name="H100, sustained", matmul_flops=600e12, memory_bandwidth=2.5e12,
    links=(Link(350e9, 10e-6, ranks=8), Link(45e9, 20e-6)), source=f"{H100.source}; sustained rates assumed",
)  # fmt: skip
LINKS = {
    "fast": CALIBRATED,  # NVLink inside a host of 8, 400 Gb/s a GPU between hosts
    "middle": dataclasses.replace(CALIBRATED, links=(Link(200e9, 10e-6, ranks=8), Link(12e9, 30e-6))),
    "slow": dataclasses.replace(CALIBRATED, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6))),
}
MARGIN = 1.005
# Graphs of more nodes are timed several times: single times scatter by a third.
LARGE, RUNS = 2_000, 3
PAIRS = (
    ("spanwise", "own"), ("spanwise", "greedy"), ("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets"),
    ("spanwise, buckets", "greedy"), ("spanwise", "bound"), ("spanwise, buckets", "bound"), ("PyTorch", "bound"),
    ("greedy", "bound"),
)  # fmt: skip


class Known:
    """Costs that are looked up, so that the time of a pass is its own; new nodes are priced by the model."""

    def __init__(self, gm: fx.GraphModule, model: CostModel) -> None:
        captured = to_dag(gm, model)
        self.dag, self.model = captured.dag, model
        self.table = {node.name: ms for node, ms in zip(captured.nodes, self.dag.ms.tolist(), strict=True)}

    def __call__(self, node: fx.Node) -> float:
        known = self.table.get(node.name)
        return self.model(node) if known is None else known

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        return self.model.merged(nodes)


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph on one network: its lower bound in milliseconds, the memory budget in gigabytes, and all orders.

    An order has `makespan` and `exposed` in milliseconds, `peak` in gigabytes, `launches` of collectives, and the CPU
    `seconds` of its pass, the least of all runs.
    """

    nodes: int
    bound: float
    budget: float
    orders: dict[str, dict[str, float]]
    timelines: dict[str, Timeline]


def case_of(gm: fx.GraphModule, hardware: Hardware, ranks: Mapping[str, Sequence[int]], *, peers: bool = True) -> Case:
    """All orders of one graph."""
    model = CostModel(hardware, ranks=ranks)
    cost = Known(gm, model)
    timelines = {"own": simulate(cost.dag), "greedy": simulate(cost.dag, by_longest_tail(cost.dag))}
    seconds, budget = {"own": [0.0], "greedy": [0.0]}, 0
    for _ in range(RUNS if len(gm.graph.nodes) > LARGE else 1):  # in turns, so that both see the same machine
        for bucket in (False, True):
            suffix = ", buckets" if bucket else ""
            if peers:
                try:
                    timelines[f"PyTorch{suffix}"], taken = pytorch_order(
                        gm, cost, model.latency, ranks=ranks, bucket=bucket
                    )
                    seconds.setdefault(f"PyTorch{suffix}", []).append(taken)
                except RuntimeError as error:  # it refuses graphs in which its own buckets would wait for one another
                    print(f"PyTorch{suffix}: {str(error)[:100]}")
            began = time.process_time()
            result = optimize(gm, cost, bucket=bucket)
            seconds.setdefault(f"spanwise{suffix}", []).append(time.process_time() - began)
            timelines[f"spanwise{suffix}"], budget = result.timeline, budget or result.budget
    orders = {
        name: {
            "makespan": each.makespan, "exposed": each.exposed_ms, "peak": each.peak_bytes / 1e9,
            "launches": len(each.dag.starts), "seconds": min(seconds[name]),
        }
        for name, each in timelines.items()
    }  # fmt: skip
    return Case(len(gm.graph.nodes), lower_bounds(cost.dag).makespan, budget / 1e9, orders, timelines)


def by_longest_tail(dag: Dag) -> list[int]:
    """A greedy list schedule that knows nothing of `spanwise.overlap.search`.

    Ready collectives start at once, else the ready compute with the longest path after it; it waits only if there is
    nothing else to do. R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17, 1969.
    """
    tails = [0.0] * len(dag)
    for i in range(len(dag) - 1, -1, -1):
        node = dag.nodes[i]
        tails[i] += node.ms
        for dep in node.deps:
            # What depends on a start alone need not wait for its end.
            after = tails[i] if dag.nodes[dep].kind != Kind.START or dep == node.start else tails[i] - dag.nodes[dep].ms
            tails[dep] = max(tails[dep], after)
    missing = [len(set(node.deps)) for node in dag.nodes]
    ready: dict[Kind, list[tuple[float, int]]] = {Kind.START: [], Kind.WAIT: [], Kind.COMPUTE: []}
    free, end = dict.fromkeys(dag.groups, 0.0), [0.0] * len(dag)
    now, order = 0.0, []

    def add(i: int) -> None:
        node = dag.nodes[i]
        heapq.heappush(ready[node.kind], (end[node.start] if node.kind == Kind.WAIT else -tails[i], i))

    for i, count in enumerate(missing):
        if not count:
            add(i)
    while len(order) < len(dag):
        starts, waits, compute = ready.values()
        over = waits and (waits[0][0] <= now or not compute)
        i = heapq.heappop(starts or (waits if over else compute))[1]
        node = dag.nodes[i]
        order.append(i)
        if node.kind == Kind.START:
            end[i] = free[node.group] = max(now, free[node.group]) + node.ms
        else:
            now = max(now, end[node.start]) if node.kind == Kind.WAIT else now + node.ms
        for user in dag.users[i]:
            missing[user] -= 1
            if not missing[user]:
                add(user)
    return order


def cases(families: Sequence[str], links: Sequence[str], *, peers: bool = True) -> Iterator[tuple[str, str, str, Case]]:
    """Family, graph, network and orders of all graphs with collectives."""
    for family in families:
        traced = FAMILIES[family]()
        gc.collect()
        gc.freeze()  # a collection of what tracing left takes seconds, in whichever pass it falls
        for graph, gm in traced.graphs.items():
            if any("c10d" in str(node.target) for node in gm.graph.nodes):
                for network in links:
                    yield family, graph, network, case_of(gm, LINKS[network], traced.ranks, peers=peers)


def losses(found: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of each pair of orders: cases, in how many ours is longer by more than `MARGIN`, the worst ratio, the mean."""
    rows = {}
    for ours, theirs in PAIRS:
        ratios = [
            case.orders[ours]["makespan"] / (case.bound if theirs == "bound" else case.orders[theirs]["makespan"])
            for case in found
            if ours in case.orders
            and (theirs == "bound" or theirs in case.orders)
            and (theirs != "greedy" or case.orders[theirs]["peak"] <= case.budget)
        ]
        if ratios:
            over = sum(ratio > MARGIN for ratio in ratios)
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            rows[f"{ours} / {theirs}"] = {"cases": len(ratios), "longer": over, "worst": max(ratios), "mean": mean}
    return rows


def times(found: Sequence[Case]) -> Iterator[str]:
    """Times of the passes."""
    for ours, theirs in (("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets")):
        small = [case.orders[ours]["seconds"] for case in found if case.nodes < 500]
        if small:
            yield f"{ours}: at most {max(small):.2f} s below 500 nodes"
        large = [case.orders for case in found if case.nodes > LARGE and theirs in case.orders]
        if large:
            ratios = [orders[ours]["seconds"] / orders[theirs]["seconds"] for orders in large]
            mean = sum(ratios) / len(ratios)
            yield f"{ours}: at most {max(ratios):.2f} x {theirs} above 2,000 nodes, {mean:.2f} x in the mean"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--out", type=Path, help="JSON file of all cases")
    args = parser.parse_args()
    found: list[Case] = []
    rows: list[dict[str, Any]] = []
    for family, graph, links, case in cases(args.families, args.links):
        found.append(case)
        about = {"family": family, "graph": graph, "links": links, "nodes": case.nodes, "bound": case.bound}
        rows.append(about | {"budget": case.budget, "orders": case.orders})
        ratios = {what: round(order["makespan"] / case.bound, 3) for what, order in case.orders.items()}
        print(f"{family}, {graph}, {links}, {case.nodes} nodes, over the bound: {ratios}", flush=True)
    summary = losses(found)
    result = {"torch": torch.__version__, "summary": summary, "times": list(times(found)), "cases": rows}
    write(result, args.out)
    for pair, row in summary.items():
        print(f"{pair:<44}{row['cases']:5} {row['longer']:6} {row['worst']:7.3f} {row['mean']:7.3f}")
    print(*times(found), sep="\n")


if __name__ == "__main__":
    main()
