"""The flex kernel on CUDA, forward and backward, against a dense float64 oracle; how often it compiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.flex import Flex, FlexTables
from spanwise.masks.span_mask import SpanMask
from tests.kernel_calls import chunk_of, flex, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # those of torch and Triton releases are not ours to fix
]

DEVICE = "cuda"
BATCH, Q_LEN, SCALE = 2, 500, 0.125

Spans = tuple[torch.Tensor, torch.Tensor, FlexTables]
Tensors = tuple[torch.Tensor, ...]


def spans(mask: SpanMask, capacity: int) -> Spans:
    mask = SpanMask(mask.start, mask.end, capacity)
    padding = (0, 0), (0, Flex().num_spans(mask.num_spans) - mask.num_spans), (0, 0)
    start, end = (torch.from_numpy(np.pad(x, padding)).to(DEVICE) for x in (mask.start, mask.end))
    return start, end, FlexTables.of(mask, DEVICE)


def inputs(
    q_len: int, capacity: int, dtype: torch.dtype, *, kv_heads: int = 4, dim: int = 64, v_dim: int = 64, seed: int = 0
) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    shapes = (BATCH, 4, q_len, dim), (BATCH, kv_heads, capacity, dim), (BATCH, kv_heads, capacity, v_dim)
    return tuple(torch.randn(shape, generator=rng).to(DEVICE, dtype).requires_grad_() for shape in shapes)


def with_gradients(
    qkv: Tensors, result: tuple[torch.Tensor, torch.Tensor], cotangents: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    out, lse = result
    grads = torch.autograd.grad((out, lse), qkv, [c.to(x.dtype) for c, x in zip(cotangents, result, strict=True)])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True))


def compare(qkv: Tensors, where: Spans, tol: float, **options: object) -> None:
    """Out, lse, dq, dk and dv under random cotangents of out and lse."""
    got_result = flex(*qkv, *where, scale=SCALE, **options)  # type: ignore[arg-type]
    cotangents = torch.randn_like(got_result[0]), torch.randn_like(got_result[1])
    got = with_gradients(qkv, got_result, cotangents)
    exact = tuple(x.detach().double().requires_grad_() for x in qkv)
    want_result = reference(*exact, *where[:2], scale=SCALE, **options)  # type: ignore[arg-type]
    want = with_gradients(exact, want_result, cotangents)
    assert got["out"].dtype == qkv[0].dtype and got["lse"].dtype == torch.float32
    for name, value in got.items():
        assert not value.isnan().any(), name
        size = want[name].nan_to_num(neginf=0.0).abs().max().clamp(min=1).item()
        torch.testing.assert_close(
            value.double(), want[name], rtol=tol, atol=tol * size, msg=lambda text, name=name: f"{name}: {text}"
        )


def random_mask(q_len: int, kv_len: int, num_spans: int, *, batch: int = 1, seed: int = 0) -> SpanMask:
    """Rows of up to ``num_spans`` spans, some empty."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, 2 * num_spans)), -1)
    start, end = edges[..., ::2].copy(), edges[..., 1::2].copy()
    for span in range(1, num_spans):  # neighbours that touch would merge
        start[..., span] = np.minimum(np.maximum(start[..., span], end[..., span - 1] + 1), kv_len)
        end[..., span] = np.maximum(end[..., span], start[..., span])
    empty = rng.random((batch, q_len)) < 0.1
    start[empty], end[empty] = 0, 0
    return SpanMask(start.transpose(0, 2, 1), end.transpose(0, 2, 1), kv_len)


