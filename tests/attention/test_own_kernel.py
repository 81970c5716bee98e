"""The kernel of docs/add-a-kernel.md, run as the page prints it, gives exact results under every exchange."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise import AuxRequest, SpanMask
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from tests.oracle import Problem, make_problem, relative_error
from tests.pairs import covering
from tests.ranks.harness import run_ranks

PAGE = Path(__file__).parents[2] / "docs/add-a-kernel.md"
LENGTH = 48


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The page's kernel, out of a module that holds the page's Python blocks and lies outside of the package."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    path = tmp_path_factory.mktemp("outside") / "the_users_kernel.py"
    path.write_text("\n".join(blocks))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        yield importlib.import_module("the_users_kernel").Dense()


def with_empty_rows(mask: SpanMask) -> SpanMask:
    keep = np.ones(mask.q_len, bool)
    keep[[0, 7, *range(20, 31), mask.q_len - 1]] = False
    return SpanMask(mask.start * keep, mask.end * keep, mask.kv_len)


MASKS = {
    "documents": with_empty_rows(SpanMask.documents([0, 5, 6, 30, LENGTH])),
    "window_and_globals": with_empty_rows(
        SpanMask.sliding_window(LENGTH, 6) | SpanMask(np.zeros((1, LENGTH), int), np.full((1, LENGTH), 2), LENGTH)
    ),
}
EXCHANGES: list[dict[str, Any]] = [
    {"exchange": "needed", "stages": 2},
    {"exchange": "all_gather"},
    {"exchange": "hierarchical", "hardware": spanwise.H100.with_host_size(2)},
    {"exchange": "ring"},
    {"exchange": "ulysses"},
]


def run(
    problem: Problem, plan: spanwise.Plan, kernel: Kernel, local: bool = False, **options: Any
) -> list[tuple[torch.Tensor, ...]]:
    """out, lse, dq, dk and dv of the whole sequence, as each rank gathers them."""

    def on_rank(rank: int, mesh: Any) -> tuple[torch.Tensor, ...]:
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        mine = plan.local(mesh, kernel=kernel) if local else plan
        out, aux = spanwise.context_parallel_attention(
            *leaves, mine, mesh, kernel=kernel, return_aux=AuxRequest(lse=True), **options
        )
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        grads = [x.grad for x in leaves]
        return tuple(spanwise.unshard(plan, mesh, x.detach(), dim=2) for x in (out, aux.lse, *grads))

    return run_ranks(plan.num_ranks, on_rank)


def check(problem: Problem, results: list[tuple[torch.Tensor, ...]], mask: SpanMask) -> None:
    empty = torch.from_numpy(mask.area()[0] == 0)
    assert empty.any()
    for out, lse, dq, dk, dv in results:
        assert not out[:, :, empty].any() and not dq[:, :, empty].any() and (lse[:, :, empty] == -torch.inf).all()
        assert relative_error(lse[:, :, ~empty], problem.lse[:, :, ~empty]) <= 1e-10
        for got, want in ((out, problem.out), (dq, problem.dq), (dk, problem.dk), (dv, problem.dv)):
            assert relative_error(got, want) <= 1e-10


@pytest.mark.parametrize(("name", "exchange", "num_ranks"), covering(list(MASKS), EXCHANGES, [1, 2, 4]))
def test_exact_under_every_exchange(kernel: Kernel, name: str, exchange: dict[str, Any], num_ranks: int) -> None:
    plan = spanwise.make_plan(
        MASKS[name], num_ranks, balancer="head_tail", block_size=4, num_q_heads=8, num_kv_heads=4, **exchange
    )
    problem = make_problem(MASKS[name].dense(), batch=2, heads=(8, 4), dims=(8, 12))
    check(problem, run(problem, plan, kernel), MASKS[name])
    check(problem, run(problem, plan, kernel, local=True), MASKS[name])


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda x: x["exchange"])
def test_score_mod_sees_global_positions(kernel: Kernel, exchange: dict[str, Any]) -> None:
    mask = MASKS["documents"]
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=4, num_q_heads=4, num_kv_heads=2, **exchange)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
    problem = make_problem(mask.dense())
    far = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    group = problem.q.shape[1] // problem.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (problem.k, problem.v))
    scores = problem.q @ k.mT * problem.q.shape[-1] ** -0.5 - slopes[:, None, None] * far
    scores = scores.masked_fill(~torch.from_numpy(mask.dense()), -torch.inf)
    want = scores.softmax(-1).nan_to_num(0) @ v

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    for out, *_ in run(problem, plan, kernel, score_mod=alibi):
        assert relative_error(out, want) <= 1e-10


def test_in_context_parallel(kernel: Kernel) -> None:
    mask = SpanMask.causal(LENGTH)
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=4)
    problem = make_problem(mask.dense(), heads=(4, 4))

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

    calls: list[int] = []

    class Counted(type(kernel)):  # type: ignore[misc]
        def attend(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(torch.distributed.get_rank())
            return super().attend(*args)

    def on_rank(rank: int, mesh: Any) -> torch.Tensor:
        style = spanwise.ContextParallel(attention_type="sdpa", kernel=Counted())
        module = style._apply(Attention(), mesh)
        shards = [spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]]
        return spanwise.unshard(plan, mesh, module(*shards, attn_mask=plan), dim=2)

    for out in run_ranks(2, on_rank):
        assert relative_error(out, problem.out) <= 1e-10
    assert set(calls) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reduced_precision_and_max_logit(kernel: Kernel, dtype: torch.dtype) -> None:
    mask = MASKS["window_and_globals"]
    problem = make_problem(mask.dense(), dtype=dtype)
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=4)

    def on_rank(rank: int, mesh: Any) -> tuple[torch.Tensor, spanwise.Aux]:
        shards = [spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]]
        out, aux = spanwise.context_parallel_attention(
            *shards, plan, mesh, kernel=kernel, return_aux=AuxRequest(lse=True, max_logit=True)
        )
        return spanwise.unshard(plan, mesh, out, dim=2), aux

    k = problem.k.double().repeat_interleave(2, 1)
    scores = problem.q.double() @ k.mT * problem.q.shape[-1] ** -0.5
    largest = scores.masked_fill(~torch.from_numpy(mask.dense()), -torch.inf).amax((0, 2, 3))
    for out, aux in run_ranks(2, on_rank):
        assert out.dtype == dtype and aux.lse.dtype == torch.float32
        tolerance = 3.5e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), problem.out, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(aux.max_logit.double(), largest, atol=1e-5, rtol=1e-5)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
def test_compiles_fullgraph(kernel: Kernel) -> None:
    mask = MASKS["documents"]
    plan = spanwise.make_plan(mask, 1)
    problem, local = make_problem(mask.dense()), plan.local(None, kernel=kernel)
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Any) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, None, kernel=kernel)

    out = attend(*leaves, local)
    out.backward(problem.grad_out)
    for got, want in zip((out, *(x.grad for x in leaves)), (problem.out, *problem[6:9]), strict=True):
        assert relative_error(got.detach(), want) <= 1e-10


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_where_the_number_of_keys_is_unbacked(kernel: Kernel) -> None:
    """As in the chunks of "needed" and "ring"; one graph serves any number, also none."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, end: torch.Tensor, kv_pos: torch.Tensor) -> Any:
        chunk = Chunk(torch.zeros_like(end), end, kv_pos)
        return kernel.attend(q, k, k, chunk, kv_pos, AttentionOptions())

    q, end = torch.randn(1, 4, 5, 8), torch.tensor([[[0, 1, 2, 3, 3]]], dtype=torch.int32)
    for keys in (3, 0, 7):
        k, kv_pos = torch.randn(1, 2, keys, 8), torch.arange(keys, dtype=torch.int32)[None]
        torch._dynamo.decorators.mark_unbacked(k, 2)
        torch._dynamo.decorators.mark_unbacked(kv_pos, 1)
        reference = KERNELS["reference"]
        chunk = Chunk(torch.zeros_like(end), end, kv_pos)
        wanted = reference.attend(q, k, k, chunk, kv_pos, AttentionOptions())
        torch.testing.assert_close(attend(q, k, end, kv_pos), wanted)


