"""torch.compile(fullgraph=True) and activation checkpointing on real gloo ranks, and tensor parallelism beside."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import spanwise
from spanwise import SpanMask
from spanwise.attention.kernels import flex as flex_module
from tests.attention.stand_ins import dense_flex
from tests.oracle import make_problem
from tests.pairs import covering, named
from tests.properties.cases import Case, check, keep_attention, on_rank
from tests.ranks.calls import EXCHANGES, errors, leaves_of, step
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import Setting, packing
from tests.ranks.test_exchanges import Operators

pytestmark = pytest.mark.compiles

LENGTH = 83
PADDED = packing([5, 0, 100], [0, 16, 32], 150)
SLOW = pytest.mark.slow
Way = dict[str, Any]


def plan_number(i: int, num_ranks: int | tuple[int, int] = 2, reads: tuple[int, ...] = (), **way: Any) -> spanwise.Plan:
    """Masks and layouts that differ.

    Args:
        reads: K/V tokens that rank 1 of 3 reads elsewhere, for each number; rank 2 reads 2.
    """
    if reads:
        first, second = 20 + i, 40 + 2 * i
        mask = SpanMask.documents([0, first - reads[i], second - 2, 60 + 3 * i])
        return spanwise.make_plan(mask, num_ranks, balancer="contiguous", block_size=1, **way)
    rng = np.random.default_rng(i)
    cuts = np.unique(np.concatenate([[0, LENGTH], rng.integers(1, LENGTH, i % 4)]))
    mask = SpanMask.documents(cuts) if i % 3 else SpanMask.block_causal(LENGTH, 8, 1, global_tokens=3)
    balancer = ("head_tail", "lpt", "ptrr")[i % 3]
    way = {"exchange": "all_gather"} | way
    return spanwise.make_plan(mask, num_ranks, balancer=balancer, block_size=4, **way)


def compiled_steps(
    rank: int, mesh: DeviceMesh, num_plans: int, way: Way, dynamic: bool
) -> tuple[list[float], list[list[str]]]:
    """Errors for each plan through one compiled function; the operators of each ATen graph in order.

    Args:
        way: of `plan_number`.
        dynamic: mark the length of q, K and V as dynamic: the first graph is the last, half of the time to compile.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target.name() for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        return make_boxed_func(gm.forward)

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, plan)  # over the mesh of the rank plan

    found = []
    for i in range(num_plans):
        plan = plan_number(i, **way)
        problem = make_problem(plan.mask().dense(), seed=i)
        leaves, grad = leaves_of(plan, mesh, problem)
        for x in leaves if dynamic else ():
            torch._dynamo.mark_dynamic(x, 2)
        out = attend(*leaves, plan.local(mesh["cp"]))  # a slice made anew in each step makes no graph
        out.backward(grad)
        found += errors(plan, rank, problem, [out, *(x.grad for x in leaves)])
    return found, graphs


SHORT = {"wait_tensor": "wait", "sdpa": "a", "sdpa_backward": "a'"}


def collectives(graph: list[str], before: int = 0) -> str:
    """What the ranks see of a graph, in order: `go` starts a collective, `a` attends to a chunk, `a'` is its backward.

    Args:
        before: most operators before the comparison of the call, or of its backward.
    """
    seen = [name.split("::")[1] for name in graph if name.startswith(("spanwise::", "_c10d_functional::"))]
    at = seen.index("compare_call")
    assert at <= before
    del seen[at]
    return " ".join(SHORT.get(name, "go") for name in seen)


def expected(exchange: str, chunks: int) -> tuple[str, str]:
    """Attention stands between the two halves of each collective, in both directions."""
    if exchange == "ulysses":  # q beside K/V; nothing is computed before they are there
        return "go go wait wait a go wait", "go wait a' go go wait wait"
    if exchange == "ring":
        return "go a" + " wait go a" * (chunks - 1) + " wait a", "a' go" + " a' wait go" * (chunks - 1) + " a' wait"
    return "go " * chunks + "a" + " wait a" * chunks, "a' go " * chunks + "a'" + " wait" * chunks


