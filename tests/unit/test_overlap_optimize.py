"""The optimized graph computes what the given one does, and the given one is left as it is."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import ShapeProp

from spanwise import H100, overlap
from spanwise.overlap.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.dag import GraphError
from tests.lockstep import Lockstep
from tests.unit.test_overlap_emit import same

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten
SMALL = CaptureConfig(
    layers=2, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, batch=2, vocab=24, dp=2, tp=2, device="cpu"
)


def model_cost(graphs: Graphs) -> overlap.CostModel:
    return overlap.CostModel(H100, ranks={axis.name: axis.ranks for axis in graphs.axes.values()})


@functools.cache
def captured(rank: int, device: str = "cpu") -> Graphs:
    return capture(dataclasses.replace(SMALL, rank=rank, device=device))


def state(gm: fx.GraphModule) -> Any:
    """All of a graph that a pass could have changed."""
    nodes = [(n, n.name, n.op, n.target, n.args, dict(n.kwargs), dict(n.meta), list(n.users)) for n in gm.graph.nodes]
    return nodes, gm.code, dict(gm.meta), list(gm.__dict__)


def inputs_of(gm: fx.GraphModule, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [
        torch.randn(v.shape, generator=generator, dtype=torch.float32).to(v.dtype)
        if v.dtype.is_floating_point
        else torch.randint(0, SMALL.vocab or 1, v.shape, generator=generator, dtype=v.dtype)
        for v in values
    ]


@pytest.mark.parametrize("bucket", [False, True])
def test_all_ranks_graphs_give_the_same_bits(bucket: bool) -> None:
    graphs = [captured(rank) for rank in range(SMALL.num_ranks)]
    results = {
        name: [overlap.optimize(getattr(g, name), model_cost(g), bucket=bucket) for g in graphs]
        for name in ("forward", "backward")
    }
    axes = [g.axes for g in graphs]
    given = [inputs_of(g.forward, seed) for seed, g in enumerate(graphs)]
    forward = Lockstep([g.forward for g in graphs], axes).run(given)
    saved = [[*outputs[1:], torch.ones_like(outputs[0])] for outputs in forward]
    backward = Lockstep([g.backward for g in graphs], axes).run(saved)
    for late in (False, True):
        # Nodes have the same names on all ranks, in the same order: Lockstep sees to it.
        for name, feed, expected in (("forward", given, forward), ("backward", saved, backward)):
            modules = [result.graph_module for result in results[name]]
            for module in modules:
                module.graph.lint()
            found = Lockstep(modules, axes, late=late).run(feed)
            for of_rank, of_expected in zip(found, expected, strict=True):
                same(of_rank, of_expected)
    orders = {tuple(result.timeline.order.tolist()) for result in results["backward"]}
    assert len(orders) == 1 and orders != {tuple(range(len(graphs[0].backward.graph.nodes)))}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_new_graph_is_what_the_timeline_says_and_the_given_one_is_left(device: str) -> None:
    graphs = captured(0, device)
    for gm in (graphs.forward, graphs.backward):
        before = state(gm)
        cost = model_cost(graphs)
        result = overlap.optimize(gm, cost)
        assert state(gm) == before
        new = result.graph_module
        assert isinstance(new, fx.GraphModule) and new is not gm and type(new).__name__ == type(gm).__name__
        assert result.before.makespan == overlap.simulate(gm, cost).makespan
        again = overlap.simulate(new, cost)
        assert math.isclose(again.makespan, result.timeline.makespan)
        assert again.peak_bytes == result.timeline.peak_bytes <= result.budget
        assert overlap.lower_bound(new, cost) == pytest.approx(result.bounds.makespan)
        assert result.bounds.makespan <= result.timeline.makespan < result.before.makespan
        assert len(result.members) == len(result.timeline.dag)
        assert sorted(i for members in result.members for i in members) == list(range(len(result.before.dag)))
        kept = {n.name: n.meta for n in new.graph.nodes}
        for node in gm.graph.nodes:
            if node.name in kept:
                assert kept[node.name] == node.meta
            else:  # a start in a bucket
                assert len(result.members) < len(result.before.dag)
        for node in new.graph.nodes:
            if node.op.startswith("call_"):
                assert "val" in node.meta
        assert [n.name for n in new.graph.nodes if n.op == "placeholder"] == [
            n.name for n in gm.graph.nodes if n.op == "placeholder"
        ]


def costs(node: fx.Node) -> float:
    return 4.0 if node.target in (OPS.all_gather_into_tensor.default, OPS.all_reduce.default) else 1.0


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def gathered(x: torch.Tensor) -> Any:
    """A gather with compute that does not need it after its wait."""
    whole = OPS.wait_tensor(OPS.all_gather_into_tensor(x, 2, "tp"))
    return whole.sum(), x.sin(), x.cos().cos()


def errors(gm: fx.GraphModule, cost: Any = costs, **options: Any) -> GraphError:
    before = state(gm)
    with pytest.raises(GraphError) as caught:
        overlap.optimize(gm, cost, **options)
    assert state(gm) == before
    assert f"node {caught.value.node!r}" in str(caught.value)
    return caught.value


def test_a_cycle_is_refused() -> None:
    gm = traced(gathered, torch.ones(4, 4))
    sin, cos = (next(n for n in gm.graph.nodes if n.target == op) for op in (ATEN.sin.default, ATEN.cos.default))
    sin.args, cos.args = (cos,), (sin,)
    error = errors(gm)
    assert error.node == "sin" and "'cos', which does not come before it" in str(error)
    for function in (overlap.simulate, overlap.lower_bound):
        with pytest.raises(GraphError, match="'cos'"):
            function(gm, costs)


def test_a_wait_without_a_start_is_refused() -> None:
    gm = traced(lambda x: OPS.wait_tensor(x.sin()) * 2, torch.ones(4, 4))
    error = errors(gm)
    assert error.node == "wait_tensor" and "no collective of this graph writes" in str(error)


def test_an_unknown_group_is_refused() -> None:
    gm = traced(gathered, torch.ones(4, 4))
    error = errors(gm, H100)
    assert error.node == "all_gather_into_tensor" and "no process group 'tp' here" in str(error)
    (node,) = gm.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor.default)
    node.args = (*node.args[:2], "")
    error = errors(gm)
    assert error.node == "all_gather_into_tensor" and "process group must be known" in str(error)


@pytest.mark.parametrize("ms", [math.nan, -1.0, math.inf])
def test_a_cost_that_is_none_is_refused(ms: float) -> None:
    gm = traced(gathered, torch.ones(4, 4))
    error = errors(gm, lambda node: ms if node.name == "cos_1" else 1.0)
    assert error.node == "cos_1" and f"got {ms} ms" in str(error)
    error = errors(gm, {"sin": 1.0, "sum_1": 1.0, "all_gather_into_tensor": 1.0, "cos": 1.0})
    assert error.node == "cos_1" and "not in the table" in str(error)


def test_a_budget_or_multiplier_that_cannot_be_kept_is_refused() -> None:
    gm = traced(gathered, torch.ones(4, 4))
    peak = overlap.simulate(gm, costs).peak_bytes
    assert overlap.optimize(gm, costs, memory_budget=peak).timeline.peak_bytes <= peak
    before = state(gm)
    with pytest.raises(ValueError, match=f"needs {peak:,} bytes at its peak, more than the budget of {peak - 1:,}"):
        overlap.optimize(gm, costs, memory_budget=peak - 1)
    with pytest.raises(ValueError, match="multiplier must be positive and finite, got 0"):
        overlap.optimize(gm, costs, multiplier=0)
    assert state(gm) == before


def test_a_node_without_metadata_is_refused() -> None:
    gm = traced(gathered, torch.ones(4, 4))
    (node,) = gm.graph.find_nodes(op="call_function", target=ATEN.sin.default)
    del node.meta["val"]
    error = errors(gm)
    assert error.node == "sin" and 'no meta["val"]' in str(error)


def test_graphs_without_any_metadata_say_how_to_get_it() -> None:
    x = torch.ones(4, 4)
    shaped = fx.symbolic_trace(lambda x: ATEN.cos.default(ATEN.sin.default(x)))
    ShapeProp(shaped).propagate(x)
    assert "tensor_meta" in next(n for n in shaped.graph.nodes if n.op == "call_function").meta
    gm = traced(lambda x: gathered(x), x)  # annotations as text cannot be saved
    saved = io.BytesIO()
    torch.save(gm, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for graph in (shaped, loaded):
        assert "FakeTensorProp(gm).propagate(*inputs)" in str(errors(graph))
        FakeTensorProp(graph).propagate(x)
    assert overlap.optimize(loaded, costs).timeline.makespan == overlap.optimize(gm, costs).timeline.makespan == 5
    assert overlap.optimize(shaped, costs).timeline.makespan == 2


def test_a_graph_without_collectives_or_without_anything_stays_as_it_is() -> None:
    for function in (lambda x: (x.sin(), x.cos()), lambda x: x):
        gm = traced(function, torch.ones(4))
        result = overlap.optimize(gm, costs)
        assert result.graph_module.code == gm.code
        same(
            torch.utils._pytree.tree_leaves(result.graph_module(torch.ones(4))),
            torch.utils._pytree.tree_leaves(gm(torch.ones(4))),
        )
