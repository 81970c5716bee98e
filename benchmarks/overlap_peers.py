"""Schedules of a Llama step: PyTorch's own overlap pass and `spanwise.overlap` on the same graphs at the same costs.

    python benchmarks/overlap_peers.py                              # 32 layers of Llama-8B shapes, 8 x 8 ranks
    python benchmarks/overlap_peers.py --layers 4 --cases backward
    python benchmarks/overlap_peers.py --layers 4 32 80 126 --costs calibrated --batch 1 --bucketing reorder
    python benchmarks/overlap_peers.py --bucketing reorder --noise  # costs that turn out to be others

Graphs are captured on fake process groups (`spanwise.overlap.fx.capture`), and their orders simulated
(`spanwise.overlap.simulate`): milliseconds of makespan, of compute standing still for collectives (exposed), and what
no order of that graph can beat (bound); collectives that are hidden wholly, partly, not at all; the peak of memory
without inputs; seconds that the pass took, the least of two runs. PyTorch's pass is
``torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing`` with the very costs of the simulation,
looked up in a table, so that neither its time nor its choices suffer from how they are computed; all else is its
default but for bucketing:

    reorder      no buckets
    buckets      ``collective_bucketing=True``
    pre-buckets  the same, and ``pre_bucketing_fsdp_collectives=True``

Ours is there without buckets ("spanwise") and with them ("spanwise, buckets"), by `optimize`, all of it: the graph's
copy and its new nodes are in its seconds; PyTorch's pass changes a graph that was copied before.

With ``--noise``, the orders made for the costs as they were assumed are simulated with others: every node's cost times
a log-normal factor of its own, the same for PyTorch's order and ours, 20 draws for each sigma. Printed are our makespan
as a share of PyTorch's in the mean and in the worst draw, and in how many draws ours was shorter.

Costs:

    torch        PyTorch's roofline and its model of NCCL, told that the device is an H100 and a host has 8. It counts
                 multiply-adds against a peak of FLOP/s, every pointwise operator by itself, and takes a group of 8
                 that spans 8 hosts for one of NVLink.
    calibrated   `CostModel` of `CALIBRATED`, pointwise operators one by one; "fused" with chains as one kernel
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx

from spanwise.hardware import H100, Link
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.capture import Axis, CaptureConfig, capture, fake_world, relabel
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import Result, optimize

Cost = Callable[[fx.Node], float]

LLAMA_8B = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192}

# The preset with less of the data sheet reached, as in a training run rather than a benchmark of one kernel. Assumed:
# 600 of 989 TFLOP/s in matrix products, 2.5 of 3.35 TB/s; in collectives 350 of the 450 GB/s that NVLink has each way,
# 45 of the 50 GB/s of a 400 Gb/s card for each GPU, and 10 and 20 µs.
CALIBRATED = dataclasses.replace(
    H100,
    name="H100, sustained",
    matmul_flops=600e12,
    memory_bandwidth=2.5e12,
    links=(Link(350e9, 10e-6, ranks=8), Link(45e9, 20e-6)),
    source=f"{H100.source}; sustained rates assumed",
)

BUCKETING = {
    "reorder": {"collective_bucketing": False, "pre_bucketing_fsdp_collectives": False},
    "buckets": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": False},
    "pre-buckets": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": True},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One order of one graph; milliseconds, gigabytes, seconds of the pass."""

    costs: str
    batch: int
    layers: int
    graph: str
    nodes: int
    order: str
    makespan: float
    exposed: float
    bound: float
    hidden: str
    peak: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Noise:
    """Our order against PyTorch's without buckets where costs are wrong; ratios of makespans."""

    costs: str
    batch: int
    layers: int
    graph: str
    sigma: float
    draws: int
    ahead: int
    mean: float
    worst: float


SIGMAS, DRAWS = (0.1, 0.2, 0.3, 0.5), 20


@contextlib.contextmanager
def torch_on_h100() -> Iterator[None]:
    """PyTorch's pass asks the device at hand what it is; here it is told.

    Its buckets cannot be traced on fake CUDA tensors without CUDA, and of CPU tensors it does not count the memory. So
    graphs are put on the CPU, and it is told that this is the memory to count.
    """
    from torch._inductor import comm_analysis
    from torch._inductor.analysis.device_info import _device_mapping
    from torch._inductor.fx_passes import overlap_scheduling
    from torch.utils import _runtime_estimation

    sheet = _device_mapping["NVIDIA H100"]
    dense = {dtype: rate / sheet.tops_sparsity_factor for dtype, rate in sheet.tops.items()}
    with (
        mock.patch.object(_runtime_estimation, "get_device_tflops", dense.__getitem__),
        mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda: sheet.dram_bw_gbs),
        mock.patch.object(
            overlap_scheduling,
            "MemoryTracker",
            functools.partial(overlap_scheduling.MemoryTracker, device_filter=lambda device: True),
        ),
        mock.patch.object(comm_analysis, "get_gpu_type", lambda: comm_analysis.NVIDIA_GPU_TYPE.HOPPER),
    ):
        yield


