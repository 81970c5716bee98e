"""Run steps one after the other, each in a process of its own, so that none can take another with it.

A step is a command that appends rows, lines of JSON, to a file. A step that hangs is killed with all processes that it
started when its time is up; the rows that it wrote until then are kept, as they are after a crash. Whoever runs the
steps hears of every row at once, so that a kill of the whole campaign loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_LEAST = 3.0  # seconds below which a step is not begun
_PERIOD = 0.5  # seconds between two looks for new rows
_TAIL = 4000  # characters kept of what a failed step printed
_GOOD = ("ok", "not possible", "skipped")


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of the campaign.

    Attributes:
        name: as ``--only`` takes it.
        command: makes the command from the file for rows and the seconds that it has.
        seconds: time limit.
    """

    name: str
    command: Callable[[Path, float], Sequence[str]]
    seconds: float


def run(
    steps: Sequence[Step],
    total: float,
    report: Callable[[Row], None],
    cwd: Path,
    progress: Callable[[list[Row]], None] = lambda results: None,
) -> list[Row]:
    """Run all steps, whatever becomes of each; returns one result for each step.

    A result has ``name``, ``status`` (ok, failed, timeout or skipped), ``seconds``, ``limit``, ``rows`` and ``error``.

    Args:
        total: seconds for all steps together; steps for which no time is left are skipped.
        report: called with each result.
        progress: called with all results whenever there are new rows; a step that still runs is "running".
    """
    results: list[Row] = []
    until = time.monotonic() + total
    for step in steps:
        limit = min(step.seconds, until - time.monotonic())
        if limit < _LEAST:
            result = _result(step, "skipped", 0.0, 0.0, [], f"no time was left of {total:.0f} s")
        else:
            ended = list(results)
            result = _run_one(step, limit, cwd, lambda running, ended=ended: progress([*ended, running]))
        results.append(result)
        report(result)
        progress(results)
    return results


def _result(step: Step, status: str, seconds: float, limit: float, rows: list[Row], error: str) -> Row:
    return {"name": step.name, "status": status, "seconds": round(seconds, 2), "limit": round(limit, 1)} | {
        "rows": rows, "error": error
    }  # fmt: skip


def _run_one(step: Step, limit: float, cwd: Path, changed: Callable[[Row], None]) -> Row:
    with tempfile.TemporaryDirectory(prefix="spanwise-gpu-") as folder:
        file, log = Path(folder, "rows"), Path(folder, "log")
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                step.command(file, limit), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = _watch(
                    process, file, begin + limit,
                    lambda rows: changed(_result(step, "running", time.monotonic() - begin, limit, rows, "")),
                )  # fmt: skip
            finally:
                _end(process)
        seconds, rows = time.monotonic() - begin, read_rows(file)
        said = log.read_text(errors="replace").strip()[-_TAIL:]
    if code is None:
        return _result(step, "timeout", seconds, limit, rows, f"did not end within {limit:.0f} s\n{said}".strip())
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return _result(step, "failed", seconds, limit, rows, f"{how}\n{said}".strip())
    bad = [row for row in rows if row.get("status", "ok") not in _GOOD]
    error = f"{len(bad)} of {len(rows)} rows failed" if bad else "" if rows else "no rows were written"
    return _result(step, "failed" if error else "ok", seconds, limit, rows, error)


def _watch(
    process: subprocess.Popen[bytes], file: Path, until: float, changed: Callable[[list[Row]], None]
) -> int | None:
    """Wait for a step; returns its exit code, None if its time is up."""
    size = 0
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_PERIOD, left))
        if file.exists() and file.stat().st_size != size:
            size = file.stat().st_size
            changed(read_rows(file))
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_row(file: Path, **row: Any) -> None:
    """Append a row; a crash afterwards cannot lose it."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def attempt(file: Path, **row: Any) -> Iterator[Row]:
    """Write a row with what the body puts into the dict; an error makes it a failed row, and goes no further."""
    found: Row = {}
    try:
        yield found
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:400]}"
        write_row(file, **row, **found, status="failed", error=text)
    else:
        write_row(file, **row, **found, status="ok")


def read_rows(file: Path) -> list[Row]:
    """The rows of a file; none if there is no file. A line that a killed process left unfinished is left out."""
    rows = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows
