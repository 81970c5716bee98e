"""Every kernel against dense attention in float64: outputs and gradients, whole and in chunks, for many masks."""

from __future__ import annotations

import contextlib
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from spanwise.attention.kernels import _tiles
from spanwise.attention.kernels._tiles import max_logit, plan_tiles, tiles
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.masks.span_mask import SpanMask
from tests.attention.stand_ins import PARTS, attend, dense_flex
from tests.oracle import Inputs, expected
from tests.pairs import covering

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # of torch's own, on import
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # read by Dynamo and opcheck
]
# Sizes of tiles with which short problems take every way of long ones.
SMALL = {"_LONG": 8, "_EVEN": 4, "_GAP": 2, "_MOST_KEYS": 16, "_MAX_ROWS": 16, "_MIN_SAVING": 50, "_MOST_SCORES": 0}
USUAL = {name: getattr(_tiles, name) for name in SMALL}
ROWS = 200
CUTS = [0, 1, 2, 40, 40, 61, 170, ROWS]
#: Largest error, relative to the largest sum of absolute values of the terms of any entry.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.25e-3}


def random_mask(q_len: int, kv_len: int, num_spans: int, *, batch: int = 1, seed: int = 0) -> SpanMask:
    """Disjoint random spans; a row in ten is empty."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, 2 * num_spans)), axis=-1)
    edges[rng.random((batch, q_len)) < 0.1] = 0
    return SpanMask(edges[..., 0::2].transpose(0, 2, 1), edges[..., 1::2].transpose(0, 2, 1), kv_len)


def with_empty_rows(mask: SpanMask) -> SpanMask:
    keep = np.arange(mask.q_len) % 3 > 0
    keep[100:160] = False
    return SpanMask(mask.start * keep, mask.end * keep, mask.kv_len)


SINKS = SpanMask.sliding_window(ROWS, 45) | SpanMask(np.zeros((1, ROWS), int), np.arange(ROWS).clip(0, 3)[None], ROWS)
OWN = [[20, 120], [250, 350]]
MASKS = {
    "causal": SpanMask.causal(ROWS),
    "documents": SpanMask.documents(CUTS),
    "bidirectional": SpanMask.documents(CUTS, causal=False),
    "window": SpanMask.documents(CUTS, window=(30, 0)),
    "two-sided window": SpanMask.documents(CUTS, causal=False, window=(20, 9)),
    "own": SpanMask.documents([0, 3, 90, 400]).select(OWN, OWN),
    "others": SpanMask.documents([0, 3, 400], causal=False, window=(60, 25)).select(OWN, [[0, 20], [120, 250]]),
    "sinks": SINKS,
    "prefix": SpanMask.prefix_lm(CUTS, [0, 1, 10, 0, 21, 1, 4]),
    "shared prefix": SpanMask.shared_prefix(80, [60, 1, 59]),
    "empty rows": with_empty_rows(SpanMask.causal(ROWS)),
    "nothing": SpanMask(np.zeros((1, ROWS), int), np.zeros((1, ROWS), int), 300),
    "random": random_mask(ROWS, 500, 4),
    "batch": SpanMask.stack([SpanMask.causal(ROWS), SINKS]),
    # More queries than keys: full rows, then a start that grows, without a bound on one side.
    "clipped": SpanMask([[*[0] * 30, *range(7)]], [[7] * 37], 7),
    "few rows": random_mask(20, 33, 2, batch=2),
}
SHAPES = [(4, 2, 16, 24), (1, 1, 8, 8), (6, 2, 16, 16), (4, 4, 24, 20), (8, 1, 8, 40), (3, 1, 5, 3)]
KINDS = [*KERNELS, "sdpa, small tiles"]
USES = ["both", "out", "lse"]


def draw(mask: SpanMask, shape: tuple[int, ...], dtype: torch.dtype, uses: str = "both", batch: int = 2) -> Inputs:
    """Random inputs; a cotangent that is not used is 0, and that of the lse is nan in rows without a key."""
    heads, kv_heads, dim, v_dim = shape
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, generator=generator, dtype=torch.float64).to(dtype)

    q, k = normal(heads, mask.q_len, dim), normal(kv_heads, mask.kv_len, dim)
    v, grad_out = normal(kv_heads, mask.kv_len, v_dim), normal(heads, mask.q_len, v_dim)
    grad_lse = normal(heads, mask.q_len, 1).squeeze(-1).double()
    grad_out, grad_lse = grad_out * (uses != "lse"), grad_lse * (uses != "out")
    empty = torch.from_numpy(mask.area() == 0)[:, None]
    return Inputs(q, k, v, grad_out, grad_lse.masked_fill(empty, math.nan if uses != "out" else 0), None)


def check(
    inputs: Inputs, mask: SpanMask, got: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor], uses: str,
    options: dict[str, Any], factor: float = 1.0,
) -> None:  # fmt: skip
    """Out, lse and gradients against float64; exactly 0, or −inf, where nothing is read.

    Args:
        factor: of the tolerance; rounding a score of some thousands changes its weight as much.
    """
    dtype, visible = inputs.q.dtype, torch.from_numpy(mask.dense())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in got] == [dtype, wide] and got[0].shape == inputs.grad_out.shape
    want = expected(inputs, visible, {"bias": None} | options)
    cotangents = inputs.grad_out, inputs.grad_lse.to(wide)
    used = {"both": (0, 1), "out": (0,), "lse": (1,)}[uses]
    grads = torch.autograd.grad([got[i] for i in used], leaves, [cotangents[i] for i in used], materialize_grads=True)
    found = dict(zip(("out", "lse", "dq", "dk", "dv"), (*got, *grads), strict=True))
    unread = {"q": ~visible.any(2), "kv": ~visible.any(1)}
    for name, x in found.items():
        value, infinite = want.values[name], want.values[name].isinf()
        assert x.shape == value.shape and torch.equal(x.isinf(), infinite), name
        error = (x.detach().double() - value).masked_fill(infinite, 0).abs()
        assert not error.numel() or float(error.max()) <= factor * TOLERANCES[dtype] * want.sizes[name], name
        if name != "lse":
            zero = unread["q" if name in ("out", "dq") else "kv"][:, None, :, None]
            assert not x.masked_select(zero.expand(x.shape)).any(), name
    if uses == "lse":
        assert not found["dv"].any()


def possible(kind: str, cuts: Any, mask: str, shape: tuple[int, ...], dtype: torch.dtype, cap: Any, *_: Any) -> bool:
    if kind == "flex":
        return shape == SHAPES[0] and dtype in (torch.float32, torch.bfloat16)
    if kind == "varlen":
        return cap is None and mask != "random" and dtype != torch.float32
    return True


CELLS = covering(
    KINDS, [None, PARTS], list(MASKS), SHAPES, list(TOLERANCES), [None, 1.5], USES, ["contiguous", "strided"],
    possible=possible,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_exact(kind: str) -> None:
    """All cells of a kernel in one test, as those of flex share graphs. Autocast leaves "sdpa" as it is."""
    with contextlib.ExitStack() as stack, torch.autocast("cpu", torch.bfloat16, enabled="sdpa" in kind):
        if kind == "flex":
            stack.enter_context(dense_flex())
        if kind == "sdpa, small tiles":
            stack.enter_context(mock.patch.multiple(_tiles, **SMALL))
        for _, cuts, mask, shape, dtype, softcap, uses, strides in [cell for cell in CELLS if cell[0] == kind]:
            inputs = draw(MASKS[mask], shape, dtype, uses)
            leaves = [
                (x.transpose(1, 2).clone().transpose(1, 2) if strides == "strided" else x.clone()).requires_grad_()
                for x in inputs[:3]
            ]
            kernel, options = KERNELS[kind.split(",")[0]], AttentionOptions(0.3, None, softcap)
            try:
                got = attend(kernel, *leaves, MASKS[mask], options, cuts)
                check(inputs, MASKS[mask], got, leaves, uses, {"scale": 0.3, "softcap": softcap})
            except Exception as error:
                error.add_note(f"{cuts}, {mask}, {shape}, {dtype}, softcap {softcap}, {uses}, {strides}")
                raise


@given(data=st.data())
def test_any_spans(data: st.DataObject) -> None:
    """On the CPU, also without rows or keys."""
    kind = data.draw(st.sampled_from(["reference", "sdpa", "sdpa, small tiles"]))
    q_len, kv_len = data.draw(st.integers(0, 150), label="q_len"), data.draw(st.integers(0, 400), label="kv_len")
    mask = random_mask(q_len, kv_len, data.draw(st.integers(1, 6)), seed=data.draw(st.integers(0, 1000)))
    inputs = draw(mask, (2, 1, 4, 4), torch.float64, batch=1)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    with mock.patch.multiple(_tiles, **(SMALL if "small" in kind else USUAL)):
        cuts = data.draw(st.sampled_from([None, PARTS]))
        got = attend(KERNELS[kind.split(",")[0]], *leaves, mask, AttentionOptions(0.3), cuts)
        if q_len:
            check(inputs, mask, got, leaves, "both", {"scale": 0.3, "softcap": None})
        else:
            assert not any(x.any() for x in torch.autograd.grad(got, leaves, (inputs.grad_out, inputs.grad_lse)))


@pytest.mark.parametrize("cuts", [None, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex", "varlen"])
@pytest.mark.parametrize("size", [0.0, 1e-3, 100.0])
def test_scores_of_any_size(kernel: str, size: float, cuts: Any) -> None:
    """Equal scores, and scores of some thousands."""
    dtype = torch.float32 if kernel == "flex" else torch.float64
    inputs = draw(MASKS["sinks"], SHAPES[0], dtype)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    with dense_flex() if kernel == "flex" else contextlib.nullcontext():
        got = attend(KERNELS[kernel], *leaves, MASKS["sinks"], AttentionOptions(size), cuts)
        check(inputs, MASKS["sinks"], got, leaves, "both", {"scale": size, "softcap": None}, max(1, 20 * size))


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_nan_is_not_taken_for_an_empty_row(kernel: str) -> None:
    inputs = draw(SpanMask.causal(9), SHAPES[0], torch.float32)
    inputs.q[:, :, 4] = math.nan
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out, lse = attend(KERNELS[kernel], *leaves, SpanMask.causal(9), AttentionOptions(0.3))
    (dq,) = torch.autograd.grad(out, leaves[0], inputs.grad_out)
    assert all(x[:, :, 4].isnan().all() for x in (out, lse, dq))
    assert out[:, :, [*range(4), *range(5, 9)]].isfinite().all()


@pytest.mark.parametrize("mask", MASKS)
def test_max_logit(mask: str) -> None:
    inputs, spans = draw(MASKS[mask], SHAPES[0], torch.float64), MASKS[mask]
    for softcap in (None, 1.5):
        got = max_logit(inputs.q, inputs.k, *map(torch.tensor, (spans.start, spans.end)), scale=0.3, softcap=softcap)
        options = {"scale": 0.3, "softcap": softcap, "bias": None}
        want = expected(inputs, torch.from_numpy(spans.dense()), options).values["max_logit"]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)


def test_score_mod_that_masks_a_whole_row() -> None:
    inputs = draw(SpanMask.causal(6), SHAPES[0], torch.float64)
    q = inputs.q.clone().requires_grad_()

    def nothing_for_even_rows(score: torch.Tensor, b: Any, h: Any, q_idx: torch.Tensor, kv_idx: Any) -> torch.Tensor:
        return torch.where(q_idx % 2 == 0, -math.inf, score)

    options = AttentionOptions(0.3, nothing_for_even_rows)
    out, lse = attend(KERNELS["reference"], q, inputs.k, inputs.v, SpanMask.causal(6), options)
    assert not out[:, :, ::2].any() and (lse[:, :, ::2] == -math.inf).all() and out[:, :, 1::2].all()
    (dq,) = torch.autograd.grad((out, lse), q, (inputs.grad_out, inputs.grad_lse))
    assert not dq[:, :, ::2].any() and dq.isfinite().all()


# --- tiles: what is computed ----------------------------------------------------------------------------------------


def computed(mask: SpanMask, **sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each (query, key) pair is computed, and whether it is then masked, ``[Q, T]`` each."""
    count, is_masked = np.zeros((mask.q_len, mask.kv_len), int), np.zeros((mask.q_len, mask.kv_len), bool)
    for tile in plan_tiles(mask.start[0], mask.end[0], **sizes):
        assert 0 < tile.stop - tile.first <= sizes["max_rows"]
        for first, stop, masked in tile.runs:
            assert first < stop
            count[tile.first : tile.stop, first:stop] += 1
            is_masked[tile.first : tile.stop, first:stop] |= masked
    return count, is_masked


