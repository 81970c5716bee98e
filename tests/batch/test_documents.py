"""Documents token by token: shifts, against their definition."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, strategies as st

from spanwise.batch import sharding


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
    source, inside = sharding.shifted(torch.from_numpy(ids), shifts)
    for b, row in enumerate(ids):
        for i, document in enumerate(row):
            there = 0 <= i - shifts < len(row) and document >= 0 and row[i - shifts] == document
            assert inside[b, i] == there
            assert 0 <= source[i] < len(row)
            if there:
                assert source[i] == i - shifts
