"""torch.compile(fullgraph=True) and activation checkpointing on real gloo ranks, and tensor parallelism beside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import spanwise
from spanwise import SpanMask
from tests.oracle import Problem, make_problem, relative_error
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTH = 83


COLLECTIVES = {
    "all_gather": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "needed": ("all_to_all_single", "all_to_all_single"),
}


def plan_number(i: int, exchange: str = "all_gather", stages: int = 1) -> spanwise.Plan:
    rng = np.random.default_rng(i)
    cuts = np.unique(np.concatenate([[0, LENGTH], rng.integers(1, LENGTH, i % 4)]))
    mask = SpanMask.documents(cuts) if i % 3 else SpanMask.block_causal(LENGTH, 8, 1, global_tokens=3)
    balancer = ("head_tail", "lpt", "ptrr")[i % 3]
    return spanwise.make_plan(mask, 2, balancer=balancer, exchange=exchange, stages=stages, block_size=4)


def compiled_steps(
    rank: int, mesh: DeviceMesh, exchange: str, stages: int, num_plans: int
) -> tuple[list[list[torch.Tensor]], list[list[str]]]:
    """out, dq, dk, dv for each plan through one compiled function; the operators of each ATen graph in order."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target.name() for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        return make_boxed_func(gm.forward)

    @torch.compile(backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, plan, mesh)

    results = []
    for i in range(num_plans):
        plan = plan_number(i, exchange, stages)
        problem = make_problem(plan.mask().dense(), seed=i)
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out = attend(*leaves, plan.local(mesh))
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results, graphs


@pytest.mark.parametrize(("exchange", "stages"), [("all_gather", 1), ("needed", 1), ("needed", 3)])
def test_one_graph_serves_many_plans(gloo_pool: GlooPool, exchange: str, stages: int) -> None:
    num_plans = 10
    there, back = (f"_c10d_functional::{name}" for name in COLLECTIVES[exchange])
    ranks = gloo_pool.run(2, compiled_steps, exchange, stages, num_plans, timeout=100)
    for rank, (results, graphs) in enumerate(ranks):
        forwards = [graph for graph in graphs if "spanwise::sdpa" in graph]
        backwards = [graph for graph in graphs if "spanwise::sdpa_backward" in graph]
        assert 1 <= len(forwards) <= 2 and len(forwards) + len(backwards) == len(graphs)
        # Attention stands between the two halves of each collective, in both directions.
        visible = ("spanwise::", "_c10d_functional::")
        for graph in forwards:
            assert [name for name in graph if name.startswith(visible)] == [
                *[there] * stages, "spanwise::sdpa",
                *["_c10d_functional::wait_tensor", "spanwise::sdpa"] * stages,
            ]  # fmt: skip
        for graph in backwards:
            assert [name for name in graph if name.startswith(visible)] == [
                *["spanwise::sdpa_backward", back] * stages,
                "spanwise::sdpa_backward", *["_c10d_functional::wait_tensor"] * stages,
            ]  # fmt: skip
        for i, got in enumerate(results):
            plan = plan_number(i)
            problem = make_problem(plan.mask().dense(), seed=i)
            for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
                assert relative_error(x, plan.shard(whole, rank, dim=2)) <= 1e-10


def compiled_layers(rank: int, mesh: DeviceMesh, num_plans: int) -> tuple[list[float], int]:
    """Three masks of one model in one compiled function, over plans of many lengths; worst errors, number of graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    names = ("documents", "window", "causal")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: spanwise.RankPlan) -> list[torch.Tensor]:
        return [spanwise.context_parallel_attention(q, k, v, plan, mesh, mask=name) for name in names]

    errors = []
    for i in range(num_plans):
        length = 60 + 7 * i
        rng = np.random.default_rng(i)
        masks = {
            "documents": SpanMask.documents(np.unique(np.concatenate([[0, length], rng.integers(1, length, i % 4)]))),
            "window": SpanMask.block_causal(length, 8, 1, global_tokens=i % 3),
            "causal": SpanMask.causal(length),
        }
        plan = spanwise.make_plan(masks, 2, balancer=("head_tail", "lpt")[i % 2], exchange="all_gather", block_size=4)
        problems = [make_problem(masks[name].dense(), seed=i) for name in names]
        q, k, v = (spanwise.shard(plan, mesh, x, dim=2) for x in problems[0][:3])
        outs = attend(q, k, v, plan.local(mesh))
        wholes = [spanwise.shard(plan, mesh, problem.out, dim=2) for problem in problems]
        errors.append(max(relative_error(out, whole) for out, whole in zip(outs, wholes, strict=True)))
    return errors, counter.frame_count


def test_many_masks_and_lengths_share_two_graphs(gloo_pool: GlooPool) -> None:
    for errors, graphs in gloo_pool.run(2, compiled_layers, 12, timeout=100):
        assert graphs <= 2 and max(errors) <= 1e-10


def compiled_with_a_plan(rank: int, mesh: DeviceMesh) -> str:
    plan = plan_number(0)
    x = torch.randn(1, 2, plan.layout.num_tokens(rank), 8)
    attend = torch.compile(
        lambda q: spanwise.context_parallel_attention(q, q, q, plan, mesh), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="inside a compiled region; build plan.local") as error:
        attend(x)
    return type(error.value).__name__


def test_a_plan_inside_compiled_code_is_an_error_that_says_what_works(gloo_pool: GlooPool) -> None:
    assert len(gloo_pool.run(2, compiled_with_a_plan, timeout=60)) == 2


class CountCalls(TorchDispatchMode):
    """Counts operators by name in its region."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if hasattr(func, "name") else str(func)
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def save_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in (torch.ops.spanwise.sdpa.default,)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(rank: int, mesh: DeviceMesh, selective: bool) -> tuple[list[list[torch.Tensor]], dict[str, int]]:
    """Two layers with plans of their own, recomputed in backward: each with the plan it ran with."""
    results = []
    with CountCalls() as counter:
        pairs = []
        for i in (1, 2):
            plan = plan_number(i)
            problem = make_problem(plan.mask().dense(), seed=i)
            leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
            context = {"context_fn": lambda: create_selective_checkpoint_contexts(save_attention)} if selective else {}
            out = checkpoint(
                lambda q, k, v, p: spanwise.context_parallel_attention(q, k, v, p, mesh),
                *leaves, plan.local(mesh), use_reentrant=False, **context,
            )  # fmt: skip
            pairs.append((out, spanwise.shard(plan, mesh, problem.grad_out, dim=2), leaves))
        torch.autograd.backward([out for out, _, _ in pairs], [grad for _, grad, _ in pairs])
        for out, _, leaves in pairs:
            results.append([out.detach(), *(x.grad for x in leaves)])
    return results, counter.calls


