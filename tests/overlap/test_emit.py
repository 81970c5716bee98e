"""Orders and buckets put into graphs: the same bits on all ranks, nothing lost, errors before anything is changed."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.overlap import _torch
from spanwise.overlap.dag import Dag, GraphError, Kind
from spanwise.overlap.fx.capture import Axis, relabel
from spanwise.overlap.fx.emit import bucket_keys, emit, has_equal_waits, merge_waits
from spanwise.overlap.fx.graph import Captured, to_dag
from spanwise.overlap.fx.operators import WAIT
from spanwise.overlap.optimize import optimize
from spanwise.overlap.quotient import merge
from tests.lockstep import Lockstep
from tests.overlap.test_graph import STATEMENTS, by_hand

OPS, ATEN = torch.ops._c10d_functional, torch.ops.aten
# Four ranks, as 2 × 2. Every rank's groups have these names, so that one graph serves all ranks.
AXES = [
    {"tp": Axis("tp", (r - r % 2, r - r % 2 + 1), r % 2), "dp": Axis("dp", (r % 2, r % 2 + 2), r // 2)}
    for r in range(4)
]
MORE = ["all_gather", "reduce_scatter", "all_reduce", "all_reduce max", "all_reduce_", "all_to_all"]
Program = list[tuple[str, int, int]]


def one(node: fx.Node) -> float:
    return 1.0


def programs() -> st.SearchStrategy[Program]:
    names = sorted(STATEMENTS) + 3 * MORE + 6 * ["wait"] + ["bfloat16", "float64"]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=40)


def start(name: str, x: torch.Tensor, group: str) -> torch.Tensor:
    """Start a collective of two ranks on a contiguous tensor of at most 32 elements."""
    x = x.reshape(-1)[:32].contiguous()
    if name == "all_gather":
        return OPS.all_gather_into_tensor(x, 2, group)
    if name == "reduce_scatter":
        return OPS.reduce_scatter_tensor(torch.cat([x, x * 2]), "sum", 2, group)
    if name == "all_reduce_":
        return OPS.all_reduce_(x.clone(), "sum", group)
    if name == "all_to_all":
        return OPS.all_to_all_single(torch.cat([x, -x]), [len(x)] * 2, [len(x)] * 2, group)
    return OPS.all_reduce(x, "max" if name.endswith("max") else "sum", group)


def traced(program: Program, mode: str = "fake") -> tuple[fx.GraphModule, list[list[torch.Tensor]]]:
    """A random program without races, and the inputs of each rank, some of which it writes."""

    def function(*leaves: torch.Tensor) -> Any:
        values = list(leaves)
        under_way: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was started, and on what
        for name, first, second in program:
            x, y = values[first % len(values)], values[second % len(values)]
            if name in MORE:
                if x.numel():
                    under_way.append((start(name, x, "tp" if second % 3 else "dp"), x))
            elif name == "wait":
                if under_way:
                    values.append(OPS.wait_tensor(under_way.pop(first % len(under_way))[0]))
            elif name in ("bfloat16", "float64"):
                values.append(x.to(getattr(torch, name)))
            elif x.numel():
                read = {of.untyped_storage()._cdata for _, of in under_way}
                if name.endswith(("in place", "_", "_ other")):  # not what is being sent
                    x, y = (t.clone() if t.untyped_storage()._cdata in read else t for t in (x, y))
                result = STATEMENTS[name](x, y)
                values += result if isinstance(result, tuple) else [result] if result is not None else []
        return values[-4:], [OPS.wait_tensor(x) for x, _ in under_way]

    def leaves(rank: int) -> list[torch.Tensor]:
        return [torch.arange(16.0).reshape(4, 4) * (rank + 1) + i for i in range(3)]

    gm = make_fx(function, tracing_mode=mode)(*leaves(0))
    return gm, [leaves(rank) for rank in range(4)]


def run(gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], *, late: bool = False) -> list[torch.Tensor]:
    """Outputs and written inputs of all ranks."""
    torch.manual_seed(0)
    inputs = [[x.clone() for x in of_rank] for of_rank in inputs]
    outputs = Lockstep([gm] * 4, AXES, late=late).run(inputs)
    return [x for values in (*outputs, *inputs) for x in torch.utils._pytree.tree_leaves(values)]


def same(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for x, y in zip(found, expected, strict=True):
        if x is None or y is None:  # the gradient of what needs none
            assert x is y
            continue
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(77.0), y.nan_to_num(77.0))


def some_order(dag: Dag, choose: random.Random) -> list[int]:
    """Some order of the nodes that respects all dependencies."""
    missing = [len(set(node.deps)) for node in dag.nodes]
    ready, order = [i for i, count in enumerate(missing) if not count], []
    while ready:
        order.append(ready.pop(choose.randrange(len(ready))))
        for user in dag.users[order[-1]]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return order


def some_buckets(captured: Captured, choose: random.Random) -> list[list[int]]:
    """Sets of starts of one key that can be merged."""
    found: list[list[int]] = []
    for i, key in enumerate(bucket_keys(captured)):
        if key is None:
            continue
        for bucket in found:
            if bucket_keys(captured)[bucket[0]] == key and choose.random() < 0.8:
                try:
                    merge(captured.dag, [[*b, i] if b is bucket else b for b in found], [1.0] * len(found))
                except GraphError:
                    continue
                bucket.append(i)
                break
        else:
            found.append([i])
    return found


@settings(deadline=None, max_examples=40)
@given(programs(), st.randoms(use_true_random=False))
def test_any_order_and_any_buckets_give_the_same_bits_on_all_ranks(program: Program, choose: random.Random) -> None:
    gm, inputs = traced(program)
    expected = run(gm, inputs)
    same(run(gm, inputs, late=True), expected)  # no races before
    captured = to_dag(gm, one)
    if not len(captured.dag):
        return
    buckets = some_buckets(captured, choose)
    merged = merge(captured.dag, buckets, [1.0] * len(buckets))
    order = some_order(merged.dag, choose)
    emit(captured, order, merged.members)
    gm.graph.lint()
    same(run(gm, inputs), expected)
    same(run(gm, inputs, late=True), expected)
    # The graph is what was decided: as long and as large as foreseen.
    again = to_dag(gm, one).dag
    assert again.peak_bytes() == merged.dag.peak_bytes(order)
    assert len(again.starts) == len(merged.dag.starts)


# Equal waits.


def waited_twice(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Two gathers, one of which is waited for at each use, as AOTAutograd leaves it since torch 2.14."""
    first, second = OPS.all_gather_into_tensor(x, 2, "tp"), OPS.all_gather_into_tensor(y, 2, "tp")
    early, other = OPS.wait_tensor(first).sin(), OPS.wait_tensor(second)
    return early @ early.t(), other * OPS.wait_tensor(first), OPS.wait_tensor(first).cos()


