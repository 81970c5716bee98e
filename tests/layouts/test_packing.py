"""Packing: storage and valid lengths, masks over storage, the dual-chunk order, identity, errors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

import spanwise
from spanwise.layouts.packing import Packing
from spanwise.layouts.thd_order import contiguous_to_dualchunk_order_thd, dualchunk_to_contiguous_order_thd
from spanwise.masks.span_mask import SpanMask

# Valid lengths 5, 0, 1, 4, 0 in slots of 8, 2, 1, 4, 0 rows; 3 rows before the first slot, 2 after the last.
CU = [0, 5, 5, 6, 10, 10]
PADDED = [3, 11, 13, 14, 18, 18]
STORAGE = 20


def odd_packing() -> Packing:
    return Packing(CU, cu_seqlens_q_padded=PADDED, q_len=STORAGE)


@st.composite
def side(draw: st.DrawFn, num_sequences: int, unit: int = 1) -> tuple[list[int], list[int], int]:
    """Valid offsets, storage offsets and storage length; slots are multiples of `unit`."""
    count = st.integers(0, 4 if unit > 1 else 9)
    slots = [unit * draw(count) for _ in range(num_sequences)]
    lens = [draw(st.integers(0, slot) | st.just(slot)) for slot in slots]
    before, after = unit * draw(st.integers(0, 2)), unit * draw(st.integers(0, 2))
    offsets = np.cumsum([before, *slots])
    return np.cumsum([0, *lens]).tolist(), offsets.tolist(), int(offsets[-1]) + after


@st.composite
def packings(draw: st.DrawFn, *, square: bool | None = None, unit: int = 1) -> Packing:
    num_sequences = draw(st.integers(0, 5))
    cu, padded, length = draw(side(num_sequences, unit))
    if square if square is not None else draw(st.booleans()):
        return Packing(cu, cu_seqlens_q_padded=padded, q_len=length)
    kv_cu, kv_padded, kv_length = draw(side(num_sequences, unit))
    keys = {"cu_seqlens_kv": kv_cu, "cu_seqlens_kv_padded": kv_padded, "kv_len": kv_length}
    return Packing(cu, cu_seqlens_q_padded=padded, q_len=length, **keys)


def dense_of(packing: Packing, causal: bool, window: tuple[int, int] | None, align: str | None) -> np.ndarray:
    """bool [q_len, kv_len] from the definition, cell by cell."""
    dense = np.zeros((packing.q_len, packing.kv_len), bool)
    for s in range(packing.num_sequences):
        queries, keys = int(packing.q_lens[s]), int(packing.kv_lens[s])
        shift = 0 if align == "top_left" else keys - queries
        for i in range(queries):
            for j in range(keys):
                left, right = (-1, -1) if window is None else window
                near = (left == -1 or j >= i + shift - left) and (right == -1 or j <= i + shift + right)
                dense[packing.q_offsets[s] + i, packing.kv_offsets[s] + j] = near and (not causal or j <= i + shift)
    return dense


windows = st.none() | st.tuples(st.integers(-1, 12), st.integers(-1, 12))


@given(packings(), st.booleans(), windows, st.sampled_from(["top_left", "bottom_right"]))
def test_mask_is_its_definition(packing: Packing, causal: bool, window: tuple[int, int] | None, align: str) -> None:
    assume(causal or window != (-1, 0))
    mask = packing.mask(causal=causal, window=window, align=align)
    np.testing.assert_array_equal(mask.dense()[0], dense_of(packing, causal, window, align))
    if packing.square:
        assert packing.mask(causal=causal, window=window) == mask
    if packing.q_len and packing.kv_len:
        packing.check_mask(mask)


def test_two_sided_window_in_sequences_of_different_lengths() -> None:
    """Position 4 of the 8 tokens of sequence 0, which rank 1 of 2 holds, reads all eight with a window of 4 and 4."""
    packing = Packing([0, 8, 40])
    assert 4 in packing.dual_chunk_layout(2).indices(1)
    mask = packing.mask(causal=False, window=(4, 4))
    assert (mask.start[0, 0, 4], mask.end[0, 0, 4]) == (0, 8)


def test_worked_example() -> None:
    """Lengths 5 and 8 in slots of 8 and 8 rows on two ranks."""
    packing = Packing([0, 5, 13], cu_seqlens_q_padded=[0, 8, 16])
    layout = packing.dual_chunk_layout(2)
    assert layout.indices(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert layout.indices(1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def test_alignment_is_not_guessed() -> None:
    cross = Packing([0, 3, 5], cu_seqlens_kv=[0, 3, 9])
    for options in ({}, {"causal": False, "window": (1, 1)}):
        with pytest.raises(ValueError, match=r"sequence 1 has 2 queries and 6 keys.*top_left.*bottom_right"):
            cross.mask(**options)
    assert cross.mask(causal=False).area().tolist() == [[3, 3, 3, 6, 6]]
    assert cross.mask(causal=False, window=(-1, -1)) == cross.mask(causal=False)
    assert cross.mask(align="top_left").area().tolist() == [[1, 2, 3, 1, 2]]
    assert cross.mask(align="bottom_right").area().tolist() == [[1, 2, 3, 5, 6]]
    # Without queries or without keys there is nothing to align.
    Packing([0, 0, 5], cu_seqlens_kv=[0, 7, 7]).mask()
    for wrong, message in (((-1, 0), "ambiguous; give causal=True"), ((-2, 0), r"no limit on a side, got \(-2, 0\)")):
        with pytest.raises(ValueError, match=message):
            Packing([0, 5, 9]).mask(causal=False, window=wrong)
    with pytest.raises(ValueError, match="3 query and 0 key rows.* skip"):
        packing = Packing([0, 3], cu_seqlens_kv=[0, 0])
        spanwise.make_plan(packing.mask(align="top_left"), 2, packing=packing)


@given(packings(), packings())
def test_identity(first: Packing, second: Packing) -> None:
    copy = Packing(**first.to_arrays())
    assert copy == first and hash(copy) == hash(first) and copy.digest() == first.digest()
    assert pickle.loads(pickle.dumps(first)) == first
    assert (first == second) == (first.digest() == second.digest())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(cu_seqlens_q=[0, 5], cu_seqlens_q_padded=[0, 4]), "sequence 0 has 5 tokens .* storage for 4 only"),
        (dict(cu_seqlens_q=[0, 5, 4]), "cu_seqlens_q must not decrease, got 4 after 5 at position 2"),
        (dict(cu_seqlens_q=[0, 2, 4], cu_seqlens_kv=[0, 4]), "as many sequences, got 2 and 1"),
        (dict(cu_seqlens_q=[0, 4], cu_seqlens_kv_padded=[0, 4]), "cu_seqlens_kv_padded needs cu_seqlens_kv"),
        (dict(cu_seqlens_q=[0, 4], q_len=3), "q_len = 3 .* too few: the last sequence ends at 4"),
        (dict(cu_seqlens_q=[0.0, 4.0]), "cu_seqlens_q must hold integers"),
        (
            dict(cu_seqlens_q=[0, 5, 9], cu_seqlens_q_padded=[0, 8, 16], cu_seqlens_kv=[0, 5, 9]),
            "pads the queries alone: give cu_seqlens_kv_padded too",
        ),
    ],
)
def test_what_a_packing_refuses(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing(**given)


def test_check_mask() -> None:
    packing = odd_packing()
    packing.check_mask(packing.mask() & SpanMask.sliding_window(STORAGE, 2) | packing.mask(window=(0, 0)))
    cases = [
        (SpanMask.causal(STORAGE), r"query row 0 reads the keys \[0, 1\), .* is padding"),
        (SpanMask.full(STORAGE, STORAGE + 1), r"\(1, 20, 21\) .* storage \(1, 20, 20\)"),
        (SpanMask.stack([packing.mask()] * 2), r"\(2, 20, 20\)"),
    ]
    start, end = packing.mask().start[0].copy(), packing.mask().end[0].copy()
    end[0, 7] = 10  # row 7 is the last token of sequence 0; keys 8 and 9 are padding
    cases.append((SpanMask(start, end, STORAGE), r"query row 7 reads the keys \[3, 10\), .* is padding"))
    for mask, message in cases:
        with pytest.raises(ValueError, match=message):
            packing.check_mask(mask)


# ---------------------------------------------------------------- the dual-chunk order


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Packing, int]:
    num_ranks = draw(st.integers(1, 4))
    packing = draw(packings(unit=2 * num_ranks))
    return packing, num_ranks


@given(chunked())
def test_dual_chunk_layout_is_its_definition(case: tuple[Packing, int]) -> None:
    packing, num_ranks = case
    for name in ("q", "kv"):
        offsets, length = getattr(packing, f"{name}_offsets"), getattr(packing, f"{name}_len")
        if length == 0:
            continue
        layout = packing.dual_chunk_layout(num_ranks, name)
        edges = [0, *offsets.tolist(), length]
        for rank in range(num_ranks):
            tokens = []
            for start, stop in itertools.pairwise(edges):
                size = (stop - start) // (2 * num_ranks)
                for chunk in (rank, 2 * num_ranks - 1 - rank):
                    tokens += range(start + chunk * size, start + (chunk + 1) * size)
            assert layout.indices(rank).tolist() == tokens


@given(chunked(), st.integers(0, 2), st.booleans())
def test_converters_are_the_layouts_permutation(case: tuple[Packing, int], dim: int, as_tensor: bool) -> None:
    packing, num_ranks = case
    if packing.q_len == 0:
        return
    cu = torch.tensor(packing.q_offsets, dtype=torch.int32) if as_tensor else packing.q_offsets.tolist()
    layout = packing.dual_chunk_layout(num_ranks)
    shape = [2, 3, 2]
    shape[dim] = packing.q_len
    x = torch.randn(shape)
    ranked = contiguous_to_dualchunk_order_thd(x, cu, num_ranks, dim - 3)
    assert torch.equal(ranked, x.index_select(dim, layout.rearrange_indices()[0]))
    stored = dualchunk_to_contiguous_order_thd(x, cu, num_ranks, dim)
    assert torch.equal(stored, x.index_select(dim, layout.restore_indices()[0]))
    assert torch.equal(dualchunk_to_contiguous_order_thd(ranked, cu, num_ranks, dim), x)


@pytest.mark.parametrize(
    ("convert", "back"),
    [
        (contiguous_to_dualchunk_order_thd, dualchunk_to_contiguous_order_thd),
        (dualchunk_to_contiguous_order_thd, contiguous_to_dualchunk_order_thd),
    ],
)
def test_converters_are_differentiable_and_do_not_wait_for_a_device(convert: Callable, back: Callable) -> None:
    cu = [4, 12, 12, 20]
    x, weights = torch.randn(24, 3, requires_grad=True), torch.randn(24, 3)
    (convert(x, cu, 2) * weights).sum().backward()
    assert torch.equal(x.grad, back(weights, cu, 2))
    # A meta tensor has no values: whoever reads one on the host fails.
    on_device = torch.empty(4, dtype=torch.int32, device="meta")
    assert convert(torch.empty(24, 3, device="meta"), on_device, 2).shape == (24, 3)
    assert convert(x[:0], [0, 0], 2).shape == (0, 3)


@pytest.mark.parametrize("convert", [dualchunk_to_contiguous_order_thd, contiguous_to_dualchunk_order_thd])
def test_what_the_dual_chunk_order_refuses(convert: Callable) -> None:
    padded = Packing([0, 4], cu_seqlens_q_padded=[2, 6], q_len=8)
    for packing, slot in ((Packing([0, 4, 10]), "4, 10"), (padded, "0, 2"), (Packing([0, 4], q_len=7), "4, 7")):
        with pytest.raises(ValueError, match=rf"slot \[{slot}\) must be a multiple of 2 \* num_ranks = 4"):
            packing.dual_chunk_layout(2)
    for arguments, message in (
        ((torch.zeros(8, 2), [0, 8], 2, -3), r"dim -3 does not exist in a tensor of shape \(8, 2\)"),
        ((torch.zeros(16), torch.tensor([0, 6, 16]), 2), r"slot \[0, 6\) must be"),
        ((torch.zeros(6), [0, 6], 2), "dim 0 must be a multiple of 2 .* got 6"),
        ((torch.zeros(8), [0, 12], 2), "dim 0 = 8 rows of storage are too few: the last sequence ends at 12"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(*arguments)
