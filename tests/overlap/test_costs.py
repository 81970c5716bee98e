"""Costs of fx nodes: FLOPs and bytes by hand, rates of dtypes, collectives by the hosts of their ranks, tables."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import spanwise
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.table import KERNELS
from spanwise.hardware import CPU_HOST, Hardware, Link, attention_flops
from spanwise.overlap.costs.flops import node_flops
from spanwise.overlap.costs.roofline import TENSOR_CORES, VECTOR_UNITS, CostModel, as_cost, node_bytes
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.capture import capture
from spanwise.overlap.fx.files import load_graphs, save_graphs
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import named_arguments
from tests.overlap.test_capture import TINY, attention_of, causal_plan

OPS, ATEN, SDPA = torch.ops._c10d_functional, torch.ops.aten, F.scaled_dot_product_attention
HOST = 8
HARDWARE = Hardware(
    "round figures", attention_flops=1e12, attention_backward_flops=5e11, matmul_flops=2e12, memory_bandwidth=1e9,
    memory=10**9, links=(Link(1e9, 1e-3, ranks=HOST), Link(1e8, 1e-2)),
)  # fmt: skip


def node(op: Any, *values: Any, of: str = "fake", **kwargs: Any) -> fx.Node:
    """The node that calls `op` in a graph; tensors among `values` are its inputs."""
    gm = make_fx(lambda *args: op(*args, **kwargs), tracing_mode=of)(*values)
    (found,) = (n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def called(op: Any, inputs: dict[str, Any], *rest: Any, val: Any, graph: fx.Graph | None = None) -> fx.Node:
    """A call of `op` on placeholders of these values, and `rest`."""
    graph, given = graph or fx.Graph(), []
    for name, value in inputs.items():
        given.append(graph.placeholder(name))
        given[-1].meta["val"] = value
    call = graph.call_function(op, (*given, *rest))
    call.meta["val"] = val
    return call


@pytest.mark.compiles
def test_flops_of_attention() -> None:
    q, kv = empty(2, 4, 10, 8), empty(2, 2, 6, 8)  # two heads of q share one of k and v
    products = 2 * 2 * 4 * 8  # FLOPs of one product of one query with one key, over all
    forward = {"q": q, "k": kv, "v": kv}
    backward = {"grad": q, **forward, "out": q, "lse": empty(2, 4, 10)}
    for is_causal, pairs in ((False, 60), (True, int(torch.ones(10, 6).tril().sum()))):
        for op in (ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN._scaled_dot_product_flash_attention):
            call = called(op.default, forward, 0.0, is_causal, val=(q, empty(2, 4, 10)))
            assert node_flops(call) == pytest.approx(2 * products * pairs, rel=1e-12)
        ms = 1e3 * max(2 * products * pairs / (1e12 * 67 / 989.4), node_bytes(call) / 1e9)
        assert CostModel(HARDWARE)(call) == pytest.approx(ms)
        op = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
        call = called(op, backward, 0.0, is_causal, val=(q, kv, kv))
        assert node_flops(call) == pytest.approx(5 * products * pairs, rel=1e-12)


def test_flex_attention_counts_what_its_hint_leaves() -> None:
    module, graph, x = torch.nn.Module(), fx.Graph(), empty(2, 4, 16, 8, dtype=torch.bfloat16)
    module.score_mod = make_fx(lambda score: score * 2)(torch.zeros(()))
    score_mod, results = graph.get_attr("score_mod"), (x, empty(2, 4, 16), empty(0))
    rest = score_mod, (), 1.0, {}, (), ()
    flex = called(torch.ops.higher_order.flex_attention, {"q": x, "k": x, "v": x}, *rest, val=results, graph=graph)
    graph.output(flex)
    captured = to_dag(fx.GraphModule(module, graph), CostModel(dataclasses.replace(HARDWARE, memory_bandwidth=1e15)))
    flops = 2 * (2 * 2 * 4 * 8) * 16 * 16
    assert node_flops(flex) == flops and not captured.barriers
    assert captured.dag.nodes[0].ms == pytest.approx(1e3 * flops / 1e12)
    flex.meta["custom"] = {"sparsity_hint": 0.5}
    back = graph.call_function(torch.ops.higher_order.flex_attention_backward, (*flex.args[:3], *flex.args[:3]))
    assert node_flops(flex) == flops / 2 and node_flops(back) == 5 * flops / 2


@pytest.mark.compiles
def test_flops_of_spanwise_attention_are_those_of_the_pairs_it_shows() -> None:
    mask, sdpa = spanwise.SpanMask.sliding_window(40, 7), KERNELS["sdpa"]
    area, rows = int(mask.area().sum()), [torch.tensor(x) for x in (mask.start, mask.end)]
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, n, 40, d, requires_grad=True) for n, d in ((4, 16), (2, 16), (2, 8)))
    counted = [3 * attention_flops(area, 4, 16, 8, backward=backward) for backward in (False, True)]
    with FlopCounterMode(display=False) as mode:
        chunk = Chunk(*rows, torch.arange(40)[None], None)
        out, _ = sdpa.attend(q, k, v, chunk, torch.arange(40)[None], AttentionOptions(0.25))
        assert mode.get_total_flops() == counted[0]
        out.sum().backward()
    assert mode.get_total_flops() == sum(counted)


@pytest.mark.compiles
def test_captured_attention_costs_what_the_plan_says(tmp_path: Path) -> None:
    """The pairs of its spans; all pairs, a guess, where the graph does not hold them, or what a hint leaves."""
    config = dataclasses.replace(TINY, dp=2, cp=2, dtype=torch.bfloat16)
    plan, model = causal_plan(config), CostModel(dataclasses.replace(HARDWARE, memory_bandwidth=1e15))
    for rank, area in enumerate(plan.work()):
        graphs = capture(dataclasses.replace(config, rank=rank), attention_of(plan, []))
        for module, backward in ((graphs.forward, False), (graphs.backward, True)):
            save_graphs(tmp_path / "saved", {"module": module})
            for gm in (module, load_graphs(tmp_path / "saved").graphs["module"]):
                calls = [n for n in gm.graph.nodes if "spanwise" in str(n.target) and node_flops(n)]
                counted = config.batch * attention_flops(area, config.heads, 8, 8, backward=backward)
                assert sum(map(node_flops, calls)) == counted and not any(map(model.is_guess, calls))
                rate = 5e11 if backward else 1e12
                assert all(model(call) == pytest.approx(1e3 * node_flops(call) / rate) for call in calls)
            for x in gm.graph.find_nodes(op="placeholder"):
                x.meta.pop("known", None)
            for call in calls:
                q, k = (named_arguments(call)[name].meta["val"].shape[2] for name in ("q", "k"))
                whole = config.batch * attention_flops(q * k, config.heads, 8, 8, backward=backward)
                assert node_flops(call) == whole and model.is_guess(call)
                call.meta["custom"] = {"sparsity_hint": 0.25}
                assert node_flops(call) == 0.75 * whole and not model.is_guess(call)


def test_the_roofline_is_the_larger_of_two() -> None:
    fast = dataclasses.replace(HARDWARE, memory_bandwidth=1e15)
    half = node(ATEN.mm.default, empty(64, 32, dtype=torch.bfloat16), empty(32, 16, dtype=torch.bfloat16))
    full = node(ATEN.mm.default, empty(64, 32), empty(32, 16))
    flops = 2 * 64 * 32 * 16
    assert CostModel(fast)(half) == pytest.approx(1e3 * flops / 2e12)
    assert CostModel(fast)(full) == pytest.approx(1e3 * flops / 2e12 * 989.4 / 67)
    assert CostModel(fast, rates=VECTOR_UNITS)(full) == pytest.approx(1e3 * flops / 2e12)
    operands = (empty(64, 32, dtype=torch.float8_e4m3fn), empty(16, 32, dtype=torch.float8_e4m3fn).t())
    scaled = node(ATEN._scaled_mm.default, *operands, empty(), empty(), out_dtype=torch.bfloat16)
    assert CostModel(fast)(scaled) == pytest.approx(1e3 * flops / 4e12)  # by its operands, not by their scales
    assert CostModel(HARDWARE)(half) == pytest.approx(1e3 * 2 * (64 * 32 + 32 * 16 + 64 * 16) / 1e9)
    assert TENSOR_CORES[torch.bfloat16] == 1
    with pytest.raises(ValueError, match=r"rates\[torch.float32\] must be positive and finite, got 0"):
        CostModel(HARDWARE, rates={torch.float32: 0})


X = empty(4)
BYTES = [
    ((ATEN.add.Tensor, empty(4, 4), empty(4, 4)), 3 * 64), ((ATEN.mm.default, empty(3, 5), empty(5, 7)), 4 * 71),
    ((ATEN.add_.Tensor, X, empty(4)), 3 * 16), ((ATEN.copy_.default, X, empty(4)), 2 * 16),
    ((ATEN.fill_.Scalar, X, 1.0), 16), ((ATEN.full_like.default, X, 1.0), 16),
    ((ATEN.embedding.default, empty(1000, 8), torch.zeros(3, dtype=torch.int64)), 24 + 2 * 96),
    ((ATEN.sum.default, empty(8).expand(1000, 8)), 32 + 4),  # in memory once
]  # fmt: skip


def test_bytes_by_hand() -> None:
    assert [node_bytes(node(*call)) for call, _ in BYTES] == [num_bytes for _, num_bytes in BYTES]
    assert node_bytes(node(ATEN._to_copy.default, empty(8), dtype=torch.bfloat16)) == 32 + 16
    of_two = called(ATEN._foreach_add_.Scalar, {"x": X, "y": empty(8)}, 1, val=None)
    of_two.args = (list(of_two.args[:2]), 1)
    assert node_bytes(of_two) == 2 * 48


def test_what_does_not_run_takes_no_time() -> None:
    model, x = CostModel(HARDWARE), empty(4, 4)
    calls = (ATEN.view.default, [16]), (ATEN.t.default,), (ATEN.empty_like.default,), (ATEN.split.Tensor, 2)
    free = [node(op, x, *rest) for op, *rest in calls]
    free += [user for user in free[-1].users if user.target is operator.getitem]
    assert len(free) == 6 and all(model(n) == 0 and node_bytes(n) == 0 for n in free)
    assert model(node(ATEN.sin.default, x)) > 0


CHAINS: list[tuple[Callable[..., Any], dict[str, int]]] = [
    (lambda x: (x.sin() * 2).cos() @ x, {"sin": 64, "mul": 0, "cos": 64, "mm": 3 * 64}),
    (lambda x: (lambda y: (y.sin(), y.cos()))(x * 2), {"mul": 128, "sin": 128, "cos": 128}),  # two readers
    (lambda x: (x.sin() @ x).cos(), {"sin": 128, "mm": 3 * 64, "cos": 128}),  # for a product, or returned
    (lambda x: x.sin().view(16).to(torch.bfloat16), {"sin": 64, "view": 0, "_to_copy": 32}),  # through a view, and cast
    (lambda x: torch.full_like(x, 2.0) * x, {"full_like": 0, "mul": 128}),  # a constant is made where it is read
    (lambda x: x.clone().add_(1).sin(), {"clone": 64, "add_": 64, "sin": 128}),  # what writes an argument counts it
]


def test_pointwise_chains_are_one_kernel() -> None:
    for function, expected in CHAINS:
        gm = make_fx(function, tracing_mode="fake")(empty(4, 4))
        assert {n.name: node_bytes(n) for n in gm.graph.nodes if n.op == "call_function"} == expected
    gm = make_fx(lambda x: (x.sin() * x).cos(), tracing_mode="fake")(empty(4, 4))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [node_bytes(n, fuse=False) for n in calls] == [128, 192, 128]


def collective(kind: str, ranks: tuple[int, ...], shard: int = 1000) -> float:
    """Seconds of a collective whose shard has `shard` float32."""
    n = len(ranks)
    op, *args = {
        "all_gather": (OPS.all_gather_into_tensor, n), "reduce_scatter": (OPS.reduce_scatter_tensor, "sum", n),
        "all_reduce": (OPS.all_reduce, "sum"), "all_to_all": (OPS.all_to_all_single, [shard] * n, [shard] * n),
        "broadcast": (OPS.broadcast, 0), "shard_dim": (torch.ops._dtensor.shard_dim_alltoall, 0, 1),
    }[kind]  # fmt: skip
    x, out = (empty(shard if kind == of else shard * n) for of in ("all_gather", "reduce_scatter"))
    return CostModel(HARDWARE, ranks={"g": ranks})(called(op.default, {"x": x}, *args, "g", val=out)) / 1e3


INSIDE, ACROSS = tuple(range(4)), (0, 8, 16, 24)


@pytest.mark.parametrize(("ranks", "alpha", "rate"), [(INSIDE, 1e-3, 1e9), (ACROSS, 1e-2, 1e8), ((7, 8), 1e-2, 1e8)])
def test_a_small_group_that_spans_hosts_is_slow(ranks: tuple[int, ...], alpha: float, rate: float) -> None:
    n = len(ranks)
    others = (n - 1) * 4000  # bytes: (n - 1) / n of the whole
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "shard_dim"):
        assert collective(kind, ranks) == pytest.approx(alpha + others / rate), kind
    assert collective("all_reduce", ranks) == pytest.approx(2 * (alpha + others / rate))
    assert collective("broadcast", ranks) == pytest.approx(alpha + n * 4000 / rate)
    assert collective("all_gather", (3,)) == 0 == collective("all_reduce", (3,))
    gather = node(OPS.all_gather_into_tensor.default, empty(8), n, "g")
    assert CostModel(HARDWARE, ranks={"g": ranks}).latency(gather) == pytest.approx(1e3 * alpha)


@pytest.mark.parametrize("num_ranks", [2, 8, 11, 16, 20, 64])
def test_groups_from_the_first_rank_cost_what_the_planner_says(num_ranks: int) -> None:
    ranks = tuple(range(num_ranks))
    assert collective("all_gather", ranks) == pytest.approx(HARDWARE.all_gather_seconds(4000, num_ranks))
    assert collective("reduce_scatter", ranks) == pytest.approx(HARDWARE.reduce_scatter_seconds(4000, num_ranks))
    pairs = np.full((num_ranks, num_ranks), 4000.0)
    assert collective("all_to_all", ranks) == pytest.approx(HARDWARE.all_to_all_seconds(pairs))


def test_ranks_of_a_host_share_its_way_out_and_backends_may_move_more() -> None:
    two_each = (0, 1, 8, 9, 16, 17, 24, 25)
    # Six shards from outside, through two ranks; inside, the neighbour's and its half of those.
    assert collective("all_gather", two_each) == pytest.approx(1e-2 + 3 * 4000 / 1e8)
    assert collective("all_to_all", two_each) == pytest.approx(1e-2 + 6 * 4000 / 1e8)
    wired = dataclasses.replace(HARDWARE, wire=(("all_gather", 2.0),))
    gather = node(OPS.all_gather_into_tensor.default, empty(400), 4, "g")
    assert CostModel(wired, ranks={"g": INSIDE})(gather) == pytest.approx(1 + 3 * 3200 / 1e9 * 1e3)


def starts_of(kind: str, sizes: list[int], num_ranks: int) -> tuple[list[fx.Node], fx.Node]:
    """Collectives of shards of so many float32 or bf16, one by one, and coalesced."""
    more = {"all_gather_into_tensor": (num_ranks,), "reduce_scatter_tensor": ("sum", num_ranks), "all_reduce": ("sum",)}
    graph, calls = fx.Graph(), []
    for i, size in enumerate(sizes):
        whole, shard = (empty(n, dtype=torch.bfloat16 if i % 2 else torch.float32) for n in (size * num_ranks, size))
        x, out = shard if "gather" in kind else whole, shard if "scatter" in kind else whole
        calls.append(called(getattr(OPS, kind).default, {f"x{i}": x}, *more[kind], "g", val=out, graph=graph))
    inputs = [call.args[0] for call in calls]
    coalesced = graph.call_function(getattr(OPS, f"{kind}_coalesced").default, (inputs, *more[kind], "g"))
    coalesced.meta["val"] = [call.meta["val"] for call in calls]
    return calls, coalesced


@pytest.mark.parametrize("kind", ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"])
@pytest.mark.parametrize("ranks", [INSIDE, ACROSS, (0, 1, 8, 9)])
def test_merged_collectives_pay_latency_once(kind: str, ranks: tuple[int, ...]) -> None:
    calls, coalesced = starts_of(kind, [101, 300, 7, 2050], len(ranks))
    model = CostModel(HARDWARE, ranks={"g": ranks})
    assert model.merged(calls) == model(coalesced) == model.merged(calls[::-1])  # to the last bit
    assert model.merged(calls[:1]) == model(calls[0])
    saved = (3 * 2 if kind == "all_reduce" else 3) * HARDWARE.links[ranks is not INSIDE].latency
    assert model.merged(calls) == pytest.approx(sum(map(model, calls)) - 1e3 * saved)
    assert CostModel(HARDWARE, ranks={"g": (3,)}).merged(calls) == 0


def test_costs_that_users_pass() -> None:
    gm = make_fx(lambda x: x.sin().cos(), tracing_mode="fake")(empty(4))
    assert [n.ms for n in to_dag(gm, as_cost({"sin": 2.0, "cos": 3})).dag.nodes] == [2, 3]
    with pytest.raises(GraphError, match="node 'cos': it is not in the table of costs, which has 1 nodes"):
        to_dag(gm, as_cost({"sin": 2.0}))
    assert isinstance(as_cost(CPU_HOST), CostModel)
    assert [n.ms for n in to_dag(gm, as_cost(lambda n: len(n.name))).dag.nodes] == [3, 3]
    with pytest.raises(ValueError, match="got 3"):
        as_cost(3)  # type: ignore[arg-type]


# What is multiplied, and how often, with the FLOPs of a multiplication and an addition each.
PRODUCTS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = [
    (torch.matmul, ((3, 5), (2, 5, 7)), 2 * 3 * 5 * 7),
    (torch.matmul, ((5,), (5,)), 0),
    (F.linear, ((4, 3, 5), (7, 5), (7,)), 12 * 5 * 7),
    (lambda x, w: F.conv1d(x, w, dilation=2), ((2, 3, 9), (4, 3, 3)), 2 * 4 * 5 * 9),
    (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2), ((2, 6, 8, 8), (4, 3, 3, 3), (4,)), 2 * 64 * 27),
    (lambda x, w: F.conv_transpose2d(x, w, stride=2, groups=2), ((2, 6, 5, 5), (6, 2, 3, 3)), 2 * 6 * 25 * 18),
    (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), ((3, 5), (5, 7), (7, 2)), 3 * 7 * (5 + 2)),
    (lambda *x: torch.linalg.multi_dot(x), ((3, 9), (9, 7), (7, 2)), 9 * 7 * 2 + 3 * 9 * 2),
    (SDPA, ((4, 9, 8), (4, 6, 8), (4, 6, 3)), 4 * 54 * 11),
    (lambda q, k: SDPA(q, k, k, is_causal=True), ((2, 4, 9, 8), (2, 4, 9, 8)), 8 * 45 * 16),
    (lambda q, k: SDPA(q, k, k, enable_gqa=True), ((2, 4, 9, 8), (2, 2, 6, 8)), 8 * 54 * 16),
    (lambda x: F.layer_norm(x.softmax(-1), (5,)), ((3, 5),), 0),
]


@pytest.mark.parametrize(("function", "shapes", "products"), PRODUCTS)
def test_flops_of_a_composite_are_those_of_what_it_multiplies(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], products: int
) -> None:
    gm = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*map(torch.randn, shapes))
    assert sum(node_flops(n) for n in gm.graph.nodes if n.op == "call_function") == 2 * products


def test_operators_are_run_without_contents_and_not_if_they_communicate() -> None:
    seen: list[str] = []

    def twice(x: torch.Tensor, y: torch.Tensor, name: str = "") -> torch.Tensor:
        seen.append(x.device.type)
        return (x @ y) @ y

    library = torch.library.Library("spanwise_flops", "DEF")
    for schema in ("twice(Tensor x, Tensor y) -> Tensor", "talks(Tensor x, Tensor y, str group_name) -> Tensor"):
        library.define(schema)
        library.impl(schema[:5], twice, "CompositeImplicitAutograd")
    ops, x, before = torch.ops.spanwise_flops, torch.zeros(6, 6), torch.get_rng_state()
    assert node_flops(called(ops.twice.default, {"x": x, "y": x}, val=x)) == 2 * 2 * 6**3 and seen == ["meta"]
    assert node_flops(called(ops.talks.default, {"x": x, "y": x}, "g", val=x)) == 0 and len(seen) == 1
    # Writes have no effect; operators that read contents or draw random numbers have 0 FLOPs and draw nothing.
    for op, *rest in ((ATEN.fill_diagonal_.default, 1.0), (ATEN.item.default,), (ATEN.dropout.default, 0.5, True)):
        assert node_flops(called(op, {"x": x}, *rest, val=x)) == 0 and not x.any()
    assert torch.equal(torch.get_rng_state(), before)
