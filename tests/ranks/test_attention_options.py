"""Options of context_parallel_attention on threaded ranks: score_mod, softcap, sinks, aux, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise import AuxRequest, SpanMask, _torch
from tests.oracle import make_problem, relative_error
from tests.pairs import named
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import HOSTS

LENGTH = 50
CU = [0, 1, 17, 33, 50]
MASK = SpanMask.documents(CU)
PLAN = spanwise.make_plan(MASK, 3, balancer="ptrr", exchange="all_gather", block_size=4)
RELAYED = spanwise.make_plan(MASK, 3, balancer="ptrr", exchange="hierarchical", block_size=4, hardware=HOSTS)
TRADED = spanwise.make_plan(MASK, 2, balancer="ptrr", exchange="ulysses", block_size=4)
VISIBLE = torch.from_numpy(MASK.dense())


def dense(q, k, v, change, sinks=None):
    """Dense attention whose scaled scores ``[B, H, S, S]`` pass through `change`; out, lse, masked scores."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = change(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~VISIBLE.unsqueeze(1), -math.inf)
    extended = scores
    if sinks is not None:
        extended = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    lse = torch.logsumexp(extended, -1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ v, lse, scores


def compare(change, *, sinks=None, grad_lse=False, tolerance=1e-10, plan=PLAN, **options) -> None:
    problem = make_problem(MASK.dense())
    lse_cotangent = torch.randn(1, 4, LENGTH, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    whole_sinks = None if sinks is None else sinks.clone().requires_grad_()
    out, lse, _ = dense(*leaves, change, whole_sinks)
    torch.autograd.backward([out, lse], [problem.grad_out, lse_cotangent * grad_lse])

    def on_rank(rank: int, mesh: object):
        mine = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        own_sinks = None if sinks is None else sinks.clone().requires_grad_()
        got, aux = spanwise.context_parallel_attention(
            *mine, plan, mesh, sinks=own_sinks, return_aux=AuxRequest(lse=True), **options
        )
        cotangents = [spanwise.shard(plan, mesh, x, dim=2) for x in (problem.grad_out, lse_cotangent * grad_lse)]
        torch.autograd.backward([got, aux.lse], cotangents)
        return got.detach(), aux.lse.detach(), [x.grad for x in mine], None if sinks is None else own_sinks.grad

    results = run_ranks(3, on_rank)
    for rank, (got, got_lse, grads, _) in enumerate(results):
        assert relative_error(got, plan.shard(out.detach(), rank, dim=2)) <= tolerance
        assert relative_error(got_lse, plan.shard(lse.detach(), rank, dim=2)) <= tolerance
        for grad, leaf in zip(grads, leaves, strict=True):
            assert relative_error(grad, plan.shard(leaf.grad, rank, dim=2)) <= tolerance
    if sinks is not None:
        assert relative_error(sum(result[3] for result in results), whole_sinks.grad) <= tolerance


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_lse_is_differentiable(kernel: str) -> None:
    compare(lambda s: s, grad_lse=True, kernel=kernel)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_softcap(kernel: str) -> None:
    compare(lambda s: 0.7 * torch.tanh(s / 0.7), softcap=0.7, kernel=kernel, grad_lse=True)


@pytest.mark.parametrize(("kernel", "plan"), [("reference", PLAN), ("sdpa", PLAN), ("sdpa", RELAYED)], ids=named)
def test_sinks(kernel: str, plan: spanwise.Plan) -> None:
    compare(lambda s: s, sinks=torch.randn(4, dtype=torch.float64), kernel=kernel, plan=plan, grad_lse=True)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_the_gradient_of_sinks_that_weigh_little(kernel: str) -> None:
    """The float32 gradient was 1 minus a number near 1."""
    plan = spanwise.make_plan(MASK, 1)
    problem = make_problem(MASK.dense(), dtype=torch.float32)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        sinks = torch.full((4,), -10.0, dtype=dtype, requires_grad=True)
        qkv = (x.to(dtype) for x in problem[:3])
        out = spanwise.context_parallel_attention(*qkv, plan, None, kernel=kernel, sinks=sinks)
        out.backward(problem.grad_out.to(dtype))
        return sinks.grad

    assert relative_error(gradient(torch.float32), gradient(torch.float64)) <= 1e-5


def test_scale() -> None:
    compare(lambda s: s * math.sqrt(8) * 0.9, scale=0.9)


@pytest.mark.parametrize(("kernel", "plan"), [("reference", PLAN), ("auto", PLAN), ("auto", RELAYED)], ids=named)
def test_score_mod_sees_global_positions(kernel: str, plan: spanwise.Plan) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
    positions = torch.arange(LENGTH)
    bias = slopes.view(-1, 1, 1) * (positions[None] - positions[:, None]) + 0.01 * positions[:, None]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx) + 0.01 * q_idx

    compare(lambda s: s + bias, score_mod=score_mod, kernel=kernel, plan=plan)


@pytest.mark.parametrize(
    "exchange",
    [{"exchange": "all_gather"}, {"exchange": "needed", "stages": 2}, {"exchange": "hierarchical", "hardware": HOSTS}],
    ids=named,
)
def test_score_mod_sees_the_row_of_a_mask_for_each_row(exchange: dict) -> None:
    """With "needed" such rows follow one another on one axis; the score_mod must still see batch row and position."""
    rows = [MASK, SpanMask.sliding_window(LENGTH, 7, 3)]
    mask = SpanMask.stack(rows)
    plan = spanwise.make_plan(mask, 3, balancer="lpt", block_size=4, **exchange)
    problem = make_problem(mask.dense(), batch=2)
    slopes = torch.randn(2, 4, dtype=torch.float64)
    positions = torch.arange(LENGTH)
    bias = slopes[..., None, None] * (positions[None] - positions[:, None]) + 0.01 * positions[:, None]
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    k, v = (x.repeat_interleave(2, 1) for x in leaves[1:])
    scores = leaves[0] @ k.transpose(-1, -2) / math.sqrt(8) + bias
    out = scores.masked_fill(~torch.from_numpy(mask.dense()).unsqueeze(1), -math.inf).softmax(-1) @ v
    out.backward(problem.grad_out)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[b, h] * (kv_idx - q_idx) + 0.01 * q_idx

    def on_rank(rank: int, mesh: object):
        mine = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        got = spanwise.context_parallel_attention(*mine, plan, mesh, kernel="reference", score_mod=score_mod)
        got.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        return got.detach(), [x.grad for x in mine]

    for rank, (got, grads) in enumerate(run_ranks(3, on_rank)):
        assert relative_error(got, plan.shard(out.detach(), rank, dim=2)) <= 1e-10
        for grad, leaf in zip(grads, leaves, strict=True):
            assert relative_error(grad, plan.shard(leaf.grad, rank, dim=2)) <= 1e-10


@pytest.mark.parametrize(("softcap", "plan"), [(None, PLAN), (0.5, PLAN), (None, TRADED)], ids=named)
def test_max_logit(softcap: float | None, plan: spanwise.Plan) -> None:
    """Also of heads with negative scores alone, which under Ulysses another rank has."""
    problem = make_problem(MASK.dense())
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).view(1, 4, 1, 1)
    problem = problem._replace(q=problem.q.abs() * signs, k=problem.k.abs())
    cap = (lambda s: s) if softcap is None else (lambda s: softcap * torch.tanh(s / softcap))
    expected = dense(*problem[:3], cap)[2].amax(dim=(0, 2, 3))

    def on_rank(rank: int, mesh: object) -> torch.Tensor:
        mine = [spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]]
        request = AuxRequest(max_logit=True)
        _, aux = spanwise.context_parallel_attention(*mine, plan, mesh, softcap=softcap, return_aux=request)
        assert aux.lse is None
        return aux.max_logit

    for got in run_ranks(plan.layout.num_ranks, on_rank):
        torch.testing.assert_close(got.double(), expected, rtol=1e-10, atol=0)


