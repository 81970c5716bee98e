"""The varlen kernel without a GPU: rounds, merge and gradients around a plain-torch stand-in for torch's kernel."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spanwise
from spanwise import SpanMask
from spanwise.attention.kernels import varlen as module
from spanwise.attention.kernels._rounds import Flash, backward, forward
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.merge import with_lse_gradient
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kernels.varlen import FLASH, Varlen, VarlenTables
from tests.kernel_calls import reference
from tests.oracle import make_problem, relative_error
from tests.simulated import all_ranks

NAN = float("nan")


# --- the stand-in ---------------------------------------------------------------------------------------------------


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What the kernel computes in: float32 for half precision."""
    return [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in tensors]


def _sequences(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
    found = []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        if q1 > q0 and k1 > k0:
            assert q1 - q0 <= max_q and k1 - k0 <= max_k
            found.append((slice(q0, q1), slice(k0, k1)))
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, window: tuple[int, int], max_k: int) -> torch.Tensor:
    """Scores ``[H, n, m]`` of one sequence, aligned at the bottom right."""
    num_q, num_k = q.shape[0], k.shape[0]
    scores = scale * torch.einsum("nhd,mhd->hnm", q, k)
    if window == (-1, -1):
        return scores
    left, right = (max_k if not 0 <= bound < max_k else bound for bound in window)
    diagonal = torch.arange(num_q).unsqueeze(1) + num_k - num_q
    key = torch.arange(num_k)
    return scores.masked_fill((key < diagonal - left) | (key > diagonal + right), float("-inf"))


def stand_in_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN and +inf in rows without keys: nothing may be made of them."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0  # as flash demands
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v = _wide(q, k, v)
    out, lse = torch.full_like(q, NAN), torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=q.dtype)
    for rows, keys in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(q[rows], k[keys].repeat_interleave(group, 1), scale, window, max_k)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[keys].repeat_interleave(group, 1))
    return out.to(dtype), lse


