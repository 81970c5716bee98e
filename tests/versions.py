"""Run the tests on every supported torch and Python, each in an environment of its own, and keep a record.

    python -m tests.versions --only 2.15 -- tests/masks

Environments lie in .versions and go after their run, or stay for the next one with --keep. Tests that fail run once
more, alone: a loaded machine is late for tests that time. The record, tests/results/versions.json, has a row for each
pair; a run replaces the rows that it made.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/results/versions.json"

# torch and Python. Every torch on one Python, every Python on the torch that development uses.
VERSIONS = (
    ("2.11.0", "3.11"), ("2.12.1", "3.11"), ("2.13.0", "3.10"), ("2.13.0", "3.11"), ("2.13.0", "3.12"),
    ("2.13.0", "3.13"), ("2.14.1", "3.11"), ("2.15.0", "3.11"),
)  # fmt: skip

# As `make test` runs them; the Makefile says why.
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "999")
# One after another; a test that ends its worker does not take the record along.
ALONE = ("-n", "1", "--max-worker-restart", "999")

_FACTS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def interpreter(python: str) -> str | None:
    """An interpreter of this version that runs, if the machine has one."""
    found = shutil.which(f"python{python}")
    works = found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0
    return found if works else None


def environment(torch: str, python: str, *, keep: bool) -> Path:
    """Python of an environment with the package, its tools and this torch: a new one, or with `keep` what is there."""
    folder = ROOT / ".versions" / f"torch-{torch}-python-{python}"
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "bin/python").exists():
        found = interpreter(python)
        assert found is not None
        subprocess.run([found, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}", "-e", f"{ROOT}[dev]"], check=True)
    return folder / "bin/python"


def tested(python: Path, junit: Path, selection: Sequence[str]) -> list[str]:
    """Run tests and leave JUnit's file; what it does not tell of pytest's end, if anything."""
    junit.unlink(missing_ok=True)
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    status = subprocess.run([*pytest, *selection], cwd=ROOT, env={**os.environ, "CI": "true"}).returncode
    failed = len(failures(junit))
    return [] if status == int(failed > 0) else [f"pytest ended with status {status} and {failed} failures"]


def outcomes(junit: Path) -> dict[str, str]:
    """ "passed", "failed" or why it was skipped, by test, as pytest takes it."""
    found = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        tags = {child.tag: str(child.get("message")) for child in case}
        outcome = "failed" if tags.keys() & {"failure", "error"} else tags.get("skipped", "passed")
        file, name = str(case.get("classname")).replace(".", "/"), str(case.get("name"))
        # A file that cannot be imported has no class, and its name is that of a module.
        test = f"{file}.py::{name}" if file else f"{name.replace('.', '/')}.py"
        if found.get(test) != "failed":  # what failed in the end has a case of its own
            found[test] = outcome
    return found


def failures(junit: Path) -> list[str]:
    """Tests of a run that failed."""
    return [name for name, outcome in outcomes(junit).items() if outcome == "failed"]


def head() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def row(
    python: Path, junit: Path, again: Path | None, selection: list[str], *, commit: str, early: list[str]
) -> dict[str, Any]:
    """Record of a run that started at `commit`, and of the run of its failures alone at what is checked out.

    `early`: what ended a run before its tests; it counts as failed.
    """
    first, later = outcomes(junit), outcomes(again) if again else {}
    ended = {**first, **later}
    counts = collections.Counter(ended.values())
    passed, failed = counts.pop("passed", 0), [name for name, outcome in ended.items() if outcome == "failed"]
    counts.pop("failed", None)
    versions = subprocess.run([str(python), "-c", _FACTS], capture_output=True, text=True, check=True)
    own, torch = versions.stdout.split()
    return {
        "torch": torch,
        "python": own,
        "commit": commit,
        "commit_alone": head() if again else None,
        "selection": " ".join(selection),
        "passed": passed,
        "skipped": dict(sorted(counts.items())),
        "failed": [*early, *failed],
        "failed_at_first": [name for name, outcome in later.items() if outcome != "failed"],
    }


def record(new: dict[str, Any]) -> None:
    """Write a row, in place of that of the same versions."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [old for old in rows if (old["torch"], old["python"]) != (new["torch"], new["python"])]
    rows = sorted([*rows, new], key=lambda one: (one["torch"], one["python"]))
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> int:
    """1 if a test fails on some version, or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="torch versions that start so")
    parser.add_argument("--python", default="", help="only this Python, as 3.12")
    parser.add_argument("--keep", action="store_true", help="use environments that are there, and leave them")
    parser.add_argument("selection", nargs="*", default=[], help="arguments of pytest; default: -m 'not slow'")
    options = parser.parse_args()
    selection, bad, ran = options.selection or ["-m", "not slow"], False, 0
    for torch, python in VERSIONS:
        if not torch.startswith(options.only) or options.python not in ("", python):
            continue
        if interpreter(python) is None:
            print(f"torch {torch}, Python {python}: not run, this machine has no python{python}")
            continue
        own = environment(torch, python, keep=options.keep)
        junit, again = (ROOT / "runs" / f"versions-{torch}-{python}{part}.xml" for part in ("", "-again"))
        commit = head()
        early = tested(own, junit, [*WORKERS, *selection])
        failed = failures(junit)
        if failed:
            early += tested(own, again, [*ALONE, *failed])
        found = row(own, junit, again if failed else None, selection, commit=commit, early=early)
        record(found)
        print(f"torch {torch}, Python {python}: {found['passed']} passed, failed: {found['failed'] or 'none'}")
        bad, ran = bad or bool(found["failed"]), ran + 1
        if not options.keep:
            shutil.rmtree(own.parents[1])
    return int(bad or not ran)


if __name__ == "__main__":
    sys.exit(main())
