"""``optimize(split=True)``: shorter where nothing could hide collectives, never longer; it says what it did."""

from __future__ import annotations

import dataclasses
import math

from spanwise import CPU_HOST, H100, overlap
from spanwise.hardware import Link
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.fx.capture import CaptureConfig, capture
from tests.overlap.programs import graphs_on
from tests.overlap.test_optimize import state

LLAMA = CaptureConfig(
    layers=2, dim=2048, heads=16, kv_heads=8, ffn=8192, seq_len=8192, dp=8, tp=8, vocab=32_000, device="cuda"
)
SLOW = dataclasses.replace(CPU_HOST, matmul_flops=1e9, memory_bandwidth=1e9, links=(Link(2e6, 0.0),))


def test_a_llama_forward_beats_the_bound_of_the_whole_graph() -> None:
    graphs = capture(LLAMA)
    cost = CostModel(H100, ranks={axis.name: axis.ranks for axis in graphs.axes.values()})
    before = state(graphs.forward)
    whole = overlap.optimize(graphs.forward, cost)
    found = overlap.optimize(graphs.forward, cost, split=True)
    assert state(graphs.forward) == before
    split = found.split
    assert split is not None and split.is_cut and split.pieces == 4  # 2 and 8 are longer
    assert found.timeline.makespan < min(0.95 * whole.timeline.makespan, whole.bounds.makespan)
    assert found.bounds.makespan <= found.timeline.makespan * (1 + 1e-9)
    assert found.timeline.peak_bytes <= found.budget == whole.budget
    assert found.before.makespan == whole.before.makespan and math.isclose(split.unsplit, whole.timeline.makespan)
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(split.collectives)
    assert "shorter than" in found.report()
    found.graph_module.graph.lint()
    assert all("val" in node.meta for node in found.graph_module.graph.nodes if node.op.startswith("call_"))


def test_nothing_is_cut_where_that_gains_nothing() -> None:
    """On links that take no time, and where 14 rows a piece run at 14 / (14 + 256) of the rate."""
    graphs = capture(dataclasses.replace(LLAMA, layers=1, vocab=None))
    fast = dataclasses.replace(H100, links=(Link(1e15, 0.0),))
    cost = CostModel(fast, ranks={axis.name: axis.ranks for axis in graphs.axes.values()})
    small, few_rows = graphs_on(0), dataclasses.replace(SLOW, matmul_flops=2e7)
    other = CostModel(few_rows, ranks={axis.name: axis.ranks for axis in small.axes.values()})
    for gm, price in ((graphs.forward, cost), (small.forward, other)):
        result = overlap.optimize(gm, price, split=True, effort=1)
        assert result.split is not None and not result.split.is_cut and "nothing: no cut" in result.report()
        assert [n.name for n in result.graph_module.graph.nodes if "piece" in n.name] == []
    assert overlap.optimize(graphs.forward, cost, effort=1).split is None
