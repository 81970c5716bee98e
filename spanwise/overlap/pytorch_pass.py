"""PyTorch's own overlap pass on a graph, at given costs, to compare it with ours.

fx graph, costs ─► copy ─► torch._inductor.fx_passes.overlap_scheduling ─► simulate ─► Timeline
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.fx.capture import relabel
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import Cost, tensors_of


def pytorch_order(
    gm: fx.GraphModule,
    cost: Cost,
    latency: Callable[[fx.Node], float],
    *,
    ranks: Mapping[str, Sequence[int]],
    bucket: bool,
) -> tuple[Timeline, float]:
    """Run PyTorch's pass with its defaults on a copy of `gm`; return the timeline and the CPU seconds of the warm pass.

    Args:
        cost: milliseconds of a node, for the pass and the simulation; also called for nodes that the pass adds.
        latency: milliseconds of a collective without its bytes.
        ranks: global ranks of the graph's process groups by name; the groups are simulated.
        bucket: whether the pass may merge collectives.

    Raises:
        NotImplementedError: this torch has no such pass.
        Exception: anything that the pass raises on a graph that it refuses.
    """
    ours = copy.deepcopy(gm)
    devices = sorted({value.device for node in gm.graph.nodes for value in tensors_of(node)}, key=str)
    # The pass traces its buckets, which needs a torch with support for the device.
    move = len(devices) == 1 and devices[0].type == "cuda" and not torch.cuda.is_available()

    def estimate(node: fx.Node, size: int | None) -> float:
        return cost(node) if size is None else latency(node)

    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # messages of the pass about its buckets
    try:
        if move:
            relabel(ours, torch.device("cpu"))
        with _groups(ranks):
            # Its imports take longer than the pass.
            _torch.torch_overlap_pass(fx.symbolic_trace(torch.nn.Identity()), estimate, bucket=bucket)
            began = time.process_time()
            done = _torch.torch_overlap_pass(ours, estimate, bucket=bucket)
            seconds = time.process_time() - began
    finally:
        logging.disable(silenced)
        if move:  # the copy shares its values with `gm`
            relabel(gm, devices[0])
    return simulate(to_dag(done, cost).dag), seconds


@contextmanager
def _groups(ranks: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Simulate process groups of these ranks; ``ValueError`` if torch names them differently."""
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
