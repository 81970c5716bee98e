"""Buckets of collectives on an overlap `Dag`: which are merged, that the graph stays legal, that nothing is lost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.buckets import bucket
from spanwise.overlap.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.quotient import Quotient, joined, split_units, units_of
from spanwise.overlap.scheduler import Engine
from spanwise.overlap.search import Schedule, schedule
from tests.overlap.test_simulate import dags

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Quotient:
    """`dag` with these buckets, each where its first member is in `order`, or its last; ``GraphError`` for a cycle."""
    unit = units_of(dag, buckets)
    known = np.arange(len(dag)) if order is None else np.array(order)
    found = Engine(dag).in_units(known, unit, late_starts=late, late_waits=late)
    if len(found) < len(dag):
        raise GraphError(dag.nodes[buckets[0][0]].name, "they wait for one another")
    return joined(dag, split_units(found, unit), {min(of): cost for of, cost in zip(buckets, ms, strict=True)})


def two_gathers(*deps: int) -> Dag:
    """Two all-gathers with readers; the second one's start depends on `deps`."""
    nodes = (
        Node("gather a", S, 2.0, group="dp"),
        Node("wait a", W, deps=(0,), start=0),
        Node("read a", C, 1.0, (1,)),
        Node("cast b", C, 1.0),
        Node("gather b", S, 3.0, (3, *deps), "dp"),
        Node("wait b", W, deps=(4,), start=4),
        Node("read b", C, 1.0, (2, 5)),
    )
    return Dag(nodes, (Storage(8, 0, (1, 2)), Storage(4, 3, (4, 5)), Storage(9, 4, (5, 6)), Storage(1, 6, kept=True)))


def test_members_start_where_the_first_one_did() -> None:
    merged = merge(two_gathers(), [[4, 0]], [4.5])
    assert merged.members == ((3,), (0, 4), (1, 5), (2,), (6,))
    start, wait = merged.dag.nodes[1:3]
    assert start == Node("gather a and 1 more", S, 4.5, (0,), "dp")
    assert wait == Node("wait a and 1 more", W, 0.0, (1,), start=1)
    assert merged.dag.storages[0] == Storage(8, 1, (2, 3)) and merged.dag.storages[2] == Storage(9, 1, (2, 4))
    assert merged.dag.peak_bytes() == 8 + 4 + 9 and simulate(merged.dag).makespan == 1 + 4.5 + 2
    assert merged.launches == 1


def test_buckets_that_wait_for_one_another_are_refused() -> None:
    for dag in (two_gathers(2), two_gathers(0)):
        with pytest.raises(GraphError, match="they wait for one another"):
            merge(dag, [[0, 4]], [4.5])
    # Each bucket alone is legal, both together are not.
    nodes = (
        Node("x 0", S, 1.0, group="x"), Node("y 0", S, 1.0, group="y"),
        Node("wait x 0", W, deps=(0,), start=0), Node("wait y 0", W, deps=(1,), start=1),
        Node("y 1", S, 1.0, (2,), "y"), Node("x 1", S, 1.0, (3,), "x"),
    )  # fmt: skip
    dag = Dag(nodes)
    assert merge(dag, [[0, 5]], [1.0]).launches == merge(dag, [[1, 4]], [1.0]).launches == 3
    with pytest.raises(GraphError, match="they wait for one another"):
        merge(dag, [[0, 5], [1, 4]], [1.0, 1.0])


def check(dag: Dag, merged: Quotient) -> None:
    """Every node is there once, and what a node depended on comes before it."""
    assert sorted(i for members in merged.members for i in members) == list(range(len(dag)))
    unit = {i: u for u, members in enumerate(merged.members) for i in members}
    for i, node in enumerate(dag.nodes):
        of_merged = merged.dag.nodes[unit[i]]
        assert of_merged.kind == node.kind and of_merged.group == node.group
        assert {unit[dep] for dep in node.deps} <= set(of_merged.deps)
        if node.kind == W:
            assert unit[node.start] == of_merged.start
    for old, new in zip(dag.storages, merged.dag.storages, strict=True):
        assert new.maker == unit[old.maker] and new.num_bytes == old.num_bytes
        assert set(new.users) == {unit[user] for user in old.users} and new.kept == old.kept


