"""Span arrays in pickles: exact for any array, and small for those of documents."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise import SpanMask
from spanwise.masks.steps import Steps, packed, unpacked


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 9)), max_size=8), st.booleans())
def test_any_array_comes_back(stretches: list[tuple[int, int]], flat: bool) -> None:
    steps = np.repeat(*np.array(stretches, np.int64).reshape(-1, 2).T)
    array = np.append(2**30, steps).cumsum().astype(np.int32)
    array = array if flat else array.reshape(1, 1, -1)
    again = unpacked(packed(array))
    assert again.dtype == np.int32 and again.flags.c_contiguous
    np.testing.assert_array_equal(again, array)


@pytest.mark.parametrize("shape", [(0,), (1, 1, 0), (1,), (2, 3, 1)])
def test_short_arrays_stay(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.int32)
    assert packed(array) is array or isinstance(packed(array), Steps)
    np.testing.assert_array_equal(unpacked(packed(array)), array)


def test_documents_and_windows_take_few_bytes() -> None:
    offsets = np.arange(0, 2**16 + 1, 2**8)
    for mask in (SpanMask.documents(offsets), SpanMask.documents(offsets, window=(9, 0)), SpanMask.causal(2**16)):
        data = pickle.dumps(mask)
        assert len(data) < 20_000 < mask.start.nbytes
        again = pickle.loads(data)
        assert again == mask and not again.start.flags.writeable and again.start.shape == mask.start.shape
    every = SpanMask.causal(2**8) & SpanMask.sliding_window(2**8, 3)
    assert pickle.loads(pickle.dumps(SpanMask.stack([every, SpanMask.full(2**8)]))) == SpanMask.stack(
        [every, SpanMask.full(2**8)]
    )
