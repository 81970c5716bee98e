"""Plans of models with recurrent layers: what a layout costs them, and where "auto" runs them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import spanwise
from spanwise import Recurrence
from spanwise.layouts import document_runs
from spanwise.planning import seconds

GDN = {"gdn": Recurrence(layers=36, heads=32, key_dim=128, value_dim=128, hidden_size=2048)}
SHAPE = {"num_q_heads": 16, "num_kv_heads": 2, "head_dim": 256, "weights": {"default": 12}}


def _documents(length: int, number: int) -> spanwise.SpanMask:
    cuts = np.random.default_rng(0).integers(0, length, number)
    return spanwise.SpanMask.documents(np.unique(np.append(cuts, [0, length])))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 5), width=st.integers(1, 4))
def test_traffic_is_that_of_maps_and_halos(data: st.DataObject, ranks: int, width: int) -> None:
    length = data.draw(st.integers(1, 40))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=length, max_size=length))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length), max_size=5))})
    layout = spanwise.Layout.from_owners(owners, ranks, length, 1)
    everyone = document_runs.find(layout, [spanwise.Packing(cuts)])
    maps, rows = np.zeros((2, ranks, ranks), int)
    for start, stop in itertools.pairwise(cuts):  # a run's map goes to every other rank with a later run
        runs = [owners[i] for i in range(start, stop) if i == start or owners[i] != owners[i - 1]]
        for number, owner in enumerate(runs):
            for reader in {*runs[number + 1 :]} - {owner}:
                maps[reader, owner] += 1
    reader, run = document_runs.maps(everyone, ranks)
    found = np.zeros_like(maps)
    np.add.at(found, (reader, everyone.rank[run]), 1)
    np.fill_diagonal(found, 0)
    assert found.tolist() == maps.tolist()
    assert document_runs.map_traffic(everyone, ranks).tolist() == maps.tolist()
    reader, token = document_runs.halos(everyone, width)
    np.add.at(rows, (reader, np.array(owners)[token]), 1)
    wanted = np.zeros((ranks, ranks), int)
    for start, stop in itertools.pairwise(cuts):
        read = {(owners[i], j) for i in range(start, stop) for j in range(max(start, i - width), i)}
        for reader, token in read:
            wanted[reader, owners[token]] += reader != owners[token]
    assert rows.tolist() == wanted.tolist()


def test_more_runs_cost_more() -> None:
    mask = spanwise.SpanMask.causal(1 << 14)
    plans = [
        spanwise.make_plan(mask, 8, balancer=name, exchange="needed", recurrences=GDN, hardware=spanwise.H100, **SHAPE)
        for name in ("contiguous", "head_tail", "lpt")
    ]
    here = [plan.replace(relayout=False) for plan in plans]
    costs = [seconds.recurrent(plan)["gdn"] for plan in here]
    assert costs == sorted(costs) and costs[0][1] < costs[1][1] < costs[2][1]
    assert costs[0][0] == sum(range(8))
    # A longest-first layout is too fragmented: its recurrent layers run in a contiguous one.
    assert plans[2].relayout and not plans[0].relayout
    maps, time = seconds.recurrent(plans[2])["gdn"]
    assert maps == costs[0][0] and costs[0][1] < time < costs[2][1]


def test_the_fastest_way_is_taken_and_explained() -> None:
    plan = spanwise.make_plan(_documents(1 << 14, 30), 8, recurrences=GDN, **SHAPE)
    total = plan.predict()["total"]
    assert total <= 1.05 * min(c.seconds["total"] for c in plan.candidates)
    assert {c.relayout for c in plan.candidates} == {True, False}
    without = dataclasses.replace(plan, recurrences=None).predict()["total"]
    assert plan.predict()["recurrent"] == pytest.approx(total - without)
    assert "recurrent layers 'gdn' (36) in " in plan.explain()


def test_files_and_fingerprints(tmp_path: Path) -> None:
    plan = spanwise.make_plan(spanwise.SpanMask.causal(64), 2, block_size=4, recurrences=GDN, **SHAPE)
    plan.save(tmp_path / "plan")
    again = spanwise.Plan.load(tmp_path / "plan")
    assert again == plan and again.recurrences == GDN and again.relayout == plan.relayout
    assert plan.replace(relayout=not plan.relayout) != plan
    assert plan.replace(recurrences=None) != plan
    here, there = (plan.replace(relayout=moves).recurrent() for moves in (False, True))
    assert here.layout == plan.layout and not there.relayout and there.recurrences == plan.recurrences
    assert [there.layout.runs(rank).tolist() for rank in range(2)] == [[[0, 32]], [[32, 64]]]


def test_errors() -> None:
    mask = spanwise.SpanMask.causal(64)
    with pytest.raises(ValueError, match="recurrences must map names"):
        spanwise.make_plan(mask, 2, recurrences=GDN["gdn"])
    with pytest.raises(ValueError, match="layers of a Recurrence must be a number above 0, got nan"):
        Recurrence(layers=float("nan"), heads=1, key_dim=1, value_dim=1)
    tree = spanwise.SpanMask.shared_prefix(8, [28, 28])
    with pytest.raises(ValueError, match="give each path of a tree as a document"):
        spanwise.make_plan(tree, 2, recurrences=GDN)