@pytest.mark.parametrize(
    ("num_ranks", "way", "num_plans"),
    [
        pytest.param(2, {"exchange": "needed", "stages": 3}, 5, marks=SLOW),
        (3, {"exchange": "needed", "stages": 1, "reads": (3, 0, 1, 5, 1, 0, 2)}, 7),
        pytest.param(3, {"exchange": "ring", "keep_kv": True}, 3, marks=SLOW),
        pytest.param(2, {"exchange": "ulysses"}, 5, marks=SLOW),
    ],
    ids=named,
)
def test_one_graph_serves_many_plans(gloo_pool: GlooPool, num_ranks: int, way: Way, num_plans: int) -> None:
    in_forward, in_backward = expected(way["exchange"], plan_number(0, num_ranks, **way).num_chunks())
    dynamic = num_ranks > 2  # else the first graph is one for the length of the first plan, and the second one for all
    steps = (num_plans, {"num_ranks": num_ranks, **way}, dynamic)
    for found, graphs in gloo_pool.run(num_ranks, compiled_steps, *steps):
        forwards = [graph for graph in graphs if "spanwise::sdpa" in graph]
        backwards = [graph for graph in graphs if "spanwise::sdpa_backward" in graph]
        assert 1 <= len(forwards) <= 2 - dynamic and len(forwards) + len(backwards) == len(graphs)
        assert all(collectives(graph) == in_forward for graph in forwards)
        # Up to torch 2.14 the partitioner of this backend, not Inductor's, keeps the first all-to-all in the backward
        # as well, unused.
        again = "go wait " if way["exchange"] == "ring" else ""
        allowed = (in_backward, again + in_backward)
        assert all(collectives(graph, len(again.split())) in allowed for graph in backwards), backwards
        assert max(found) <= 1e-10


# What compiled calls depend on, in the kernel that compiles on a CPU; `make test` takes a few cells.
COMPILED_CELLS = covering(
    [way for way in EXCHANGES if way.get("keep_kv", way["exchange"] != "ring")], [(2, 1, 1), (2, 2, 1)],
    ["rows", "cross", "padded"], [("sdpa", "float64")],
    [{"softcap": 0.7, "scale": 0.5}, {"sinks": 1}, {}, {"gradients": False, "lse": False}, {"latents": 3}],
    ["aot_eager", "inductor"],
    possible=lambda way, levels, *cell: levels[1] == 1 or not (way["exchange"] == "ulysses" or "latents" in cell[2]),
)  # fmt: skip


def is_quick(way: Way, levels: Any, mask: str, precision: Any, options: Any, backend: str) -> bool:
    quick = mask == "padded" or (levels == (2, 1, 1) and way["exchange"] != "ring")
    return quick and backend == "aot_eager" and "latents" not in options


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[] if is_quick(*cell) else SLOW) for cell in COMPILED_CELLS],
    ids=lambda cell: "-".join([named(cell[0]) or "", *map(str, cell[1:])]),
)
def test_compiled_calls_are_right(gloo_pool: GlooPool, cell: Any) -> None:
    """Padding holds NaN."""
    way, levels, mask, precision, options, backend = cell
    balancer = "contiguous" if mask == "cross" else "lpt"
    case = Setting(way, levels, mask, balancer, precision, options, ((4, 2), (8, 6)), f"compiled by {backend}").case()
    check(case, gloo_pool.run)


