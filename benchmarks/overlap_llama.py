"""Schedules of Llama steps on an H100: `spanwise.overlap` and PyTorch's rules on the same graphs at the same costs.

    python -m benchmarks.overlap_llama peers --out benchmarks/results/overlap-peers.json
    python -m benchmarks.overlap_llama split --out benchmarks/results/overlap-split.json
    python -m benchmarks.overlap_llama offload --out benchmarks/results/overlap-offload.json

peers: 32 layers of Llama-8B shapes on 8 x 8 ranks, orders as in `overlap_zoo`. The orders made for the costs as they
were assumed are simulated with others, too: every node's cost times a log-normal factor of its own, the same for
PyTorch's order and ours, 20 draws for each sigma.

split: the same graphs with collectives cut into pieces: the best schedule of the whole graph, its bound, and its floor,
which no cut beats: all compute, or all work of a stream whose collectives are not of activations, whichever is more;
then the schedule in pieces.

offload: forward and backward of 1B shapes in one graph, one rank, in less memory: activations wait in the host's
memory, placed by spanwise and by PyTorch's rule. PCIe at 55 GB/s each way. Rows: the budget in percent of the step's
own peak; milliseconds of makespan; bytes that leave. *floor*: the copies in the forward, which must end before the
peak, or its compute, whichever is longer, and the same of the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from benchmarks.overlap_zoo import CALIBRATED, case_of
from benchmarks.publish import Result, main
from benchmarks.zoo_graphs import LLAMA_8B, ranks_of
from spanwise.hardware import H100
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost
from spanwise.overlap.offload import choices, with_copies
from spanwise.overlap.optimize import optimize

SIGMAS, DRAWS = (0.1, 0.2, 0.3, 0.5), 20


def _graphs(quick: bool) -> Iterator[tuple[Result, fx.GraphModule, Graphs]]:
    """What describes a graph of 32 layers, the graph, and those of its step."""
    for batch in (1,) if quick else (1, 2):
        layers = 2 if quick else 32
        graphs = capture(CaptureConfig(**LLAMA_8B, layers=layers, batch=batch, dp=8, tp=8, vocab=128_256))
        for name in ("forward", "backward"):
            yield {"graph": name, "batch": batch, "layers": layers}, getattr(graphs, name), graphs


def peers(quick: bool = False) -> Result:
    found: Result = {"torch": torch.__version__, "rows": [], "noise": []}
    for about, gm, graphs in _graphs(quick):
        row, lines = case_of(gm, CALIBRATED, ranks_of(graphs.axes))
        for order, figures in row["orders"].items():
            bound = lower_bounds(lines[order].dag).makespan
            found["rows"].append(about | {"order": order, **figures, "bound": bound})
        noise = noise_of(lines["own"].dag, lines["PyTorch"], lines["spanwise"])
        found["noise"] += [about | row for row in noise]
    return found


def noise_of(dag: Dag, theirs: Timeline, ours: Timeline) -> Iterator[Result]:
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


def split(quick: bool = False) -> Result:
    """Each graph whole and in pieces; only collectives of activations, those of tp, may be cut."""
    rows = []
    for about, gm, graphs in _graphs(quick):
        model = CostModel(CALIBRATED, ranks=ranks_of(graphs.axes))
        whole, cut = optimize(gm, model), optimize(gm, model, split=True)
        dag = whole.timeline.dag
        assert cut.split is not None
        streams = dict.fromkeys(set(dag.groups) - {graphs.axes["tp"].name}, 0.0)
        for i in dag.starts:
            if dag.nodes[i].group in streams:
                streams[dag.nodes[i].group] += dag.nodes[i].ms
        rows.append(about | {
            "whole": whole.timeline.makespan, "whole_bound": whole.bounds.makespan,
            "floor": max(dag.compute_ms, *streams.values()), "split": cut.timeline.makespan,
            "split_bound": cut.bounds.makespan, "pieces": cut.split.pieces,
        })  # fmt: skip
    return {"torch": torch.__version__, "rows": rows}


def offload(quick: bool = False) -> Result:
    rows = []
    for layers in (2,) if quick else (4, 8, 16):
        sizes: dict[str, Any] = {"dim": 2048, "heads": 16, "kv_heads": 4, "ffn": 8192, "seq_len": 8192}
        gm = capture(CaptureConfig(**sizes, layers=layers, device="cpu")).joint
        rows += [_offloaded(gm, layers, percent) for percent in ((80,) if quick else (90, 80, 70, 60, 50, 40))]
    return {"rows": rows}


def _offloaded(gm: fx.GraphModule, layers: int, percent: int) -> Result:
    cost = CostModel(H100)
    own = to_dag(gm, cost).dag
    budget = own.peak_bytes() * percent // 100
    result = optimize(gm, cost, memory_budget=budget, offload=True)
    left = sum(result.offloaded.num_bytes.values()) if result.offloaded else 0
    rule, copies = prefetched(gm, cost, budget), 1e3 * (own.peak_bytes() - budget) / H100.to_host
    before = float(np.where(own.kinds == Kind.COMPUTE, own.ms, 0.0)[: int(own.alive_bytes().argmax())].sum())
    return {
        "layers": layers, "percent": percent, "own": own.compute_ms, "spanwise": result.timeline.makespan,
        "pytorch": rule, "floor": max(before, copies) + max(own.compute_ms - before, copies), "bytes": left,
        "peak": result.timeline.peak_bytes,
    }  # fmt: skip


def prefetched(gm: fx.GraphModule, cost: Cost, budget: int) -> float | None:
    """Makespan by PyTorch's rule for spanwise's choices of activations; None where none fits.

    torch._functorch._activation_offloading: a copy leaves after the last reader, and is waited for there; a reload
    starts as long before its reader as it takes.
    """
    captured, found = to_dag(gm, cost), []
    for chosen in choices(captured, budget):
        dag = to_dag(with_copies(gm, captured, chosen), cost).dag
        place, busy = np.arange(len(dag), dtype=float), np.cumsum(np.where(dag.kinds == Kind.COMPUTE, dag.ms, 0.0))
        for start in dag.starts:
            if dag.nodes[start].group == "from host":
                earliest = int(np.searchsorted(busy, busy[start] - dag.nodes[start].ms))
                place[start] = max(earliest, *dag.nodes[start].deps) + 0.5
        order = np.argsort(place, kind="stable").tolist()
        if dag.peak_bytes(order) <= budget:
            found.append(simulate(dag, order).makespan)
    return min(found, default=None)


if __name__ == "__main__":
    main({"peers": peers, "split": split, "offload": offload}, __doc__ or "")
