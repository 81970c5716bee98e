"""``spanwise plan``: what it reads, what it refuses, and the figures it writes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask, make_plan
from spanwise.cli.lengths import choose_sequence, read_lengths
from spanwise.cli.options import PlanOptions
from spanwise.cli.plan import build_masks
from tests.cli.commands import figures_of, run, write

SHAPE = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)


def test_advice(tmp_path: Path) -> None:
    """--advise prints and writes what `advise` gives."""
    shape = dict(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=1024, vocab_size=1000)
    config, out = write(tmp_path / "config.json", json.dumps(shape)), tmp_path / "advice.json"
    said = run("plan", "--documents", write(tmp_path / "l.json", "[3000, 500]"), "--advise", config, "--ranks", 2,
               "--json", out).out  # fmt: skip
    found = spanwise.advise(config, [3000, 500], 2)
    assert str(found) in said and json.loads(out.read_text())["choices"][0]["seconds"] == found.best.seconds


# ---------------------------------------------------------------- document lengths

FORMS = {
    "list.json": "[3, 0, 5]",
    "offsets.json": '{"cu_seqlens": [0, 3, 3, 8], "ids": [1, 2, 3]}',
    "named.json": '{"offsets": [0, 3, 3, 8], "ids": [1, 2, 3]}',
    "lines.csv": "3\n0\n\n5\n",
    "table.csv": "id,num_tokens\na,3\nb,0\nc,5\n",
    "tabs.tsv": "cu_seqlens\tid\n0\ta\n3\tb\n3\tc\n8\td\n",
    "bom.csv": "\ufefflength\n3\n0\n5\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_lengths_in_every_form(name: str, tmp_path: Path) -> None:
    rows = read_lengths(write(tmp_path / name, FORMS[name]))
    assert [row.tolist() for row in rows] == [[3, 0, 5]] and rows[0].dtype == np.int64


#: Texts that hold no lengths, by file name; the place and the value that the error names.
WRONG = [
    ("a.json", "[3, 4,\n 5,]", "line 2 column"), ("a.json", "[3, true]", r"\[1\].*True"),
    ("a.json", "[3, 2.5]", r"\[1\].*2\.5"), ("a.json", "[[2], []]", r"\[1\] holds 0"),
    ("a.json", "[2147483647, 1]", "2,147,483,648"), ("a.json", '{"x": [1], "y": [2]}', r"\['x', 'y'\]"),
    ("a.json", '{"cu_seqlens": [0, 5, 4]}', r"'cu_seqlens'\[2\].*4"),
    ("a.csv", "id,length\na,3\nb\n", r"\[1, 2\] columns"), ("a.csv", "id,length\na,3\n\nb,-1\n", r"\[1\].*-1"),
    ("a.csv", "3,4\n", "line 1"), ("binary.csv", "\udcff", "UTF-8|utf-8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "error"), WRONG)
def test_bad_lengths_name_file_place_and_value(name: str, text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(name) + f"(?s:.*)(?:{error})"):
        read_lengths(tmp_path / name)


# ---------------------------------------------------------------- which sequence


def chosen(**options: Any) -> tuple[list[int], str]:
    cu_seqlens, source = choose_sequence(PlanOptions(**options))
    return cu_seqlens.tolist(), source


def test_documents_are_packed_in_order_and_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "d.json", "[3, 9, 0, 4, 4]")
    every = [chosen(documents=path, seq_len=8, sequence=i) for i in range(3)]
    assert [cu for cu, _ in every] == [[0, 3, 8], [0, 4, 8], [0, 4]]
    assert all(f"sequence {i} of 3, counted from 0" in source for i, (_, source) in enumerate(every))
    assert chosen(documents=path)[0] == [0, 3, 12, 12, 16, 20]
    with pytest.raises(ValueError, match="--sequence 3 does not exist: there are 3"):
        chosen(documents=path, seq_len=8, sequence=3)
    several = write(tmp_path / "s.json", "[[3, 9], [5]]")
    assert chosen(documents=several, sequence=1)[0] == [0, 5]
    with pytest.raises(ValueError, match="holds 2 sequences that are packed already"):
        chosen(documents=several, seq_len=4)


def test_masks_of_layers() -> None:
    cu = np.array([0, 30, 100])
    causal, near = SpanMask.documents(cu), SpanMask.documents(cu, window=(8, 0))
    assert build_masks(PlanOptions(layers=5), cu) == ({"default": causal}, {"default": 5})
    assert build_masks(PlanOptions(layers=5, window=(8,)), cu) == ({"default": near}, {"default": 5})
    two = build_masks(PlanOptions(layers=5, window=(8,), window_layers=4), cu)
    assert two == ({"window": near, "whole": causal}, {"window": 4, "whole": 1})
    both = SpanMask.documents(cu, causal=False, window=(8, 3))
    assert build_masks(PlanOptions(window=(8, 3), bidirectional=True), cu)[0] == {"default": both}


# ---------------------------------------------------------------- the command


def test_command_from_lengths_to_files(tmp_path: Path) -> None:
    path = write(tmp_path / "docs of a run.json", "[700, 60, 1288, 52, 1996]")
    arguments = ["--documents", path, "--ranks", "4", "--layers", "6", "--window", "200", "--window-layers", "4"]
    arguments += ["--block-size", "32", "--html", str(tmp_path / "o.html")]
    done, figures = figures_of(tmp_path / "o.json", "plan", *arguments)
    offsets = [0, 700, 760, 2048, 2100, 4096]
    masks, weights = build_masks(PlanOptions(layers=6, window=(200,), window_layers=4), np.array(offsets))
    plan = make_plan(masks, 4, weights=weights, block_size=32, cu_seqlens=offsets, **SHAPE)
    assert figures["fingerprint"] == plan.fingerprint and figures["predicted_seconds"] == plan.predict()
    assert figures["document_tokens"] == np.diff(offsets).tolist()
    assert figures["tokens_per_rank"] == plan.layout.tokens_per_rank.tolist()
    for row in figures["masks"]:
        name = row["name"]
        assert row["work_pairs"] == plan.work(name).tolist() and row["local_pairs"] == plan.local_work(name).tolist()
        for figure in ("recv_bytes", "recv_tokens", "needed_tokens", "resident_bytes", "saved_bytes"):
            assert row[figure] == getattr(plan, figure)(name).tolist(), figure
        assert row["traffic_tokens"] == plan.traffic(name).tolist()
        assert (row["layers"], row["imbalance"]) == (weights[name], plan.imbalance(name))
        assert len(row["timeline"]) == len(plan.timeline(name).intervals)
    assert plan.explain() in done.out, "the text of a plan is that of Plan.explain"
    assert "5 documents of 52 to 1,996 tokens, median 700" in done.out
    assert plan.fingerprint in (tmp_path / "o.html").read_text()
    assert shlex.split(figures["command"])[:-2] == ["spanwise", "plan", *arguments]


def test_trading_ranks_and_memory(tmp_path: Path) -> None:
    out, page = tmp_path / "p.json", tmp_path / "p.html"
    sequence = ("plan", "--seq-len", 4096)
    given = (*sequence, "--ranks", 8, "--inner", 2, "--exchange", "ring", "--html", page)
    done, figures = figures_of(out, *given)
    plan = make_plan(SpanMask.causal(4096), (4, 2), exchange="ring", cu_seqlens=[0, 4096], **SHAPE)
    assert figures["inner"] == 2 and figures["fingerprint"] == plan.fingerprint
    assert figures["masks"][0]["resident_bytes"] == plan.resident_bytes().tolist()
    assert "heads traded (Ulysses) among 2 ranks" in done.said and "among 2 ranks" in page.read_text()
    assert "Held for the exchange" in page.read_text()
    least = plan.replace(exchange="ring").resident_bytes().max()
    _, figures = figures_of(out, *sequence, "--ranks", 4, "--memory-budget", least)
    assert figures["exchange"] == "ring"
