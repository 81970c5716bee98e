"""Schedules of an overlap `Dag`: against every order of small graphs, on layers like a model's, and within a budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.scheduler import ListScheduler, Rule
from spanwise.overlap.search import default_budget, low_memory_order, schedule
from tests.overlap.test_simulate import dags, orders

C, S, W = Kind.COMPUTE, Kind.START, Kind.WAIT


def backward(layers: int, *, seed: int = 0, gradients: float = 1.6) -> Dag:
    """A backward as autograd writes it: weight gradients before the gradient that the layer below needs.

    For each layer an all-gather of its weights, an all-gather and a reduce-scatter of activations, and a reduce-scatter
    of gradients, which takes `gradients` milliseconds; weights of a layer take 4 bytes while they are there,
    activations 1.
    """
    draw = random.Random(seed)
    nodes: list[Node] = []
    storages: list[Storage] = []

    def add(name: str, kind: Kind, ms: float, *deps: int, group: str = "", start: int = -1) -> int:
        nodes.append(Node(name, kind, ms, deps, group, start))
        return len(nodes) - 1

    def collective(name: str, ms: float, group: str, *deps: int) -> int:
        start = add(name, S, ms * draw.uniform(0.9, 1.1), *deps, group=group)
        return add(f"wait {name}", W, 0.0, start, start=start)

    grad = add("loss", C, 1.0)
    for layer in range(layers):
        weights = collective(f"gather {layer}", 1.6, "dp")
        gathered = collective(f"activations {layer}", 0.8, "tp", grad)
        wgrad = add(f"wgrad {layer}", C, 1.0, gathered)
        wgrad = add(f"wgrad {layer} too", C, 1.0, gathered, wgrad)
        collective(f"gradients {layer}", gradients, "dp", wgrad)
        dgrad = add(f"dgrad {layer}", C, 2.0, gathered, weights)
        grad = collective(f"scatter {layer}", 0.8, "tp", dgrad)
        storages += [Storage(4, weights - 1, (weights, dgrad)), Storage(1, gathered - 1, (gathered, wgrad, dgrad))]
    return Dag(tuple(nodes), tuple(storages))


@pytest.mark.parametrize("room", [0, 4, 8, 1000])
def test_the_budget_holds_and_more_room_is_no_worse(room: int) -> None:
    dag = backward(16)
    least = dag.peak_bytes()
    found = schedule(dag, budget=least + room)
    assert found.timeline.peak_bytes <= least + room == found.budget
    assert found.timeline.makespan <= schedule(dag, budget=least).timeline.makespan
    with pytest.raises(
        ValueError, match=f"takes {least - 1} bytes at its peak.* own takes {least}, the least .* {least};"
    ):
        schedule(dag, budget=least - 1)


def test_the_default_budget_is_a_gibibyte_or_a_twentieth_above_the_own_order() -> None:
    assert default_budget(7) == 7 + 2**30 and default_budget(2**40) == 2**40 + 2**40 // 20
    assert schedule(Dag((Node("a", C),), (Storage(7, 0),))).budget == default_budget(7)


def test_schedules_repeat_and_multipliers_count() -> None:
    dag = backward(8)
    assert schedule(dag).order == schedule(dag).order
    cautious = schedule(dag, multiplier=3.0)
    assert cautious.timeline.makespan <= simulate(dag).makespan
    # Where costs were estimated too low, a schedule for slower collectives is no worse.
    slow = Dag(tuple(dataclasses.replace(n, ms=n.ms * (3 if n.kind == S else 1)) for n in dag.nodes), dag.storages)
    assert simulate(slow, cautious.order).makespan <= simulate(slow, schedule(dag).order).makespan
    for bad in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="multiplier must be positive and finite"):
            schedule(dag, multiplier=bad)


@st.composite
def with_memory(draw: st.DrawFn) -> Dag:
    dag = draw(dags())
    storages = []
    for maker in range(len(dag)):
        for _ in range(draw(st.integers(0, 2)) if dag.nodes[maker].kind != W else 0):
            users = [i for i in range(maker + 1, len(dag)) if maker in dag.nodes[i].deps and draw(st.booleans())]
            storages.append(Storage(draw(st.integers(0, 9)), maker, tuple(users), draw(st.booleans())))
    return Dag(dag.nodes, tuple(storages))


@given(with_memory())
def test_orders_with_less_memory_are_legal_and_fit(dag: Dag) -> None:
    own, least = dag.peak_bytes(), min(map(dag.peak_bytes, orders(dag)))
    for budget in {own, (own + least) // 2, least, least - 1}:
        try:
            order = low_memory_order(dag, budget)
        except ValueError as error:
            assert budget < own and f"takes {budget:,} bytes" in str(error)
            continue
        dag.check_order(order)
        assert least <= dag.peak_bytes(order) <= budget
        found = schedule(dag, budget=budget)
        assert found.timeline.peak_bytes <= budget and found.timeline.makespan <= found.before.makespan


def test_results_are_made_late() -> None:
    """All results are made before any of them is read."""
    draw = random.Random(0)
    for count in range(2, 12):
        sizes = [draw.randint(1, 100) for _ in range(count)]
        reads = [Node(f"read {i}", C, 1.0, (i,)) for i in draw.sample(range(count), count)]
        makers = [Node(f"make {i}", C, 1.0) for i in range(count)]
        readers = {node.deps[0]: count + at for at, node in enumerate(reads)}
        dag = Dag((*makers, *reads), tuple(Storage(size, i, (readers[i],)) for i, size in enumerate(sizes)))
        assert dag.peak_bytes() == sum(sizes)
        assert dag.peak_bytes(low_memory_order(dag, max(sizes))) == max(sizes)


@given(with_memory(), st.integers(0, 10))
def test_never_worse_never_over_the_budget_and_near_the_best(dag: Dag, room: int) -> None:
    budget = dag.peak_bytes() + room
    found = schedule(dag, budget=budget)
    dag.check_order(found.order)
    assert found.timeline.makespan <= found.before.makespan and found.timeline.peak_bytes <= budget
    best = min(simulate(dag, order).makespan for order in orders(dag) if dag.peak_bytes(order) <= budget)
    assert lower_bounds(dag).makespan <= best <= found.timeline.makespan
    # List schedules on m streams are within 2 - 1/m of the best where memory does not bind.
    if room == 10 and not dag.storages:
        assert found.timeline.makespan <= 2 * best


@given(with_memory(), st.integers(0, 6), st.randoms(use_true_random=False))
def test_early_starts_and_late_waits_are_no_slower_at_any_costs(dag: Dag, room: int, draw: random.Random) -> None:
    """Of any order, at costs other than estimated, and with no more memory."""
    order = draw.choice(list(itertools.islice(orders(dag), 200)))
    peak = dag.peak_bytes(order) + room
    found = ListScheduler(dag, order, peak).settled().order.tolist()
    dag.check_order(found)
    assert dag.peak_bytes(found) <= peak
    for kind in (C, *dag.groups):
        same = [[i for i in ran if dag.nodes[i].kind != W and dag.nodes[i].ms] for ran in (order, found)]
        assert len({tuple(i for i in of if kind in (dag.nodes[i].kind, dag.nodes[i].group)) for of in same}) == 1
    for _ in range(5):
        other = Dag(tuple(dataclasses.replace(n, ms=n.ms * draw.choice((0, 0.3, 1, 4))) for n in dag.nodes))
        assert simulate(other, found).makespan <= simulate(other, order).makespan + 1e-9


@pytest.mark.parametrize("room", [4, 1000])
def test_schedules_start_early_and_wait_late(room: int) -> None:
    dag = backward(12)
    found = schedule(dag, budget=dag.peak_bytes() + room)
    assert found.order != found.before.order.tolist()
    assert ListScheduler(dag, found.order, found.timeline.peak_bytes).settled().order.tolist() == found.order


@given(with_memory(), st.integers(0, 20), st.booleans(), st.data())
def test_list_schedules_are_legal_and_keep_the_budget(dag: Dag, room: int, safely: bool, data: st.DataObject) -> None:
    """Whatever the priorities and the rule; the figures are those of `simulate`."""
    budget = dag.peak_bytes() + room
    engine = ListScheduler(dag, budget=budget)
    priorities = np.array([float(data.draw(st.integers(0, 9))) for _ in range(len(dag))])
    ahead = data.draw(st.sampled_from([0.0, math.inf])) if safely else math.inf
    rule = Rule(data.draw(st.sampled_from([0.0, 2.0])), ahead, safely)
    found = engine.forward(priorities, rule._replace(wait_by_priority=data.draw(st.booleans())))
    if found.makespan == math.inf:
        assert not safely  # nothing that was ready fitted
        return
    timeline = simulate(dag, found.order.tolist())
    assert (found.makespan, found.peak) == (timeline.makespan, max(0, timeline.peak_bytes))
    assert timeline.peak_bytes <= budget
