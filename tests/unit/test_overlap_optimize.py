"""The optimized graph computes what the given one does, and the given one is left as it is."""

from __future__ import annotations

import torch

from spanwise import H100, overlap
from spanwise.overlap.capture import CaptureConfig, capture

TINY = CaptureConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, batch=2, device="cpu", dp=2, tp=2)


def test_a_reordered_graph_lints_and_the_given_one_is_left() -> None:
    graphs = capture(TINY)
    cost = overlap.CostModel(H100, ranks={axis.name: axis.ranks for axis in graphs.axes.values()})
    for gm in (graphs.forward, graphs.backward):
        before = str(gm.graph), gm.code
        result = overlap.optimize(gm, cost)
        assert (str(gm.graph), gm.code) == before
        result.graph_module.graph.lint()
        assert result.timeline.makespan <= result.before.makespan == overlap.simulate(gm, cost).makespan
        assert isinstance(result.graph_module, torch.fx.GraphModule)
