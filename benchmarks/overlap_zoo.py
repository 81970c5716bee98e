"""Schedules of graphs that chose no constant: `spanwise.overlap`, PyTorch's own pass and the bound at the same costs.

    python -m benchmarks.overlap_zoo --out benchmarks/results/overlap-zoo.json

Training steps on fake ranks: decoders of published shapes under data, context and tensor parallelism, a recommendation
model (DLRM), and random graphs. Every graph is priced by `CostModel` on an H100 with three networks. Orders: the
graph's own, PyTorch's pass with and without buckets, `optimize` with and without them; all simulated. The summary says
in how many cases ours is longer than another by more than 0.5 %, and the worst and the mean of the ratios.
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


def traced(
    groups: Mapping[str, Sequence[int]], loss: Callable[..., torch.Tensor], shapes: Sequence[Sequence[Any]]
) -> Traced:
    """Forward and backward of ``loss(axes, *inputs)`` on fake groups of these ranks; rank 0 is in all of them.

    Args:
        shapes: of each input; one that begins with a dtype needs no gradient, the others are float32 parameters.
    """
    size = 1 + max(map(max, groups.values()))
    dist.init_process_group("fake", rank=0, world_size=size, store=_torch.fake_store())
    try:
        axes = {
            label: Axis(_torch.group_name(dist.new_group(list(ranks))), tuple(ranks), 0)
            for label, ranks in groups.items()
        }
        with _torch.fake_mode(), _torch.compiling():
            inputs = [
                torch.empty(shape[1:], dtype=shape[0])
                if isinstance(shape[0], torch.dtype)
                else torch.empty(shape, requires_grad=True)
                for shape in shapes
            ]
            joint = _torch.joint_graph(lambda *args: (loss(axes, *args),), inputs)
    finally:
        dist.destroy_process_group()
    _torch.drop_assertions(joint.graph)
    recompute_gathers(joint, axes["all"].name)
    graphs = dict(zip(("forward", "backward"), _torch.partition(joint, 1), strict=True))
    return Traced(graphs, {axis.name: axis.ranks for axis in axes.values()})


def _all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x.contiguous(), axis.size, axis.name))


def _reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x.contiguous(), axis.size, axis.name))


def _all_to_all(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    parts = [x.shape[0] // axis.size] * axis.size
    start = _torch.functional_collectives.all_to_all_single.default
    return _torch.wait(start(x.contiguous(), parts, parts, axis.name))


def _averaged(grad: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_reduce(grad.float(), "sum", axis.name)) / axis.size


def dlrm() -> Traced:
    """Tables over ranks by an all-to-all; perceptrons on every rank, whose gradients are averaged."""
    tables, dim, ranks, batch = 8, 128, 16, 4096
    features = 1 + tables * ranks
    widths = (13, 512, 256, dim), (dim + features * features, 4096, 4096, 2048, 1)

    def loss(axes: dict[str, Axis], x: torch.Tensor, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        looked_up = [F.embedding(row, table).bfloat16() for row, table in zip(rows, weights, strict=False)]
        found = [Moved.apply(each, axes["all"], _all_to_all, _all_to_all) for each in looked_up]
        layers = [Moved.apply(w, axes["all"], lambda w, _: w.bfloat16(), _averaged) for w in weights[tables:]]
        for w in layers[: len(widths[0]) - 1]:
            x = F.relu(x @ w)
        both = torch.stack([x, *(y for each in found for y in each.chunk(ranks))], 1)
        x = torch.cat([x, (both @ both.mT).flatten(1)], 1)
        for w in layers[len(widths[0]) - 1 :]:
            x = F.relu(x @ w)
        return x.float().mean()

    shapes: list[Sequence[Any]] = [(torch.bfloat16, batch, 13), (torch.int64, tables, batch * ranks)]
    shapes += [(100_000, dim)] * tables + [pair for sizes in widths for pair in itertools.pairwise(sizes)]
    return traced({"all": range(ranks)}, loss, shapes)


def random_graph(seed: int, branches: int, depth: int) -> Traced:
    """Branches of matrix products of random sizes, joined at times, with collectives of three groups between them."""
    groups = {"a": range(8), "b": range(0, 64, 8), "all": range(64)}

    def loss(axes: dict[str, Axis], x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        choose, heads = random.Random(seed), [x * scale for scale in range(1, branches + 1)]
        for shard in shards:
            at, axis = choose.randrange(branches), axes[choose.choice(list(axes))]
            h = heads[at]
            if choose.random() < 0.4:
                h = Moved.apply(Moved.apply(h, axis, _all_gather, _reduce_scatter), axis, _reduce_scatter, _all_gather)
            if choose.random() < 0.3:
                h = h + heads[choose.randrange(branches)]
            w = Moved.apply(shard, axes["all"], _all_gather, _reduce_scatter).bfloat16().view(h.shape[1], -1)
            heads[at] = F.relu(h @ w) @ w.t()
        return functools.reduce(torch.add, heads).float().square().mean()

    widths = random.Random(seed).choices([512, 2048, 8192], k=depth)
    return traced(groups, loss, [(torch.bfloat16, 4096, 2048), *((2048 * width // 64,) for width in widths)])


FAMILIES: dict[str, Callable[[], Traced]] = {
    **{name: functools.partial(decoder, sizes) for name, sizes in DECODERS.items()},
    "dlrm": dlrm,
    **{f"random {seed}": functools.partial(random_graph, seed, 4 + 2 * seed, 24 + 8 * seed) for seed in range(4)},
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
    rows, found = [], []
    for family, graph, links, case in cases(["dlrm"] if quick else list(FAMILIES), ["slow"] if quick else list(LINKS)):
        found.append(case)
        about = {"family": family, "graph": graph, "links": links, "nodes": case.nodes, "bound": case.bound}
        rows.append(about | {"orders": case.orders})
        ratios = {what: round(order["makespan"] / case.bound, 3) for what, order in case.orders.items()}
        print(f"{family}, {graph}, {links}, {case.nodes} nodes, over the bound: {ratios}", flush=True)
    return {"torch": torch.__version__, "summary": losses(found), "cases": rows}


if __name__ == "__main__":
    main({"zoo": zoo}, __doc__ or "")
