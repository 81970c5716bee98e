"""Spans cut into rounds of the varlen kernel: every pair once, and no more rounds than a mask's shape asks for."""

from __future__ import annotations

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

import spanwise
from spanwise import SpanMask
from spanwise.attention.kernels._segments import Round, cut_rounds
from spanwise.layouts.runs import subtract_runs


def pairs(call: Round) -> np.ndarray:
    """How often a call reads each (query, key) pair: bottom right alignment, and flash's way with missing bounds."""
    read = np.zeros((call.cu_seq_q[-1], call.cu_seq_k[-1]), dtype=int)
    left, right = (call.max_k if bound < 0 or bound >= call.max_k else bound for bound in call.window)
    for (q0, q1), (k0, k1) in zip(pairwise(call.cu_seq_q), pairwise(call.cu_seq_k), strict=True):
        if q0 == q1 or k0 == k1:
            continue
        assert q1 - q0 <= call.max_q and k1 - k0 <= call.max_k
        diagonal = np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        key = np.arange(k1 - k0)
        inside = np.ones((q1 - q0, k1 - k0), dtype=bool)
        if call.window[0] >= 0 or call.window[1] >= 0:
            inside = (key >= diagonal - left) & (key <= diagonal + right)
        read[q0:q1, k0:k1] += inside
    return read


def check(mask: SpanMask) -> list[Round]:
    """Every pair of the mask is read once, and nothing else is."""
    rounds = cut_rounds(mask)
    batch, q_len, kv_len = mask.batch_size, mask.q_len, mask.kv_len
    want = np.zeros((batch * q_len, batch * kv_len), dtype=int)
    for b, dense in enumerate(mask.dense()):
        want[b * q_len : (b + 1) * q_len, b * kv_len : (b + 1) * kv_len] = dense
    got = np.zeros_like(want)
    for call in rounds:
        read = pairs(call)
        np.testing.assert_array_equal(call.rows, read.any(1))
        np.testing.assert_array_equal(call.keys, read.any(0))
        assert 2 <= call.max_q <= call.max_k
        assert call.cu_seq_q.dtype == call.cu_seq_k.dtype == np.int32
        assert call.cu_seq_q[0] == call.cu_seq_k[0] == 0
        assert call.cu_seq_q[-1] == batch * q_len and call.cu_seq_k[-1] == batch * kv_len
        got += read
    np.testing.assert_array_equal(got, want)
    return rounds


@st.composite
def any_mask(draw: st.DrawFn) -> SpanMask:
    """Rows of up to three spans whose ends wander by small steps, with jumps, empty rows and batch rows."""
    batch, q_len, kv_len = draw(st.integers(1, 2)), draw(st.integers(0, 20)), draw(st.integers(1, 24))
    num = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**32 - 1))
    jumps = draw(st.sampled_from([0.0, 0.1, 1.0]))
    rng = np.random.default_rng(seed)
    edges = np.empty((batch, q_len, 2 * num), dtype=np.int64)
    for b in range(batch):
        edge = np.sort(rng.integers(0, kv_len + 1, 2 * num))
        for i in range(q_len):
            edge = rng.integers(0, kv_len + 1, 2 * num) if rng.random() < jumps else edge + rng.integers(0, 2, 2 * num)
            edge = np.sort(edge.clip(0, kv_len))
            edges[b, i] = 0 if rng.random() < jumps / 2 else edge
    return SpanMask(edges[..., 0::2].transpose(0, 2, 1), edges[..., 1::2].transpose(0, 2, 1), kv_len)


@given(any_mask())
def test_any_mask(mask: SpanMask) -> None:
    check(mask)


LENGTHS = [1, 1, 70, 3, 1, 128, 40, 2, 54]
OFFSETS = [0, *np.cumsum(LENGTHS).tolist()]
TOTAL = OFFSETS[-1]


def packed(window: tuple[int, int] | None, causal: bool) -> SpanMask:
    return SpanMask.documents(OFFSETS, causal=causal, window=window)


CHUNKED = np.cumsum([0, *8 * np.random.default_rng(0).integers(1, 38, 12)])


def chunked(window: tuple[int, int] | None, causal: bool) -> SpanMask:
    return SpanMask.documents(CHUNKED, causal=causal, window=window)


SIMPLE, CUT = ("contiguous", "head_tail"), ("per_document_head_tail",)
# The mask; calls for it on one device; at most so many for a rank's own keys, and for those from elsewhere. With chunks
# r and 2P - 1 - r of every document both may read the same keys: two calls are the least then.
CALLS: dict[str, tuple[SpanMask, int | None, int, int, tuple[str, ...]]] = {
    "causal": (SpanMask.causal(TOTAL), 1, 1, 2, SIMPLE),
    "documents": (packed(None, True), 1, 1, 2, SIMPLE),
    "bidirectional": (packed(None, False), 1, 1, 2, SIMPLE),
    "window": (SpanMask.sliding_window(TOTAL, 20), 1, 1, 2, SIMPLE),
    "two-sided window": (SpanMask.sliding_window(TOTAL, 20, right=7), 1, 1, 3, SIMPLE),
    "documents and window": (packed((20, 0), True), 1, 1, 2, SIMPLE),
    "documents and two-sided window": (packed((20, 5), False), 1, 1, 3, SIMPLE),
    "nothing": (SpanMask(np.zeros((1, TOTAL), int), np.zeros((1, TOTAL), int), TOTAL), 0, 0, 0, SIMPLE),
    "cut documents": (chunked(None, True), None, 1, 2, CUT),
    "cut bidirectional documents": (chunked(None, False), None, 2, 2, CUT),
    "cut windows": (chunked((200, 0), True), None, 3, 3, CUT),
    "cut two-sided windows": (chunked((150, 90), False), None, 5, 7, CUT),
}


@pytest.mark.parametrize("name", CALLS)
def test_rounds_of_a_rank(name: str) -> None:
    mask, calls, own_calls, other_calls, balancers = CALLS[name]
    assert calls is None or len(check(mask)) == calls
    for balancer, num_ranks in itertools.product(balancers, (4,) if balancers is CUT else (2, 4)):
        plan = spanwise.make_plan(mask, num_ranks, balancer=balancer, block_size=1 if balancers is CUT else 128)
        for rank in range(num_ranks):
            own = plan.layout.runs(rank)
            others = subtract_runs(np.array([[0, mask.kv_len]]), own)
            assert len(check(mask.select(own, own))) <= own_calls
            assert len(check(mask.select(own, others))) <= other_calls


def test_a_mask_of_too_many_calls_is_refused() -> None:
    rows = np.arange(600)
    mask = SpanMask((rows % 2)[None], (1000 - rows)[None], 1000)
    with pytest.raises(ValueError, match="more than 256 calls for this mask of 600 queries and 1000 keys.*flex"):
        cut_rounds(mask)
