"""SpanMask: named masks against their definitions, canonical form, methods, identity, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spanwise.masks.blocks import block_table
from spanwise.masks.span_mask import SpanMask
from tests.pairs import covering

CU = [0, 5, 5, 6, 13, 20]  # an empty document and one of length 1


def dense_of(rule, q_len, kv_len=None):
    """bool [1, q_len, kv_len] from a rule on (row, key)."""
    return np.array([[[rule(i, k) for k in range(q_len if kv_len is None else kv_len)] for i in range(q_len)]], bool)


def document_of(i, cu=CU):
    return int(np.searchsorted(cu, i, side="right")) - 1


def same_document(i, k):
    return document_of(i) == document_of(k)


def test_full_and_causal():
    assert SpanMask.full(4).dense().all() and SpanMask.full(4, 7).dense().shape == (1, 4, 7)
    assert SpanMask.full(4, 7).dense().all() and SpanMask.full(3, 0).area().tolist() == [[0, 0, 0]]
    np.testing.assert_array_equal(SpanMask.causal(9).dense(), dense_of(lambda i, k: k <= i, 9))
    assert SpanMask.causal(9).is_causal and not SpanMask.sliding_window(9, 7).is_causal


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (2, 4), (0, 5), (30, 30)])
def test_sliding_window(window):
    left, right = window
    expected = dense_of(lambda i, k: i - left <= k <= i + right, 11)
    np.testing.assert_array_equal(SpanMask.sliding_window(11, left, right).dense(), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (2, 0), (1, 3), (10**12, 1)])
def test_documents(causal, window):
    left, right = window or (99, 99)
    expected = dense_of(
        lambda i, k: same_document(i, k) and (k <= i or not causal) and i - left <= k <= i + right, CU[-1]
    )
    for cu in (CU, np.array(CU, np.int32), torch.tensor(CU, dtype=torch.int32)):
        np.testing.assert_array_equal(SpanMask.documents(cu, causal=causal, window=window).dense(), expected)


def test_prefix_lm():
    prefixes = [3, 0, 1, 0, 7]
    expected = dense_of(
        lambda i, k: same_document(i, k) and (k <= i or k < CU[document_of(i)] + prefixes[document_of(i)]), CU[-1]
    )
    np.testing.assert_array_equal(SpanMask.prefix_lm(CU, prefixes).dense(), expected)


@pytest.mark.parametrize("prefix", [0, 1, 4])
@pytest.mark.parametrize("suffixes", [[], [3], [2, 0, 3, 1], [0, 0, 2]])
def test_shared_prefix(prefix, suffixes):
    cu = np.concatenate([[0, prefix], prefix + np.cumsum(suffixes, dtype=int)])
    expected = dense_of(lambda i, k: k <= i and (k < prefix or document_of(i, cu) == document_of(k, cu)), int(cu[-1]))
    mask = SpanMask.shared_prefix(prefix, suffixes)
    np.testing.assert_array_equal(mask.dense(), expected.reshape(mask.dense().shape))
    assert mask == SpanMask(mask.start, mask.end, mask.kv_len)  # the pattern is canonical as it stands


@pytest.mark.parametrize(
    ("block_len", "num_previous", "global_tokens"),
    covering([1, 3, 7, 40], [None, 0, 1, 2, 50], [0, 1, 4, 10, 20]),
)
def test_block_causal(block_len, num_previous, global_tokens):
    reach = 99 if num_previous is None else num_previous
    expected = dense_of(lambda i, k: k < global_tokens or 0 <= i // block_len - k // block_len <= reach, 20)
    mask = SpanMask.block_causal(20, block_len, num_previous, global_tokens)
    np.testing.assert_array_equal(mask.dense(), expected)
    assert mask == SpanMask(mask.start, mask.end, mask.kv_len)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 12))
def test_block_diffusion(lengths, block_len):
    """By the published rule of one sequence: M_BD, M_OBC and M_BC of `block_diff_mask`, arXiv 2503.09573."""
    copy, document, block = (
        np.array([x for c in (0, 1) for d, n in enumerate(lengths) for i in range(n) for x in [(c, d, i // block_len)]])
        .reshape(-1, 3)
        .T
    )
    q, k = (np.s_[:, None], np.s_[None, :])
    diagonal = (block[q] == block[k]) & (copy[q] == copy[k])
    offset = (block[q] > block[k]) & (copy[q] == 0) & (copy[k] == 1)
    causal = (block[q] >= block[k]) & (copy[q] == 1) & (copy[k] == 1)
    cu = np.cumsum([0, *lengths])
    mask = SpanMask.block_diffusion(cu, block_len)
    np.testing.assert_array_equal(mask.dense()[0], (diagonal | offset | causal) & (document[q] == document[k]))
    assert mask == SpanMask(mask.start, mask.end, mask.kv_len)
    assert mask.cu_seqlens[0].tolist() == [*cu, *cu[1:] + cu[-1]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_the_constructor_takes_integers_and_keeps_its_own_copy(dtype):
    start, end = np.array([[0, 1], [5, 4]], dtype), np.array([[3, 2], [6, 9]], dtype)
    mask = SpanMask(start, end, 9)
    from_torch = SpanMask(torch.from_numpy(start.astype(np.int32)), torch.from_numpy(end.astype(np.int32)), 9)
    before = mask.dense()
    start[:], end[:] = 0, 0
    np.testing.assert_array_equal(mask.dense(), before)
    assert mask == from_torch
    assert start.flags.writeable and not mask.start.flags.writeable and not mask.end.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        mask.start[0, 0, 0] = 1
    with pytest.raises(AttributeError):
        mask.kv_len = 10


def test_equal_masks_compare_hash_and_digest_equal():
    a, b = SpanMask.documents([0, 4, 9]), SpanMask([[0] * 4 + [4] * 5], [list(range(1, 10))], 9)
    assert a == b and hash(a) == hash(b) and a.digest() == b.digest()
    others = [SpanMask.documents([0, 5, 9]), SpanMask.causal(9), SpanMask(a.start, a.end, 10), SpanMask.stack([a, a])]
    assert len({m.digest() for m in [a, *others]}) == 5
    assert all(a != m for m in others)
    assert a != "mask"
    # Golden: plans on different machines compare these bytes.
    assert SpanMask.documents([0, 4, 9]).digest().hex() == "e245d723183b225863b400fe3b4ccf5b"


def test_a_block_is_full_where_all_its_cells_that_exist_are_read():
    table = block_table(SpanMask.causal(10), 4)
    assert table.tolist() == [[[1, 0, 0], [2, 1, 0], [2, 2, 1]]]
    assert block_table(SpanMask.full(10), 4).tolist() == [[[2] * 3] * 3]
    # A block that is covered only together by several rows is not full; one covered by another slot in each row is.
    assert block_table(SpanMask([[0, 2]], [[2, 4]], 4), 2).tolist() == [[[1, 1]]]
    assert block_table(SpanMask([[0, 4], [4, 0]], [[2, 6], [6, 0]], 6), 2).tolist() == [[[1, 0, 2]]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SpanMask([[0, 0]], [[1, 9]], 8), r"kv_len = 8\], but span 0 of row 1 \(batch row 0\) is \[0, 9\)"),
        (lambda: SpanMask([[0, 3], [3, 1]], [[2, 5], [4, 2]], 8), r"in row 1 .* span 1 is \[1, 2\) after .* ends at 5"),
        (lambda: SpanMask.causal(2**31), "seq_len must be between 0 and .*, got 2147483648"),
        (lambda: SpanMask.sliding_window(8, -2), r"or -1 for no limit on a side, got \(-2, 0\)"),
        (lambda: SpanMask.documents([1, 4]), "must begin with 0, got 1: for lengths give"),
        (lambda: SpanMask.prefix_lm([0, 4, 6], [1, 3]), r"prefix_lens\[1\] = 3, but document 1 has 2 tokens"),
        (lambda: SpanMask.block_causal(8, 2, 1, 9), r"global_tokens must be in \[0, 9\), got 9"),
        (lambda: SpanMask.causal(8) & SpanMask.causal(9), r"got \(8, 8\) and \(9, 9\)"),
        (lambda: SpanMask.stack([SpanMask.causal(7), SpanMask.causal(3)]), r"\(3, 3\), \(7, 7\)"),
        (lambda: SpanMask.causal(8).select([[0, 8]], [[4, 6], [5, 8]]), r"run 1 is \[5, 8\] after \[4, 6\]"),
    ],
)
def test_errors_name_the_values(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize("mask", [SpanMask.causal(4), SpanMask.full(3, 0)])
def test_a_mask_has_no_truth_value_and_combines_with_masks_only(mask):
    """`a and b` would be b, silently."""
    with pytest.raises(ValueError, match="no truth value"):
        bool(mask and mask)
    with pytest.raises(TypeError):
        SpanMask.causal(8) & np.ones((8, 8), bool)
