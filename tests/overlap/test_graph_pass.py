"""`graph_pass`: what it returns, refuses and fills in; what of a whole step is no barrier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import operator_name

ATEN, OPS = torch.ops.aten, _torch.functional_collectives
RANKS = 2


def costs(node: fx.Node) -> float:
    if node.target in operators.STARTS:
        return 0.6
    return 1.0 if node_flops(node) else 0.01


def gather(x: torch.Tensor, group: str = "dp") -> torch.Tensor:
    return OPS.wait_tensor(OPS.all_gather_into_tensor(x, RANKS, group))


def reduce_scatter(x: torch.Tensor, group: str = "dp") -> torch.Tensor:
    return OPS.wait_tensor(OPS.reduce_scatter_tensor(x, "sum", RANKS, group))


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return gather(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(grad.contiguous())


def loss(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    for shard in shards:
        x = F.silu(x @ Gathered.apply(shard).t())
    return x.square().mean()


def step(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Forward, backward, and an update in place that torch's optimizers mark for the profiler."""
    given = [shard.detach().requires_grad_() for shard in shards]
    value = loss(x, given)
    grads = torch.autograd.grad(value, given)
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        for shard, grad in zip(shards, grads, strict=True):
            shard.sub_(grad * 0.1)
    return value.detach()


def inputs(layers: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.ones(8, 16), [torch.ones(16 // RANKS, 16) / 16 for _ in range(layers)]


def traced(function: Any = step, *args: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*(args or inputs()))


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


@pytest.fixture
def results() -> Iterator[list[overlap.Result]]:
    yield []


def test_a_pass_returns_a_scheduled_copy(results: list[overlap.Result]) -> None:
    gm = traced()
    gm.meta["of"] = "mine"
    before = gm.code
    apply = overlap.graph_pass(cost=costs, bucket=False, on_result=results.append)
    new = apply(gm, inputs())
    assert gm.code == before and new is not gm and new.meta["of"] == "mine"
    assert sorted(names(new)) == sorted(names(gm)) and names(new) != names(gm)
    own, found = overlap.simulate(gm, costs), overlap.simulate(new, costs)
    (result,) = results
    assert found.makespan == result.timeline.makespan < 0.8 * own.makespan
    assert result.sizes is None  # no size is symbolic
    assert apply(new, inputs()).code == new.code  # its own order is as good as any
    assert apply.__name__ == "spanwise_overlap_pass"  # pipelines know passes by name


def test_the_optimizer_is_no_barrier(results: list[overlap.Result]) -> None:
    """Reductions travel while parameters are updated, across the marks of `record_function`, which stay in order."""
    gm = traced()
    new = overlap.graph_pass(cost=costs, bucket=False, on_result=results.append)(gm, inputs())
    assert results[0].barriers == ()

    def marks(of: fx.GraphModule) -> list[str]:
        return [node.name for node in of.graph.nodes if "record_function" in node.name]

    assert marks(new) == marks(gm) and len(marks(gm)) == 4
    order = [operator_name(node) for node in new.graph.nodes]
    first = order.index("aten.sub_")
    assert "_c10d_functional.wait_tensor" in order[first:]
    waits = [operator_name(node) for node in gm.graph.nodes]
    assert "_c10d_functional.wait_tensor" not in waits[waits.index("aten.sub_") :]


# What is refused.


def test_wrong_options_and_things_that_are_no_graphs_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'budget'"):
        overlap.graph_pass(cost=costs, budget=3)
    with pytest.raises(ValueError, match="sizes must be whole numbers of at least 1.*, got 0"):
        overlap.graph_pass(cost=costs, sizes=0)
    with pytest.raises(ValueError, match="effort must be a whole number, got 1.5"):
        overlap.graph_pass(cost=costs, effort=1.5)
    overlap.graph_pass(cost=costs)(traced(), None)  # values are there
    for other in (torch.nn.Linear(2, 2), step, None):
        with pytest.raises(TypeError, match=r"takes an fx\.GraphModule of ATen operators, got"):
            overlap.graph_pass(cost=costs)(other, ())  # type: ignore[arg-type]


# Other graphs.
