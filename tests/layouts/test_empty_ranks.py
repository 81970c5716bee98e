"""Every balancer gives every rank a token where there are as many tokens as ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask
from tests.oracle import make_problem
from tests.ranks.harness import run_ranks

BALANCERS = ["auto", "contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local"]
RANKS = st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 4), st.integers(1, 4)))


@st.composite
def packed_documents(draw: st.DrawFn) -> tuple[SpanMask, Any]:
    """A mask of one to three batch rows of packed documents, and their offsets."""
    length = draw(st.integers(1, 40))
    cuts = st.lists(st.integers(0, length), max_size=4)
    rows = [[0, *sorted(draw(cuts)), length] for _ in range(draw(st.integers(1, 3)))]
    masks = [SpanMask.documents(row, causal=draw(st.booleans())) for row in rows]
    return (masks[0], rows[0]) if len(rows) == 1 else (SpanMask.stack(masks), rows)


@given(
    packed_documents(), RANKS, st.sampled_from(BALANCERS), st.sampled_from([1, 4, 128]),
    st.sampled_from(["auto", "all_gather", "needed"]),
)  # fmt: skip
@example((SpanMask.documents([0, 40, 103]), [0, 40, 103]), 4, "auto", 128, "all_gather")
@example((SpanMask.causal(129), [0, 129]), (2, 2), "lpt", 128, "needed")  # a last block of one token, for two ranks
def test_every_rank_holds_a_token(packed: Any, num_ranks: Any, balancer: str, block_size: int, exchange: str) -> None:
    mask, cu = packed
    plan = spanwise.make_plan(
        mask, num_ranks, balancer=balancer, exchange=exchange, block_size=block_size, cu_seqlens=cu
    )
    tokens = plan.layout.tokens_per_rank
    assert tokens.sum() == mask.q_len
    assert np.count_nonzero(tokens) == min(mask.q_len, plan.num_ranks)
    assert plan.block_size <= block_size


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "hierarchical", "ring", "ulysses"])
def test_fewer_tokens_than_ranks(exchange: str) -> None:
    """Ranks without tokens take part: outputs and gradients are those of one device."""
    plan = spanwise.make_plan(SpanMask.causal(3), 4, exchange=exchange, hardware=spanwise.H100.with_host_size(2))
    problem = make_problem(plan.mask().dense(), heads=(4, 4))
    assert sorted(plan.layout.tokens_per_rank) == [0, 1, 1, 1]

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        local = plan.local(mesh)
        *leaves, grad = (spanwise.shard(local, x=x, dim=2) for x in problem[:4])
        leaves = [x.requires_grad_() for x in leaves]
        out = spanwise.context_parallel_attention(*leaves, local)
        out.backward(grad)
        wanted = (problem.out, problem.dq, problem.dk, problem.dv)
        for got, want in zip((out.detach(), *(x.grad for x in leaves)), wanted, strict=True):
            assert torch.allclose(got, plan.shard(want, rank, dim=2), rtol=1e-10, atol=1e-14)
        loss = spanwise.cross_entropy(torch.zeros(1, out.shape[2], 5), torch.ones(1, out.shape[2]).long(), mesh)
        assert torch.allclose(loss, torch.log(torch.tensor(5.0)))

    run_ranks(4, on_rank)