class OneLaunch:
    """Every node takes a millisecond, also a bucket."""

    def __call__(self, node: fx.Node) -> float:
        return 1.0

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        return 1.0


def test_a_gather_with_several_waits_gets_into_a_bucket() -> None:
    inputs = [[torch.arange(16.0).reshape(4, 4) * (rank + i) for i in range(2)] for rank in range(4)]
    gm = make_fx(waited_twice, tracing_mode="fake")(*inputs[0])
    expected, code = run(gm, inputs), gm.code
    result = optimize(gm, OneLaunch())
    assert (len(result.timeline.dag.starts), len(result.before.dag.wait_of)) == (1, 2)
    same(run(result.graph_module, inputs, late=True), expected)
    assert gm.code == code
    merge_waits(gm.graph)  # in place, as the backend does
    assert not has_equal_waits(gm.graph) and len(gm.graph.find_nodes(op="call_function", target=WAIT)) == 2
    same(run(gm, inputs, late=True), expected)


def test_waits_that_stay() -> None:
    """Two results stay two tensors; and memory that is reduced in place is waited for once more."""

    def returned(x: torch.Tensor) -> Any:
        start = OPS.all_gather_into_tensor(x, 2, "tp")
        return OPS.wait_tensor(start), OPS.wait_tensor(start)

    def written(x: torch.Tensor) -> Any:
        start = OPS.all_reduce(x, "sum", "tp")
        OPS.all_reduce_(OPS.wait_tensor(start).view(-1), "sum", "tp")
        return OPS.wait_tensor(start).sin()

    for function in (returned, written):
        gm = make_fx(function, tracing_mode="fake")(torch.ones(4, 4))
        merge_waits(gm.graph)
        assert len(gm.graph.find_nodes(op="call_function", target=WAIT)) == 2


