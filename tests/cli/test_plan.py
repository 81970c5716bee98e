"""``spanwise plan``: what it reads, what it refuses and how it says so, and the figures it writes."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import spanwise
from benchmarks.plan import document_offsets
from spanwise import GlobalBatches
from spanwise import hardware as cost
from spanwise.cli import plan as plan_command
from spanwise.cli.app import app
from spanwise.cli.hardware import load_hardware
from spanwise.cli.lengths import read_lengths
from spanwise.cli.overlap import OverlapOptions
from spanwise.cli.plan import PlanOptions, build_masks, describe_masks, parse_ranks, parse_window
from spanwise.cli.report import units
from spanwise.cli.report.compare import Degree, _recommend, compare
from spanwise.cli.report.grids import summary
from spanwise.cli.sequence import SEQ_LIMIT, choose_sequence
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.grids import compare_grids
from spanwise.planning.make_plan import make_plan


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------- document lengths

FORMS = {
    "list.json": "[3, 0, 5]",
    "key.json": '{"name": "run 7", "lengths": [3, 0, 5]}',
    "offsets.json": '{"cu_seqlens": [0, 3, 3, 8], "ids": [1, 2, 3]}',
    "any.json": '{"seq": [3, 0, 5.0]}',
    "lines.csv": "3\n0\n\n5\n",
    "lines.txt": "3\r\n0\r\n5",
    "header.csv": "length\n3\n0\n5\n",
    "table.csv": "id,num_tokens\na,3\nb,0\nc,5\n",
    "semicolon.csv": "id;length\na;3\nb;0\nc;5\n",
    "tabs.tsv": "cu_seqlens\tid\n0\ta\n3\tb\n3\tc\n8\td\n",
    "bom.csv": "\ufefflength\n3\n0\n5\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_lengths_in_every_form(name: str, tmp_path: Path) -> None:
    rows = read_lengths(write(tmp_path / name, FORMS[name]))
    assert [row.tolist() for row in rows] == [[3, 0, 5]]
    assert rows[0].dtype == np.int64


def test_lengths_by_name_and_several_sequences(tmp_path: Path) -> None:
    table = write(tmp_path / "t.csv", "length,packed\n1,7\n2,9\n")
    assert read_lengths(table, "packed")[0].tolist() == [7, 9]
    several = write(tmp_path / "s.json", '{"cu": 1, "cu_seqlens": [[0, 2, 5], [0, 4]]}')
    assert [row.tolist() for row in read_lengths(several)] == [[2, 3], [4]]


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.json", "[3, 4,\n 5,]", r"a\.json, line 2, column \d+: not JSON"),
        ("a.json", "[3, -4]", r"a\.json\[1\]: expected no negative number, found -4"),
        ("a.json", '[3, "12k"]', r"a\.json\[1\]: expected a whole number of tokens, found '12k'"),
        ("a.json", "[3, true]", r"a\.json\[1\]: expected a whole number of tokens, found True"),
        ("a.json", "[3, 2.5]", r"a\.json\[1\]: expected a whole number of tokens, found 2\.5"),
        ("a.json", "[[1], 3]", r"a\.json\[0\]: expected a whole number of tokens, found \[1\]"),
        ("a.json", "[3, NaN]", r"a\.json\[1\]: expected a whole number of tokens, found nan"),
        ("a.json", "7", r"a\.json: expected a list of document lengths, found 7"),
        ("a.json", "[]", r"a\.json holds no document"),
        ("a.json", "[[2], []]", r"a\.json\[1\] holds no document"),
        ("a.json", "[0, 0]", r"a\.json holds 0 tokens; a sequence has between 1"),
        (
            "a.json",
            '{"x": [1], "y": [2]}',
            r"which key of \['x', 'y'\] holds the document lengths\? name it with --column",
        ),
        (
            "a.json",
            '{"cu_seqlens": [0, 5, 4]}',
            r"'cu_seqlens'\[2\]: expected offsets that do not fall .* 5\), found 4",
        ),
        ("a.json", '{"cu_seqlens": [1, 5]}', r"'cu_seqlens'\[0\]: offsets start at 0, found 1"),
        ("a.csv", "3\nfour\n", r"a\.csv, line 2: expected a whole number of tokens, found 'four'"),
        ("a.csv", "id,length\na,3\nb\n", r"a\.csv, line 3: 1 columns, the header has 2"),
        ("a.csv", "id,length\na,3\n\nb,-1\n", r"a\.csv, line 4: expected no negative number, found -1"),
        ("a.csv", "3,4\n", r"a\.csv, line 1: 2 columns and no header that names them"),
        ("a.csv", "a,b\n1,2\n", r"which column of \['a', 'b'\] holds the document lengths"),
        ("a.csv", "\n \n", r"a\.csv is empty"),
        ("a.csv", '"1\n2\n3', r"a\.csv, line 3: not CSV: unexpected end of data"),
        ("a.csv", '3\n"1\n2"', r"a\.csv, line 3: expected a whole number of tokens, found '1\\n2'"),
        ("a.csv", "3\n" + "4" * 200_000, r"a\.csv, line 2: not CSV: field larger than field limit"),
        ("a.json", f"[{'9' * 5000}]", r"a\.json holds a number of thousands of digits"),
    ],
)
def test_bad_lengths_name_file_place_and_value(name: str, text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=error):
        read_lengths(write(tmp_path / name, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json does not exist; --documents takes"):
        read_lengths(tmp_path / "nowhere.json")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot read --documents .*binary\.csv: it is not UTF-8"):
        read_lengths(tmp_path / "binary.csv")
    with pytest.raises(ValueError, match="cannot read --documents .*: Is a directory"):
        read_lengths(tmp_path)
    with pytest.raises(ValueError, match=r"has no column 'b' with lengths; it has \['a'\]"):
        read_lengths(write(tmp_path / "a.csv", "a\n1\n"), "b")
    with pytest.raises(ValueError, match="holds no object with keys, so --column b names nothing"):
        read_lengths(write(tmp_path / "a.json", "[1]"), "b")


# ---------------------------------------------------------------- which sequence


def test_documents_are_packed_in_order_and_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", "[3, 9, 0, 4, 4]")
    every = [choose_sequence(documents=path, seq_len=8, sequence=i) for i in range(3)]
    assert [cu.tolist() for cu, _ in every] == [[0, 3, 8], [0, 4, 8], [0, 4]]
    assert [(source.sequence, source.sequences) for _, source in every] == [(0, 3), (1, 3), (2, 3)]
    assert choose_sequence(documents=path)[0].tolist() == [0, 3, 12, 12, 16, 20]
    with pytest.raises(ValueError, match=r"--sequence 3 does not exist: .* with --seq-len 8 gives 3"):
        choose_sequence(documents=path, seq_len=8, sequence=3)


def test_several_sequences_are_not_packed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", "[[3, 9], [5]]")
    cu, source = choose_sequence(documents=path, sequence=1)
    assert cu.tolist() == [0, 5] and "sequence 1 of 2, counted from 0" in source.describe()
    with pytest.raises(ValueError, match="holds 2 sequences that are packed already"):
        choose_sequence(documents=path, seq_len=4)


def test_data_is_packed_in_document_order(tmp_path: Path) -> None:
    for i, size in enumerate((50, 700, 3, 210)):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * size)
    cu, source = choose_sequence(data=(str(tmp_path),), seq_len=128, sequence=2)
    pieces = spanwise.DocumentOrder([52, 702, 5, 212], seed=0, max_document=128).pieces(2 * 128, 128)
    np.testing.assert_array_equal(np.diff(cu), pieces[:, 2] - pieces[:, 1])
    assert source.sequences == -(-(50 + 700 + 3 + 210 + 4 * 2) // 128)
    assert choose_sequence(data=(str(tmp_path),))[0].tolist() == [0, 52, 754, 759, 971]


# ---------------------------------------------------------------- masks


def test_masks_of_layers() -> None:
    cu = np.array([0, 30, 100])
    causal = SpanMask.documents(cu)
    near = SpanMask.documents(cu, window=(8, 0))
    assert build_masks(PlanOptions(layers=5), cu) == ({"default": causal}, {"default": 5})
    assert build_masks(PlanOptions(layers=5, window="8"), cu) == ({"default": near}, {"default": 5})
    assert build_masks(PlanOptions(layers=5, window="8", window_layers=4), cu) == (
        {"window": near, "whole": causal},
        {"window": 4, "whole": 1},
    )
    both = SpanMask.documents(cu, causal=False, window=(8, 3))
    assert build_masks(PlanOptions(window="8,3", bidirectional=True), cu)[0] == {"default": both}
    assert parse_window("8,3", True) == (8, 3) and parse_ranks("8,2,2") == (2, 8)


def test_masks_in_words() -> None:
    assert describe_masks(PlanOptions(), ["default"]) == {"default": "each row reads its document up to itself"}
    notes = describe_masks(PlanOptions(window="800,30", bidirectional=True), ["window", "whole"])
    assert notes["whole"] == "each row reads its whole document"
    assert (
        notes["window"]
        == "each row reads itself, up to 800 tokens before it and up to 30 after it, of its own document"
    )


# ---------------------------------------------------------------- choosing a degree


def degree(ranks: int, seconds: float, alone: float = 8.0) -> Degree:
    speedup = alone / seconds
    return Degree(ranks, "local", "needed", 1, 1, seconds, 0.0, speedup, speedup / ranks, 1.0, 0, 0)


def test_the_largest_efficient_degree_is_recommended() -> None:
    best, reason = _recommend((degree(2, 4.1), degree(4, 2.4), degree(8, 1.6)))
    assert best == 4 and "3.3 × at 83%" in reason and "8 ranks are 1.50 × as fast at 62%" in reason
    best, reason = _recommend((degree(8, 1.8), degree(16, 1.9)))
    assert best == 8 and "no degree keeps 80%" in reason and "56%" in reason
    best, reason = _recommend((degree(4, 2.0), degree(8, 2.5)))
    assert best == 4 and "8 ranks are no faster" in reason
    assert "more ranks were not compared" in _recommend((degree(4, 2.0),))[1]


def test_comparison_is_the_plans_own() -> None:
    mask = SpanMask.documents([0, 900, 1000, 4096])

    def plan_for(ranks: int) -> Any:
        return make_plan(mask, ranks, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=32, weights={"default": 3})

    rows = compare(plan_for, (1, 4)).degrees
    plan = plan_for(4)
    assert rows[0].speedup == rows[0].efficiency == 1 and rows[0].recv_bytes == 0
    assert rows[1].total_seconds == plan.predict()["total"]
    assert rows[1].speedup == plan_for(1).predict()["total"] / plan.predict()["total"]
    assert rows[1].imbalance == plan.imbalance() and rows[1].recv_bytes == 3 * plan.recv_bytes().max()
    assert rows[1].kv_bytes == ((plan.layout.tokens_per_rank + plan.recv_tokens()) * 2 * 128 * 2).max()


# ---------------------------------------------------------------- the command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_command_from_lengths_to_files(tmp_path: Path) -> None:
    path = write(tmp_path / "docs of a run.json", "[700, 60, 1288, 52, 1996]")
    arguments = ["--documents", path, "--ranks", "4", "--layers", "6", "--window", "200", "--window-layers", "4"]
    arguments += ["--block-size", "32", "--compare-ranks", "2,4"]
    outputs = ["--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "o.html")]
    result = invoke(*arguments, *outputs)
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads((tmp_path / "o.json").read_text())

    masks, weights = build_masks(
        PlanOptions(layers=6, window="200", window_layers=4), np.array([0, 700, 760, 2048, 2100, 4096])
    )
    plan = make_plan(
        masks, 4, weights=weights, block_size=32, num_q_heads=32, num_kv_heads=8, head_dim=128,
        cu_seqlens=[0, 700, 760, 2048, 2100, 4096],
    )  # fmt: skip
    assert figures["fingerprint"] == plan.fingerprint
    assert figures["predicted_seconds"] == plan.predict()
    assert [row["ranks"] for row in figures["compare_ranks"]["degrees"]] == [2, 4]
    for row in figures["masks"]:
        assert row["work_pairs"] == plan.work(row["name"]).tolist()
        assert row["local_pairs"] == plan.local_work(row["name"]).tolist()
        assert row["traffic_tokens"] == plan.traffic(row["name"]).tolist()
        assert row["recv_bytes"] == plan.recv_bytes(row["name"]).tolist()
        assert row["layers"] == weights[row["name"]]
        assert len(row["timeline"]) == len(plan.timeline(row["name"]).intervals)
    assert plan.fingerprint in result.stdout and plan.reason in result.stdout.replace("\n", " ")
    assert plan.fingerprint in (tmp_path / "o.html").read_text()

    # The command that the report prints gives the same plan.
    words = shlex.split(figures["command"])
    assert words[:2] == ["spanwise", "plan"]
    again = invoke(*words[2:], "--json", str(tmp_path / "again.json"))
    assert again.exit_code == 0
    assert json.loads((tmp_path / "again.json").read_text())["fingerprint"] == plan.fingerprint
    assert json.loads((tmp_path / "again.json").read_text())["command"] == figures["command"]


def test_commands_and_functions_have_one_default_hardware(tmp_path: Path) -> None:
    offsets = document_offsets(131_072, 1)
    lengths = write(tmp_path / "d.json", json.dumps(np.diff(offsets).tolist()))
    result = invoke("--documents", lengths, "--ranks", "64", "--json", str(tmp_path / "o.json"))
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads((tmp_path / "o.json").read_text())
    shape = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
    plan = make_plan(SpanMask.documents(offsets), 64, **shape)
    assert figures["fingerprint"] == plan.fingerprint and figures["exchange"] == plan.exchange == "hierarchical"
    (batch,) = GlobalBatches(np.diff(offsets), 64, 2048, **shape)
    assert batch.plan == plan
    for options in (PlanOptions(), OverlapOptions()):
        assert load_hardware(options.hardware) is plan.hardware


def test_command_without_ranks_takes_the_recommended_degree(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    result = invoke("--seq-len", "8192", "--compare-ranks", "2,4", "--hardware", "CPU", "--json", str(out))
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(out.read_text())
    assert figures["ranks"] == figures["compare_ranks"]["best"]
    assert figures["hardware"] == cost.CPU_HOST.to_dict()
    assert figures["documents"] == 1 and figures["tokens"] == 8192


def test_trading_ranks_and_memory(tmp_path: Path) -> None:
    """--inner and --memory-budget are make_plan's; the report says who computes what, and what is held."""

    def found(*arguments: str) -> tuple[str, dict[str, Any]]:
        result = CliRunner().invoke(app, ["plan", "--seq-len", "4096", "--json", str(tmp_path / "p.json"), *arguments])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split()), json.loads((tmp_path / "p.json").read_text())

    page = tmp_path / "p.html"
    said, figures = found("--ranks", "8", "--inner", "2", "--exchange", "ring", "--html", str(page))
    plan = make_plan(
        SpanMask.causal(4096), (4, 2), exchange="ring", num_q_heads=32, num_kv_heads=8, head_dim=128,
        dtype="bfloat16", cu_seqlens=[0, 4096],
    )  # fmt: skip
    assert figures["inner"] == 2 and figures["fingerprint"] == plan.fingerprint
    assert figures["masks"][0]["resident_bytes"] == plan.resident_bytes().tolist()
    assert "2 ranks trade heads for tokens (Ulysses, ring between 4 such groups)" in said
    assert "ring, Ulysses inside 2" in said and "for 16 of 32 heads" in said
    assert f"holds at most {units.num_bytes(plan.resident_bytes().max())} a rank" in said
    assert "2 ranks trade heads" in page.read_text() and "Held for the exchange" in page.read_text()
    least = plan.replace(exchange="ring").resident_bytes().max()
    said, figures = found("--ranks", "4", "--memory-budget", str(least))
    assert figures["exchange"] == "ring" and "trade heads" not in said
    said, figures = found("--compare-ranks", "2,4", "--inner", "2", "--exchange", "ring")
    ways = {one["ranks"]: one["inner"] for one in figures["compare_ranks"]["degrees"]}
    assert ways[2] == ways[4] == 2 and "Ranks compared" in said
    result = CliRunner().invoke(app, ["plan", "--seq-len", "4096", "--ranks", "8", "--inner", "3"])
    assert result.exit_code == 2 and "--inner must divide the ranks and --heads, got 3, 8 ranks" in result.stderr


