"""Exchange "hierarchical" on threaded ranks against dense float64 attention, and on real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise import SpanMask
from spanwise.attention import failure
from spanwise.attention.kernels.reference import Reference
from spanwise.layouts.by_document import ByDocument
from tests.oracle import make_problem, relative_error
from tests.pairs import covering
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import check, masks, run


def plan_of(mask: Any, ranks: Any, host_size: int, **options: Any) -> spanwise.Plan:
    given = {"balancer": "head_tail", "block_size": 8} | options
    return spanwise.make_plan(
        mask, ranks, exchange="hierarchical", hardware=spanwise.H100.with_host_size(host_size), **given
    )


@pytest.mark.parametrize(
    ("ranks", "host_size", "name", "keep_kv", "kernel"),
    covering([1, 2, 3, 4, 5, 8, (3, 2), (4, 2)], [2, 3, 4], sorted(masks()), [True, False], ["reference", "sdpa"]),
    ids=str,
)
def test_matches_one_device(ranks: Any, host_size: int, name: str, keep_kv: bool, kernel: str) -> None:
    dtype, tolerance = {"reference": (torch.float64, 1e-10), "sdpa": (torch.float32, 1e-5)}[kernel]
    mask = masks()[name]
    problem = make_problem(mask.dense(), heads=(4, 2), dims=(8, 6), dtype=dtype)
    plan = plan_of(mask, ranks, host_size, keep_kv=keep_kv)
    check(problem, plan, run(problem, plan, kernel), tolerance)


@pytest.mark.parametrize(("ranks", "host_size"), [(6, 2), (8, 4), (7, 3)])
def test_documents_spread_by_host_match_one_device(ranks: int, host_size: int) -> None:
    mask = SpanMask.documents(np.cumsum([0, 61, 7, 20, 1, 13, *[3] * 20]))  # the first needs several hosts
    problem = make_problem(mask.dense(), heads=(4, 2), dims=(8, 6), dtype=torch.float64)
    plan = plan_of(mask, ranks, host_size, balancer=ByDocument(1.05, host_size), block_size=1)
    assert len(plan.route().padded) == 2 and plan.host_traffic().once > 0
    check(problem, plan, run(problem, plan, "reference"), 1e-10)


def test_a_relay_sums_in_float32() -> None:
    """Two hosts send one row home each, 256 + 1, which bfloat16 would round to 256."""
    grads = torch.zeros(12)
    grads[[1, 4, 5, 8, 9]] = torch.tensor([1.0, 256.0, 1.0, 256.0, 1.0])
    mask = SpanMask(np.zeros((1, 12), int), np.ones((1, 12), int), 12)  # every row reads key 0 alone
    plan = plan_of(mask, 12, 4, balancer="contiguous", block_size=1)
    assert plan.route().padded[0][4:].sum() == 2  # to a relay of each

    def on_rank(rank: int, mesh: Any) -> torch.Tensor:
        q, k, v = (torch.ones(1, 1, 1, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out = spanwise.context_parallel_attention(q, k, v, plan, mesh)
        out.backward(grads[rank].expand(out.shape).to(out.dtype))
        return v.grad

    for rank, dv in enumerate(run_ranks(12, on_rank)):
        assert dv.unique().tolist() == [516.0 if rank == 0 else 0.0]  # 515 in bfloat16


def on_processes(rank: int, mesh: Any, plans: list[spanwise.Plan]) -> list[list[torch.Tensor]]:
    """out, dq, dk and dv of each plan."""
    results = []
    for plan in plans:
        problem = make_problem(plan.mask().dense(), heads=(4, 2), dims=(8, 6))
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh)
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results


def test_real_processes(gloo_pool: GlooPool) -> None:
    plans = [plan_of(mask, 4, 2, keep_kv=keep_kv) for mask in masks().values() for keep_kv in (True, False)]
    plans.append(plan_of(masks()["window"], 4, 2, balancer="contiguous"))
    assert {plan.num_chunks() for plan in plans} == {0, 1, 2}
    for rank, results in enumerate(gloo_pool.run(4, on_processes, plans)):
        for plan, got in zip(plans, results, strict=True):
            problem = make_problem(plan.mask().dense(), heads=(4, 2), dims=(8, 6))
            for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
                assert relative_error(x, plan.shard(whole, rank, dim=2)) <= 1e-10


def test_auto_considers_hosts_and_takes_the_faster_way() -> None:
    """Rows that enter hosts once are faster where the network bounds the step, and not where compute hides it."""
    shape = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.6, 300).astype(int) + 1
    mask = SpanMask.documents(np.append(0, np.cumsum(lengths)))
    plan = spanwise.make_plan(mask, 128, hardware=spanwise.H100, **shape)
    seconds = {(x.balancer, x.exchange, x.stages): x.seconds["total"] for x in plan.candidates}
    assert plan.exchange == "hierarchical" and min(seconds.values()) == pytest.approx(plan.predict()["total"])
    assert plan.host_traffic().between == plan.host_traffic().once
    window = spanwise.make_plan(SpanMask.sliding_window(2**16, 500), 16, hardware=spanwise.H100, **shape)
    assert {"needed", "hierarchical"} <= {x.exchange for x in window.candidates} and window.exchange == "needed"
    inside = spanwise.make_plan(mask, 8, hardware=spanwise.H100, **shape)
    assert "hierarchical" not in {x.exchange for x in inside.candidates}


def test_the_second_chunk_leaves_when_the_first_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of starts, waits and kernels on rank 0, forward and backward."""
    plan = plan_of(SpanMask.causal(64), 4, 2, balancer="head_tail")
    problem, events = make_problem(plan.mask().dense(), heads=(2, 1), dims=(8, 8)), []
    start, wait, attend = failure.start, failure.wait, Reference.attend

    def recorded(name: str, what: str) -> None:
        if torch.distributed.get_rank() == 0 and "all-to-all" in what:
            events.append(f"{name} {what.removeprefix('all-to-all of ')}")

    monkeypatch.setattr(failure, "start", lambda what, *args: (recorded("start", what), start(what, *args))[1])
    monkeypatch.setattr(failure, "wait", lambda x, what, name: (recorded("wait", what), wait(x, what, name))[1])
    monkeypatch.setattr(Reference, "attend", lambda *args: (recorded("attend", "all-to-all of "), attend(*args))[1])
    run(problem, plan, "reference")
    owners, relays = (f"K/V, mask 'default', chunk {i} of 2" for i in (1, 2))
    assert [event.strip() for event in events] == [
        f"start {owners}", "attend", f"wait {owners}", f"start {relays}", "attend", f"wait {relays}", "attend",
        f"start gradients, {relays}", f"wait gradients, {relays}", f"start gradients, {owners}",
        f"wait gradients, {owners}",
    ]  # fmt: skip
