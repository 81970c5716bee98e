"""The flex kernel without a GPU, on torch's dense stand-in for FlexAttention: values, gradients, graphs, refusals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils.checkpoint import checkpoint

from spanwise import _torch
from spanwise._torch import storage_id
from spanwise.attention.kernels import flex as flex_module
from spanwise.attention.kernels._flex_tables import FlexTables, kv_capacity, pad_spans
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.flex import Flex
from spanwise.attention.kernels.merge import Merging, merge
from spanwise.masks.blocks import block_tables
from spanwise.masks.span_mask import SpanMask
from tests.kernel_calls import chunk_of, flex

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # of torch's own, on import
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # read by Dynamo
]

HEADS, KV_HEADS, DIM, V_DIM, Q_LEN, SCALE = 4, 2, 16, 24, 200, 0.25


class Problem(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    tables: FlexTables

    def double(self) -> tuple[torch.Tensor, ...]:
        return (self.q.double(), self.k.double(), self.v.double(), self.start, self.end)


def problem(
    mask: SpanMask, *, batch: int = 2, num_spans: int = 1, capacity: int | None = None, seed: int = 0
) -> Problem:
    capacity = capacity or kv_capacity(mask.kv_len)
    mask = SpanMask(mask.start, mask.end, capacity)
    padding = (0, 0), (0, pad_spans(max(num_spans, mask.num_spans)) - mask.num_spans), (0, 0)
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(batch, heads, tokens, dim, generator=rng)
        for heads, tokens, dim in ((HEADS, mask.q_len, DIM), (KV_HEADS, capacity, DIM), (KV_HEADS, capacity, V_DIM))
    )
    k[:, :, int(mask.end.max()) :] = 1e4  # spare rows: any finite garbage
    v[:, :, int(mask.end.max()) :] = -1e4
    start, end = (torch.from_numpy(np.pad(x, padding)) for x in (mask.start, mask.end))
    return Problem(q, k, v, start, end, FlexTables.from_numpy(block_tables(mask, 128)))


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    score_fn: Callable[[torch.Tensor], torch.Tensor] = lambda score: score,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention, differentiable; an empty row has out 0 and lse -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    keys = torch.arange(k.shape[2], device=q.device)
    inside = ((keys >= start[..., None]) & (keys < end[..., None])).any(1)[:, None]
    scores = score_fn(SCALE * (q @ k.transpose(2, 3))).masked_fill(~inside, float("-inf"))
    some = inside.any(3)
    scores = torch.where(some[..., None], scores, 0.0)  # softmax of nothing has no gradient, not NaN
    out = torch.softmax(scores, 3) @ v * some[..., None]
    return out, torch.where(some, torch.logsumexp(scores, 3), float("-inf"))


def assert_near(
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
    tol: float = 3e-6,
    label: str = "",
) -> None:
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert x.shape == y.shape
        what = f"{label} {name}"
        torch.testing.assert_close(x.double(), y, rtol=tol, atol=tol, msg=lambda text, what=what: f"{what}: {text}")


def random_mask(q_len: int, kv_len: int, num_spans: int, *, batch: int = 1, seed: int = 0) -> SpanMask:
    """Rows of up to ``num_spans`` spans, some empty."""
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, kv_len + 1, (batch, q_len, num_spans, 2)).reshape(batch, q_len, -1), -1)
    start, end = edges[..., ::2].copy(), edges[..., 1::2].copy()
    for span in range(1, num_spans):  # neighbours that touch would merge
        start[..., span] = np.minimum(np.maximum(start[..., span], end[..., span - 1] + 1), kv_len)
        end[..., span] = np.maximum(end[..., span], start[..., span])
    empty = rng.random((batch, q_len)) < 0.1
    start[empty], end[empty] = 0, 0
    return SpanMask(start.transpose(0, 2, 1), end.transpose(0, 2, 1), kv_len)


def some_empty(mask: SpanMask) -> SpanMask:
    keep = np.ones(mask.q_len, bool)
    keep[[0, 5, *range(128, 160)]] = False
    return SpanMask(mask.start * keep, mask.end * keep, mask.kv_len)


@pytest.fixture(autouse=True)
def dense_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled, and FlexAttention takes CPU tensors that require gradients."""
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    # Only CUDA has a backward, but the gradient's formula is device-independent in torch's dense stand-in.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        yield
    flex_module._compiled.cache_clear()


