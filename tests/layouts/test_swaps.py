"""Swaps of units: priced exactly, and layouts of masks that are no packed documents get better."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import spanwise
from spanwise import LayoutProblem, SpanMask
from spanwise.layouts import swaps
from spanwise.layouts.local import tries

MASKS = {
    "tree": SpanMask.tree([-1, 0, 0, 1, 1], [50, 40, 60, 30, 76]),
    "block diffusion": SpanMask.block_diffusion([0, 40, 128], 8),
    "global": SpanMask.block_causal(256, 16, num_previous=1, global_tokens=8),
    "documents": SpanMask.documents([0, 30, 90, 256]),
}


@pytest.mark.parametrize("name", MASKS)
def test_reads_of_units(name: str) -> None:
    mask, edges = MASKS[name], np.array([0, 7, 64, 65, 200, 256])
    dense = mask.dense()[0]
    expected = [[dense[a:b, c:d].any() for c, d in itertools.pairwise(edges)]
                for a, b in itertools.pairwise(edges)]  # fmt: skip
    assert np.array_equal(swaps.unit_reads(mask.even_runs(), edges) > 0, expected)


@pytest.mark.parametrize("name", MASKS)
def test_each_swap_is_the_best_of_its_unit(name: str) -> None:
    """Tokens received after every possible swap, counted anew; also after swaps were made."""
    edges = np.arange(33) * 8
    problem = LayoutProblem({"default": MASKS[name]}, block_size=8)
    search = swaps._Search(problem, 0, edges, np.arange(32) % 4, 1e9)
    reads = swaps.unit_reads(MASKS[name].even_runs(), edges) > 0

    def received(owner: np.ndarray) -> int:
        return sum(8 * int((reads[owner == rank].any(axis=0) & (owner != rank)).sum()) for rank in range(4))

    for unit in (0, 13, 5, 31, 0):
        owner, found = search.owner.copy(), []
        for other in np.flatnonzero(owner != owner[unit]):
            changed = owner.copy()
            changed[[unit, other]] = owner[[other, unit]]
            found.append(received(changed))
        swapped = search.swap(unit, 1.0, 0.0)
        assert received(search.owner) == min([*found, received(owner)]) and swapped == (min(found) < received(owner))


@pytest.mark.parametrize("name", MASKS)
def test_layouts_are_balanced_and_receive_less(name: str) -> None:
    """Than those by documents alone."""
    mask = MASKS[name]
    plan = spanwise.make_plan(mask, 4, balancer="local", exchange="needed", block_size=4)
    problem = LayoutProblem({"default": mask}, block_size=4)
    pieces = tries(problem.documents[0], problem.work_before[0], 4, 1, 1.02)[0]
    layout = spanwise.Layout([pieces], 4, mask.q_len)
    other = plan.replace(layout=layout, kv_layout=layout)
    assert plan.imbalance() <= max(1.025, other.imbalance())
    assert plan.recv_tokens().sum() <= other.recv_tokens().sum() * (0.95 if name == "block diffusion" else 1)


def test_shards_of_batch_rows_stay_equal() -> None:
    mask = SpanMask.stack([SpanMask.documents([0, 100, 517]), SpanMask.tree([-1, 0, 0], [117, 200, 200])])
    for ranks in (3, 4):
        plan = spanwise.make_plan(mask, ranks, balancer="local", block_size=8)
        assert plan.layout.tokens_per_rank.tolist() == [517 // ranks + (rank < 517 % ranks) for rank in range(ranks)]
