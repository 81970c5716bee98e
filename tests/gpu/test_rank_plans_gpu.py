"""Rank plans on a CUDA device: every rank through the flex and varlen kernels, and no host synchronisation in PTRR."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spanwise
from spanwise import SpanMask
from tests.oracle import make_problem, relative_error
from tests.simulated import all_ranks

pytestmark = pytest.mark.gpu

LENGTH = 1000


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
)
@pytest.mark.parametrize("exchange", [{"exchange": "all_gather"}, {"exchange": "needed", "stages": 2}])
def test_every_rank_of_a_plan(num_ranks: int, kernel: str, dtype: torch.dtype, exchange: dict[str, Any]) -> None:
    """What each rank computes with the K/V that the exchange would bring; outputs and gradients."""
    mask = SpanMask.documents([0, 1, 300, 300, 811, LENGTH])
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", **exchange)
    problem = make_problem(mask.dense(), heads=(4, 2), dims=(64, 64), dtype=dtype)
    leaves = [x.cuda().requires_grad_() for x in problem[:3]]
    out = all_ranks(plan, *leaves, kernel=kernel)
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
