"""shard, unshard, roll and shard_batch on threaded ranks, against the whole sequence on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import Packing, SpanMask
from spanwise.attention.rank_plan import build
from tests.pairs import covering
from tests.ranks.harness import run_ranks

LENGTH = 45
CU = [0, 1, 20, 20, 31, 45]
ROWS = [CU, [0, 7, 45]]
PACKED = Packing(np.cumsum([0, 0, 5, 0, 1, 8, 6]))
# Sequences without a row, with padding, without a token, of one token, that fill their slot; rows before and after.
PADDED = Packing(np.cumsum([0, 0, 5, 0, 1, 8, 6]), cu_seqlens_q_padded=np.cumsum([8, 0, 8, 8, 8, 8, 8]), q_len=64)
# More keys than queries, fewer, and none.
CROSS = Packing([0, 3, 9, 9, 15], q_len=24, cu_seqlens_kv=[0, 13, 15, 15, 30], kv_len=37)
CROSS_IN_SLOTS = Packing(
    [0, 3, 9, 9, 15], cu_seqlens_q_padded=[0, 8, 16, 16, 24], q_len=24,
    cu_seqlens_kv=[0, 13, 15, 15, 30], cu_seqlens_kv_padded=[0, 16, 24, 24, 40],
)  # fmt: skip
PACKINGS = {
    "unpadded": (PACKED, "lpt"), "padded": (PADDED, "ptrr"), "padded chunks": (PADDED, "dual_chunk"),
    "cross": (CROSS, "contiguous"), "cross chunks": (CROSS_IN_SLOTS, "dual_chunk"),
}  # fmt: skip
KINDS = ["documents", "rows", *PACKINGS]


def plan_of(kind: str, num_ranks: int) -> spanwise.Plan:
    if kind in PACKINGS:
        packing, balancer = PACKINGS[kind]
        mask = packing.mask(align="bottom_right" if "cross" in kind else "top_left")
        return spanwise.make_plan(mask, num_ranks, packing=packing, balancer=balancer, block_size=4)
    documents = SpanMask.documents(CU)
    mask = SpanMask.stack([documents, SpanMask.causal(LENGTH)]) if kind == "rows" else documents
    return spanwise.make_plan(mask, num_ranks, balancer="ptrr", block_size=4)


def offsets_of(kind: str) -> Any:
    """The argument cu_seqlens of a call: a packing knows its sequences."""
    return None if kind in PACKINGS else ROWS if kind == "rows" else CU


def sequences(kind: str, side: str = "q") -> list[list[tuple[int, int]]]:
    """First token and number of tokens of each sequence, for two batch rows."""
    if kind in PACKINGS:
        packing = PACKINGS[kind][0]
        starts, lens = getattr(packing, f"{side}_offsets")[:-1].tolist(), getattr(packing, f"{side}_lens").tolist()
        return [list(zip(starts, lens, strict=True))] * 2
    return [[(a, b - a) for a, b in itertools.pairwise(cu)] for cu in (ROWS if kind == "rows" else [CU, CU])]


def rolled(x: torch.Tensor, found: list[list[tuple[int, int]]], shifts: int, fill: float) -> torch.Tensor:
    """What `spanwise.roll` promises, sequence by sequence; x is ``[2, tokens, …]``."""
    rows = []
    for row, of_row in zip(x, found, strict=True):
        out = torch.where(torch.tensor(False), row, fill)  # a function of x even where nothing of x is left
        for start, count in of_row:
            moved = count - abs(shifts)
            if moved > 0:
                into, out_of = start + max(shifts, 0), start + max(-shifts, 0)
                out = torch.cat([out[:into], row[out_of : out_of + moved], out[into + moved :]])
        rows.append(out)
    return torch.stack(rows)


def fits(kind: str, ranks: int, side: str, dim: int, *_: Any) -> bool:
    """Keys of their own are for cross attention, two dual chunks a rank for 1, 2 or 4, and dim 0 for one layout."""
    return (side == "q" or "cross" in kind) and (ranks != 3 or "chunks" not in kind) and (dim == 1 or kind != "rows")


AXES = (KINDS, [1, 2, 3, 4], ["q", "kv"], [0, 1])


@pytest.mark.parametrize(
    ("kind", "ranks", "side", "dim", "rest", "shifts"),
    covering(*AXES, [(), (3,), (5, 3)], [-1, -3, 2, 0, -100], possible=fits), ids=str,
)  # fmt: skip
def test_shard_unshard_and_roll_with_their_exact_adjoints(
    kind: str, ranks: int, side: Any, dim: int, rest: Any, shifts: int
) -> None:
    """What padding holds, in what is rolled and in the gradient of the result's padding, goes nowhere."""
    plan, found = plan_of(kind, ranks), sequences(kind, side)
    length = plan.seq_len if side == "q" else plan.kv_len
    shape, tail = (2, length, *rest), (1,) * len(rest)
    x, weights = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    cotangents = torch.randn(ranks, *shape, dtype=torch.float64)
    ids, valid = torch.arange(length).view(-1, *tail).expand(shape), torch.zeros(2, length, *tail, dtype=torch.bool)
    for row, of_row in enumerate(found):
        for start, count in of_row:
            valid[row, start : start + count] = True
    whole = x.clone().requires_grad_()
    moved = rolled(whole, found, shifts, 7)
    (moved * weights).sum().backward()
    poisoned, poisoned_weights = (torch.where(valid, t, torch.nan) for t in (x, weights))

    def cut(given: Any, mesh: Any, tensor: torch.Tensor) -> torch.Tensor:
        return spanwise.shard(given, mesh, tensor, dim, side=side)

    def on_rank(rank: int, mesh: DeviceMesh) -> list[tuple[torch.Tensor, ...]]:
        results, given = [], plan.local(mesh) if side == "q" else plan
        for row in (slice(None),) if dim else (0, 1):
            leaf = x[row].clone().requires_grad_()
            local, mine = cut(plan, mesh, leaf), cut(given, mesh, ids[row])
            full, whole_ids = (spanwise.unshard(p, mesh, t, dim, side=side) for p, t in ((plan, local), (given, mine)))
            grads = torch.autograd.grad(full, (local, leaf), cotangents[rank][row])
            out, grad = (cut(plan, mesh, t[row]) for t in (moved.detach(), whole.grad))
            if side == "q":  # keys are not rolled
                dirty = cut(plan, mesh, poisoned[row]).requires_grad_()
                out = spanwise.roll(dirty, shifts, plan, mesh, offsets_of(kind), dim=dim, fill_value=7)
                (grad,) = torch.autograd.grad(out, dirty, cut(plan, mesh, poisoned_weights[row]))
            results.append((full.detach(), *grads, mine, whole_ids, out.detach(), grad))
        return results

    for rank, results in enumerate(run_ranks(ranks, on_rank)):
        for i, (full, grad, of_whole, mine, whole_ids, out, rolled_grad) in enumerate(results):
            row = slice(None) if dim else i
            wanted = (ids, moved.detach(), whole.grad, cotangents.sum(0))
            of_rank = [plan.shard(t[row], rank, dim, side=side) for t in wanted]
            assert torch.equal(full, x[row]) and torch.equal(whole_ids, ids[row])
            assert all(map(torch.equal, (mine, out, rolled_grad), of_rank))
            torch.testing.assert_close(grad, of_rank[3])
            assert torch.equal(plan.shard(of_whole, rank, dim, side=side), grad)
            assert of_whole.count_nonzero() == grad.numel()  # zero elsewhere