def torch_cost(node: fx.Node) -> float:
    """What PyTorch's pass takes a node to cost; but what does nothing is free, to which it charges memory traffic."""
    from torch._inductor.comm_analysis import estimate_nccl_collective_runtime_from_fx_node
    from torch._inductor.fx_passes.overlap_scheduling import estimate_roofline_runtime_ms

    if node.target is operators.WAIT or operators.is_free(node):
        return 0.0
    if node.target in operators.STARTS:
        return estimate_nccl_collective_runtime_from_fx_node(node, use_nccl_estimator=False)
    return estimate_roofline_runtime_ms(node)


def torch_latency(node: fx.Node) -> float:
    """What it takes a collective of nothing to cost."""
    from torch._inductor.comm_analysis import estimate_nccl_collective_runtime_from_fx_node

    return estimate_nccl_collective_runtime_from_fx_node(node, 0, use_nccl_estimator=False)


def cost_of(name: str, axes: dict[str, Axis]) -> tuple[Cost, Cost]:
    """Milliseconds of a node, and of a collective without its bytes."""
    if name == "torch":
        return torch_cost, torch_latency
    ranks = {axis.name: axis.ranks for axis in axes.values() if axis.name}
    model = CostModel(CALIBRATED, ranks=ranks, fuse=name == "fused")
    return model, model.latency


