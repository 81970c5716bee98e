"""Llama steps in less memory: activations that wait in the host's memory, placed by spanwise and by PyTorch's rule.

    python -m benchmarks.overlap_offload --out benchmarks/results/overlap-offload.json

Forward and backward in one graph, one rank, priced by the H100 preset, PCIe at 55 GB/s each way. Rows: the budget in
percent of the step's own peak; milliseconds of makespan; bytes that leave. *floor*: the copies in the forward, which
must end before the peak, or its compute, whichever is longer, and the same of the backward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import fx

from benchmarks.publish import Result, main
from spanwise.hardware import H100
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import simulate
from spanwise.overlap.fx.capture import CaptureConfig, fake_world
from spanwise.overlap.fx.decoder import Decoder, flash, inputs_of
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost
from spanwise.overlap.offload import choices, with_copies
from spanwise.overlap.optimize import optimize


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


def llama(layers: int) -> fx.GraphModule:
    """Forward and backward of a decoder of 1B shapes on one sequence of 8,192 tokens."""
    config = CaptureConfig(layers=layers, dim=2048, heads=16, kv_heads=4, ffn=8192, seq_len=8192, device="cpu")
    with fake_world(config) as axes, _torch.fake_mode(), _torch.compiling():
        attend = flash(config.device)
        decoder = Decoder(config, axes, lambda _, *qkv: attend(*qkv, None))
        joint = _torch.joint_graph(decoder, inputs_of(config))
    _torch.drop_assertions(joint.graph)
    return joint


def row(gm: fx.GraphModule, layers: int, percent: int) -> dict[str, Any]:
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


def rows(quick: bool = False) -> Result:
    found = []
    for layers in (4,) if quick else (4, 8, 16):
        gm = llama(layers)
        found += [row(gm, layers, percent) for percent in ((80,) if quick else (90, 80, 70, 60, 50, 40))]
    return {"rows": found}


if __name__ == "__main__":
    main({"rows": rows}, str(__doc__))
