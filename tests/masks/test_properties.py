"""SpanMask: every operation agrees with the dense mask, for random masks that have no structure to lean on."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
from hypothesis import given, strategies as st

from spanwise.masks import even_runs
from spanwise.masks.blocks import block_table
from spanwise.masks.span_mask import SpanMask

BLOCK_SIZES = st.integers(1, 20)


@st.composite
def lengths(draw):
    return draw(st.integers(0, 40)), draw(st.integers(0, 45))


@st.composite
def masks(draw, shape=None, batch=None):
    """Rough masks (any cells at all) and smooth ones (slowly moving spans, as in practice), with empty rows."""
    q_len, kv_len = draw(lengths()) if shape is None else shape
    size = draw(st.integers(1, 3)) if batch is None else batch
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_spans = draw(st.integers(0, 4))
    if draw(st.booleans()):
        edges = rng.integers(0, kv_len + 1, (size, 2 * num_spans, q_len))
    else:
        first = rng.integers(0, kv_len + 1, (size, 2 * num_spans, 1))
        edges = np.clip(first + np.cumsum(rng.integers(0, 3, (size, 2 * num_spans, q_len)), axis=2), 0, kv_len)
    edges = np.sort(edges, axis=1)
    start, end = edges[:, 0::2], edges[:, 1::2]
    empty = rng.random((size, 1, q_len)) < draw(st.sampled_from([0, 0.3]))
    return SpanMask(start, np.where(empty, start, end), kv_len)


@st.composite
def runs(draw, length):
    """Ascending, disjoint runs; some touch, some are empty."""
    edges = sorted(draw(st.lists(st.integers(0, length), max_size=24)))
    return np.array(edges[: len(edges) // 2 * 2], np.int64).reshape(-1, 2)


def positions(token_runs):
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(start, stop) for start, stop in token_runs)])


def as_runs(tokens):
    """Sorted positions as maximal runs, the slow way."""
    found = []
    for t in tokens.tolist():
        if found and found[-1][1] == t:
            found[-1][1] = t + 1
        else:
            found.append([t, t + 1])
    return found


def blocks(dense, size):
    """The block table by its definition."""
    batch, q_len, kv_len = dense.shape
    table = np.zeros((batch, -(-q_len // size), -(-kv_len // size)), np.int8)
    for b, i, j in np.ndindex(*table.shape):
        cells = dense[b, i * size : (i + 1) * size, j * size : (j + 1) * size]
        table[b, i, j] = 2 if cells.all() else int(cells.any())
    return table


def check_canonical(mask):
    """The form that makes equality of masks equality of arrays, checked row by row."""
    assert mask.start.dtype == mask.end.dtype == np.int32
    assert mask.start.flags.c_contiguous and mask.end.flags.c_contiguous
    used = 1
    for b in range(mask.batch_size):
        for i in range(mask.q_len):
            spans = list(zip(mask.start[b, :, i].tolist(), mask.end[b, :, i].tolist(), strict=True))
            filled = [s for s in spans if s[0] < s[1]]
            used = max(used, len(filled))
            assert spans == filled + [(0, 0)] * (len(spans) - len(filled))
            assert all(low[1] < high[0] for low, high in itertools.pairwise(filled))
            assert all(low >= 0 and high <= mask.kv_len for low, high in filled)
    assert mask.num_spans == used


@given(masks())
def test_area_and_canonical_form(mask):
    check_canonical(mask)
    np.testing.assert_array_equal(mask.area(), mask.dense().sum(2))
    assert mask.area().dtype == np.int64
    assert mask.is_causal == (mask == SpanMask.causal(mask.q_len))
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and not again.start.flags.writeable


@given(st.data())
def test_the_constructor_keeps_every_cell(data):
    q_len, kv_len = data.draw(lengths())
    num_spans = data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    edges = np.sort(rng.integers(0, kv_len + 1, (2 * num_spans, q_len)), axis=0)
    start, end = edges[0::2], edges[1::2]
    mask = SpanMask(start, end, kv_len)
    expected = np.zeros((1, q_len, kv_len), bool)
    for j, i in np.ndindex(num_spans, q_len):
        expected[0, i, start[j, i] : end[j, i]] = True
    np.testing.assert_array_equal(mask.dense(), expected)
    check_canonical(mask)


@given(st.data())
def test_and_or(data):
    shape = data.draw(lengths())
    batch = data.draw(st.integers(1, 3))
    a = data.draw(masks(shape, batch))
    b = data.draw(masks(shape, data.draw(st.sampled_from([1, batch]))))
    for got, expected in ((a & b, a.dense() & b.dense()), (a | b, a.dense() | b.dense())):
        np.testing.assert_array_equal(got.dense(), expected)
        check_canonical(got)
    assert (a & b) == (b & a) and (a | b) == (b | a)
    assert (a & (a | b)) == (a | (a & b)) == (a | a)


@given(st.data())
def test_select(data):
    mask = data.draw(masks())
    rows, keys = data.draw(runs(mask.q_len)), data.draw(runs(mask.kv_len))
    local = mask.select(rows, keys)
    np.testing.assert_array_equal(local.dense(), mask.dense()[:, positions(rows)][:, :, positions(keys)])
    check_canonical(local)


@given(st.data())
def test_keys_read(data):
    mask = data.draw(masks(batch=1))
    rows = data.draw(runs(mask.q_len))
    keys = even_runs.keys_read(mask.even_runs(), rows, np.zeros(len(rows), np.int64), mask.kv_len + 1)
    assert keys.tolist() == as_runs(np.flatnonzero(mask.dense()[0, positions(rows)].any(0)))
    assert keys.dtype == np.int64


@given(masks(), BLOCK_SIZES)
def test_blocks(mask, size):
    expected = blocks(mask.dense(), size)
    np.testing.assert_array_equal(block_table(mask, size), expected)
    np.testing.assert_array_equal(mask.block_counts(size), (expected > 0).sum(2))
    assert mask.block_counts(size).dtype == np.int64


@given(masks())
def test_rows_stack_back(mask):
    rows = [mask.row(b) for b in range(mask.batch_size)]
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(row.dense()[0], mask.dense()[b])
        check_canonical(row)
    assert SpanMask.stack(rows) == mask


@given(masks(), masks())
def test_masks_are_equal_exactly_when_their_cells_are(a, b):
    same = a.dense().shape == b.dense().shape and bool((a.dense() == b.dense()).all())
    assert (a == b) == same
    assert (a.digest() == b.digest()) == same
