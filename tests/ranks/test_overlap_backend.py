"""The overlap backend on real gloo ranks: results of eager code; one decision on all ranks, or an error on each."""

from __future__ import annotations

import base64
import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as Colwise, RowwiseParallel as Rowwise, parallelize_module
from torch.nn import functional as F

import spanwise
from spanwise import SpanMask
from spanwise.overlap import _torch, consensus
from spanwise.overlap.backend import backend
from spanwise.overlap.dag import Kind
from spanwise.overlap.fx import operators
from spanwise.overlap.optimize import Result
from tests.oracle import relative_error
from tests.overlap.programs import Cost
from tests.ranks.gloo import GlooPool, hear, tell

pytestmark = pytest.mark.compiles

BATCH, DIM = 8, 16


class Gathered(torch.autograd.Function):
    """A parameter of its shards, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.group = mesh.get_group()
        return _torch.wait(_torch.start_all_gather(shard, mesh.size(), _torch.group_name(ctx.group)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        # The eager form of `_torch.start_reduce_scatter` adds ranks in another order than gloo does.
        scatter = torch.ops._c10d_functional.reduce_scatter_tensor
        return _torch.wait(scatter(grad.contiguous(), "sum", ctx.group.size(), _torch.group_name(ctx.group))), None


class Sharded(nn.Module):
    """Layers whose parameters are gathered when they are used, FSDP2's way; two branches of `widths` side by side."""

    def __init__(
        self, mesh: DeviceMesh, widths: tuple[int, int] = (48, 80), dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.mesh, rank, size = mesh, mesh.get_local_rank(), mesh.size()

        def shard(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).chunk(size)[rank].to(dtype) / 8)

        self.up = nn.ParameterList([shard(width, DIM) for width in widths])
        self.down = nn.ParameterList([shard(DIM, width) for width in widths])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            branches = []
            for up, down in zip(self.up, self.down, strict=True):
                h = F.silu(x @ Gathered.apply(up, self.mesh).t())
                branches.append(h @ Gathered.apply(down, self.mesh).t())
            x = x + branches[0] * branches[1]
        return x


