"""Copies between the device and its host: their price, two streams beside compute, and the memory that they free."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from spanwise import H100, overlap
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.costs.timing import why_not
from spanwise.overlap.dag import Kind
from spanwise.overlap.fx.graph import to_dag

pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="this torch has no offloads")
AO, ATEN = torch.ops.ao, torch.ops.aten
SIZE = 1024 * 1024 * 4  # bytes of an activation
HARDWARE = dataclasses.replace(H100, to_host=50e9, from_host=25e9)


def graph(*operators: tuple[str, Any, tuple[str, ...]]) -> fx.GraphModule:
    """A graph of these calls by name on fake CUDA tensors, and of its inputs "x" and "host"; "host…" lie there."""
    made, found = fx.Graph(), dict[str, fx.Node]()
    with _torch.fake_mode():
        for name, op, args in (("x", None, ()), ("host", None, ()), *operators):
            given = tuple(found[arg] for arg in args)
            found[name] = made.create_node("call_function", op, given, name=name) if op else made.placeholder(name)
            device = torch.device("cpu" if op is AO.offload.default or "host" in name else "cuda", 0)
            if op is ATEN._to_copy.default:
                found[name].kwargs = {"device": device}
            value = torch.empty(1024, 1024)
            if device.type != "cpu":
                _torch.relabel(value, device)
            found[name].meta["val"] = given[0].meta["val"] if op is AO.wait_tensor.default else value
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
    gm = graph(
        ("sin", ATEN.sin.default, ("x",)), ("off", AO.offload.default, ("sin",)), ("on", AO.reload.default, ("host",)),
        ("gone", AO.wait_tensor.default, ("off", "sin")), ("here", AO.wait_tensor.default, ("on", "host")),
        ("total", ATEN.add.Tensor, ("here", "x")),
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
