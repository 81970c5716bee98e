"""Orders and buckets put into graphs: the same bits on all ranks, in as much memory as predicted."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, reject, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.overlap import _torch
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.capture import relabel
from spanwise.overlap.fx.emit import bucket_keys, emit, has_equal_waits, merge_waits
from spanwise.overlap.fx.graph import Captured, to_dag
from spanwise.overlap.fx.operators import WAIT
from spanwise.overlap.optimize import optimize
from tests.overlap.dags import some_order
from tests.overlap.programs import Cost, Program, one, programs, run, same, traced, tracked
from tests.overlap.test_bucketing import merge

OPS = torch.ops._c10d_functional


def some_buckets(captured: Captured, choose: random.Random) -> list[list[int]]:
    """Random sets of starts of one key; those that cannot be merged are left out."""
    found: list[list[int]] = []
    keys, starts = bucket_keys(captured), list(captured.dag.starts)
    for key in dict.fromkeys(keys[i] for i in starts if keys[i] is not None):
        alike = [i for i in starts if keys[i] == key and choose.random() < 0.8]
        half = choose.randint(0, len(alike))
        for members in (alike[:half], alike[half:]):
            with contextlib.suppress(GraphError):
                merge(captured.dag, [*found, members] if members else found)
                found += [members] * (len(members) > 1)
    return found


@settings(deadline=None, max_examples=40)
@given(programs(), st.randoms(use_true_random=False))
def test_any_order_and_any_buckets_give_the_same_bits_on_all_ranks(program: Program, choose: random.Random) -> None:
    try:
        gm, inputs = traced(program)
        expected = run(gm, inputs)
    except RuntimeError:  # torch refuses to write what it is given
        reject()
    same(run(gm, inputs, late=True), expected)  # no races before
    captured = to_dag(gm, one)
    assert captured.barriers == ()
    if not len(captured.dag):
        return
    buckets = some_buckets(captured, choose)
    merged = merge(captured.dag, buckets)
    order = some_order(merged.dag, choose)
    emit(captured, order, merged.members)
    gm.graph.lint()
    for late in (False, True):
        found, peak = tracked(gm, inputs, late=late)
        same(found, expected)
        again = to_dag(gm, one).dag
        # Items of tuples follow their tuple, so that those which nobody reads are freed at once.
        assert peak == again.peak_bytes() <= merged.dag.peak_bytes(order)
    assert len(again.starts) == len(merged.dag.starts)


def test_equal_waits_become_one_and_get_into_a_bucket() -> None:
    """AOTAutograd leaves a wait for each use since torch 2.14."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        first, second = OPS.all_gather_into_tensor(x, 2, "tp"), OPS.all_gather_into_tensor(y, 2, "tp")
        early, other = OPS.wait_tensor(first).sin(), OPS.wait_tensor(second)
        return early @ early.t(), other * OPS.wait_tensor(first), OPS.wait_tensor(first).cos()

    inputs = [[torch.arange(16.0).reshape(4, 4) * (rank + i) for i in range(2)] for rank in range(4)]
    gm = make_fx(function, tracing_mode="fake")(*inputs[0])
    expected, code = run(gm, inputs), gm.code
    result = optimize(gm, Cost(1.0))
    assert (len(result.timeline.dag.starts), len(result.before.dag.wait_of)) == (1, 2) and gm.code == code
    merge_waits(gm.graph)  # in place, as the backend does
    assert not has_equal_waits(gm.graph) and len(gm.graph.find_nodes(op="call_function", target=WAIT)) == 2
    for module in (gm, result.graph_module):
        same(run(module, inputs, late=True), expected)


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


def keys(function: Callable[..., Any], device: str = "cpu") -> list[Hashable | None]:
    """Bucket keys of all starts."""
    gm = make_fx(function, tracing_mode="fake")(torch.ones(4, 4))
    relabel(gm, torch.device(device))
    captured = to_dag(gm, one)
    return [bucket_keys(captured)[i] for i in captured.dag.starts]


