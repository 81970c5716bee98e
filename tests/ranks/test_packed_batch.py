"""The batch contract for packed sequences with padding: labels, positions, roll and shards against one device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from tests.ranks.harness import run_ranks

# Sequences without a row, with some padding, without a token, of one token, that fill their slot, with some padding.
LENS, SLOTS, BEFORE, AFTER = [0, 5, 0, 1, 8, 6], [0, 8, 8, 8, 8, 8], 8, 16


def packing_of(lens: list[int], slots: list[int], before: int, after: int) -> Packing:
    offsets = np.cumsum([before, *slots])
    return Packing(np.cumsum([0, *lens]), cu_seqlens_q_padded=offsets, q_len=int(offsets[-1]) + after)


def padded_plan(num_ranks: int, balancer: str) -> spanwise.Plan:
    packing = packing_of(LENS, SLOTS, BEFORE, AFTER)
    return spanwise.make_plan(packing.mask(), num_ranks, packing=packing, balancer=balancer, block_size=4)


def unpadded_plan(num_ranks: int) -> spanwise.Plan:
    packing = Packing(np.cumsum([0, *LENS]))
    return spanwise.make_plan(packing.mask(), num_ranks, packing=packing, balancer="lpt", block_size=2)


def plan_of(num_ranks: int, kind: str) -> spanwise.Plan:
    return unpadded_plan(num_ranks) if kind == "unpadded" else padded_plan(num_ranks, kind)


KINDS = ["dual_chunk", "ptrr", "unpadded"]


def rolled(x: torch.Tensor, packing: Packing, shifts: int, fill_value: float, side: str = "q") -> torch.Tensor:
    """What `spanwise.roll` promises, sequence by sequence on one device; x is [tokens, …]."""
    out = torch.where(torch.tensor(False), x, fill_value)  # a function of x even where nothing of x is left
    starts, lens = (getattr(packing, f"{side}_{what}").tolist() for what in ("starts", "lens"))
    for start, count in zip(starts, lens, strict=True):
        moved = count - abs(shifts)
        if moved > 0:
            into, out_of = start + max(shifts, 0), start + max(-shifts, 0)
            out = torch.cat([out[:into], x[out_of : out_of + moved], out[into + moved :]])
    return out


def positions(packing: Packing) -> torch.Tensor:
    out = torch.zeros(packing.q_len, dtype=torch.int64)
    for start, count in zip(packing.q_starts.tolist(), packing.q_lens.tolist(), strict=True):
        out[start : start + count] = torch.arange(count)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_labels_and_positions(kind: str, num_ranks: int, dim: int) -> None:
    plan = plan_of(num_ranks, kind)
    packing = plan.packing
    shape = (2, packing.q_len) if dim else (packing.q_len,)
    tokens = torch.randint(0, 50, shape)
    rows = tokens if dim else tokens[None]
    shifted = torch.stack([rolled(row, packing, -1, -100) for row in rows]).reshape(shape)
    kept = torch.stack([rolled(row, packing, 0, -100) for row in rows]).reshape(shape)  # only padding is ignored
    batch = {"input_ids": tokens, "labels": tokens}

    def on_rank(rank: int, mesh: object) -> tuple[dict, dict]:
        ready = spanwise.shard_batch(batch, plan, mesh, shift_labels=False, dim=dim)
        return spanwise.shard_batch(batch, plan, mesh, dim=dim), ready

    for rank, (got, ready) in enumerate(run_ranks(num_ranks, on_rank)):
        assert torch.equal(got["input_ids"], plan.shard(tokens, rank, dim))
        assert torch.equal(got["labels"], plan.shard(shifted, rank, dim))
        assert torch.equal(got["position_ids"], plan.shard(positions(packing).expand(shape), rank, dim))
        assert torch.equal(ready["labels"], plan.shard(kept, rank, dim))


def test_keys_of_cross_attention_lie_as_their_own_layout_says() -> None:
    packing = Packing([0, 4, 8], cu_seqlens_kv=[0, 12, 16], cu_seqlens_kv_padded=[0, 12, 20])
    plan = spanwise.make_plan(packing.mask(align="bottom_right"), 2, packing=packing, balancer="dual_chunk")
    queries, keys = torch.randn(8, 3), torch.randn(20, 3)

    def on_rank(rank: int, mesh: object) -> list[torch.Tensor]:
        local = plan.local(mesh)
        return [
            spanwise.shard(which, mesh, x, 0, side=side)
            for which in (plan, local)
            for x, side in ((queries, "q"), (keys, "kv"))
        ]

    for rank, (q, k, local_q, local_k) in enumerate(run_ranks(2, on_rank)):
        assert torch.equal(q, queries[packing.dual_chunk_layout(2).indices(rank)])
        assert torch.equal(k, keys[packing.dual_chunk_layout(2, "kv").indices(rank)])
        assert torch.equal(local_q, q) and torch.equal(local_k, k)

    def too_short(rank: int, mesh: object) -> None:
        for which in (plan, plan.local(mesh)):
            with pytest.raises(ValueError, match="dim 0 must have 20 tokens, got a tensor of shape"):
                spanwise.shard(which, mesh, queries, 0, side="kv")
            with pytest.raises(ValueError, match='side must be "q" or "kv", got \'k\''):
                spanwise.shard(which, mesh, queries, 0, side="k")

    run_ranks(2, too_short)


def cross_plan(num_ranks: int, balancer: str) -> spanwise.Plan:
    """24 query and 37 key rows (dual-chunk: 40), with more keys than queries, fewer, and none."""
    q, kv = {"q_len": 24}, {"kv_len": 37}
    if balancer == "dual_chunk":
        q, kv = {"cu_seqlens_q_padded": [0, 8, 16, 16, 24]}, {"cu_seqlens_kv_padded": [0, 16, 24, 24, 40]}
    packing = Packing([0, 3, 9, 9, 15], **q, cu_seqlens_kv=[0, 13, 15, 15, 30], **kv)
    return spanwise.make_plan(packing.mask(align="bottom_right"), num_ranks, packing=packing, balancer=balancer)


CROSS = [(1, "contiguous"), (2, "dual_chunk"), (3, "contiguous"), (4, "dual_chunk"), (4, "contiguous")]


@pytest.mark.parametrize(("num_ranks", "balancer"), CROSS)
@pytest.mark.parametrize("dim", [0, 1])
def test_unshard_puts_keys_back_and_has_the_exact_adjoint(num_ranks: int, balancer: str, dim: int) -> None:
    plan = cross_plan(num_ranks, balancer)
    shape = (plan.kv_len, 3) if dim == 0 else (2, plan.kv_len)
    x, ids = torch.randn(shape, dtype=torch.float64), torch.arange(plan.kv_len)
    cotangents = [torch.randn(shape, dtype=torch.float64) for _ in range(num_ranks)]

    def on_rank(rank: int, mesh: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        local = spanwise.shard(plan, mesh, x, dim, side="kv").requires_grad_()
        full = spanwise.unshard(plan, mesh, local, dim, side="kv")
        full.backward(cotangents[rank])
        mine = spanwise.shard(plan, mesh, ids, 0, side="kv")
        return full.detach(), local.grad, spanwise.unshard(plan, mesh, mine, 0, side="kv")

    for rank, (full, grad, whole_ids) in enumerate(run_ranks(num_ranks, on_rank)):
        assert torch.equal(full, x) and torch.equal(whole_ids, ids)
        torch.testing.assert_close(grad, plan.shard(sum(cotangents), rank, dim, side="kv"))


ROLLED = [(kind, num_ranks, "q") for kind in KINDS for num_ranks in (2, 4)] + [(name, n, "kv") for n, name in CROSS]


@pytest.mark.parametrize(("kind", "num_ranks", "side"), ROLLED)
@pytest.mark.parametrize("shifts", [-1, -2, 3, 0, -100])
def test_roll_and_its_gradient(kind: str, num_ranks: int, side: Any, shifts: int) -> None:
    """What padding holds, in the input and in the gradient of the result's padding, goes nowhere."""
    plan = plan_of(num_ranks, kind) if side == "q" else cross_plan(num_ranks, kind)
    packing = plan.packing
    valid = torch.from_numpy(packing.sequence_ids(side) >= 0)[:, None]
    x, weights = (torch.randn(len(valid), 3, dtype=torch.float64) for _ in range(2))
    reference = x.clone().requires_grad_()
    expected = rolled(reference, packing, shifts, 7, side)
    (expected * weights).sum().backward()
    poisoned, poisoned_weights = (torch.where(valid, t, torch.nan) for t in (x, weights))

    def on_rank(rank: int, mesh: object) -> tuple[torch.Tensor, torch.Tensor]:
        local = spanwise.shard(plan, mesh, poisoned, 0, side=side).requires_grad_()
        out = spanwise.roll(local, shifts, plan, mesh, dim=0, fill_value=7, side=side)
        out.backward(spanwise.shard(plan, mesh, poisoned_weights, 0, side=side))
        return out.detach(), local.grad

    for rank, (out, grad) in enumerate(run_ranks(num_ranks, on_rank)):
        assert torch.equal(out, plan.shard(expected.detach(), rank, 0, side=side))
        assert torch.equal(grad, plan.shard(reference.grad, rank, 0, side=side))


