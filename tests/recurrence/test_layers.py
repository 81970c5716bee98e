"""Layers with a state on 1 to 4 ranks: outputs, states and gradients are those of one device for each document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spanwise
from spanwise import recurrence
from spanwise.recurrence import segments
from tests.ranks.harness import run_ranks
from tests.recurrence import problem as problems
from tests.recurrence.problem import KINDS, Problem


class Owners:
    """A balancer that gives each block the owner that it is told; ranks may get nothing."""

    def __init__(self, owners: list[int], block_size: int) -> None:
        self.owners, self.block_size = owners, block_size

    def assign(self, problem: Any, num_ranks: int) -> spanwise.Layout:
        return spanwise.Layout.from_owners(self.owners, num_ranks, problem.seq_len, self.block_size)


def _documents(cuts: list[int]) -> list[tuple[int, int]]:
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def _plan(cuts: list[int], ranks: int, balancer: Any, block_size: int = 4) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents(cuts)
    return spanwise.make_plan(mask, ranks, balancer=balancer, exchange="needed", block_size=block_size)


def _compare(plan: spanwise.Plan, problem: Problem, tolerance: float = 1e-10) -> None:
    problems.check(plan, problem, run_ranks(plan.num_ranks, problems.on_rank, plan, problem), tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "local", "lpt"])
def test_layouts(kind: str, balancer: str) -> None:
    cuts = [0, 1, 2, 30, 31, 90]
    _compare(_plan(cuts, 3, balancer), problems.make(kind, 90, _documents(cuts)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_float32(kind: str, ranks: int) -> None:
    cuts = [0, 5, 70, 71, 200]
    _compare(_plan(cuts, ranks, "head_tail"), problems.make(kind, 200, _documents(cuts)).to(torch.float32), 2e-5)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_any_owners_and_documents(data: st.DataObject, kind: str, ranks: int, seed: int) -> None:
    length = data.draw(st.integers(1, 48))
    block_size = data.draw(st.sampled_from([1, 1, 2, 5, 20]))
    owners = data.draw(
        st.lists(st.integers(0, ranks - 1), min_size=-(-length // block_size), max_size=-(-length // block_size))
    )
    inner = data.draw(st.lists(st.integers(0, length), max_size=6))
    cuts = sorted([0, length, *inner]) if data.draw(st.booleans()) else sorted({0, length, *inner})
    plan = _plan(cuts, ranks, Owners(owners, block_size))
    _compare(plan, problems.make(kind, length, _documents(cuts), seed, data.draw(st.sampled_from([0.1, 2.0, 300.0]))))
