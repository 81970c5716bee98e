"""`graph_pass`: what it returns, refuses and fills in; what of a whole step is no barrier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.fx.operators import operator_name
from tests.overlap.programs import Cost

OPS = _torch.functional_collectives
RANKS = 2


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return OPS.wait_tensor(OPS.all_gather_into_tensor(x, RANKS, "dp"))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return OPS.wait_tensor(OPS.reduce_scatter_tensor(grad.contiguous(), "sum", RANKS, "dp"))


def step(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Forward, backward, and an update in place that torch's optimizers mark for the profiler."""
    given = [shard.detach().requires_grad_() for shard in shards]
    for shard in given:
        x = F.silu(x @ Gathered.apply(shard).t())
    value = x.square().mean()
    grads = torch.autograd.grad(value, given)
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        for shard, grad in zip(shards, grads, strict=True):
            shard.sub_(grad * 0.1)
    return value.detach()


def test_a_pass_returns_a_scheduled_copy_and_the_optimizer_is_no_barrier() -> None:
    """Reductions travel while parameters are updated, across the marks of `record_function`, which stay in order."""
    given = torch.ones(8, 16), [torch.ones(16 // RANKS, 16) / 16 for _ in range(3)]
    gm, results = make_fx(step, tracing_mode="fake")(*given), list[overlap.Result]()
    gm.meta["of"] = "mine"
    before = gm.code
    apply = overlap.graph_pass(cost=Cost(), bucket=False, on_result=results.append)
    new = apply(gm, given)
    names, others = ([node.name for node in of.graph.nodes] for of in (gm, new))
    assert gm.code == before and new.meta["of"] == "mine" and sorted(others) == sorted(names) != others != names
    (result,) = results
    assert overlap.simulate(new, Cost()).makespan == result.timeline.makespan < 0.8 * result.before.makespan
    assert result.sizes is None and result.barriers == ()  # no size is symbolic
    assert apply(new, None).code == new.code  # its own order is as good as any; values are in the graph
    marks = [[name for name in of if "record_function" in name] for of in (names, others)]
    assert marks[0] == marks[1] and len(marks[0]) == 4
    for of, travels in ((gm, False), (new, True)):
        order = [operator_name(node) for node in of.graph.nodes]
        assert ("_c10d_functional.wait_tensor" in order[order.index("aten.sub_") :]) == travels


def test_wrong_options_and_things_that_are_no_graphs_are_refused() -> None:
    with pytest.raises(TypeError, match="'budget'"):
        overlap.graph_pass(cost=Cost(), budget=3)
    for options in ({"sizes": 0}, {"effort": 1.5}):
        with pytest.raises(ValueError, match=f"got {next(iter(options.values()))}"):
            overlap.graph_pass(cost=Cost(), **options)
    for other in (torch.nn.Linear(2, 2), step, None):
        with pytest.raises(TypeError, match=r"takes an fx\.GraphModule of ATen operators, got"):
            overlap.graph_pass(cost=Cost())(other, ())  # type: ignore[arg-type]