def test_shard_of_pytrees_integers_and_buffers_without_batch() -> None:
    plan = plan_of("rows", 4)
    tokens, table = torch.arange(LENGTH).expand(2, -1), torch.randn(LENGTH, 3)
    for rank in range(4):
        got = plan.shard({"a": tokens, "b": [tokens + 1]}, rank)
        expected = torch.from_numpy(np.stack([plan.layout.indices(rank, row) for row in range(2)]))
        assert torch.equal(got["a"], expected) and torch.equal(got["b"][0], expected + 1)
        assert torch.equal(plan.shard(table, rank, dim=0, batch_dim=None), table[expected])


@pytest.mark.parametrize(("kind", "ranks", "side", "dim"), covering(*AXES[:2], ["q"], [0, 1], possible=fits), ids=str)
def test_labels_and_positions(kind: str, ranks: int, side: str, dim: int) -> None:
    """Labels are shifted before the cut; what is no tensor passes through."""
    plan, found = plan_of(kind, ranks), sequences(kind)
    rows = slice(None) if dim else 0
    tokens = torch.randint(0, 50, (2, plan.seq_len))
    positions = torch.zeros_like(tokens)
    for row, of_row in zip(positions, found, strict=True):
        for start, count in of_row:
            row[start : start + count] = torch.arange(count)
    shifted, kept = (rolled(tokens, found, shifts, -100)[rows] for shifts in (-1, 0))  # padding alone is ignored
    others: dict[str, Any] = {"scale": 0.5, "name": "a", "image": None, "n": torch.tensor(7)}
    batch = {"input_ids": tokens[rows], "labels": tokens[rows]} | others
    options: dict[str, Any] = {"cu_seqlens": offsets_of(kind), "dim": dim}

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[dict[str, Any], dict[str, Any]]:
        ready = batch | {"labels": kept}
        return spanwise.shard_batch(batch, plan, mesh, **options), spanwise.shard_batch(
            ready, plan, mesh, shift_labels=False, **options
        )

    for rank, (got, ready) in enumerate(run_ranks(ranks, on_rank)):
        wanted = {"input_ids": tokens[rows], "labels": shifted, "position_ids": positions[rows]}
        assert list(got) == list(ready) == [*batch, "position_ids"]
        assert all(got[name] is value for name, value in others.items())
        for name, want in wanted.items():
            assert torch.equal(got[name], plan.shard(want, rank, dim)), name
        assert torch.equal(ready["labels"], plan.shard(kept, rank, dim))