def data(rank: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's input, and the gradient of its output."""
    draw = torch.Generator().manual_seed(7 + rank)
    x, grad = torch.randn(2, BATCH, DIM, generator=draw, dtype=torch.float64).to(dtype)
    return x.requires_grad_(), grad


def step(
    run: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x.grad = None
    module.zero_grad()
    out = run(x)
    out.backward(grad)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return [out.detach(), x.grad, *(g.clone() for g in grads)]


def sharded_step(rank: int, mesh: DeviceMesh, name: str, bucket: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Two compiled steps, and one in float64 that is not compiled."""
    torch._dynamo.reset()
    counters.clear()
    results: list[Result] = []
    eager = Sharded(mesh)
    expected = step(eager, eager, *data(rank))
    module = Sharded(mesh, dtype=dtype)
    run = torch.compile(module, backend=backend(name, cost=Cost(), bucket=bucket, on_result=results.append))
    for _ in range(2):
        got = step(run, module, *data(rank, dtype))
    return {
        "expected": expected,
        "got": got,
        "gain": [r.timeline.makespan / r.before.makespan for r in results],
        "launches": [len(r.timeline.dag.starts) for r in results],
        "graphs": counters["stats"]["unique_graphs"],
    }


@pytest.mark.parametrize(
    ("num_ranks", "bucket"), [(2, True), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, False), (4, True)))]
)
def test_scheduled_step_is_the_eager_one_bit_for_bit(gloo_pool: GlooPool, num_ranks: int, bucket: bool) -> None:
    for answer in gloo_pool.run(num_ranks, sharded_step, "aot_eager", bucket, torch.float64):
        for x, y in zip(answer["got"], answer["expected"], strict=True):
            assert torch.equal(x, y)
        assert answer["graphs"] == 1
        forward, backward = answer["gain"]
        assert forward < 0.9 and backward < 0.9
        forward, backward = answer["launches"]
        assert (forward < 4 and backward < 8) if bucket else (forward, backward) == (4, 8)


def error_of(run: Callable[[], Any]) -> str:
    """The error that `run` raises with its type, empty if it raises none."""
    try:
        run()
    except (ValueError, torch._dynamo.exc.BackendCompilerFailed) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare(rank: int, mesh: DeviceMesh, costs: list[Cost], widths: list[tuple[int, int]]) -> tuple[str, float]:
    """Error of a rank whose peers have other costs or other sizes, and the sum of a later all-reduce."""
    torch._dynamo.reset()
    module = Sharded(mesh, widths[rank])
    run = torch.compile(module, backend=backend("aot_eager", cost=costs[rank], bucket=False))
    said = error_of(lambda: step(run, module, *data(rank)))
    one = torch.ones(())
    if not said or widths[0] == widths[1]:
        dist.all_reduce(one)
    return said, one.item()


SAME = [(48, 80)] * 4
# Costs and widths of ranks, and what each rank's error says: before any collective of the graph.
DIFFERENCES: dict[str, tuple[list[Cost], list[tuple[int, int]], str]] = {
    "costs": (
        [Cost(5.0, slow=80), Cost(5.0, slow=48)] * 2, SAME,  # of two branches the other one is urgent
        r"ranks of the process group of ranks \[0, 1, 2, 3\] scheduled the collectives of a graph differently, .*: "
        r"ranks \[0, 2\] start (\d\. .* float64 \[\d+, \d+\]); ranks \[1, 3\] start (?!\1)\d\. ",
    ),
    "other costs that lead to the same decision": ([Cost(), Cost(slow=1)], SAME, ""),
    "sizes": (
        [Cost(), Cost()], [(48, 80), (48, 96)],
        r"ranks \[0\] start .*\[40, 16\].*; ranks \[1\] start .*\[48, 16\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_decide_differently_are_told_so_on_every_rank(gloo_pool: GlooPool, name: str) -> None:
    costs, widths, text = DIFFERENCES[name]
    for said, ranks in gloo_pool.run(len(costs), compare, costs, widths):
        assert re.search(text, said) if text else not said, said
        assert ranks == (1 if name == "sizes" else len(costs))  # afterwards the group works as before


def refuse(rank: int, mesh: DeviceMesh) -> list[str]:
    """Errors if `on_result` of rank 1 raises at first; then it does not. It lives on until the others have failed."""
    said = []
    for refusing in (True, False):
        torch._dynamo.reset()

        def result(result: Result, refusing: bool = refusing) -> None:
            if refusing and rank == 1:
                raise OSError("no space left")

        module = Sharded(mesh)
        run = torch.compile(module, backend=backend("aot_eager", cost=Cost(), on_result=result))
        said.append(error_of(lambda run=run, module=module: step(run, module, *data(0))))
        if said[-1]:
            tell(mesh, f"{rank} has failed")
            hear(mesh, "0 has failed", "1 has failed")
    return said


def test_ranks_hear_of_one_whose_on_result_raises(gloo_pool: GlooPool) -> None:
    """It never comes to compare, and they would wait for it until their group's timeout."""
    first, second = gloo_pool.run(2, refuse)
    assert first[0] == "ValueError: rank 1 raised in on_result: OSError: no space left"
    assert second[0].startswith("BackendCompilerFailed") and "OSError: no space left" in second[0]
    assert first[1] == second[1] == ""


def steps_of_sizes(rank: int, mesh: DeviceMesh, batches: list[list[int]]) -> tuple[list[bool], int, int]:
    """Whether steps of these batch sizes are the eager ones; how many graphs were compiled, how many compared."""
    torch._dynamo.reset()
    counters.clear()
    module = Sharded(mesh)
    run = torch.compile(module, backend=backend("aot_eager", cost=Cost()))
    equal = []
    publish = consensus._Comparison.publish
    with mock.patch.object(consensus._Comparison, "publish", autospec=True, side_effect=publish) as published:
        for batch in batches[rank]:
            x, grad = torch.randn(2, batch, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))
            expected, got = (step(f, module, x.requires_grad_(), grad) for f in (module, run))
            equal += [relative_error(a, b) < 1e-12 for a, b in zip(got, expected, strict=True)]
    return equal, counters["stats"]["unique_graphs"], published.call_count


@pytest.mark.slow
def test_ranks_need_not_compile_anew_at_the_same_time(gloo_pool: GlooPool) -> None:
    """Rank 0 sees another size and compiles for all of them; rank 1 does not, and their collectives are the same.

    What they agreed on once they do not compare again: a forward and a backward graph in three steps each.
    """
    (equal, graphs, told), (others, few, by_others) = gloo_pool.run(2, steps_of_sizes, [[8, 6, 5], [8, 8, 8]])
    assert all(equal) and all(others)
    assert (graphs, few) == (2, 1)
    assert told == by_others <= 2  # none if a test before has had them agree


def reduced(mesh: DeviceMesh, axes: str) -> fx.GraphModule:
    """A graph that sums a number over one axis of `mesh` after the other, with a comparison in front."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(1)
    for axis in axes:
        name = _torch.group_name(mesh.get_group(axis))
        x = graph.call_function(_torch.functional_collectives.all_reduce.default, (x, "sum", name))
        x.meta["val"] = torch.ones(1)
        x = graph.call_function(operators.WAIT, (x,))
        x.meta["val"] = torch.ones(1)
    graph.output(x)
    consensus.insert(graph)
    return fx.GraphModule({}, graph)


def reduce_differently(rank: int, mesh: DeviceMesh, orders: list[str]) -> list[str]:
    """Errors of several steps, in each of which another rank's order differs."""
    said = []
    for at in range(mesh.size()):
        graph = reduced(mesh, orders[(rank - at) % mesh.size()])
        totals: list[float] = []
        said.append(error_of(lambda graph=graph, totals=totals: totals.append(graph(torch.ones(1)).item())))
        assert totals == ([] if said[-1] else [mesh.size()])
        dist.barrier()
    return said


def test_ranks_hear_of_a_difference_in_groups_that_are_not_theirs(gloo_pool: GlooPool) -> None:
    """Ranks 2 and 3 agree with all in their groups of two; their first collective would wait for ranks that stop."""
    run = functools.partial(gloo_pool.run, 4, reduce_differently, mesh_shape=(2, 2), mesh_dim_names=("a", "b"))
    for said in run(["ab", "ba", "ba", "ba"]):
        assert len(said) == 4
        for text in said:
            assert re.search(
                r"ranks \[\d\] start ([12])\. all_reduce .* sum float32 \[1\]; ranks \[\d\] start (?!\1)[12]\. all",
                text,
            )
    assert run(["ab"] * 4) == [[""] * 4] * 4


def stays_away(rank: int, mesh: DeviceMesh, midway: bool) -> str:
    """Rank 1 does not have the graph; or tells what it decided, and stops before it says that it is there."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    record = base64.b85encode(zlib.compress(b"[]")).decode()
    comparison, said = consensus._Comparison(group, "digest", record), ""
    if rank == 0 and midway:
        said = error_of(lambda: consensus._compare([comparison], 1))
    elif rank == 0:
        short = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))
        said = error_of(lambda: reduced(short, "a")(torch.ones(1)))
    elif midway:
        comparison.publish()
    dist.barrier()
    return said


@pytest.mark.parametrize("midway", [False, True])
def test_a_rank_that_does_not_come_is_named(gloo_pool: GlooPool, midway: bool) -> None:
    said, nothing = gloo_pool.run(2, stays_away, midway)
    assert "ranks [1] of the process group of ranks [0, 1] did not come to compare" in said, said
    assert (midway or "a compiled graph within 0:00:01" in said) and nothing == ""


def gathered(shard: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    return shard if mesh is None else Gathered.apply(shard, mesh)


def linear(x: torch.Tensor, shards: list[torch.Tensor], mesh: DeviceMesh | None) -> torch.Tensor:
    """Matrix products alone: Inductor has nothing to generate C++ for."""
    for shard in shards:
        x = x @ gathered(shard, mesh).t()
    return x


@contextlib.contextmanager
def caches(folder: str | None) -> Iterator[None]:
    """Inductor with its caches there, and nothing compiled in this process; None for those of compiled C++ alone."""
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=folder is not None):
        if folder is not None:
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        yield


def by_inductor(rank: int, mesh: DeviceMesh) -> tuple[float, int]:
    """A step of `activated`: the largest error of results and gradients, and the number of schedules."""
    results: list[Result] = []
    with caches(None):
        draw = torch.Generator().manual_seed(0)
        whole = [torch.randn(DIM, DIM, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
        shards = [w.detach().float().chunk(mesh.size())[rank].clone().requires_grad_() for w in whole]
        x = torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64)
        expected = activated(x, whole, None)
        expected.backward(torch.full_like(expected, mesh.size()))
        out = torch.compile(activated, backend=backend("inductor", cost=Cost(), on_result=results.append))(
            x.float(), shards, mesh
        )
        out.backward(torch.ones_like(out))
        errors = [relative_error(out.detach(), expected.detach())]
        errors += [relative_error(s.grad, w.grad.chunk(mesh.size())[rank]) for s, w in zip(shards, whole, strict=True)]
    return max(errors), len(results)


def activated(x: torch.Tensor, shards: list[torch.Tensor], mesh: DeviceMesh | None) -> torch.Tensor:
    """Layers of one shape, for which Inductor generates the same two kernels."""
    for shard in shards:
        x = F.silu(x @ gathered(shard, mesh).t())
    return x


@pytest.mark.slow
def test_inductors_step_is_the_eager_one_to_rounding(gloo_pool: GlooPool) -> None:
    for error, schedules in gloo_pool.run(2, by_inductor):
        assert error < 1e-6 and schedules == 2


def from_cache(rank: int, mesh: DeviceMesh, folder: str, nums: list[int]) -> tuple[int, str]:
    """Hits of the cache of graphs of a step with `nums` layers on each rank, and what it raised."""
    with caches(f"{folder}/{rank}"):
        shards = [torch.ones(DIM // mesh.size(), DIM, requires_grad=True) for _ in range(nums[rank])]
        run = torch.compile(linear, backend=backend("inductor", cost=Cost()))
        said = error_of(lambda: run(torch.ones(BATCH, DIM), shards, mesh).sum().backward())
        inductor = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        return int(inductor > 0), said


@pytest.mark.slow
def test_a_graph_from_a_cache_is_compared_too(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The comparison is part of what the cache holds: a rank that compiles nothing finds out that another differs."""
    assert gloo_pool.run(2, from_cache, str(tmp_path), [2, 2]) == [(0, ""), (0, "")]
    assert gloo_pool.run(2, from_cache, str(tmp_path), [2, 2]) == [(1, ""), (1, "")]
    (hits, said), (missed, told) = gloo_pool.run(2, from_cache, str(tmp_path), [2, 3])
    assert (hits, missed) == (1, 0) and said == told
    assert "ranks of the process group of ranks [0, 1] scheduled the collectives of a graph differently" in said


# Modules: each function returns one, and arguments beside the input for each of its calls.

Made = tuple[nn.Module, list[dict[str, Any]]]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 48, bias=False), nn.Linear(48, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


def mlps() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP()).double()


def tensor_parallel(mesh: DeviceMesh) -> Made:
    """By DTensor: its collectives are nodes of the graph; gradients of weights hide those of inputs."""
    plan = {f"{i}.{name}": style() for i in range(2) for name, style in (("up", Colwise), ("down", Rowwise))}
    return parallelize_module(mlps(), mesh, plan), [{}]


class Replicated(nn.Module):
    """A sharded parameter as the layer sees it; its gradient is summed over the ranks."""

    def forward(self, shard: DTensor) -> torch.Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def sharded_by_dtensor(mesh: DeviceMesh) -> Made:
    """As torchtitan shards parameters for compiled models: the same traffic as FSDP2, in the graph."""
    made = mlps()
    for layer in made.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
            nn.utils.parametrize.register_parametrization(layer, "weight", Replicated(), unsafe=True)
    return made, [{}]


class Attention(nn.Module):
    """Projections of a rank's tokens ``[S, D]`` around attention to all tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False).double() for _ in range(4))
        self.mesh = mesh

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(0, 1)[None] for f in (self.q, self.k, self.v))
        attended = spanwise.context_parallel_attention(q, k, v, plan, self.mesh)
        return x + self.out(attended[0].transpose(0, 1).flatten(1))


def context_parallel(mesh: DeviceMesh) -> Made:
    """How many tokens travel is open in the graph, and the same graph serves every plan."""
    masks = [SpanMask.documents([0, cut, BATCH * mesh.size()]) for cut in (6, 11)]
    plans = [spanwise.make_plan(mask, mesh.size(), exchange="needed", block_size=4) for mask in masks]
    return Attention(mesh), [{"plan": plan.local(mesh)} for plan in plans]


def beside_eager(rank: int, mesh: DeviceMesh, make: Callable[[DeviceMesh], Made]) -> dict[str, Any]:
    """A compiled module and the same uncompiled: errors of results and gradients, and schedules."""
    torch._dynamo.reset()
    counters.clear()
    results: list[Result] = []
    (module, calls), (eager, _) = make(mesh), make(mesh)
    run = torch.compile(module, backend=backend("aot_eager", cost=Cost(), on_result=results.append))
    seed, errors = 0 if make is tensor_parallel else rank, []
    for more in calls:
        got = step(functools.partial(run, **more), module, *data(seed))
        expected = step(functools.partial(eager, **more), eager, *data(seed))
        errors += [relative_error(a, b) for a, b in zip(got, expected, strict=True)]
    return {
        "error": max(errors),
        "starts": [[re.sub(r"_\d+$", "", name) for name in starts(result)] for result in results],
        "launches": [len(result.before.dag.starts) for result in results],
        "gain": max((r.timeline.makespan / r.before.makespan for r in results), default=0.0),
        "graphs": counters["stats"]["unique_graphs"],
    }


def starts(result: Result) -> list[str]:
    nodes = [result.timeline.dag.nodes[i] for i in result.timeline.order.tolist()]
    return [node.name for node in nodes if node.kind == Kind.START]


@pytest.mark.parametrize(
    ("make", "error", "kinds", "gain"),
    [
        (tensor_parallel, 0.0, ["all_reduce"] * 2, 1.0),
        (sharded_by_dtensor, 0.0, None, 0.9),
        (context_parallel, 1e-12, ["all_to_all_single"], 1.0),
    ],
)
def test_modules_and_their_gradients(
    gloo_pool: GlooPool, make: Callable[[DeviceMesh], Made], error: float, kinds: list[str] | None, gain: float
) -> None:
    for answer in gloo_pool.run(2, beside_eager, make):
        assert answer["error"] <= error and answer["gain"] <= gain, answer
        if kinds is not None:
            assert answer["starts"] == [kinds] * 2, answer
        assert answer["graphs"] == 1
        if make is sharded_by_dtensor:
            launches = zip(answer["launches"], answer["starts"], strict=True)
            assert all(len(after) < before == 4 for before, after in launches)