def stand_in_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention-2's backward; NaN where a row has no keys or a key no queries."""
    assert lse.dtype == _wide(q)[0].dtype and lse.is_contiguous()  # as flash demands
    kv_heads, group, dtype = k.shape[1], q.shape[1] // k.shape[1], q.dtype
    grad_out, q, k, v, out = _wide(grad_out, q, k, v, out)
    delta = (grad_out * out).sum(-1).T
    dq, dk, dv = (torch.full_like(x, NAN) for x in (q, k, v))
    for rows, keys in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        each_k, each_v = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        p = (_scores(q[rows], each_k, scale, window, max_k) - lse[:, rows, None]).exp()
        ds = p * (torch.einsum("nhd,mhd->hnm", grad_out[rows], each_v) - delta[:, rows, None]) * scale
        dq[rows] = torch.einsum("hnm,mhd->nhd", ds, each_k)
        dk[keys] = torch.einsum("hnm,nhd->mhd", ds, q[rows]).unflatten(1, (kv_heads, group)).sum(2)
        dv[keys] = torch.einsum("hnm,nhd->mhd", p, grad_out[rows]).unflatten(1, (kv_heads, group)).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def attend_rounds(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: VarlenTables, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.empty(1, 1, 0, dtype=torch.int32)  # the tables hold the mask
    return Varlen().attend(q, k, v, Chunk(nothing, nothing, nothing, tables), nothing, AttentionOptions(scale))


# The operators have kernels for CUDA alone; these are for the CPU, registered as any backend's would be.
STAND_IN = Flash(stand_in_forward, stand_in_backward)
module._varlen.register_kernel("cpu", lambda *x: forward(STAND_IN, *x[:3], x[3:-1], x[-1]))
module._varlen_backward.register_kernel("cpu", lambda *x: backward(STAND_IN, *x[:7], x[7:-1], x[-1]))


# --- against the reference ------------------------------------------------------------------------------------------


def random_mask(batch: int, q_len: int, kv_len: int, num: int, seed: int = 0) -> SpanMask:
    """Disjoint random spans; a row in ten is empty."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, 2 * num)), axis=-1)
    edges[rng.random((batch, q_len)) < 0.1] = 0
    return SpanMask(edges[..., 0::2].transpose(0, 2, 1), edges[..., 1::2].transpose(0, 2, 1), kv_len)


CUTS = [0, 1, 2, 30, 30, 61, 64, 90]
OWN, OTHERS = [[10, 35], [55, 80]], [[0, 10], [35, 55], [80, 90]]
MASKS = {
    "causal": SpanMask.causal(70),
    "documents": SpanMask.documents(CUTS),
    "documents_own": SpanMask.documents(CUTS).select(OWN, OWN),
    "documents_others": SpanMask.documents([0, 3, 90]).select(OWN, OTHERS),
    "bidirectional": SpanMask.documents(CUTS, causal=False),
    "window": SpanMask.documents(CUTS, window=(12, 0)),
    "two_sided_window": SpanMask.documents(CUTS, causal=False, window=(7, 4)),
    "window_others": SpanMask.documents([0, 3, 90], causal=False, window=(30, 12)).select(OWN, OTHERS),
    # Full rows, then a start that grows: more queries than keys, and no bound on one side.
    "clipped": SpanMask(np.r_[np.zeros(30, int), np.arange(7)][None], np.full((1, 37), 7), 7),
    "prefix": SpanMask.prefix_lm(CUTS, [0, 1, 10, 0, 31, 1, 4]),
    "sinks": SpanMask.sliding_window(60, 9) | SpanMask(np.zeros((1, 60), int), np.arange(60).clip(0, 3)[None], 60),
    "random": random_mask(1, 20, 33, 2),
    "batched": random_mask(2, 20, 33, 1, seed=1),
    "nothing": SpanMask(np.zeros((1, 9), int), np.zeros((1, 9), int), 5),
}


def problem(
    mask: SpanMask,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    v_dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor], VarlenTables]:
    """q, k and v of two batch rows as leaves; spans; tables."""
    gen = torch.Generator().manual_seed(0)
    lengths = ((heads, mask.q_len, dim), (kv_heads, mask.kv_len, dim), (kv_heads, mask.kv_len, v_dim))
    leaves = [torch.randn((2, *shape), generator=gen, dtype=torch.float64).to(dtype) for shape in lengths]
    spans = (torch.from_numpy(mask.start.copy()), torch.from_numpy(mask.end.copy()))
    tables = VarlenTables.of(mask)
    return [x.requires_grad_() for x in leaves], spans, tables


def gradients(leaves: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor, uses: str) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    grad_out, grad_lse = (torch.randn(x.shape, generator=gen, dtype=torch.float64) for x in (out, lse))
    if uses != "lse":
        loss = loss + (out * grad_out).sum()
    if uses != "out":
        loss = loss + (torch.where(lse.isinf(), 0, lse) * grad_lse).sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("uses", ["out", "lse", "both"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_reference(name: str, uses: str) -> None:
    leaves, spans, tables = problem(MASKS[name])
    got, want = attend_rounds(*leaves, tables, scale=0.3), reference(*leaves, *spans, scale=0.3)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    grads = zip(gradients(leaves, *got, uses), gradients(leaves, *want, uses), strict=True)
    for x, y in grads:
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dim", "v_dim"), [(24, 16), (8, 20), (5, 3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (3, 1)])
def test_head_dims_and_heads(dim: int, v_dim: int, heads: int, kv_heads: int) -> None:
    sizes: dict[str, Any] = dict(heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    leaves, spans, tables = problem(MASKS["window_others"], **sizes)
    got, want = attend_rounds(*leaves, tables, scale=0.3), reference(*leaves, *spans, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for x, y in zip(gradients(leaves, *got, "both"), gradients(leaves, *want, "both"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("uses", ["out", "lse", "both"])
@pytest.mark.parametrize("name", ["documents_others", "sinks", "nothing"])
def test_half_precision(name: str, uses: str, dtype: torch.dtype) -> None:
    """In the dtypes that the kernel takes: gradients as near as rounding allows, also of the lse alone."""
    leaves, spans, tables = problem(MASKS[name], dim=16, v_dim=16, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, want = attend_rounds(*leaves, tables, scale=0.3), reference(*wide, *spans, scale=0.3)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)
    pairs = [(got[0], want[0]), *zip(gradients(leaves, *got, uses), gradients(wide, *want, uses), strict=True)]
    for x, y in pairs:
        assert x.dtype == dtype and x.isfinite().all()
        assert (x.double() - y).norm() <= torch.finfo(dtype).eps * y.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_gradient_of_lse_in_half_precision(dtype: torch.dtype, size: float) -> None:
    """What the kernel computes for delta is right to the dtype's precision, whatever the sizes of the two gradients."""
    gen = torch.Generator().manual_seed(0)
    out, grad_out = (torch.randn(1, 2, 50, 16, generator=gen).to(dtype) for _ in range(2))
    grad_out = grad_out * size
    grad_lse = torch.randn(1, 2, 50, generator=gen)
    grad_lse[..., :3] = 0
    new_grad, new_out = with_lse_gradient(grad_out, out, grad_lse)
    assert new_grad.dtype == new_out.dtype == dtype and new_out.isfinite().all()
    eps = torch.finfo(dtype).eps
    want = (grad_out.double() * out.double()).sum(-1) - grad_lse.double()
    got = (new_grad.double() * new_out.double()).sum(-1)
    assert ((got - want).abs() <= eps * want.abs() + 1e-7).all()
    # The other uses of grad_out see it unchanged, within what rounding does to a row's gradient.
    changed = (new_grad.double() - grad_out.double()).abs().amax(-1)
    assert (changed <= eps / 8 * want.abs()).all()
    assert (new_grad[..., 1:] == grad_out[..., 1:]).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by opcheck itself, torch 2.14 on
def test_operators_are_well_formed() -> None:
    leaves, _, tables = problem(MASKS["documents_others"])
    fields = [tables.calls, tables.cu_seq_q, tables.cu_seq_k, tables.rows, tables.keys]
    torch.library.opcheck(torch.ops.spanwise.varlen, (*(x.nan_to_num().detach() for x in leaves), *fields, 0.3))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
def test_masks_share_a_graph() -> None:
    """Rounds are contents: other windows and other numbers of calls and sequences compile nothing."""
    graphs = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(partial(attend_rounds, scale=0.3), backend=backend, fullgraph=True)
    for mask in (SpanMask.causal(40), MASKS["nothing"], random_mask(1, 40, 40, 2), SpanMask.full(40)):
        if mask.q_len != 40:
            mask = SpanMask(np.zeros((1, 40), int), np.zeros((1, 40), int), 40)
        leaves, spans, tables = problem(mask)
        got, want = compiled(*leaves, tables), reference(*leaves, *spans, scale=0.3)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        for x, y in zip(gradients(leaves, *got, "both"), gradients(leaves, *want, "both"), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)
    assert graphs == 1


def test_torch_has_the_operators() -> None:
    """The calls of torch's kernel, forward and backward, on tensors without data, on a pretended CUDA device."""
    with FakeTensorMode():
        q, k = (torch.empty(9, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        for window in ((-1, -1), (-1, 0), (0, -1), (5, 2)):
            options = (offsets, offsets, 9, 9, 0.3, window)
            out, lse = FLASH.forward(q, k, k, *options)
            assert (out.shape, out.dtype) == (q.shape, q.dtype)
            assert (lse.shape, lse.dtype) == ((4, 9), torch.float32)
            grads = FLASH.backward(out, q, k, k, out, lse, *options)
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("exchange", [{"exchange": "all_gather"}, {"exchange": "needed", "stages": 2}])
@pytest.mark.parametrize("name", ["documents", "window", "two_sided_window"])
def test_every_rank_of_a_plan(name: str, exchange: dict[str, Any], num_ranks: int) -> None:
    mask = MASKS[name]
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", **exchange)
    inputs = make_problem(mask.dense(), heads=(4, 2), dims=(24, 16), dtype=torch.float64)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out = all_ranks(plan, *leaves, kernel="varlen")
    out.backward(inputs.grad_out)
    for got, want in zip((out, *(x.grad for x in leaves)), (inputs.out, *inputs[6:9]), strict=True):
        assert relative_error(got.detach(), want) <= 1e-10


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    leaves, spans, tables = problem(MASKS["causal"])
    chunk = Chunk(*spans, torch.arange(leaves[1].shape[2])[None], tables)
    with pytest.raises(ValueError, match="cannot apply a softcap; use kernel='flex'"):
        Varlen().check(*leaves, chunk, AttentionOptions(softcap=3.0))
    with pytest.raises(ValueError, match="cannot apply a score_mod; use kernel='flex'"):
        Varlen().check(*leaves, chunk, AttentionOptions(score_mod=lambda score, *_: score))
    with pytest.raises(ValueError, match="runs on CUDA, the tensors are on cpu"):
        Varlen().check_device(torch.device("cpu"), None)


def test_refusals_of_cuda_tensors() -> None:
    """Fake tensors on CUDA: the checks read nothing that needs the device."""
    with FakeTensorMode():

        def on_cuda(dtype: torch.dtype, dim: int, v_dim: int) -> list[torch.Tensor]:
            return [torch.empty(1, 2, 9, d, dtype=dtype, device="cuda") for d in (dim, dim, v_dim)]

        spans = [torch.zeros(1, 1, 9, dtype=torch.int32, device="cuda")] * 2
        rows = torch.zeros(0, 1, 9, dtype=torch.bool)
        offsets = torch.zeros(0, dtype=torch.int32)
        tables = VarlenTables(torch.zeros(0, 5, dtype=torch.int64), offsets, offsets, rows, rows)
        kernel, chunk = KERNELS["varlen"], SimpleNamespace(start=spans[0], end=spans[1], tables=tables)
        kernel.check(*on_cuda(torch.bfloat16, 192, 128), chunk, AttentionOptions())
        with pytest.raises(ValueError, match="takes bfloat16 or float16, got torch.float32"):
            kernel.check(*on_cuda(torch.float32, 64, 64), chunk, AttentionOptions())
        with pytest.raises(ValueError, match=r"head dims up to 256, got 64 \(q, k\) and 288 \(v\)"):
            kernel.check(*on_cuda(torch.bfloat16, 64, 288), chunk, AttentionOptions())


def test_too_many_sequences_are_refused() -> None:
    mask = SpanMask.documents(list(range(41)))
    tables, many = VarlenTables.of(mask), [torch.zeros(2000, 1, 40, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="65535 sequences in a call, got 80000"):
        attend_rounds(*many, tables, scale=0.3)