def test_one_plan_and_grids(tmp_path: Path) -> None:
    """--global adds every grid of as many ranks to text, drawing and JSON, as `compare_grids` gives them."""
    lengths = [9000, 300, 0, 500, 2200]
    documents = write(tmp_path / "d.json", json.dumps(lengths))
    out, page = tmp_path / "o.json", tmp_path / "o.html"
    options = ["--documents", documents, "--ranks", "4", "--layers", "3", "--hidden-dim", "1024", "--global"]
    result = invoke(*options, "--json", str(out), "--html", str(page))
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads(out.read_text())
    flops = 3 * 6 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 1024)
    grids = compare_grids(
        lengths, 4, linear_flops=flops, weights={"default": 3}, num_q_heads=32, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    assert figures["grids"] == [grid.as_dict() for grid in grids] and len(grids) == 5
    one, *others = grids
    assert figures["fingerprint"] and figures["tokens_per_rank"] == one.tokens.tolist()
    gain = min(grid.seconds for grid in others) / one.seconds
    said = " ".join(result.output.split())
    assert f"one plan is {gain:.2f} times as fast" in said and "4 × 1 │ longest first" in said
    assert "spanwise plan" in figures["command"] and figures["command"].endswith("--global --hidden-dim 1024")
    drawing = re.findall(r'<svg role="img" aria-labelledby="grids.*?</svg>', page.read_text(), re.DOTALL)[0]
    root = ElementTree.fromstring(drawing)
    bars = [bar for bar in root if bar.tag.endswith("rect") and bar.get("class") == "local"]
    tall = [float(bar.get("height", 0)) for bar in bars]
    most = min(max(grid.seconds for grid in grids), 3 * one.seconds)
    expected = [min(second / most, 1) * 40 for grid in grids for second in grid.attention if second]
    np.testing.assert_allclose(tall, expected, atol=0.006)
    assert f"one plan is {gain:.2f} times as fast" in page.read_text()
    result = invoke(*options, "--max-tokens", "6000", "--json", str(out))
    assert result.exit_code == 0 and "one plan, unequal tokens" in " ".join(result.output.split())
    unequal = json.loads(out.read_text())["grids"][1]
    assert (unequal["assignment"], unequal["dp"], max(unequal["tokens"]) <= 6000) == (
        "one plan, unequal tokens",
        1,
        True,
    )
    result = invoke(*options, "--max-tokens", "2000")
    assert result.exit_code == 2 and "do not fit on 4 ranks of --max-tokens 2,000; give at least 3,000" in result.stderr
    result = invoke("--seq-len", "4096", "--ranks", "4", "--inner", "2", "--global")
    assert result.exit_code == 2 and "--global compares plans without --inner, got --inner 2" in result.stderr
    for given, message in (
        (("--global", "--memory-budget", "5"), "--global compares plans without --memory-budget, got 5; leave it out"),
        (("--global", "--max-tokens", "0"), "--max-tokens must be between 1 and"),
        (("--max-tokens", "5"), "--max-tokens 5 is for --global; add that"),
        (("--hidden-dim", "5"), "--hidden-dim 5 is for --global; add that"),
    ):
        result = invoke("--seq-len", "4096", *given)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split())
    assert summary((one,)) == "one rank has no grids"


