"""The overlap backend on real gloo ranks: results of eager code; one decision on all ranks, or an error on each."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
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
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from spanwise.overlap import _torch, consensus
from spanwise.overlap.backend import backend
from spanwise.overlap.costs.roofline import node_flops
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

    def __init__(self, mesh: DeviceMesh, widths: tuple[int, int] = (48, 80)) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.mesh = mesh

        def shard(*shape: int) -> nn.Parameter:
            whole = torch.randn(shape, generator=draw, dtype=torch.float64) / 8
            return nn.Parameter(whole.chunk(mesh.size())[mesh.get_local_rank()].clone())

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


def data(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and the gradient of its output."""
    draw = torch.Generator().manual_seed(7 + seed)
    x, grad = torch.randn(2, *(shape or (BATCH, DIM)), generator=draw, dtype=torch.float64)
    return x, grad


def step(
    run: Callable[..., torch.Tensor], module: nn.Module, x: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = _whole(run(x))
    out.backward(grad)
    return [out.detach(), x.grad, *(_whole(p.grad).clone() for p in module.parameters())]  # type: ignore[list-item]


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


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


# Costs and widths of ranks, and what each rank's error says: before any collective of the graph.
SAME, DIFFERENT = [(48, 80)] * 4, [(48, 80), (48, 96)]
DIFFERENCES = [
    (
        [Cost(5.0, slow=80), Cost(5.0, slow=48)] * 2, SAME,  # of two branches the other one is urgent
        r"ranks of the process group of ranks \[0, 1, 2, 3\] scheduled the collectives of a graph differently, .*: "
        r"ranks \[0, 2\] start (\d\. .* float64 \[\d+, \d+\]); ranks \[1, 3\] start (?!\1)\d\. ",
    ),
    ([Cost(), Cost(slow=1)], SAME, "^$"),  # they lead to the same decision
    ([Cost(), Cost()], DIFFERENT, r"ranks \[0\] start .*\[40, 16\].*; ranks \[1\] start .*\[48, 16\]"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(DIFFERENCES)))
def test_ranks_that_decide_differently_are_told_so_on_every_rank(gloo_pool: GlooPool, at: int) -> None:
    costs, widths, text = DIFFERENCES[at]
    for said, ranks in gloo_pool.run(len(costs), compare, costs, widths):
        assert re.search(text, said), said
        assert ranks == (1 if widths is DIFFERENT else len(costs))  # afterwards the group works as before


def refuse(rank: int, mesh: DeviceMesh) -> list[str]:
    """Errors if `on_result` or the cost of rank 1 fails; then they do not. It lives until the others have failed."""
    said = []
    for failing in ("on_result", "cost", ""):
        torch._dynamo.reset()

        def result(result: Result, failing: str = failing) -> None:
            if failing == "on_result" and rank == 1:
                raise OSError("no space left")

        module, cost = Sharded(mesh), (lambda node: float("nan")) if failing == "cost" and rank == 1 else Cost()
        run = torch.compile(module, backend=backend("aot_eager", cost=cost, on_result=result))
        said.append(error_of(lambda run=run, module=module: step(run, module, *data(0))))
        if said[-1]:
            tell(mesh, f"{rank} has failed {failing}")
            hear(mesh, *(f"{other} has failed {failing}" for other in (0, 1)))
    return said


def test_ranks_hear_of_one_that_fails_before_it_compares(gloo_pool: GlooPool) -> None:
    """They would wait for it until their group's timeout."""
    first, second = gloo_pool.run(2, refuse)
    assert first[0] == "ValueError: rank 1 raised in on_result: OSError: no space left"
    assert first[1].startswith("ValueError: rank 1 could not schedule its graph: GraphError")
    assert all(text.startswith("BackendCompilerFailed") for text in second[:2])
    assert "OSError: no space left" in second[0] and "got nan" in second[1] and first[2] == second[2] == ""


def steps_of_sizes(rank: int, mesh: DeviceMesh, batches: list[list[int]]) -> tuple[float, int, int]:
    """Largest error of steps of these batch sizes; how many graphs were compiled, how many compared."""
    torch._dynamo.reset()
    counters.clear()
    module, errors, publish = Sharded(mesh), list[float](), consensus._Comparison.publish
    run = torch.compile(module, backend=backend("aot_eager", cost=Cost()))
    with mock.patch.object(consensus._Comparison, "publish", autospec=True, side_effect=publish) as published:
        for batch in batches[rank]:
            expected, got = (step(f, module, *data(batch, batch, DIM)) for f in (module, run))
            errors += map(relative_error, got, expected)
    return max(errors), counters["stats"]["unique_graphs"], published.call_count


@pytest.mark.slow
def test_ranks_need_not_compile_anew_at_the_same_time(gloo_pool: GlooPool) -> None:
    """Rank 0 sees another size and compiles for all of them; rank 1 does not, and their collectives are the same.

    What they agreed on once they do not compare again: a forward and a backward graph in three steps each.
    """
    (error, graphs, told), (other, few, by_other) = gloo_pool.run(2, steps_of_sizes, [[8, 6, 5], [8, 8, 8]])
    assert max(error, other) < 1e-12 and (graphs, few) == (2, 1)
    assert told == by_other <= 2  # none if a test before has had them agree


def reduced(mesh: DeviceMesh, axes: str) -> fx.GraphModule:
    """A graph that sums a number over one axis of `mesh` after the other, with a comparison in front."""

    def function(x: torch.Tensor) -> torch.Tensor:
        for axis in axes:
            x = _torch.wait(_torch.start_all_reduce(x, "sum", _torch.group_name(mesh.get_group(axis))))
        return x

    gm = make_fx(function, tracing_mode="fake")(torch.ones(1))
    consensus.insert(gm.graph)
    gm.recompile()
    return gm


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


def stays_away(rank: int, mesh: DeviceMesh) -> str:
    """Rank 1 does not have the graph."""
    group, said = dist.new_group(timeout=timedelta(seconds=1)), ""
    if rank == 0:
        short = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))
        said = error_of(lambda: reduced(short, "a")(torch.ones(1)))
    dist.barrier()
    return said


