"""Measured costs: what is timed and how often, fused chains, merged collectives, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.hardware import CPU_HOST
from spanwise.overlap.costs.measure import Measured, measure
from spanwise.overlap.costs.roofline import VECTOR_UNITS, CostModel
from spanwise.overlap.costs.timing import calls, trial
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.capture import CaptureConfig, capture
from spanwise.overlap.fx.graph import to_dag
from tests.overlap.test_costs import starts_of

ATEN = torch.ops.aten
CPU = torch.device("cpu")


class Clock:
    """Runs what it is given, and says that it took as long as its turn."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, node: fx.Node, call: Callable[[], Any]) -> float:
        call()
        self.seen.append(node.name)
        return float(len(self.seen))


def traced(function: Callable[..., Any], *values: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*values)


def test_each_operator_is_timed_once_per_shape_stride_and_dtype() -> None:
    def products(x: torch.Tensor, y: torch.Tensor) -> Any:
        a = x @ y
        b = a @ y  # the same, once more
        c = b.t() @ y  # other strides
        return c, (c[:2] @ y).sum(), (a.double() @ y.double())

    gm, clock = traced(products, torch.randn(8, 8), torch.randn(8, 8)), Clock()
    measured = measure(gm, timer=clock)
    assert sorted(clock.seen) == ["_to_copy", "mm", "mm_2", "mm_3", "mm_4", "sum_1"]
    ms = {n.name: n.ms for n in to_dag(gm, measured).dag.nodes}
    assert ms["mm"] == ms["mm_1"] and len({ms[name] for name in ("mm", "mm_2", "mm_3", "mm_4")}) == 4
    assert ms["t"] == 0 and len(measured.table) == 6 and not measured.left_out
    measured = measure(gm, repeats=3)  # by the clock
    assert len(measured.table) == 6 and all(0 < ms < 1000 for ms in measured.table.values())


STEP = CaptureConfig(
    layers=1, dim=32, heads=4, kv_heads=2, ffn=48, seq_len=16, vocab=24, dp=2, device="cpu", dtype=torch.float32
)


def test_every_operator_of_a_captured_step_runs_alone_but_collectives_of_nobody() -> None:
    graphs, state = capture(STEP), torch.get_rng_state()
    dp = graphs.axes["dp"]
    model = CostModel(CPU_HOST, ranks={dp.name: dp.ranks})
    for gm in (graphs.forward, graphs.backward):
        measured = measure(gm, fallback=model, timer=Clock(), ranks={dp.name: dp.ranks})
        assert set(measured.left_out.values()) == {f"there is no process group {dp.name!r} here"}
        assert to_dag(gm, measured).dag.starts and to_dag(gm, measured).dag.compute_ms > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_made_up_inputs_are_like_those_of_the_graph() -> None:
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    x.meta["val"] = torch.empty(4, 6, dtype=torch.bfloat16).t()
    rows.meta["val"] = torch.empty(1, 3, dtype=torch.int64).expand(5, 3)
    (call,) = calls(graph.call_function(ATEN.index.Tensor, (x, [rows])))
    seen: list[torch.Tensor] = []
    trial(call._replace(target=lambda x, rows: seen.extend([x, *rows])), CPU)()
    assert seen[0].shape == (6, 4) and seen[0].stride() == (1, 6) and seen[0].dtype is torch.bfloat16
    assert seen[1].stride() == (0, 1) and seen[1].min() >= 0 and seen[1].max() < 4
    assert trial(call, CPU)().shape == (5, 3, 4)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.ops.higher_order.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)), "no operator"),
        (lambda x: ATEN._assert_async.msg(x.sum() > 0, "x"), "does more than compute"),
        (lambda x: ATEN.searchsorted.Tensor(x.long(), x), "depends on the integers in '_to_copy'"),
    ],
)
def test_what_cannot_be_run_needs_a_model(function: Callable[..., Any], reason: str) -> None:
    gm = traced(lambda x: (function(x), x.sin()), torch.rand(4))
    with pytest.raises(GraphError, match=f"{reason}.*; pass fallback="):
        measure(gm, timer=Clock())
    model = CostModel(CPU_HOST, rates=VECTOR_UNITS)
    measured = measure(gm, timer=Clock(), fallback=model)
    assert len(measured.left_out) == 1 and reason in next(iter(measured.left_out.values()))
    (name,) = measured.left_out
    node = next(n for n in gm.graph.nodes if n.name == name)
    assert measured(node) == model(node)