@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing(gloo_pool: GlooPool, selective: bool) -> None:
    for rank, (results, calls) in enumerate(gloo_pool.run(2, checkpointed, selective, timeout=60)):
        # Two stages in each of two layers; plain checkpointing runs each of them twice.
        assert calls["spanwise::sdpa"] == (4 if selective else 8)
        for i, got in zip((1, 2), results, strict=True):
            plan = plan_number(i)
            problem = make_problem(plan.mask().dense(), seed=i)
            for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
                assert relative_error(x, plan.shard(whole, rank, dim=2)) <= 1e-10


def test_tensor_parallel_heads_beside_context_parallel() -> None:
    """q, k, v as DTensors sharded over heads on "tp", the sequence cut over "cp"; forward and backward on 2 x 2."""
    plan = plan_number(1)
    problem: Problem = make_problem(plan.mask().dense(), heads=(4, 2))

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[int, list[torch.Tensor]]:
        cp, tp = mesh["cp"], mesh["tp"]

        def local_heads(x: torch.Tensor) -> torch.Tensor:
            shard = spanwise.shard(plan, cp, x, dim=2)
            return shard.chunk(2, dim=1)[tp.get_local_rank()].contiguous()

        leaves = [
            DTensor.from_local(local_heads(x), tp, [Shard(1)], run_check=False).requires_grad_() for x in problem[:3]
        ]
        out, aux = spanwise.context_parallel_attention(
            *leaves, plan, cp, return_aux=spanwise.AuxRequest(lse=True, max_logit=True)
        )
        assert out.placements == (Shard(1),) and out.shape[1] == 4 and aux.lse.shape[1] == 4
        assert aux.max_logit.placements == (Shard(0),) and aux.max_logit.shape == (4,)
        out.backward(DTensor.from_local(local_heads(problem.grad_out), tp, [Shard(1)], run_check=False))
        return tp.get_local_rank(), [x.to_local().detach() for x in (out, *(leaf.grad for leaf in leaves))]

    results = run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
    for rank, (tp_rank, got) in enumerate(results):
        for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
            reference = plan.shard(whole, rank // 2, dim=2).chunk(2, dim=1)[tp_rank]
            assert relative_error(x, reference) <= 1e-10


def test_score_mod_sees_global_heads_under_tensor_parallelism() -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), 1)
    problem = make_problem(plan.mask().dense(), heads=(4, 2))
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.125], dtype=torch.float64)

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    whole = spanwise.context_parallel_attention(*problem[:3], plan, None, score_mod=alibi, sinks=slopes)

    def on_rank(rank: int, mesh: DeviceMesh) -> torch.Tensor:
        q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in problem[:3])
        sinks = distribute_tensor(slopes, mesh, [Replicate()])
        return spanwise.context_parallel_attention(q, k, v, plan, None, score_mod=alibi, sinks=sinks).full_tensor()

    for out in run_ranks(2, on_rank, mesh_dim_names=("tp",)):
        assert relative_error(out, whole) <= 1e-12


def test_dtensors_that_do_not_fit() -> None:
    plan = plan_number(1)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        x = torch.randn(1, 2, plan.layout.num_tokens(mesh["cp"].get_local_rank()), 8)
        wrong = DTensor.from_local(x, mesh["tp"], [Shard(2)], run_check=False)
        with pytest.raises(ValueError, match="sharded over heads"):
            spanwise.context_parallel_attention(wrong, wrong, wrong, plan, mesh["cp"])
        right = DTensor.from_local(x, mesh["tp"], [Shard(1)], run_check=False)
        with pytest.raises(ValueError, match=r"\['v'\] are plain"):
            spanwise.context_parallel_attention(right, right, x, plan, mesh["cp"])
        odd = DTensor.from_local(
            x[:, :1], mesh["tp"], [Shard(1)], run_check=False, shape=(1, 3, *x.shape[2:]), stride=x.stride()
        )
        with pytest.raises(ValueError, match="3 heads of q do not divide over 2 ranks"):
            spanwise.context_parallel_attention(odd, right, right, plan, mesh["cp"])

    run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
