"""SpanMask and FlexAttention: tables equal torch's own, kernels compute the mask, conversions are exact or refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from spanwise.masks.span_mask import SpanMask
from tests.masks.test_properties import masks

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def same_document(b, h, q_idx, kv_idx):
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def lists(count, index):
    """The blocks of every row, without what torch leaves undefined beyond the count."""
    return [
        [row[:n].tolist() for n, row in zip(c, i, strict=True)] for c, i in zip(count[:, 0], index[:, 0], strict=True)
    ]


def torch_block_mask(mask, size):
    return create_block_mask(mask.mask_mod("cpu"), mask.batch_size, None, mask.q_len, mask.kv_len, "cpu", size)


@example(SpanMask.full(10), 4)
@given(masks().filter(lambda m: m.q_len and m.kv_len), st.integers(1, 20))
def test_block_mask_is_torchs_own(mask, size):
    """All eight lists, the transposed ones and short last blocks included."""
    ours, theirs = mask.block_mask("cpu", size), torch_block_mask(mask, size)
    for kind in ("kv", "full_kv", "q", "full_q"):
        names = f"{kind}_num_blocks", f"{kind}_indices"
        for name in names:
            assert getattr(ours, name).dtype == torch.int32
            assert getattr(ours, name).shape == getattr(theirs, name).shape
            assert getattr(ours, name).is_contiguous()
        assert lists(*(getattr(ours, n) for n in names)) == lists(*(getattr(theirs, n) for n in names))
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert (ours.shape, ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.shape, theirs.seq_lengths, theirs.BLOCK_SIZE)


@settings(max_examples=25, deadline=None)
@given(masks())
def test_mask_mod_is_the_mask(mask):
    again = SpanMask.from_mask_mod(mask.mask_mod(), mask.q_len, mask.kv_len, batch_size=mask.batch_size)
    assert again == mask
    if mask.batch_size == 1:  # it ignores the batch index
        three = SpanMask.from_mask_mod(mask.mask_mod(), mask.q_len, mask.kv_len, batch_size=3)
        assert three == SpanMask.stack([mask] * 3)


@settings(max_examples=40, deadline=None)
@given(masks().filter(lambda m: m.q_len and m.kv_len), st.integers(1, 20), st.integers(1, 20))
def test_from_block_mask_takes_torchs_masks(mask, q_size, kv_size):
    """Any lengths, any pair of block sizes, full blocks listed apart or not."""
    shape = mask.batch_size, 2, mask.q_len, mask.kv_len
    block_mask = create_block_mask(mask.mask_mod(), *shape, "cpu", (q_size, kv_size))
    assert SpanMask.from_block_mask(block_mask) == mask
    if "separate_full_blocks" in inspect.signature(create_block_mask).parameters:  # torch 2.13
        unseparated = create_block_mask(mask.mask_mod(), *shape, "cpu", (q_size, kv_size), separate_full_blocks=False)
        assert SpanMask.from_block_mask(unseparated) == mask
    assert SpanMask.from_block_mask(mask.block_mask("cpu", q_size)) == mask


def test_listed_blocks_end_with_the_keys():
    none, first, one = torch.zeros(1, 1, 2).int(), torch.zeros(1, 1, 2, 1).int(), torch.ones(1, 1, 2).int()
    lists = dict(BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(7, 3))
    assert SpanMask.from_block_mask(BlockMask.from_kv_blocks(none, first, one, first, **lists)) == SpanMask.full(7, 3)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (h == 0),
        lambda b, h, q_idx, kv_idx: torch.where(h > 5, q_idx >= kv_idx, q_idx <= kv_idx),
    ],
)
def test_a_mask_mod_that_depends_on_the_head_is_refused(mask_mod):
    with pytest.raises(ValueError, match="depends on the head index"):
        SpanMask.from_mask_mod(mask_mod, 8, 8)
    with pytest.raises(ValueError, match="depends on the head index"):
        SpanMask.from_block_mask(create_block_mask(mask_mod, 1, None, 8, 8, "cpu", 4))


@pytest.mark.parametrize(
    ("count", "index", "lengths", "message"),
    [
        ([[[1], [2]]], [[[[0, 1]], [[0, 1]]]], (4, 8), r"head 1 differs .* in partial block \(0, 1\)"),
        ([[[2]]], [[[[1, 1]]]], (4, 8), "key block 1 of query block 0 .* more than once"),
        ([[[2]]], [[[[1, 1]]]], (4, 4), r"key blocks of \[0, 1\) .* key blocks 0 to 1"),
    ],
)
def test_block_lists_that_make_no_mask_are_refused(count, index, lengths, message):
    tables = torch.tensor(count, dtype=torch.int32), torch.tensor(index, dtype=torch.int32)
    options = dict(BLOCK_SIZE=4, mask_mod=noop_mask, compute_q_blocks=False, seq_lengths=lengths)
    with pytest.raises(ValueError, match=message):
        SpanMask.from_block_mask(BlockMask.from_kv_blocks(*tables, **options))


def test_a_sliced_block_mask_is_refused():
    """Torch takes the mask_mod from a sliced BlockMask: batch row 1 would be read as row 0."""
    batched = create_block_mask(causal, 2, None, 8, 8, "cpu", 4)
    with pytest.raises(ValueError, match="cannot be evaluated"):
        SpanMask.from_block_mask(batched[1:])


def test_rows_with_too_many_spans_are_refused():
    def every_other(b, h, q_idx, kv_idx):
        return (q_idx + kv_idx) % 2 == 0

    with pytest.raises(ValueError, match="row 0 of mask_mod needs 5 spans of keys, more than max_spans = 4"):
        SpanMask.from_mask_mod(every_other, 10, 10, max_spans=4)
    assert SpanMask.from_mask_mod(every_other, 10, 10, max_spans=5).num_spans == 5


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (lambda b, h, q_idx, kv_idx: q_idx - kv_idx, "must return one boolean for one cell, got torch.int64"),
        (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx + torch.zeros(3), r"torch.bool of shape \[3\]"),
        (lambda q_idx, kv_idx: q_idx >= kv_idx, "cannot be evaluated"),
    ],
)
def test_what_is_no_mask_mod_is_refused(mask_mod, text):
    with pytest.raises(ValueError, match=text):
        SpanMask.from_mask_mod(mask_mod, 8, 8)