ONE_SPAN = {
    "causal": SpanMask.causal(Q_LEN),
    "documents": SpanMask.documents([0, 1, 40, 41, 170, Q_LEN]),
    "window": SpanMask.sliding_window(Q_LEN, 30, 4),
    "full": SpanMask.full(Q_LEN, 384),
    "empty_rows": some_empty(SpanMask.causal(Q_LEN)),
    "nothing": SpanMask(np.zeros((1, Q_LEN), int), np.zeros((1, Q_LEN), int), 300),
    "remote_keys": random_mask(Q_LEN, 1000, 1),
}


def test_matches_dense_with_one_span() -> None:
    """All in one test, as they share a graph."""
    for name, mask in ONE_SPAN.items():
        x = problem(mask)
        assert_near(flex(*x, scale=SCALE), oracle(*x.double()), label=name)


def test_matches_dense_with_several_spans_and_another_mask_in_each_row() -> None:
    for num_spans in (2, 3, 4):
        x = problem(random_mask(Q_LEN, 500, num_spans, batch=2, seed=num_spans))
        assert x.start.shape == (2, 4, Q_LEN)
        assert_near(flex(*x, scale=SCALE), oracle(*x.double()), label=f"{num_spans} spans")


def test_the_lse_of_an_empty_row_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a GPU may give another one than torch's dense stand-in."""
    x, run = problem(some_empty(SpanMask.causal(Q_LEN))), flex_module._flex
    empty = (x.end - x.start).sum(1) == 0

    def another(*args: Any) -> tuple[torch.Tensor, AuxOutput]:
        out, aux = run(*args)
        return out, aux._replace(lse=aux.lse.masked_fill(empty[:, None], 0.0))

    monkeypatch.setattr(flex_module, "_flex", another)
    assert_near(flex(*x, scale=SCALE), oracle(*x.double()))


def test_spare_capacity_is_not_read() -> None:
    mask = SpanMask.documents([0, 90, Q_LEN])
    x, longer = problem(mask), problem(mask, capacity=640)
    longer.k[:, :, :Q_LEN], longer.v[:, :, :Q_LEN] = x.k[:, :, :Q_LEN], x.v[:, :, :Q_LEN]
    got = flex(*longer._replace(q=x.q), scale=SCALE)
    assert_near(got, oracle(*x.double()))


def test_permuted_inputs() -> None:
    x = problem(SpanMask.causal(Q_LEN))
    thd = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3]]
    assert not thd[1].is_contiguous()
    assert_near(flex(*thd, *x[3:], scale=SCALE), oracle(*x.double()))


@pytest.mark.parametrize("factor", [20.0, 1e-3])
def test_lse_is_found_at_any_size_of_scores(factor: float) -> None:
    x = problem(random_mask(Q_LEN, 500, 1))
    x = x._replace(q=x.q * factor, k=x.k * factor)  # factor 20: scores up to some thousand
    out, lse = flex(*x, scale=SCALE)
    want = oracle(*x.double())
    torch.testing.assert_close(lse.double(), want[1], rtol=2e-6, atol=3e-6)
    exact_in_float = oracle(x.q, x.k, x.v, x.start, x.end)[0]
    allowed = 4 * (exact_in_float.double() - want[0]).abs().max().item() + 3e-6
    assert (out.double() - want[0]).abs().max().item() <= allowed


def test_bfloat16() -> None:
    x = problem(SpanMask.causal(Q_LEN))
    x = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    out, lse = flex(*x, scale=SCALE)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want = oracle(*x.double())
    torch.testing.assert_close(out.double(), want[0], rtol=2.5e-2, atol=2.5e-2)
    torch.testing.assert_close(lse.double(), want[1], rtol=3e-6, atol=3e-6)


