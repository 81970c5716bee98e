"""Trees: masks, positions and parent tokens against walks from each node to its root."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.masks import trees
from spanwise.masks.span_mask import SpanMask
from tests.masks.test_properties import check_canonical


@st.composite
def forests(draw, max_nodes=14):
    """Any forest whose parents come before their children, with empty nodes."""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, max_nodes)))]
    return parents, [draw(st.integers(0, 4)) for _ in parents]


def paths(parents, lengths):
    """Tokens from the root to the end of each node, the slow way."""
    first = np.cumsum([0, *lengths])
    found = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), *range(first[node], first[node + 1])])
    return found


def walked(parents, lengths):
    """The dense mask, the positions and the parent tokens by definition."""
    total = sum(lengths)
    dense = np.zeros((total, total), bool)
    position, before = np.zeros((2, total), np.int64)
    for path in paths(parents, lengths):
        for i, token in enumerate(path):
            dense[token, path[: i + 1]] = True
            position[token], before[token] = i, path[i - 1] if i else -1
    return dense, position, before


@given(forests())
def test_any_forest(forest):
    mask = SpanMask.tree(*forest)
    dense, position, before = walked(*forest)
    check_canonical(mask)
    np.testing.assert_array_equal(mask.dense()[0], dense)
    checked = trees.checked(*forest)
    np.testing.assert_array_equal(trees.positions(*checked), position)
    np.testing.assert_array_equal(trees.parent_tokens(*checked), before)


@given(forests(), st.integers(0, 9))
def test_windows_are_counted_along_the_path(forest, window):
    mask = SpanMask.tree(*forest, window=window)
    dense, *_ = walked(*forest)
    for path in paths(*forest):
        for i, token in enumerate(path):
            dense[token, path[: max(i - window, 0)]] = False
    check_canonical(mask)
    np.testing.assert_array_equal(mask.dense()[0], dense)


def test_named_masks_are_trees():
    assert SpanMask.tree([-1, 0], [4, 5], window=3) == SpanMask.sliding_window(9, left=3)
    assert SpanMask.tree([-1, 0, 0], [4, 5, 2], window=10**6) == SpanMask.tree([-1, 0, 0], [4, 5, 2])
    assert SpanMask.tree([-1], [9]) == SpanMask.causal(9)
    assert SpanMask.tree([-1, -1, -1], [3, 0, 4]) == SpanMask.documents([0, 3, 3, 7])
    assert SpanMask.tree([-1, 0, 0, 0], [4, 2, 3, 1]) == SpanMask.shared_prefix(4, [2, 3, 1])
    assert SpanMask.tree([-1, 0, 1, 2], [1, 2, 3, 4]) == SpanMask.causal(10)
    assert SpanMask.tree([], []).q_len == 0


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 0], [1], r"an entry for each node, .* got shapes \[2\] and \[1\]"),
        ([-1, 0], [1, -2], r"lengths must not be negative, got -2 at position 1"),
        ([-1, 5], [1, 2], r"parents\[1\] = 5 of 2 nodes: a parent is -1"),
        ([-1], [2**30 + 1], "the sum of lengths must be between 0 and"),
    ],
)
def test_what_is_refused(parents, lengths, message):
    with pytest.raises(ValueError, match=message):
        SpanMask.tree(parents, lengths)
