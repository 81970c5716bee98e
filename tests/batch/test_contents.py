"""shard_batch takes what collators and tokenizers make, and refuses what contradicts the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import Packing, SpanMask
from tests.ranks.harness import run_ranks

CU = [0, 5, 12]
IDS = torch.arange(12)[None]
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def test_what_is_not_cut_passes_through() -> None:
    count = torch.tensor(7)
    batch = {"input_ids": IDS, "max_length_q": 7, "scale": 0.5, "name": "a", "image": None, "flag": True, "n": count}
    plan = spanwise.make_plan(SpanMask.documents(CU), 2, balancer="contiguous")

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        cut = spanwise.shard_batch(batch, plan, mesh)
        assert list(cut) == [*batch, "position_ids"]
        assert all(cut[name] is batch[name] for name in batch if name != "input_ids")
        assert torch.equal(cut["input_ids"], plan.shard(IDS, rank))
        local = plan.local(mesh)
        assert torch.equal(spanwise.shard_batch({"input_ids": IDS}, local)["position_ids"], cut["position_ids"])

    run_ranks(2, on_rank)


@pytest.mark.parametrize("balancer", ["contiguous", "lpt"])
def test_several_positions_of_a_token(balancer: str) -> None:
    """Qwen-VL's: cut along the last dim, also where batch rows have layouts of their own."""
    rows = [[0, 5, 12], [0, 9, 12]]
    mask = SpanMask.stack([SpanMask.documents(row) for row in rows])
    plan = spanwise.make_plan(mask, 2, balancer=balancer, block_size=2)
    assert plan.layout.batch_size == (2 if balancer == "lpt" else 1)
    positions = torch.arange(3 * 2 * 12).view(3, 2, 12)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        cut = spanwise.shard_batch({"input_ids": IDS.expand(2, -1), "position_ids": positions}, plan, mesh)
        wanted = torch.stack([plan.shard(x, rank) for x in positions])
        assert torch.equal(cut["position_ids"], wanted)
        if balancer == "contiguous":
            packed = spanwise.shard_batch({"position_ids": positions[:, 0], "input_ids": IDS[0]}, plan, mesh, dim=0)
            assert torch.equal(packed["position_ids"], wanted[:, 0])

    run_ranks(2, on_rank)


@pytest.mark.parametrize("balancer", ["contiguous", "ptrr"])
def test_one_row_of_positions_serves_all_rows(balancer: str) -> None:
    """Also where each row has a layout of its own."""
    masks = [SpanMask.documents(offsets) for offsets in ([0, 5, 12], [0, 9, 12])]
    plan = spanwise.make_plan(SpanMask.stack(masks), 2, balancer=balancer, block_size=2)
    ids, positions = torch.arange(24).view(2, 12), torch.arange(12)[None]

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        for given, want in ((positions, positions), (positions.expand(3, 1, 12), positions.expand(3, 2, 12))):
            got = spanwise.shard_batch({"input_ids": ids, "position_ids": given}, plan, mesh)
            whole = want if want.dim() == 3 else want.expand(2, 12)
            cut = spanwise.shard(plan, mesh, whole, whole.dim() - 1, batch_dim=whole.dim() - 2)
            assert torch.equal(got["position_ids"], cut) and got["input_ids"].shape == got["position_ids"].shape[-2:]

    run_ranks(2, on_rank)


def test_attention_masks_that_agree_are_cut() -> None:
    ids = torch.arange(12).view(2, 6)
    padded = spanwise.make_plan(SpanMask.from_attention_mask(PADDED), 1)
    plain = spanwise.make_plan(SpanMask.causal(6), 1)
    for plan, mask in (
        (padded, PADDED),
        (padded, PADDED.bool()),
        (padded, torch.ones_like(PADDED)),
        (plain, PADDED | 1),
    ):
        cut = spanwise.shard_batch({"input_ids": ids, "attention_mask": mask}, plan)
        assert torch.equal(cut["attention_mask"], mask)
    packing = Packing.from_attention_mask(PADDED)
    flat = spanwise.make_plan(packing.mask(), 1, packing=packing)
    batch = {"input_ids": ids.flatten(), "attention_mask": PADDED.flatten()}
    assert torch.equal(spanwise.shard_batch(batch, flat, dim=0)["attention_mask"], PADDED.flatten())


PLAIN, MASKED = (spanwise.make_plan(mask, 1) for mask in (SpanMask.causal(6), SpanMask.from_attention_mask(PADDED)))
FLAT = Packing.from_attention_mask(PADDED)
PACKED = spanwise.make_plan(FLAT.mask(), 1, packing=FLAT)
ROWS = torch.zeros(2, 6)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: batch_of(PLAIN, attention_mask=PADDED), "is False at row 0, token 0, .* make"),
    (lambda: batch_of(MASKED, attention_mask=PADDED.flip(0)), "is False at row 0, token 3"),
    (lambda: batch_of(PLAIN, attention_mask=torch.ones(2, 1, 6, 6)), "is a mask of queries and keys"),
    (lambda: batch_of(MASKED, attention_mask=PADDED[:1]), "has 1 rows, the plan .* for 2"),
    (lambda: batch_of(PLAIN, lengths=[1, 2]), r"batch\['lengths'\] is a list: make it a tensor"),
    (lambda: batch_of(PLAIN, position_ids=torch.zeros(3, 2, 5)), r"must have size 6 in dim 2, got \(3, 2, 5\)"),
    (lambda: spanwise.shard_batch({"a": 1, "b": None}, PLAIN), "got no tensor of queries, only"),
    (lambda: batch_of(PLAIN.local(None), attention_mask=PADDED | 1), "a RankPlan does not know the batch"),
    (
        lambda: spanwise.shard_batch({"attention_mask": torch.ones(12)}, PACKED, dim=0),
        "is True at row 0, token 0",
    ),
    (lambda: spanwise.shard(IDS, PLAIN), "needs a Plan or RankPlan, got"),
    (lambda: spanwise.unshard(IDS, PLAIN), "needs a Plan or RankPlan, got"),
    (lambda: spanwise.roll(IDS, 1, None), "needs a Plan or RankPlan, got"),
    (lambda: spanwise.shard_batch(PLAIN, {"input_ids": IDS}), "needs a Plan or RankPlan, got"),
]


def batch_of(plan: Any, **batch: Any) -> dict[str, Any]:
    return spanwise.shard_batch({"input_ids": ROWS, **batch}, plan)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
