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
        return 100.0 * self.calls + (10 - self.rank if self.calls % 2 else self.rank)


def clocked(rank: int, mesh: DeviceMesh) -> Any:
    groups = [_torch.group_name(mesh[axis].get_group()) for axis in ("tp", "dp")]
    gm, *_ = graphs = [step(name, 2) for name in groups]
    measured, *_ = tables = [measure(x, repeats=3) for x in graphs]
    starts = [node for node in gm.graph.nodes if node.target is OPS.all_gather_into_tensor.default]
    result = optimize(gm, measured)
    assert 0 < measured.merged(starts) <= sum(map(measured, starts))
    assert simulate(result.graph_module, measured).makespan == pytest.approx(result.timeline.makespan)
    return [dict(m.table) for m in tables], result.timeline.order.tolist()


def test_collectives_run_on_their_own_groups(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(4, clocked, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    assert all(result == results[0] for result in results[1:])
    for table, ranks in zip(results[0][0], ("+0, +1", "+0, +2"), strict=True):
        assert len([key for key in table if key.endswith(f"over {ranks}")]) == 3 and min(table.values()) > 0


def by_rank(rank: int, mesh: DeviceMesh) -> Any:
    """Measured by all; where rank 1 has a time that is none; and where it has a collective more."""
    name, clock = _torch.group_name(mesh.get_group()), Clock(rank)
    same = measure(step(name, 2), timer=clock)

    def broken(node: fx.Node, call: Callable[[], Any]) -> float:
        return float("nan") if rank == 1 and node.name == "mm" else 1.0

    with pytest.raises(ValueError, match="node 'mm': rank 1: it was measured to take nan ms"):
        measure(step(name, 2), timer=broken)
    more = step(name, 2, more=rank == 1)
    measured = measure(more, fallback=CostModel(CPU_HOST), timer=Clock(rank))
    with pytest.raises(ValueError, match="node 'all_reduce': it cannot be measured"):
        measure(more, timer=Clock(rank))
    return dict(same.table), same.uuid(), clock.calls, dict(measured.table), list(measured.left_out)


def test_ranks_have_one_table_and_an_error_of_one_is_an_error_of_all(gloo_pool: GlooPool) -> None:
    first, second = gloo_pool.run(2, by_rank)
    assert first[:4] == second[:4]
    # Odd ones took rank 0 longer, even ones rank 1.
    assert sorted(first[0].values()) == [100 * i + (10 if i % 2 else 1) for i in range(1, first[2] + 1)]
    assert (first[4], second[4]) == ([], ["all_reduce"])  # what only one rank would run is not run