@st.composite
def graphs(draw: st.DrawFn) -> Dag:
    dag = draw(dags(most=14))
    storages = []
    for maker in range(len(dag)):
        users = [i for i in dag.users[maker] if draw(st.booleans())]
        # As a result is read where its collective is waited for, and by those who read that.
        users += [i for user in users if dag.kinds[user] == W for i in dag.users[user] if draw(st.booleans())]
        if dag.kinds[maker] != W and draw(st.booleans()):
            storages.append(Storage(draw(st.integers(1, 9)), maker, tuple(sorted(set(users))), draw(st.booleans())))
    return Dag(dag.nodes, tuple(storages))


@given(graphs(), st.randoms(use_true_random=False), st.booleans())
def test_a_merge_is_legal_or_refused(dag: Dag, draw: random.Random, late: bool) -> None:
    buckets = [[i for i in dag.starts if dag.nodes[i].group == group and draw.random() < 0.8] for group in dag.groups]
    buckets = [bucket for bucket in buckets if bucket]
    try:
        check(dag, merge(dag, buckets, [1.0] * len(buckets), late=late))
    except GraphError as error:
        assert "wait for one another" in str(error)


def bucketed(dag: Dag, merged_ms: Callable[[list[int]], float] | None = None, **keys: Hashable) -> Found:
    """`dag` scheduled, merged and scheduled again; checks the properties that hold of any graph.

    Args:
        merged_ms: default: half a millisecond is saved for each collective that joins another.
        keys: of the starts by name, "_" for what a name cannot have; default: their group.
    """

    def cheaper(starts: list[int]) -> float:
        return max(0.0, sum(dag.nodes[i].ms for i in starts) - (len(starts) - 1) / 2)

    of = [keys.get(node.name.replace(" ", "_"), node.group or None) for node in dag.nodes]
    before = schedule(dag)
    merged, after = bucket(dag, before, of, merged_ms or cheaper)
    check(dag, merged)
    assert after.timeline.dag is merged.dag and after.budget == before.budget
    merged.dag.check_order(after.order)
    assert after.timeline.makespan <= before.timeline.makespan * (1 + 1e-9)
    assert after.timeline.peak_bytes <= before.budget and merged.launches <= len(dag.starts)
    for i, members in enumerate(merged.members):
        if len(members) > 1 and merged.dag.nodes[i].kind == S:
            assert len({of[member] for member in members}) == 1 and of[members[0]] is not None
            assert merged.dag.nodes[i].ms == (merged_ms or cheaper)(list(members))
    names = [[dag.nodes[j].name for j in of_unit] for of_unit in merged.members if len(of_unit) > 1]
    return Found(before, after, [of_unit for of_unit in names if not of_unit[0].startswith("wait")])


@dataclasses.dataclass(frozen=True)
class Found:
    before: Schedule
    after: Schedule
    buckets: list[list[str]]

    def nothing_lost(self) -> bool:
        return self.after.timeline.exposed_ms <= self.before.timeline.exposed_ms


def collectives(*ops: tuple[str, Kind, float, str]) -> Dag:
    """Nodes by name, kind, milliseconds and the names of what they depend on; a wait is named after its start."""
    number = {name: i for i, (name, *_) in enumerate(ops)}
    nodes = []
    for name, kind, ms, needs in ops:
        deps = [number[need] for need in needs.split(",") if need]
        start = number[name.removeprefix("wait ")] if kind == W else -1
        deps += [start] if kind == W else []
        nodes.append(Node(name, kind, ms, tuple(deps), "dp" if kind == S else "", start))
    return Dag(tuple(nodes))