def test_a_rank_that_does_not_come_is_named(gloo_pool: GlooPool) -> None:
    said, nothing = gloo_pool.run(2, stays_away)
    assert (
        "ranks [1] of the process group of ranks [0, 1] did not come to compare a compiled graph within 0:00:01" in said
    )
    assert nothing == ""


def linear(x: torch.Tensor, shards: list[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Matrix products alone: Inductor has nothing to generate C++ for."""
    for shard in shards:
        x = x @ Gathered.apply(shard, mesh).t()
    return x


def from_cache(rank: int, mesh: DeviceMesh, folder: str, nums: list[int]) -> tuple[int, str]:
    """Hits of the cache of graphs of a step with `nums` layers on each rank, and what it raised."""
    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=True):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{folder}/{rank}")
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


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def parallel(mesh: DeviceMesh) -> nn.Module:
    """By DTensor, whose collectives are nodes of the graph: hidden states in shards of the sequence, dim 1."""
    torch.manual_seed(0)
    plan: dict[str, Any] = {"": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))}
    for i in range(2):
        plan |= {f"{i}.norm": SequenceParallel()}
        plan |= {f"{i}.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
        plan |= {f"{i}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    return parallelize_module(nn.Sequential(MLP(), MLP()).double(), mesh, plan)


class BySize:
    """Collectives by their bytes, longer than the products next to them; all else nearly nothing."""

    half_rate = 0

    def __call__(self, node: fx.Node) -> float:
        if node.target in operators.STARTS:
            return 1e-2 + 1e-3 * sum(t.nbytes for n in node.all_input_nodes for t in operators.tensors_of(n))
        return 1e-4 + 1e-5 * node_flops(node)


def beside_eager(
    rank: int, mesh: DeviceMesh, make: Callable[[DeviceMesh], nn.Module], name: str, options: dict[str, Any]
) -> tuple[float, int, list[tuple[float, int, int, dict[str, int]]]]:
    """A compiled module and the same uncompiled: the largest error of results and gradients; graphs; schedules."""
    torch._dynamo.reset()
    counters.clear()
    results: list[Result] = []
    module, eager = make(mesh), make(mesh)
    run = torch.compile(module, backend=backend(name, **{"cost": Cost(), **options}, on_result=results.append))
    given = data(0, 2, 24, DIM) if make is parallel else data(rank)
    errors = [*map(relative_error, step(run, module, *given), step(eager, eager, *given))]
    errors += map(relative_error, step(run, module, *given), step(eager, eager, *given))
    found = []
    for r in results:
        launches = len(r.before.dag.starts), len(r.timeline.dag.starts)
        found.append((r.timeline.makespan / r.before.makespan, *launches, dict(r.split.collectives) if r.split else {}))
    return max(errors), counters["stats"]["unique_graphs"], found


CUT = {"split": True, "bucket": False, "cost": BySize()}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [
        (Sharded, "aot_eager", {}),
        pytest.param(Sharded, "inductor", {}, marks=SLOW),
        (parallel, "aot_eager", {"bucket": False}),
        (parallel, "aot_eager", CUT),
        pytest.param(parallel, "inductor", CUT, marks=SLOW),
    ],
)
def test_compiled_steps_are_the_eager_ones(gloo_pool: GlooPool, make: Any, name: str, options: dict[str, Any]) -> None:
    """To the bit where nothing rounds differently: neither pieces nor Inductor's kernels."""
    for error, graphs, schedules in gloo_pool.run(2, beside_eager, make, name, options):
        assert error <= (1e-12 if "split" in options or name == "inductor" else 0.0) and graphs == 1
        assert len(schedules) == 2
        for gain, before, after, cut in schedules:
            assert gain <= (0.9 if make is Sharded else 1.0)
            assert after < before if "bucket" not in options else "split" in options or after == before
            if "split" in options:
                assert cut["all_gather_into_tensor"] >= 2 <= cut["reduce_scatter_tensor"], cut
