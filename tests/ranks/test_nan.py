"""NaN in one document never reaches another one: kernel "sdpa", every exchange, outputs and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import spanwise
from spanwise import SpanMask
from tests.oracle import make_problem
from tests.pairs import covering, named
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import CU_SEQLENS, EXCHANGES, LENGTH, heads_for, mesh_of

MASKS = {
    "causal documents": SpanMask.documents(CU_SEQLENS),
    "full documents": SpanMask.documents(CU_SEQLENS, causal=False),
    "windows": SpanMask.documents(CU_SEQLENS, window=(6, 0)),
}
POISONED = slice(19, 40)  # one document


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("exchange", "num_ranks", "name", "tensor"),
    covering(EXCHANGES, [1, 2, 3], sorted(MASKS), ["q", "k", "v", "grad_out"]),
    ids=named,
)
def test_nan_stays_in_its_document(
    exchange: dict[str, Any], num_ranks: int, name: str, tensor: str, value: float
) -> None:
    mask = MASKS[name]
    problem = make_problem(mask.dense(), heads=heads_for(exchange), dtype=torch.float32)
    getattr(problem, tensor)[:, :, POISONED] = value
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", block_size=8, **exchange)

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel="sdpa")
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        return [out.detach(), *(x.grad for x in leaves)]

    shards = run_ranks(num_ranks, on_rank, **mesh_of(plan))
    others = torch.ones(LENGTH, dtype=torch.bool)
    others[POISONED] = False
    found = [torch.cat(parts, 2)[:, :, plan.layout.restore_indices()[0]] for parts in zip(*shards, strict=True)]
    exact = problem.out, problem.dq, problem.dk, problem.dv
    for x, whole in zip(found, exact, strict=True):
        torch.testing.assert_close(x[:, :, others].double(), whole[:, :, others], atol=2e-5, rtol=1e-4)
    assert not all(x[:, :, POISONED].isfinite().all() for x in found)
