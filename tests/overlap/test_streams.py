"""Streams beside compute: groups that share a link run one after the other on it; copies to and from the host."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from spanwise import H100, overlap
from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.costs.measure import Measured
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.costs.timing import why_not
from spanwise.overlap.dag import Kind
from spanwise.overlap.engine import simulate
from spanwise.overlap.explain.reasons import Why, reasons
from spanwise.overlap.fx.capture import CaptureConfig, Graphs, capture
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.search import schedule
from spanwise.units import milliseconds
from tests.overlap.dags import Build, S, W
from tests.overlap.programs import model_cost


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


def test_hardware_says_which_groups_share(graphs: Graphs) -> None:
    """Four hosts of two ranks: tp stays inside them, dp crosses them; in one host of eight both stay inside."""
    tp, dp = graphs.axes["tp"].name, graphs.axes["dp"].name
    for hosts, levels, streams in ((2, (), 2), (2, (0, 1), 2), (8, (), 2), (8, (1,), 2), (8, (0,), 1)):
        hardware = H100.with_host_size(hosts)
        links = (dataclasses.replace(link, shared=at in levels) for at, link in enumerate(hardware.links))
        cost = CostModel(dataclasses.replace(hardware, links=tuple(links)), ranks={tp: range(2), dp: range(0, 8, 2)})
        assert cost.link(tp) == ("links 0", 0 in levels)
        assert cost.link(dp) == (("links 0", 0 in levels) if hosts == 8 else ("links 1", 1 in levels))
        assert len(to_dag(graphs.backward, cost).dag.streams) == streams
        assert Measured({}, cost).link(dp) == cost.link(dp)
    assert Measured({}).link(dp) == ("", False)


def test_a_table_of_links_and_the_report_of_both(graphs: Graphs) -> None:
    tp, dp = graphs.axes["tp"].name, graphs.axes["dp"].name
    cost = model_cost(graphs)
    apart = overlap.optimize(graphs.backward, cost, bucket=False)
    together = overlap.optimize(graphs.backward, cost, bucket=False, links={tp: "card", dp: "card"})
    assert together.timeline.dag.streams == ("card",) and len(apart.timeline.dag.streams) == 2
    assert "if groups that share a network level ran one after the other" in apart.report()
    assert "if no groups shared links" in together.report()
    serial = simulate(apart.timeline.dag.with_links({tp: "x", dp: "x"}), apart.timeline.order.tolist())
    assert f"{milliseconds(serial.makespan)}, was" in apart.report()
    assert serial.makespan > apart.timeline.makespan
    assert together.timeline.makespan <= serial.makespan


ATEN = torch.ops.aten
SIZE = 1024 * 1024 * 4  # bytes of an activation
HARDWARE = dataclasses.replace(H100, to_host=50e9, from_host=25e9)


def graph(*operators: tuple[str, Any, tuple[str, ...]]) -> fx.GraphModule:
    """A graph of these calls by name on fake CUDA tensors, and of its inputs "x" and "host"; "host…" lie there."""
    made, found = fx.Graph(), dict[str, fx.Node]()
    with _torch.fake_mode():
        for name, op, args in (("x", None, ()), ("host", None, ()), *operators):
            given = tuple(found[arg] for arg in args)
            found[name] = made.create_node("call_function", op, given, name=name) if op else made.placeholder(name)
            device = torch.device("cpu" if str(op) == "ao.offload.default" or "host" in name else "cuda", 0)
            if op is ATEN._to_copy.default:
                found[name].kwargs = {"device": device}
            value = torch.empty(1024, 1024)
            if device.type != "cpu":
                _torch.relabel(value, device)
            found[name].meta["val"] = given[0].meta["val"] if str(op) == "ao.wait_tensor.default" else value
        made.output(found[operators[-1][0]])
    return fx.GraphModule({}, made)


def test_copies_between_devices_are_priced_by_their_link() -> None:
    cost, copy = CostModel(HARDWARE), ATEN._to_copy.default
    gm = graph(("hosted", copy, ("x",)), ("back", copy, ("hosted",)), ("cast", copy, ("back",)))
    hosted, back, cast = (node for node in gm.graph.nodes if node.op == "call_function")
    assert cost(hosted) == pytest.approx(1e3 * SIZE / 50e9) and cost(back) == pytest.approx(1e3 * SIZE / 25e9)
    assert cost(cast) < 1e3 * SIZE / 1e12
    captured = to_dag(gm, cost)
    assert not captured.dag.starts and not captured.barriers  # they block the compute stream
    assert [captured.dag.nodes[s.maker].name for s in captured.dag.storages] == ["back", "cast"]  # of the device


def test_offloads_and_reloads_are_starts_and_waits_of_two_streams() -> None:
    pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="this torch has no offloads")
    offload, reload, wait = (getattr(torch.ops.ao, name).default for name in ("offload", "reload", "wait_tensor"))
    gm = graph(
        ("sin", ATEN.sin.default, ("x",)), ("off", offload, ("sin",)), ("on", reload, ("host",)),
        ("gone", wait, ("off", "sin")), ("here", wait, ("on", "host")), ("total", ATEN.add.Tensor, ("here", "x")),
    )  # fmt: skip
    cost = CostModel(HARDWARE)
    captured = to_dag(gm, cost)
    nodes = {node.name: node for node in captured.dag.nodes}
    assert captured.barriers == () and captured.dag.streams == ("to host", "from host")
    assert [nodes[name].kind for name in ("off", "on", "gone", "here")] == [Kind.START] * 2 + [Kind.WAIT] * 2
    assert nodes["off"].ms == pytest.approx(1e3 * SIZE / 50e9) and nodes["on"].ms == pytest.approx(1e3 * SIZE / 25e9)
    storages = {captured.dag.nodes[s.maker].name: s for s in captured.dag.storages}
    assert set(storages) == {"sin", "on", "total"} and {s.num_bytes for s in storages.values()} == {SIZE}
    # Its memory is freed at the wait, and a reload takes its own at the start.
    assert captured.dag.nodes[max(storages["sin"].users)].name == "gone"
    timeline = overlap.simulate(gm, cost)
    assert timeline.begin[2] < timeline.end[1]  # both directions at once
    copies = [node for node in captured.nodes if node.name in ("off", "on")]
    assert {why_not(node) for node in copies} == {"it is a copy to or from the host"}
    assert not any(map(cost.is_guess, captured.nodes))