# Bucket keys.


def keys(function: Callable[..., Any], *inputs: torch.Tensor, device: str = "cpu") -> dict[str, Hashable | None]:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    relabel(gm, torch.device(device))
    captured = to_dag(gm, one)
    found = bucket_keys(captured)
    assert all(found[i] is None for i, node in enumerate(captured.dag.nodes) if node.kind != Kind.START)
    return {captured.dag.nodes[i].name: found[i] for i in captured.dag.starts}


def test_keys_hold_what_must_be_equal() -> None:
    def function(x: torch.Tensor) -> Any:
        starts = [
            OPS.all_gather_into_tensor(x, 2, "tp"),
            OPS.all_gather_into_tensor(x.bfloat16(), 2, "tp"),
            OPS.all_gather_into_tensor(x, 2, "dp"),
            OPS.reduce_scatter_tensor(x, "sum", 2, "tp"),
            OPS.reduce_scatter_tensor(x.bfloat16(), "sum", 2, "tp"),
            OPS.reduce_scatter_tensor(x, "avg", 2, "tp"),
            OPS.all_reduce(x, "sum", "tp"),
            OPS.all_reduce(x, group_name="tp", reduce_op="sum"),
            OPS.all_reduce(x.bfloat16(), "sum", "tp"),
            OPS.all_reduce(x, "max", "tp"),
        ]
        return [OPS.wait_tensor(x) for x in starts]

    for device in ("cpu", "cuda"):
        found = list(keys(function, torch.ones(4, 4), device=device).values())
        equal = {(i, j) for j in range(len(found)) for i in range(j) if found[i] == found[j]}
        # Of several dtypes, reduce-scatters can be one, and all-gathers of NCCL.
        assert None not in found and equal == {(3, 4), (6, 7)} | ({(0, 1)} if device == "cuda" else set())


@pytest.mark.parametrize(("backend", "mixed"), [("fake", True), ("cpu:gloo,cuda:gloo", False)])
def test_gloo_gathers_one_dtype_at_a_time_on_any_device(backend: str, mixed: bool) -> None:
    store = _torch.fake_store() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        name = _torch.group_name(dist.group.WORLD)

        def function(x: torch.Tensor) -> Any:
            return [OPS.wait_tensor(OPS.all_gather_into_tensor(t, 1, name)) for t in (x, x.double())]

        a, b = keys(function, torch.ones(4), device="cuda").values()
        assert (a == b) == mixed
    finally:
        dist.destroy_process_group()


def test_what_is_never_merged() -> None:
    def function(x: torch.Tensor) -> Any:
        starts = [
            OPS.all_reduce_(x.clone(), "sum", "tp"),
            OPS.all_gather_into_tensor_out(x, 2, "tp", out=x.new_empty(8, 4)),
            OPS.all_to_all_single(x, [2, 2], [2, 2], "tp"),
            OPS.broadcast(x, 0, "tp"),
            OPS.all_reduce(x.to(torch.complex64), "sum", "tp"),
            *OPS.all_reduce_coalesced([x, x], "sum", "tp"),
        ]
        twice, unwaited, read = (OPS.all_reduce(x, "sum", "tp") for _ in range(3))
        OPS.wait_tensor(twice)
        return [OPS.wait_tensor(x) for x in (*starts, twice, read)], unwaited, read.view(-1)

    found = keys(function, torch.ones(4, 4))
    assert len(found) == 9 and set(found.values()) == {None}


