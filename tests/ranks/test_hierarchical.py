"""Exchange "hierarchical" on threaded ranks against dense float64 attention, and on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spanwise
from tests.oracle import make_problem
from tests.pairs import covering
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