def test_independent_collectives_are_merged() -> None:
    """Two all-reduces and collectives of different dtypes are, too: only keys decide."""
    dag = collectives(
        ("gather a", S, 1.0, ""), ("gather b", S, 1.0, ""), ("mm a", C, 2.0, ""), ("mm b", C, 2.0, ""),
        ("wait gather a", W, 0.0, ""), ("wait gather b", W, 0.0, ""),
        ("sum", C, 1.0, "wait gather a,wait gather b,mm a,mm b"),
    )  # fmt: skip
    found = bucketed(dag)
    assert found.buckets == [["gather a", "gather b"]] and found.nothing_lost()
    assert found.after.timeline.exposed_ms == 0 and found.after.timeline.makespan == 5
    assert bucketed(dag, gather_a="bf16", gather_b="fp32").buckets == []
    assert bucketed(dag, gather_a=None, gather_b=None).buckets == []


def test_nested_hiding_intervals_are_not_merged() -> None:
    """The second gather is needed at once; the first one is hidden by what needs the second."""
    dag = collectives(
        ("gather b", S, 1.0, ""), ("gather a", S, 3.0, ""), ("mm", C, 1.0, ""), ("wait gather b", W, 0.0, ""),
        ("mm of b", C, 3.0, "mm,wait gather b"), ("wait gather a", W, 0.0, ""),
        ("sum", C, 1.0, "wait gather a,mm of b"),
    )  # fmt: skip
    found = bucketed(dag)
    assert found.buckets == [] and found.after is found.before and found.after.timeline.exposed_ms == 0
    # Were they as quick together as alone, nothing would be lost.
    found = bucketed(dag, lambda starts: 1.0)
    assert found.buckets == [["gather b", "gather a"]] and found.nothing_lost()


@pytest.mark.parametrize("between", [True, False])
def test_gathers_around_a_scatter_that_is_hidden(between: bool) -> None:
    """gather a, hidden, used for the scatter, hidden, used for gather b: they wait for one another, or do not."""
    chain = "wait scatter" if between else ""
    dag = collectives(
        ("gather a", S, 2.0, ""), ("mm 1", C, 2.0, ""),
        ("wait gather a", W, 0.0, ""), ("use a", C, 1.0, "wait gather a"),
        ("scatter", S, 2.0, "use a"), ("mm 2", C, 2.0, "mm 1"), ("wait scatter", W, 0.0, ""),
        ("gather b", S, 2.0, chain), ("mm 3", C, 2.0, "mm 2"), ("wait gather b", W, 0.0, ""),
        ("sum", C, 1.0, "wait gather b,wait scatter,mm 3"),
    )  # fmt: skip
    found = bucketed(dag, lambda starts: 2.0, scatter="scatter")
    assert found.buckets == ([] if between else [["gather a", "gather b"]]) and found.nothing_lost()
    assert found.after.timeline.makespan == found.before.timeline.makespan


def layers(count: int, *, compute: float, room: int = 1000) -> tuple[Dag, int]:
    """Backward of layers with sharded parameters: for each, four gathers of weights, a product, four scatters.

    Returns:
        The dag, and a budget `room` bytes above its own order; weights of a layer take 4 bytes, gradients as many.
    """
    nodes: list[Node] = []
    storages: list[Storage] = []

    def add(name: str, kind: Kind, ms: float, *deps: int, group: str = "", start: int = -1) -> int:
        nodes.append(Node(name, kind, ms, deps, group, start))
        return len(nodes) - 1

    gradient = add("loss", C, 1.0)
    for layer in range(count):
        weights = [add(f"gather {layer}.{k}", S, 0.3, group="dp") for k in range(4)]
        waits = [add(f"wait {nodes[i].name}", W, 0.0, i, start=i) for i in weights]
        gradient = add(f"dgrad {layer}", C, compute / 2, gradient, *waits)
        wgrad = add(f"wgrad {layer}", C, compute / 2, gradient)
        storages += [Storage(1, i, (wait, gradient)) for i, wait in zip(weights, waits, strict=True)]
        for k in range(4):
            start = add(f"scatter {layer}.{k}", S, 0.3, wgrad, group="dp")
            storages.append(Storage(1, wgrad, (add(f"wait scatter {layer}.{k}", W, 0.0, start, start=start),)))
    dag = Dag(tuple(nodes), tuple(storages))
    return dag, dag.peak_bytes() + room


def saves(dag: Dag, latency: float) -> Callable[[list[int]], float]:
    return lambda starts: sum(dag.nodes[i].ms for i in starts) - latency * (len(starts) - 1)


