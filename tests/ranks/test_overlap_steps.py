"""`graph_pass` on whole steps, run on real gloo ranks: bits and memory of the step as traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from spanwise import overlap
from tests.overlap.programs import Cost
from tests.ranks import steps
from tests.ranks.gloo import GlooPool

pytestmark = pytest.mark.compiles

SLACK = 64  # bytes of constants in the graph, which are not counted


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


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


def _copied(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), args)


def _equal(x: torch.Tensor, y: torch.Tensor, result: overlap.Result) -> bool:
    """Bit for bit; a merged all-reduce may round differently."""
    merged = [start for start in result.timeline.dag.starts if len(result.members[start]) > 1]
    names = [result.timeline.dag.nodes[start].name for start in merged]
    return torch.allclose(x, y) if any("all_reduce" in name for name in names) else torch.equal(x, y)


def _changed(got: list[torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Written arguments; they are the last of `got`."""
    return [x for x, y in zip(got[-len(given) :], given, strict=True) if not torch.equal(x, y)]


def scheduled(rank: int, mesh: DeviceMesh, names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        gm, args = steps.STEPS[name](mesh)
        expected = run(gm, args)
        tight = overlap.simulate(gm, Cost()).peak_bytes
        for bucket, budget in ((False, None), (True, tight)):
            results: list[overlap.Result] = []
            options = {"bucket": bucket, "memory_budget": budget, "on_result": results.append}
            new = overlap.graph_pass(cost=Cost(), **options)(gm, args)
            got = run(new, args)  # the first call generates code, which the tracker does not understand
            (result,) = results
            enough = result.timeline.peak_bytes + SLACK
            found[f"{name}, {bucket}, {budget}"] = {
                "same": [_equal(x, y, result) for x, y in zip(got, expected, strict=True)],
                "written": len(_changed(got, tensors(args))),
                "gain": result.timeline.makespan / result.before.makespan,
                "barriers": result.barriers,
                "launches": len(result.timeline.dag.starts) / len(result.before.dag.starts),
                "peak": (most_bytes(new, args, enough), result.timeline.peak_bytes, result.budget),
                "compared": len(new.graph.find_nodes(op="call_function", target=torch.ops.spanwise.agree.default)),
            }
    return found


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ("functionalized", "tensor_parallel", "two_steps", "updates_travel")),
        (4, ("simple_fsdp",)),
        pytest.param(4, tuple(steps.STEPS), marks=pytest.mark.slow),
    ],
)
def test_a_scheduled_step_is_the_step(gloo_pool: GlooPool, num_ranks: int, names: Sequence[str]) -> None:
    for answer in gloo_pool.run(num_ranks, scheduled, names):
        for what, found in answer.items():
            assert all(found["same"]) and found["written"] > 2, what
            assert not found["barriers"] and found["compared"] == 1, what
            assert found["gain"] < (0.95 if what.endswith("None") else 1.0 + 1e-9), (what, found["gain"])
            measured, predicted, budget = found["peak"]
            assert measured <= predicted + SLACK and predicted <= budget, (what, found["peak"])
        assert any(found["launches"] < 1 for found in answer.values())


def differ(rank: int, mesh: DeviceMesh) -> list[str]:
    """Errors where ranks have other costs, and where one cannot schedule; "" where all is well again."""
    gm, args = steps.STEPS["updates_travel"](mesh)
    slow = "reduce_scatter" if rank else "all_gather"
    said = []
    for cost in (
        lambda node: 9.0 if slow in node.name else Cost()(node),
        lambda node: float("nan") if rank and "all_gather" in node.name else Cost()(node),
        Cost(),
    ):
        try:
            overlap.graph_pass(cost=cost, bucket=False)(gm, args)(*args)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_that_schedule_differently_are_told(gloo_pool: GlooPool) -> None:
    (other, waits, well), (other_1, nan, well_1) = gloo_pool.run(2, differ)
    assert "scheduled the collectives of a graph differently" in other and other == other_1
    assert "nan" in nan and "rank 1 could not schedule its graph: GraphError" in waits
    assert well == well_1 == ""
