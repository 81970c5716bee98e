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


def graph(*operators: tuple[str, Any, tuple[Any, ...]], inputs: tuple[str, ...] = ("x",)) -> fx.GraphModule:
    """A graph of these calls by name on fake CUDA tensors; returned is the last one. Inputs named "host…" lie there."""
    made, found = fx.Graph(), {}
    with _torch.fake_mode() as mode:

        def value(node: Any) -> Any:
            return node.meta["val"] if isinstance(node, fx.Node) else node

        for name in inputs:
            found[name] = made.placeholder(name)
            device = "cpu" if name.startswith("host") else "cuda"
            found[name].meta["val"] = _relabelled(torch.empty(1024, 1024), device)
        for name, op, args in operators:
            given = tuple(found[arg] if isinstance(arg, str) and arg in found else arg for arg in args)
            found[name] = made.create_node("call_function", op, given, name=name)
            if op is ATEN._to_copy.default:
                found[name].kwargs = {"device": torch.device("cpu" if "host" in name else "cuda")}
            to_host = op is AO.offload.default or name.startswith("host")
            like = torch.empty(1024, 1024)
            waited = op is AO.wait_tensor.default
            found[name].meta["val"] = value(given[0]) if waited else _relabelled(like, "cpu" if to_host else "cuda")
        made.output(found[operators[-1][0]])
        assert mode is not None
    return fx.GraphModule({}, made)


def _relabelled(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if device != "cpu":
        _torch.relabel(tensor, torch.device(device, 0))
    return tensor


def test_copies_between_devices_are_priced_by_their_link() -> None:
    cost = CostModel(HARDWARE)
    gm = graph(
        ("host", ATEN._to_copy.default, ("x",)),
        ("back", ATEN._to_copy.default, ("host",)),
        ("cast", ATEN._to_copy.default, ("back",)),
    )
    host, back, cast = (node for node in gm.graph.nodes if node.op == "call_function")
    assert cost(host) == pytest.approx(1e3 * SIZE / 50e9) and cost(back) == pytest.approx(1e3 * SIZE / 25e9)
    assert cost(cast) < 1e3 * SIZE / 1e12
    captured = to_dag(gm, cost)
    assert not captured.dag.starts and not captured.barriers  # they block the compute stream
    assert [captured.dag.nodes[s.maker].name for s in captured.dag.storages] == ["back", "cast"]  # of the device
    assert H100.to_host == H100.from_host == 55e9


def test_offloads_and_reloads_are_starts_and_waits_of_two_streams() -> None:
    gm = graph(
        ("sin", ATEN.sin.default, ("x",)),
        ("off", AO.offload.default, ("sin",)),
        ("on", AO.reload.default, ("host",)),
        ("gone", AO.wait_tensor.default, ("off", "sin")),
        ("here", AO.wait_tensor.default, ("on", "host")),
        ("total", ATEN.add.Tensor, ("here", "x")),
        inputs=("x", "host"),
    )  # fmt: skip
    cost = CostModel(HARDWARE)
    captured = to_dag(gm, cost)
    nodes = {node.name: node for node in captured.dag.nodes}
    assert captured.barriers == () and captured.dag.streams == ("to host", "from host")
    assert [nodes[name].kind for name in ("off", "on", "gone", "here")] == [Kind.START] * 2 + [Kind.WAIT] * 2
    assert nodes["off"].ms == pytest.approx(1e3 * SIZE / 50e9) and nodes["on"].ms == pytest.approx(1e3 * SIZE / 25e9)
    assert not any(cost.is_guess(node) for node in captured.nodes)
    storages = {captured.dag.nodes[s.maker].name: s for s in captured.dag.storages}
    assert set(storages) == {"sin", "on", "total"} and {s.num_bytes for s in storages.values()} == {SIZE}
    # Its memory is freed at the wait, and a reload takes its own at the start.
    assert captured.dag.nodes[max(storages["sin"].users)].name == "gone"
    timeline = overlap.simulate(gm, cost)
    assert timeline.begin[2] < timeline.end[1]  # both directions at once
    assert [why_not(node) for node in captured.nodes if node.name in ("off", "on")] == [
        "it is a copy to or from the host"
    ] * 2
