"""Rank plans on a CUDA device: every rank's stages through the flex kernel, and no host synchronisation in PTRR."""

from __future__ import annotations

import pytest
import torch

import spanwise
from spanwise import SpanMask
from spanwise.kernels import attend
from spanwise.kernels.merge import merge
from spanwise.rank_plan import build
from tests.oracle import make_problem, relative_error

pytestmark = pytest.mark.gpu

LENGTH = 1000


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_of_a_plan(num_ranks: int, dtype: torch.dtype) -> None:
    """What each rank computes when the gathered shards are laid out as the exchange would; outputs and gradients."""
    mask = SpanMask.documents([0, 1, 300, 300, 811, LENGTH])
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail")
    problem = make_problem(mask.dense(), heads=(4, 2), dims=(64, 64), dtype=dtype)
    leaves = [x.cuda().requires_grad_() for x in problem[:3]]
    padded = int(plan.layout.tokens_per_rank.max())
    slots = torch.cat(
        [
            torch.nn.functional.pad(torch.from_numpy(plan.layout.indices(r)), (0, padded - plan.layout.num_tokens(r)))
            for r in range(num_ranks)
        ]
    ).cuda()
    shards = []
    for rank in range(num_ranks):
        local = build(plan, rank, "cuda", flex_tables=True)
        q, own_k, own_v = (plan.shard(x, rank, dim=2) for x in leaves)
        pieces = [(own_k, own_v)]
        if num_ranks > 1:
            pieces.append(
                tuple(x.index_select(2, slots).index_select(2, local.stages["default"][1].take[0]) for x in leaves[1:])
            )
        scale = 64**-0.5
        parts = [
            attend("flex", q, k, v, stage, local.tokens, scale=scale)
            for stage, (k, v) in zip(local.stages["default"], pieces, strict=True)
        ]
        shards.append(merge(parts)[0])
    out = torch.cat(shards, 2).index_select(2, plan.layout.restore_indices()[0].cuda())
    out.backward(problem.grad_out.cuda())
    tolerance = 3.5e-2 if dtype == torch.bfloat16 else 1e-4
    for got, want in zip((out, *(x.grad for x in leaves)), (problem.out, *problem[6:9]), strict=True):
        assert relative_error(got.detach().cpu(), want) <= tolerance


def test_ptrr_never_waits_for_the_device() -> None:
    process_time = torch.randint(0, 100, (2, 64), device="cuda")
    expected = spanwise.ptrr_schedule(process_time.cpu(), 8)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = spanwise.ptrr_schedule(process_time, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), expected)
