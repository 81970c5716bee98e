"""The CPU kernels, `reference` and `sdpa`, against a dense float64 oracle written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from spanwise.attention.kernels import _tiles
from spanwise.attention.kernels._tiles import max_logit, plan_tiles, tiles
from tests.kernel_calls import in_parts, reference, sdpa

Spans = tuple[torch.Tensor, torch.Tensor]
KERNELS = [
    pytest.param(kernel, id=name) for name, kernel in (("reference", reference), ("sdpa", sdpa), ("parts", in_parts))
]
# Sizes of tiles, and those with which short problems take every way of long ones.
SMALL = {"_LONG": 8, "_EVEN": 4, "_GAP": 2, "_MOST_KEYS": 16, "_MAX_ROWS": 16, "_MIN_SAVING": 50, "_MOST_SCORES": 0}
USUAL = {name: getattr(_tiles, name) for name in SMALL}


# --- masks ----------------------------------------------------------------------------------------------------------


def spans(*rows: list[tuple[int, int]]) -> Spans:
    """Span tensors `[1, N, Q]` from a list of spans for each row."""
    num = max([len(row) for row in rows] + [1])
    table = np.zeros((2, num, len(rows)), dtype=np.int32)
    for i, row in enumerate(rows):
        for n, span in enumerate(row):
            table[:, n, i] = span
    return torch.from_numpy(table[0][None]), torch.from_numpy(table[1][None])


def causal(size: int) -> Spans:
    return spans(*([(0, i + 1)] for i in range(size)))


def documents(*lengths: int, window: int = 1 << 30) -> Spans:
    offsets = np.cumsum((0, *lengths))
    return spans(
        *([(max(first, i - window + 1), i + 1)] for first, stop in pairwise(offsets) for i in range(first, stop))
    )


def window(size: int, left: int, right: int = 0) -> Spans:
    return spans(*([(max(0, i - left), min(size, i + right + 1))] for i in range(size)))


def window_and_globals(size: int, left: int, num_global: int) -> Spans:
    return spans(
        *([(0, i + 1)] if i - left <= num_global else [(0, num_global), (i - left, i + 1)] for i in range(size))
    )


def shared_prefix(prefix: int, *suffixes: int) -> Spans:
    rows = [[(0, i + 1)] for i in range(prefix)]
    first = prefix
    for length in suffixes:
        rows += [
            [(0, prefix), (first, i + 1)] if first > prefix else [(0, i + 1)] for i in range(first, first + length)
        ]
        first += length
    return spans(*rows)


def random_spans(q_len: int, kv_len: int, num_spans: int, seed: int) -> Spans:
    """Disjoint ascending spans, some rows with fewer or none."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(q_len):
        edges = np.sort(rng.choice(kv_len + 1, size=min(2 * num_spans, (kv_len + 1) // 2 * 2), replace=False))
        row = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        rows.append(row[: rng.integers(0, len(row) + 1)])
    return spans(*rows)


def batched(*masks: Spans) -> Spans:
    num = max(start.shape[1] for start, _ in masks)
    return tuple(
        torch.cat([F.pad(mask[side], (0, 0, 0, num - mask[side].shape[1])) for mask in masks]) for side in (0, 1)
    )


MASKS: dict[str, Spans] = {
    "causal": causal(333),
    "documents": documents(1, 40, 1, 1, 150, 17, 90, 1),
    "window": window(300, 60),
    "two_sided_window": window(300, 20, 30),
    "window_and_globals": window_and_globals(310, 45, 10),
    "shared_prefix": shared_prefix(100, 60, 1, 90),
    "some_rows_empty": spans(*([] if i % 3 == 0 or 100 <= i < 250 else [(i // 2, i + 1)] for i in range(300))),
    "all_rows_empty": spans(*([] for _ in range(140))),
    "random": random_spans(200, 160, 4, seed=0),
    "one_row": spans([(3, 9)]),
    "no_row": spans(),
    "batch": batched(causal(200), window_and_globals(200, 20, 5), spans(*([] for _ in range(200)))),
}


# --- oracle ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    mask: Spans
    scale: float = 0.3
    softcap: float | None = None

    def cast(self, dtype: torch.dtype) -> Case:
        return self._replace(**{name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "grad_out")})


def make_case(
    mask: Spans,
    *,
    batch: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int = 24,
    spare: int = 7,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    softcap: float | None = None,
) -> Case:
    start, end = mask
    batch = batch or start.shape[0]
    q_len, kv_len = start.shape[2], int(end.max().item() if end.numel() else 0) + spare
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)

    return Case(
        normal(batch, heads, q_len, dim),
        normal(batch, kv_heads, kv_len, dim),
        normal(batch, kv_heads, kv_len, v_dim),
        normal(batch, heads, q_len, v_dim),
        normal(batch, heads, q_len).double(),
        mask,
        dim**-0.5,
        softcap,
    )


Result = dict[str, torch.Tensor]


def dense(mask: Spans, kv_len: int) -> torch.Tensor:
    """bool `[B, 1, Q, T]`, cell by cell."""
    start, end = mask
    out = torch.zeros(start.shape[0], 1, start.shape[2], kv_len, dtype=torch.bool)
    for b, n, i in np.ndindex(*start.shape):
        out[b, 0, i, start[b, n, i] : end[b, n, i]] = True
    return out


def oracle(case: Case, dtype: torch.dtype = torch.float64) -> Result:
    """Forward and the written-out backward formulas, dense, row by row softmax."""
    q, k, v, grad_out = (x.to(dtype) for x in (case.q, case.k, case.v, case.grad_out))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    raw = torch.einsum("bhqd,bhtd->bhqt", q, k) * case.scale
    scores = raw if case.softcap is None else case.softcap * torch.tanh(raw / case.softcap)
    exp = torch.exp(scores) * dense(case.mask, k.shape[2])
    total = exp.sum(-1, keepdim=True)
    p = exp / total.masked_fill(total == 0, 1)
    out, lse = torch.einsum("bhqt,bhtd->bhqd", p, v), torch.log(total).squeeze(-1)
    dp = torch.einsum("bhqd,bhtd->bhqt", grad_out, v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True) + case.grad_lse[..., None].to(dtype)) * case.scale
    if case.softcap is not None:
        ds = ds * (1 - torch.tanh(raw / case.softcap) ** 2)
    dq = torch.einsum("bhqt,bhtd->bhqd", ds, k)
    dk = torch.einsum("bhqt,bhqd->bhtd", ds, q).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("bhqt,bhqd->bhtd", p, grad_out).unflatten(1, (-1, group)).sum(2)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def run(kernel: Callable, case: Case, use_lse: bool = True) -> Result:
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    out, lse = kernel(q, k, v, *case.mask, scale=case.scale, softcap=case.softcap)
    assert out.shape == case.grad_out.shape and out.dtype == case.q.dtype
    assert lse.shape == case.grad_lse.shape
    assert lse.dtype == (torch.float64 if case.q.dtype == torch.float64 else torch.float32)
    outputs, cotangents = (out, lse), (case.grad_out, case.grad_lse.to(lse.dtype))
    if not use_lse:
        outputs, cotangents = (out,), (case.grad_out,)
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), cotangents)
    for grad, x in ((dq, q), (dk, k), (dv, v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error over largest value; infinities must agree in place and sign."""
    if want.numel() == 0:
        return 0.0
    infinite = torch.isinf(want)
    assert torch.equal(got[infinite].double(), want[infinite])
    got, want = got.double().masked_fill(infinite, 0), want.masked_fill(infinite, 0)
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).nan_to_num(math.inf).item()


def assert_exact(got: Result, want: Result, tolerance: float = 1e-10) -> None:
    for name, value in want.items():
        assert relative_error(got[name], value) <= tolerance, name


# --- parity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_float64_is_exact(kernel: Callable, mask: str, softcap: float | None) -> None:
    case = make_case(MASKS[mask], softcap=softcap)
    assert_exact(run(kernel, case), oracle(case))


@pytest.mark.parametrize("mask", ["causal", "documents", "window_and_globals", "batch", "random"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_at_short_lengths(kernel: Callable, mask: str) -> None:
    case = make_case(MASKS[mask], dtype=torch.float32)
    got, want, plain = run(kernel, case), oracle(case), oracle(case, torch.float32)
    for name, value in want.items():
        # Processors differ in how their matrix products round: twice the error of plain float32 is enough.
        rounding = (plain[name].double() - value).nan_to_num(0, 0, 0).abs().max().item()
        torch.testing.assert_close(
            got[name].double(), value, atol=max(2e-6, 2 * rounding), rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    ("mask", "heads", "kv_heads", "dim", "v_dim"),
    [("causal", 1, 1, 8, 8), ("documents", 6, 2, 16, 16), ("window", 4, 4, 24, 8), ("shared_prefix", 8, 1, 8, 40)],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_head_shapes(kernel: Callable, mask: str, heads: int, kv_heads: int, dim: int, v_dim: int) -> None:
    case = make_case(MASKS[mask], batch=2, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    assert_exact(run(kernel, case), oracle(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_keys(kernel: Callable) -> None:
    """More keys than one call takes, with rows that are fully masked in the first ones."""
    rows = [[(0, 10), (6000 + i, 9000)] if i % 2 else [(8000 - i, 9000)] for i in range(140)]
    case = make_case(spans(*rows), heads=2, kv_heads=1, dim=8, v_dim=8)
    assert_exact(run(kernel, case), oracle(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_zero_averages(kernel: Callable) -> None:
    case = make_case(MASKS["documents"])._replace(scale=0.0)
    assert_exact(run(kernel, case), oracle(case))


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_far_from_zero(kernel: Callable, size: int) -> None:
    """Softmax must not overflow or underflow: scores around +-2000."""
    case = make_case(causal(size))
    case = case._replace(q=case.q * 500)
    got = run(kernel, case)
    q, k = case.q, case.k.repeat_interleave(2, 1)
    want = (q @ k.mT * case.scale).masked_fill(~dense(case.mask, k.shape[2]), -math.inf)
    assert relative_error(got["lse"], torch.logsumexp(want, -1)) <= 1e-10
    assert relative_error(got["out"], torch.softmax(want, -1) @ case.v.repeat_interleave(2, 1)) <= 1e-10
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("kernel", KERNELS)
@given(data=st.data())
def test_any_spans(kernel: Callable, data: st.DataObject) -> None:
    q_len, kv_len = data.draw(st.integers(0, 150), label="q_len"), data.draw(st.integers(1, 400), label="kv_len")
    num_spans, seed = data.draw(st.integers(1, 6), label="num_spans"), data.draw(st.integers(0, 1000), label="seed")
    case = make_case(random_spans(q_len, kv_len, num_spans, seed), heads=2, kv_heads=1, dim=4, v_dim=4)
    with mock.patch.multiple(_tiles, **(SMALL if data.draw(st.booleans(), label="small tiles") else USUAL)):
        assert_exact(run(kernel, case), oracle(case))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", MASKS)
def test_small_tiles(mask: str, softcap: float | None) -> None:
    case = make_case(MASKS[mask], softcap=softcap)
    with mock.patch.multiple(_tiles, **SMALL):
        assert_exact(run(sdpa, case), oracle(case))


# --- empty problems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_without_keys_are_exactly_zero(kernel: Callable) -> None:
    case = make_case(MASKS["some_rows_empty"], dtype=torch.float32)
    got = run(kernel, case)
    empty = ~dense(case.mask, case.k.shape[2]).any(-1)[0, 0]
    assert empty.sum() > 100
    assert (got["lse"][:, :, empty] == -math.inf).all()
    assert (got["out"][:, :, empty] == 0).all() and (got["dq"][:, :, empty] == 0).all()
    unread = ~dense(case.mask, case.k.shape[2]).any(2)[0, 0]
    assert unread.any() and (got["dk"][:, :, unread] == 0).all() and (got["dv"][:, :, unread] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_without_keys_ignores_the_cotangent_of_its_lse(kernel: Callable) -> None:
    """A merge of partial results may well send nan there: its lse is -inf."""
    case = make_case(MASKS["some_rows_empty"])
    empty = ~dense(case.mask, case.k.shape[2]).any(-1)[0, 0]
    grad_lse = case.grad_lse.clone()
    grad_lse[:, :, empty] = math.nan
    got = run(kernel, case._replace(grad_lse=grad_lse))
    assert_exact(got, oracle(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_is_not_taken_for_an_empty_row(kernel: Callable) -> None:
    case = make_case(causal(9), dtype=torch.float32)
    case.q[:, :, 4] = math.nan
    got = run(kernel, case)
    assert got["out"][:, :, 4].isnan().all() and got["lse"][:, :, 4].isnan().all() and got["dq"][:, :, 4].isnan().all()
    assert got["out"][:, :, [*range(4), *range(5, 9)]].isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_any_key(kernel: Callable) -> None:
    case = make_case(spans(*([] for _ in range(5))), spare=0)
    assert case.k.shape[2] == 0
    got = run(kernel, case)
    assert (got["out"] == 0).all() and (got["lse"] == -math.inf).all() and (got["dq"] == 0).all()


# --- other dtypes, layouts, lengths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_permuted_inputs(kernel: Callable) -> None:
    case = make_case(MASKS["shared_prefix"], batch=2)

    def permuted(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    strided = case._replace(q=permuted(case.q), k=permuted(case.k), v=case.v.mT.contiguous().mT)
    strided = strided._replace(grad_out=permuted(case.grad_out), mask=tuple(x.mT.contiguous().mT for x in case.mask))
    assert not any(x.is_contiguous() for x in (*strided[:4], *strided.mask))
    assert_exact(run(kernel, strided), oracle(case))


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_alone_and_lse_alone_are_differentiable(kernel: Callable) -> None:
    case = make_case(MASKS["documents"])
    assert_exact(run(kernel, case, use_lse=False), oracle(case._replace(grad_lse=torch.zeros_like(case.grad_lse))))
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    _, lse = kernel(q, k, v, *case.mask, scale=case.scale)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), case.grad_lse, materialize_grads=True)
    want = oracle(case._replace(q=q.detach(), k=k.detach(), v=v.detach(), grad_out=torch.zeros_like(case.grad_out)))
    assert relative_error(dq, want["dq"]) <= 1e-10 and relative_error(dk, want["dk"]) <= 1e-10
    assert (dv == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "tolerance"), [(4, 2.5e-2), (1, 3.5e-2)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_reduced_precision(kernel: Callable, kv_heads: int, tolerance: float, dtype: torch.dtype) -> None:
    case = make_case(MASKS["window_and_globals"], kv_heads=kv_heads, dim=32, v_dim=32, dtype=dtype)
    got, want = run(kernel, case), oracle(case)
    for name, value in want.items():
        torch.testing.assert_close(got[name].double(), value, atol=tolerance, rtol=tolerance)


def test_float32_error_at_long_lengths_is_that_of_torch() -> None:
    """Root mean square and largest error, each within 2x of torch's own CPU kernel."""
    size = 2000
    case = make_case(causal(size), heads=2, kv_heads=2, dim=32, v_dim=32, spare=0, dtype=torch.float32)
    case = case._replace(grad_lse=torch.zeros_like(case.grad_lse))
    got, want = run(sdpa, case), oracle(case)
    q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.scale)
    torch_got = dict(
        zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out, (q, k, v), case.grad_out)), strict=True)
    )
    for name, value in torch_got.items():
        ours, theirs = (got[name].double() - want[name]).abs(), (value.detach().double() - want[name]).abs()
        assert ours.max() <= 2 * theirs.max(), name
        assert ours.square().mean() <= 4 * theirs.square().mean(), name
    torch.testing.assert_close(got["lse"].double(), want["lse"], atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", MASKS)
def test_max_logit(mask: str, softcap: float | None) -> None:
    case = make_case(MASKS[mask], softcap=softcap)
    got = max_logit(case.q, case.k, *case.mask, scale=case.scale, softcap=softcap)
    scores = case.q @ case.k.repeat_interleave(2, 1).mT * case.scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense(case.mask, case.k.shape[2]), -math.inf)
    want = scores.transpose(0, 1).flatten(1).amax(1) if scores.numel() else torch.full((4,), -math.inf).double()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)


