"""Gradients of sinks and of tensors that a score_mod reads: summed over the ranks, they are those of one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import spanwise
from spanwise import AuxRequest, SpanMask
from tests.oracle import Problem, make_problem, relative_error
from tests.pairs import covering, named
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import CU_SEQLENS, EXCHANGES, LENGTH, ULYSSES_HEADS, mesh_of

MASK = SpanMask.documents(CU_SEQLENS) & SpanMask.sliding_window(LENGTH, 12)
VISIBLE = torch.from_numpy(MASK.dense())


def on_one_device(
    problem: Problem, slopes: torch.Tensor, table: torch.Tensor, sinks: torch.Tensor, grad_lse: torch.Tensor
) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k, v, slopes, table and sinks: a logsumexp over scores and sinks."""
    leaves = [x.clone().requires_grad_() for x in (*problem[:3], slopes, table, sinks)]
    q, k, v, slopes, table, sinks = leaves
    group, i = q.shape[1] // k.shape[1], torch.arange(LENGTH)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    distance = i[:, None] - i
    scores = q @ k.mT / math.sqrt(q.shape[3])
    scores = scores * table[i % 5][:, None] - slopes[:, None, None] * distance
    scores = scores.masked_fill(~VISIBLE, -math.inf)
    logits = sinks.view(1, q.shape[1], 1, -1)
    lse = torch.cat([scores, logits.expand(*scores.shape[:3], -1)], -1).logsumexp(-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ v
    torch.autograd.backward([out, lse], [problem.grad_out, grad_lse])
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(
    ("exchange", "num_ranks", "num_sinks"), covering(EXCHANGES, [1, 2, 3, 4], [None, 1, 3]), ids=named
)
def test_summed_over_ranks_they_are_those_of_one_device(
    exchange: dict[str, Any], num_ranks: int, num_sinks: int | None
) -> None:
    heads = ULYSSES_HEADS if exchange["exchange"] == "ulysses" else (4, 2)
    problem = make_problem(MASK.dense(), heads=heads)
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    slopes, table, grad_lse = draw(heads[0]), draw(5), draw(1, heads[0], LENGTH)
    sinks = draw(heads[0]) if num_sinks is None else draw(heads[0], num_sinks)
    plan = spanwise.make_plan(MASK, num_ranks, balancer="head_tail", block_size=8, **exchange)

    def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
        mine = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        own_slopes, own_table, own_sinks = own = [x.clone().requires_grad_() for x in (slopes, table, sinks)]

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * own_table[q_idx % 5] - own_slopes[h] * (q_idx - kv_idx)

        out, aux = spanwise.context_parallel_attention(
            *mine, plan, mesh, score_mod=score_mod, sinks=own_sinks, return_aux=AuxRequest(lse=True)
        )
        cotangents = [spanwise.shard(plan, mesh, x, dim=2) for x in (problem.grad_out, grad_lse)]
        torch.autograd.backward([out, aux.lse], cotangents)
        return [out.detach(), aux.lse.detach(), *(x.grad for x in (*mine, *own))]

    whole = on_one_device(problem, slopes, table, sinks, grad_lse)
    results = run_ranks(num_ranks, on_rank, **mesh_of(plan))
    for rank, result in enumerate(results):
        for x, want in zip(result[:5], whole[:5], strict=True):
            assert relative_error(x, plan.shard(want, rank, dim=2)) <= 1e-10
    for parts, want in zip(zip(*(result[5:] for result in results), strict=True), whole[5:], strict=True):
        assert relative_error(sum(parts), want) <= 1e-10


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_sinks_of_minus_infinity_add_nothing(kernel: str) -> None:
    problem = make_problem(MASK.dense())
    plan = spanwise.make_plan(MASK, 1, block_size=8)
    sinks = torch.full((4, 3), -math.inf, dtype=torch.float64)
    sinks[1, 2] = 0.5
    results = []
    for given in (sinks, torch.tensor([-math.inf, 0.5, -math.inf, -math.inf], dtype=torch.float64)):
        leaves = [x.clone().requires_grad_() for x in (*problem[:3], given)]
        out = spanwise.context_parallel_attention(*leaves[:3], plan, None, kernel=kernel, sinks=leaves[3])
        out.backward(problem.grad_out)
        results.append([out.detach(), *(x.grad for x in leaves[:3]), leaves[3].grad.view(4, -1).sum(-1)])
    for several, one in zip(*results, strict=True):
        assert several.isfinite().all() and torch.allclose(several, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (1, 4), (4, 2, 1)])
def test_sinks_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    q = torch.randn(1, 4, 8, 8)
    plan = spanwise.make_plan(SpanMask.causal(8), 1)
    with pytest.raises(ValueError, match=r"one logit a query head, \[4\], or several, \[4, n\]"):
        spanwise.context_parallel_attention(q, q, q, plan, None, sinks=torch.zeros(shape))
