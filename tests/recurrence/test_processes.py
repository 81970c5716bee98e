"""Recurrent layers on real gloo ranks: in compiled code, under activation checkpointing, and where ranks disagree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import recurrence
from tests.ranks.gloo import GlooPool
from tests.recurrence import problem as problems

CUTS = [[0, 5, 70, 71, 110], [0, 64, 90], [0, 1, 2, 60], [0, 3, 90, 140], [0, 40, 44, 61]]


def _plan(cuts: list[int], ranks: int) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents(cuts)
    return spanwise.make_plan(mask, ranks, balancer="head_tail", exchange="needed", block_size=4)


def _documents(cuts: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("kind", ["mamba2", "kda"])
def test_processes(gloo_pool: GlooPool, kind: str) -> None:
    problem = problems.make(kind, 110, _documents(CUTS[0]))
    plan = _plan(CUTS[0], 3)
    problems.check(plan, problem, gloo_pool.run(3, problems.on_rank, plan, problem), 1e-10)


def _layers(q: Any, k: Any, v: Any, decay: Any, beta: Any, weight: Any, route: Any) -> torch.Tensor:
    v = recurrence.causal_conv(v.flatten(1), weight, None, route, "silu").unflatten(1, v.shape[1:])
    out, final = recurrence.gated_delta(q, k, v, decay, beta, route, scale=0.5, return_final=True)
    return recurrence.gated_linear(q, k, out, decay, route).flatten(1).sum(1).sum() + final.sum()


def _steps(rank: int, mesh: Any, plans: list[Any], each: list[Any], weight: torch.Tensor, compiled: bool) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs = []

    def count(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    def checkpointed(*args: Any) -> torch.Tensor:
        return checkpoint(_layers, *args, use_reentrant=False)

    backend = aot_autograd(fw_compiler=count)
    changed = torch.compile(_layers, fullgraph=True, backend=backend) if compiled else checkpointed
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
    return len(graphs)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiles)])
def test_compiled_once_for_all_plans_and_checkpointed(gloo_pool: GlooPool, compiled: bool) -> None:
    plans = [_plan(cuts, 2) for cuts in CUTS[:3]]
    each = [problems.make("kda", cuts[-1], _documents(cuts)) for cuts in CUTS[:3]]
    weight = torch.randn(10, 4, dtype=torch.float64)
    graphs = gloo_pool.run(2, _steps, plans, each, weight, compiled, timeout=110.0)
    assert max(graphs) <= 2 * compiled


def _disagreeing(rank: int, mesh: Any, plan: Any, problem: Any, what: str) -> None:
    route = recurrence.recurrence_route(plan, mesh, conv_width=3 + (rank if what == "routes" else 0))
    inputs = [plan.shard(x, rank, dim=0).float() for x in problem.inputs]
    if what == "layers" and rank:
        recurrence.gated_linear(*inputs[:4], route)
    elif what == "widths":
        recurrence.causal_conv(inputs[2].flatten(1), torch.ones(10, 2 + rank), None, route)
    else:
        recurrence.gated_delta(*inputs, route, scale=1.0 + (rank if what == "scales" else 0))


@pytest.mark.parametrize("what", ["layers", "widths", "scales"])
def test_ranks_that_disagree(gloo_pool: GlooPool, what: str) -> None:
    problem = problems.make("gdn", 90, _documents(CUTS[1]))
    with pytest.raises(spanwise.MismatchError, match="gated_delta|causal_conv"):
        gloo_pool.run(2, _disagreeing, _plan(CUTS[1], 2), problem, what)


def test_routes_that_differ(gloo_pool: GlooPool) -> None:
    problem = problems.make("gdn", 90, _documents(CUTS[1]))
    with pytest.raises(ValueError, match="ranks made different plans"):
        gloo_pool.run(2, _disagreeing, _plan(CUTS[1], 2), problem, "routes")