def test_sides_of_a_joint_graph_stay_apart() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> Any:
        waits = []
        for tag in ("is_forward", "is_forward", "is_backward"):
            node = graph.call_function(OPS.all_reduce.default, (x, "sum", "tp"))
            node.meta["partitioner_tag"] = tag
            waits.append(graph.call_function(OPS.wait_tensor.default, (node,)))
        return waits

    captured = to_dag(by_hand(build), one)
    a, b, c = (bucket_keys(captured)[i] for i in captured.dag.starts)
    assert a == b != c


def two_gathers(x: torch.Tensor, y: torch.Tensor) -> Any:
    a = OPS.wait_tensor(OPS.all_gather_into_tensor(x.sin(), 2, "tp"))
    b = OPS.wait_tensor(OPS.all_gather_into_tensor(y.cos(), 2, "tp"))
    return a * 2, b * 3


def test_a_bucket_is_a_coalesced_collective_with_the_metadata_of_its_members() -> None:
    gm = make_fx(two_gathers, tracing_mode="fake")(torch.ones(4), torch.ones(2, 2))
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = f"where {node.name} comes from"
    first, second = gm.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor.default)
    vals = [first.meta["val"], second.meta["val"]]
    waits = {n: dict(n.meta) for n in gm.graph.find_nodes(op="call_function", target=OPS.wait_tensor.default)}
    captured = to_dag(gm, one)
    merged = merge(captured.dag, [captured.dag.starts], [1.0])
    emit(captured, range(len(merged.dag)), merged.members)
    gm.graph.lint()
    (start,) = gm.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor_coalesced.default)
    assert start.name == "all_gather_into_tensor_coalesced" and start.args[1:] == (2, "tp") and not start.kwargs
    assert start.meta["stack_trace"] == "where all_gather_into_tensor comes from"
    assert type(start.meta["val"]) is list and all(x is y for x, y in zip(start.meta["val"], vals, strict=True))
    items = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    assert [item.args for item in items] == [(start, 0), (start, 1)]
    assert all(item.meta["val"] is val for item, val in zip(items, vals, strict=True))
    assert items[1].meta["stack_trace"] == "where all_gather_into_tensor_1 comes from"
    assert {n: dict(n.meta) for n in waits} == waits  # the same nodes, of another argument
    assert [wait.args for wait in waits] == [(item,) for item in items]
    assert [n.name for n in gm.graph.nodes] == [
        "x_1", "y_1", "sin", "cos", "all_gather_into_tensor_coalesced", "getitem", "getitem_1", "wait_tensor",
        "wait_tensor_1", "mul", "mul_1", "output",
    ]  # fmt: skip


def test_items_follow_their_tuple_and_so_die_with_their_last_use() -> None:
    """A list keeps all of its tensors. An item that nobody reads was freed in the dag, and not in the program."""

    def function(x: torch.Tensor) -> Any:
        first, _ = torch._foreach_sin([x, x])
        a, b, c = x.cos(), x.tan(), (x * 2).split(2)
        return a, b, c[0][0], first

    gm = make_fx(function, tracing_mode="fake")(torch.ones(4, 4))
    captured = to_dag(gm, one)
    names = [node.name for node in captured.dag.nodes]
    late = [name for name in names if "getitem" not in name] + [name for name in names if "getitem" in name]
    late.append(late.pop(late.index("select")))  # a view of an item
    emit(captured, [names.index(name) for name in late])
    gm.graph.lint()
    order = [node.name for node in gm.graph.nodes]
    assert order == [
        "x_1", "_foreach_sin", "getitem", "getitem_1", "cos", "tan", "mul", "split", "getitem_2", "getitem_3", "select",
        "output",
    ]  # fmt: skip


