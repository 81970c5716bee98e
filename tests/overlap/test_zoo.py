"""The zoo of graphs (`benchmarks/overlap_zoo.py`): one small family, against the greedy orders and the bound."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("overlap_zoo")
    for name in set(sys.modules) - before:
        if name.startswith("overlap_"):
            del sys.modules[name]


@pytest.mark.parametrize("links", ["slow", pytest.param("fast", marks=pytest.mark.slow)])
def test_ours_is_no_longer_than_greedy_orders(zoo: Any, links: str) -> None:
    found = list(zoo.cases(["dlrm"], [links], peers=False))
    assert [case.graph for case in found] == ["forward", "backward"]
    rows = zoo.losses(found)
    for pair in ("spanwise / own", "spanwise / greedy", "spanwise, buckets / greedy"):
        assert rows[pair]["longer"] == 0 and rows[pair]["worst"] <= zoo.MARGIN
    if links == "fast":
        return
    slow = found[1]
    # Its stream is the bottleneck: the first collective must start as soon as one can.
    assert slow.orders["spanwise"].makespan <= 1.001 * slow.bound < 1.02 * slow.bound <= slow.orders["greedy"].makespan


def test_the_greedy_orders_are_legal(zoo: Any) -> None:
    from spanwise.overlap.fx.graph import to_dag

    graph, *_ = zoo.FAMILIES["dlrm"]().graphs.values()
    dag = to_dag(graph, lambda node: 1.0).dag
    dag.check_order(zoo.by_longest_tail(dag))
