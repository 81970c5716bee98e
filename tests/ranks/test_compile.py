"""torch.compile(fullgraph=True) and activation checkpointing on real gloo ranks, and tensor parallelism beside."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import spanwise
from spanwise import SpanMask, recurrence
from spanwise.attention.rank_plan import build
from tests.oracle import make_problem
from tests.pairs import covering, named
from tests.properties.cases import check, keep_attention
from tests.ranks.calls import EXCHANGES, HOSTS, errors, leaves_of, step
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import Setting

pytestmark = pytest.mark.compiles

LENGTH = 83
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
    if exchange in ("ring", "hierarchical"):
        return "go a" + " wait go a" * (chunks - 1) + " wait a", "a' go" + " a' wait go" * (chunks - 1) + " a' wait"
    return "go " * chunks + "a" + " wait a" * chunks, "a' go " * chunks + "a'" + " wait" * chunks


@pytest.mark.parametrize(
    ("num_ranks", "way", "num_plans"),
    [
        pytest.param(2, {"exchange": "all_gather"}, 5, marks=SLOW),
        pytest.param(2, {"exchange": "needed", "stages": 3}, 5, marks=SLOW),
        (3, {"exchange": "needed", "stages": 1, "reads": (3, 0, 1, 5, 1, 0, 2)}, 7),
        pytest.param(3, {"exchange": "ring", "keep_kv": True}, 3, marks=SLOW),
        pytest.param(4, {"exchange": "hierarchical", "hardware": HOSTS}, 3, marks=SLOW),
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
        again = "go wait " if way["exchange"] in ("ring", "hierarchical") else ""
        allowed = (in_backward, again + in_backward)
        assert all(collectives(graph, len(again.split())) in allowed for graph in backwards), backwards
        assert max(found) <= 1e-10


# What compiled calls depend on, in the kernel that compiles on a CPU; `make test` takes a few cells.
COMPILED_CELLS = covering(
    [way for way in EXCHANGES if way.get("keep_kv", way["exchange"] != "ring")], [(2, 1), (2, 2)],
    ["rows", "cross", "padded"], [("sdpa", "float64")],
    [{"softcap": 0.7, "scale": 0.5}, {"sinks": 1}, {}, {"gradients": False, "lse": False}],
    ["aot_eager", "inductor"],
    possible=lambda way, levels, *_: levels[1] == 1 or way["exchange"] != "ulysses",
)  # fmt: skip


def is_quick(way: Way, levels: tuple[int, int], mask: str, precision: Any, options: Any, backend: str) -> bool:
    return backend == "aot_eager" and (mask == "padded" or (levels == (2, 1) and way["exchange"] != "ring"))


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


def test_hops_of_a_ring_are_a_graph_of_their_own() -> None:
    """Which hops there are is structure: plans that differ in nothing else share a graph, as pytrees of one kind."""
    masks = [SpanMask.documents(cuts) for cuts in ([0, 83], [0, 60, 83], [0, 30, 60, 83], [0, 25, 83])]
    plans = [spanwise.make_plan(m, 4, balancer="contiguous", exchange="ring", keep_kv=True) for m in masks]
    kinds = [tree_flatten(build(plan, 1))[1] for plan in plans]
    tables = [plan.route().tokens > 0 for plan in plans]  # who sends to whom in each step
    hops = [tuple(map(tuple, np.argwhere(table).tolist())) for table in tables]
    assert 1 < len(set(hops)) < len(hops)
    for i in range(len(plans)):
        for j in range(len(plans)):
            assert (kinds[i] == kinds[j]) == (hops[i] == hops[j])


@pytest.mark.parametrize("exchange", ["ring", "needed"])
def test_what_compiled_code_refuses(exchange: str) -> None:
    """A plan that no rank plan was built of, and chunks that are fetched again."""
    plan = plan_number(0, exchange=exchange, keep_kv=False)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        x = torch.randn(1, 2, plan.layout.num_tokens(rank), 8)
        attend = torch.compile(spanwise.context_parallel_attention, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="keep_kv=False is for eager code"):
            attend(x, x, x, build(plan, rank), mesh)  # plan.local would notice that another thread compiles
        with pytest.raises(Exception, match="inside a compiled region; build plan.local"):
            attend(x, x, x, plan, mesh)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_recomputes_what_it_is_told_to(selective: bool) -> None:
    """Plain checkpointing runs the kernel of each chunk twice."""
    plan = plan_number(1, exchange="needed", keep_kv=True, stages=2)
    problem = make_problem(plan.mask().dense())
    context = functools.partial(create_selective_checkpoint_contexts, keep_attention)
    options = {"context_fn": context} if selective else {}

    def on_rank(rank: int, mesh: DeviceMesh) -> int:
        with CountCalls() as counter:
            attend = functools.partial(checkpoint, spanwise.context_parallel_attention, use_reentrant=False, **options)
            assert max(errors(plan, rank, problem, step(plan, mesh, problem, attend))) <= 1e-10
        return counter.calls

    assert run_ranks(2, on_rank) == [(1 if selective else 2) * (1 + plan.num_chunks())] * 2


class CountCalls(TorchDispatchMode):
    """Counts kernels in its region."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.spanwise.sdpa.default
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- heads sharded by tensor parallelism


def test_dtensors_that_do_not_fit() -> None:
    plan, ulysses = plan_number(1), plan_number(1, exchange="ulysses")
    attend = spanwise.context_parallel_attention

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        cp = mesh["cp"]
        x = torch.randn(1, 2, plan.layout.num_tokens(cp.get_local_rank()), 8)

        def placed(x: torch.Tensor, dim: int = 1, **options: Any) -> DTensor:
            return DTensor.from_local(x, mesh["tp"], [Shard(dim)], run_check=False, **options)

        odd = placed(x[:, :1], shape=(1, 3, *x.shape[2:]), stride=x.stride())
        three = placed(torch.randn(1, 3, ulysses.layout.num_tokens(cp.get_local_rank()), 8))
        for call, names in (
            (lambda: attend(*[placed(x, 2)] * 3, plan, cp), "sharded over heads"),
            (lambda: attend(placed(x), placed(x), x, plan, cp), "v is a Tensor"),
            (lambda: attend(odd, placed(x), placed(x), plan, cp), r"q is a DTensor of shape \(1, 3"),
            (lambda: attend(three, three, three, ulysses.local(cp), cp), "3 query heads"),
            (lambda: spanwise.packed_attention(*[placed(x[0], 0)] * 3, plan, cp), "DTensor .* to_local"),
        ):
            with pytest.raises(ValueError, match=names):
                call()

    run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))


# ---------------------------------------------------------------- numbers that are arguments of compiled code


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v. Dynamo takes no tensor twice."""
    return x, x + 1, 2 * x


def call_of(name: str, mesh: DeviceMesh) -> Any:
    """A call of a tensor and a number."""
    plan = spanwise.make_plan(SpanMask.causal(12), mesh.size(), block_size=2, balancer="contiguous")
    local, route = plan.local(mesh), recurrence.recurrence_route(plan, mesh)
    gates, weight = torch.ones(1, 6, 2, dtype=torch.float64), torch.linspace(-1, 1, 28).view(7, 4)
    labels, labels_of_all = torch.arange(6)[None], torch.arange(5)[None]
    attend, loss = spanwise.context_parallel_attention, spanwise.linear_cross_entropy

    def scores(x: torch.Tensor, n: float) -> torch.Tensor:
        return spanwise.token_logprobs(
            x[:, :5, 0].float(), labels_of_all, vocab_weight=weight, temperature=n, softcap=2 * n, vocab_mesh=mesh
        )

    return {
        "attention": lambda x, n: attend(*three(x.transpose(1, 2)), local, scale=n, softcap=3 * n),
        "gated_linear": lambda x, n: recurrence.gated_linear(*three(x), -gates, route, scale=n),
        "gated_delta": lambda x, n: recurrence.gated_delta(*three(x), -gates, gates, route, scale=n),
        "scores": scores,
        "loss": lambda x, n: loss(x[:, :, 0].float(), weight, labels, loss_mesh=mesh, softcap=n),
        "count": lambda x, n: spanwise.cross_entropy(x[:, :, 0], labels % 4, mesh, num_valid=n),
    }[name]


def differences(rank: int, mesh: DeviceMesh, name: str, backend: str) -> tuple[list[float], int]:
    """Of outputs and gradients from eager code; and how many graphs were made."""
    call = call_of(name, mesh)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    apart = []
    for number in (9.0, 8.5) if name == "count" else (0.5, 0.25):
        x = torch.randn(1, 6, 2, 4, dtype=torch.float64).requires_grad_()
        weight, results = torch.randn(()), []
        for run in (compiled, call):
            out = run(x, number)
            (grad,) = torch.autograd.grad((out * weight).sum(), x)
            results.append((out.detach(), grad))
        apart += [(got - want).abs().max().item() for got, want in zip(*results, strict=True)]
    return apart, counter.frame_count


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("count", "aot_eager"),
        *(pytest.param(name, "aot_eager", marks=SLOW) for name in ("attention", "gated_linear", "gated_delta")),
        *(pytest.param(name, "inductor", marks=SLOW) for name in ("scores", "loss", "count", "attention")),
    ],
)
def test_numbers_are_arguments(gloo_pool: GlooPool, name: str, backend: str) -> None:
    """torch makes symbols of them under dynamic=True. Another number of tokens is no other graph."""
    for apart, graphs in gloo_pool.run(2, differences, name, backend):
        assert max(apart) < 1e-6 and (name != "count" or graphs == 1)