def kind_of(dag: Dag) -> list[Hashable | None]:
    return [node.name.split(" ")[0] if node.kind == S else None for node in dag.nodes]


@pytest.mark.parametrize(("room", "gain"), [(0, 0.1), (8, 0.01), (1000, 0.05)])
def test_a_stream_that_is_the_bottleneck_gains(room: int, gain: float) -> None:
    dag, budget = layers(32, compute=2.0, room=room)
    before = schedule(dag, budget=budget)
    merged, after = bucket(dag, before, kind_of(dag), saves(dag, 0.1))
    assert before.timeline.makespan >= 0.999 * 32 * 8 * 0.3  # of collectives
    assert after.timeline.makespan <= (1 - gain) * before.timeline.makespan
    assert after.timeline.peak_bytes <= budget and after.timeline.exposed_ms <= before.timeline.exposed_ms
    assert merged.launches <= len(dag.starts) / 2


def test_launches_are_saved_where_compute_is_the_bottleneck() -> None:
    dag, budget = layers(32, compute=4.0)
    before = schedule(dag, budget=budget)
    asked = []

    def sums(starts: list[int]) -> float:
        asked.append(starts)
        return saves(dag, 0.0)(starts)

    merged, after = bucket(dag, before, kind_of(dag), sums)
    assert after.timeline.makespan <= before.timeline.makespan * (1 + 1e-9)
    assert after.timeline.makespan <= 1.03 * lower_bounds(merged.dag).makespan
    assert merged.launches <= len(dag.starts) / 3 and after.timeline.peak_bytes <= budget
    assert len(asked) <= 2 * len(dag.starts)  # a price of fx nodes takes time


def test_scatters_of_gradients_become_one() -> None:
    """No wait is moved forward to the first of its bucket, where compute would stall."""
    nodes = []
    for layer in range(4):
        nodes.append(Node(f"gradient of weight {layer}", C, 1.0, (4 * layer - 1,) if layer else ()))
        nodes.append(Node(f"scatter {layer}", S, 0.6, (4 * layer,), "dp"))
        nodes.append(Node(f"wait {layer}", W, deps=(4 * layer + 1,), start=4 * layer + 1))
        nodes.append(Node(f"gradient of input {layer}", C, 1.0, (4 * layer - 1,) if layer else ()))
    dag = Dag(tuple(nodes))
    merged, found = bucket(dag, schedule(dag), kind_of(dag), lambda starts: 0.6)
    assert merged.launches == 1 and found.timeline.makespan == pytest.approx(8.0)


def test_a_bucket_that_costs_more_than_its_members_is_refused() -> None:
    dag, budget = layers(4, compute=4.0)
    before = schedule(dag, budget=budget)
    merged, after = bucket(dag, before, kind_of(dag), lambda starts: 0.31 * len(starts))
    assert merged.dag is dag and after is before


def test_bad_prices_and_keys_raise() -> None:
    dag, budget = layers(2, compute=4.0)
    before = schedule(dag, budget=budget)
    for bad in (float("nan"), -1.0, float("inf")):
        prices = dict.fromkeys(range(10), bad)
        with pytest.raises(GraphError, match=r"node '(gather|scatter) \d.\d': merged .* would cost"):
            bucket(dag, before, kind_of(dag), lambda starts, prices=prices: prices[len(starts)])  # type: ignore[misc]
    with pytest.raises(ValueError, match=f"expected a key or None for each of {len(dag)} nodes, got 1"):
        bucket(dag, before, [None], saves(dag, 0.0))


def gathers_with_readers(count: int, gather: float, read: float, *, chain: bool) -> Dag:
    """Gathers, each with a reader, which reads what the one before it made as well if they are a chain."""
    ops: list[tuple[str, Kind, float, str]] = []
    for k in range(count):
        needs = f"wait gather {k}" + (f",read {k - 1}" if chain and k else "")
        ops += [(f"gather {k}", S, gather, ""), (f"wait gather {k}", W, 0.0, ""), (f"read {k}", C, read, needs)]
    return collectives(*ops)