@given(
    st.sampled_from([*MASKS, "drawn"]), st.integers(0, 60), st.integers(1, 120), st.integers(1, 6), st.integers(0, 99)
)
def test_tiles_cover_the_mask_once_and_skip_unread_keys(
    name: str, q_len: int, kv_len: int, num_spans: int, seed: int
) -> None:
    mask = random_mask(q_len, kv_len, num_spans, seed=seed) if name == "drawn" else MASKS[name].row(0)
    want = mask.dense()[0]
    for sizes in (USUAL, SMALL):
        with mock.patch.multiple(_tiles, **sizes):
            count, is_masked = computed(mask, max_rows=16, min_saving=200)
            assert count.max(initial=0) <= 1
            assert (count[want] == 1).all(), "a pair of the mask is not computed"
            assert (is_masked | want)[count == 1].all(), "a pair outside the mask is computed and not masked"
            for tile in plan_tiles(mask.start[0], mask.end[0], max_rows=16, min_saving=200):
                rows = slice(tile.first, tile.stop)
                unread = np.diff(np.flatnonzero(~(count[rows].any(0) & ~want[rows].any(0)))) - 1
                assert unread.max(initial=0) <= _tiles._GAP, "a long gap between keys is computed"


ISLANDS = np.where(np.arange(2048) < 1024, 0, 4000)[None]


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (SpanMask.causal(2048), 2048 * 2049 / 2 + 2048 * 64),
        (SpanMask.sliding_window(2048, 299), 2048 * (300 + 128)),
        (SpanMask.documents([0, 300, 800, 1048, 2048]), (300**2 + 500**2 + 248**2 + 1000**2) / 2 + 2048 * 65),
        (SpanMask.shared_prefix(512, [700, 836]), 512**2 / 2 + 512 * 1536 + (700**2 + 836**2) / 2 + 2048 * 65),
        (SpanMask(ISLANDS, ISLANDS + 8, 4008), 2048 * 8),
    ],
    ids=["causal", "window", "documents", "shared prefix", "two islands"],
)
def test_tiles_waste_at_most_half_a_tile_a_row(mask: SpanMask, most: float) -> None:
    """Pairs computed at the sizes that the kernel uses for 8 heads of dim 64; documents are cut where they end."""
    assert computed(mask, max_rows=128, min_saving=2930)[0].sum() <= most


# --- operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [2, 8])
def test_opcheck(heads: int) -> None:
    """Two heads are a small problem, eight are not."""
    mask = with_empty_rows(SpanMask.causal(ROWS))
    inputs = draw(mask, (heads, heads // 2, 16, 24), torch.float32, batch=1)
    q, k, v, spans = *inputs[:3], [torch.from_numpy(x.copy()) for x in (mask.start, mask.end)]
    assert (len(list(tiles(q, k, *spans))) == 1) == (heads == 2)
    for softcap in (None, 2.0):
        torch.library.opcheck(torch.ops.spanwise.sdpa.default, (q, k, v, *spans, 0.3, softcap))
    results = attend(KERNELS["sdpa"], q, k, v, mask, AttentionOptions(0.3))
    grad_lse = None if heads == 2 else inputs.grad_lse.float().nan_to_num()
    arguments = (inputs.grad_out, grad_lse, q, k, v, *results, *spans, 0.3)
    torch.library.opcheck(torch.ops.spanwise.sdpa_backward.default, arguments)
