"""peers: PyTorch's own overlap pass on a graph, at costs that are given, for a report that shows it beside ours.

fx graph, costs ─► a copy, through torch._inductor.fx_passes.overlap_scheduling ─► simulate ─► Timeline
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _torch
from spanwise.overlap.fx.capture import relabel
from spanwise.overlap.fx.operators import Cost, tensors_of
from spanwise.overlap.ir.simulate import Timeline
from spanwise.overlap.optimize import simulate


def pytorch_order(
    gm: fx.GraphModule,
    cost: Cost,
    latency: Callable[[fx.Node], float],
    *,
    ranks: Mapping[str, Sequence[int]],
    bucket: bool,
) -> tuple[Timeline, float]:
    """The timeline of a copy of `gm` after PyTorch's pass with its defaults, and the seconds that the pass took, warm.

    Args:
        cost: milliseconds of a node, those that the pass makes among them; it is what the pass goes by, too.
        latency: milliseconds of a collective without its bytes.
        ranks: global ranks of the graph's process groups by name; simulated groups of these names are made for it.
        bucket: whether it may merge collectives.

    Raises:
        NotImplementedError: this torch has no such pass.
        Exception: whatever the pass raises on a graph that it does not take.
    """
    ours = copy.deepcopy(gm)
    devices = sorted({value.device for node in gm.graph.nodes for value in tensors_of(node)}, key=str)
    # What it puts into a bucket is traced, which needs a torch that has the device.
    move = len(devices) == 1 and devices[0].type == "cuda" and not torch.cuda.is_available()

    def estimate(node: fx.Node, size: int | None) -> float:
        return cost(node) if size is None else latency(node)

    try:
        if move:
            relabel(ours, torch.device("cpu"))
        with _groups(ranks), _quiet():
            # Once on little, so that the time is the pass's: its imports alone take longer than it does.
            _torch.torch_overlap_pass(_tiny(ranks), lambda node, size: 1.0, bucket=bucket)
            began = time.perf_counter()
            done = _torch.torch_overlap_pass(ours, estimate, bucket=bucket)
            seconds = time.perf_counter() - began
    finally:
        if move:  # a copy has the very values
            relabel(gm, devices[0])
    return simulate(done, cost), seconds


def _tiny(ranks: Mapping[str, Sequence[int]]) -> fx.GraphModule:
    """A few products, and two gathers of one group that the pass puts into a bucket."""
    ops, graph = torch.ops, fx.Graph()
    group = min(ranks, default=None)

    def call(op: Any, *args: Any) -> fx.Node:
        node = graph.call_function(op, args)
        node.meta["val"] = op(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
        return node

    with _torch.fake_mode():
        x, *shards = (graph.placeholder(name) for name in "xab")
        for node in (x, *shards):
            node.meta["val"] = torch.empty(8, 8)
        found = [call(ops.aten.mm.default, x, x)]
        if group is not None:
            gather, wait = ops._c10d_functional.all_gather_into_tensor.default, ops._c10d_functional.wait_tensor.default
            starts = [call(gather, shard, len(ranks[group]), group) for shard in shards]
            found.append(call(ops.aten.mm.default, found[0], x))
            found += [call(wait, start) for start in starts]
        graph.output(tuple(found))
    return fx.GraphModule({}, graph)


@contextmanager
def _groups(ranks: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Simulated process groups of these names and ranks, as far as torch gives them those names."""
    members = [set(of_group) for of_group in ranks.values()]
    shared = set.intersection(*members) if members else {0}
    if not shared:
        raise ValueError(f"no rank is in all of the groups {', '.join(ranks)}")
    size = max((max(of_group) for of_group in members), default=0) + 1
    dist.init_process_group("fake", rank=min(shared), world_size=size, store=_torch.fake_store())
    try:
        assert dist.group.WORLD is not None
        whole = _torch.group_name(dist.group.WORLD)
        for name in sorted(ranks, key=lambda name: (len(name), name)):
            if name == whole and len(ranks[name]) == size:
                continue
            made = _torch.group_name(dist.new_group(list(ranks[name])))
            if made != name:
                raise ValueError(f"its groups are looked up by name, and torch calls {name!r} {made!r} here")
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the pass tells of its buckets."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
