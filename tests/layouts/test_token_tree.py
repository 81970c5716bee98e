"""Trees of sequences: every sequence is found again, prefixes are stored once, rows need few spans."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import spanwise
from spanwise import SpanMask, TokenTree, tree_from_sequences
from tests.masks.test_trees import forests, paths

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=12)


@given(SEQUENCES)
def test_any_sequences(sequences):
    found = tree_from_sequences(sequences)
    tree = found.tree
    assert [found.ids[path].tolist() for path in found.paths] == sequences
    prefixes = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert tree.num_tokens == len(prefixes)  # each prefix once
    assert (tree.lengths > 0).all()
    for path in found.paths:
        assert tree.parent_tokens()[path].tolist() == [-1, *path[:-1]][: len(path)]
        assert tree.positions()[path].tolist() == list(range(len(path)))
    assert tree.mask().num_spans <= 1 + np.log2(max(len(tree.leaves), 1))
    through = np.zeros(tree.num_tokens)
    for path in found.paths:
        through[path] += 1
    assert found.weights().tolist() == through.tolist()
    # Nodes end where sequences part or end.
    children = np.bincount(tree.parents[tree.parents >= 0], minlength=tree.num_nodes)
    ends = {int(path[-1]) for path in found.paths if len(path)}
    stops = np.cumsum(tree.lengths) - 1
    assert all(count != 1 or stop in ends for count, stop in zip(children, stops, strict=True))


def test_weights_of_sequences():
    found = tree_from_sequences([[1, 2], [1, 3, 4], [1]])
    assert found.ids.tolist() == [1, 2, 3, 4]
    assert found.weights([1, 10, 100]).tolist() == [111, 1, 10, 10]
    assert found.weights([[1, 2], 0, torch.tensor([5.0])]).tolist() == [6, 2, 0, 0]
    assert found.weights(torch.tensor([1, 10, 100], dtype=torch.bfloat16)).tolist() == [111, 1, 10, 10]
    for wrong, message in (
        ([1, 2], "an entry for each of 3 sequences, got 2"),
        ([1, [1, 2], 3], r"values\[1\] must be a number or 3 of them"),
        (torch.ones(3, requires_grad=True), r"values\[0\] needs a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            found.weights(wrong)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1], [[1, 2]]], r"sequence 1 must be token ids .* shape \[1, 2\]"),
        ([[1, -100]], "sequence 0 must be token ids .* -100; .* weight of 0"),
        ([[0.5]], "sequence 0 must hold integers"),
    ],
)
def test_what_is_refused(sequences, message):
    with pytest.raises(ValueError, match=message):
        tree_from_sequences(sequences)


@given(forests(), st.integers(0, 30))
def test_steps_up_the_path(forest, steps):
    tree = TokenTree(*forest)
    before = tree.parent_tokens(steps)
    for path in paths(*forest):
        assert before[path].tolist() == [path[i - steps] if i >= steps else -1 for i in range(len(path))]
    assert [path.tolist() for path in tree.paths(range(tree.num_nodes))] == paths(*forest)
    assert pickle.loads(pickle.dumps(tree)) == tree and len({tree, TokenTree(*forest)}) == 1


@given(st.lists(forests(max_nodes=5), max_size=4))
def test_packed_trees_are_apart(several):
    tree = TokenTree.pack([TokenTree(*forest) for forest in several])
    whole = np.zeros((tree.num_tokens,) * 2, bool)
    offsets = np.cumsum([0, *(sum(lengths) for _, lengths in several)])
    for (first, stop), forest in zip(itertools.pairwise(offsets), several, strict=True):
        whole[first:stop, first:stop] = SpanMask.tree(*forest).dense()[0]
    np.testing.assert_array_equal(tree.mask().dense()[0], whole)


def rollouts_of(kind):
    """Trees as training makes them."""
    rng = np.random.default_rng(0)
    if kind == "one prompt, 16 answers":
        return TokenTree([-1] + [0] * 16, [rng.integers(2000, 6000), *rng.integers(300, 4000, 16)])
    # A spine of 40 turns, a failed attempt at each, stored after the rest of the spine.
    return TokenTree([-1, *range(40), *range(40)], [int(rng.integers(500, 3000)), *rng.integers(50, 600, 80)])


@pytest.mark.parametrize("kind", ["one prompt, 16 answers", "deep chain"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_local_layouts_are_balanced_and_receive_least(kind, num_ranks):
    mask = rollouts_of(kind).mask()
    plans = {
        name: spanwise.make_plan(mask, num_ranks, balancer=name, exchange="needed", stages=1)
        for name in ("local", "contiguous", "lpt")
    }
    local = plans["local"]
    assert local.imbalance() <= 1.05
    assert np.ptp(local.layout.tokens_per_rank) <= local.block_size
    received = {name: plan.recv_tokens().sum() for name, plan in plans.items()}
    # Contiguous layouts that are not balanced may receive less: no balanced layout of a causal path does.
    balanced = [received[name] for name, plan in plans.items() if plan.imbalance() <= 1.05]
    assert received["local"] <= 1.1 * min(balanced)
