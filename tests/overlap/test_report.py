"""Reports and traces of optimized graphs: their figures are those of the timelines, their text says them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spanwise.overlap.bounds import Bounds, lower_bounds
from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import simulate
from spanwise.overlap.explain.reasons import reasons
from spanwise.overlap.explain.report import Result, bound_by, figures, summary
from spanwise.overlap.fx.capture import CaptureConfig
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.optimize import optimize
from spanwise.units import milliseconds as duration
from tests.overlap.programs import graphs_on, model_cost

CONFIG = CaptureConfig(layers=2, dim=256, heads=8, kv_heads=4, ffn=512, seq_len=512, batch=2, dp=2, tp=2)


def optimized(bucket: bool) -> Result:
    graphs = graphs_on(0, CONFIG)
    return optimize(graphs.backward, model_cost(graphs), bucket=bucket)


def test_figures_are_those_of_the_timelines() -> None:
    result = optimized(bucket=False)
    found, dag = figures(result, {"1": "dp", "2": "tp"}), result.timeline.dag
    for order, timeline in ((found.before, result.before), (found.after, result.timeline)):
        assert (order.makespan, order.exposed) == (timeline.makespan, timeline.exposed_ms)
        assert (order.peak_bytes, order.launches) == (timeline.peak_bytes, len(timeline.dag.starts))
        assert sum(order.why.values()) == pytest.approx(order.exposed)
        assert order.counts == timeline.counts()
    assert found.after.bound == result.bounds.makespan and found.budget == result.budget
    assert found.after.makespan < found.before.makespan
    assert json.loads(json.dumps(found.as_dict()))["after"]["makespan"] == result.timeline.makespan

    issued = [i for i in result.timeline.order.tolist() if dag.nodes[i].kind == Kind.START]
    assert [(one.start, one.begin) for one in found.collectives] == [(i, result.timeline.begin[i]) for i in issued]
    why = reasons(result.timeline, budget=result.budget)
    assert {one.start: one.reason for one in found.collectives if one.reason} == why
    # Gradients are scattered in float32; the largest, of an MLP's matrix, is split over tp only.
    scattered = [one for one in found.collectives if (one.operator, one.group) == ("reduce_scatter_tensor", "dp")]
    assert len(scattered) == 9 * CONFIG.layers and {one.group for one in found.collectives} == {"dp", "tp"}
    assert max(one.num_bytes for one in scattered) == 4 * CONFIG.ffn // CONFIG.tp * CONFIG.dim
    nodes = {node.name: node for node in result.graph_module.graph.nodes}
    for one in found.collectives:
        (operand,) = nodes[one.name].all_input_nodes
        tensors = operand.meta["val"], nodes[one.name].meta["val"]
        assert one.num_bytes == max(t.numel() * t.element_size() for t in tensors)


def test_bound_by() -> None:
    assert bound_by(Bounds(3.0, 2.0, {"compute": 3.0, "1": 1.0}), {}) == "all compute"
    assert bound_by(Bounds(3.0, 4.0, {"compute": 3.5, "1": 1.0}), {}) == "the longest path"
    assert bound_by(Bounds(3.0, 4.0, {"compute": 3.5, "1": 5.0}), {"1": "dp"}) == "the stream of dp"
    assert bound_by(Bounds(3.0, 3.0, {"compute": 3.5, "1": 3.0}), {}).startswith("compute, and what must come")


def test_merged_collectives_are_one_launch() -> None:
    """Rows of merged collectives say how many they are, and hold the bytes of all."""
    result = optimized(bucket=True)
    found, plain = figures(result), figures(optimized(bucket=False))
    after, before = found.after, found.before
    assert sum(one.members for one in found.collectives) == len(result.before.dag.starts) == before.launches
    assert after.launches < before.launches and sum(after.counts.values()) == after.launches
    bound = f"with these buckets; without buckets the bound is {duration(lower_bounds(result.before.dag).makespan)}"
    assert summary(found)["bound"].endswith(bound)
    assert sum(one.num_bytes for one in found.collectives) == sum(one.num_bytes for one in plain.collectives)
    assert len(to_dag(result.graph_module, lambda node: 1.0).dag.starts) == found.after.launches


# An all-gather of 4 ms behind one of 1 ms on the same stream, 3 ms of independent compute, 2 ms that need the second.
DAG = Dag(
    (
        Node("short", Kind.START, 1.0, group="dp"), Node("long", Kind.START, 4.0, group="dp"),
        Node("view", Kind.COMPUTE), Node("other", Kind.COMPUTE, 3.0),
        Node("wait short", Kind.WAIT, deps=(0,), start=0), Node("wait long", Kind.WAIT, deps=(1,), start=1),
        Node("reader", Kind.COMPUTE, 2.0, deps=(5,)),
    ),
    (Storage(100, 1, (5, 6)), Storage(10, 3, (), kept=True)),
)  # fmt: skip


def test_what_stands_on_the_tracks_of_a_chrome_trace(tmp_path: Path) -> None:
    simulate(DAG).save_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["compute", "group dp"]
    assert [(tracks[e["tid"]], e["cat"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("compute", "issue", "short", 0, 0), ("group dp", "collective", "short", 0, 1000),
        ("compute", "issue", "long", 0, 0), ("group dp", "collective", "long", 1000, 4000),
        ("compute", "compute", "other", 0, 3000), ("compute", "wait", "wait short", 3000, 0),
        ("compute", "exposed", "exposed: long", 3000, 2000), ("compute", "compute", "reader", 5000, 2000),
    ]  # fmt: skip
    assert [e["args"]["why"] for e in events if e.get("cat") == "exposed"] == [
        "no independent compute (1 ms), stream is saturated (1 ms)"
    ]
    assert [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"] == [(0, 100), (0, 110)]