def test_counts_of_the_largest_options_fit_their_integers() -> None:
    # Bytes that a rank receives at most: of all tokens, padded to the largest shard for each rank.
    of_a_token = 2 * plan_command._LARGEST["kv_heads"] * plan_command._LARGEST["head_dim"] * 8
    assert plan_command.RANKS_LIMIT * SEQ_LIMIT * of_a_token < 2**63


def test_few_tokens_are_planned_for_few_ranks(tmp_path: Path) -> None:
    result = invoke("--seq-len", "5", "--json", str(tmp_path / "o.json"))
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads((tmp_path / "o.json").read_text())["ranks"] == 5


@pytest.mark.parametrize("name", ["my [/cluster]", "node[red]x", ":x: host"])
def test_names_are_printed_as_they_are(name: str, tmp_path: Path) -> None:
    dataclasses.replace(cost.H100, name=name).save(tmp_path / "mine.json")
    result = invoke("--seq-len", "4096", "--hardware", str(tmp_path / "mine.json"))
    assert result.exit_code == 0, (result.output, result.exception)
    assert f", on {name}\n" in result.stdout  # the title of the table of seconds


def test_data_from_several_paths(tmp_path: Path) -> None:
    files = [write(tmp_path / name, "x" * 400) for name in ("a", "b", "c")]
    result = invoke("--data", *files, "--ranks", "2", "--json", str(tmp_path / "o.json"))
    assert result.exit_code == 0, (result.output, result.exception)
    figures = json.loads((tmp_path / "o.json").read_text())
    assert figures["document_tokens"] == [402] * 3
    assert figures["command"] == "spanwise plan " + " ".join(f"--data {file}" for file in files) + " --ranks 2"


