"""Shard, unshard, roll, labels and the loss on threaded ranks, against the whole sequence on one device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import spanwise
from spanwise import SpanMask
from spanwise.attention.rank_plan import build
from tests.ranks.harness import run_ranks

LENGTH = 45
CU = [0, 1, 20, 20, 31, 45]


def plan_for(num_ranks: int, *, batched: bool = False) -> spanwise.Plan:
    packed = SpanMask.documents(CU)
    mask = SpanMask.stack([packed, SpanMask.causal(LENGTH)]) if batched else packed
    return spanwise.make_plan(mask, num_ranks, balancer="ptrr", block_size=4)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((2, LENGTH), 1), ((2, LENGTH, 3), 1), ((2, 5, LENGTH, 3), 2)])
def test_unshard_undoes_shard_and_has_the_exact_adjoint(num_ranks: int, batched: bool, shape: tuple, dim: int) -> None:
    plan = plan_for(num_ranks, batched=batched)
    assert plan.layout.batch_size == (2 if batched else 1)
    x = torch.randn(shape, dtype=torch.float64)
    cotangents = [torch.randn(shape, dtype=torch.float64) for _ in range(num_ranks)]

    def on_rank(rank: int, mesh: object) -> tuple[torch.Tensor, torch.Tensor]:
        local = spanwise.shard(plan, mesh, x, dim).requires_grad_()
        full = spanwise.unshard(plan, mesh, local, dim)
        full.backward(cotangents[rank])
        return full.detach(), local.grad

    for rank, (full, grad) in enumerate(run_ranks(num_ranks, on_rank)):
        assert torch.equal(full, x)
        torch.testing.assert_close(grad, plan.shard(sum(cotangents), rank, dim))


def test_shard_gradient_is_zero_elsewhere() -> None:
    plan = plan_for(4)
    x = torch.randn(2, LENGTH, requires_grad=True)
    plan.shard(x, 1).sum().backward()
    expected = torch.zeros(2, LENGTH)
    expected[:, plan.layout.indices(1)] = 1
    assert torch.equal(x.grad, expected)


def test_shard_of_pytrees_integers_and_buffers_without_batch() -> None:
    plan = plan_for(4, batched=True)
    tokens = torch.arange(LENGTH).expand(2, -1)
    table = torch.randn(LENGTH, 3)
    for rank in range(4):
        got = plan.shard({"a": tokens, "b": [tokens + 1]}, rank)
        expected = torch.from_numpy(np.stack([plan.layout.indices(rank, row) for row in range(2)]))
        assert torch.equal(got["a"], expected) and torch.equal(got["b"][0], expected + 1)
        assert torch.equal(plan.shard(table, rank, dim=0, batch_dim=None), table[expected])
    with pytest.raises(ValueError, match="batch_dim=None"):
        plan.shard(table, 0, dim=0)
    with pytest.raises(ValueError, match="must have 45 tokens"):
        plan.shard(torch.zeros(2, 44), 0)


@pytest.mark.parametrize("shifts", [-1, -3, 2, 0])
@pytest.mark.parametrize("batched", [False, True])
def test_roll_stays_inside_documents(shifts: int, batched: bool) -> None:
    plan = plan_for(4, batched=batched)
    cu = [CU, [0, 7, 45]] if batched else CU
    x = torch.randint(0, 100, (2, LENGTH))
    expected = torch.full_like(x, -100)
    for row in range(2):
        offsets = cu[row] if batched else CU
        for first, last in itertools.pairwise(offsets):
            for i in range(first, last):
                if first <= i - shifts < last:
                    expected[row, i] = x[row, i - shifts]

    def on_rank(rank: int, mesh: object) -> torch.Tensor:
        return spanwise.roll(spanwise.shard(plan, mesh, x), shifts, plan, mesh, cu, fill_value=-100)

    for rank, got in enumerate(run_ranks(4, on_rank)):
        assert torch.equal(got, plan.shard(expected, rank))


def test_labels_are_shifted_before_the_cut() -> None:
    plan = plan_for(4)
    tokens = torch.randint(0, 9, (2, LENGTH))
    shifted = torch.full_like(tokens, -100)
    positions = torch.zeros_like(tokens)
    for first, last in itertools.pairwise(CU):
        shifted[:, first : last - 1] = tokens[:, first + 1 : last] if last > first else tokens[:, 0:0]
        positions[:, first:last] = torch.arange(last - first)

    def on_rank(rank: int, mesh: object) -> dict[str, torch.Tensor]:
        return spanwise.shard_batch({"input_ids": tokens, "labels": tokens}, plan, mesh, cu_seqlens=CU)

    for rank, got in enumerate(run_ranks(4, on_rank)):
        assert torch.equal(got["input_ids"], plan.shard(tokens, rank))
        assert torch.equal(got["labels"], plan.shard(shifted, rank))
        assert torch.equal(got["position_ids"], plan.shard(positions, rank))
    kept = run_ranks(
        4, lambda rank, mesh: spanwise.shard_batch({"labels": shifted}, plan, mesh, cu_seqlens=CU, shift_labels=False)
    )
    assert all(torch.equal(got["labels"], plan.shard(shifted, rank)) for rank, got in enumerate(kept))


def test_batches_without_a_batch_dim_are_rows_of_one_with() -> None:
    plan = plan_for(3)
    tokens, features = torch.randint(0, 9, (LENGTH,)), torch.randn(LENGTH, 2, 3)
    batch = {"labels": tokens, "features": features}

    def on_rank(rank: int, mesh: object) -> tuple[dict, dict]:
        flat = spanwise.shard_batch(batch, plan, mesh, cu_seqlens=CU, dim=0)
        row = spanwise.shard_batch({k: x[None] for k, x in batch.items()}, plan, mesh, cu_seqlens=CU)
        flat["rolled"] = spanwise.roll(flat["features"], 3, plan, mesh, CU, dim=0, fill_value=7)
        row["rolled"] = spanwise.roll(row["features"], 3, plan, mesh, CU, fill_value=7)
        return flat, row

    for flat, row in run_ranks(3, on_rank):
        assert flat.keys() == row.keys() == {"labels", "features", "position_ids", "rolled"}
        for name in flat:
            assert torch.equal(flat[name], row[name][0])


def test_dims_that_do_not_fit_are_refused() -> None:
    plan, batched = plan_for(1), plan_for(1, batched=True)
    rows = [CU, [0, LENGTH]]
    flat, square = torch.zeros(LENGTH), torch.zeros(LENGTH, LENGTH)
    with pytest.raises(ValueError, match=r"dim must be 1 .* or 0 .* got 2"):
        spanwise.shard_batch({"x": square}, plan, None, cu_seqlens=CU, dim=2)
    with pytest.raises(ValueError, match=r"batch\['x'\] must have size 45 in dim 1, got \(45,\)"):
        spanwise.shard_batch({"x": flat}, plan, None, cu_seqlens=CU)
    with pytest.raises(ValueError, match=r"batch\['x'\] must have size 45 in dim 0, got \(2, 45\)"):
        spanwise.shard_batch({"x": torch.zeros(2, LENGTH)}, plan, None, cu_seqlens=CU, dim=0)
    with pytest.raises(ValueError, match="cu_seqlens has 2 rows, the batch has no batch dim"):
        spanwise.shard_batch({"x": flat}, plan, None, cu_seqlens=rows, dim=0)
    with pytest.raises(ValueError, match="lays out 2 batch rows differently"):
        spanwise.shard_batch({"x": square}, batched, None, cu_seqlens=CU, dim=0)
    with pytest.raises(ValueError, match="cu_seqlens has 2 rows, so batch_dim must be a dim of that size"):
        spanwise.roll(torch.zeros(LENGTH, 2), 1, plan, None, rows, dim=0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_loss_is_the_mean_over_all_valid_tokens(num_ranks: int, micro_batches: int) -> None:
    """Averaging parameter gradients over ranks, as FSDP2 does, gives one device's gradient."""
    plan = plan_for(num_ranks)
    hidden = torch.randn(micro_batches, 2, LENGTH, 6, dtype=torch.float64)
    labels = torch.randint(0, 11, (micro_batches, 2, LENGTH))
    labels[torch.rand(labels.shape) < 0.4] = -100
    labels[:, :, plan.layout.indices(0)] = -100  # a rank without a valid token
    if num_ranks == 1:
        labels[:, 0, 5] = 3
    weight = torch.randn(11, 6, dtype=torch.float64)

    reference = weight.clone().requires_grad_()
    expected = F.cross_entropy((hidden @ reference.T).flatten(0, -2), labels.flatten())
    expected.backward()
    num_valid = int((labels != -100).sum())

    def on_rank(rank: int, mesh: object) -> tuple[float, torch.Tensor]:
        local = weight.clone().requires_grad_()
        total = 0.0
        for micro in range(micro_batches):
            logits = spanwise.shard(plan, mesh, hidden[micro]) @ local.T
            loss = spanwise.cross_entropy(
                logits,
                spanwise.shard(plan, mesh, labels[micro]),
                mesh,
                num_valid=num_valid if micro_batches > 1 else None,
            )
            loss.backward()
            total += loss.item()
        return total, local.grad

    results = run_ranks(num_ranks, on_rank)
    for total, _ in results:
        assert total == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(sum(grad for _, grad in results) / num_ranks, reference.grad, rtol=1e-12, atol=1e-12)


def test_loss_without_any_valid_token_is_zero() -> None:
    def on_rank(rank: int, mesh: object) -> tuple[float, float]:
        logits = torch.ones(1, 3, 5, requires_grad=True)
        loss = spanwise.cross_entropy(logits, torch.full((1, 3), -100), mesh)
        loss.backward()
        return loss.item(), float(logits.grad.abs().sum())

    assert run_ranks(2, on_rank) == [(0.0, 0.0)] * 2


def test_the_loss_of_bfloat16_logits_is_computed_in_float32() -> None:
    logits = torch.randn(500, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(500) % 7
    loss = spanwise.cross_entropy(logits, labels, None)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels))


def test_documents_are_not_guessed() -> None:
    """Spans do not tell where documents start; where the mask has a cut, the offsets have to be given."""
    tokens = {"labels": torch.zeros(1, LENGTH, dtype=torch.int64)}
    packed = spanwise.make_plan(SpanMask.documents(CU) & SpanMask.causal(LENGTH), 1)
    with pytest.raises(ValueError, match="no span of the mask crosses token 1, .* pass cu_seqlens"):
        spanwise.shard_batch(tokens, packed, None)
    with pytest.raises(ValueError, match="a RankPlan does not know its documents"):
        spanwise.roll(tokens["labels"], -1, packed.local(None), None)
    whole = spanwise.shard_batch(tokens, packed, None, cu_seqlens=[0, LENGTH])
    assert torch.equal(whole["position_ids"][0], torch.arange(LENGTH))
    known = spanwise.make_plan(SpanMask.documents(CU), 1, cu_seqlens=CU)
    assert spanwise.shard_batch(tokens, known, None)["position_ids"].max() == 18
    local = spanwise.shard_batch(tokens, known.local(None), None, cu_seqlens=CU)
    assert torch.equal(local["position_ids"], spanwise.shard_batch(tokens, known, None)["position_ids"])
    for mask in (SpanMask.causal(LENGTH), SpanMask.sliding_window(LENGTH, 2), SpanMask.full(LENGTH)):
        got = spanwise.shard_batch(tokens, spanwise.make_plan(mask, 1), None)
        assert torch.equal(got["position_ids"][0], torch.arange(LENGTH))


