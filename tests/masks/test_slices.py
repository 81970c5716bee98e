"""Slices: SpanMask.from_slices against cells drawn one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise import SpanMask
from tests.masks.test_properties import check_canonical


def cells(q_ranges, k_ranges, types, q_len, kv_len):
    """How many slices hold each cell, by their definition."""
    held = np.zeros((q_len, kv_len), int)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, types, strict=True):
        for i in range(q0, q1):
            for j in range(k0, k1):
                below = j - k1 <= i - q1  # at or below the diagonal that ends in the bottom right corner
                above = j - k0 >= i - q0  # at or above the one that begins in the top left corner
                held[i, j] += [True, below, above, below and above][kind]
    return held


def random_slices(rng, q_len, kv_len, count):
    q = np.sort(rng.integers(0, q_len + 1, (count, 2)), axis=1)
    k = np.sort(rng.integers(0, kv_len + 1, (count, 2)), axis=1)
    return q, k, rng.integers(0, 4, count)


def disjoint_slices(rng, q_len, kv_len, count):
    """Random slices without those that would overlap an earlier one; many of them touch."""
    held, kept = np.zeros((q_len, kv_len), int), []
    for q, k, kind in zip(*random_slices(rng, q_len, kv_len, count), strict=True):
        more = cells([q], [k], [kind], q_len, kv_len)
        if not (held & more).any():
            held += more
            kept.append((q.tolist(), k.tolist(), int(kind)))
    return [list(x) for x in zip(*kept, strict=True)] or [[], [], []], held > 0


# Matrices that MagiAttention's reference of flex_flash_attn_func shows for 5 queries x 2 keys and 2 x 5.
SHOWN = {
    (1, 5, 2): ["00", "00", "00", "10", "11"],
    (1, 2, 5): ["11110", "11111"],
    (2, 5, 2): ["11", "01", "00", "00", "00"],
    (2, 2, 5): ["11111", "01111"],
    (3, 5, 2): ["00", "00", "00", "00", "00"],
    (3, 2, 5): ["11110", "01111"],
    (3, 3, 3): ["100", "010", "001"],
    (0, 2, 2): ["11", "11"],
}


@pytest.mark.parametrize(("kind", "q", "k"), SHOWN)
def test_types(kind, q, k):
    dense = SpanMask.from_slices([[0, q]], [[0, k]], [kind], kv_len=k).dense()[0]
    assert ["".join(map(str, row)) for row in dense.astype(int)] == SHOWN[kind, q, k]


@given(st.integers(0, 2**32 - 1), st.integers(0, 14), st.integers(0, 14), st.integers(0, 12))
def test_disjoint_slices_hold_exactly_their_cells(seed, q_len, kv_len, count):
    given_slices, expected = disjoint_slices(np.random.default_rng(seed), q_len, kv_len, count)
    mask = SpanMask.from_slices(*given_slices, q_len=q_len, kv_len=kv_len)
    np.testing.assert_array_equal(mask.dense()[0], expected)
    check_canonical(mask)


@given(st.integers(0, 2**32 - 1), st.integers(1, 14), st.integers(1, 14), st.integers(2, 5))
def test_slices_that_overlap_are_refused_and_others_are_not(seed, q_len, kv_len, count):
    q, k, kind = random_slices(np.random.default_rng(seed), q_len, kv_len, count)
    held = cells(q, k, kind, q_len, kv_len)
    if held.max() < 2:
        assert SpanMask.from_slices(q, k, kind, q_len=q_len, kv_len=kv_len).area().sum() == held.sum()
        return
    with pytest.raises(ValueError, match=r"slices (\d+) .* and (\d+) .* both hold key (\d+) of row (\d+)") as error:
        SpanMask.from_slices(q, k, kind, q_len=q_len, kv_len=kv_len)
    words = str(error.value).replace(";", "").split()
    one, two = int(words[words.index("slices", 4) + 1]), int(words[words.index("and") + 1])
    key, row = int(words[words.index("key") + 1]), int(words[words.index("row") + 1])
    assert all(cells([q[s]], [k[s]], [kind[s]], q_len, kv_len)[row, key] for s in (one, two)) and one < two


def test_spans_are_limited_exactly():
    """Five keys apart in every row; and in a band of two rows, pairs that touch in one row each."""
    q, k = [[0, 3]] * 5, [[2 * j, 2 * j + 1] for j in range(5)]
    assert SpanMask.from_slices(q, k, [0] * 5, kv_len=9, max_spans=5).num_spans == 5
    with pytest.raises(ValueError, match="row 0 needs 5 spans, more than max_spans=4; pass 5"):
        SpanMask.from_slices(q, k, [0] * 5, kv_len=9, max_spans=4)
    # Row 0: [0, 2), [2, 4), [6, 8); row 1: [0, 2), [3, 4), [4, 8).
    some = ([[0, 2], [0, 2], [0, 1], [1, 2]], [[0, 2], [2, 4], [6, 8], [4, 8]], [0, 2, 0, 0])
    assert SpanMask.from_slices(*some, kv_len=8, max_spans=2).num_spans == 2
    touching = ([[0, 2], [0, 2], [0, 2]], [[0, 2], [2, 5], [5, 9]], [0, 3, 0])
    assert SpanMask.from_slices(*touching, kv_len=9, max_spans=2).area().tolist() == [[8, 8]]


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (([[0, 4]], [[0, 4]], [4]), r"types\[0\] = 4"),
        (([[0, 4]], [[0, 4]], [1, 0]), "got 1, 1 and 2"),
        (([[3, 2]], [[0, 4]], [1]), r"q_ranges\[0\] = \[3, 2\]"),
        (([[0, 4]], [[-1, 4]], [1]), r"k_ranges\[0\] = \[-1, 4\]"),
        (([[0, 4]], [[0, 5]], [1]), r"kv_len = 4, but k_ranges\[0\] = \[0, 5\]"),
    ],
)
def test_wrong_slices(slices, message):
    with pytest.raises(ValueError, match=message):
        SpanMask.from_slices(*slices)
    assert SpanMask.from_slices([[0, 4]], [[0, 4]], [1], q_len=6).area().tolist() == [[1, 2, 3, 4, 0, 0]]
    assert SpanMask.from_slices([], [], []) == SpanMask.full(0)
