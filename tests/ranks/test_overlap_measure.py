"""Measured costs over real processes: one table for all ranks, whatever each of them measured or has on file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.hardware import CPU_HOST
from spanwise.overlap import _torch
from spanwise.overlap.costs.measure import Measured, measure
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


def told(measured: Measured, clock: Clock | None = None) -> Any:
    return dict(measured.table), measured.uuid(), clock.calls if clock else 0


def by_rank(rank: int, mesh: DeviceMesh, folder: str) -> list[Any]:
    gm = step(_torch.group_name(mesh.get_group()), mesh.size())
    found = []
    for path in (None, Path(folder) / f"{rank}.json", Path(folder) / f"{rank}.json"):
        clock = Clock(rank)
        found.append(told(measure(gm, cache=path, timer=clock), clock))
    if rank == 1:
        Path(folder, "1.json").unlink()
    clock = Clock(rank)
    found.append(told(measure(gm, cache=Path(folder, f"{rank}.json"), timer=clock), clock))
    return found


def test_ranks_that_measure_different_times_have_one_table(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.run(2, by_rank, str(tmp_path))
    for (table, uuid, calls), (other, other_uuid, other_calls) in zip(first, second, strict=True):
        assert table == other and uuid == other_uuid and calls == other_calls
    calls = [calls for *_, calls in first]
    assert calls == [len(first[0][0])] * 2 + [0, 0]  # on file, of one rank at least
    assert first[1][0] == first[2][0] == first[3][0]
    # Odd ones took rank 0 longer, even ones rank 1.
    assert sorted(first[0][0].values()) == [100 * i + (1 if i % 2 == 0 else 10) for i in range(1, calls[0] + 1)]
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "0.json").read_bytes()
    keys = list(json.loads((tmp_path / "0.json").read_text()))
    assert all(("2 ranks" in key) == key.endswith("over +0, +1") for key in keys)
    assert 0 < sum("2 ranks" in key for key in keys) < len(keys)


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
    return [told(m) for m in measured], list(map(int, result.timeline.order)), (separate, merged)


def test_collectives_run_on_their_own_groups(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(4, clocked, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    assert all(result == results[0] for result in results[1:])
    ((tp, *_), (dp, *_)), order, (separate, merged) = results[0]
    assert len([key for key in tp if key.endswith("over +0, +1")]) == 5  # three collectives, two latencies
    assert len([key for key in dp if key.endswith("over +0, +2")]) == 5
    assert all(ms > 0 for ms in (*tp.values(), *dp.values())) and len(order) > 10
    assert 0 < merged <= separate


def told_by_one(rank: int, mesh: DeviceMesh, folder: str) -> list[Any]:
    """What ranks say where rank 1 has a broken file, a time that is none, and a collective more."""
    name, path, clock, said = _torch.group_name(mesh.get_group()), Path(folder) / f"{rank}.json", Clock(rank), []
    if rank == 1:
        path.write_text("nonsense")

    def broken(node: fx.Node, call: Callable[[], Any]) -> float:
        return float("nan") if rank == 1 and node.name == "mm" else 1.0

    gm, more = step(name, 2), step(name, 2, more=rank == 1)
    for options in ({"cache": path, "timer": clock}, {"timer": broken}):
        with pytest.raises(ValueError) as caught:
            measure(gm, **options)
        said.append(str(caught.value))
    measured = measure(more, fallback=CostModel(CPU_HOST), timer=Clock(rank))
    with pytest.raises(ValueError) as caught:
        measure(more, timer=Clock(rank))
    return [clock.calls, *said, told(measured)[:1], dict(measured.left_out), str(caught.value)]


def test_an_error_of_one_rank_is_an_error_of_all(gloo_pool: GlooPool, tmp_path: Path) -> None:
    first, second = gloo_pool.run(2, told_by_one, str(tmp_path))
    assert first[:4] == second[:4] and first[0] == 0
    assert first[1].startswith("rank 1: ") and "1.json is not a file of measured costs" in first[1]
    assert first[2] == "node 'mm': rank 1: it was measured to take nan ms"
    # What only one rank would run is not run.
    assert (first[4], second[4]) == ({}, {"all_reduce": "not all ranks of its group have it alike"})
    assert all("node 'all_reduce': it cannot be measured" in of[5] for of in (first, second))