def test_rows_without_a_key() -> None:
    """Output 0, lse -inf, gradient 0, and with sinks lse is the sink."""
    rows = np.arange(LENGTH)
    mask = SpanMask(np.zeros((1, LENGTH), int), np.where(rows % 3 == 0, 0, rows + 1)[None], LENGTH)
    plan = spanwise.make_plan(mask, 3, balancer="contiguous")
    problem = make_problem(mask.dense())

    def on_rank(rank: int, mesh: object):
        mine = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        empty = spanwise.shard(plan, mesh, torch.from_numpy(rows % 3 == 0), dim=0)
        for kernel in ("reference", "sdpa"):
            out, aux = spanwise.context_parallel_attention(
                *mine, plan, mesh, kernel=kernel, return_aux=AuxRequest(lse=True)
            )
            (grad,) = torch.autograd.grad([out, aux.lse], mine[0], [torch.ones_like(out), torch.ones_like(aux.lse)])
            assert (out[:, :, empty] == 0).all() and (aux.lse[:, :, empty] == -math.inf).all()
            assert (grad[:, :, empty] == 0).all() and grad.isfinite().all() and out[:, :, ~empty].ne(0).any()
            sinks = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
            _, aux = spanwise.context_parallel_attention(
                *mine, plan, mesh, kernel=kernel, sinks=sinks, return_aux=AuxRequest(lse=True)
            )
            assert (aux.lse[:, :, empty] == sinks.view(1, 4, 1)).all()

    run_ranks(3, on_rank)


