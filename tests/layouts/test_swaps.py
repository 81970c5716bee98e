"""Swaps of units: priced exactly, and layouts of masks that are no packed documents get better."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask
from spanwise.layouts import swaps
from spanwise.layouts.filling import tries

MASKS = {
    "tree": SpanMask.tree([-1, 0, 0, 1, 1], [50, 40, 60, 30, 76]),
    "block diffusion": SpanMask.block_diffusion([0, 40, 128], 8),
    "global": SpanMask.block_causal(256, 16, num_previous=1, global_tokens=8),
    "documents": SpanMask.documents([0, 30, 90, 256]),
}


def received(owner: np.ndarray, reads: np.ndarray, sizes: np.ndarray, rank: int) -> float:
    return float(sizes[reads[owner == rank].any(axis=0) & (owner != rank)].sum())


@pytest.mark.parametrize("name", MASKS)
def test_reads_of_units(name: str) -> None:
    mask, edges = MASKS[name], np.array([0, 7, 64, 65, 200, 256])
    dense = mask.dense()[0]
    expected = [[dense[a:b, c:d].any() for c, d in itertools.pairwise(edges)]
                for a, b in itertools.pairwise(edges)]  # fmt: skip
    assert np.array_equal(swaps.unit_reads(mask, edges) > 0, expected)


@pytest.mark.parametrize("name", MASKS)
def test_prices_of_swaps(name: str) -> None:
    """Tokens of every possible swap against those counted anew; also after swaps were made."""
    edges = np.arange(33) * 8
    sizes, reads = np.diff(edges), swaps.unit_reads(MASKS[name], np.arange(33) * 8)
    owner = np.arange(32) % 4
    search = swaps._Search(owner, [reads], [1.0], sizes, np.ones(32), 1e9)
    for unit in (0, 13, 5, 31):
        found = search._received(unit, reads, search._counts[0], search._own_reads[0], search._alone[0])
        for other in np.flatnonzero(owner != owner[unit]):
            changed = owner.copy()
            changed[[unit, other]] = owner[[other, unit]]
            ranks = owner[[unit, other]]
            more = [received(changed, reads > 0, sizes, r) - received(owner, reads > 0, sizes, r) for r in ranks]
            assert found[other] == sum(more)
        search.swap(unit, 1.0, 100.0)


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_start_holds_as_many_units_of_each_size(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([9] * 10 + [8] * (num_ranks * 4 - 10))
    owner = swaps.start_from(rng.integers(0, 9, (num_ranks, len(sizes))), sizes)
    held = np.bincount(owner, sizes, num_ranks)
    assert np.bincount(owner).tolist() == [4] * num_ranks
    assert held.tolist() == [sizes.sum() // num_ranks + (r < sizes.sum() % num_ranks) for r in range(num_ranks)]


@pytest.mark.parametrize("name", MASKS)
def test_layouts_are_balanced_and_receive_less(name: str) -> None:
    """Than those by documents alone."""
    mask = MASKS[name]
    plan = spanwise.make_plan(mask, 4, balancer="local", exchange="needed", block_size=4)
    problem = spanwise.LayoutProblem({"default": mask}, block_size=4)
    pieces = tries(problem.documents[0], problem.work_before[0], 4, 1, 1.02)[0]
    layout = spanwise.Layout([pieces], 4, mask.q_len)
    other = plan.replace(layout=layout, kv_layout=layout)
    assert plan.imbalance() <= max(1.025, other.imbalance())
    assert plan.recv_tokens().sum() <= other.recv_tokens().sum() * (0.95 if name == "block diffusion" else 1)


def test_shards_of_batch_rows_stay_equal() -> None:
    mask = SpanMask.stack([SpanMask.documents([0, 100, 517]), SpanMask.tree([-1, 0, 0], [117, 200, 200])])
    plan = spanwise.make_plan(mask, 3, balancer="local", block_size=8)
    assert plan.layout.tokens_per_rank.tolist() == [173, 172, 172]
