"""EvenRuns say what the dense mask says: cells, pairs, keys read, positions crossed, tokens joined."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise import SpanMask
from spanwise.masks import even_runs
from tests.masks.test_properties import masks, runs


def cells(of, shape):
    """How often even runs hold each cell of a dense mask."""
    dense = np.zeros(shape, int)
    for first, stop, start, end, start_step, end_step in zip(*of, strict=True):
        for later, row in enumerate(range(first, stop)):
            dense[row, start + later * start_step : end + later * end_step] += 1
    return dense


@given(masks(), st.data())
def test_even_runs_hold_each_cell_once(mask, data):
    rows = data.draw(runs(mask.q_len))
    for row, dense in enumerate(mask.dense()):
        every = even_runs.cut(mask.even_runs(row), np.array([[0, mask.q_len]]))[1]
        np.testing.assert_array_equal(cells(every, dense.shape), dense)
        run, parts = even_runs.cut(mask.even_runs(row), rows)
        for k, (start, stop) in enumerate(rows.tolist()):
            mine = even_runs.EvenRuns(*(x[run == k] for x in parts))
            assert mine.pairs.sum() == dense[start:stop].sum()
            np.testing.assert_array_equal(cells(mine, dense.shape)[start:stop], dense[start:stop])


@given(st.integers(1, 30).flatmap(lambda n: masks(shape=(n, n))))
def test_crossed_and_joined(mask):
    length = mask.q_len
    for row, dense in enumerate(mask.dense()):
        crossed = [t for t in range(1, length) if dense[t:, :t].any() or dense[:t, t:].any()]
        joined = [t for t in range(1, length) if dense[t, t - 1] or dense[t - 1, t]]
        slots = mask.even_runs(row)
        for found, expected in (("crossed", crossed), ("joined", joined)):
            gaps = even_runs.outside((getattr(slot, found) for slot in slots), length)
            outside = [t for start, stop in gaps for t in range(start, stop)]
            assert outside == [t for t in range(1, length) if t not in expected]


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (SpanMask.causal(200_000), 1),
        (SpanMask.documents(np.arange(0, 200_001, 1000)), 200),
        (SpanMask.sliding_window(200_000, 77, 5), 3),
        (SpanMask.block_causal(200_000, 1536, 8), 131),
    ],
)
def test_regular_masks_have_few_even_runs_wherever_blocks_of_the_scan_end(mask, most):
    assert sum(len(slot.first) for slot in mask.even_runs()) <= most
    assert sum(int(slot.pairs.sum()) for slot in mask.even_runs()) == mask.area().sum()


def test_pickles_of_documents_and_windows_take_few_bytes():
    offsets = np.arange(0, 2**16 + 1, 2**8)
    for mask in (SpanMask.documents(offsets), SpanMask.documents(offsets, window=(9, 0)), SpanMask.causal(2**16)):
        data = pickle.dumps(mask)
        assert len(data) < 20_000 < mask.start.nbytes
        assert pickle.loads(data) == mask
