"""Recurrent layers on real gloo ranks: in compiled code, under activation checkpointing, and where ranks disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from spanwise import recurrence
from tests.ranks.gloo import GlooPool
from tests.recurrence import problem as problems
from tests.recurrence.problem import documents_of, plan_of

CUTS = [[0, 5, 70, 71, 110], [0, 64, 90], [0, 1, 2, 60], [0, 3, 90, 140], [0, 40, 44, 61]]


@pytest.mark.parametrize("kind", ["mamba2", "kda"])
def test_processes(gloo_pool: GlooPool, kind: str) -> None:
    problem = problems.make(kind, 110, documents_of(CUTS[0]))
    plan = plan_of(CUTS[0], 3)
    problems.check(plan, problem, gloo_pool.run(3, problems.on_rank, plan, problem), 1e-10)


def _layers(q: Any, k: Any, v: Any, decay: Any, beta: Any, weight: Any, route: Any) -> torch.Tensor:
    v = recurrence.causal_conv(v.flatten(1), weight, None, route, "silu").unflatten(1, v.shape[1:])
    out = recurrence.gated_delta(q, k, v, decay, beta, route, scale=0.5)
    return recurrence.gated_linear(q, k, out, decay, route).flatten(1).sum(1).sum()


def _steps(rank: int, mesh: Any, plans: list[Any], each: list[Any], weight: torch.Tensor, compiled: bool) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def count(gm: Any, _: Any) -> Any:
        gm.graph.eliminate_dead_code()  # as compilers do
        gm.recompile()
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def checkpointed(*args: Any) -> torch.Tensor:
        return checkpoint(_layers, *args, use_reentrant=False)

    backend = aot_autograd(fw_compiler=count)
    changed = torch.compile(_layers, fullgraph=True, dynamic=True, backend=backend) if compiled else checkpointed
    for plan, problem in zip(plans, each, strict=True):
        route = recurrence.recurrence_route(plan, mesh)
        found = []
        for call in (changed, _layers):
            leaves = [plan.shard(x, rank, dim=0).clone().requires_grad_() for x in problem.inputs]
            for x in leaves:
                torch._dynamo.maybe_mark_dynamic(x, 0)
            leaves.append(weight.clone().requires_grad_())
            found.append(torch.autograd.grad(call(*leaves, route), leaves))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
    return len(graphs), [_order(graph) for graph in graphs]


def _order(graph: Any) -> str:
    """What a graph computes and exchanges for its first gated layer, in order."""
    targets = [str(node.target).split(".") for node in graph.graph.nodes]
    names = [target[1].removeprefix("recurrence_") for target in targets if len(target) == 3]
    known = {"all_to_all_single": "start", "wait_tensor": "wait"}
    kept = [known.get(n, n) for n in names if n in (*known, "run", "compose", "vjp", "compose_vjp")]
    first = next((i for i, n in enumerate(kept) if n in ("run", "vjp")), 0)
    return " ".join(kept[first : first + 7])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_compiled_once_for_all_plans_and_checkpointed(gloo_pool: GlooPool, compiled: bool) -> None:
    plans = [plan_of(cuts, 2) for cuts in CUTS[:3]]
    each = [problems.make("kda", cuts[-1], documents_of(cuts)) for cuts in CUTS[:3]]
    weight = torch.randn(10, 4, dtype=torch.float64)
    results = gloo_pool.run(2, _steps, plans, each, weight, compiled)
    for count, orders in results:
        assert count == 2 * compiled
        assert orders == ["run run start run wait compose run", "vjp compose_vjp start vjp wait vjp vjp"][:count]
