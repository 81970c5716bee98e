"""The kernels on a CUDA device, against dense float64 attention; what compiles, and steps that never wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import spanwise
from spanwise import SpanMask
from tests.oracle import Inputs, expected, relative_error
from tests.pairs import covering, named
from tests.properties.cases import Case, check, on_rank
from tests.simulated import all_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # those of torch and Triton releases are not ours to fix
]

DEVICE = "cuda"
LENGTH = 1000
CUTS = [0, 1, 2, 130, 131, 640, 900, LENGTH]


def spans(q_len: int, kv_len: int, num_spans: int, batch: int = 1, seed: int = 0) -> SpanMask:
    """Disjoint random spans; a row in ten is empty."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, 2 * num_spans)), axis=-1)
    edges[rng.random((batch, q_len)) < 0.1] = 0
    return SpanMask(edges[..., 0::2].transpose(0, 2, 1), edges[..., 1::2].transpose(0, 2, 1), kv_len)


MASKS = {
    "causal": SpanMask.causal(LENGTH),
    "documents": SpanMask.documents(CUTS),
    "bidirectional": SpanMask.documents(CUTS, causal=False),
    "window": SpanMask.documents(CUTS, window=(128, 0)),
    "two-sided window": SpanMask.documents(CUTS, causal=False, window=(100, 60)),
    # A window without a bound to the right over fewer keys than queries.
    "clipped": SpanMask(np.r_[np.zeros(300, int), np.arange(10)][None], np.full((1, 310), 10), 10),
    "prefix": SpanMask.prefix_lm(CUTS, [0, 1, 10, 0, 31, 1, 100]),
    "two spans": spans(500, 700, 2),
    "few queries": spans(16, 700, 1),  # without gradients torch takes its decoding kernel
    "rows": spans(40, 300, 1, batch=2),
    "nothing": SpanMask(np.zeros((1, 9), int), np.zeros((1, 9), int), 300),
}
KERNELS = [("flex", "float32"), ("flex", "bfloat16"), ("varlen", "bfloat16"), ("varlen", "float16")]
SHAPES = [((4, 4), (64, 64)), ((4, 2), (64, 32)), ((6, 2), (128, 128)), ((4, 2), (192, 128)), ((4, 2), (20, 20))]
OPTIONS: list[dict[str, Any]] = [
    {}, {"softcap": 2.0, "scale": 0.1}, {"bias": "alibi"}, {"bias": "batch"}, {"sinks": 1}, {"max_logit": True},
    {"gradients": False, "lse": False},
]  # fmt: skip


def possible(kernel: tuple[str, str], mask: str, shape: Any, options: dict[str, Any], style: str) -> bool:
    if kernel[0] == "flex":
        return shape in SHAPES[:3]
    return not {"softcap", "bias", "max_logit"} & options.keys()


@pytest.mark.parametrize(
    ("kernel", "mask", "shape", "options", "style"),
    covering(KERNELS, list(MASKS), SHAPES, OPTIONS, ["eager", "checkpoint", "twice"], possible=possible),
    ids=named,
)
def test_matches_dense(kernel: tuple[str, str], mask: str, shape: Any, options: dict[str, Any], style: str) -> None:
    """Output, lse, largest scores and all gradients of two batch rows."""
    given = {"kernel": kernel[0], "dtype": kernel[1], "heads": shape[0], "dims": shape[1], "style": style}
    case = Case({"default": MASKS[mask]}, batch=2, **given, **options)
    check(case, lambda num_ranks, _, *args, **mesh: [on_rank(0, None, *args, DEVICE)])