@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_recomputes_what_it_is_told_to(selective: bool) -> None:
    """Plain checkpointing runs the kernel of each chunk twice."""
    plan = plan_number(1, exchange="needed", keep_kv=True, stages=2)
    problem = make_problem(plan.mask().dense())
    context = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    options = {"context_fn": context} if selective else {}

    def on_rank(rank: int, mesh: DeviceMesh) -> int:
        with Operators() as operators:
            attend = functools.partial(checkpoint, spanwise.context_parallel_attention, use_reentrant=False, **options)
            assert max(errors(plan, rank, problem, step(plan, mesh, problem, attend))) <= 1e-10
        return operators.names.count("a")

    assert run_ranks(2, on_rank) == [(1 if selective else 2) * (1 + plan.num_chunks())] * 2


# ---------------------------------------------------------------- flex, on torch's dense stand-in for FlexAttention

# 300 keys are no whole number of blocks on any rank.
FLEX = {
    "needed": Case({"default": SpanMask.documents([0, 130, 300], window=(40, 3), causal=False)}, stages=2,
                   bias="batch", batch=2, style="checkpoint"),
    # The last block of keys is full, but for spare keys behind it.
    "refetched": Case({"default": SpanMask.full(300)}, stages=2, keep_kv=False),
    "padded": Case({"default": PADDED[0]}, packing=PADDED[1], exchange="ring"),
    "compiled": Case({"default": SpanMask.causal(300)}, stages=2, style="compiled by aot_eager"),
}  # fmt: skip


def on_flex(rank: int, mesh: DeviceMesh, case: Case, *given: Any) -> dict[str, torch.Tensor]:
    with (
        dense_flex(),
        warnings.catch_warnings(),
        mock.patch.object(flex_module.Flex, "check_device", lambda *_: None),
    ):
        warnings.simplefilter("ignore")  # of Dynamo, which reads .grad of what is no leaf
        return on_rank(rank, mesh, case, *given)


@pytest.mark.parametrize("name", FLEX)
def test_flex_matches_one_device(gloo_pool: GlooPool, name: str) -> None:
    options: dict[str, Any] = {"levels": (2, 1), "kernel": "flex", "dtype": "float32", "dims": (16, 16)}
    compiled = FLEX[name].style.startswith("compiled")
    case = dataclasses.replace(FLEX[name], rank_plan=compiled, balancer="lpt", **options)
    check(case, lambda num_ranks, _, *given, **mesh: gloo_pool.run(num_ranks, on_flex, *given, **mesh))


# ---------------------------------------------------------------- numbers that are arguments of compiled code


def differences(rank: int, mesh: DeviceMesh, name: str) -> tuple[float, int]:
    """The largest of outputs and gradients from eager code; and how many graphs were made."""
    local = spanwise.make_plan(SpanMask.causal(12), 2, block_size=2, balancer="contiguous").local(mesh)
    labels, most = torch.arange(6)[None] % 4, 0.0

    def attention(x: torch.Tensor, n: float) -> torch.Tensor:
        x = x.transpose(1, 2)  # Dynamo takes no tensor twice
        return spanwise.context_parallel_attention(x, x + 1, 2 * x, local, scale=1 / n, softcap=3 * n)

    def count(x: torch.Tensor, n: float) -> torch.Tensor:
        return spanwise.cross_entropy(x[:, :, 0], labels, mesh, num_valid=n)

    torch._dynamo.reset()
    call, counter = {"attention": attention, "count": count}[name], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for number in (9.0, 8.5):
        x, weight, results = torch.randn(1, 6, 2, 4, dtype=torch.float64).requires_grad_(), torch.randn(()), []
        for run in (compiled, call):
            out = run(x, number)
            results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), x)))
        most = max(most, *((got - want).abs().max().item() for got, want in zip(*results, strict=True)))
    return most, counter.frame_count


@pytest.mark.parametrize("name", ["count", pytest.param("attention", marks=SLOW)])
def test_numbers_are_arguments(gloo_pool: GlooPool, name: str) -> None:
    """torch makes symbols of them under dynamic=True. Another number of tokens is no other graph."""
    for most, graphs in gloo_pool.run(2, differences, name):
        assert most < 1e-6 and (name != "count" or graphs == 1)
