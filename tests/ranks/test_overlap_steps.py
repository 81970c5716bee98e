"""Scheduled graphs on real gloo ranks: bits and memory of whole steps, of pipeline stages, and of buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from spanwise import overlap
from spanwise.overlap import _torch
from spanwise.overlap.fx.emit import bucket_keys, emit
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import MESSAGES
from tests.overlap.pipelines import Stage
from tests.overlap.programs import Cost
from tests.overlap.test_bucketing import merge
from tests.ranks.gloo import GlooPool
from tests.ranks.test_overlap_backend import Gathered

pytestmark = pytest.mark.compiles

OPS = torch.ops._c10d_functional
SLACK = 64  # bytes of constants in the graph, which are not counted
Traced = tuple[fx.GraphModule, tuple[Any, ...]]

# ---------------------------------------------------------------- whole steps, each one graph, and their arguments


def trace(step: Callable[..., Any], *args: Any, mode: str = "fake") -> Traced:
    return make_fx(step, tracing_mode=mode)(*args), args


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) / 4 for shape in shapes]


def sharded(mesh: DeviceMesh) -> Traced:
    """Parameters are gathered, gradients clipped by their norm over all ranks, and Adam writes in place."""
    name, size, rank = _torch.group_name(mesh.get_group()), mesh.size(), mesh.get_local_rank()
    shards = drawn(0, (32 // size, 16), (32 // size, 32), (16 // size, 32))
    means, squares = ([torch.zeros_like(x) for x in shards] for _ in range(2))

    def step(shards: list[Any], means: list[Any], squares: list[Any], x: torch.Tensor) -> torch.Tensor:
        given = [shard.detach().requires_grad_() for shard in shards]
        for shard in given:
            x = F.gelu(x @ Gathered.apply(shard, mesh).t())
        loss = x.square().mean()
        grads = list(torch.autograd.grad(loss, given))
        norm = torch.stack(torch._foreach_norm(grads)).square().sum()
        norm = _torch.wait(_torch.start_all_reduce(norm, "sum", name)).sqrt()
        torch._foreach_mul_(grads, torch.clamp(0.1 / norm, max=1.0))
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_mul_(squares, 0.99)
        torch._foreach_addcmul_(squares, grads, grads, 0.01)
        scale = torch._foreach_sqrt(squares)
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_addcdiv_(shards, means, scale, -1e-2)
        return loss.detach()

    return trace(step, shards, means, squares, *drawn(1 + rank, (8, 16)))


def functionalized(mesh: DeviceMesh) -> Traced:
    """The same without writes and views but the ``copy_`` of each input at the end."""
    gm, args = sharded(mesh)
    flat, spec = pytree.tree_flatten(args)
    inner = make_fx(lambda *flat: gm(*pytree.tree_unflatten(list(flat), spec)), tracing_mode="fake")
    functional = functionalize(inner(*flat), remove="mutations_and_views")
    return trace(lambda *flat: functional(*flat), *flat)


def two_steps(mesh: DeviceMesh) -> Traced:
    """Two steps in one graph, with checkpointed layers: the second step gathers what the first has written."""

    def layer(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x @ Gathered.apply(shard, mesh).t()), 0.2)

    def step(shards: list[Any], x: torch.Tensor) -> Any:
        for part in x.chunk(2):
            given = [shard.detach().requires_grad_() for shard in shards]
            for shard in given:
                part = checkpoint(layer, part, shard, use_reentrant=False)
            torch._foreach_add_(shards, torch.autograd.grad(part.square().mean(), given), alpha=-0.1)
        return shards

    return trace(step, drawn(0, *[(16 // mesh.size(), 16)] * 3), *drawn(1 + mesh.get_local_rank(), (8, 16)))


def updates_travel(mesh: DeviceMesh) -> Traced:
    """Gradients are scattered, a part of each parameter is updated, and the new parameters are gathered (ZeRO-1).

    Traced with real tensors.
    """
    name, size, rank = _torch.group_name(mesh.get_group()), mesh.size(), mesh.get_local_rank()

    def step(params: list[Any], means: list[Any], x: torch.Tensor) -> Any:
        given = [p.detach().requires_grad_() for p in params]
        for p in given:
            x = F.gelu(x @ p.t())
        loss = x.square().mean()
        for p, grad, mean in zip(params, torch.autograd.grad(loss, given), means, strict=True):
            mean.lerp_(_torch.wait(_torch.start_reduce_scatter(grad.contiguous(), size, name)), 0.1)
            part = (p.chunk(size)[rank] - 0.1 * mean).contiguous()
            p.copy_(_torch.wait(_torch.start_all_gather(part, size, name)))
        return loss.detach(), params

    params, means = drawn(0, *[(16, 16)] * 4), [torch.zeros(16 // size, 16) for _ in range(4)]
    return trace(step, params, means, *drawn(1 + rank, (8, 16)), mode="real")


# ---------------------------------------------------------------- scheduled


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _copied(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)


def run(gm: fx.GraphModule, args: Any) -> list[torch.Tensor]:
    """Results and written arguments of a call."""
    given = _copied(args)
    torch.manual_seed(3)
    with torch.no_grad():
        return [*tensors(gm(*given)), *tensors(given)]


def most_bytes(gm: fx.GraphModule, args: Any, enough: int) -> int:
    """Most bytes beside its arguments in a call after the first, by torch's own tracker.

    The least of some calls, until every rank had one that takes no more than `enough`: gloo's threads sometimes hold an
    operand longer than the wait.
    """
    peaks: list[int] = []
    over = torch.ones(())
    while len(peaks) < 6 and over > 0:
        given, tracker = _copied(args), MemTracker()
        tracker.track_external(*tensors(given))
        with tracker, torch.no_grad():
            gm(*given)
        peak = sum(of_device["Total"] for of_device in tracker.get_tracker_snapshot("peak").values())
        peaks.append(peak - sum(t.untyped_storage().nbytes() for t in tensors(given)))
        over = torch.tensor(float(min(peaks) - enough))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return min(peaks)


def scheduled(rank: int, mesh: DeviceMesh, makes: Sequence[Callable[..., Traced]]) -> list[dict[str, Any]]:
    found = []
    for make in makes:
        (gm, args), name = make(mesh), make.__name__
        expected, given = run(gm, args), tensors(args)
        for bucket, budget in ((False, None), (True, overlap.simulate(gm, Cost()).peak_bytes)):
            results: list[overlap.Result] = []
            options = {"bucket": bucket, "memory_budget": budget, "on_result": results.append}
            new = overlap.graph_pass(cost=Cost(), **options)(gm, args)
            got = run(new, args)  # the first call generates code, which the tracker does not understand
            (result,) = results
            dag = result.timeline.dag
            merged = {dag.nodes[i].name for i in dag.starts if len(result.members[i]) > 1}
            # Bit for bit; a merged all-reduce may round differently.
            equal = torch.allclose if any("all_reduce" in name for name in merged) else torch.equal
            assert all(equal(x, y) for x, y in zip(got, expected, strict=True)), name
            written = [x for x, y in zip(got[-len(given) :], given, strict=True) if not torch.equal(x, y)]
            assert len(written) > 2 and not result.barriers and result.timeline.peak_bytes <= result.budget, name
            assert result.timeline.makespan <= result.before.makespan * (1.0 + 1e-9 if bucket else 0.95), name
            assert len(new.graph.find_nodes(op="call_function", target=torch.ops.spanwise.agree.default)) == 1
            enough = result.timeline.peak_bytes + SLACK
            launches = len(dag.starts) / len(result.before.dag.starts)
            found.append({"name": name, "launches": launches, "over": most_bytes(new, args, enough) - enough})
    return found


@pytest.mark.parametrize(("num_ranks", "makes"), [(2, (functionalized, two_steps, updates_travel)), (4, (sharded,))])
def test_a_scheduled_step_is_the_step(gloo_pool: GlooPool, num_ranks: int, makes: Sequence[Any]) -> None:
    for answer in gloo_pool.run(num_ranks, scheduled, makes):
        assert all(found["over"] <= 0 for found in answer), answer
        assert any(found["launches"] < 1 for found in answer)


def stages_of(rank: int, _: Any, stages: int, batch: bool) -> None:
    """Stages of a pipeline, scheduled across their messages at costs of their own, give the numbers that they did."""
    for each in (True, False):
        stage = Stage(rank, stages, dist.get_world_size() // stages, microbatches=4, each=each, batch=batch)
        groups, given, results = stage.groups(), stage.inputs(), list[overlap.Result]()
        gm, expected = stage.trace(groups), stage.step(groups, given)
        cost = Cost(0.9 - 0.2 * stage.stage, message=0.5 + stage.stage)
        for options in ({"bucket": False}, {"bucket": True, "effort": 50}):
            new = overlap.graph_pass(cost=cost, on_result=results.append, **options)(gm, ())
            assert all(torch.equal(x, y) for x, y in zip(new(*given), expected, strict=True))
            assert results[-1].timeline.makespan < results[-1].before.makespan and results[-1].barriers == ()


@pytest.mark.skipif(not MESSAGES, reason=f"torch {torch.__version__} has no functional messages")
@pytest.mark.parametrize(("stages", "batch"), [(2, True), (4, False)])
def test_a_scheduled_stage_is_the_stage(gloo_pool: GlooPool, stages: int, batch: bool) -> None:
    gloo_pool.run(4, stages_of, stages, batch)


def merged_and_single(rank: int, _: Any) -> list[str]:
    """All collectives that may be one as one, beside single ones; kinds of the buckets."""
    name, size = _torch.group_name(dist.group.WORLD), dist.get_world_size()

    def collectives(*operands: torch.Tensor) -> Any:
        started = [OPS.all_gather_into_tensor(x, size, name) for x in operands]
        started += [OPS.reduce_scatter_tensor(x, "sum", size, name) for x in operands]
        started += [OPS.all_reduce(x.t(), how, name) for how in ("sum", "max") for x in operands]
        return [OPS.wait_tensor(x) for x in started]

    generator = torch.Generator().manual_seed(rank)
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.int64
    operands = [(torch.randn(s, generator=generator) * 100).to(d) for d in dtypes for s in ((4, 6), (2, 3), (8, 1))]
    operands += [torch.full((2, 2), 2**40 + 1 + rank)]  # no float32
    gm = make_fx(collectives, tracing_mode="fake")(*operands)
    expected, captured = gm(*operands), to_dag(gm, lambda node: 1.0)
    keys, buckets = bucket_keys(captured), dict[Any, list[int]]()
    for i in captured.dag.starts:
        buckets.setdefault(keys[i], []).append(i)
    merged = merge(captured.dag, list(buckets.values()))
    emit(captured, range(len(merged.dag)), merged.members)
    gm.recompile()
    for at, (x, y) in enumerate(zip(gm(*operands), expected, strict=True)):
        assert torch.equal(x, y) and x.stride() == y.stride(), at
    return [key[0] for key in buckets]


def test_buckets_give_the_bits_of_single_collectives(gloo_pool: GlooPool) -> None:
    for buckets in gloo_pool.run(2, merged_and_single):
        assert len(buckets) == 4 + 1 + 2 * 4  # gathers and reductions by dtype, reduce-scatters of all dtypes
