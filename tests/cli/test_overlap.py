"""``spanwise overlap``: what it prints, writes and refuses, end to end on small models; graph files; its page."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spanwise import units
from spanwise._torch import COMPILES
from spanwise.cli.overlap import parse_groups
from spanwise.cli.report.overlap_page import list_ranks
from spanwise.cli.report.pictures import Bar, lanes, merged
from spanwise.hardware import H100
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.dag import Dag, Kind, Node
from spanwise.overlap.engine import simulate
from spanwise.overlap.fx.files import load_graphs
from spanwise.overlap.optimize import optimize
from tests.cli.commands import run

SMALL = [
    "overlap", "--layers", "1", "--dim", "256", "--heads", "8", "--kv-heads", "4", "--ffn", "512", "--vocab", "512",
    "--seq-len", "512", "--dp", "2", "--tp", "2",
]  # fmt: skip

#: Orders beside, with --torch.
BESIDE = ["PyTorch, reorder", "PyTorch, buckets", "spanwise, reorder"]


def orders(graph: dict[str, Any]) -> list[dict[str, Any]]:
    """All orders of a graph, as they are shown."""
    return [graph["before"], *graph["peers"], graph["after"]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """All that one run writes, and what it prints."""
    folder = tmp_path_factory.mktemp("overlap")
    flags = [f"--{name}={folder / f'o.{name}'}" for name in ("html", "json", "trace", "save")]
    result = run(*SMALL, "--torch", *flags)
    assert result.status == 0, result.said
    return folder, result.out


@pytest.fixture(scope="module")
def figures(written: tuple[Path, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written[0] / "o.json").read_text())
    return found


def test_figures_are_those_of_optimize(written: tuple[Path, str], figures: dict[str, Any]) -> None:
    graphs = load_graphs(written[0] / "o.save")
    assert figures["groups"] == {"dp": [0, 2], "tp": [0, 1]}
    for name in ("forward", "backward"):
        result = optimize(graphs.graphs[name], CostModel(H100, ranks=graphs.ranks))
        found = figures["graphs"][name]
        assert found["after"]["makespan"] == pytest.approx(result.timeline.makespan)
        assert found["before"]["makespan"] == pytest.approx(result.before.makespan)
        assert found["after"]["bound"] == pytest.approx(result.bounds.makespan)
        assert found["after"]["peak_bytes"] == result.timeline.peak_bytes <= found["budget_bytes"] == result.budget
        assert found["nodes"] == len(graphs.graphs[name].graph.nodes)
        assert result.report(graphs.labels) in written[1], "the text of a schedule is that of Result.report"
        for order in orders(found):
            cells = order["name"], units.milliseconds(order["makespan"]), units.milliseconds(order["exposed"])
            assert any(all(cell in line for cell in cells) for line in written[1].splitlines()), cells
    names = [f"{graph}, {one['name']}" for graph, of in figures["graphs"].items() for one in orders(of)]
    events = json.loads((written[0] / "o.trace").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == names
    page = (written[0] / "o.html").read_text()
    assert "default-src 'none'" in page and not re.search(r"<script|(src|href)=", page)
    assert page.count("<svg") == len(names)


@pytest.mark.compiles
def test_pytorch_s_pass_beside(figures: dict[str, Any]) -> None:
    for found in figures["graphs"].values():
        assert found["note"] == ""
        assert [peer["name"] for peer in found["peers"]] == BESIDE
        reordered, bucketed, ours = found["peers"]
        assert reordered["launches"] == found["before"]["launches"] > bucketed["launches"]
        assert reordered["makespan"] < found["before"]["makespan"]
        assert reordered["bound"] == pytest.approx(found["before"]["bound"])
        # Orders without buckets all count the same collectives; a bucket is one.
        for plain in (reordered, ours):
            assert sum(plain["counts"].values()) == sum(found["before"]["counts"].values())
            assert plain["launches"] == found["before"]["launches"]
        assert sum(bucketed["counts"].values()) <= bucketed["launches"]


# ---------------------------------------------------------------- the page


def test_lanes_of_a_timeline() -> None:
    nodes = (
        Node("cast", Kind.COMPUTE, 1.0), Node("s", Kind.START, 4.0, (0,), "1"), Node("x", Kind.COMPUTE, 1.0),
        Node("w", Kind.WAIT, 0.0, (1,), start=1), Node("view", Kind.COMPUTE, 0.0, (3,)),
    )  # fmt: skip
    timeline = simulate(Dag(nodes))
    compute, group = lanes(timeline, {"1": "dp"})
    assert (compute.label, group.label) == ("compute", "dp")
    assert [(bar.begin, bar.end, bar.kind) for bar in compute.bars] == [
        (0.0, 1.0, "local"), (1.0, 2.0, "local"), (2.0, 5.0, "waited")
    ]  # fmt: skip
    assert [(bar.begin, bar.end, bar.kind) for bar in group.bars] == [
        (1.0, 5.0, "exchange"), (2.0, 5.0, "waited")
    ]  # fmt: skip
    assert compute.bars[2].name == "waits for s (dp)"


def test_thin_bars_are_drawn_together() -> None:
    """Ten thousand bars of a hundredth of a pixel become a hundred or so, and none is left out."""
    bars = tuple(Bar(i * 0.01, (i + 1) * 0.01, "local", f"n{i}") for i in range(10_000))
    drawn = merged(bars, 1.0)
    assert 40 < len(drawn) < 120 and sum(count for _, count in drawn) == len(bars)
    assert drawn[0][0].begin == 0.0 and drawn[-1][0].end == pytest.approx(100.0)
    thick = tuple(Bar(2.0 * i, 2.0 * i + 2.0, "local", f"n{i}") for i in range(5))
    assert [bar for bar, _ in merged(thick, 1.0)] == list(thick)


# ---------------------------------------------------------------- context parallelism


@pytest.mark.compiles
@pytest.mark.parametrize("exchange", ["needed", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_the_exchange_of_keys_and_values_is_hidden(exchange: str, tmp_path: Path) -> None:
    result = run(*SMALL, "--layers", 1, "--cp", 2, "--exchange", exchange, "--json", tmp_path / "o.json", "--no-bucket")
    assert result.status == 0, result.said
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["groups"]["cp (K/V)"] == [0, 2]
    of_cp = [one for g in found["graphs"].values() for one in g["collectives"] if one["group"] == "cp (K/V)"]
    assert len(of_cp) == len(found["graphs"])  # of one layer; in the forward no compute is independent of it
    assert sum(one["exposed"] for one in of_cp) < 0.6 * sum(one["ms"] for one in of_cp)
    assert "cp (K/V)" in result.out


# ---------------------------------------------------------------- graph files


def test_saved_graphs_are_the_same(written: tuple[Path, str], figures: dict[str, Any], tmp_path: Path) -> None:
    folder, _ = written
    result = run("overlap", "--trust", "--load", folder / "o.save", "--json", tmp_path / "again.json")
    assert result.status == 0, result.said
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["groups"] == figures["groups"]

    for name, graph in again["graphs"].items():
        assert graph == {**figures["graphs"][name], "peers": [], "note": ""}


class Gathered(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, "0")
        y = (x @ x.T).relu()
        return torch.ops._c10d_functional.wait_tensor(gathered).sum() + y.sum()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export's own
def test_a_program_of_torch_export_with_open_sizes(tmp_path: Path) -> None:
    file = tmp_path / "m.pt2"
    dist.init_process_group("fake", rank=0, world_size=2, store=_torch.fake_store())
    rows = torch.export.Dim("rows", min=4, max=4096)
    program = torch.export.export(Gathered(), (torch.randn(16, 16),), dynamic_shapes=({0: rows, 1: None},))
    torch.export.save(program.run_decompositions(), file)
    dist.destroy_process_group()
    unknown = run("overlap", "--trust", "--load", file)
    assert unknown.status == 2 and "no process group '0' here" in unknown.err and "--group NAME=RANKS" in unknown.err
    for size, ranks in ((64, "0=0-1"), (128, "0=0,1")):
        flags = ["--group", ranks, "--dynamic-size", size, "--json", tmp_path / "o.json", "--torch"]
        result = run("overlap", "--trust", "--load", file, *flags)
        assert result.status == 0, result.said
        assert ("cannot run here" in result.out) is not COMPILES
        (one,) = json.loads((tmp_path / "o.json").read_text())["graphs"]["graph"]["collectives"]
        assert (one["operator"], one["group"]) == ("all_gather_into_tensor", "0")
        assert one["num_bytes"] == 2 * size * 16 * 4


class Planted:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_file_runs_code_only_if_it_is_trusted(tmp_path: Path) -> None:
    planted = {"g": zlib.compress(pickle.dumps(Planted(tmp_path / "was-run")))}
    head = {"ranks": {}, "labels": {}}
    torch.save({"spanwise graphs": head, "graphs": planted, "known": {"g": {}}}, tmp_path / "g")
    result = run("overlap", "--load", tmp_path / "g")
    assert result.status == 2 and "may run code as it is read: add --trust" in result.err
    assert not (tmp_path / "was-run").exists()
    with pytest.raises(AttributeError):  # of what the file made, which is no graph
        run("overlap", "--load", tmp_path / "g", "--trust")
    assert (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--graph", "sideways"], "--graph must be both or one of forward, backward, got 'sideways'"),
        (["--budget", 1000], "no order was found that takes 1,000 bytes"),
        (["--group", "1=0-7"], "--group 1=0-7: the groups of the graphs are 1 (dp) of [2], 2 (tp) of [2] ranks"),
    ],
    ids=str,
)
def test_options_that_a_graph_does_not_allow(arguments: list[object], text: str, written: tuple[Path, str]) -> None:
    result = run("overlap", "--trust", "--load", written[0] / "o.save", *arguments)
    assert result.status == 2 and text in result.err


def test_budget_and_buckets(written: tuple[Path, str], tmp_path: Path, figures: dict[str, Any]) -> None:
    peak = figures["graphs"]["backward"]["before"]["peak_bytes"]
    given = ["--trust", "--load", written[0] / "o.save", "--graph", "backward", "--budget", peak, "--no-bucket"]
    result = run("overlap", *given, "--json", tmp_path / "o.json")
    assert result.status == 0, result.said
    found = json.loads((tmp_path / "o.json").read_text())["graphs"]["backward"]
    assert found["after"]["peak_bytes"] <= found["budget_bytes"] == peak
    assert found["after"]["launches"] == found["before"]["launches"]
    assert all(one["members"] == 1 for one in found["collectives"])


def test_groups_by_ranks() -> None:
    for ranks in ((0, 1, 2, 3), (0, 8), tuple(range(0, 64, 8)), (5,), (1, 2, 4)):
        assert parse_groups([f"g={list_ranks(ranks)}"]) == {"g": ranks}
    for wrong in ("1", "1=", "1=a", "1=0,0", "1=-1", "1=3-1"):
        with pytest.raises(ValueError, match="--group takes NAME=RANKS"):
            parse_groups([wrong])