@pytest.mark.parametrize("chain", [False, True])
def test_a_reader_is_delayed_where_all_is_sooner_for_it(chain: bool) -> None:
    """Of four gathers of 2 ms, 1 ms of which is latency: two together delay one reader by 1 ms."""
    dag = gathers_with_readers(4, 2.0, 1.0, chain=chain)
    found = bucketed(dag, saves(dag, 1.0))
    assert found.before.timeline.makespan == 9.0 and found.after.timeline.makespan == 8.0


@pytest.mark.parametrize("chain", [False, True])
def test_gathers_of_latency_alone_become_one(chain: bool) -> None:
    dag = gathers_with_readers(3, 0.02, 0.001, chain=chain)
    found = bucketed(dag, saves(dag, 0.02))
    assert found.before.timeline.makespan == pytest.approx(0.061)
    assert found.after.timeline.makespan == pytest.approx(0.023) and len(found.buckets[0]) == 3
    # With two streams, of which one waits for the other.
    ops = [(f"gather {k}", S, 0.02, "") for k in range(3)] + [(f"wait gather {k}", W, 0.0, "") for k in range(3)]
    for k in range(3):
        ops += [(f"read {k}", C, 0.001, f"wait gather {k}"), (f"scatter {k}", S, 0.02, f"read {k}")]
        ops += [(f"wait scatter {k}", W, 0.0, "")]
    both = collectives(*ops)
    keys = {node.name.replace(" ", "_"): node.name[0] for node in both.nodes if node.kind == S}
    found = bucketed(both, saves(both, 0.02), **keys)
    assert found.after.timeline.makespan == pytest.approx(0.043) and len(found.buckets) == 2


@given(graphs(), st.integers(0, 10), st.sampled_from([0.0, 0.5, 1.0]), st.randoms(use_true_random=False))
def test_never_longer_never_over_the_budget_nothing_twice(
    dag: Dag, room: int, saved: float, draw: random.Random
) -> None:
    budget = dag.peak_bytes() + room
    before = schedule(dag, budget=budget, effort=2)
    keys = [(node.group, draw.random() < 0.8) if node.kind == S and draw.random() < 0.9 else None for node in dag.nodes]

    def merged_ms(starts: list[int]) -> float:
        return max(0.0, sum(dag.nodes[i].ms for i in starts) - saved * (len(starts) - 1))

    merged, after = bucket(dag, before, keys, merged_ms, effort=2)
    check(dag, merged)
    merged.dag.check_order(after.order)
    assert after.timeline.makespan <= before.timeline.makespan
    assert after.timeline.peak_bytes <= budget and merged.launches <= len(dag.starts)
    for node, members in zip(merged.dag.nodes, merged.members, strict=True):
        if len(members) > 1:
            assert node.name == f"{dag.nodes[members[0]].name} and {len(members) - 1} more"
        if node.kind == S and len(members) > 1:
            assert len({keys[i] for i in members}) == 1 and keys[members[0]] is not None
            assert node.ms == merged_ms(list(members))


def gathers(sizes: Sequence[float]) -> Dag:
    """All-gathers that compute hides, of so many milliseconds each."""
    ops = [(f"gather {i}", S, ms, "") for i, ms in enumerate(sizes)] + [("work", C, 3 * sum(sizes) + 1.0, "")]
    return collectives(*ops, *((f"wait {name}", W, 0.0, name) for name, kind, *_ in ops if kind == S))


def taken(dag: Dag, merged_ms: Callable[[list[int]], float]) -> list[list[int]]:
    merged, _ = bucket(dag, schedule(dag), kind_of(dag), merged_ms)
    return [list(members) for i, members in enumerate(merged.members) if i in merged.dag.starts and len(members) > 1]


@pytest.mark.parametrize("sizes", [[100.0] + [1.2] * 6, [1.2] * 6 + [100.0], [1.2] * 3 + [100.0] + [1.2] * 3])
def test_a_large_one_and_small_ones_are_one_bucket_in_any_order(sizes: list[float]) -> None:
    dag = gathers(sizes)
    assert taken(dag, saves(dag, 1.0)) == [list(range(7))]
