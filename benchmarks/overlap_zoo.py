"""Schedules of many graphs: `spanwise.overlap`, PyTorch's own pass and a greedy list scheduler at the same costs.

    python benchmarks/overlap_zoo.py                                   # all families and links, about 15 minutes
    python benchmarks/overlap_zoo.py --families dlrm dit --links slow
    python benchmarks/overlap_zoo.py --pytorch before.json             # their orders from an earlier run, ours anew
    python benchmarks/overlap_zoo.py --show benchmarks/results/overlap-zoo.json

The families (`overlap_zoo_models`) are training steps on fake ranks. None of them chose a constant of the search. Every
graph is priced by `CostModel` on an H100 with three networks. Orders:

    own                  the graph's own
    when ready           its compute in that order, collectives started as soon as they are ready
    greedy               a list schedule by longest tail (`overlap_zoo_greedy`)
    PyTorch              torch._inductor.fx_passes.overlap_scheduling, and with its buckets
    spanwise             `optimize` without buckets, and with them; "unlimited": without a limit on memory, no buckets

All are simulated (`spanwise.overlap.simulate`). A greedy order that needs more memory than the budget of `optimize` is
compared with "unlimited" only. Printed are makespans as multiples of the lower bound of the given graph, in which a
bucket may be below 1; then in how many cases ours is longer than another by more than 0.5 %, and the worst of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from overlap_peers import CALIBRATED
from overlap_zoo_greedy import by_longest_tail, started_when_ready
from overlap_zoo_models import FAMILIES
from torch import fx

from spanwise.hardware import Hardware, Link
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.files import load_graphs, save_graphs
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import optimize
from spanwise.overlap.pytorch_pass import pytorch_order

LINKS = {
    "fast": CALIBRATED,  # NVLink inside a host of 8, 400 Gb/s a GPU between hosts
    "middle": dataclasses.replace(CALIBRATED, links=(Link(200e9, 10e-6, ranks=8), Link(12e9, 30e-6))),
    "slow": dataclasses.replace(CALIBRATED, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6))),
}
OURS: dict[str, dict[str, Any]] = {
    "spanwise": {"bucket": False},
    "spanwise, buckets": {"bucket": True},
    "spanwise, unlimited": {"bucket": False, "memory_budget": 2**60},
}
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


class Known:
    """Costs that are looked up, so that the time of a pass is its own; new nodes are priced by the model."""

    def __init__(self, table: Mapping[str, float], model: CostModel) -> None:
        self.table, self.model = table, model

    def __call__(self, node: fx.Node) -> float:
        known = self.table.get(node.name)
        return self.model(node) if known is None else known

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        return self.model.merged(nodes)


def order_of(timeline: Timeline, seconds: float = 0.0) -> Order:
    return Order(timeline.makespan, timeline.peak_bytes / 1e9, len(timeline.dag.starts), seconds)


def fastest(before: Order | None, now: Order) -> Order:
    """The order of the run that took the least time; all runs make the same order."""
    return now if before is None or now.seconds < before.seconds else before


def case_of(
    family: str,
    name: str,
    gm: fx.GraphModule,
    ranks: Mapping[str, Sequence[int]],
    links: str,
    *,
    peers: bool,
    ours: Sequence[str],
) -> Case:
    """All orders of one graph."""
    hardware: Hardware = LINKS[links]
    model = CostModel(hardware, ranks=ranks)
    captured = to_dag(gm, model)
    dag = captured.dag
    cost = Known({node.name: ms for node, ms in zip(captured.nodes, dag.ms.tolist(), strict=True)}, model)
    orders = {
        "own": order_of(simulate(dag)),
        "when ready": order_of(simulate(dag, started_when_ready(dag))),
        "greedy": order_of(simulate(dag, by_longest_tail(dag))),
    }
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
        for what in ours:
            gc.collect()
            began = time.process_time()
            result = optimize(gm, cost, **OURS[what])
            orders[what] = fastest(orders.get(what), order_of(result.timeline, time.process_time() - began))
            budget = budget or result.budget
    return Case(family, name, links, len(gm.graph.nodes), lower_bounds(dag).makespan, budget / 1e9, orders)


def cases(
    families: Sequence[str], links: Sequence[str], folder: Path | None, *, peers: bool, ours: Sequence[str]
) -> Iterator[Case]:
    """All cases; graphs are read from `folder` where they are there, and else traced and saved to it."""
    for family in families:
        path = folder / f"{family}.pt" if folder else None
        if path is not None and path.exists():
            saved = load_graphs(str(path))
            graphs, ranks = saved.graphs, saved.ranks
        else:
            traced = FAMILIES[family]()
            graphs, ranks = traced.graphs, traced.ranks
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_graphs(str(path), graphs, ranks=ranks)
        for name, gm in graphs.items():
            if any("c10d" in str(node.target) for node in gm.graph.nodes):
                for one in links:
                    yield case_of(family, name, gm, ranks, one, peers=peers, ours=ours)


def losses(found: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of each pair of orders: cases, in how many ours is longer by more than `MARGIN`, the worst ratio, the mean."""
    pairs = [
        ("spanwise", "own"),
        ("spanwise", "when ready"),
        ("spanwise", "greedy"),
        ("spanwise", "PyTorch"),
        ("spanwise, buckets", "PyTorch, buckets"),
        ("spanwise, buckets", "greedy"),
        ("spanwise, unlimited", "greedy"),
        ("spanwise, unlimited", "PyTorch"),
    ]
    rows = {}
    for ours, theirs in pairs:
        ratios = [
            case.orders[ours].makespan / case.orders[theirs].makespan
            for case in found
            if theirs in case.orders
            and ours in case.orders
            and (ours == "spanwise, unlimited" or case.orders[theirs].peak <= case.budget or "PyTorch" in theirs)
        ]
        if ratios:
            over = sum(ratio > MARGIN for ratio in ratios)
            rows[f"{ours} / {theirs}"] = {
                "cases": len(ratios),
                "longer": over,
                "worst": max(ratios),
                "mean": math.exp(math.fsum(map(math.log, ratios)) / len(ratios)),
            }
    for ours in ("spanwise", "spanwise, buckets", "spanwise, unlimited", "PyTorch", "greedy"):
        ratios = [case.orders[ours].makespan / case.bound for case in found if ours in case.orders]
        if ratios:
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            over = sum(ratio > MARGIN for ratio in ratios)
            rows[f"{ours} / bound"] = {"cases": len(ratios), "longer": over, "worst": max(ratios), "mean": mean}
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


