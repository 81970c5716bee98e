"""Ranks whose equal calls run in another order, or whose backwards leave exchanges out: an error, never a number."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import SpanMask
from tests.ranks.gloo import GlooPool


def step(local: spanwise.RankPlan, masks: list[str], differs: str = "") -> None:
    """Calls of equal sizes and their backwards; `differs` says what this rank does otherwise."""
    outs, queries = [], []
    for name in reversed(masks) if differs == "another order of forwards" else masks:
        q, k, v = (torch.randn(1, 6, local.tokens.shape[1], 8, requires_grad=True) for _ in range(3))
        queries.append(q)
        if differs == "a checkpoint":
            call = functools.partial(spanwise.context_parallel_attention, mask_name=name)
            outs.append(checkpoint(call, q, k, v, local, use_reentrant=False))
        else:
            outs.append(spanwise.context_parallel_attention(q, k, v, local, mask_name=name))
    if differs == "a gradient of q alone":
        torch.autograd.grad(outs[0].sum(), [queries[0]])
        return
    for out in reversed(outs) if differs == "another order" else outs:
        out.sum().backward()


def steps(rank: int, mesh: DeviceMesh, exchange: str, differs: str, before: int) -> str:
    # Backwards of calls that are alike differ by the call that they are of, forwards by their mask.
    called = ["full", "near"] if differs == "another order of forwards" else ["full", "full"]
    masks = {"full": SpanMask.causal(96), "near": SpanMask.sliding_window(96, 60)}
    plan = spanwise.make_plan(masks, mesh.size(), exchange=exchange, balancer="head_tail", block_size=4, keep_kv=True)
    local = plan.local(mesh)
    for _ in range(before):
        step(local, called)
    try:
        step(local, called, differs if rank == 0 else "")
        step(local, called)
    except spanwise.MismatchError as error:
        return str(error)
    return "no error"


CASES: list[Any] = [
    (exchange, differs, before, ranks)
    for exchange in ("needed", "ring", "all_gather", "ulysses")
    for differs in ("another order", "a checkpoint", "a gradient of q alone", "another order of forwards")
    for before, ranks in ((0, 2), (4, 3))
]
QUICK = [CASES[i] for i in (1, 10, 21, 25, 31)]


@pytest.mark.parametrize(
    ("exchange", "differs", "before", "ranks"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_ranks_that_differ_raise(gloo_pool: GlooPool, exchange: str, differs: str, before: int, ranks: int) -> None:
    for text in gloo_pool.run(ranks, steps, exchange, differs, before):
        assert "ranks disagree on call" in text, text
        assert ("mask near" if differs == "another order of forwards" else "of call") in text, text


def test_ranks_that_do_not_differ(gloo_pool: GlooPool) -> None:
    for exchange in ("needed", "ring"):
        assert set(gloo_pool.run(2, steps, exchange, "", 1)) == {"no error"}
