"""The campaign of `make gpu`: a row cannot take another with it, and all of it runs on a CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command, steps
from benchmarks.gpu.replay import call_of_a_rank
from benchmarks.gpu.runner import Here, NotPossible, Row, Step
from benchmarks.gpu.steps import EXCHANGES, STEPS
from spanwise import SpanMask
from tests.limits import HANG
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_gpu  # noqa: E402

DOES = ["is fine", "raises", "hangs", "is fine", "ends", "cannot", "is fine"]


def fill(here: Here, found: Row, row: Row) -> None:
    if row["does"] == "raises" and here.rank == 1:
        raise ValueError("planted")
    if row["does"] == "hangs" and here.rank == 1:
        time.sleep(HANG)
    if row["does"] == "ends" and here.rank == 1:
        os._exit(9)
    if row["does"] == "cannot":
        raise NotPossible("no such thing")
    found["rank"] = here.rank


@pytest.mark.slow
def test_a_step_goes_on_after_bad_rows() -> None:
    step = Step(lambda dry: [{"does": one} for one in DOES], fill, HANG, size=2, backend="gloo")
    seen: list[int] = []
    found = step.run(True, HANG, lambda rows: seen.append(len(rows)))
    assert [row["does"] for row in found] == DOES and seen == sorted(seen) and len(set(seen)) > 2
    status = {"is fine": "ok", "cannot": "not possible"}
    assert [row["status"] for row in found] == [status.get(one, "failed") for one in DOES]
    assert found[0]["rank"] == 0
    assert "planted" in found[1]["error"] and "9" in found[4]["error"] and "no such thing" in found[5]["error"]


def _run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = command.main(["--dry", "--out", str(tmp_path / "gpu.json"), *arguments])
    return code, json.loads((tmp_path / "gpu.json").read_text())


def _raises(here: Here, found: Row, row: Row) -> None:
    raise KeyError("absent")


@pytest.mark.slow
def test_a_step_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = STEPS["environment"]
    monkeypatch.setattr(command, "STEPS", {"bad": good._replace(fill=_raises), "environment": good})
    code, found = _run(tmp_path)
    assert code == 1
    assert [(step["status"], len(step["rows"])) for step in found["steps"]] == [("failed", 1), ("ok", 1)]
    assert "KeyError: 'absent'" in found["steps"][0]["rows"][0]["error"]
    assert {step["status"] for step in _run(tmp_path, "--seconds", "1")[1]["steps"]} == {"skipped"}


def _dry(tmp_path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    code, found = _run(tmp_path, "--only", *names)
    assert found["dry"] and code == 0, found
    assert [step["name"] for step in found["steps"]] == names
    assert {step["status"] for step in found["steps"]} == {"ok"}
    page = make_gpu.results({**found, "dry": False})  # as of a GPU: every row has a place on the page
    assert all(f"| {name} | ok |" in page for name in names)
    return {step["name"]: step for step in found["steps"]}


def _check_attention(row: dict[str, Any]) -> None:
    assert 0 < max(row[name] for name in ("out", "dq", "dk", "dv")) < 0.035


def test_dry_run(tmp_path: Path) -> None:
    """The steps that take few seconds."""
    found = _dry(tmp_path, ["environment", "syncs"])
    assert found["environment"]["rows"][0]["torch"]
    assert [row["exchange"] for row in found["syncs"]["rows"]] == list(EXCHANGES)
    assert all(row["collectives"] for row in found["syncs"]["rows"])


@pytest.mark.parametrize("exchange", ["needed", "all_gather", "ring"])
def test_a_replayed_rank_receives_what_its_plan_says(exchange: str) -> None:
    mask = SpanMask.documents([0, 100, 600, 2000])
    with call_of_a_rank(mask, 8, "sdpa", torch.device("cpu"), torch.float32, exchange=exchange) as call:
        call.attend()
        assert call.group.received == call.plan.recv_bytes()[call.group.rank()] > 0


@pytest.mark.parametrize("exchange", ["needed, 2 chunks", "needed, refetched", "all_gather", "ring", "ulysses"])
def test_rows_of_parity(exchange: str) -> None:
    """A row of the step for each exchange, on threads; the dry run of all steps has all rows, on processes."""
    row = {"what": "attention", "mask": "documents", "exchange": exchange, "kernel": "sdpa", "dtype": "float32"}

    def of_rank(rank: int, mesh: Any) -> Row:
        found: Row = {}
        steps.parity(Here(True, rank, mesh, print, {}), found, row)
        return found

    for found in run_ranks(2, of_rank):
        _check_attention(found)


@pytest.mark.slow
def test_dry_run_of_all_steps(tmp_path: Path) -> None:
    found = _dry(tmp_path, list(STEPS))
    assert all(step["rows"] for step in found.values())
    assert {row["status"] for row in found["tests"]["rows"]} <= {"skipped", "ok"}
    for name in ("nccl", "parity"):
        assert {row["status"] for row in found[name]["rows"]} == {"ok"}
        for row in found[name]["rows"]:
            _check_attention(row)
