"""Orders and buckets put into graphs: the same bits on all ranks, nothing lost, errors before anything is changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spanwise.overlap.bucket import merge
from spanwise.overlap.capture import Axis
from spanwise.overlap.dag import Dag, GraphError
from spanwise.overlap.emit import bucket_keys, emit
from spanwise.overlap.graph import Captured, to_dag
from tests.lockstep import Lockstep
from tests.unit.test_overlap_graph import STATEMENTS

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
    """A random program, and the inputs of each rank, which it writes, too. It has no races of its own."""

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


@settings(deadline=None, max_examples=60)
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
