"""Layout: runs per rank, permutation and inverse, validation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spanwise.layouts.layout import Layout


@st.composite
def token_owners(draw):
    """Owner of every token ``[batch, seq_len]``, all rows with the same tokens per rank; and the number of ranks."""
    num_ranks = draw(st.integers(1, 6))
    first = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=40))
    others = [draw(st.permutations(first)) for _ in range(draw(st.integers(0, 2)))]
    return np.array([first, *others]), num_ranks


@given(token_owners())
def test_matches_owner_per_token(case):
    owner, num_ranks = case
    batch, seq_len = owner.shape
    layout = Layout.from_owners(owner, num_ranks, seq_len, block_size=1)
    assert (layout.batch_size, layout.num_ranks, layout.seq_len) == (batch, num_ranks, seq_len)
    for row in range(batch):
        shards = [np.flatnonzero(owner[row] == rank) for rank in range(num_ranks)]
        for rank, tokens in enumerate(shards):
            runs = layout.runs(rank, row)
            assert runs.dtype == np.int64 and runs.shape[1:] == (2,)
            assert (runs[:, 0] < runs[:, 1]).all()
            assert (runs[1:, 0] > runs[:-1, 1]).all()  # ascending, disjoint and not adjacent
            np.testing.assert_array_equal(layout.indices(rank, row), tokens)
            assert layout.num_tokens(rank) == layout.tokens_per_rank[rank] == len(tokens)
        np.testing.assert_array_equal(layout.rearrange_indices()[row].numpy(), np.concatenate(shards))
    x = torch.randn(batch, seq_len, 3)
    rearranged = x.take_along_dim(layout.rearrange_indices()[..., None], dim=1)
    assert torch.equal(rearranged.take_along_dim(layout.restore_indices()[..., None], dim=1), x)
    assert layout.rearrange_indices().dtype == layout.restore_indices().dtype == torch.int64


@given(token_owners())
def test_every_way_to_build_gives_an_equal_layout(case):
    owner, num_ranks = case
    batch, seq_len = owner.shape
    layout = Layout.from_owners(owner, num_ranks, seq_len, block_size=1)
    from_pieces = Layout([layout.pieces(b) for b in range(batch)], num_ranks, seq_len)
    # One piece a token, in falling order: the constructor sorts and merges.
    tokens = np.arange(seq_len)[::-1]
    from_tokens = Layout([np.column_stack([row[::-1], tokens, tokens + 1]) for row in owner], num_ranks, seq_len)
    for other in (from_pieces, from_tokens):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.digest() == layout.digest()


@given(token_owners(), st.integers(1, 4))
def test_slots_and_parts(case, parts):
    owner, num_ranks = case
    layout = Layout.from_owners(owner, num_ranks, owner.shape[1], block_size=1)
    split = layout.split(parts)
    assert split.grouped(parts) == layout
    sizes = split.tokens_per_rank.reshape(num_ranks, parts)
    assert (np.diff(sizes, axis=1) <= 0).all() and (np.ptp(sizes, axis=1) <= 1).all()
    slots, most = layout.slots(), layout.tokens_per_rank.max()
    for row, rank in itertools.product(range(layout.batch_size), range(num_ranks)):
        first = (rank * layout.batch_size + row) * most
        assert slots[row, layout.indices(rank, row)].tolist() == list(range(first, first + layout.num_tokens(rank)))


def test_one_row_serves_every_row_of_a_batch():
    layout = Layout.from_owners([0, 1], 2, seq_len=4, block_size=2)
    np.testing.assert_array_equal(layout.runs(1, row=5), [[2, 4]])
    batched = Layout.from_owners([[0, 1], [1, 0]], 2, seq_len=4, block_size=2)
    np.testing.assert_array_equal(batched.runs(1, row=1), [[0, 2]])
    with pytest.raises(ValueError, match=r"row must be in \[0, 2\), got 2"):
        batched.runs(0, row=2)
    with pytest.raises(ValueError, match="got -1"):
        layout.runs(0, row=-1)


def test_digest_is_the_same_everywhere():
    # A golden value: the digest enters plan fingerprints that ranks on different hosts compare.
    digest = Layout.from_owners([0, 1, 0, 1], 2, 7, 2).digest().hex()
    assert digest == "af9dbfaa5260076a475cb08f4f752b8bd7dd1ade9f054e82c06083143eaac05f"


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([[[0, 0, 3], [1, 4, 8]]], r"tokens \[3, 4\) belong to no rank"),
        ([[[0, 0, 5], [1, 4, 8]]], "token 4 belongs to rank 0 and to rank 1"),
        ([[[0, 0, 9]]], r"in \[0, 8\), got \[0, 0, 9\]"),
        ([[[2, 0, 8]]], r"a rank in \[0, 2\) .* got \[2, 0, 8\]"),
        ([[[0, 5, 4], [0, 0, 8]]], r"got \[0, 5, 4\]"),
        (
            [[[0, 0, 4], [1, 4, 8]], [[0, 0, 3], [1, 3, 8]]],
            "same number of tokens, but rank 0 gets 4 in row 0 and 3 in row 1",
        ),
    ],
)
def test_refuses_what_does_not_tile(pieces, message):
    with pytest.raises(ValueError, match=message):
        Layout(pieces, num_ranks=2, seq_len=8)
