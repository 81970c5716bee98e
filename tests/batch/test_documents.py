"""Documents token by token: shifts and cuts, against their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spanwise.batch import documents
from spanwise.masks.span_mask import SpanMask


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


@given(st.integers(1, 30), st.integers(0, 10**6))
def test_cuts_are_the_positions_that_no_span_crosses(length: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = np.maximum(np.arange(length) - rng.integers(0, 3, length), 0)
    end = np.minimum(start + rng.integers(0, 4, length), length)
    mask = SpanMask(start[None], np.maximum(start, end)[None], length)
    dense = mask.dense()[0]
    expected = [t for t in range(1, length) if not dense[t:, :t].any() and not dense[:t, t:].any()]
    assert documents.cuts([mask], length).tolist() == expected