# --- kernels that shape the rank plan -------------------------------------------------------------------------------


class Blockwise(Kernel):
    """Tables, spare keys and all other members that shape a rank plan, around an inner kernel's `attend`."""

    name = "blockwise"
    dynamic_queries = False
    needs_tokens = True
    table_type = dict

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def tables(self, mask: SpanMask, device: torch.device) -> dict[str, torch.Tensor]:
        return {"area": torch.from_numpy(mask.area()).to(device), "keys": torch.empty(mask.kv_len, 0, device=device)}

    def capacity(self, num_keys: int) -> int:
        return max(2, -(-num_keys // 16)) * 16

    def num_spans(self, num_spans: int) -> int:
        return 4

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, q_pos: torch.Tensor, options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert k.isfinite().all() and v.isfinite().all()  # spare keys too
        assert chunk.start.shape[1] == 4
        assert chunk.tables["keys"].shape[0] == k.shape[2]
        assert torch.equal(chunk.tables["area"], (chunk.end - chunk.start).clamp(min=0).sum(1))
        return self.inner.attend(q, k, v, chunk, q_pos, options)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda x: x["exchange"])
def test_tables_and_spare_keys(kernel: Kernel, exchange: dict[str, Any]) -> None:
    mask = MASKS["window_and_globals"]
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=4, num_q_heads=4, num_kv_heads=2, **exchange)
    problem, blockwise = make_problem(mask.dense()), Blockwise(kernel)
    assert not blockwise.plain and blockwise.pads_keys
    check(problem, run(problem, plan, blockwise), mask)
    for chunk in build(plan, 0, kernel=blockwise).chunks["default"][1:]:
        assert chunk.kv_pos.shape[1] in (32, 48)


