"""A plan that is first used without gradients, or with fake tensors, then trains like a fresh one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask, _torch
from tests.oracle import Problem, make_problem
from tests.pairs import covering, named
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, LENGTH, errors, heads_for, step
from tests.ranks.harness import run_ranks

MODES = {"inference mode": torch.inference_mode, "fake": FakeTensorMode}


def passes_fakes(exchange: dict[str, Any], mode: str, way: str) -> bool:
    """Fake tensors have no address, which refetching asks for, and no threaded send."""
    return mode != "fake" or not (exchange["exchange"] == "ring" or "keep_kv" in exchange)


def first_use(
    problem: Problem, plan: spanwise.Plan, mesh: DeviceMesh | None, mode: str, way: str, kernel: str
) -> torch.Tensor:
    """What a user may do before training; the output."""
    whole = [x.clone() for x in problem[:3]]
    with MODES[mode]() as entered:
        if mode == "fake":
            whole = [entered.from_tensor(x) for x in whole]
        shards = [spanwise.shard(plan, mesh, x, dim=2) for x in whole]
        given = plan if way == "Plan" else plan.local(mesh, "cpu", kernel=kernel)
        if way == "local only":
            return shards[0]
        return spanwise.context_parallel_attention(*shards, given, mesh, kernel=kernel)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _torch.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def train(problem: Problem, plan: spanwise.Plan, mesh: DeviceMesh | None, way: str, kernel: str, rank: int) -> None:
    given = plan if way == "Plan" else plan.local(mesh, "cpu", kernel=kernel)
    got = step(given, mesh, problem, kernel=kernel)
    assert max(errors(plan, rank, problem, got)) <= 1e-5
    assert spanwise.unshard(plan, mesh, got[0], dim=2).shape == problem.out.shape


@pytest.mark.parametrize(
    ("exchange", "mode", "way"),
    covering(EXCHANGES, list(MODES), ["RankPlan", "Plan", "local only"], possible=passes_fakes),
    ids=named,
)
def test_trains_after_another_first_use(exchange: dict[str, Any], mode: str, way: str) -> None:
    if mode == "fake" and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 crashes where ranks that are threads enter a fake mode")
    mask = SpanMask.documents(CU_SEQLENS)
    problem = make_problem(mask.dense(), heads=heads_for(exchange), dtype=torch.float32)
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=8, **exchange)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        first = first_use(problem, plan, mesh, mode, way, "sdpa")
        assert isinstance(first, FakeTensor) == (mode == "fake")
        train(problem, plan, mesh, way, "sdpa", rank)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("length", [1, LENGTH])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex", "varlen"])
@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_a_rank_plan_are_plain(mode: str, kernel: str, length: int) -> None:
    mask = SpanMask.causal(length)
    plan = spanwise.make_plan({"a": mask, "b": SpanMask.full(length)}, 1, block_size=8)
    with MODES[mode]():
        given = plan.local(None, "cpu", kernel=kernel)
    kept = plan.local(None, "cpu", kernel=kernel)
    leaves = tensors(kept)
    assert len(leaves) >= 6
    assert not any(x.is_inference() or isinstance(x, FakeTensor) for x in leaves)
    assert [x.shape for x in tensors(given)] == [x.shape for x in leaves]
    assert all(isinstance(x, FakeTensor) == (mode == "fake") for x in tensors(given))


def test_first_use_in_another_fake_mode() -> None:
    """Fake tensors of one mode are refused by the next."""
    mask = SpanMask.causal(LENGTH)
    plan = spanwise.make_plan(mask, 1, block_size=8)
    problem = make_problem(mask.dense(), dtype=torch.float32)
    for _ in range(2):
        assert isinstance(first_use(problem, plan, None, "fake", "Plan", "sdpa"), FakeTensor)
    train(problem, plan, None, "Plan", "sdpa", 0)