@pytest.mark.parametrize(
    ("device", "backend", "mixed"),
    [("cpu", "", False), ("cuda", "", True), ("cuda", "fake", True), ("cuda", "cpu:gloo,cuda:gloo", False)],
)
def test_keys_hold_what_must_be_equal(device: str, backend: str, mixed: bool) -> None:
    """Of several dtypes, reduce-scatters can be one, and all-gathers of NCCL, which unknown groups on CUDA have."""
    tp = "tp"
    if backend:
        store = _torch.fake_store() if backend == "fake" else dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        tp = _torch.group_name(dist.group.WORLD)

    def function(x: torch.Tensor) -> Any:
        half = x.bfloat16()
        starts = [OPS.all_gather_into_tensor(of, 2, group) for of, group in ((x, tp), (half, tp), (x, "dp"))]
        starts += [OPS.reduce_scatter_tensor(of, how, 2, tp) for of, how in ((x, "sum"), (half, "sum"), (x, "avg"))]
        starts += [OPS.all_reduce(x, "sum", tp), OPS.all_reduce(x, group_name=tp, reduce_op="sum")]
        return [OPS.wait_tensor(x) for x in (*starts, OPS.all_reduce(half, "sum", tp), OPS.all_reduce(x, "max", tp))]

    try:
        found = keys(function, device)
    finally:
        if backend:
            dist.destroy_process_group()
    equal = {(i, j) for j in range(len(found)) for i in range(j) if found[i] == found[j]}
    assert None not in found and equal == {(3, 4), (6, 7)} | ({(0, 1)} if mixed else set())


def test_what_is_never_merged() -> None:
    def function(x: torch.Tensor) -> Any:
        starts = [
            OPS.all_reduce_(x.clone(), "sum", "tp"), OPS.all_to_all_single(x, [2, 2], [2, 2], "tp"),
            OPS.all_gather_into_tensor_out(x, 2, "tp", out=x.new_empty(8, 4)), OPS.broadcast(x, 0, "tp"),
            OPS.all_reduce(x.to(torch.complex64), "sum", "tp"), *OPS.all_reduce_coalesced([x, x], "sum", "tp"),
        ]  # fmt: skip
        twice, unwaited, read = (OPS.all_reduce(x, "sum", "tp") for _ in range(3))
        OPS.wait_tensor(twice)
        return [OPS.wait_tensor(x) for x in (*starts, twice, read)], unwaited, read.view(-1)

    assert keys(function) == [None] * 9


def two_gathers(x: torch.Tensor) -> Any:
    a = OPS.wait_tensor(OPS.all_gather_into_tensor(x.sin(), 2, "tp"))
    b = OPS.wait_tensor(OPS.all_gather_into_tensor(x[0].cos(), 2, "tp"))
    return a * 2, b * 3


def test_a_bucket_is_a_coalesced_collective_with_the_metadata_of_its_members() -> None:
    gm = make_fx(two_gathers, tracing_mode="fake")(torch.ones(4, 4))
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = node.name
    starts = gm.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor.default)
    values = [start.meta["val"] for start in starts]
    waits = {n: dict(n.meta) for n in gm.graph.find_nodes(op="call_function", target=WAIT)}
    captured = to_dag(gm, one)
    merged = merge(captured.dag, [captured.dag.starts])
    emit(captured, range(len(merged.dag)), merged.members)
    gm.graph.lint()
    (start,) = gm.graph.find_nodes(op="call_function", target=OPS.all_gather_into_tensor_coalesced.default)
    items = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    assert start.args[1:] == (2, "tp") and not start.kwargs and [n.args for n in items] == [(start, 0), (start, 1)]
    assert type(start.meta["val"]) is list and all(x is y for x, y in zip(start.meta["val"], values, strict=True))
    assert all(item.meta["val"] is value for item, value in zip(items, values, strict=True))
    traces = [node.meta["stack_trace"] for node in (start, *items)]
    assert traces == ["all_gather_into_tensor", "all_gather_into_tensor", "all_gather_into_tensor_1"]
    assert {n: dict(n.meta) for n in waits} == waits and [wait.args for wait in waits] == [(item,) for item in items]


def test_items_follow_their_tuple() -> None:
    gm = make_fx(lambda x: [part.sin() for part in x.split(2)], tracing_mode="fake")(torch.ones(4, 4))
    captured = to_dag(gm, one)
    emit(captured, [0, 1, 3, 2, 4], [(i,) for i in range(5)])
    assert [node.name for node in gm.graph.nodes][1:4] == ["split", "getitem", "getitem_1"]


def test_sides_of_a_joint_graph_stay_apart_and_orders_that_are_none_change_nothing() -> None:
    gm = make_fx(two_gathers, tracing_mode="fake")(torch.ones(4, 4))
    captured = to_dag(gm, one)
    first, second = (captured.nodes[i] for i in captured.dag.starts)
    for tag, alike in (("is_forward", False), ("is_backward", True)):
        first.meta["partitioner_tag"], second.meta["partitioner_tag"] = tag, "is_backward"
        assert len({bucket_keys(captured)[i] for i in captured.dag.starts}) == 2 - alike
    before, count = str(gm.graph), len(captured.dag)
    apart = [(i,) for i in range(count)]
    for order, members in ((range(count), [(1, 0), *apart[2:], ()]), ([0] * count, apart), (range(3), apart)):
        with pytest.raises(ValueError):
            emit(captured, order, members)
        assert str(gm.graph) == before