def test_score_mod_sees_global_positions_and_softcap_comes_after() -> None:
    x = problem(random_mask(Q_LEN, 500, 2, batch=2))
    softcap = 15.0
    slopes = torch.tensor([1.0, 0.25, 0.1, 0.0])
    q_pos, kv_pos = torch.arange(Q_LEN)[None] * 2 + 100, torch.arange(2 * 512).reshape(2, 512).flip(1)

    def alibi(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    def dense(score: torch.Tensor) -> torch.Tensor:
        far = (q_pos[:, :, None] - kv_pos[:, None, :]).abs()[:, None]
        score = score - slopes.double()[:, None, None] * far
        return softcap * torch.tanh(score / softcap)

    want = oracle(*x.double(), score_fn=dense)
    got = flex(*x, scale=SCALE, score_mod=alibi, softcap=softcap, q_pos=q_pos.int(), kv_pos=kv_pos.int())
    assert_near(got, want, tol=2e-5)


# --- how often it compiles ------------------------------------------------------------------------------------------


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def packings(count: int) -> list[SpanMask]:
    rng = np.random.default_rng(3)
    cuts = (np.sort(rng.choice(np.arange(1, Q_LEN), size=rng.integers(1, 9), replace=False)) for _ in range(count))
    return [SpanMask.documents([0, *map(int, cut), Q_LEN]) for cut in cuts]


def test_ten_packings_share_one_graph() -> None:
    before = graphs()
    for seed, mask in enumerate(packings(10)):
        x = problem(mask, seed=seed)
        assert_near(flex(*x, scale=SCALE), oracle(*x.double()))
    assert graphs() - before == 1


def plans(count: int) -> list[SpanMask]:
    """Masks of one number of queries, all different in the number of keys, with one to four spans a row."""
    return [random_mask(Q_LEN, 150 + 90 * i, 1 + i % 4, batch=1 if i % 4 == 0 else 2, seed=i) for i in range(count)]


def test_fourteen_plans_share_two_graphs() -> None:
    masks = plans(14)
    assert {mask.num_spans for mask in masks} == {1, 2, 3, 4}
    assert len({kv_capacity(mask.kv_len) for mask in masks}) >= 10
    before = graphs()
    for seed, mask in enumerate(masks):
        x = problem(mask, seed=seed)
        assert_near(flex(*x, scale=SCALE), oracle(*x.double()))
    assert graphs() - before <= 2


class Remote(torch.nn.Module):
    """What attention does with a plan: the keys are collected from a longer buffer."""

    def forward(
        self,
        q: torch.Tensor,
        buffer: torch.Tensor,
        pick: torch.Tensor,
        spans: tuple[torch.Tensor, torch.Tensor, FlexTables],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = buffer.index_select(2, pick)
        return flex(q, key, key + 1, *spans, scale=SCALE)


def test_fourteen_plans_share_two_graphs_inside_a_compiled_module() -> None:
    backend = CompileCounterWithBackend("eager")
    module = torch.compile(Remote(), backend=backend, fullgraph=True)
    buffer = torch.randn(2, KV_HEADS, 2000, DIM)
    for seed, mask in enumerate(plans(14)):
        x = problem(mask, seed=seed)
        pick = _torch.mark_dynamic(torch.randint(0, 2000, (kv_capacity(mask.kv_len),)), 0)
        got = module(x.q, buffer, pick, x[3:])
        key = buffer[:, :, pick]
        assert_near(got, oracle(*x._replace(k=key, v=key + 1).double()))
    assert backend.frame_count <= 2


@pytest.mark.slow
def test_a_process_may_use_more_settings_than_dynamo_allows_graphs() -> None:
    before = graphs()
    for q_len in range(130, 140):  # Dynamo refuses the ninth graph of one function
        x = problem(SpanMask.causal(q_len))
        assert_near(flex(*x, scale=SCALE), oracle(*x.double()))
    assert graphs() - before == 10


# --- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_of_out_and_lse() -> None:
    x = problem(some_empty(random_mask(Q_LEN, 300, 2)))
    x = x._replace(k=x.k.clamp(-3, 3), v=x.v.clamp(-3, 3))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, lse = flex(*x, scale=SCALE)
    want_out, want_lse = oracle(*exact, x.start, x.end)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (d_out, d_lse))
    wants = torch.autograd.grad((want_out, want_lse), exact, (d_out.double(), d_lse.double()))
    assert_near((out, lse), (want_out, want_lse))
    for name, grad, want in zip("qkv", grads, wants, strict=True):
        label = functools.partial("d{}: {}".format, name)
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-5, msg=label)
    empty = (x.end - x.start).sum(1)[0] == 0
    assert empty.any() and not grads[0][:, :, empty].any()


