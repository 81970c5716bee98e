"""Reports of optimized graphs: their figures are those of the timelines, their text says them."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from spanwise.hardware import H100
from spanwise.overlap.bounds import Bounds, lower_bounds
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Kind
from spanwise.overlap.explain.reasons import reasons
from spanwise.overlap.explain.report import Result, bound_by, figures, summary
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import optimize
from spanwise.units import milliseconds as duration

CONFIG = CaptureConfig(layers=2, dim=256, heads=8, kv_heads=4, ffn=512, seq_len=512, batch=2, dp=2, tp=2)


@pytest.fixture(scope="module")
def optimized() -> tuple[Result, dict[str, str]]:
    graphs = capture(CONFIG)
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    names = {axis.name: name for name, axis in graphs.axes.items() if axis.name}
    return optimize(graphs.backward, CostModel(H100, ranks=ranks), bucket=False), names


def test_figures_are_those_of_the_timelines(optimized: tuple[Result, dict[str, str]]) -> None:
    result, names = optimized
    found = figures(result, names)
    for order, timeline in ((found.before, result.before), (found.after, result.timeline)):
        assert (order.makespan, order.exposed) == (timeline.makespan, timeline.exposed_ms)
        assert (order.peak_bytes, order.launches) == (timeline.peak_bytes, len(timeline.dag.starts))
        assert sum(order.why.values()) == pytest.approx(order.exposed)
        assert order.counts == timeline.counts()
    assert found.after.bound == result.bounds.makespan and found.budget == result.budget
    assert found.after.makespan < found.before.makespan
    assert found.before.name != found.after.name
    assert json.loads(json.dumps(found.as_dict()))["after"]["makespan"] == result.timeline.makespan


def test_collectives_as_they_are_issued(optimized: tuple[Result, dict[str, str]]) -> None:
    result, names = optimized
    found = figures(result, names).collectives
    dag = result.timeline.dag
    order = [i for i in result.timeline.order.tolist() if dag.nodes[i].kind == Kind.START]
    assert [one.start for one in found] == order
    assert [one.begin for one in found] == [result.timeline.begin[i] for i in order]
    assert {one.group for one in found} == {"dp", "tp"}
    why = reasons(result.timeline, budget=result.budget)
    assert {one.start: one.reason for one in found if one.reason} == why
    kinds = Counter((one.operator, one.group) for one in found)
    assert kinds["reduce_scatter_tensor", "dp"] == 9 * CONFIG.layers
    # Gradients are scattered in float32; the largest, of an MLP's matrix, is split over tp only.
    sizes = [one.num_bytes for one in found if (one.operator, one.group) == ("reduce_scatter_tensor", "dp")]
    assert max(size for size in sizes if size) == 4 * CONFIG.ffn // CONFIG.tp * CONFIG.dim
    nodes = {node.name: node for node in result.graph_module.graph.nodes}
    for one in found:
        (operand,) = nodes[one.name].all_input_nodes
        tensors = operand.meta["val"], nodes[one.name].meta["val"]
        assert one.num_bytes == max(t.numel() * t.element_size() for t in tensors)


def test_bound_by() -> None:
    assert bound_by(Bounds(3.0, 2.0, {"compute": 3.0, "1": 1.0}), {}) == "all compute"
    assert bound_by(Bounds(3.0, 4.0, {"compute": 3.5, "1": 1.0}), {}) == "the longest path"
    assert bound_by(Bounds(3.0, 4.0, {"compute": 3.5, "1": 5.0}), {"1": "dp"}) == "the stream of dp"
    assert bound_by(Bounds(3.0, 3.0, {"compute": 3.5, "1": 3.0}), {}).startswith("compute, and what must come")


def test_merged_collectives_are_one_launch(optimized: tuple[Result, dict[str, str]]) -> None:
    """Rows of merged collectives say how many they are, and hold the bytes of all."""
    graphs = capture(CONFIG)
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    result = optimize(graphs.backward, CostModel(H100, ranks=ranks), bucket=True)
    found, plain = figures(result), figures(optimized[0])
    assert sum(one.members for one in found.collectives) == len(result.before.dag.starts) == found.before.launches
    after, before = found.after, found.before
    assert after.launches < before.launches
    assert sum(after.counts.values()) < sum(before.counts.values())  # a bucket is one launch
    bound = f"with these buckets; without buckets the bound is {duration(lower_bounds(result.before.dag).makespan)}"
    assert summary(found)["bound"].endswith(bound)
    assert duration(before.bound) != duration(after.bound)
    assert sum(one.num_bytes or 0 for one in found.collectives) == sum(one.num_bytes or 0 for one in plain.collectives)
    assert len(to_dag(result.graph_module, lambda node: 1.0).dag.starts) == found.after.launches
    assert isinstance(result.graph_module, torch.fx.GraphModule)
