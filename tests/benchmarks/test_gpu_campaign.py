"""The campaign of `make gpu`: a step cannot take another with it, and all of it runs on a CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import step_parity, step_syncs
from benchmarks.gpu.calls import call_of_a_rank
from benchmarks.gpu.campaign import Step, read_rows, run, write_row
from benchmarks.gpu.steps import LIMIT, NAMES, make_steps
from benchmarks.gpu.worlds import Here, NotPossible, World
from spanwise import SpanMask
from tests.limits import HANG
from tests.ranks.harness import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_gpu  # noqa: E402


def script(name: str, text: str, seconds: float = HANG) -> Step:
    """A step that runs `text`; `rows` is its file."""
    begin = "import sys, json, os, time, subprocess; rows = open(sys.argv[1], 'a', buffering=1)\n"
    return Step(name, lambda rows, limit: [sys.executable, "-c", begin + text, str(rows)], seconds)


WRITES = "rows.write(json.dumps({'what': 1}) + '\\n')\n"


@pytest.mark.slow
def test_steps_survive_failures_crashes_and_hangs_of_others(tmp_path: Path) -> None:
    child, pid_file = tmp_path / "child.py", tmp_path / "pid"
    child.write_text("import os, sys, time\nopen(sys.argv[1], 'w').write(f'{os.getpid()} ')\ntime.sleep(600)")
    starts_child = (
        f"subprocess.Popen([sys.executable, {str(child)!r}, {str(pid_file)!r}])\n"
        f"while not os.path.exists({str(pid_file)!r}) or not open({str(pid_file)!r}).read(): time.sleep(0.05)\n"
    )
    steps = [
        script("good", WRITES),
        script("raises", WRITES + "raise ValueError('planted')"),
        script("crashes", WRITES + "os.abort()"),
        script("hangs", WRITES + starts_child + "rows.write('{')\ntime.sleep(600)", 8.0),
        script("writes nothing", ""),
        script("bad row", "rows.write(json.dumps({'status': 'failed'}) + '\\n')"),
        script("refused row", "rows.write(json.dumps({'status': 'not possible'}) + '\\n')"),
        script("last", WRITES),
    ]
    seen: list[dict[str, Any]] = []
    results = run(steps, HANG, seen.append, ROOT)
    assert seen == results
    status = {result["name"]: result["status"] for result in results}
    assert status == {
        "good": "ok", "raises": "failed", "crashes": "failed", "hangs": "timeout", "writes nothing": "failed",
        "bad row": "failed", "refused row": "ok", "last": "ok",
    }  # fmt: skip
    of = {result["name"]: result for result in results}
    assert "planted" in of["raises"]["error"] and "signal 6" in of["crashes"]["error"]
    assert all(of[name]["rows"] == [{"what": 1}] for name in ("good", "raises", "crashes", "hangs", "last"))
    pid = int(pid_file.read_text())
    while _runs(pid):  # what the hanging step had started ends with it
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_rows_are_known_while_a_step_runs() -> None:
    seen: list[Any] = []
    run([script("slow", WRITES + "time.sleep(600)", 4.0)], HANG, lambda result: None, ROOT, seen.append)
    assert [(step["status"], step["rows"]) for (step,) in seen] == [
        ("running", [{"what": 1}]),
        ("timeout", [{"what": 1}]),
    ]


def test_time_for_all_steps_is_limited() -> None:
    results = run([script("hangs", "time.sleep(600)"), script("late", WRITES)], 3.5, lambda result: None, ROOT)
    assert [result["status"] for result in results] == ["timeout", "skipped"]
    assert results[0]["seconds"] < HANG
    assert sum(step.seconds for step in make_steps("cuda")) <= LIMIT


CELLS: list[dict[str, Any]] = [
    {"does": "is fine"}, {"does": "raises on all"}, {"does": "raises on one"}, {"does": "is fine"}, {"does": "hangs"},
    {"does": "is fine"}, {"does": "ends"}, {"does": "cannot"}, {"does": "is fine"},
]  # fmt: skip


def cell(cell: dict[str, Any], here: Here) -> dict[str, Any]:
    does = cell["does"]
    if does == "raises on all" or (does == "raises on one" and here.rank == 1):
        raise ValueError("planted")
    if does == "hangs" and here.rank == 1:
        time.sleep(HANG)
    if does == "ends" and here.rank == 1:
        os._exit(9)
    if does == "cannot":
        raise NotPossible("no such thing")
    return {"error of a rank": 0.5 * here.rank}


@pytest.mark.slow
def test_a_world_goes_on_after_bad_cells(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    World(2, "gloo", "cpu", __name__, "cell", cell_seconds=5.0, start="forkserver").run(
        CELLS, rows, time.monotonic() + HANG
    )
    found = read_rows(rows)
    assert [row["does"] for row in found] == [cell["does"] for cell in CELLS]
    fine = ["is fine", "cannot"]
    assert [row["status"] for row in found] == [
        "not possible" if row["does"] == "cannot" else "ok" if row["does"] in fine else "failed" for row in found
    ]
    assert found[0]["error of a rank"] == 0.5  # the largest of all ranks
    assert "planted" in found[1]["error"] and "rank 1" in found[2]["error"]
    assert "did not end" in found[4]["error"] and "9" in found[6]["error"] and "no such thing" in found[7]["error"]


@pytest.mark.slow
def test_a_world_of_spawned_processes(tmp_path: Path) -> None:
    """As on CUDA."""
    World(2, "gloo", "cpu", __name__, "cell").run(CELLS[:1], tmp_path / "rows", time.monotonic() + HANG)
    assert [row["status"] for row in read_rows(tmp_path / "rows")] == ["ok"]


def test_a_world_without_time_skips(tmp_path: Path) -> None:
    World(1, "gloo", "cpu", __name__, "cell").run(CELLS, tmp_path / "rows", time.monotonic())
    assert {row["status"] for row in read_rows(tmp_path / "rows")} == {"skipped"}


def _dry(tmp_path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    out = tmp_path / "gpu.json"
    code = command.main(["--dry", "--out", str(out), "--only", *names])
    found = json.loads(out.read_text())
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
    assert [row["exchange"] for row in found["syncs"]["rows"]] == list(step_syncs.EXCHANGES)
    assert all(row["collectives"] for row in found["syncs"]["rows"])


@pytest.mark.parametrize("exchange", ["needed", "all_gather", "ring"])
def test_a_replayed_rank_receives_what_its_plan_says(exchange: str) -> None:
    mask = SpanMask.documents([0, 100, 600, 2000])
    with call_of_a_rank(mask, 8, "sdpa", torch.device("cpu"), torch.float32, exchange=exchange) as call:
        call.attend()
        assert call.group.received == call.plan.recv_bytes()[call.group.rank()] > 0


@pytest.mark.parametrize("exchange", ["needed, 2 chunks", "needed, refetched", "all_gather", "ring", "ulysses"])
def test_cells_of_parity(exchange: str) -> None:
    """A cell of the step for each exchange, on threads; the dry run of all steps has all cells, on processes."""
    world = World(2, "gloo", "cpu", step_parity.__name__, "cell")
    row = {"what": "attention", "mask": "documents", "exchange": exchange, "kernel": "sdpa", "dtype": "float32"}

    def on_rank(rank: int, mesh: Any) -> dict[str, Any]:
        return step_parity.cell(row, Here(world, rank, torch.device("cpu"), mesh, None))

    for result in run_ranks(2, on_rank):
        _check_attention(result)


@pytest.mark.slow
def test_dry_run_of_all_steps(tmp_path: Path) -> None:
    found = _dry(tmp_path, NAMES)
    assert all(step["rows"] for step in found.values())
    assert {row["status"] for row in found["tests"]["rows"]} <= {"skipped", "ok"}
    assert {row["status"] for row in found["parity"]["rows"]} == {"ok"}
    for row in found["parity"]["rows"]:
        if row["what"] == "attention":
            _check_attention(row)


def test_a_dry_run_needs_no_gpu_and_a_real_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit):
        command.main([])
    assert "--dry" in capsys.readouterr().err


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    write_row(tmp_path / "rows", a=1)
    with (tmp_path / "rows").open("a") as file:
        file.write('{"b": ')
    assert read_rows(tmp_path / "rows") == [{"a": 1}]
