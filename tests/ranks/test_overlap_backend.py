"""The overlap backend on real gloo ranks: results of eager code; one decision on all ranks, or an error on each."""

from __future__ import annotations

import base64
import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as Colwise
from torch.distributed.tensor.parallel import RowwiseParallel as Rowwise
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import spanwise
from spanwise import SpanMask
from spanwise.overlap import _torch, consensus
from spanwise.overlap.backend import backend
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.dag import Kind
from spanwise.overlap.fx import operators
from spanwise.overlap.optimize import Result
from tests.oracle import relative_error
from tests.ranks.gloo import GlooPool, hear, tell

pytestmark = pytest.mark.compiles

BATCH, DIM = 8, 16


class Cost:
    """A collective takes `ratio` of a matrix product, one with `slow` columns 10 of them, all else nearly nothing."""

    def __init__(self, ratio: float = 0.6, slow: int = 0) -> None:
        self.ratio, self.slow = ratio, slow

    def uuid(self) -> str:
        return f"ratio {self.ratio}, slow {self.slow}"

    def __call__(self, node: fx.Node) -> float:
        if node.target in operators.STARTS:
            return self.ratio
        if not node_flops(node):
            return 0.01
        return 10.0 if operators.tensors_of(node)[0].shape[-1] == self.slow else 1.0

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        return self.ratio


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
        r"ranks \[0, 2\] start (\d\. .* float64 \[\d+, \d+\]); ranks \[1, 3\] start (?!\1)\d\. .* \[\d+, \d+\]\. .*"
        r"costs is ratio 5.0, slow 80 / ratio 5.0, slow 48",
    ),
    "other costs that lead to the same decision": ([Cost(), Cost(slow=1)], SAME, ""),
    "sizes": (
        [Cost(), Cost()], [(48, 80), (48, 96)],
        r"ranks \[0\] start .*\[40, 16\].*; ranks \[1\] start .*\[48, 16\].*options and costs are the same",
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
    consensus.insert(graph, {})
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
    record = base64.b85encode(zlib.compress(b'{"facts": {}, "starts": []}')).decode()
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


def by_inductor(
    rank: int, mesh: DeviceMesh, folder: str | None, cost: Cost, function: Callable[..., torch.Tensor] = linear
) -> dict[str, Any]:
    """A step of `function`: errors of results and gradients, hits and misses of the cache of graphs, launches."""
    results: list[Result] = []
    with caches(folder):
        draw = torch.Generator().manual_seed(0)
        whole = [torch.randn(DIM, DIM, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
        shards = [w.detach().float().chunk(mesh.size())[rank].clone().requires_grad_() for w in whole]
        x = torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64)
        expected = function(x, whole, None)
        expected.backward(torch.full_like(expected, mesh.size()))
        run = torch.compile(function, backend=backend("inductor", cost=cost, on_result=results.append))
        out = run(x.float(), shards, mesh)
        out.backward(torch.ones_like(out))
        errors = [relative_error(out.detach(), expected.detach())]
        errors += [relative_error(s.grad, w.grad.chunk(mesh.size())[rank]) for s, w in zip(shards, whole, strict=True)]
        inductor = counters["inductor"]
    return {
        "error": max(errors),
        "found": (inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]),
        "launches": [len(result.timeline.dag.starts) for result in results],
    }


def by_inductor_apart(rank: int, mesh: DeviceMesh, folders: list[str], costs: list[Cost]) -> dict[str, Any]:
    return by_inductor(rank, mesh, folders[rank], costs[rank])


@pytest.mark.slow
def test_a_rank_with_a_warm_cache_and_one_without_agree(gloo_pool: GlooPool, tmp_path: Path) -> None:
    cold = [str(tmp_path / name) for name in ("first", "second", "third")]
    same = [Cost(), Cost()]
    answers = gloo_pool.run(2, by_inductor_apart, cold[:2], same)
    assert [answer["found"] for answer in answers] == [(0, 2), (0, 2)]
    answers = gloo_pool.run(2, by_inductor_apart, [cold[0], cold[2]], same)
    assert [answer["found"] for answer in answers] == [(2, 0), (0, 2)]
    assert max(answer["error"] for answer in answers) < 1e-6
    # Other costs are another entry: nothing that was scheduled by the first ones is found.
    answers = gloo_pool.run(2, by_inductor_apart, cold[:2], [Cost(0.3), Cost(0.3)])
    assert [answer["found"] for answer in answers] == [(0, 2), (0, 2)]


def activated(x: torch.Tensor, shards: list[torch.Tensor], mesh: DeviceMesh | None) -> torch.Tensor:
    """Layers of one shape, for which Inductor generates the same two kernels."""
    for shard in shards:
        x = F.silu(x @ gathered(shard, mesh).t())
    return x


@pytest.mark.slow
def test_inductors_step_is_the_eager_one_to_rounding(gloo_pool: GlooPool) -> None:
    for answer in gloo_pool.run(2, by_inductor, None, Cost(), activated):
        assert answer["error"] < 1e-6
        assert len(answer["launches"]) == 2


class Branches(nn.Module):
    """Two tensor-parallel branches; the second, by `num`, more than once."""

    def __init__(self, mesh: DeviceMesh, num: int) -> None:
        super().__init__()
        self.num = num
        self.first, self.second = (nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in "ab")) for _ in range(2))
        plan = {f"{name}.{i}": style() for name in ("first", "second") for i, style in enumerate((Colwise, Rowwise))}
        parallelize_module(self, mesh, plan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.num):
            x = self.second(x)
        return x


