"""NaN reaches what reads it and nothing else: kernels "reference" and "sdpa", every exchange, outputs and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import spanwise
from spanwise import SpanMask
from tests.oracle import make_problem, reached_by
from tests.pairs import covering, named
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import CU_SEQLENS, EXCHANGES, heads_for, mesh_of

MASKS = {
    "causal documents": SpanMask.documents(CU_SEQLENS),
    "full documents": SpanMask.documents(CU_SEQLENS, causal=False),
    "windows": SpanMask.documents(CU_SEQLENS, window=(6, 0)),
    "shared prefix": SpanMask.shared_prefix(19, [9, 21, 0, 18]),
    "prefix_lm": SpanMask.prefix_lm(CU_SEQLENS, [0, 1, 8, 0, 13, 5]),
}
POISONED = slice(29, 36)  # part of a document, of an answer too


@pytest.mark.parametrize(
    ("exchange", "num_ranks", "name", "tensor", "kernel", "value"),
    covering(
        EXCHANGES,
        [1, 2, 3, 4],
        sorted(MASKS),
        ["q", "k", "v", "grad_out"],
        ["reference", "sdpa"],
        [math.nan, math.inf],
    ),
    ids=named,
)
def test_nan_reaches_only_what_reads_it(
    exchange: dict[str, Any], num_ranks: int, name: str, tensor: str, kernel: str, value: float
) -> None:
    mask = MASKS[name]
    problem = make_problem(mask.dense(), heads=heads_for(exchange), dtype=torch.float32)
    getattr(problem, tensor)[:, :, POISONED] = value
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", block_size=8, **exchange)

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel=kernel)
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        return [out.detach(), *(x.grad for x in leaves)]

    shards = run_ranks(num_ranks, on_rank, **mesh_of(plan))
    found = [torch.cat(parts, 2)[:, :, plan.layout.restore_indices()[0]] for parts in zip(*shards, strict=True)]
    exact = problem.out, problem.dq, problem.dk, problem.dv
    for x, whole, reached in zip(found, exact, reached_by(mask.dense()[0], tensor, POISONED), strict=True):
        torch.testing.assert_close(x[:, :, ~reached].double(), whole[:, :, ~reached], atol=2e-5, rtol=1e-4)
        assert not reached.all()
    assert not all(x[:, :, POISONED].isfinite().all() for x in found)