@pytest.mark.parametrize("balancer", ["contiguous", "lpt"])
def test_positions_of_several_kinds_or_of_one_row(balancer: str) -> None:
    """Qwen-VL gives three for each token; one row serves all, also where batch rows have layouts of their own."""
    mask = SpanMask.stack([SpanMask.documents(row) for row in ([0, 5, 12], [0, 9, 12])])
    plan = spanwise.make_plan(mask, 2, balancer=balancer, block_size=2)
    assert plan.layout.batch_size == (2 if balancer == "lpt" else 1)
    ids, several, one = torch.arange(24).view(2, 12), torch.arange(3 * 2 * 12).view(3, 2, 12), torch.arange(12)[None]

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        for given, whole in (
            (several, several),
            (one, one.expand(2, 12)),
            (one.expand(3, 1, 12), one.expand(3, 2, 12)),
        ):
            got = spanwise.shard_batch({"input_ids": ids, "position_ids": given}, plan, mesh)["position_ids"]
            want = [plan.shard(x, rank) for x in (whole if whole.dim() == 3 else [whole])]
            assert torch.equal(got.view(-1, *got.shape[-2:]), torch.stack(want)) and got.dim() == whole.dim()
        if balancer == "contiguous":
            packed = spanwise.shard_batch({"position_ids": several[:, 0], "input_ids": ids[0]}, plan, mesh, dim=0)
            assert torch.equal(packed["position_ids"], torch.stack([plan.shard(x, rank) for x in several])[:, 0])

    run_ranks(2, on_rank)


TOKENS = {"labels": torch.zeros(1, LENGTH, dtype=torch.int64)}
SIX = spanwise.make_plan(SpanMask.causal(6), 1)
ZEROS_AND_ONES = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
FROM_MASK = spanwise.make_plan(SpanMask.from_attention_mask(ZEROS_AND_ONES), 1)


def test_attention_masks_that_agree_are_cut() -> None:
    ids, ones = torch.arange(12).view(2, 6), torch.ones_like(ZEROS_AND_ONES)
    for plan, mask in ((FROM_MASK, ZEROS_AND_ONES), (FROM_MASK, ZEROS_AND_ONES.bool()), (FROM_MASK, ones), (SIX, ones)):
        cut = spanwise.shard_batch({"labels": ids, "attention_mask": mask}, plan, shift_labels=False)
        assert torch.equal(cut["attention_mask"], mask)
        assert torch.equal(cut["labels"], ids.masked_fill(mask == 0, -100))
    cut = spanwise.shard_batch({"attention_mask": torch.from_numpy(PADDING.packing.valid_q)}, PADDING, dim=0)
    assert torch.equal(cut["attention_mask"], torch.from_numpy(PADDING.packing.valid_q))


def test_positions_of_masks_without_a_cut() -> None:
    for mask in (SpanMask.causal(LENGTH), SpanMask.sliding_window(LENGTH, 2), SpanMask.full(LENGTH)):
        got = spanwise.shard_batch(TOKENS, spanwise.make_plan(mask, 1), None)
        assert torch.equal(got["position_ids"][0], torch.arange(LENGTH))


# ---------------------------------------------------------------- wrong calls: what the error names

