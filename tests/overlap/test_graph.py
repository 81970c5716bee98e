"""Dags of fx graphs: collectives and groups, memory as dependencies, barriers, peak memory, errors that name nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import spanwise.attention.compare  # noqa: F401  (its operators)
from spanwise.overlap import _torch
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.graph import Captured, to_dag
from tests.overlap.programs import one

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten


def deps(captured: Captured, name: str) -> set[str]:
    nodes = captured.dag.nodes
    (node,) = (node for node in nodes if node.name == name)
    return {nodes[dep].name for dep in node.deps}


def follows(captured: Captured, later: str, earlier: str) -> bool:
    """Whether `later` depends on `earlier`, over any number of nodes."""
    found, nodes = {later}, captured.dag.nodes
    for node in reversed(nodes):
        if node.name in found:
            found.update(nodes[dep].name for dep in node.deps)
    return earlier in found


class Graph(fx.Graph):
    """Names its nodes as make_fx does, without their overloads."""

    def call_function(self, the_function: Any, args: Any = None, kwargs: Any = None, type_expr: Any = None) -> fx.Node:
        name = getattr(the_function, "overloadpacket", the_function).__name__
        return self.create_node("call_function", the_function, args, kwargs, name)


def by_hand(build: Callable[[fx.Graph, fx.Node], Any], shape: tuple[int, ...] = (4, 4)) -> fx.GraphModule:
    """A graph whose nodes `build` makes from one placeholder; all of them have its value unless they have their own."""
    graph = Graph()
    x = graph.placeholder("x")
    with _torch.fake_mode():
        x.meta["val"] = torch.empty(shape)
        graph.output(build(graph, x))
        for node in graph.nodes:
            if node.op.startswith("call_"):
                node.meta.setdefault("val", torch.empty(shape))
    return fx.GraphModule(torch.nn.Module(), graph)


# What each node must follow; nodes that are not named may have any dependencies. `test_emit` runs random programs.
Expected = dict[str, set[str]]


def operand_written(x: torch.Tensor) -> Any:
    y = x * 2
    gathered = OPS.wait_tensor(OPS.all_gather_into_tensor(y, 2, "tp"))
    y.add_(1)
    return gathered.sum(), y


def batch_norm(x: torch.Tensor) -> Any:
    mean, var = x[0].clone(), x[1].clone()
    before = mean * 2
    y = ATEN.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0]
    return before, y, mean + 1, var + 1


def copied_in(x: torch.Tensor) -> Any:
    import torch._inductor.fx_passes.bucketing  # registers operators

    buffer, out = x.new_zeros(32), x.new_zeros(2, 4)
    torch.ops.fsdp.all_gather_copy_in([x.view(-1)], buffer, [16], 16, 1)
    torch.ops.fsdp.chunk_cat([x[0], x[1]], 0, 2, out=out)
    return buffer + 1, torch.ops.bucketing._pre_bucket_reduce_scatter([x[0], x[1]], 2) * 2, out - 1, x.sin()


def random_branch(x: torch.Tensor) -> Any:
    before = torch.rand_like(x)
    return before, torch.cond(x.sum() > 0, torch.rand_like, torch.cos, (x,)), torch.randn_like(x)


def compared(x: torch.Tensor) -> Any:
    results, digest = [], torch.zeros(16, dtype=torch.uint8)
    for call in range(2):
        torch.ops.spanwise.compare_call(digest, "tp", [0, 1], f"call {call}", "", [1], [])
        results.append(OPS.wait_tensor(OPS.all_gather_into_tensor(x, 2, "tp")).sin())
    return results


def profiled(x: torch.Tensor) -> Any:
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        return x.sin()


def waits_for_another_graph(x: torch.Tensor) -> Any:
    y = x + 1
    begun = OPS.all_gather_into_tensor(y.sin(), 2, "tp")
    return OPS.wait_tensor(x) * 2, OPS.wait_tensor(begun), y.cos()


FOLLOWS: list[tuple[Callable[[torch.Tensor], Any], Expected]] = [
    (operand_written, {"add_": {"wait_tensor"}}),
    (batch_norm, {"native_batch_norm": {"mul"}, "add": {"native_batch_norm"}, "add_1": {"native_batch_norm"}}),
    (copied_in, {"add": {"all_gather_copy_in"}, "sub": {"chunk_cat"}, "mul": {"_pre_bucket_reduce_scatter"}}),
    (profiled, {"_record_function_exit": {"_record_function_enter_new_1"}}),
    (random_branch, {"cond": {"rand_like"}, "randn_like": {"cond"}}),
    (compared, {"all_gather_into_tensor": {"compare_call"}, "all_gather_into_tensor_1": {"compare_call_1"},
                "compare_call_1": {"compare_call"}}),
    (waits_for_another_graph, {"wait_tensor": {"sin", "all_gather_into_tensor"}, "mul": {"wait_tensor"}}),
]  # fmt: skip
# Nodes that do not follow others, neither directly nor over other nodes.
APART = {
    "profiled": [("sin", "_record_function_enter_new")],
    "copied_in": [("sin", "chunk_cat"), ("chunk_cat", "all_gather_copy_in")],
    "compared": [("sin", "compare_call_1"), ("compare_call_1", "wait_tensor")],
    "waits_for_another_graph": [("cos", "wait_tensor")],
}


@pytest.mark.parametrize(("function", "expected"), FOLLOWS, ids=lambda value: getattr(value, "__name__", ""))
def test_nodes_follow_what_they_must(function: Callable[[torch.Tensor], Any], expected: Expected) -> None:
    captured = to_dag(make_fx(function, tracing_mode="fake")(torch.randn(4, 4)), one)
    for name, before in expected.items():
        assert before <= deps(captured, name), name
    for later, earlier in APART.get(function.__name__, ()):
        assert not follows(captured, later, earlier), (later, earlier)
    assert captured.barriers == ()
    assert len(captured.outside_waits) == (function is waits_for_another_graph)


def test_a_collective_without_a_wait_keeps_its_memory() -> None:
    def function(x: torch.Tensor) -> Any:
        return OPS.all_gather_into_tensor(x * 2, 2, "tp"), x + 1, x + 2

    operand, gathered, *_ = to_dag(make_fx(function, tracing_mode="fake")(torch.randn(4, 4)), one).dag.storages
    assert operand.kept and gathered.kept  # whichever node comes last


def test_memory_that_only_the_storages_show() -> None:
    """Shared by fake tensors and not by schemas."""

    def shared(graph: fx.Graph, x: fx.Node, later: bool = False) -> fx.Node:
        y, z = (graph.call_function(op, (x,)) for op in (ATEN.clone.default, ATEN.sin.default))
        y.meta["val"], z.meta["val"] = torch.empty(4, 4), torch.empty(4, 4)
        if later:
            graph.call_function(ATEN.set_.source_Tensor, (y, z)).meta["val"] = torch.empty(4, 4)
            graph.call_function(ATEN.add_.Scalar, (y, 1)).meta["val"] = y.meta["val"]
        else:
            z.meta["val"], z.args = y.meta["val"].view(16), (y,)
            graph.call_function(ATEN.add_.Scalar, (z, 1))
        return graph.call_function(ATEN.cos.default, (z if later else y,))

    for later in (False, True):
        captured = to_dag(by_hand(lambda graph, x, later=later: shared(graph, x, later)), one)
        assert "add_" in deps(captured, "cos")
        assert later or [s.num_bytes for s in captured.dag.storages] == [64, 64]  # clone and cos


def test_items_that_are_no_tensors_need_no_value() -> None:
    """Attention of cuDNN returns sizes, too; `make_fx` gives items of them no value."""
    graph = Graph()
    q = graph.placeholder("q")
    found = graph.call_function(ATEN._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True))
    items = [graph.call_function(operator.getitem, (found, at)) for at in range(9)]
    graph.output((items[0], items[4], items[6]))
    with _torch.fake_mode():
        q.meta["val"], size = torch.empty(1, 1, 4, 4), torch.empty(1)
        found.meta["val"] = (torch.empty(1, 1, 4, 4), torch.empty(4), None, None, 4, 4, size, torch.empty(2), None)
    for at in (0, 1, 6, 7):
        items[at].meta["val"] = found.meta["val"][at]
    dag = to_dag(fx.GraphModule(torch.nn.Module(), graph), one).dag
    assert [storage.num_bytes for storage in dag.storages if storage.kept] == [64, 4] and dag.compute_ms == 1.0


UNKNOWN = (
    (torch.ops._dtensor.shard_dim_alltoall.default, 0, 1, "tp"),
    (torch.ops.symm_mem.one_shot_all_reduce.default, "sum", "tp"),
    (torch.ops.c10d.barrier.default, None, []),
    (ATEN._assert_async.msg, "must hold"),  # returns nothing and writes nothing
    (ATEN.resize_.default, [4, 4]),
    (torch.ops.higher_order.with_effects,),
    (lambda x: x,),
)


def test_nothing_crosses_a_barrier() -> None:
    def build(graph: fx.Graph, x: fx.Node, op: Any, *more: Any) -> Any:
        for _ in range(2):
            before = [graph.call_function(ATEN.sin.default, (x,)) for _ in range(3)]
            graph.call_function(ATEN.cos.default, (before[0],))
            graph.call_function(op, (x, *more))
        return graph.call_function(ATEN.cos.default, (before[1],))

    for op in UNKNOWN:
        captured = to_dag(by_hand(lambda graph, x, op=op: build(graph, x, *op)), one)
        assert captured.barriers == (4, 9)
        nodes = [node.name for node in captured.dag.nodes]
        for at, name in itertools.product(captured.barriers, nodes):
            first, second = sorted((at, nodes.index(name)))
            assert follows(captured, nodes[second], nodes[first]), name
        assert sum(len(node.deps) for node in captured.dag.nodes) <= 2 * len(nodes)
    assert to_dag(by_hand(lambda graph, x: build(graph, x, ATEN.tan.default)), one).barriers == ()


def test_a_backward_frees_what_its_forward_saved() -> None:
    """Saved activations, but neither parameters nor what the graph returns; a peak counts from the beginning."""

    def function(primals_1: Any, mm: Any, kept: Any, tangents_1: Any) -> Any:
        grad = tangents_1 * mm
        return grad.sum() + primals_1.sum(), kept

    gm = make_fx(function, tracing_mode="fake")(*(torch.ones(4, 4) for _ in range(4)))
    names = [node.target for node in gm.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1_1", "mm_1", "kept_1", "tangents_1_1"]
    dag = to_dag(gm, one).dag
    assert [(s.num_bytes, s.users) for s in dag.storages if s.is_given] == [(64, (0,)), (64, (0,))]
    # Both go with the product, which makes as many bytes as one of them holds; then come two sums and theirs.
    assert dag.alive_bytes().tolist() == [64, -64 + 4, -128 + 4 + 4, -128 + 4 + 4 + 4] and dag.peak_bytes() == 64
    gm.graph.find_nodes(op="placeholder")[-1].name = "x"
    assert not any(s.is_given for s in to_dag(gm, one).dag.storages)


def test_triton_kernels_write_what_they_are_given_and_nothing_else() -> None:
    def build(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> Any:
        y, z = (graph.call_function(ATEN.clone.default, (x,)) for _ in range(2))
        z.meta["val"] = torch.empty(4, dtype=dtype)
        before, beside = (graph.call_function(ATEN.sin.default, (t,)) for t in (y, x))
        given = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
        kernel = torch.ops.higher_order.triton_kernel_wrapper_mutation
        graph.call_function(kernel, (), {**given, "kwargs": {"in_ptr": y, "out_ptr": z}}).meta["val"] = None
        return [before, beside, *(graph.call_function(ATEN.cos.default, (t,)) for t in (y, z, x))]

    captured, pointers = (
        to_dag(by_hand(lambda graph, x, dtype=dtype: build(graph, x, dtype)), one)
        for dtype in (torch.float32, torch.int64)
    )
    kernel = "triton_kernel_wrapper_mutation"
    assert captured.barriers == () and deps(captured, kernel) == {"clone", "clone_1", "sin"}
    assert [kernel in deps(captured, name) for name in ("cos", "cos_1", "cos_2")] == [True, True, False]
    assert [pointers.nodes[i].name for i in pointers.barriers] == [kernel]


def test_subgraphs_are_looked_into() -> None:
    def branches(inner: Callable[[torch.Tensor], torch.Tensor]) -> Captured:
        def function(x: torch.Tensor) -> Any:
            return x.sin(), torch.cond(x.sum() > 0, inner, lambda y: y * 2, (x,))

        return to_dag(make_fx(function, tracing_mode="fake")(torch.randn(4)), one)

    assert branches(lambda y: y + 1).barriers == ()
    assert len(branches(lambda y: OPS.wait_tensor(OPS.all_reduce(y, "sum", "tp"))).barriers) == 1


def test_errors_name_the_node() -> None:
    def raises(gm: fx.GraphModule, node: str, text: str, cost: Any = one) -> None:
        with pytest.raises(GraphError) as caught:
            to_dag(gm, cost)
        assert caught.value.node == node and text in str(caught.value)

    def broken(node: fx.Node) -> float:
        raise KeyError("no such device")

    cosine = by_hand(lambda graph, x: graph.call_function(ATEN.cos.default, (x,)))
    for ms in (float("nan"), -1.0, float("inf")):
        raises(cosine, "cos", f"got {ms} ms", lambda node, ms=ms: ms)
    raises(cosine, "cos", "its cost is not known: KeyError: 'no such device'", broken)
    del next(node for node in cosine.graph.nodes if node.name == "cos").meta["val"]
    raises(cosine, "cos", 'it has no meta["val"]')
    written = by_hand(lambda graph, x: graph.call_function(ATEN.add_.Scalar, (x, 1)))
    del next(node for node in written.graph.nodes if node.name == "x").meta["val"]
    raises(written, "x", 'it has no meta["val"]')
    grouped = by_hand(lambda graph, x: graph.call_function(OPS.all_reduce.default, (x, "sum", x)))
    raises(grouped, "all_reduce", "its process group must be known")
    symbolic = make_fx(lambda x: x.sin().reshape(-1), tracing_mode="symbolic")(torch.randn(4, 3))
    raises(symbolic, "sin", "is symbolic")
