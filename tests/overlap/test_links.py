"""Groups that share a link run one after the other on it, in every order, bound and report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from spanwise import H100, overlap
from spanwise.hardware import Hardware
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.measure import Measured
from spanwise.overlap.dag import Dag, Kind, Node
from spanwise.overlap.engine import simulate
from spanwise.overlap.explain.reasons import Why, reasons
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.search import schedule
from spanwise.units import milliseconds


def shared(hardware: Hardware, *levels: int) -> Hardware:
    """The hardware, with these levels of links shared by groups."""
    links = (dataclasses.replace(link, shared=at in levels) for at, link in enumerate(hardware.links))
    return dataclasses.replace(hardware, links=tuple(links))


def two_groups(links: Mapping[str, str]) -> Dag:
    """Compute of 3 ms beside collectives of 2 and 4 ms in two groups."""
    starts = Node("gather", Kind.START, 2.0, group="tp"), Node("reduce", Kind.START, 4.0, group="dp")
    waits = Node("wait", Kind.WAIT, deps=(0,), start=0), Node("wait_1", Kind.WAIT, deps=(1,), start=1)
    return Dag((*starts, Node("mm", Kind.COMPUTE, 3.0), *waits)).with_links(links)


def test_groups_of_one_link_run_one_after_the_other() -> None:
    apart, together = two_groups({}), two_groups({"tp": "card", "dp": "card"})
    assert apart.streams == ("tp", "dp") and together.streams == ("card",)
    assert simulate(apart).makespan == lower_bounds(apart).makespan == 4.0
    timeline = simulate(together)
    assert timeline.makespan == lower_bounds(together).makespan == schedule(together).timeline.makespan == 6.0
    assert timeline.begin[1] == timeline.end[0] == 2.0
    assert reasons(timeline)[1].parts[Why.STREAM] == pytest.approx(2.0)
    assert two_groups({"tp": "card"}).streams == ("card", "dp")
    assert simulate(two_groups({"tp": "card"})).makespan == 4.0
    assert together.with_links({}).streams == apart.streams


def config(layers: int, device: str = "cpu", dp: int = 4) -> CaptureConfig:
    return CaptureConfig(
        layers=layers, dim=1024, heads=8, kv_heads=4, ffn=2048, seq_len=1024, dp=dp, tp=2, device=device
    )


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return capture(config(2))


def model(graphs: Graphs, hardware: Hardware) -> overlap.CostModel:
    return overlap.CostModel(hardware, ranks={axis.name: axis.ranks for axis in graphs.axes.values() if axis.name})


def test_hardware_says_which_groups_share(graphs: Graphs) -> None:
    """Four hosts of two ranks: tp stays inside them, dp crosses them; in one host of eight both stay inside."""
    tp, dp = graphs.axes["tp"].name, graphs.axes["dp"].name
    for hosts, levels, streams in ((2, (), 2), (2, (0, 1), 2), (8, (), 2), (8, (1,), 2), (8, (0,), 1)):
        hardware = shared(H100.with_host_size(hosts), *levels)
        cost = model(graphs, hardware)
        assert cost.link(tp) == ("links 0", 0 in levels)
        assert cost.link(dp) == (("links 0", 0 in levels) if hosts == 8 else ("links 1", 1 in levels))
        assert len(to_dag(graphs.backward, cost).dag.streams) == streams
        measured = Measured({}, cost)
        assert measured.link(dp) == cost.link(dp)
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
    one = overlap.optimize(graphs.backward, lambda node: 1.0, bucket=False)
    assert "links" not in one.report()