def test_what_cannot_be_sharded_is_refused() -> None:
    plan = plan_for(2)
    with pytest.raises(ValueError, match="only tensors can be sharded, got a NoneType"):
        plan.shard({"a": None}, 0)
    with pytest.raises(ValueError, match="shifts must be an integer"):
        spanwise.roll(torch.zeros(1, LENGTH), 0.5, plan_for(1), None, CU)

    def other_ranks_plan(rank: int, mesh: object) -> None:
        x = torch.zeros(1, plan.layout.num_tokens(1 - rank))
        with pytest.raises(ValueError, match=f"this is rank {rank}, and the rank plan is rank {1 - rank}'s"):
            spanwise.unshard(build(plan, 1 - rank), mesh, x)
        with pytest.raises(ValueError, match=f"this is rank {rank}, and the rank plan is rank {1 - rank}'s"):
            q = torch.zeros(1, 2, x.shape[1], 8)
            spanwise.context_parallel_attention(q, q, q, build(plan, 1 - rank), mesh)

    run_ranks(2, other_ranks_plan)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 5, 3, LENGTH], "must not decrease"),
        ([1, LENGTH], "begin with 0"),
        ([0, 9], "end with seq_len 45, got 9"),
        ([0.0, 45.0], "integer"),
    ],
)
def test_bad_offsets(cu: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spanwise.shard_batch({"labels": torch.zeros(1, LENGTH, dtype=torch.int64)}, plan_for(1), None, cu_seqlens=cu)