def from_autograds_cache(rank: int, mesh: DeviceMesh, folder: str, nums: list[int]) -> tuple[int, str]:
    """Hits of the cache that holds forward and backward at once, and what a step raised."""
    with caches(f"{folder}/{rank}"):
        module = Branches(mesh, nums[rank])
        run = torch.compile(module, backend=backend("inductor", cost=Cost()))
        said = error_of(lambda: run(torch.ones(BATCH, DIM)).backward(torch.ones(BATCH, DIM)))
        return counters["aot_autograd"]["autograd_cache_hit"], said


@pytest.mark.slow
def test_a_graph_from_a_cache_is_compared_too(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """The comparison is part of what the cache holds: a rank that compiles nothing finds out that another differs."""
    assert gloo_pool.run(2, from_autograds_cache, str(tmp_path), [1, 1]) == [(0, ""), (0, "")]
    assert gloo_pool.run(2, from_autograds_cache, str(tmp_path), [1, 1]) == [(1, ""), (1, "")]
    (hits, said), (missed, told) = gloo_pool.run(2, from_autograds_cache, str(tmp_path), [1, 2])
    assert (hits, missed) == (1, 0)
    assert said == told
    assert "ranks [0] start nothing more here; ranks [1] start 3. all_reduce (traced as 3) sum float32 [8, 16]" in said


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 48, bias=False), nn.Linear(48, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


def mlps() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP()).double()


def beside_eager(module: Callable[[], nn.Module], name: str, seed: int, cost: Cost) -> tuple[list[bool], list[Result]]:
    """Whether results and gradients of a compiled module are the eager ones bit for bit; its schedules."""
    torch._dynamo.reset()
    counters.clear()
    results: list[Result] = []
    eager, module_ = module(), module()
    expected = step(eager, eager, *data(seed))
    got = step(torch.compile(module_, backend=backend(name, cost=cost, on_result=results.append)), module_, *data(seed))
    return [torch.equal(x, y) for x, y in zip(got, expected, strict=True)], results


def collectives(result: Result) -> list[str]:
    nodes = [result.timeline.dag.nodes[i] for i in result.timeline.order.tolist()]
    return [re.sub(r"_\d+$", "", node.name) for node in nodes if node.kind == Kind.START]


def tensor_parallel(rank: int, mesh: DeviceMesh) -> tuple[list[bool], list[list[str]], float]:
    plan = {f"{i}.{name}": style() for i in range(2) for name, style in (("up", Colwise), ("down", Rowwise))}
    equal, results = beside_eager(lambda: parallelize_module(mlps(), mesh, plan), "aot_eager", 0, Cost())
    backward = results[1]
    return equal, list(map(collectives, results)), backward.timeline.exposed_ms / backward.before.exposed_ms


def test_tensor_parallel_module(gloo_pool: GlooPool) -> None:
    """By DTensor: its collectives are nodes of the graph; gradients of weights hide those of inputs."""
    for equal, starts, left in gloo_pool.run(2, tensor_parallel, mesh_dim_names=("tp",)):
        assert all(equal)
        assert starts == [["all_reduce"] * 2] * 2
        assert left < 0.6


def fully_sharded(rank: int, mesh: DeviceMesh) -> tuple[list[bool], int, int]:
    def module() -> nn.Module:
        made = mlps()
        for layer in made:
            fully_shard(layer, mesh=mesh)
        return fully_shard(made, mesh=mesh)

    equal, results = beside_eager(module, "aot_eager", rank, Cost())
    return equal, len(results), counters["stats"]["unique_graphs"]


def test_fsdp2_communicates_outside_of_the_graphs(gloo_pool: GlooPool) -> None:
    """Its hooks break the graph and run uncompiled: what is between them compiles, and has no collectives."""
    for equal, scheduled, graphs in gloo_pool.run(2, fully_sharded, mesh_dim_names=("dp",)):
        assert all(equal)
        assert scheduled == 0 < graphs


