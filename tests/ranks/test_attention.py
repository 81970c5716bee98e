"""context_parallel_attention on threaded ranks against dense float64 attention: outputs and gradients on every rank."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise import AuxRequest, SpanMask, _torch
from tests.oracle import Problem, make_problem, relative_error
from tests.pairs import covering, named
from tests.ranks.harness import run_ranks

LENGTH = 67  # divides by nothing
CU_SEQLENS = [0, 1, 2, 19, 19, 40, 67]  # documents of length 1 and 0
HOSTS = dataclasses.replace(spanwise.H100.with_host_size(2), name="hosts of 2")
EXCHANGES = [
    {"exchange": "all_gather"},
    {"exchange": "all_gather", "keep_kv": False},
    {"exchange": "needed", "stages": 1},
    {"exchange": "needed", "stages": 3},
    {"exchange": "needed", "stages": 3, "keep_kv": False},
    {"exchange": "hierarchical", "hardware": HOSTS},
    {"exchange": "ring"},
    {"exchange": "ring", "keep_kv": True},
    {"exchange": "ulysses"},
]
TWO_LEVELS = [way for way in EXCHANGES if way != {"exchange": "ulysses"}]
ULYSSES_HEADS = (24, 6)  # go with 1, 2, 3, 4 and 8 ranks, where some share K/V heads unevenly
KERNELS = {"reference": (torch.float64, 1e-10), "sdpa": (torch.float32, 1e-5)}  # dtype and tolerance
BALANCERS = ["head_tail", "per_document_head_tail", "ptrr", "spt", "auto"]


def masks() -> dict[str, SpanMask]:
    rng = np.random.default_rng(0)
    start = rng.integers(0, LENGTH, LENGTH)
    end = np.where(rng.random(LENGTH) < 0.3, start, rng.integers(start, LENGTH + 1))  # a third of the rows is empty
    return {
        "causal": SpanMask.causal(LENGTH),
        "full": SpanMask.full(LENGTH),
        "documents": SpanMask.documents(CU_SEQLENS),
        "window": SpanMask.sliding_window(LENGTH, 9, 2),
        "two spans": SpanMask.block_causal(LENGTH, 8, num_previous=1, global_tokens=3),
        "random, empty rows": SpanMask(start[None], end[None], LENGTH),
        "nothing": SpanMask(np.zeros((1, LENGTH), int), np.zeros((1, LENGTH), int), LENGTH),
    }


def run(problem: Problem, plan: spanwise.Plan, kernel: str) -> list[tuple[torch.Tensor, ...]]:
    """out, lse, dq, dk, dv of every rank."""

    def on_rank(rank: int, mesh: object) -> tuple[torch.Tensor, ...]:
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out, aux = spanwise.context_parallel_attention(
            *leaves, plan, mesh, kernel=kernel, return_aux=AuxRequest(lse=True)
        )
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        return (out.detach(), aux.lse.detach(), *(x.grad for x in leaves))

    return run_ranks(plan.num_ranks, on_rank, **mesh_of(plan))


def mesh_of(plan: spanwise.Plan) -> dict[str, Any]:
    """Arguments of `run_ranks` for the mesh that the plan wants."""
    if plan.inner in (1, plan.num_ranks):
        return {}
    return {"mesh_shape": (plan.num_groups, plan.inner), "mesh_dim_names": ("outer", "inner")}


def heads_for(exchange: dict[str, Any]) -> tuple[int, int]:
    return ULYSSES_HEADS if exchange["exchange"] == "ulysses" else (4, 2)


def check(problem: Problem, plan: spanwise.Plan, results: list[tuple[torch.Tensor, ...]], tolerance: float) -> None:
    expected = (problem.out, problem.lse, problem.dq, problem.dk, problem.dv)
    for rank, got in enumerate(results):
        for name, x, whole in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
            reference = plan.shard(whole, rank, dim=2)
            if name == "lse":
                assert torch.equal(torch.isinf(x), torch.isinf(reference))
                x, reference = x.masked_fill(x.isinf(), 0), reference.masked_fill(reference.isinf(), 0)
            scale = whole.masked_fill(whole.isinf(), 0).abs().amax().clamp(min=1e-3)
            error = float((x.double() - reference).abs().amax() / scale) if x.numel() else 0.0
            assert error <= tolerance, f"rank {rank} {name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("exchange", "num_ranks", "name", "kernel"),
    covering(EXCHANGES, [1, 2, 3, 4, 8], sorted(masks()), sorted(KERNELS)),
    ids=named,
)
def test_matches_one_device(exchange: dict[str, Any], num_ranks: int, name: str, kernel: str) -> None:
    mask, (dtype, tolerance) = masks()[name], KERNELS[kernel]
    problem = make_problem(mask.dense(), heads=heads_for(exchange), dims=(8, 6), dtype=dtype)
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", **exchange, block_size=8)
    check(problem, plan, run(problem, plan, kernel), tolerance)


@pytest.mark.parametrize(
    ("exchange", "axes", "name", "kernel"),
    covering(
        TWO_LEVELS,
        [(1, 2), (2, 2), (3, 2), (2, 4)],
        sorted(masks()),
        sorted(KERNELS),
        # One group brings no K/V, and says so.
        possible=lambda way, axes, name, kernel: axes[0] > 1 or way.get("keep_kv") is not False,
    ),
    ids=named,
)
def test_two_levels(exchange: dict[str, Any], axes: tuple[int, int], name: str, kernel: str) -> None:
    """Heads are traded on the inner axis, K/V travel on the outer one."""
    mask, (dtype, tolerance) = masks()[name], KERNELS[kernel]
    problem = make_problem(mask.dense(), dims=(8, 6), dtype=dtype)
    plan = spanwise.make_plan(mask, axes, balancer="head_tail", **exchange, block_size=8)
    assert plan.inner == axes[1]
    check(problem, plan, run(problem, plan, kernel), tolerance)


@pytest.mark.parametrize("exchange", ["needed", "ring"])
def test_two_levels_with_a_single_rank_inside(exchange: str) -> None:
    """Hosts of one rank each: the mesh has both axes, and nobody trades heads."""
    mask = SpanMask.documents(CU_SEQLENS)
    problem = make_problem(mask.dense())
    plan = spanwise.make_plan(mask, (3, 1), balancer="head_tail", exchange=exchange, block_size=8)

    def on_rank(rank: int, mesh: Any) -> torch.Tensor:
        shards = [spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]]
        return spanwise.context_parallel_attention(*shards, plan, mesh, kernel="sdpa")

    for rank, out in enumerate(run_ranks(3, on_rank, mesh_shape=(3, 1), mesh_dim_names=("outer", "inner"))):
        assert relative_error(out, plan.shard(problem.out, rank, dim=2)) <= 1e-10


@pytest.mark.parametrize(
    ("exchange", "balancer", "kernel"),
    [
        # One layout for all rows, and one for each; then the other balancers.
        *covering(EXCHANGES, ["contiguous", "lpt"], sorted(KERNELS)),
        *(({"exchange": "needed", "stages": 3}, balancer, "sdpa") for balancer in BALANCERS),
    ],
    ids=named,
)
def test_batch_rows_with_masks_of_their_own(exchange: dict[str, Any], balancer: str, kernel: str) -> None:
    rows = [SpanMask.documents(CU_SEQLENS), SpanMask.documents([0, 40, 67]), SpanMask.sliding_window(LENGTH, 5)]
    mask = SpanMask.stack(rows)
    problem = make_problem(mask.dense(), batch=3)
    offsets = [CU_SEQLENS, [0, 40, 67], [0, 67]]
    plan = spanwise.make_plan(mask, 4, balancer=balancer, **exchange, block_size=8, cu_seqlens=offsets)
    check(problem, plan, run(problem, plan, kernel), 1e-10)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_one_mask_for_a_whole_batch(exchange: dict[str, Any]) -> None:
    mask = SpanMask.causal(LENGTH)
    problem = make_problem(mask.dense(), batch=3)
    plan = spanwise.make_plan(mask, 4, **exchange, block_size=8)
    check(problem, plan, run(problem, plan, "sdpa"), 1e-10)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
@pytest.mark.parametrize(("heads", "tolerance"), [((4, 4), 2.5e-2), ((4, 1), 3.5e-2)])
def test_bfloat16(exchange: dict[str, Any], heads: tuple[int, int], tolerance: float) -> None:
    mask = SpanMask.documents(CU_SEQLENS)
    problem = make_problem(mask.dense(), heads=heads, dims=(16, 16), dtype=torch.bfloat16)
    plan = spanwise.make_plan(mask, 4, **exchange, block_size=8)
    for kernel in ("reference", "sdpa"):
        check(problem, plan, run(problem, plan, kernel), tolerance)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_gradients_are_summed_in_float32(exchange: dict[str, Any]) -> None:
    """One key that all of eight ranks read: dv is a sum whose terms bfloat16 would lose one by one."""
    ranks = 8
    heads = ranks if exchange["exchange"] == "ulysses" else 1
    mask = SpanMask(np.zeros((1, ranks), int), np.ones((1, ranks), int), ranks)  # every row reads key 0 alone
    plan = spanwise.make_plan(mask, ranks, balancer="contiguous", **exchange, block_size=1)
    # In bfloat16 256 + 1 is 256 again: a running sum would lose every 1. What rank 0 adds itself does not travel.
    grads = torch.tensor([0.0, 256.0] + [1.0] * (ranks - 2))

    def on_rank(rank: int, mesh: object) -> torch.Tensor:
        q, k, v = (torch.ones(1, n, 1, 8, dtype=torch.bfloat16).requires_grad_() for n in (heads, 1, 1))
        out = spanwise.context_parallel_attention(q, k, v, plan, mesh)
        # Ulysses adds tokens where they are computed, and what travels is a sum over heads.
        by_head = grads.view(1, heads, 1, 1).expand(out.shape) if heads > 1 else grads[rank].expand(out.shape)
        out.backward(by_head.to(out.dtype) * (rank == 0 if heads > 1 else 1))
        return v.grad

    dv = run_ranks(ranks, on_rank)
    assert dv[0].unique().tolist() == [262.0] and all(not x.any() for x in dv[1:])


@pytest.mark.parametrize("exchange", EXCHANGES, ids=named)
def test_ranks_without_tokens(exchange: dict[str, Any]) -> None:
    mask = SpanMask.causal(3)
    problem = make_problem(mask.dense())
    plan = spanwise.make_plan(mask, 4, balancer="contiguous", **exchange, block_size=1)
    assert plan.layout.tokens_per_rank.min() == 0
    check(problem, plan, run(problem, plan, "sdpa"), 1e-10)


def test_several_masks_share_a_layout() -> None:
    named = {"full": SpanMask.causal(LENGTH), "window": SpanMask.sliding_window(LENGTH, 6)}
    plan = spanwise.make_plan(named, 4, weights={"full": 1, "window": 3}, block_size=4, balancer="lpt")
    problems = {name: make_problem(mask.dense()) for name, mask in named.items()}

    def on_rank(rank: int, mesh: object) -> dict[str, torch.Tensor]:
        return {
            name: spanwise.context_parallel_attention(
                *(spanwise.shard(plan, mesh, x, dim=2) for x in problem[:3]), plan, mesh, mask_name=name
            )
            for name, problem in problems.items()
        }

    for rank, outs in enumerate(run_ranks(4, on_rank)):
        for name, problem in problems.items():
            assert relative_error(outs[name], plan.shard(problem.out, rank, dim=2)) <= 1e-10


@pytest.mark.parametrize(
    ("dtype", "exchange", "batched", "axes"),
    covering(
        [torch.float32, torch.bfloat16],
        EXCHANGES,
        [False, True],
        [3, (2, 3), (3, 2)],
        # The inner axis trades heads already.
        possible=lambda dtype, way, batched, axes: axes == 3 or way["exchange"] != "ulysses",
    ),
    ids=named,
)
def test_bytes_on_the_wire(
    monkeypatch: pytest.MonkeyPatch, exchange: dict[str, Any], dtype: torch.dtype, batched: bool, axes: Any
) -> None:
    """What a rank receives from others in a forward is what the plan says, to the byte."""
    documents = SpanMask.documents(CU_SEQLENS)
    mask = SpanMask.stack([documents, SpanMask.sliding_window(LENGTH, 5)]) if batched else documents
    shape = {"num_q_heads": 12, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
    plan = spanwise.make_plan(mask, axes, balancer="lpt", **exchange, block_size=8, dtype=dtype, **shape)
    problem = make_problem(mask.dense(), batch=mask.batch_size, heads=(12, 2), dims=(8, 6), dtype=dtype)
    received = [0] * plan.num_ranks
    ranks = threading.local()
    gather, exchange_rows = _torch.start_all_gather, _torch.start_all_to_all

    def count_gather(x, size, name):
        if hasattr(ranks, "rank"):  # else it is the comparison of plans
            received[ranks.rank] += (size - 1) * x.numel() * x.element_size()
        return gather(x, size, name)

    def count_rows(x, recv_rows, send_rows, name):
        own = _torch.find_group(name).rank()  # what a rank sends itself does not travel
        received[ranks.rank] += (sum(recv_rows) - recv_rows[own]) * x.shape[1] * x.element_size()
        return exchange_rows(x, recv_rows, send_rows, name)

    def on_rank(rank: int, mesh: object) -> None:
        local = plan.local(mesh)
        ranks.rank = rank
        spanwise.context_parallel_attention(*(plan.shard(x, rank, dim=2) for x in problem[:3]), local, mesh)

    monkeypatch.setattr(_torch, "start_all_gather", count_gather)
    monkeypatch.setattr(_torch, "start_all_to_all", count_rows)
    run_ranks(plan.num_ranks, on_rank, **mesh_of(plan))
    assert received == plan.recv_bytes().tolist()


def test_nothing_needed_nothing_sent() -> None:
    """Each rank holds whole documents: no collective, forward or backward."""
    mask = SpanMask.documents([0, 20, 40, 60])
    problem = make_problem(mask.dense())
    plan = spanwise.make_plan(mask, 3, balancer="contiguous", exchange="needed")
    assert plan.recv_tokens().tolist() == [0, 0, 0]

    def on_rank(rank: int, mesh: object) -> list[str]:
        local = plan.local(mesh)
        leaves = [plan.shard(x, rank, dim=2).requires_grad_() for x in problem[:3]]
        names: list[str] = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                names.append(func.name())
                return func(*args, **(kwargs or {}))

        with Record():
            spanwise.context_parallel_attention(*leaves, local, mesh).sum().backward()
        return names

    for names in run_ranks(3, on_rank):
        assert "spanwise::sdpa" in names and not [name for name in names if name.startswith("_c10d")]
    check(problem, plan, run(problem, plan, "sdpa"), 1e-10)