def test_what_torch_refuses_and_times_that_are_none_name_the_node() -> None:
    gm = traced(lambda x: x.sin().cos(), torch.rand(4))
    for ms in (float("nan"), float("inf"), -1.0):
        with pytest.raises(GraphError, match="'cos'"):
            measure(gm, timer=lambda node, call, ms=ms: ms if node.name == "cos" else 1.0)
    wrong = traced(lambda x, y: x @ y, torch.empty(4, 4), torch.empty(4, 3))
    wrong.graph.find_nodes(op="placeholder")[1].meta["val"] = torch.empty(3, 3)
    with pytest.raises(GraphError, match="node 'mm': it cannot be measured: RuntimeError"):
        measure(wrong)
    (product,) = (node for node in wrong.graph.nodes if node.name == "mm")
    assert measure(wrong, fallback={"mm": 3.0})(product) == 3.0


def test_fused_chains_pay_for_the_bytes_that_one_kernel_moves() -> None:
    gm = traced(lambda x, y: (x.sin() * y).cos() @ y, torch.rand(4, 4), torch.rand(4, 4))
    apart, fused = (to_dag(gm, measure(gm, fuse=fuse, timer=lambda node, call: 6.0)).dag for fuse in (False, True))
    assert apart.ms.tolist() == [6.0] * 4
    # sin reads x and writes nothing; mul reads y alone; cos writes what the product reads.
    assert fused.ms.tolist() == [3.0, 2.0, 3.0, 6.0]


class Latency(NamedTuple):
    ms: float

    def __call__(self, node: fx.Node) -> float:
        return 2.0

    def latency(self, node: fx.Node) -> float:
        return self.ms


def test_merged_collectives_pay_the_latency_of_the_fallback_once() -> None:
    nodes, merged = starts_of("all_gather_into_tensor", [4, 8, 4], 2)
    gathers = "_c10d_functional.all_gather_into_tensor.default"
    inputs = [(dtype, n) for dtype in ("float32", "bfloat16") for n in (4, 8)]
    table = {f"{gathers}(input={dtype}[{n}], group_size=2) over +0, +8": float(n) for dtype, n in inputs}
    for ranks in ((0, 8), (3, 11)):  # alike, wherever they begin
        measured = Measured(table, Latency(1.5), ranks={"g": ranks})
        assert [measured(n) for n in nodes] == [4, 8, 4]
        assert measured.merged(nodes) == measured(merged) == 16 - 2 * 1.5
        assert measured.merged(nodes[:1]) == 4 and Measured(table, ranks={"g": ranks}).merged(nodes) == 16
    # Of a latency that is longer than a member no more than that one takes can be saved.
    for latency, sizes, ms in ((5.0, [8, 8, 4], 12), (100.0, [4, 8, 4], 8)):
        gathered, _ = starts_of("all_gather_into_tensor", sizes, 2)
        assert Measured(table, Latency(latency), ranks={"g": (0, 8)}).merged(gathered) == ms
    near, model = {"g": (0, 1)}, CostModel(CPU_HOST, ranks={"g": (0, 1)})
    with pytest.raises(GraphError, match="node 'all_gather_into_tensor_default': it was not measured"):
        Measured(table, ranks=near)(nodes[0])
    other = Measured(table, model, ranks=near)
    assert other.merged(nodes) == model.merged(nodes) == other(merged)
    assert Measured({}, lambda node: 2.0, ranks=near).merged(nodes) == 6


def test_fingerprints_change_with_costs() -> None:
    model, table = CostModel(CPU_HOST), {"a": 1.0}
    base = Measured(table, model)
    assert base.uuid() == Measured(table, CostModel(CPU_HOST)).uuid()
    others = [Measured(table, of) for of in (CostModel(CPU_HOST, fuse=False), None, *[lambda node: 1.0] * 2)]
    others += [Measured({"a": 2.0}, model), Measured(table, model, fuse=False), Measured(table, model, {"g": (0, 1)})]
    assert len({base.uuid(), *(other.uuid() for other in others)}) == 8
