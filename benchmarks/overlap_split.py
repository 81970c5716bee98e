"""Schedules of a Llama step with and without cuts: `optimize` and `optimize(split=True)` on the same graphs and costs.

    python benchmarks/overlap_split.py --out benchmarks/results/overlap-split.json  # 32 layers of Llama-8B, 8 x 8 ranks
    python benchmarks/overlap_split.py --layers 4 --batch 1 --graphs forward

Graphs and costs are those of `overlap_peers.py`: "calibrated", and "fused" with pointwise chains as one kernel. Printed
are simulated milliseconds: the best schedule of the whole graph, its bound, and its floor, which no cut beats: all
compute, or all work of a stream whose collectives are not of activations, whichever is more. Then the schedule in
pieces, its bound, what its copies take, and the makespan of its order if products of M rows run at M / (M + 128) or
M / (M + 512) of the rate in place of M / (M + 256). Seconds are those of the CPU in `optimize`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from overlap_peers import CALIBRATED, LLAMA_8B

from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.optimize import optimize


def floor(dag: Dag, group: str) -> float:
    """Milliseconds of compute, or of the collectives of another group than this one."""
    streams = {other: 0.0 for other in dag.groups if other != group}
    for i in dag.starts:
        if dag.nodes[i].group in streams:
            streams[dag.nodes[i].group] += dag.nodes[i].ms
    return max(dag.compute_ms, *streams.values())


def row(graphs: Graphs, name: str, costs: str) -> dict[str, Any]:
    """Figures of a graph, whole and in pieces."""
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    cost, gm = CostModel(CALIBRATED, ranks=ranks, fuse=costs == "fused"), getattr(graphs, name)
    began = time.process_time()
    whole = optimize(gm, cost)
    between = time.process_time()
    cut = optimize(gm, cost, split=True)
    seconds = time.process_time() - between
    split = cut.split
    assert split is not None
    return {
        "graph": name,
        "costs": costs,
        "whole": whole.timeline.makespan,
        "whole_bound": whole.bounds.makespan,
        "whole_peak": whole.timeline.peak_bytes,
        "floor": floor(whole.timeline.dag, graphs.axes["tp"].name),
        "split": cut.timeline.makespan,
        "split_bound": cut.bounds.makespan,
        "split_peak": cut.timeline.peak_bytes,
        "budget": cut.budget,
        "share": cut.timeline.makespan / whole.timeline.makespan,
        "pieces": split.pieces,
        "collectives": dict(split.collectives),
        "products": split.products,
        "copies": split.copies,
        "sensitivity": {str(n): ms for n, ms in split.sensitivity.items()},
        "seconds_whole": between - began,
        "seconds_split": seconds,
    }


def show(found: dict[str, Any]) -> str:
    at = ", ".join(f"{n}: {ms:.1f}" for n, ms in found["sensitivity"].items())
    return (
        f"{found['graph']:<9}{found['costs']:<11}{found['batch']:>3}{found['layers']:>4}{found['whole']:9.1f}"
        f"{found['whole_bound']:9.1f}{found['floor']:9.1f}{found['split']:9.1f}{found['split_bound']:9.1f}"
        f"{found['share']:8.3f}{found['pieces']:>4}{found['copies']:8.1f}{found['seconds_split']:9.1f}  {at}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128_256, help="0 for the layers alone")
    parser.add_argument("--graphs", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])
    parser.add_argument("--costs", nargs="+", choices=["calibrated", "fused"], default=["calibrated"])
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    args = parser.parse_args()
    print(
        f"{'graph':<9}{'costs':<11}{'b':>3}{'L':>4}{'whole':>9}{'bound':>9}{'floor':>9}{'split':>9}{'bound':>9}"
        f"{'share':>8}{'k':>4}{'copies':>8}{'pass s':>9}  at other rates"
    )
    rows = []
    for batch in args.batch:
        sizes = {"layers": args.layers, "batch": batch, "dp": args.dp, "tp": args.tp, "vocab": args.vocab or None}
        graphs = capture(CaptureConfig(**LLAMA_8B, **sizes))
        for costs in args.costs:
            for name in args.graphs:
                rows.append({"batch": batch, "layers": args.layers, **row(graphs, name, costs)})
                print(show(rows[-1]), flush=True)
                if args.out:
                    found = {
                        "torch": torch.__version__,
                        "dp": args.dp,
                        "tp": args.tp,
                        "vocab": args.vocab,
                        "rows": rows,
                    }
                    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
