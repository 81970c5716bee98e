"""Schedules of graphs that chose no constant: `spanwise.overlap`, PyTorch's own pass and the bound at the same costs.

    python -m benchmarks.overlap_zoo --out benchmarks/results/overlap-zoo.json

Training steps on fake ranks (`zoo_graphs`), priced by `CostModel` on an H100 with three networks. Orders: the graph's
own, PyTorch's pass with and without buckets, `optimize` with and without them; all simulated. The summary says in how
many cases ours is longer than another by more than 0.5 %, and the worst and the mean of the ratios. Where PyTorch's
pass swaps messages to one peer, which then arrive in each other's place, its order has a row of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from benchmarks.publish import Result, main
from benchmarks.zoo_graphs import FAMILIES
from spanwise.hardware import H100, Hardware, Link
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import MESSAGES
from spanwise.overlap.optimize import optimize
from spanwise.overlap.pytorch_pass import pytorch_order

# The preset with less of the data sheet reached, as in a training run. Assumed: 600 of 989 TFLOP/s in matrix products,
# 2.5 of 3.35 TB/s, 350 of NVLink's 450 GB/s each way, 45 of 50 GB/s of a 400 Gb/s card for each GPU, 10 and 20 µs.
CALIBRATED = dataclasses.replace(
    H100, name="H100, sustained", matmul_flops=600e12, memory_bandwidth=2.5e12,
    links=(Link(350e9, 10e-6, ranks=8), Link(45e9, 20e-6)), source=f"{H100.source}; sustained rates assumed",
)  # fmt: skip
LINKS = {
    "fast": CALIBRATED,  # NVLink inside a host of 8, 400 Gb/s a GPU between hosts
    "middle": dataclasses.replace(CALIBRATED, links=(Link(200e9, 10e-6, ranks=8), Link(12e9, 30e-6))),
    "slow": dataclasses.replace(CALIBRATED, links=(Link(25e9, 15e-6, ranks=8), Link(3e9, 50e-6))),
}
MARGIN, Timelines = 1.005, dict[str, Timeline]
PAIRS = (
    ("spanwise", "own"), ("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets"), ("spanwise", "bound"),
    ("spanwise", "PyTorch, messages swapped"), ("spanwise, buckets", "bound"), ("PyTorch", "bound"),
)  # fmt: skip


def case_of(gm: fx.GraphModule, hardware: Hardware, ranks: Mapping[str, Sequence[int]]) -> tuple[Result, Timelines]:
    """A graph's nodes, bound in ms and orders: ms, gigabytes, launches, CPU seconds of the pass; and all timelines."""
    cost = CostModel(hardware, ranks=ranks)
    dag = to_dag(gm, cost).dag
    peers = {node.name: node.args[1] for node in gm.graph.nodes if node.target in MESSAGES}
    found = {"own": (simulate(dag), 0.0)}
    for bucket in (False, True):
        with contextlib.suppress(RuntimeError):  # it refuses graphs in which its own buckets wait for one another
            theirs, seconds = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=bucket)
            sent = [name for i in theirs.order.tolist() if (name := theirs.dag.nodes[i].name) in peers]
            swapped = sorted(sent, key=peers.get) != sorted(peers, key=peers.get)  # those to one peer
            found["PyTorch" + ", messages swapped" * swapped + ", buckets" * bucket] = theirs, seconds
        began = time.process_time()
        result = optimize(gm, cost, bucket=bucket)
        found["spanwise" + ", buckets" * bucket] = result.timeline, time.process_time() - began
    orders = {
        name: {
            "makespan": each.makespan, "exposed": each.exposed_ms, "peak": each.peak_bytes / 1e9,
            "launches": len(each.dag.starts), "seconds": seconds,
        }
        for name, (each, seconds) in found.items()
    }  # fmt: skip
    row = {"nodes": len(gm.graph.nodes), "bound": lower_bounds(dag).makespan, "orders": orders}
    return row, {name: timeline for name, (timeline, _) in found.items()}


def cases(families: Sequence[str], links: Sequence[str]) -> Iterator[Result]:
    """Rows of all graphs with collectives."""
    for family in families:
        graphs, ranks = FAMILIES[family]()
        gc.collect()
        gc.freeze()  # a collection of what tracing left takes seconds, in whichever pass it falls
        for (graph, gm), network in itertools.product(graphs.items(), links):
            if any("c10d" in str(node.target) for node in gm.graph.nodes):
                yield {"family": family, "graph": graph, "links": network, **case_of(gm, LINKS[network], ranks)[0]}


def losses(rows: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Of each pair of orders: cases, in how many ours is longer by more than `MARGIN`, the worst ratio, the mean."""
    found = {}
    for ours, theirs in PAIRS:
        times = [{"bound": row["bound"]} | {name: of["makespan"] for name, of in row["orders"].items()} for row in rows]
        ratios = [of[ours] / of[theirs] for of in times if of.keys() >= {ours, theirs}]
        if ratios:
            over = sum(ratio > MARGIN for ratio in ratios)
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            found[f"{ours} / {theirs}"] = {"cases": len(ratios), "longer": over, "worst": max(ratios), "mean": mean}
    return found


def zoo(quick: bool = False) -> Result:
    rows = []
    for row in cases(["dlrm"] if quick else list(FAMILIES), list(LINKS)):
        rows.append(row)
        print(*(row[key] for key in ("family", "graph", "links", "nodes")), flush=True)
    return {"torch": torch.__version__, "summary": losses(rows), "cases": rows}


if __name__ == "__main__":
    main({"zoo": zoo}, __doc__ or "")