MASKS = {
    "causal": SpanMask.causal(Q_LEN),
    "documents": SpanMask.documents([0, 1, 70, 71, 300, Q_LEN]),
    "window": SpanMask.sliding_window(Q_LEN, 100, 4),
    "two_spans_empty_rows_each_row": random_mask(Q_LEN, 700, 2, batch=BATCH),
    "nothing": SpanMask(np.zeros((1, Q_LEN), int), np.zeros((1, Q_LEN), int), 300),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_matches_dense(name: str, dtype: torch.dtype) -> None:
    capacity = Flex().capacity(MASKS[name].kv_len)
    compare(inputs(Q_LEN, capacity, dtype), spans(MASKS[name], capacity), TOLERANCE[dtype])


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-5), (torch.bfloat16, 3.5e-2)], ids=str)
def test_grouped_heads_and_another_value_dim(dtype: torch.dtype, tol: float) -> None:
    capacity = Flex().capacity(Q_LEN)
    compare(inputs(Q_LEN, capacity, dtype, kv_heads=2, v_dim=32), spans(SpanMask.causal(Q_LEN), capacity), tol)


def test_keys_that_are_no_whole_number_of_blocks() -> None:
    compare(inputs(Q_LEN, Q_LEN, torch.float32), spans(SpanMask.causal(Q_LEN), Q_LEN), 2e-5)


def test_permuted_inputs() -> None:
    capacity = Flex().capacity(Q_LEN)
    thd = tuple(
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in inputs(Q_LEN, capacity, torch.float32)
    )
    compare(thd, spans(SpanMask.causal(Q_LEN), capacity), 2e-5)


def test_inference_and_few_queries() -> None:
    """Without gradients and with few queries torch takes its decoding kernel."""
    mask = random_mask(16, 700, 1)
    capacity = Flex().capacity(700)
    qkv, where = inputs(16, capacity, torch.float32), spans(mask, capacity)
    with torch.no_grad():
        got = flex(*qkv, *where, scale=SCALE)
        want = reference(*(x.double() for x in qkv), *where[:2], scale=SCALE)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_score_mod_with_global_positions(softcap: float | None) -> None:
    capacity = Flex().capacity(700)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0], device=DEVICE)
    q_pos = (torch.arange(Q_LEN, device=DEVICE, dtype=torch.int32) * 2)[None]
    kv_pos = torch.arange(BATCH * capacity, device=DEVICE, dtype=torch.int32).reshape(BATCH, capacity).flip(1)

    def alibi(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    compare(
        inputs(Q_LEN, capacity, torch.float32),
        spans(random_mask(Q_LEN, 700, 1, batch=BATCH), capacity),
        1e-4,
        score_mod=alibi,
        softcap=softcap,
        q_pos=q_pos,
        kv_pos=kv_pos,
    )


def test_softcap() -> None:
    capacity = Flex().capacity(Q_LEN)
    where = spans(SpanMask.causal(Q_LEN), capacity)
    compare(inputs(Q_LEN, capacity, torch.float32), where, 2e-5, softcap=2.0)


def test_max_logit() -> None:
    mask = random_mask(Q_LEN, 700, 2, batch=BATCH)
    capacity = Flex().capacity(700)
    q, k, _ = inputs(Q_LEN, capacity, torch.float32, kv_heads=2)
    where = spans(mask, capacity)
    chunk = chunk_of(*where[:2], capacity, where[2])
    got = Flex().max_logit(q, k, chunk, torch.arange(Q_LEN, device=DEVICE)[None], AttentionOptions(SCALE))
    inside = torch.from_numpy(np.pad(mask.dense(), ((0, 0), (0, 0), (0, capacity - 700)))).to(DEVICE)[:, None]
    scores = SCALE * q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)
    want = scores.masked_fill(~inside, float("-inf")).amax((0, 2, 3))
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


def test_fourteen_plans_share_two_graphs() -> None:
    before = counters["stats"]["unique_graphs"]
    for i in range(14):
        mask = random_mask(Q_LEN, 300 + 90 * i, 1 + i % 4, seed=i)
        capacity = Flex().capacity(mask.kv_len)
        qkv = inputs(Q_LEN, capacity, torch.float32, dim=32, v_dim=16, seed=i)
        compare(qkv, spans(mask, capacity), 2e-5)
    assert counters["stats"]["unique_graphs"] - before <= 2