def test_hardware_from_a_file(tmp_path: Path) -> None:
    cost.B200.save(tmp_path / "mine.json")
    result = invoke("--seq-len", "4096", "--hardware", str(tmp_path / "mine.json"), "--json", str(tmp_path / "o.json"))
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads((tmp_path / "o.json").read_text())["hardware"] == cost.B200.to_dict()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("", "nothing to plan: name document lengths with --documents, files with --data, or give --seq-len"),
        ("--documents {tmp}/d.csv", r"d\.csv, line 2: expected a whole number of tokens, found 'x'"),
        ("--documents {tmp}/d.csv --data {tmp}", "--documents and --data both say which documents there are"),
        ("--column length --seq-len 5", "--column length names a part of a --documents file; there is none"),
        ("--data nowhere", "'nowhere' is no file or folder; --data takes files and folders"),
        ("--seq-len 0", "--seq-len must be between 1 and 67,108,864 tokens, got 0"),
        ("--seq-len 99999999999", "--seq-len must be between 1 and 67,108,864 tokens, got 99,999,999,999"),
        ("--seq-len 99 --sequence 1", "--sequence 1 does not exist: --seq-len without documents gives 1"),
        ("--seq-len 99 --window -3", "--window takes LEFT or LEFT,RIGHT, tokens of at least 0, got '-3'"),
        ("--seq-len 99 --window 1,2,3", "--window takes LEFT or LEFT,RIGHT.* got '1,2,3'"),
        ("--seq-len 99 --window 5,5", "no causal row reads a key to its right; add --bidirectional"),
        ("--seq-len 99 --window-layers 1", "--window-layers 1 needs --window"),
        (
            "--seq-len 99 --window 5 --window-layers 3 --layers 2",
            "--window-layers must be between 1 and --layers 2, got 3",
        ),
        ("--seq-len 99 --layers 0", "--layers must be between 1 and 65,536, got 0"),
        (f"--seq-len 99 --layers {10**400}", "--layers must be between 1 and 65,536, got 10,000,"),
        (f"--seq-len 99 --head-dim {10**18}", "--head-dim must be between 1 and 4,096, got 1,000,000,000,000,000,000"),
        (f"--seq-len 99 --block-size {2**70}", "--block-size must be between 1 and 67,108,864, got 1,180,591,620,"),
        ("--seq-len 99 --heads 2000", "--heads must be between 1 and 1,024, got 2,000"),
        ("--seq-len 99 --kv-heads 2000", "--kv-heads must be between 1 and 1,024, got 2,000"),
        ("--seq-len 99 --heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads, got 3 and 2"),
        ("--seq-len 99 --heads 7", "--heads must be a multiple of --kv-heads, got 7 and 8"),
        ("--seq-len 99 --head-dim 0", "--head-dim must be between 1 and 4,096, got 0"),
        ("--seq-len 99 --memory-budget 0", "--memory-budget must be between 1 and .*, got 0"),
        ("--seq-len 99 --ranks 6 --inner 3", "--inner must divide the ranks and --heads, got 3, 6 ranks and 32 heads"),
        (
            "--seq-len 99 --exchange ulysses --ranks 6",
            "ulysses needs ranks that divide --heads, .* got 6 ranks, 32 heads",
        ),
        (
            "--seq-len 99 --exchange ulysses --inner 2",
            "needs ranks that divide --heads, without --inner; .* --inner 2",
        ),
        ("--seq-len 99 --dtype int8", "dtype must be one of .* got 'int8'"),
        ("--seq-len 99 --ranks 0", "--ranks must be between 1 and 99 for a sequence of 99 tokens .* got 0"),
        ("--seq-len 99 --ranks 200000", "--ranks must be between 1 and 99 .* got 200,000"),
        ("--seq-len 9999 --ranks 200000", "--ranks must be between 1 and 1,024 .* got 200,000"),
        ("--seq-len 9999 --compare-ranks 2,200000", "--compare-ranks must be between 1 and 1,024 .* got 200,000"),
        ("--seq-len 99 --balancer best", "unknown balancer 'best'"),
        ("--seq-len 99 --exchange pigeon", "unknown exchange 'pigeon'"),
        ("--seq-len 99 --compare-ranks 2,x", "--compare-ranks takes numbers of ranks such as 2,4,8, got '2,x'"),
        ("--seq-len 99 --compare-ranks 0,2", "--compare-ranks takes numbers of ranks such as 2,4,8, got '0,2'"),
        (
            "--seq-len 99 --hardware h1000",
            "cannot read --hardware 'h1000': No such file.* or one of h100, h200, b200, cpu",
        ),
        ("--seq-len 99 --hardware {tmp}/d.csv", r"d\.csv is not a file written by Hardware\.save"),
        ("--seq-len 99 --html {tmp}/none/o.html", r"cannot write .*none/o\.html: name a file in a folder that exists"),
        ("--seq-len 99 --json /proc/none.json", "cannot write /proc/none.json: No such file.*; name another file"),
        ("--seq-len 99 --json {tmp}", "cannot write .*: name a file in a folder that exists"),
    ],
)
def test_bad_options_are_explained(arguments: str, error: str, tmp_path: Path) -> None:
    write(tmp_path / "d.csv", "3\nx\n")
    result = invoke(*(argument.format(tmp=tmp_path) for argument in arguments.split()))
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.stderr
    assert re.search(error, result.stderr), result.stderr