def pytorch_pass(
    gm: fx.GraphModule, table: dict[str, float], cost: Cost, latency: Cost, how: str
) -> tuple[fx.GraphModule, float]:
    """A copy of `gm` after PyTorch's pass, and the seconds that it took; inside the world that `gm` was captured in.

    Args:
        table: milliseconds by the names of nodes; `cost` gives those of nodes that the pass makes.
        latency: milliseconds of a collective without its bytes.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    def estimate(node: fx.Node, size: int | None) -> float:
        if size is not None:
            assert size == 0, f"{node}: expected to be asked for its cost or its latency, not for {size} bytes"
            return latency(node)
        known = table.get(node.name)
        return cost(node) if known is None else known

    gm = copy.deepcopy(gm)
    gc.collect()  # neither pass pays for what was left before it
    began = time.perf_counter()
    gm = schedule_overlap_bucketing(
        gm, custom_runtime_estimation=estimate, compute_estimator="analytical", **BUCKETING[how]
    )
    return gm, time.perf_counter() - began


class Known:
    """Costs that have been looked up, for `optimize`; a bucket costs what the cost model says of it.

    PyTorch's own model has no say in what is not a node yet: a bucket has one latency, and the rest of each member.
    """

    def __init__(self, table: dict[str, float], cost: Cost, latency: Cost) -> None:
        self._table, self._cost, self._latency = table, cost, latency

    def __call__(self, node: fx.Node) -> float:
        return self._table[node.name]

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        """Milliseconds of a bucket of collectives."""
        if isinstance(self._cost, CostModel):
            return self._cost.merged(nodes)
        rest = (self._table[node.name] - self._latency(node) for node in nodes)
        return max(map(self._latency, nodes)) + math.fsum(rest)


def our_pass(gm: fx.GraphModule, cost: Known, *, bucket: bool, repeats: int) -> tuple[Result, float]:
    """What `optimize` makes, and the least seconds that it took."""
    least = math.inf
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        result = optimize(gm, cost, bucket=bucket)
        least = min(least, time.perf_counter() - began)
    return result, least


def noise_of(dag: Dag, theirs: list[int], ours: list[int]) -> Iterator[tuple[float, int, int, float, float]]:
    """Of each sigma: itself, draws, in how many ours was shorter, and the mean and the worst ratio."""
    random = np.random.default_rng(0)
    for sigma in SIGMAS:
        ratios = []
        for _ in range(DRAWS):
            ms = (dag.ms * random.lognormal(0.0, sigma, len(dag))).tolist()
            noisy = Dag(tuple(dataclasses.replace(node, ms=of) for node, of in zip(dag.nodes, ms, strict=True)))
            ratios.append(simulate(noisy, ours).makespan / simulate(noisy, theirs).makespan)
        yield sigma, DRAWS, sum(ratio < 1 for ratio in ratios), float(np.mean(ratios)), max(ratios)


def rows_of(
    config: CaptureConfig, graph: str, gm: fx.GraphModule, costs: str, hows: list[str], noise: bool, repeats: int
) -> Iterator[Row | Noise]:
    """One row for each order of a graph, and with `noise` one for each sigma; seconds are the least of `repeats`."""

    def row(order: str, timeline: Timeline, seconds: float) -> Row:
        counts = "/".join(map(str, timeline.counts().values()))
        bound = lower_bounds(timeline.dag).makespan
        about = costs, config.batch, config.layers, graph, len(gm.graph.nodes), order
        return Row(*about, timeline.makespan, timeline.exposed_ms, bound, counts, timeline.peak_bytes / 1e9, seconds)

    with fake_world(config) as axes, torch_on_h100():
        cost, latency = cost_of(costs, axes)
        captured = to_dag(gm, cost)
        names = [node.name for node in captured.nodes]
        table = dict(zip(names, captured.dag.ms.tolist(), strict=True))
        yield row("original", simulate(captured.dag), 0.0)
        theirs: list[int] = []
        for how in hows:
            runs = [pytorch_pass(gm, table, cost, latency, how) for _ in range(repeats)]
            done, seconds = runs[0][0], min(seconds for _, seconds in runs)
            again = to_dag(done, lambda node: table[node.name] if node.name in table else cost(node))
            yield row(f"PyTorch, {how}", simulate(again.dag), seconds)
            if how == "reorder":
                numbers = {name: number for number, name in enumerate(names)}
                theirs = [numbers[node.name] for node in again.nodes]
        known = Known(table, cost, latency)
        ours, seconds = our_pass(gm, known, bucket=False, repeats=repeats)
        yield row("spanwise", ours.timeline, seconds)
        result, seconds = our_pass(gm, known, bucket=True, repeats=repeats)
        yield row("spanwise, buckets", result.timeline, seconds)
        if noise:
            for figures in noise_of(captured.dag, theirs, ours.timeline.order.tolist()):
                yield Noise(costs, config.batch, config.layers, graph, *figures)


def show(row: Row | Noise) -> str:
    if isinstance(row, Noise):
        return (
            f"{row.graph:<9}{row.costs:<11}{row.batch:>3}{row.layers:>5}  sigma {row.sigma}: {row.mean:.3f} of "
            f"PyTorch's, at worst {row.worst:.3f}; ahead in {row.ahead} of {row.draws}"
        )
    return (
        f"{row.graph:<9}{row.costs:<11}{row.batch:>3}{row.layers:>5}{row.nodes:>7}  {row.order:<21}{row.makespan:9.1f}"
        f"{row.exposed:9.1f}{row.bound:9.1f}  {row.hidden:>14}{row.peak:8.2f}{row.seconds:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[32])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128_256, help="0 for the layers alone")
    parser.add_argument("--cases", nargs="+", choices=["forward", "backward"], default=["backward", "forward"])
    parser.add_argument("--costs", nargs="+", choices=["torch", "calibrated", "fused"], default=["torch", "calibrated"])
    parser.add_argument("--bucketing", nargs="*", choices=list(BUCKETING), default=list(BUCKETING))
    parser.add_argument("--noise", action="store_true", help="costs that turn out to be others, too; needs reorder")
    parser.add_argument("--repeats", type=int, default=2, help="of each pass; its seconds are the least")
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    args = parser.parse_args()
    if args.noise and "reorder" not in args.bucketing:
        parser.error("--noise compares with PyTorch's order without buckets: it needs --bucketing reorder")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    logging.disable(logging.INFO)  # PyTorch's pass tells of its buckets
    print(
        f"{'graph':<9}{'costs':<11}{'b':>3}{'L':>5}{'nodes':>7}  {'order':<21}{'makespan':>9}{'exposed':>9}{'bound':>9}"
        f"  {'hid/part/exp':>14}{'peak GB':>8}{'pass s':>8}"
    )
    rows: list[dict[str, Any]] = []
    noise: list[dict[str, Any]] = []
    for layers in args.layers:
        for batch in args.batch:
            sizes = {"layers": layers, "batch": batch, "dp": args.dp, "tp": args.tp, "vocab": args.vocab or None}
            config = CaptureConfig(**LLAMA_8B, **sizes)
            began = time.perf_counter()
            graphs = capture(config)
            for gm in (graphs.forward, graphs.backward):
                relabel(gm, torch.device("cpu"))
            print(f"captured {layers} layers, batch {batch}, in {time.perf_counter() - began:.1f} s")
            for costs in args.costs:
                for name in args.cases:
                    for row in rows_of(
                        config, name, getattr(graphs, name), costs, args.bucketing, args.noise, args.repeats
                    ):
                        print(show(row), flush=True)
                        (noise if isinstance(row, Noise) else rows).append(dataclasses.asdict(row))
    if args.out:
        found = {"torch": torch.__version__, "vocab": args.vocab, "rows": rows}
        args.out.write_text(json.dumps(found | ({"noise": noise} if noise else {}), indent=1) + "\n")


if __name__ == "__main__":
    main()
