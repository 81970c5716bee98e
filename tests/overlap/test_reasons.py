"""Reasons of exposed collectives: the change that each names hides what it says, on graphs by hand and on any."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, strategies as st

from spanwise.overlap.bounds import Reach, compute_of
from spanwise.overlap.dag import Dag
from spanwise.overlap.engine import Timeline, simulate
from spanwise.overlap.explain.reasons import Move, Why, reasons
from tests.overlap.dags import Build, C, S, W, dags, orders


def test_too_little_independent_compute() -> None:
    """Three products lead to the scatter and one follows it; half a millisecond is independent."""
    made = Build()
    start = made.add(S, 3.0, tuple(made.compute(2.0) for _ in "qkv"), "g")
    made.compute(0.5)
    made.compute(5.0, made.add(W, 0.0, (start,), start=start))
    assert reasons(simulate(made.dag()))[start].moves == {Why.NO_COMPUTE: Move(2.5)}


def test_an_order_and_the_memory_that_it_takes() -> None:
    """A gather is issued after compute that could have hidden it."""
    made = Build()
    x, y = made.compute(2.0), made.compute(2.0)
    start, wait = made.collective(3.0, "g", made.compute(0.0))
    made.takes(100, start, wait, made.compute(1.0, wait, y))
    made.takes(50, x, y)
    timeline = simulate(made.dag())
    for budget, reason in ((None, Why.ORDER), (150, Why.ORDER), (149, Why.MEMORY)):
        move = Move(3.0, longer=-3.0, more_bytes=budget == 149)
        assert reasons(timeline, budget=budget)[start].moves == {reason: move}


def beside_no_compute(timeline: Timeline, start: int) -> float:
    """Milliseconds of a collective while which no compute runs; another collective may."""
    compute = timeline.dag.kinds == C
    begin, end = (of[compute].clip(timeline.begin[start], timeline.end[start]) for of in (timeline.begin, timeline.end))
    return float(timeline.dag.nodes[start].ms - (end - begin).sum())


@given(dags(), st.data())
def test_each_change_hides_what_it_says(dag: Dag, data: st.DataObject) -> None:
    """Each is made here in another way and simulated; that an order exists, by trying all."""
    some = list(itertools.islice(orders(dag), 40))
    timeline = simulate(dag, data.draw(st.sampled_from(some)))
    budget = data.draw(st.sampled_from([None, timeline.peak_bytes]))
    found, independent = reasons(timeline, budget=budget), Reach(dag).independent(compute_of(dag))
    assert {start: reason.exposed for start, reason in found.items()} == {
        start: ms for start, ms in timeline.exposed.items() if ms > 0
    }
    for start, reason in found.items():
        parts = [move.hides for move in reason.moves.values()]
        assert sum(parts) == pytest.approx(reason.exposed) and min(parts) > 0

        def changed(why: Why, order: list[int], at: int = start, left: float = reason.exposed, **facts: object) -> None:
            nodes = list(dag.nodes)
            nodes[at] = dataclasses.replace(nodes[at], **facts)  # type: ignore[arg-type]
            other = simulate(Dag(tuple(nodes)), order)
            assert other.exposed[at] <= left - found[at].moves[why].hides + 1e-9
            assert other.makespan == pytest.approx(timeline.makespan + found[at].moves[why].longer)

        given_order = timeline.order.tolist()
        for why, move in reason.moves.items():
            if why is Why.NO_COMPUTE:  # in no order, nor on a stream of its own, does compute run beside it
                nodes = (dataclasses.replace(n, group="own") if i == start else n for i, n in enumerate(dag.nodes))
                alone = Dag(tuple(nodes))
                assert move.hides == pytest.approx(min(reason.exposed, dag.nodes[start].ms - independent[start]))
                assert min(beside_no_compute(simulate(alone, order), start) for order in some) >= move.hides - 1e-9
            elif why is Why.STREAM:
                changed(why, given_order, group="own")
            elif why is Why.DEPENDENCY:
                assert move.needs in {dag.nodes[dep].name for dep in dag.nodes[start].deps}
                changed(why, [start, *(i for i in given_order if i != start)], deps=())
            elif why in (Why.ORDER, Why.MEMORY):
                assert bool(move.more_bytes) == (why is Why.MEMORY)
                limit = 10**9 if budget is None else budget + move.more_bytes
                assert any(
                    order.exposed[start] <= reason.exposed - move.hides + 1e-9
                    and order.makespan <= timeline.makespan + move.longer + 1e-9
                    and order.peak_bytes <= limit
                    for order in (simulate(dag, order) for order in orders(dag))
                )