def test_plans_are_shared_by_kernels_that_shape_them_alike(kernel: Kernel) -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), 1)
    plain = plan.local(None)
    assert kernel.plain and plan.local(None, kernel=kernel) is plain is plan.local(None, kernel="reference")
    blockwise = Blockwise(kernel)
    mine = plan.local(None, kernel=blockwise)
    assert mine is not plain and plan.local(None, kernel=blockwise) is mine
    assert plan.local(None, kernel=Blockwise(kernel)) is not mine
    assert plan.local(None, kernel="flex") is plan.local(None, kernel="flex") is not plain


def test_refusals(kernel: Kernel) -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), 1)
    x = torch.randn(1, 2, LENGTH, 8)
    with pytest.raises(ValueError, match="kernel 'blockwise' needs dict in the rank plan"):
        spanwise.context_parallel_attention(x, x, x, plan.local(None), None, kernel=Blockwise(kernel))
    for call in (lambda name: plan.local(None, kernel=name), lambda name: _attend(x, plan, name)):
        with pytest.raises(ValueError, match="unknown kernel 'dens'; choose one of .* or give a Kernel"):
            call("dens")
        with pytest.raises(ValueError, match="unknown kernel <class .*Dense'>"):
            call(type(kernel))
    empty_rank = spanwise.make_plan(SpanMask.causal(1), 2)
    with pytest.raises(
        ValueError, match="kernel 'blockwise' needs at least one token on every rank, and one key, got \\[1, 0\\]"
    ):
        build(empty_rank, 0, kernel=Blockwise(kernel))


def _attend(x: torch.Tensor, plan: spanwise.Plan, kernel: Any) -> torch.Tensor:
    return spanwise.context_parallel_attention(x, x, x, plan, None, kernel=kernel)