# --- score_mod ------------------------------------------------------------------------------------------------------


def test_score_mod_sees_global_positions() -> None:
    mask = batched(causal(40), window(40, 9))
    case = make_case(mask)
    gen = torch.Generator().manual_seed(1)
    q_pos = torch.randint(0, 1000, (2, 40), generator=gen)
    kv_pos = torch.randint(0, 1000, (2, case.k.shape[2]), generator=gen)
    slopes, table = torch.rand(4, generator=gen).double(), torch.rand(1000, generator=gen).double()
    slopes.requires_grad_()

    def alibi(score, b, h, q_idx, kv_idx):
        return score * (b + 1) + slopes[h] * (q_idx - kv_idx).abs() / 100 + table[kv_idx]

    q = case.q.requires_grad_()
    out, lse = reference(q, case.k, case.v, *mask, scale=0.3, score_mod=alibi, q_pos=q_pos, kv_pos=kv_pos)
    distance = (q_pos[:, None, :, None] - kv_pos[:, None, None, :]).abs()
    scores = q @ case.k.repeat_interleave(2, 1).mT * 0.3 * torch.tensor([1, 2])[:, None, None, None]
    scores = scores + slopes[:, None, None] * distance / 100 + table[kv_pos][:, None, None]
    scores = scores.masked_fill(~dense(mask, case.k.shape[2]), -math.inf)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ case.v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad((out, lse), (q, slopes), (case.grad_out, case.grad_lse), retain_graph=True)
    want = torch.autograd.grad(
        (torch.softmax(scores, -1) @ case.v.repeat_interleave(2, 1), torch.logsumexp(scores, -1)),
        (q, slopes),
        (case.grad_out, case.grad_lse),
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_score_mod_that_masks_a_whole_row() -> None:
    case = make_case(causal(6))
    q = case.q.requires_grad_()

    def nothing_for_even_rows(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx % 2 == 0, -math.inf, score)

    out, lse = reference(q, case.k, case.v, *case.mask, scale=0.3, score_mod=nothing_for_even_rows)
    assert (out[:, :, ::2] == 0).all() and (lse[:, :, ::2] == -math.inf).all() and (out[:, :, 1::2] != 0).all()
    (dq,) = torch.autograd.grad((out, lse), q, (case.grad_out, case.grad_lse))
    assert (dq[:, :, ::2] == 0).all() and dq.isfinite().all()


# --- the plan: what is computed -------------------------------------------------------------------------------------


def computed(mask: Spans, kv_len: int, **sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each (query, key) pair is computed, and whether it is then masked, `[Q, T]` each."""
    start, end = (x[0].numpy() for x in mask)
    count = np.zeros((start.shape[1], kv_len), dtype=int)
    is_masked = np.zeros_like(count, dtype=bool)
    sizes = {"max_rows": 16, "min_saving": 200, **sizes}
    for tile in plan_tiles(start, end, **sizes):
        assert 0 < tile.stop - tile.first <= sizes["max_rows"]
        for first, stop, masked in tile.runs:
            assert first < stop
            count[tile.first : tile.stop, first:stop] += 1
            is_masked[tile.first : tile.stop, first:stop] |= masked
    return count, is_masked


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "batch"])
def test_plan_covers_the_mask_once_and_skips_unread_keys(mask: str) -> None:
    check_plan(MASKS[mask])


@given(st.integers(0, 60), st.integers(1, 120), st.integers(1, 6), st.integers(0, 10_000))
def test_plan_of_any_spans(q_len: int, kv_len: int, num_spans: int, seed: int) -> None:
    for sizes in (USUAL, SMALL):
        with mock.patch.multiple(_tiles, **sizes):
            check_plan(random_spans(q_len, kv_len, num_spans, seed))


def check_plan(mask: Spans) -> None:
    kv_len = int(mask[1].max().item() if mask[1].numel() else 0) + 3
    want = dense(mask, kv_len)[0, 0].numpy()
    count, is_masked = computed(mask, kv_len)
    assert count.max(initial=0) <= 1
    assert (count[want] == 1).all(), "a pair of the mask is not computed"
    assert (is_masked | want)[count == 1].all(), "a pair outside the mask is computed and not masked"
    for tile in plan_tiles(*(x[0].numpy() for x in mask), max_rows=16, min_saving=200):
        rows = slice(tile.first, tile.stop)
        unread = np.diff(np.flatnonzero(~(count[rows].any(0) & ~want[rows].any(0)))) - 1
        assert unread.max(initial=0) <= _tiles._GAP, "a long gap between keys is computed"


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (causal(2048), 2048 * 2049 / 2 + 2048 * 64),
        (window(2048, 299), 2048 * (300 + 128)),
        (window_and_globals(2048, 299, 64), 2048 * (300 + 128 + 64)),
        (documents(300, 500, 248, 1000), (300**2 + 500**2 + 248**2 + 1000**2) / 2 + 2048 * 65),
        (shared_prefix(512, 700, 836), 512**2 / 2 + 512 * 1536 + (700**2 + 836**2) / 2 + 2048 * 65),
        (spans(*([(0, 8)] if i < 1024 else [(4000, 4008)] for i in range(2048))), 2048 * 8),
    ],
    ids=["causal", "window", "window_and_globals", "documents", "shared_prefix", "two_islands"],
)
def test_plan_wastes_at_most_half_a_tile_a_row(mask: Spans, most: float) -> None:
    """Pairs computed at the sizes that the kernel uses for 8 heads of dim 64; documents are cut where they end."""
    count, _ = computed(mask, int(mask[1].max()), max_rows=128, min_saving=2930)
    assert count.sum() <= most


def test_sdpa_computes_only_what_is_planned() -> None:
    """A tile of 128 rows reads 128 + 255 keys."""
    q, k = torch.empty(1, 1, 4096, 8), torch.empty(1, 1, 4096, 8)
    pairs = [
        (rows.stop - rows.start) * (piece.stop - piece.first)
        for _, rows, pieces in tiles(q, k, *window(4096, 255))
        for piece in pieces
    ]
    assert 4096 * 250 < sum(pairs) < 4096 * (256 + 128)


def test_tiles_share_masks() -> None:
    q, k = torch.empty(1, 1, 4096, 8), torch.empty(1, 1, 4096, 8)
    masks = {id(piece.bias) for _, _, pieces in tiles(q, k, *causal(4096)) for piece in pieces}
    assert len(masks) <= 8


# --- as an operator -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by opcheck itself, torch 2.14 on
@pytest.mark.parametrize("heads", [2, 4])
def test_opcheck(heads: int) -> None:
    """Two heads are a small problem, four are not."""
    case = make_case(MASKS["some_rows_empty"], dtype=torch.float32, heads=heads, kv_heads=heads // 2)
    assert (len(list(tiles(case.q, case.k, *case.mask))) == 1) == (heads == 2)
    q, k, v = case.q, case.k, case.v
    torch.library.opcheck(torch.ops.spanwise.sdpa.default, (q, k, v, *case.mask, 0.3, None))
    torch.library.opcheck(torch.ops.spanwise.sdpa.default, (q, k, v, *case.mask, 0.3, 2.0))
    out, lse = sdpa(q, k, v, *case.mask, scale=0.3)
    grad_lse = None if heads == 2 else case.grad_lse.float()
    args = (case.grad_out, grad_lse, q, k, v, out, lse, *case.mask, 0.3)
    torch.library.opcheck(torch.ops.spanwise.sdpa_backward.default, args)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
def test_compiles_fullgraph_for_any_mask_and_key_length() -> None:
    """Ten problems that differ in mask, number of spans and keys: few graphs, same results as eager."""
    graphs = 0

    def count_graphs(gm: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return gm

    def attend(q, k, v, start, end):
        out, lse = sdpa(q, k, v, start, end, scale=0.25)
        return out * 2, lse

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=count_graphs, dynamic=True)
    for i in range(10):
        case = make_case(random_spans(200, 160 + 10 * i, 2 + i % 4, seed=i), spare=5, dtype=torch.float32, seed=i)
        q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
        results = [fn(q, k, v, *case.mask) for fn in (attend, compiled)]
        grads = [torch.autograd.grad(r, (q, k, v), (case.grad_out, case.grad_lse.float())) for r in results]
        for a, b in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            assert torch.equal(a, b)
    assert graphs <= 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
def test_compiles_with_aot_autograd() -> None:
    case = make_case(MASKS["window_and_globals"], dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    got, want = (run(fn, case) for fn in (compiled, sdpa))
    for name, value in want.items():
        assert torch.equal(got[name], value)


def test_selective_checkpointing_sees_the_operator() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.spanwise.sdpa.default:
            calls.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    case = make_case(MASKS["documents"], dtype=torch.float32)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def attend(q, k, v):
        return sdpa(q * 2, k, v, *case.mask, scale=0.3)[0]

    out = checkpoint(
        attend, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    got = torch.autograd.grad(out, (q, k, v), case.grad_out)
    want = torch.autograd.grad(attend(q, k, v), (q, k, v), case.grad_out)
    assert calls[0] is False
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# --- benchmark ------------------------------------------------------------------------------------------------------


def test_benchmark_measures_against_the_floor() -> None:
    from benchmarks.kernels import masks, measure

    rows = {row["mask"]: row for row in measure(tokens=256, heads=2, dim=8, repeats=1)}
    assert rows.keys() == masks(256).keys()
    assert rows["causal"]["blocks"] == 3 and rows["causal"]["flops"] == 14 * 8 * 2 * 256 * 257 // 2
    assert rows["documents"]["baseline"] == "torch, loop over documents"
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / row["baseline_seconds"]) and row["seconds"] > 0