def attend(plan=PLAN, *, edit=lambda q, k, v: (q, k, v), mesh_is_none=False, **options):
    problem = make_problem(MASK.dense(), dtype=torch.float32)

    def on_rank(rank: int, mesh: object) -> torch.Tensor:
        q, k, v = edit(*(PLAN.shard(x, rank, dim=2) for x in problem[:3]))
        return spanwise.context_parallel_attention(q, k, v, plan, None if mesh_is_none else mesh, **options)

    return run_ranks(3, on_rank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attend(edit=lambda q, k, v: (q[:, :, :5], k, v)), "must be rank .*shard of the sequence"),
        (lambda: attend(edit=lambda q, k, v: (q[0], k, v)), r"\[batch, heads, tokens, head_dim\]"),
        (lambda: attend(edit=lambda q, k, v: (q[:, :3], k, v)), "3 query heads are not a multiple of 2"),
        (lambda: attend(edit=lambda q, k, v: (q, k.double(), v)), "share dtype"),
        (lambda: attend(edit=lambda q, k, v: (q, k, v[:, :1])), "must agree"),
        (lambda: attend(plan=MASK), "needs a Plan or RankPlan, got SpanMask"),
        (lambda: attend(plan=spanwise.make_plan(MASK, 2)), "plan is for 2 ranks, the mesh has 3"),
        (lambda: attend(mesh_is_none=True), "needs their mesh"),
        (lambda: attend(mask_name="window"), r"no mask named 'window'; it has \['default'\]"),
        (lambda: attend(kernel="cudnn"), "unknown kernel 'cudnn'"),
        (lambda: attend(kernel="sdpa", score_mod=lambda s, b, h, i, j: s), "cannot apply a score_mod"),
        (lambda: attend(softcap=1.0, score_mod=lambda s, b, h, i, j: s), "cannot be combined"),
        (lambda: attend(softcap=-1.0), "softcap must be positive"),
        (lambda: attend(softcap=math.inf), "softcap must be positive"),
        (lambda: attend(sinks=torch.zeros(3)), "one logit a query head"),
        (
            lambda: attend(
                kernel="reference", score_mod=lambda s, b, h, i, j: s, return_aux=AuxRequest(max_logit=True)
            ),
            "CPU without a score_mod",
        ),
        (lambda: attend(kernel="flex"), "kernel 'flex' runs on CUDA"),
    ],
)
def test_bad_calls_are_errors_before_any_collective(call, message: str, collectives: list[str]) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    assert len(collectives) in (0, 3)  # nothing but, on each of three ranks, the comparison of plans


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the collectives that any rank starts."""
    started: list[str] = []
    for name in ("start_all_gather", "start_reduce_scatter", "start_all_reduce"):
        start = getattr(_torch, name)
        monkeypatch.setattr(_torch, name, lambda *args, name=name, start=start: (started.append(name), start(*args))[1])
    return started


def test_kernels_of_another_device_say_what_works() -> None:
    with pytest.raises(ValueError, match="runs on CUDA.*use kernel='sdpa'"):
        attend(kernel="varlen")


def test_plans_that_differ_between_ranks() -> None:
    plans = [PLAN, PLAN, spanwise.make_plan(MASK, 3, balancer="lpt", block_size=4)]

    def on_rank(rank: int, mesh: object) -> str:
        with pytest.raises(ValueError, match="different plans") as error:
            plans[rank].local(mesh)
        return str(error.value)

    for text in run_ranks(3, on_rank):
        assert all(plan.fingerprint in text for plan in plans) and "rank 2 has" in text


def test_a_plan_is_compared_at_each_call_and_a_rank_plan_is_not(collectives: list[str]) -> None:
    """Rank 0 keeps its plan object, the others make it anew: no rank may start a comparison that another skips."""
    x = torch.zeros(1, 2, PLAN.layout.tokens_per_rank.max(), 8)

    def on_rank(rank: int, mesh: object) -> bool:
        options = dict(balancer="ptrr", exchange="all_gather", block_size=4)
        first = spanwise.make_plan(MASK, 3, **options)
        q = x[:, :, : first.layout.num_tokens(rank)]
        spanwise.context_parallel_attention(q, q, q, first, mesh)
        second = first if rank == 0 else spanwise.make_plan(MASK, 3, **options)
        spanwise.context_parallel_attention(q, q, q, second, mesh)
        return first.local(mesh) is first.local(mesh, "cpu")

    assert all(run_ranks(3, on_rank))
    # Two calls with a Plan: a comparison and a gather of K/V each; two comparisons by plan.local.
    assert len(collectives) == 3 * (4 + 2)


def test_plans_that_were_equal_once_may_differ_later() -> None:
    """Both plans have been compared and found equal; then the ranks take different ones."""
    plans = [spanwise.make_plan(MASK, 2, balancer=balancer, block_size=5) for balancer in ("contiguous", "head_tail")]
    assert plans[0].layout.tokens_per_rank.tolist() == plans[1].layout.tokens_per_rank.tolist()

    def on_rank(rank: int, mesh: object) -> None:
        q = torch.zeros(1, 2, plans[0].layout.num_tokens(rank), 8)
        for plan in plans:
            spanwise.context_parallel_attention(q, q, q, plan, mesh)
        with pytest.raises(ValueError, match="ranks made different plans"):
            spanwise.context_parallel_attention(q, q, q, plans[rank], mesh)

    run_ranks(2, on_rank)


def test_eager_collectives_enclose_the_local_part() -> None:
    """Forward: start, local, wait, remote. Backward: remote, start, local, wait."""
    problem = make_problem(MASK.dense())

    class Record(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            namespace, name = func.name().split("::")
            if namespace in ("spanwise", "_c10d_functional"):
                self.names.append(name)
            return func(*args, **(kwargs or {}))

    def on_rank(rank: int, mesh: object) -> list[str]:
        plan = PLAN.local(mesh)
        leaves = [spanwise.shard(PLAN, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        with Record() as record:
            out = spanwise.context_parallel_attention(*leaves, plan, mesh)
            out.sum().backward()
        return record.names

    for names in run_ranks(3, on_rank):
        assert names == [
            *("all_gather_into_tensor", "sdpa", "wait_tensor", "sdpa"),
            *("sdpa_backward", "reduce_scatter_tensor", "sdpa_backward", "wait_tensor"),
        ]


def test_float32_stays_float32_under_autocast() -> None:
    problem = make_problem(MASK.dense(), dtype=torch.float32)
    plan = spanwise.make_plan(MASK, 1)
    for kernel in ("reference", "sdpa"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = spanwise.context_parallel_attention(*problem[:3], plan, None, kernel=kernel)
        assert relative_error(out, problem.out) <= 2e-6


def test_flex_needs_a_token_on_every_rank() -> None:
    """All ranks raise; the kernel would on the empty rank alone, and the others would wait."""
    plan = spanwise.make_plan(SpanMask.causal(2), 3, balancer="contiguous", block_size=1)

    def on_rank(rank: int, mesh: object) -> None:
        with pytest.raises(ValueError, match="at least one token on every rank"):
            plan.local(mesh, kernel="flex")

    run_ranks(3, on_rank)
