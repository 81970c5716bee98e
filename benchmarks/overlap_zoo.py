"""Schedules of graphs that chose no constant: `spanwise.overlap`, PyTorch's own pass and the bound at the same costs.

    python -m benchmarks.overlap_zoo --out benchmarks/results/overlap-zoo.json

Training steps on fake ranks: decoders of published shapes under data, context and tensor parallelism, and random
graphs. Every graph is priced by `CostModel` on an H100 with three networks. Orders: the graph's own, PyTorch's pass
with and without buckets, `optimize` with and without them; all simulated. The summary says in how many cases ours is
longer than another by more than 0.5 %, and the worst and the mean of the ratios.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx
from torch.nn import functional as F

from benchmarks.publish import Result, main
from spanwise.cli.overlap import plan_attention
from spanwise.hardware import H100, Hardware, Link
from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.capture import CaptureConfig, capture, recompute_gathers, relabel
from spanwise.overlap.fx.decoder import Axis, Moved
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
PAIRS = (
    ("spanwise", "own"), ("spanwise", "PyTorch"), ("spanwise, buckets", "PyTorch, buckets"), ("spanwise", "bound"),
    ("spanwise, buckets", "bound"), ("PyTorch", "bound"),
)  # fmt: skip

LLAMA_8B = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192}
GEMMA = {"dim": 3584, "heads": 16, "kv_heads": 8, "ffn": 14336, "seq_len": 2048, "vocab": 256_000}
SMALL = {"dim": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "seq_len": 1024, "vocab": 50_304, "batch": 8}
DECODERS: dict[str, dict[str, Any]] = {
    "llama, dp 64": LLAMA_8B | {"layers": 6, "dp": 64, "vocab": 128_256},
    "llama, dp 16": LLAMA_8B | {"layers": 6, "dp": 16, "vocab": 32_000, "seq_len": 4096},
    "llama, dp 8, tp 8": LLAMA_8B | {"layers": 4, "dp": 8, "tp": 8, "vocab": 128_256},
    "llama, dp 2, cp 8": LLAMA_8B | {"layers": 3, "dp": 2, "cp": 8, "seq_len": 32_768},
    "llama, dp 2, cp 4, tp 4": LLAMA_8B | {"layers": 3, "dp": 2, "cp": 4, "tp": 4, "seq_len": 32_768},
    "gemma, dp 32": GEMMA | {"layers": 6, "dp": 32},
    "small, dp 16": SMALL | {"layers": 12, "dp": 16},
}


class Traced(NamedTuple):
    """Graphs of one step by name, and the ranks of their groups."""

    graphs: dict[str, fx.GraphModule]
    ranks: Mapping[str, Sequence[int]]


class Case(NamedTuple):
    """A graph on one network: its lower bound in milliseconds, and all orders.

    An order has `makespan` and `exposed` in milliseconds, `peak` in gigabytes, `launches` of collectives, and the CPU
    `seconds` of its pass.
    """

    nodes: int
    bound: float
    orders: dict[str, dict[str, float]]
    timelines: dict[str, Timeline]


def case_of(gm: fx.GraphModule, hardware: Hardware, ranks: Mapping[str, Sequence[int]], *, peers: bool = True) -> Case:
    """All orders of one graph."""
    cost = CostModel(hardware, ranks=ranks)
    dag = to_dag(gm, cost).dag
    found = {"own": (simulate(dag), 0.0)}
    for bucket in (False, True):
        suffix = ", buckets" if bucket else ""
        if peers:
            with contextlib.suppress(RuntimeError):  # it refuses graphs in which its own buckets wait for one another
                found[f"PyTorch{suffix}"] = pytorch_order(gm, cost, cost.latency, ranks=ranks, bucket=bucket)
        began = time.process_time()
        timeline = optimize(gm, cost, bucket=bucket).timeline
        found[f"spanwise{suffix}"] = timeline, time.process_time() - began
    orders = {
        name: {
            "makespan": each.makespan, "exposed": each.exposed_ms, "peak": each.peak_bytes / 1e9,
            "launches": len(each.dag.starts), "seconds": seconds,
        }
        for name, (each, seconds) in found.items()
    }  # fmt: skip
    timelines = {name: timeline for name, (timeline, _) in found.items()}
    return Case(len(gm.graph.nodes), lower_bounds(dag).makespan, orders, timelines)


def decoder(sizes: dict[str, Any]) -> Traced:
    """The decoder of `spanwise overlap`, with context parallelism by a plan."""
    config = CaptureConfig(**sizes)
    graphs = capture(config, plan_attention(config, H100, "needed") if config.cp > 1 else None)
    for gm in (graphs.forward, graphs.backward):
        relabel(gm, torch.device("cpu"))
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    return Traced({"forward": graphs.forward, "backward": graphs.backward}, ranks)


def _all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x.contiguous(), axis.size, axis.name))


def _reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x.contiguous(), axis.size, axis.name))


def random_graph(seed: int, branches: int, depth: int) -> Traced:
    """Branches of matrix products of random sizes, joined at times, with collectives of three groups between them."""
    dist.init_process_group("fake", rank=0, world_size=64, store=_torch.fake_store())
    try:
        members = [range(8), range(0, 64, 8), range(64)]
        axes = [Axis(_torch.group_name(dist.new_group(list(ranks))), tuple(ranks), 0) for ranks in members]
        with _torch.fake_mode(), _torch.compiling():
            widths = random.Random(seed).choices([512, 2048, 8192], k=depth)
            shards = [torch.empty(2048 * width // 64, requires_grad=True) for width in widths]
            x = torch.empty(4096, 2048, dtype=torch.bfloat16)
            joint = _torch.joint_graph(functools.partial(_random_loss, seed, branches, axes), [x, *shards])
    finally:
        dist.destroy_process_group()
    _torch.drop_assertions(joint.graph)
    recompute_gathers(joint, axes[-1].name)
    graphs = dict(zip(("forward", "backward"), _torch.partition(joint, 1), strict=True))
    return Traced(graphs, {axis.name: axis.ranks for axis in axes})


def _random_loss(
    seed: int, branches: int, axes: Sequence[Axis], x: torch.Tensor, *shards: torch.Tensor
) -> tuple[torch.Tensor]:
    choose, heads = random.Random(seed), [x * scale for scale in range(1, branches + 1)]
    for shard in shards:
        at, axis = choose.randrange(branches), choose.choice(axes)
        h = heads[at]
        if choose.random() < 0.4:
            h = Moved.apply(Moved.apply(h, axis, _all_gather, _reduce_scatter), axis, _reduce_scatter, _all_gather)
        if choose.random() < 0.3:
            h = h + heads[choose.randrange(branches)]
        w = Moved.apply(shard, axes[-1], _all_gather, _reduce_scatter).bfloat16().view(h.shape[1], -1)
        heads[at] = F.relu(h @ w) @ w.t()
    return (functools.reduce(torch.add, heads).float().square().mean(),)


FAMILIES: dict[str, Callable[[], Traced]] = {
    **{f"random {seed}": functools.partial(random_graph, seed, 4 + 2 * seed, 24 + 8 * seed) for seed in range(4)},
    **{name: functools.partial(decoder, sizes) for name, sizes in DECODERS.items()},
}


def cases(families: Sequence[str], links: Sequence[str], *, peers: bool = True) -> Iterator[tuple[str, str, str, Case]]:
    """Family, graph, network and orders of all graphs."""
    for family in families:
        graphs, ranks = FAMILIES[family]()
        for graph, network in itertools.product(graphs, links):
            yield family, graph, network, case_of(graphs[graph], LINKS[network], ranks, peers=peers)


def losses(found: Sequence[Case]) -> dict[str, dict[str, float]]:
    """Of each pair of orders: cases, in how many ours is longer by more than `MARGIN`, the worst ratio, the mean."""
    rows = {}
    for ours, theirs in PAIRS:
        times = [{"bound": case.bound} | {name: one["makespan"] for name, one in case.orders.items()} for case in found]
        ratios = [of[ours] / of[theirs] for of in times if of.keys() >= {ours, theirs}]
        if ratios:
            over = sum(ratio > MARGIN for ratio in ratios)
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            rows[f"{ours} / {theirs}"] = {"cases": len(ratios), "longer": over, "worst": max(ratios), "mean": mean}
    return rows


def zoo(quick: bool = False) -> Result:
    rows, found, number = [], [], 1 if quick else None
    for family, graph, links, case in cases(list(FAMILIES)[:number], list(LINKS)[:number]):
        found.append(case)
        about = {"family": family, "graph": graph, "links": links, "nodes": case.nodes, "bound": case.bound}
        rows.append(about | {"orders": case.orders})
        ratios = {what: round(order["makespan"] / case.bound, 3) for what, order in case.orders.items()}
        print(f"{family}, {graph}, {links}, {case.nodes} nodes, over the bound: {ratios}", flush=True)
    return {"torch": torch.__version__, "summary": losses(found), "cases": rows}


if __name__ == "__main__":
    main({"zoo": zoo}, __doc__ or "")