HEAD = (
    "own",
    "when ready",
    "greedy",
    "PyTorch",
    "spanwise",
    "spanwise, unlimited",
    "PyTorch, buckets",
    "spanwise, buckets",
)


def show(case: Case) -> str:
    ratios = "".join(
        f"{case.orders[what].makespan / case.bound:9.3f}" if what in case.orders else f"{'':9}" for what in HEAD
    )
    seconds = "".join(
        f"{case.orders[what].seconds:7.2f}" if what in case.orders else f"{'':7}"
        for what in ("PyTorch", "spanwise", "PyTorch, buckets", "spanwise, buckets")
    )
    return f"{case.family:<14}{case.graph:<9}{case.links:<7}{case.nodes:>6}{case.bound:9.2f}{ratios}{seconds}"


def summary(found: Sequence[Case]) -> str:
    lines = [f"{'':<44}cases longer   worst    mean"]
    for pair, row in losses(found).items():
        lines.append(f"{pair:<44}{row['cases']:5} {row['longer']:6} {row['worst']:7.3f} {row['mean']:7.3f}")
    return "\n".join([*lines, *times(found)])


def loaded(path: Path) -> list[Case]:
    rows = json.loads(path.read_text())["cases"]
    return [Case(**(row | {"orders": {k: Order(**o) for k, o in row["orders"].items()}})) for row in rows]


def case_key(case: Case) -> tuple[str, str, str]:
    return case.family, case.graph, case.links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--graphs", type=Path, help="folder of traced graphs; read if there, else written")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch's pass")
    parser.add_argument("--ours", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--pytorch", type=Path, help="results to take PyTorch's orders and their seconds from")
    parser.add_argument("--show", type=Path, help="print a file of results, and run nothing")
    parser.add_argument("--out", type=Path, help="JSON file of all cases")
    args = parser.parse_args()
    print(f"{'':36}{'bound ms':>9}" + "".join(f"{what.replace('spanwise', 's')[:8]:>9}" for what in HEAD))
    found: list[Case] = []
    known = {case_key(case): case for case in loaded(args.pytorch)} if args.pytorch else {}
    live = not args.no_peers and not args.pytorch
    for case in (
        loaded(args.show) if args.show else cases(args.families, args.links, args.graphs, peers=live, ours=args.ours)
    ):
        if case_key(case) in known:
            theirs = {what: order for what, order in known[case_key(case)].orders.items() if "PyTorch" in what}
            case.orders.update(theirs)
        found.append(case)
        print(show(case), flush=True)
        if args.out:
            text: dict[str, Any] = {"torch": torch.__version__, "summary": losses(found), "times": list(times(found))}
            text["cases"] = [dataclasses.asdict(case) for case in found]
            args.out.write_text(json.dumps(text, indent=1) + "\n")
    print(summary(found))


if __name__ == "__main__":
    main()