ONE, BATCHED, CROSSED = plan_of("documents", 1), plan_of("rows", 1), plan_of("cross", 1)
PADDING = plan_of("padded chunks", 1)
CUT = spanwise.make_plan(SpanMask.documents(CU) & SpanMask.causal(LENGTH), 1)
PLAIN_CROSS = spanwise.make_plan(SpanMask.full(9, 14), 1)
FLAT, SQUARE = torch.zeros(LENGTH), torch.zeros(LENGTH, LENGTH)
STATES = {"states": torch.zeros(37, 3), "labels": torch.zeros(24, dtype=torch.int64)}
IDS = torch.zeros(64, dtype=torch.int64)
shard_batch, roll = spanwise.shard_batch, spanwise.roll


def of_six(plan: Any, **batch: Any) -> dict[str, Any]:
    return shard_batch({"input_ids": torch.zeros(2, 6), **batch}, plan)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: ONE.shard(torch.zeros(2, 44), 0), "45 tokens"),
    (lambda: BATCHED.shard(torch.zeros(LENGTH, 3), 0, dim=0), "batch_dim=None"),
    (lambda: roll(torch.zeros(LENGTH, 2), 1, ONE, None, ROWS, dim=0), "2 rows"),
    (lambda: shard_batch({"x": SQUARE}, BATCHED, None, cu_seqlens=CU, dim=0), "2 batch rows"),
    *((lambda cu=cu: shard_batch(TOKENS, ONE, None, cu_seqlens=cu), text) for cu, text in (
        ([0, 5, 3, LENGTH], "decrease"), ([1, LENGTH], "begin with 0"), ([0, 9], "got 9"), ([0.0, 45.0], "integer"))),
    # Spans do not tell where documents start; where the mask has a cut, the offsets have to be given.
    (lambda: shard_batch(TOKENS, CUT, None), "token 1, .*cu_seqlens"),
    (lambda: roll(FLAT[None], -1, ONE.local(None), None), "own tokens' positions only: pass the Plan, .*cu_seqlens"),
    # A packing knows its sequences.
    (lambda: shard_batch({"labels": IDS}, PADDING, None, cu_seqlens=[0, 64], dim=0), "cu_seqlens"),
    # Tensors of the keys.
    (lambda: spanwise.unshard(CROSSED, None, IDS[:24], 0, side="kv"), "37 keys"),
    (lambda: shard_batch(STATES, CROSSED, None, dim=0), "'states'.*kv"),
    (lambda: of_six(SIX, attention_mask=ZEROS_AND_ONES), "row 0, token 0"),
    (lambda: of_six(FROM_MASK, attention_mask=ZEROS_AND_ONES.flip(0)), "row 0, token 3"),
    (lambda: of_six(SIX, attention_mask=torch.ones(2, 6, 6)), "queries and keys"),
    (lambda: of_six(SIX.local(None), attention_mask=ZEROS_AND_ONES | 1), "RankPlan"),
    (lambda: shard_batch({"attention_mask": torch.ones(len(IDS))}, PADDING, dim=0), "row 0, token"),
    (lambda: of_six(SIX, lengths=[1, 2]), "'lengths'.* list"),
    (lambda: of_six(SIX, position_ids=torch.zeros(3, 2, 5)), r"\(3, 2, 5\)"),
    (lambda: shard_batch(None, SIX), "NoneType"),
    (lambda: spanwise.shard(ONE.local(None), FLAT, 0), "mesh must be"),
    (lambda: shard_batch(SIX, {"input_ids": IDS}), "Plan or RankPlan"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "names"), WRONG)
def test_wrong_calls(call: Callable[[], Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        call()


def test_rank_plans_that_do_not_do() -> None:
    """Another rank's; and for keys, whose places on other ranks a rank plan does not know, any."""
    plan, cross = plan_of("documents", 2), plan_of("cross", 2)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        other, keys = build(plan, 1 - rank), torch.zeros(len(cross.kv_layout.indices(rank)))
        x = torch.zeros(1, 2, plan.layout.num_tokens(1 - rank), 8)
        with pytest.raises(ValueError, match=f"rank {rank}, and the rank plan is rank {1 - rank}'s"):
            spanwise.unshard(other, mesh, x[0, :, :, 0])
        with pytest.raises(ValueError, match=f"rank {rank}, and the rank plan is rank {1 - rank}'s"):
            spanwise.context_parallel_attention(x, x, x, other, mesh)
        with pytest.raises(ValueError, match="RankPlan .*Plan"):
            spanwise.unshard(cross.local(mesh), mesh, keys, 0, side="kv")

    run_ranks(2, on_rank)
