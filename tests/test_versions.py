"""What the record of all versions counts: tests that end their worker, tests with two results, runs that end early."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import versions


def ran(folder: Path, text: str, *options: str) -> tuple[dict[str, str], list[str]]:
    """Outcomes by the name of the test, and what ended the run early, of a file under the suite's own settings."""
    file, junit = folder / "test_it.py", folder / "junit.xml"
    file.write_text(text)
    given = ("-p", "tests.conftest", "-c", "/dev/null", "--rootdir", str(folder), "-m", "", *options, str(file))
    early = versions.tested(Path(sys.executable), junit, given)
    return {name.partition("::")[2]: outcome for name, outcome in versions.outcomes(junit).items()}, early


def test_a_test_that_ends_its_worker_has_failed_and_the_others_run(tmp_path: Path) -> None:
    text = """
import os, pathlib
def test_a(): pass
def test_b():
    with open(pathlib.Path(__file__).with_name("runs"), "a") as file:
        file.write("run ")
    os._exit(3)
def test_c(): pass
"""
    own = [*versions.WORKERS, "-n", "1"]
    assert ran(tmp_path, text, *own) == ({"test_a": "passed", "test_b": "failed", "test_c": "passed"}, [])
    assert (tmp_path / "runs").read_text() == "run "


@pytest.mark.parametrize("order", [0, 1])
def test_a_test_with_two_results_has_failed(tmp_path: Path, order: int) -> None:
    case = '<testcase classname="tests.test_x" name="test_y">{}</testcase>'
    cases = [case.format('<error message="crashed" />'), case.format("")]
    (tmp_path / "x").write_text(f"<testsuite>{cases[order]}{cases[1 - order]}</testsuite>")
    assert versions.failures(tmp_path / "x") == ["tests/test_x.py::test_y"]


def test_a_run_that_ends_early_has_failed(tmp_path: Path) -> None:
    text = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.exit('all', 7)\n"
    outcomes, early = ran(tmp_path, text, "-p", "no:xdist")
    assert early == ["pytest ended with status 7 and 0 failures"] and outcomes["test_a"] == "passed"
