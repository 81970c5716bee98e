"""Documents token by token: ids, positions, shifts and cuts, against their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spanwise import documents
from spanwise.mask import SpanMask


@st.composite
def token_ids(draw: st.DrawFn) -> np.ndarray:
    """int64 [rows, seq_len]: documents of any length with padding of any length before, between and after them."""
    seq_len, rows = draw(st.integers(0, 20)), []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        while len(row) < seq_len:
            padding, tokens = draw(st.integers(0, 3)), draw(st.integers(1, 6))
            row += [-1] * padding + [len(row)] * tokens  # ids ascend, with gaps
        rows.append(row[:seq_len])
    return np.array(rows, np.int64).reshape(len(rows), seq_len)


@given(token_ids())
def test_positions_count_from_the_start_of_each_document(ids: np.ndarray) -> None:
    expected = [[(row[:i] == row[i]).sum() if row[i] >= 0 else 0 for i in range(len(row))] for row in ids]
    np.testing.assert_array_equal(documents.positions(ids), np.array(expected, np.int64).reshape(ids.shape))


@given(token_ids(), st.integers(-25, 25))
def test_a_shift_stays_inside_documents(ids: np.ndarray, shifts: int) -> None:
    source, inside = documents.shift(ids, shifts)
    for b, row in enumerate(ids):
        for i, document in enumerate(row):
            there = 0 <= i - shifts < len(row) and document >= 0 and row[i - shifts] == document
            assert inside[b, i] == there
            assert 0 <= source[i] < len(row)
            if there:
                assert source[i] == i - shifts


@given(st.lists(st.integers(0, 4), max_size=8), st.lists(st.integers(0, 4), max_size=8))
def test_ids_follow_offsets(first: list[int], second: list[int]) -> None:
    second.append(max(sum(first) - sum(second), 0))
    first.append(sum(second) - sum(first))
    ids = documents.document_ids([np.cumsum([0, *first]), np.cumsum([0, *second])], sum(first))
    for row, lens in zip(ids, (first, second), strict=True):
        assert row.tolist() == [d for d, count in enumerate(lens) for _ in range(count)]


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_cuts_are_the_positions_that_no_span_crosses(length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = np.maximum(np.arange(length) - rng.integers(0, 3, length), 0)
    end = np.minimum(start + rng.integers(0, 4, length), length)
    mask = SpanMask(start[None], np.maximum(start, end)[None], length)
    dense = mask.dense()[0]
    expected = [t for t in range(1, length) if not dense[t:, :t].any() and not dense[:t, t:].any()]
    assert documents.cuts([mask], length).tolist() == expected
