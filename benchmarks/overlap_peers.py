"""Schedules of a Llama step: PyTorch's own overlap pass and `spanwise.overlap` on the same graphs at the same costs.

    python -m benchmarks.overlap_peers --out benchmarks/results/overlap-peers.json
    python -m benchmarks.overlap_peers --split --out benchmarks/results/overlap-split.json    # and cut into pieces
    python -m benchmarks.overlap_peers --layers 4

32 layers of Llama-8B shapes on 8 x 8 ranks, orders as in `overlap_zoo`. The orders made for the costs as they were
assumed are simulated with others, too: every node's cost times a log-normal factor of its own, the same for PyTorch's
order and ours, 20 draws for each sigma.

With ``--split``: the best schedule of the whole graph, its bound, and its floor, which no cut beats: all compute, or
all work of a stream whose collectives are not of activations, whichever is more; then the schedule in pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from benchmarks.overlap_zoo import CALIBRATED, case_of
from benchmarks.publish import write
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.optimize import optimize

LLAMA_8B = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192}
SIGMAS, DRAWS = (0.1, 0.2, 0.3, 0.5), 20


def noise_of(dag: Dag, theirs: Timeline, ours: Timeline) -> Iterator[dict[str, Any]]:
    """Ratios of makespans at wrong costs, and in how many draws ours was shorter, for each sigma."""
    numbers = {node.name: number for number, node in enumerate(dag.nodes)}
    orders = [[numbers[one.dag.nodes[i].name] for i in one.order.tolist()] for one in (ours, theirs)]
    random = np.random.default_rng(0)
    for sigma in SIGMAS:
        ratios = []
        for _ in range(DRAWS):
            ms = (dag.ms * random.lognormal(0.0, sigma, len(dag))).tolist()
            noisy = Dag(tuple(dataclasses.replace(node, ms=of) for node, of in zip(dag.nodes, ms, strict=True)))
            our_ms, their_ms = (simulate(noisy, order).makespan for order in orders)
            ratios.append(our_ms / their_ms)
        ahead = sum(ratio < 1 for ratio in ratios)
        yield {"sigma": sigma, "draws": DRAWS, "ahead": ahead, "mean": float(np.mean(ratios)), "worst": max(ratios)}


def pieces_of(gm: fx.GraphModule, model: CostModel, activations: str) -> dict[str, Any]:
    """The graph whole and in pieces; `activations` is the group whose collectives may be cut."""
    whole, cut = optimize(gm, model), optimize(gm, model, split=True)
    dag, split = whole.timeline.dag, cut.split
    assert split is not None
    streams = dict.fromkeys(set(dag.groups) - {activations}, 0.0)
    for i in dag.starts:
        if dag.nodes[i].group in streams:
            streams[dag.nodes[i].group] += dag.nodes[i].ms
    return {
        "whole": whole.timeline.makespan, "whole_bound": whole.bounds.makespan,
        "floor": max(dag.compute_ms, *streams.values()), "split": cut.timeline.makespan,
        "split_bound": cut.bounds.makespan, "pieces": split.pieces,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--split", action="store_true", help="cut into pieces, in place of the comparison")
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    args = parser.parse_args()
    result: dict[str, Any] = {"torch": torch.__version__, "rows": [], "noise": []}
    for batch in args.batch:
        graphs = capture(CaptureConfig(**LLAMA_8B, layers=args.layers, batch=batch, dp=8, tp=8, vocab=128_256))
        ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
        for name in ("forward", "backward"):
            gm, about = getattr(graphs, name), {"graph": name, "batch": batch, "layers": args.layers}
            if args.split:
                rows = [pieces_of(gm, CostModel(CALIBRATED, ranks=ranks), graphs.axes["tp"].name)]
            else:
                case = case_of(gm, CALIBRATED, ranks)
                lines = case.timelines
                rows = [
                    {"order": order, **figures, "bound": lower_bounds(lines[order].dag).makespan}
                    for order, figures in case.orders.items()
                ]
                noise = noise_of(lines["own"].dag, lines["PyTorch"], lines["spanwise"])
                result["noise"] += [about | row for row in noise]
            result["rows"] += [about | row for row in rows]
            print(*result["rows"][-len(rows) :], sep="\n", flush=True)
    write(result, args.out)


if __name__ == "__main__":
    main()
