"""Layers with a state on 1 to 4 ranks: outputs and gradients are those of one device for each document."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st

import spanwise
from spanwise import _torch, recurrence
from spanwise.layouts import document_runs
from spanwise.planning import documents
from spanwise.recurrence import chunkwise
from tests.ranks.harness import run_ranks
from tests.recurrence import problem as problems
from tests.recurrence.problem import KINDS, documents_of, plan_of


class Owners:
    """A balancer that gives each block the owner that it is told; ranks may get nothing."""

    def __init__(self, owners: list[int], block_size: int) -> None:
        self.owners, self.block_size = owners, block_size

    def assign(self, problem: Any, num_ranks: int) -> spanwise.Layout:
        return spanwise.Layout.from_owners(self.owners, num_ranks, problem.seq_len, self.block_size)


TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_gradients(kind: str) -> None:
    """Those of bfloat16 inputs are rounded once: sums inside are float32. Under autocast, too."""
    cuts = [0, 33, 60]
    problem = problems.make(kind, 60, documents_of(cuts)).to(torch.float32)
    problem = dataclasses.replace(problem, inputs=[x.bfloat16() for x in problem.inputs])
    plan = plan_of(cuts, 2, "head_tail")

    def on_rank(rank: int, mesh: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return problems.on_rank(rank, mesh, plan, problem)

    results = run_ranks(2, on_rank)
    problems.check(plan, problem, results, 6e-3)
    for out, grads in results:
        assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data(), ranks=st.integers(1, 4), seed=st.integers(0, 99), dtype=st.sampled_from(list(TOLERANCES)))
def test_any_owners_and_documents(kind: str, data: st.DataObject, ranks: int, seed: int, dtype: torch.dtype) -> None:
    """Log decays from -1e4 to 0 and -inf side by side neither overflow nor cancel."""
    length, block_size = data.draw(st.integers(1, 70)), data.draw(st.sampled_from([1, 1, 2, 5, 20]))
    blocks = -(-length // block_size)
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=blocks, max_size=blocks))
    cuts = sorted([0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))])
    plan = plan_of(cuts, ranks, Owners(owners, block_size))
    decay = data.draw(st.sampled_from([0.1, 2.0, 300.0]))
    problem = problems.make(kind, length, documents_of(cuts), seed, decay)
    if kind not in ("lightning", "griffin", "conv") and data.draw(st.booleans()):
        for begin, step, value in ((0, 5, -1e4), (3, 11, -torch.inf), (4, 7, 0.0)):
            problem.inputs[3][begin::step] = value
    problem = dataclasses.replace(problem.to(dtype), scale=data.draw(st.sampled_from([0.5, None])))
    with mock.patch.object(chunkwise, "_SLAB", data.draw(st.sampled_from([1 << 20, 256]))):  # one slab, or one a chunk
        results = run_ranks(plan.num_ranks, problems.on_rank, plan, problem)
    problems.check(plan, problem, results, TOLERANCES[dtype])


@pytest.mark.parametrize("kind", ["mamba2", "gla", "gdn", "kda", "mamba", "conv"])
@pytest.mark.parametrize(("balancer", "poisoned"), [("head_tail", 0), ("dual_chunk", 2), ("head_tail", 3)])
def test_nan_stays_in_its_document_and_padding_belongs_to_none(kind: str, balancer: str, poisoned: int) -> None:
    packing = spanwise.Packing([0, 5, 5, 16, 30], cu_seqlens_q_padded=[0, 8, 8, 24, 40])
    plan = spanwise.make_plan(packing.mask(), 2, packing=packing, balancer=balancer, exchange="needed", block_size=4)
    problem = problems.make(kind, 40, [(0, 5), (8, 8), (8, 19), (24, 38)])
    padding, (start, stop) = torch.from_numpy(~packing.valid_q), problem.documents[poisoned]
    changed = dataclasses.replace(problem, inputs=[x.clone() for x in problem.inputs], d_out=problem.d_out.clone())
    for whole, x in zip(problem.of_tokens(), changed.of_tokens(), strict=True):
        whole[padding], x[padding] = 0.0, torch.nan
    problems.check(plan, problem, run_ranks(2, problems.on_rank, plan, changed), 1e-10)
    for x in changed.of_tokens():
        x[start:stop] = torch.nan
    reached = False
    for rank, (out, grads) in enumerate(run_ranks(2, problems.on_rank, plan, changed)):
        tokens = plan.layout.indices(rank)
        others = torch.from_numpy((tokens < start) | (tokens >= stop))
        own = [x for n, x in enumerate(grads) if n not in problem.shared]
        assert all(x[others].isfinite().all() for x in (out, *own))
        reached |= bool(out[~others].isnan().any())
    assert reached


@pytest.mark.parametrize(
    ("kind", "cuts", "balancer", "ranks"),
    [
        ("gdn", [[0, 3, 9, 32], [0, 20, 32]], "lpt", 3),  # each row has a layout and documents
        ("kda", [[0, 11, 40]] * 2, "head_tail", 1), ("kda", [[0, 11, 40]] * 2, "head_tail", 2),
    ],
)  # fmt: skip
def test_batch_rows(kind: str, cuts: list[list[int]], balancer: str, ranks: int) -> None:
    length, own = cuts[0][-1], cuts[0] != cuts[1]
    masks = [spanwise.SpanMask.documents(row) for row in cuts]
    mask = spanwise.SpanMask.stack(masks) if own else masks[0]
    plan = spanwise.make_plan(mask, ranks, balancer=balancer, exchange="needed", block_size=2)
    assert plan.layout.batch_size == 1 + own
    both = [problems.make(kind, length, documents_of(row), seed) for seed, row in enumerate(cuts)]

    def on_rank(rank: int, mesh: Any) -> Any:
        route = recurrence.recurrence_route(plan, mesh if ranks > 1 else None, cu_seqlens=cuts if own else None)
        inputs = [plan.shard(torch.stack(pair), rank) for pair in zip(*(p.inputs for p in both), strict=True)]
        return problems.layer(both[0], inputs, route)

    outs = torch.stack([problems.expected(p)[0] for p in both])
    for rank, out in enumerate(run_ranks(ranks, on_rank)):
        torch.testing.assert_close(out, plan.shard(outs, rank))


def test_normalized_queries_and_keys() -> None:
    problem = problems.make("gdn", 20, [(0, 20)])
    q, k, *rest = problem.inputs
    route = recurrence.recurrence_route(plan_of([0, 20], 1, "contiguous"))
    unit = [x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
    got = recurrence.gated_delta(q, k, *rest, route, normalize=True)
    torch.testing.assert_close(got, recurrence.gated_delta(*unit, *rest, route))


def test_small_decays_of_long_runs_keep_their_digits() -> None:
    """In float32: errors of four ranks are at most twice those of one. Equal decays round all in one direction."""
    length = 2**16
    draw = torch.Generator().manual_seed(0)
    q, k, v, cotangent = (torch.randn(length, 1, 2, generator=draw) for _ in range(4))
    given = [q, k, v, torch.full((length, 1), -1e-4)]

    def results(ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        plan = plan_of([0, length], ranks, "contiguous")

        def on_rank(rank: int, mesh: Any) -> list[torch.Tensor]:
            inputs = [plan.shard(x.to(dtype), rank, dim=0).requires_grad_() for x in given]
            out = recurrence.gated_linear(*inputs, recurrence.recurrence_route(plan, mesh), scale=1.0)
            return [out.detach(), *torch.autograd.grad(out, inputs, plan.shard(cotangent.to(dtype), rank, dim=0))]

        return [torch.cat(of_ranks).double() for of_ranks in zip(*run_ranks(ranks, on_rank), strict=True)]

    exact, one, four = results(1, torch.float64), results(1, torch.float32), results(4, torch.float32)
    for wanted, alone, cut in zip(exact, one, four, strict=True):
        assert (cut - wanted).abs().max() <= 2 * (alone - wanted).abs().max()


@pytest.mark.parametrize("cuts", [[0, 7, 90], [0, 30, 60, 90]])
@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "lpt"])
def test_bytes_are_those_that_planning_counts(balancer: str, cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents on one rank need no communication."""
    kind = spanwise.Recurrence(layers=1, heads=2, key_dim=3, value_dim=5)
    plan = spanwise.make_plan(
        spanwise.SpanMask.documents(cuts), 3, balancer=balancer, exchange="needed", block_size=4,
        dtype="float32", recurrences={"gdn": kind},
    ).replace(relayout=False)  # fmt: skip
    problem = problems.make("gdn", 90, documents_of(cuts)).to(torch.float32)
    start, received, started = _torch.start_all_to_all, [0, 0, 0], []

    def counted(x: torch.Tensor, recv_rows: list[int], send_rows: list[int], name: str) -> torch.Tensor:
        rank = torch.distributed.get_rank()
        started.append(name)
        assert recv_rows[rank] == send_rows[rank] == 0
        received[rank] += sum(recv_rows) * x.shape[1:].numel() * x.element_size()
        return start(x, recv_rows, send_rows, name)

    monkeypatch.setattr(_torch, "start_all_to_all", counted)

    def on_rank(rank: int, mesh: Any) -> None:
        route = recurrence.recurrence_route(plan, mesh)
        inputs = [plan.shard(x, rank, dim=0) for x in problem.inputs]
        problems.layer(problem, inputs, route)

    run_ranks(3, on_rank)
    runs = document_runs.find(plan.layout, documents.packings(plan))
    apart = balancer == "contiguous" and len(cuts) == 4
    assert apart == (len(started) == 0)
    assert received == (document_runs.map_traffic(runs, 3).sum(axis=1) * kind.map_bytes).tolist()