def test_keys_whose_documents_only_their_offsets_tell() -> None:
    """Cross attention without a packing: the mask does not say where documents of keys are."""
    plan = spanwise.make_plan(SpanMask.full(9, 14), 2)
    x, cu = torch.arange(14), [0, 5, 14]
    expected = rolled(x, Packing(cu), -1, -1)

    def on_rank(rank: int, mesh: object) -> list[torch.Tensor]:
        mine = spanwise.shard(plan, mesh, x, 0, side="kv")
        for side, length in (("q", 9), ("kv", 14)):
            with pytest.raises(
                ValueError, match=rf"cross attention does not tell .* pass cu_seqlens \(\[0, {length}\]"
            ):
                spanwise.roll(mine, -1, plan, mesh, dim=0, side=side)
        with pytest.raises(ValueError, match="a RankPlan does not know where other ranks' keys lie; pass the Plan"):
            spanwise.roll(mine, -1, plan.local(mesh), mesh, cu, dim=0, side="kv")
        with pytest.raises(ValueError, match="must end with seq_len 14, got 9"):
            spanwise.roll(mine, -1, plan, mesh, [0, 9], dim=0, side="kv")
        return spanwise.roll(mine, -1, plan, mesh, cu, dim=0, fill_value=-1, side="kv")

    for rank, got in enumerate(run_ranks(2, on_rank)):
        assert torch.equal(got, plan.shard(expected, rank, 0, side="kv"))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_batch_with_tensors_of_the_keys(dim: int) -> None:
    plan = cross_plan(4, "contiguous")
    packing = plan.packing
    tokens = torch.randint(0, 50, (2, packing.q_len) if dim else (packing.q_len,))
    states = torch.randn((2, packing.kv_len, 3) if dim else (packing.kv_len, 3))
    batch = {"states": states, "labels": tokens}

    def on_rank(rank: int, mesh: object) -> list[dict[str, torch.Tensor]]:
        with_keys = spanwise.shard_batch(batch, plan, mesh, dim=dim, kv=["states"])
        return [with_keys, spanwise.shard_batch({"labels": tokens}, plan, mesh, dim=dim)]

    for rank, (got, without) in enumerate(run_ranks(4, on_rank)):
        assert torch.equal(got.pop("states"), plan.shard(states, rank, dim, side="kv"))
        assert got.keys() == without.keys() and all(torch.equal(got[name], without[name]) for name in got)
    cases = [
        ({}, r"batch\['states'\] must have size 24 in dim .*; if it belongs to the keys, give kv=\['states'\]"),
        ({"kv": ["states", "labels"]}, r"kv must name tensors .* got \['states', 'labels'\]"),
        ({"kv": ["more"]}, r"kv must name tensors .* got \['more'\]"),
        ({"kv": "states"}, "kv must name tensors .* got 'states'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            spanwise.shard_batch(batch, plan, None, dim=dim, **options)
    with pytest.raises(ValueError, match=r"batch\['states'\] must have size 37 in dim .*\)$"):
        spanwise.shard_batch({**batch, "states": tokens}, plan, None, dim=dim, kv=["states"])
    with pytest.raises(ValueError, match='no tensor of queries, .* shard.…, side="kv".'):
        spanwise.shard_batch({"states": states}, plan, None, dim=dim, kv=["states"])


def test_unshard_of_the_wrong_side() -> None:
    plan = cross_plan(3, "contiguous")

    def on_rank(rank: int, mesh: object) -> None:
        q, k = (torch.zeros(len(layout.indices(rank)), 2) for layout in (plan.layout, plan.kv_layout))
        with pytest.raises(ValueError, match=f"dim 0 must have rank {rank}'s {len(k)} keys, got a tensor of shape"):
            spanwise.unshard(plan, mesh, q, 0, side="kv")
        with pytest.raises(ValueError, match=f"dim 0 must have rank {rank}'s {len(q)} tokens, got a tensor of shape"):
            spanwise.unshard(plan, mesh, k, 0)
        with pytest.raises(ValueError, match="a RankPlan does not know where other ranks' keys lie; pass the Plan"):
            spanwise.unshard(plan.local(mesh), mesh, k, 0, side="kv")
        with pytest.raises(ValueError, match='side must be "q" or "kv", got \'k\''):
            spanwise.unshard(plan, mesh, q, 0, side="k")
        with pytest.raises(ValueError, match='side must be "q" or "kv", got \'k\''):
            spanwise.roll(q, 1, plan, mesh, dim=0, side="k")

    run_ranks(3, on_rank)


def test_self_attention_has_one_layout() -> None:
    plan = padded_plan(2, "dual_chunk")
    x = torch.randn(plan.seq_len, 2)

    def on_rank(rank: int, mesh: object) -> bool:
        mine = plan.shard(x, rank, 0)
        for p, side in itertools.product((plan, plan.local(mesh)), ("q", "kv")):
            assert torch.equal(spanwise.shard(p, mesh, x, 0, side=side), mine)
            assert torch.equal(spanwise.unshard(p, mesh, mine, 0, side=side), x)
        return True

    assert all(run_ranks(2, on_rank))


def test_documents_have_one_source() -> None:
    plan = padded_plan(1, "dual_chunk")
    tokens = torch.zeros(plan.seq_len, dtype=torch.int64)
    with pytest.raises(ValueError, match="the plan's packing already gives .* leave cu_seqlens out"):
        spanwise.shard_batch({"labels": tokens}, plan, None, cu_seqlens=[0, plan.seq_len], dim=0)
    with pytest.raises(ValueError, match="the plan's packing already gives .* leave cu_seqlens out"):
        spanwise.roll(tokens, -1, plan, None, [0, plan.seq_len], dim=0)
    for cu_seqlens in (None, [0, plan.seq_len]):
        with pytest.raises(ValueError, match="a RankPlan does not know where its packed sequences .* pass the Plan"):
            spanwise.roll(tokens, -1, plan.local(None), None, cu_seqlens, dim=0)


def test_batches_of_cross_attention_that_bring_all_they_need() -> None:
    """Nobody asks where documents start if there are no labels to shift and no positions to count."""
    plan = spanwise.make_plan(SpanMask.full(8, 12), 1, balancer="contiguous")
    batch = {"input_ids": torch.arange(8), "position_ids": torch.arange(8), "states": torch.randn(12, 3)}
    local = spanwise.shard_batch(batch, plan, None, dim=0, kv=["states"])
    assert all(torch.equal(local[name], batch[name]) for name in batch)
    with pytest.raises(ValueError, match="does not tell where documents start"):
        spanwise.shard_batch({**batch, "labels": torch.arange(8)}, plan, None, dim=0, kv=["states"])