# Errors, before anything is changed.


def refused(
    captured: Captured, order: Sequence[int], members: Sequence[Sequence[int]] | None, text: str, node: str = ""
) -> None:
    graph = captured.nodes[0].graph
    before = str(graph)
    with pytest.raises(GraphError if node else ValueError, match=text) as caught:
        emit(captured, order, members)
    assert str(graph) == before
    assert not node or caught.value.node == node


def test_orders_and_buckets_that_are_none() -> None:
    gm = make_fx(two_gathers, tracing_mode="fake")(torch.ones(4), torch.ones(2, 2))
    captured = to_dag(gm, one)
    names = [node.name for node in captured.dag.nodes]
    sin, start, wait, cos, start_1, wait_1, mul, mul_1 = range(8)
    assert names == ["sin", "all_gather_into_tensor", "wait_tensor", "cos", "all_gather_into_tensor_1",
                     "wait_tensor_1", "mul", "mul_1"]  # fmt: skip
    refused(captured, [1, 0, 2, 3, 4, 5, 6, 7], None, "it comes before 'sin', on which it depends", names[start])
    refused(captured, [0, 1, 2], None, "an order of 8 nodes has each of them once, got 3 numbers")
    refused(captured, [0] * 8, None, "each of them once")
    refused(captured, range(7), [(i,) for i in range(7)], "each of 8 nodes once")
    refused(captured, range(9), [*((i,) for i in range(8)), ()], "each of 8 nodes once")
    rest = [(sin,), (cos,), (mul,), (mul_1,)]
    starts, waits = (start, start_1), (wait, wait_1)
    legal = [0, 1, 4, 5, 2, 3]
    refused(captured, [4, 0, 1, 5, 2, 3], [*rest, starts, waits], "it comes before 'sin'", names[start])
    refused(captured, range(7), [*rest, starts, (wait,), (wait_1,)], "cannot be merged", names[start])
    refused(captured, range(7), [*rest, (start,), (start_1,), waits], "cannot be merged", names[wait])
    refused(captured, range(7), [(sin, cos), *rest[2:], *((i,) for i in (*starts, *waits))], "only starts", "sin")
    refused(captured, range(7), [(sin, start), *rest[1:], *((i,) for i in (*waits, start_1))], "only starts", "sin")
    emit(captured, legal, [*rest, starts, waits])
    gm.graph.lint()
    with pytest.raises(ValueError, match="the graph has changed since it was captured: .*coalesced"):
        emit(captured, legal, [*rest, starts, waits])


def test_starts_of_other_keys_or_of_one_another_are_not_merged() -> None:
    def unlike(x: torch.Tensor) -> Any:
        return OPS.wait_tensor(OPS.all_reduce(x, "sum", "tp")), OPS.wait_tensor(OPS.all_reduce(x, "max", "tp"))

    def chained(x: torch.Tensor) -> Any:
        return OPS.wait_tensor(OPS.all_reduce(OPS.wait_tensor(OPS.all_reduce(x, "sum", "tp")).sin(), "sum", "tp"))

    captured = to_dag(make_fx(unlike, tracing_mode="fake")(torch.ones(4)), one)
    refused(captured, [0, 1], [(0, 2), (1, 3)], "the keys are .*max.*sum", "all_reduce")
    captured = to_dag(make_fx(chained, tracing_mode="fake")(torch.ones(4)), one)
    refused(captured, [0, 1, 2], [(0, 3), (1, 4), (2,)], "it comes before 'sin'", "all_reduce_1")
    refused(captured, [1, 0, 2], [(0, 3), (1, 4), (2,)], "it comes before", "wait_tensor")
