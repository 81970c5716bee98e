"""The varlen kernel on a CUDA device: against the dense oracle, forward and backward; steps that never wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import spanwise
from spanwise import SpanMask
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.varlen import Varlen, VarlenTables
from tests.kernel_calls import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # those of torch and Triton releases are not ours to fix
]

DEVICE = "cuda"
LENGTH = 1000
CUTS = [0, 1, 2, 130, 131, 640, 900, LENGTH]
OWN, OTHERS = [[100, 400], [600, 900]], [[0, 100], [400, 600], [900, LENGTH]]


def attend_rounds(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: VarlenTables, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.empty(1, 1, 0, dtype=torch.int32, device=q.device)  # the tables hold the mask
    return Varlen().attend(q, k, v, Chunk(nothing, nothing, nothing, tables), nothing, AttentionOptions(scale))


def random_mask(batch: int, q_len: int, kv_len: int, num: int) -> SpanMask:
    """Disjoint random spans; a row in ten is empty."""
    rng = np.random.default_rng(0)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, 2 * num)), axis=-1)
    edges[rng.random((batch, q_len)) < 0.1] = 0
    return SpanMask(edges[..., 0::2].transpose(0, 2, 1), edges[..., 1::2].transpose(0, 2, 1), kv_len)


MASKS = {
    "causal": SpanMask.causal(LENGTH),
    "documents": SpanMask.documents(CUTS),
    "bidirectional": SpanMask.documents(CUTS, causal=False),
    "window": SpanMask.documents(CUTS, window=(128, 0)),
    "two_sided_window": SpanMask.documents(CUTS, causal=False, window=(100, 60)),
    "documents_others": SpanMask.documents([0, 50, LENGTH]).select(OWN, OTHERS),
    "window_others": SpanMask.documents([0, 50, LENGTH], causal=False, window=(350, 150)).select(OWN, OTHERS),
    # A window without a bound to the right over fewer keys than queries.
    "clipped": SpanMask(np.r_[np.zeros(300, int), np.arange(10)][None], np.full((1, 310), 10), 10),
    "prefix": SpanMask.prefix_lm(CUTS, [0, 1, 10, 0, 31, 1, 100]),
    "random": random_mask(1, 40, 300, 2),
    "batched": random_mask(2, 40, 300, 1),
    "nothing": SpanMask(np.zeros((1, 9), int), np.zeros((1, 9), int), 300),
}


def problem(
    mask: SpanMask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor], VarlenTables]:
    """q, k and v of two batch rows."""
    gen = torch.Generator(DEVICE).manual_seed(0)
    shapes = ((heads[0], mask.q_len, dims[0]), (heads[1], mask.kv_len, dims[0]), (heads[1], mask.kv_len, dims[1]))
    q, k, v = (torch.randn((2, *shape), generator=gen, device=DEVICE).to(dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    spans = torch.tensor(mask.start, device=DEVICE), torch.tensor(mask.end, device=DEVICE)
    return leaves, spans, VarlenTables.of(mask, DEVICE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).norm() / want.norm().clamp(min=1e-30)).detach())


def gradients(leaves: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of random cotangents of out and lse both; rows without a key have none."""
    gen = torch.Generator(DEVICE).manual_seed(1)
    grad_out, grad_lse = (torch.randn(x.shape, generator=gen, device=DEVICE) for x in (out, lse))
    loss = (out.double() * grad_out).sum() + (torch.where(lse.isinf(), 0, lse).double() * grad_lse).sum()
    return torch.autograd.grad(loss, leaves)


def compare(
    mask: SpanMask, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    leaves, spans, tables = problem(mask, heads, dims, dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, want = attend_rounds(*leaves, tables, scale=0.1), reference(*wide, *spans, scale=0.1)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert torch.equal(got[1].isinf(), want[1].isinf())
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-2, atol=1e-2)
    pairs = [(got[0], want[0]), *zip(gradients(leaves, *got), gradients(wide, *want), strict=True)]
    for x, y in pairs:
        assert x.isfinite().all()
        assert relative_error(x, y) <= tolerance


@pytest.mark.parametrize("name", MASKS)
def test_matches_dense(name: str) -> None:
    compare(MASKS[name], (4, 4), (64, 64), torch.bfloat16, 2.5e-2)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (64, 40), (20, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grouped_heads_and_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    compare(MASKS["documents_others"], (6, 2), dims, dtype, 3.5e-2)


def test_gradient_of_lse_alone() -> None:
    """grad_out is zero everywhere: the kernel learns of the lse's gradient all the same."""
    leaves, spans, tables = problem(MASKS["window"], (4, 2), (64, 64), torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, want = attend_rounds(*leaves, tables, scale=0.1), reference(*wide, *spans, scale=0.1)
    grads = [torch.autograd.grad(lse.sin().sum(), xs[:2]) for lse, xs in ((got[1], leaves), (want[1], wide))]
    for x, y in zip(*grads, strict=True):
        assert relative_error(x, y) <= 2.5e-2


def test_deterministic() -> None:
    leaves, _, tables = problem(MASKS["documents"], (4, 2), (64, 64), torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradients(leaves, *attend_rounds(*leaves, tables, scale=0.1)) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_compiled() -> None:
    """Another mask needs no graph, and the operators' strides are those of their fake kernels."""
    compiled = torch.compile(attend_rounds, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in ("documents", "window", "causal"):
            leaves, _, tables = problem(MASKS[name], (4, 2), (64, 64), torch.bfloat16)
            got, want = (f(*leaves, tables, scale=0.1) for f in (compiled, attend_rounds))
            torch.testing.assert_close(got, want)
            for x, y in zip(gradients(leaves, *got), gradients(leaves, *want), strict=True):
                torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
def test_a_kernel_call_never_waits(layout: str) -> None:
    """Two batch rows on one row's tables, so that offsets are made on the device."""
    leaves, _, tables = problem(MASKS["documents_others"], (4, 2), (64, 48), torch.bfloat16)
    if layout == "tokens_first":
        leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]

    def step() -> None:
        out, lse = attend_rounds(*leaves, tables, scale=0.1)
        (out.float().sum() + lse.sigmoid().sum()).backward()

    step_twice(step)


@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_a_step_never_waits(kernel: str) -> None:
    plan = spanwise.make_plan(SpanMask.documents(CUTS, window=(128, 0)), 1)
    local = plan.local(None, DEVICE, kernel=kernel)
    gen = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, LENGTH, 64, generator=gen, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    )
    request = spanwise.AuxRequest(lse=True)

    def step() -> None:
        out, aux = spanwise.context_parallel_attention(q, k, v, local, None, kernel=kernel, return_aux=request)
        (out.float().square().sum() + aux.lse.sum()).backward()

    step_twice(step)


def step_twice(step: Callable[[], None]) -> None:
    """Once to compile and to fill caches, then once without a wait."""
    step()
    with never_waiting():
        step()