class Replicated(nn.Module):
    """A sharded parameter as the layer sees it; its gradient is summed over the ranks."""

    def forward(self, shard: DTensor) -> torch.Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def sharded_by_dtensor(rank: int, mesh: DeviceMesh) -> tuple[list[bool], list[tuple[int, int]], list[float]]:
    def module() -> nn.Module:
        made = mlps()
        for layer in made.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))
                nn.utils.parametrize.register_parametrization(layer, "weight", Replicated(), unsafe=True)
        return made

    equal, results = beside_eager(module, "aot_eager", rank, Cost())
    launches = [(len(r.before.dag.starts), len(r.timeline.dag.starts)) for r in results]
    return equal, launches, [r.timeline.makespan / r.before.makespan for r in results]


def test_parameters_sharded_by_dtensor(gloo_pool: GlooPool) -> None:
    """As torchtitan shards them for compiled models: the same traffic as FSDP2, in the graph."""
    for equal, launches, gains in gloo_pool.run(2, sharded_by_dtensor, mesh_dim_names=("dp",)):
        assert all(equal)
        assert all(after < before == 4 for before, after in launches)
        assert max(gains) < 0.9


class Attention(nn.Module):
    """Projections of a rank's tokens ``[B, S, D]`` around attention to all tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False).double() for _ in range(4))
        self.mesh = mesh

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = spanwise.context_parallel_attention(q, k, v, plan, self.mesh)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def context_parallel(rank: int, mesh: DeviceMesh) -> tuple[float, list[list[str]]]:
    """A step for each of two plans by one compiled module: largest relative error, collectives of each schedule."""
    torch._dynamo.reset()
    results: list[Result] = []
    module = Attention(mesh)
    use = backend("aot_eager", cost=Cost(), on_result=results.append)
    run = torch.compile(module, backend=use, fullgraph=True)
    errors = []
    for cut in (20, 33):
        plan = spanwise.make_plan(SpanMask.documents([0, cut, 64]), mesh.size(), exchange="needed", block_size=4)
        whole = torch.randn(1, 64, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(cut))
        x = spanwise.shard(plan, mesh, whole, dim=1).requires_grad_()
        grad = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(rank))
        got, expected = (
            step(functools.partial(attend, plan=plan.local(mesh)), module, x, grad) for attend in (run, module)
        )
        errors += [relative_error(a, b) for a, b in zip(got, expected, strict=True)]
    return max(errors), list(map(collectives, results))


def test_context_parallel_exchange_is_scheduled(gloo_pool: GlooPool) -> None:
    """How many tokens travel is open in the graph, and the same graph serves every plan."""
    for error, starts in gloo_pool.run(2, context_parallel):
        assert error < 1e-12
        assert starts == [["all_to_all_single"]] * 2


class Experts(nn.Module):
    """An expert on each rank; how many tokens travel is read from a tensor, and is another number on every rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.expert, self.shared = (nn.Linear(DIM, DIM, bias=False).double() for _ in range(3))
        self.group = mesh.get_group()

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sent, received = counts.unbind()
        given, taken = sent.tolist(), received.tolist()
        there = all_to_all_single_autograd(self.before(x), taken, given, self.group)
        back = all_to_all_single_autograd(F.silu(self.expert(there)), given, taken, self.group)
        return back + self.shared(x)


def by_experts(rank: int, mesh: DeviceMesh) -> tuple[list[bool], int, list[list[str]]]:
    torch._dynamo.reset()
    counters.clear()
    results: list[Result] = []
    module = Experts(mesh)
    run = torch.compile(module, backend=backend("aot_eager", cost=Cost(), on_result=results.append), fullgraph=True)
    equal = []
    for of_ranks in ([[3, 5], [2, 6]], [[8, 0], [1, 7]]):  # rows from rank to rank
        counts = torch.tensor([of_ranks[rank], [of_ranks[0][rank], of_ranks[1][rank]]])
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            got = step(functools.partial(run, counts=counts), module, *data(rank))
        expected = step(functools.partial(module, counts=counts), module, *data(rank))
        equal += [torch.equal(x, y) for x, y in zip(got, expected, strict=True)]
    return equal, counters["stats"]["unique_graphs"], list(map(collectives, results))


def test_experts_whose_tokens_are_counted_while_they_run(gloo_pool: GlooPool) -> None:
    """Tokens that come back are as many as were sent, which is known of tensors, and not of what is taken for them."""
    for equal, graphs, starts in gloo_pool.run(2, by_experts):
        assert all(equal) and graphs == 1
        assert starts == [["all_to_all_single"] * 2] * 2
