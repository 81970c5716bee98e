"""tests/gpu by pytest, a row for each test as it ends, so that a crash or a hang leaves the others' results."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks.gpu.rows import Context, write_row

_STATUS = {"passed": "ok", "failed": "failed", "skipped": "skipped"}


class Recorder:
    """A plugin of pytest that writes the rows."""

    def __init__(self, context: Context) -> None:
        self.context, self.passed = context, 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        self.passed += report.passed
        # pytest's "E" lines are what the error says; the first of them says what failed.
        text = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        error = "" if not report.failed else (text or [report.longreprtext.strip().split("\n")[-1]])[0][:300]
        status, seconds = _STATUS[report.outcome], round(report.duration, 2)
        write_row(self.context.rows, test=report.nodeid, status=status, seconds=seconds, error=error)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            error = report.longreprtext.strip().split("\n")[-1][:300]
            write_row(self.context.rows, test=report.nodeid, status="failed", seconds=0.0, error=error)


def run(context: Context) -> None:
    recorder = Recorder(context)
    # Options of the project that need plugins are cleared, and warnings of torch and Triton are not ours to fix.
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "tests/gpu"]
    code = pytest.main(arguments, plugins=[recorder])
    if code not in (0, 1):
        sys.exit(int(code))
    if not recorder.passed and not context.dry:
        sys.exit("no test of tests/gpu passed")
