"""The flex kernel behind context_parallel_attention, on real gloo ranks."""

from __future__ import annotations

import functools
import warnings
from unittest import mock

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import AuxRequest, SpanMask
from spanwise.attention.kernels import flex as flex_module
from tests.oracle import make_problem, relative_error
from tests.ranks.gloo import GlooPool

LENGTH = 512  # whole blocks on each rank


def plan_number(i: int) -> spanwise.Plan:
    rng = np.random.default_rng(i)
    cuts = np.unique(np.concatenate([[0, LENGTH], rng.integers(1, LENGTH, 1 + i % 6)]))
    mask = SpanMask.documents(cuts) if i % 3 else SpanMask.block_causal(LENGTH, 20, 1, global_tokens=3)
    exchange = ("all_gather", "needed")[i % 2]
    return spanwise.make_plan(
        mask, 2, balancer=("head_tail", "lpt", "ptrr")[i % 3], exchange=exchange, block_size=10, keep_kv=i < 4
    )


def train(rank: int, mesh: DeviceMesh, num_plans: int) -> tuple[list[list[torch.Tensor]], int]:
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    with (
        warnings.catch_warnings(),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")),
        mock.patch.object(flex_module.Flex, "check_device", lambda *_: None),
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
    ):
        warnings.simplefilter("ignore")  # of Dynamo, which reads .grad of what is no leaf
        found = _train(mesh, num_plans)
    flex_module._compiled.cache_clear()
    return found


def _train(mesh: DeviceMesh, num_plans: int) -> tuple[list[list[torch.Tensor]], int]:
    torch._dynamo.utils.counters.clear()
    results = []
    for i in range(num_plans):
        plan = plan_number(i)
        problem = make_problem(plan.mask().dense(), batch=plan.batch_size, dims=(16, 16), dtype=torch.float32, seed=i)
        local = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out, aux = spanwise.context_parallel_attention(
            *local, plan, mesh, kernel="flex", return_aux=AuxRequest(lse=True)
        )
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        results.append([out.detach(), aux.lse.detach(), *(x.grad for x in local)])
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_matches_one_device(gloo_pool: GlooPool) -> None:
    """On torch's dense stand-in for FlexAttention; kept keys and keys that are fetched again."""
    for rank, (results, graphs) in enumerate(gloo_pool.run(2, train, 5)):
        # One span or several; refetched keys have one of their own.
        assert graphs <= 3
        for i, found in enumerate(results):
            plan = plan_number(i)
            problem = make_problem(
                plan.mask().dense(), batch=plan.batch_size, dims=(16, 16), dtype=torch.float32, seed=i
            )
            for got, want in zip(found, (problem.out, problem.lse, *problem[6:9]), strict=True):
                assert relative_error(got, plan.shard(want, rank, dim=2)) <= 3e-6
