"""The zoo of graphs (`benchmarks.overlap_zoo`): one small family, against the greedy orders and the bound."""

from __future__ import annotations

import pytest

from benchmarks import overlap_zoo as zoo
from benchmarks.zoo_models import FAMILIES


@pytest.mark.parametrize("links", ["slow", pytest.param("fast", marks=pytest.mark.slow)])
def test_ours_is_no_longer_than_greedy_orders(links: str) -> None:
    graphs, found = zip(
        *((graph, case) for _, graph, _, case in zoo.cases(["dlrm"], [links], peers=False)), strict=True
    )
    assert graphs == ("forward", "backward")
    rows = zoo.losses(found)
    for pair in ("spanwise / own", "spanwise / greedy", "spanwise, buckets / greedy"):
        assert rows[pair]["longer"] == 0 and rows[pair]["worst"] <= zoo.MARGIN
    if links == "fast":
        return
    ours, greedy = (found[1].orders[name]["makespan"] / found[1].bound for name in ("spanwise", "greedy"))
    # Its stream is the bottleneck: the first collective must start as soon as one can.
    assert ours <= 1.001 < 1.02 <= greedy


def test_the_greedy_orders_are_legal() -> None:
    from spanwise.overlap.fx.graph import to_dag

    graph, *_ = FAMILIES["dlrm"]().graphs.values()
    dag = to_dag(graph, lambda node: 1.0).dag
    dag.check_order(zoo.by_longest_tail(dag))
