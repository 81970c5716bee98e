"""Measured costs over real processes: one table for all ranks, whatever each of them measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.hardware import CPU_HOST
from spanwise.overlap import _torch
from spanwise.overlap.costs.measure import measure
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import optimize, simulate
from tests.ranks.gloo import GlooPool

OPS = torch.ops._c10d_functional


def step(name: str, size: int, *, more: bool = False) -> fx.GraphModule:
    """Two gathers of different shards, a reduction, and independent compute."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = OPS.wait_tensor(OPS.all_gather_into_tensor(x, size, name))
        b = OPS.wait_tensor(OPS.all_gather_into_tensor(y, size, name))
        c = (a @ a.t()).sum() + (b @ b.t()).sin().sum()
        if more:
            c = OPS.wait_tensor(OPS.all_reduce(x, "sum", name)).sum() + c
        return c, OPS.wait_tensor(OPS.reduce_scatter_tensor(x.sin(), "sum", size, name))

    return make_fx(function, tracing_mode="fake")(torch.empty(8, 4), torch.empty(4, 4))


class Clock:
    """Runs what it is given; what it says differs from rank to rank and from operator to operator."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, node: fx.Node, call: Callable[[], Any]) -> float:
        call()
        self.calls += 1
        even = self.calls % 2 == 0
        return 100.0 * self.calls + (self.rank if even else 10 - self.rank)


def by_rank(rank: int, mesh: DeviceMesh) -> Any:
    gm, clock = step(_torch.group_name(mesh.get_group()), mesh.size()), Clock(rank)
    measured = measure(gm, timer=clock)
    return dict(measured.table), measured.uuid(), clock.calls


def test_ranks_that_measure_different_times_have_one_table(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, by_rank)
    assert first == second
    table, _, calls = first
    # Odd ones took rank 0 longer, even ones rank 1.
    assert sorted(table.values()) == [100 * i + (1 if i % 2 == 0 else 10) for i in range(1, calls + 1)]


def clocked(rank: int, mesh: DeviceMesh) -> Any:
    tp = mesh["tp"]
    gm = step(_torch.group_name(tp.get_group()), tp.size())
    dp = step(_torch.group_name(mesh["dp"].get_group()), 2)
    measured = [measure(x, repeats=3) for x in (gm, dp)]
    captured = to_dag(gm, measured[0])
    starts = [node for node in captured.nodes if node.target is OPS.all_gather_into_tensor.default]
    separate, merged = sum(map(measured[0], starts)), measured[0].merged(starts)
    result = optimize(gm, measured[0])
    again = simulate(result.graph_module, measured[0])
    assert again.makespan == pytest.approx(result.timeline.makespan)
    return [dict(m.table) for m in measured], list(map(int, result.timeline.order)), (separate, merged)


def test_collectives_run_on_their_own_groups(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(4, clocked, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    assert all(result == results[0] for result in results[1:])
    (tp, dp), order, (separate, merged) = results[0]
    assert len([key for key in tp if key.endswith("over +0, +1")]) == 3
    assert len([key for key in dp if key.endswith("over +0, +2")]) == 3
    assert all(ms > 0 for ms in (*tp.values(), *dp.values())) and len(order) > 10
    assert 0 < merged <= separate


def told_by_one(rank: int, mesh: DeviceMesh) -> list[Any]:
    """What ranks say where rank 1 has a time that is none, or a collective more."""
    name = _torch.group_name(mesh.get_group())

    def broken(node: fx.Node, call: Callable[[], Any]) -> float:
        return float("nan") if rank == 1 and node.name == "mm" else 1.0

    with pytest.raises(ValueError, match="node 'mm': rank 1: it was measured to take nan ms"):
        measure(step(name, 2), timer=broken)
    more = step(name, 2, more=rank == 1)
    measured = measure(more, fallback=CostModel(CPU_HOST), timer=Clock(rank))
    with pytest.raises(ValueError, match="node 'all_reduce': it cannot be measured"):
        measure(more, timer=Clock(rank))
    return [dict(measured.table), list(measured.left_out)]


def test_an_error_of_one_rank_is_an_error_of_all(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, told_by_one)
    assert first[0] == second[0]
    assert (first[1], second[1]) == ([], ["all_reduce"])  # what only one rank would run is not run