@pytest.mark.parametrize("within", ["nothing", "hooks", "checkpoint"])
def test_parts_keep_no_output(within: str) -> None:
    """Three chunks: values and gradients of the whole; one output is kept, also under hooks of the caller."""
    mask = random_mask(Q_LEN, 1152, 2, batch=2)
    whole = problem(mask)
    leaves = [t.clamp(-3, 3).requires_grad_() for t in whole[:3]]
    chunks, sizes = [], (256, 512, 384)
    for first, size in zip((0, 256, 768), sizes, strict=True):
        start, end = (np.clip(x - first, 0, size) for x in (mask.start, mask.end))
        x = problem(SpanMask(start, end, size), capacity=size, num_spans=2)
        chunks.append(Chunk(x.start, x.end, torch.arange(first, first + size)[None].int(), x.tables))
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[storage_id(x)] = x.untyped_storage().nbytes()
        return x

    def run(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first so many chunks."""
        q, *kv = leaves
        merging, options, positions = Merging(q.dtype), AttentionOptions(SCALE), torch.arange(Q_LEN)[None].int()
        parts = zip(*(x.split(sizes, 2) for x in kv), chunks, strict=True)
        for _, (k, v, chunk) in zip(range(count), parts, strict=False):
            merging.add(Flex().attend_part(q, k.contiguous(), v.contiguous(), chunk, positions, options))
        return merging.result()

    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(pack, lambda x: x) if within == "hooks" else contextlib.nullcontext():
        out, lse = checkpoint(run, 3, use_reentrant=False) if within == "checkpoint" else run(3)
    if within == "hooks":
        output, rows = out.untyped_storage().nbytes(), lse.untyped_storage().nbytes()
        spans = sum(x.nbytes for chunk in chunks for x in torch.utils._pytree.tree_leaves(chunk) if x is not None)
        # q, k, v, out, and of each chunk its lse twice and which rows are empty; copies of the spans.
        allowed = sum(x.untyped_storage().nbytes() for x in leaves) + output + 8 * rows + 3 * spans
        assert sum(kept.values()) < allowed
    exact = [t.detach().double().requires_grad_() for t in leaves]
    want = oracle(*exact, whole.start, whole.end)
    assert_near((out, lse), want)
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    wants = torch.autograd.grad(want, exact, [x.double() for x in cotangents])
    for grad, wanted in zip(torch.autograd.grad((out, lse), leaves, cotangents), wants, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_change_in_place_is_noticed() -> None:
    x = problem(SpanMask.causal(Q_LEN))
    q = x.q.requires_grad_() * 1
    chunk = Chunk(x.start, x.end, torch.arange(256)[None].int(), x.tables)
    part = Flex().attend_part(q, x.k, x.v, chunk, torch.arange(Q_LEN)[None], AttentionOptions(SCALE))
    out, _ = merge([part])
    q.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


# --- helpers and refusals -------------------------------------------------------------------------------------------


def test_pad_spans() -> None:
    assert [pad_spans(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 17)] == [1, 1, 4, 4, 4, 8, 8, 16, 32]


def test_kv_capacity() -> None:
    assert [kv_capacity(n) for n in (0, 1, 128, 256, 257, 1000)] == [256, 256, 256, 256, 384, 1024]


def test_refuses_the_cpu() -> None:
    with pytest.raises(ValueError, match="runs on CUDA, the tensors are on cpu.*kernel='sdpa'"):
        Flex().check_device(torch.device("cpu"), None)


def test_refuses_float64() -> None:
    x = problem(SpanMask.causal(Q_LEN))
    chunk = chunk_of(x.start, x.end, x.k.shape[2], x.tables)
    with pytest.raises(ValueError, match="float64"):
        Flex().check(*x.double()[:3], chunk, AttentionOptions())


def test_tables_are_a_pytree_of_tensors() -> None:
    tables = problem(SpanMask.causal(Q_LEN)).tables
    leaves, spec = torch.utils._pytree.tree_flatten(tables)
    assert len(leaves) == 8 and all(leaf.dtype == torch.int32 for leaf in leaves)
    assert torch.equal(torch.utils._pytree.tree_unflatten(leaves, spec).q_indices, tables.q_indices)