def problem(kernel: str, dtype: torch.dtype, dims: tuple[int, int] = (64, 64)) -> list[torch.Tensor]:
    """q, k and v of 4 and 2 heads, which need gradients."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (1, 4, LENGTH, dims[0]), (1, 2, LENGTH, dims[0]), (1, 2, LENGTH, dims[1])
    return [torch.randn(x, generator=generator, device=DEVICE).to(dtype).requires_grad_() for x in shapes]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.half)]
)
@pytest.mark.parametrize("exchange", [{"exchange": "all_gather"}, {"exchange": "needed", "stages": 2}], ids=named)
def test_every_rank_of_a_plan(num_ranks: int, kernel: str, dtype: torch.dtype, exchange: dict[str, Any]) -> None:
    """What each rank computes with the K/V that the exchange would bring; a score_mod sees global positions."""
    mask, leaves = MASKS["documents"], problem(kernel, dtype)
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", **exchange)
    slopes = 0.3 / (torch.arange(4, device=DEVICE) + 1)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        return score + slopes[h] * (kv_idx - q_idx) / 8 + 0.01 * q_idx

    out = all_ranks(plan, *leaves, kernel=kernel, score_mod=alibi if kernel == "flex" else None)
    grad_out = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, leaves, grad_out)]
    inputs = Inputs(*(x.detach().cpu() for x in (*leaves, grad_out)), torch.zeros(1, 4, LENGTH), None)
    options = {"scale": None, "softcap": None, "bias": "alibi" if kernel == "flex" else None}
    want = expected(inputs, torch.from_numpy(mask.dense()), options).values
    for x, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
        assert relative_error(x.detach().cpu(), want[name]) <= (1e-4 if dtype == torch.float32 else 3.5e-2), name


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, kernel: str) -> torch.Tensor:
    out, aux = spanwise.context_parallel_attention(
        q, k, v, plan, None, kernel=kernel, return_aux=spanwise.AuxRequest(lse=True)
    )
    return out.float().square().sum() + torch.where(aux.lse.isinf(), 0, aux.lse).sum()


def local(mask: SpanMask, kernel: str) -> spanwise.RankPlan:
    return spanwise.make_plan(mask, 1).local(None, DEVICE, kernel=kernel)


def test_fourteen_plans_share_two_graphs_of_flex() -> None:
    before = counters["stats"]["unique_graphs"]
    for i in range(14):
        plan, leaves = local(spans(LENGTH, LENGTH, 1 + i % 4, seed=i), "flex"), problem("flex", torch.float32)
        attend(*leaves, plan, "flex").backward()
    assert counters["stats"]["unique_graphs"] - before <= 2


def test_varlen_is_deterministic_and_compiles_once() -> None:
    """Another mask needs no graph, and the operators' strides are those of their fake kernels."""
    leaves, compiled = problem("varlen", torch.bfloat16), torch.compile(attend, fullgraph=True)
    torch.use_deterministic_algorithms(True)
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for name in ("documents", "window", "causal"):
                plan = local(MASKS[name], "varlen")
                first, again, other = (
                    torch.autograd.grad(call(*leaves, plan, "varlen"), leaves) for call in (attend, attend, compiled)
                )
                assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
                torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)
    finally:
        torch.use_deterministic_algorithms(False)


def waits_never(step: Callable[[], Any]) -> None:
    """Once to compile and to fill caches, then once without a wait."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("kernel", ["flex", "varlen"])
def test_a_step_never_waits(kernel: str, tokens_first: bool) -> None:
    """Two batch rows on one row's tables, so that offsets are made on the device; v is narrower."""
    plan = local(MASKS["window"], kernel)
    leaves = [x.detach().expand(2, -1, -1, -1).clone() for x in problem(kernel, torch.bfloat16, (64, 48))]
    if tokens_first:
        leaves = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    waits_never(lambda: attend(*leaves, plan, kernel).backward())


def test_ptrr_never_waits_for_the_device() -> None:
    process_time = torch.randint(0, 100, (2, 64), device=DEVICE)
    waits_never(lambda: spanwise.ptrr_schedule(process_time, 8))
    got = spanwise.ptrr_schedule(process_time, 8).cpu()
    assert torch.equal(got, spanwise.ptrr_schedule(process_time.cpu(), 8))
