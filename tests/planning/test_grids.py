"""Grids and one plan, against sums over dense masks and formulas written out."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spanwise import H100, Link, SpanMask, make_plan
from spanwise.planning.grids import compare_grids, in_order, longest_first

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
OPTIONS = {"exchange": "needed", "stages": 1, "block_size": 4, **SHAPE}
#: One kernel FLOP a second and nothing else that takes time, but for the link.
PLAIN = dataclasses.replace(
    H100, attention_flops=1.0, attention_backward_flops=1.0, matmul_flops=10.0, memory_bandwidth=1e30,
    links=(Link(1e30, 0.0, ranks=2), Link(1e29, 0.0)), kernel_seconds=0.0, edge_pairs=0.0,
)  # fmt: skip


def windows(cu_seqlens: np.ndarray) -> dict[str, SpanMask]:
    whole = SpanMask.documents(cu_seqlens)
    return {"near": SpanMask.documents(cu_seqlens, window=(3, 0)), "whole": whole}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any), st.sampled_from([1, 2, 3, 4, 6]))
def test_every_grid_is_what_dense_masks_say(lengths: list[int], ranks: int) -> None:
    weights, given = {"near": 3.0, "whole": 2.0}, [n for n in lengths if n]
    grids = compare_grids(lengths, ranks, linear_flops=1000.0, mask=windows, weights=weights, hardware=PLAIN, **OPTIONS)
    degrees = [cp for cp in range(ranks, 0, -1) if ranks % cp == 0]
    assert [grid.cp for grid in grids] == [ranks, *(cp for cp in degrees[1:] for _ in range(2))]
    for grid in grids:
        assert grid.dp * grid.cp == ranks == len(grid.work)
        assert grid.tokens.sum() == sum(lengths)
        if grid.cp == ranks:
            assert grid.assignment == "one plan"
            owner = np.zeros(len(given), dtype=int)
        else:
            area = np.array([sum(3 * min(i + 1, 4) + 2 * (i + 1) for i in range(n)) for n in given], float)
            owner = (
                in_order(np.array(given), grid.dp) if grid.assignment == "in order" else longest_first(area, grid.dp)
            )
        for replica in range(grid.dp):
            _check_replica(grid, replica, [n for n, at in zip(given, owner, strict=True) if at == replica], weights)
        assert grid.seconds == pytest.approx((grid.attention + grid.linear + grid.exposed).max())
        assert grid.work_imbalance == pytest.approx(grid.work.max() / grid.work.mean())
        assert grid.token_imbalance == pytest.approx(grid.tokens.max() / grid.tokens.mean())


def _check_replica(grid, replica: int, documents: list[int], weights: dict[str, float]) -> None:
    ranks = np.arange(replica * grid.cp, (replica + 1) * grid.cp)
    if not documents:
        for values in (grid.tokens, grid.work, grid.attention, grid.linear, grid.recv_bytes):
            assert not values[ranks].any()
        return
    cu = np.cumsum([0, *documents])
    masks = windows(cu)
    options = OPTIONS | {"weights": weights}
    plan = make_plan(masks, grid.cp, cu_seqlens=cu, hardware=PLAIN, **options)
    owner = np.empty(plan.seq_len, dtype=int)
    for rank in range(grid.cp):
        for start, stop in plan.runs(rank):
            owner[start:stop] = rank
    for place, rank in enumerate(ranks):
        mine = owner == place
        dense = {name: mask.dense()[0] for name, mask in masks.items()}
        pairs = sum(weights[name] * rows[mine].sum() for name, rows in dense.items())
        assert grid.tokens[rank] == mine.sum() and grid.work[rank] == pairs
        # Two products forward, five backward, a multiply and an add each; nothing else takes time.
        assert grid.attention[rank] == pytest.approx(pairs * 7 * 2 * 4 * 16, rel=1e-9)
        assert grid.linear[rank] == pytest.approx(mine.sum() * 1000.0 / 10.0)
        read = {name: rows[mine].any(axis=0) & ~mine for name, rows in dense.items()}
        token = 2 * 2 * 16 * 4  # K and V, 2 heads of 16, 4 bytes
        assert grid.recv_bytes[rank] == sum(weights[n] * keys.sum() for n, keys in read.items()) * token


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 3))
def test_longest_first_is_within_grahams_bound_of_the_best(work: list[int], dp: int) -> None:
    owner = longest_first(np.array(work, float), dp)
    busiest = np.bincount(owner, work, minlength=dp).max()
    best = min(
        np.bincount(np.array(each), work, minlength=dp).max() for each in itertools.product(range(dp), repeat=len(work))
    )
    assert best <= busiest <= (4 / 3 - 1 / (3 * dp)) * best + 1e-9


def test_one_long_document_stalls_a_grid_and_not_one_plan() -> None:
    lengths = [60_000, *[2_000] * 34]
    one, *grids = compare_grids(
        lengths, 8, linear_flops=1e9, hardware=H100, num_q_heads=32, num_kv_heads=8, head_dim=128
    )
    assert one.work_imbalance < 1.03 and one.token_imbalance < 1.01
    assert all(grid.work_imbalance > 1.5 for grid in grids)
    assert min(grid.seconds for grid in grids) > 1.3 * one.seconds
    with pytest.raises(ValueError, match="needs a document with a token"):
        compare_grids([0], 2, linear_flops=1.0, **SHAPE)
