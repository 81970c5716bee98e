"""Groups that share a link run one after the other on it, in every order, bound and report."""

from __future__ import annotations

import dataclasses

import pytest

from spanwise import H100, overlap
from spanwise.hardware import Hardware
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.measure import Measured
from spanwise.overlap.engine import simulate
from spanwise.overlap.explain.reasons import Why, reasons
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.search import schedule
from spanwise.units import milliseconds
from tests.overlap.dags import Build, S, W


def test_groups_of_one_link_run_one_after_the_other() -> None:
    """Compute of 3 ms beside collectives of 2 and 4 ms in two groups."""
    made = Build()
    starts = made.add(S, 2.0, (), "tp"), made.add(S, 4.0, (), "dp")
    made.compute(3.0)
    for start in starts:
        made.add(W, 0.0, (start,), start=start)
    apart, together = made.dag(), made.dag().with_links({"tp": "card", "dp": "card"})
    assert apart.streams == ("tp", "dp") and together.streams == ("card",)
    assert simulate(apart).makespan == lower_bounds(apart).makespan == 4.0
    timeline = simulate(together)
    assert timeline.makespan == lower_bounds(together).makespan == schedule(together).timeline.makespan == 6.0
    assert timeline.begin[1] == timeline.end[0] == 2.0
    assert reasons(timeline)[1].moves[Why.STREAM].hides == pytest.approx(2.0)
    one = apart.with_links({"tp": "card"})
    assert one.streams == ("card", "dp") and simulate(one).makespan == 4.0


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    sizes = {"dim": 1024, "heads": 8, "kv_heads": 4, "ffn": 2048, "seq_len": 1024, "dp": 4, "tp": 2}
    return capture(CaptureConfig(layers=2, device="cpu", **sizes))


def model(graphs: Graphs, hardware: Hardware) -> overlap.CostModel:
    return overlap.CostModel(hardware, ranks={axis.name: axis.ranks for axis in graphs.axes.values() if axis.name})


def test_hardware_says_which_groups_share(graphs: Graphs) -> None:
    """Four hosts of two ranks: tp stays inside them, dp crosses them; in one host of eight both stay inside."""
    tp, dp = graphs.axes["tp"].name, graphs.axes["dp"].name
    for hosts, levels, streams in ((2, (), 2), (2, (0, 1), 2), (8, (), 2), (8, (1,), 2), (8, (0,), 1)):
        hardware = H100.with_host_size(hosts)
        links = (dataclasses.replace(link, shared=at in levels) for at, link in enumerate(hardware.links))
        cost = model(graphs, dataclasses.replace(hardware, links=tuple(links)))
        assert cost.link(tp) == ("links 0", 0 in levels)
        assert cost.link(dp) == (("links 0", 0 in levels) if hosts == 8 else ("links 1", 1 in levels))
        assert len(to_dag(graphs.backward, cost).dag.streams) == streams
        assert Measured({}, cost).link(dp) == cost.link(dp)
    assert Measured({}).link(dp) == ("", False)


def test_a_table_of_links_and_the_report_of_both(graphs: Graphs) -> None:
    tp, dp = graphs.axes["tp"].name, graphs.axes["dp"].name
    cost = model(graphs, H100)
    apart = overlap.optimize(graphs.backward, cost, bucket=False)
    together = overlap.optimize(graphs.backward, cost, bucket=False, links={tp: "card", dp: "card"})
    assert together.timeline.dag.streams == ("card",) and len(apart.timeline.dag.streams) == 2
    assert "if groups of a level of links ran one after the other" in apart.report()
    assert "if no groups shared links" in together.report()
    serial = simulate(apart.timeline.dag.with_links({tp: "x", dp: "x"}), apart.timeline.order.tolist())
    assert f"{milliseconds(serial.makespan)}, was" in apart.report()
    assert serial.makespan > apart.timeline.makespan
    assert together.timeline.makespan <= serial.makespan
