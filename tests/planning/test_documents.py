"""Documents of a plan: where they may begin, and the positions of each rank's tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import spanwise
from spanwise import Packing, SpanMask
from spanwise.planning import documents


def test_answers_that_share_a_prompt_are_not_one_document() -> None:
    plan = spanwise.make_plan(SpanMask.shared_prefix(4, [3, 5]), 2)
    assert documents.positions(plan, 0) is None
    with pytest.raises(ValueError, match=r"token 7 may follow another token than 6.*tree=.*\[0, 12\]"):
        documents.packings(plan)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3))), st.integers(0, 3), st.integers(0, 3))
def test_positions_of_packed_sequences(slots: list[tuple[int, int]], before: int, after: int) -> None:
    lens, padding = np.array(slots, int).reshape(-1, 2).T
    offsets = before + np.cumsum([0, *(lens + padding)])
    if offsets[-1] + after == 0:
        return
    packing = Packing(np.cumsum([0, *lens]), cu_seqlens_q_padded=offsets, q_len=offsets[-1] + after)
    plan = spanwise.make_plan(packing.mask(), 2, packing=packing, balancer="contiguous")
    for rank in range(2):
        wanted = packing.positions()[plan.layout.indices(rank)]
        assert documents.positions(plan, rank).tolist() == [wanted.tolist()]


def test_positions_are_none_where_spans_alone_do_not_tell() -> None:
    mask = SpanMask.block_causal(12, 4, num_previous=0)
    plan = spanwise.make_plan(mask, 2)
    assert documents.positions(plan, 0) is None
    with pytest.raises(ValueError, match="may start at token 4, which no span of the mask crosses"):
        documents.packings(plan)
    cross = spanwise.make_plan(SpanMask.full(8, 12), 2)
    assert documents.positions(cross, 1) is None
    with pytest.raises(ValueError, match=r"cross attention does not tell"):
        documents.packings(cross)
