"""The flex kernel behind context_parallel_attention: CPU inference on real gloo ranks."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import AuxRequest, SpanMask
from spanwise.attention.kernels import flex as flex_module
from tests.oracle import make_problem, relative_error
from tests.ranks.gloo import GlooPool

LENGTH = 300


def plan_number(i: int) -> spanwise.Plan:
    rng = np.random.default_rng(i)
    cuts = np.unique(np.concatenate([[0, LENGTH], rng.integers(1, LENGTH, 1 + i % 6)]))
    mask = SpanMask.documents(cuts) if i % 3 else SpanMask.block_causal(LENGTH, 20, 1, global_tokens=3)
    exchange = ("all_gather", "needed")[i % 2]
    return spanwise.make_plan(mask, 2, balancer=("head_tail", "lpt", "ptrr")[i % 3], exchange=exchange, block_size=10)


def infer(
    rank: int, mesh: DeviceMesh, num_plans: int, backend: str
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        found = _infer(mesh, num_plans)
    flex_module._compiled.cache_clear()
    return found


def _infer(mesh: DeviceMesh, num_plans: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
    torch._dynamo.utils.counters.clear()
    results = []
    for i in range(num_plans):
        plan = plan_number(i)
        problem = make_problem(plan.mask().dense(), batch=plan.batch_size, dims=(16, 16), dtype=torch.float32, seed=i)
        local = [spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]]
        out, aux = spanwise.context_parallel_attention(
            *local, plan, mesh, kernel="flex", return_aux=AuxRequest(lse=True)
        )
        results.append((out, aux.lse))
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_matches_one_device_on_cpu(gloo_pool: GlooPool, backend: str) -> None:
    for rank, (results, graphs) in enumerate(gloo_pool.run(2, infer, 5, backend)):
        # One span or several; the local and the remote stage of all plans share the graphs.
        assert graphs <= 2
        for i, (out, lse) in enumerate(results):
            plan = plan_number(i)
            problem = make_problem(
                plan.mask().dense(), batch=plan.batch_size, dims=(16, 16), dtype=torch.float32, seed=i
            )
            assert relative_error(out, plan.shard(problem.out, rank, dim=2)) <= 2e-6
            assert relative_error(lse, plan.shard(problem.lse, rank, dim=2)) <= 2e-6


def test_training_on_cpu_is_refused_with_what_works() -> None:
    plan = spanwise.make_plan(SpanMask.causal(128), 1)
    q = torch.randn(1, 2, 128, 16, requires_grad=True)
    with pytest.raises(ValueError, match="sdpa"):
        spanwise.context_parallel_attention(q, q, q, plan, None, kernel="flex")
    with pytest.raises(ValueError, match="kernel='flex'"):
        spanwise.context_parallel_attention(q, q, q, plan.local(None), None, kernel="flex")
    assert spanwise.context_parallel_attention(q, q, q, plan, None).requires_grad
