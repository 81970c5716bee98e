"""Document offsets that a mask keeps; masks of chunks, of position ids and of padded batches."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

import spanwise
from spanwise import Packing, SpanMask

CU = [0, 5, 5, 12]


def offsets(mask: SpanMask) -> list[list[int]] | None:
    return None if mask.cu_seqlens is None else [cu.tolist() for cu in mask.cu_seqlens]


@st.composite
def documents(draw: st.DrawFn) -> list[int]:
    return np.cumsum([0, *draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))]).tolist()


def test_which_masks_know_their_documents() -> None:
    mask, other = SpanMask.documents(CU), SpanMask.documents([0, 6, 12])
    assert offsets(mask) == offsets(SpanMask.documents(CU, causal=False, window=(2, 2))) == [CU]
    assert offsets(SpanMask.prefix_lm([0, 5, 12], [1, 2])) == [[0, 5, 12]]
    assert not mask.cu_seqlens[0].flags.writeable
    for unknown in (SpanMask.causal(12), SpanMask.full(12), mask & SpanMask.causal(12), mask & other, mask | other):
        assert unknown.cu_seqlens is None
    assert mask.select([[0, 12]], [[0, 12]]).cu_seqlens is None
    near = SpanMask.documents(CU, window=(1, 0))
    assert offsets(mask & near) == offsets(mask | near) == [CU]
    assert offsets(pickle.loads(pickle.dumps(mask))) == [CU]
    batch = SpanMask.stack([mask, other])
    assert offsets(batch) == [CU, [0, 6, 12]] and offsets(batch.row(1)) == [[0, 6, 12]]
    assert offsets(batch & SpanMask.stack([mask, other])) == offsets(batch)
    assert offsets(SpanMask.stack([batch, other])) == [CU, [0, 6, 12], [0, 6, 12]]
    assert (batch & mask).cu_seqlens is None and SpanMask.stack([mask, SpanMask.causal(12)]).cu_seqlens is None


def test_a_plan_takes_the_offsets_of_its_masks() -> None:
    told = spanwise.make_plan(SpanMask.documents(CU), 2, cu_seqlens=CU)
    plan = spanwise.make_plan(SpanMask.documents(CU), 2)
    assert plan.fingerprint == told.fingerprint and plan == told
    assert plan.fingerprint != spanwise.make_plan(SpanMask.documents(CU), 2, cu_seqlens=[0, 12]).fingerprint
    named = {"near": SpanMask.documents(CU, window=(1, 0)), "far": SpanMask.documents(CU)}
    assert [cu.tolist() for cu in spanwise.make_plan(named, 2).cu_seqlens] == [CU]


@given(documents(), st.integers(1, 12), st.booleans(), st.sampled_from([None, (2, 0), (1, 3)]))
def test_chunks_count_from_the_start_of_each_document(cu: list[int], chunk: int, causal: bool, window) -> None:
    mask = SpanMask.documents(cu, chunk=chunk, causal=causal, window=window)
    plain = SpanMask.documents(cu, causal=causal, window=window).dense()[0]
    position = Packing(cu).positions() // chunk
    assert np.array_equal(mask.dense()[0], plain & (position[:, None] == position[None]))
    assert offsets(mask) == [cu]


@given(documents(), st.integers(1, 5), st.sampled_from([None, 3]))
@example([0, 3, 4], 1, 3)
def test_position_ids(cu: list[int], start: int, chunk: int | None) -> None:
    cu = np.unique(cu).tolist()
    if cu[-1] == 0:
        return
    positions = Packing(cu).positions()
    mask = SpanMask.documents(cu, chunk=chunk)
    for given_ids in (positions, positions[None], torch.from_numpy(positions)[None], positions.tolist()):
        made = SpanMask.from_position_ids(given_ids, chunk=chunk)
        assert made == mask and offsets(made) == [cu]
    two = np.stack([positions, np.arange(start, start + len(positions))])
    batch = SpanMask.from_position_ids(two, chunk=chunk)
    rows = [mask, SpanMask.documents([0, len(positions)], chunk=chunk)]
    # Rows of different documents stay apart, also where their chunks are the same.
    assert batch == (mask if cu == [0, len(positions)] else SpanMask.stack(rows))
    assert offsets(batch) == ([cu] if cu == [0, len(positions)] else [cu, [0, len(positions)]])
    skipped = positions + start * np.repeat(np.arange(len(cu) - 1), np.diff(cu)) * 2 * len(positions)  # not from 0
    assert offsets(SpanMask.from_position_ids(skipped[None])) == [cu]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4), st.booleans())
def test_padded_batches(rows: list[tuple[int, int]], causal: bool) -> None:
    length = max(a + b for a, b in rows) or 1
    valid = np.zeros((len(rows), length), bool)
    for row, (first, count) in enumerate(rows):
        valid[row, first : first + count] = True
    expected = valid[:, :, None] & valid[:, None]
    expected &= np.tri(length, dtype=bool) if causal else True
    mask = SpanMask.from_attention_mask(torch.from_numpy(valid).long(), causal=causal)
    assert np.array_equal(np.broadcast_to(mask.dense(), expected.shape), expected)
    assert np.array_equal(mask.dense(), SpanMask.from_attention_mask(valid, causal=causal).dense())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SpanMask.from_position_ids(np.zeros((3, 1, 4), int)), r"\[3, 1, 4\]"),
        (lambda: SpanMask.from_position_ids([0.0, 1.0]), "integer"),
        (lambda: SpanMask.from_position_ids([]), "not empty"),
        (lambda: SpanMask.from_attention_mask(np.ones((1, 1, 4, 4), int)), r"\[1, 1, 4, 4\]"),
        (lambda: SpanMask.from_attention_mask([[1, 1, 2, 2]]), "row 0 has .* 2; for documents give"),
        (lambda: SpanMask.from_attention_mask([[1, 0, 1]]), "row 0 has padding between tokens"),
    ],
)
def test_batches_that_say_nothing_clear_are_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
