"""Run the tests on every supported torch and Python, each in an environment of its own, and keep a record.

    python -m tests.versions --only 2.15 -- tests/masks

Environments lie in .versions while they are used. Tests that fail run once more, alone: a loaded machine is late for
tests that time. The record, tests/results/versions.json, has a row for each pair; a run replaces the rows that it made.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/results/versions.json"

# torch and Python. Every torch on one Python, every Python on the torch that development uses.
VERSIONS = (
    ("2.11.0", "3.11"), ("2.12.1", "3.11"), ("2.13.0", "3.10"), ("2.13.0", "3.11"), ("2.13.0", "3.12"),
    ("2.13.0", "3.13"), ("2.14.1", "3.11"), ("2.15.0", "3.11"),
)  # fmt: skip
# As `make test` runs them; and one after another, where a test that ends its worker does not take the record along.
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "999")
ALONE = ("-n", "1", "--max-worker-restart", "999")


def output(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def environment(folder: Path, torch: str, python: str) -> Path:
    """Python of a new environment with the package, its tools and this torch."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={torch}", "-e", f"{ROOT}[dev]"], check=True)
    return folder / "bin/python"


def outcomes(python: Path, junit: Path, selection: list[str]) -> tuple[dict[str, str], list[str]]:
    """Run tests: "passed", "failed" or why it was skipped, by test, as pytest takes it; and what else went wrong."""
    junit.unlink(missing_ok=True)
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *selection]
    status = subprocess.run(pytest, cwd=ROOT, env={**os.environ, "CI": "true"}).returncode
    found: dict[str, str] = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        tags = {child.tag: str(child.get("message")) for child in case}
        file, name = str(case.get("classname")).replace(".", "/"), str(case.get("name"))
        # A file that cannot be imported has no class, and its name is that of a module.
        test = f"{file}.py::{name}" if file else f"{name.replace('.', '/')}.py"
        if found.get(test) != "failed":  # what failed in the end has a case of its own
            found[test] = "failed" if tags.keys() & {"failure", "error"} else tags.get("skipped", "passed")
    expected = int("failed" in found.values())
    return found, [] if status == expected else [f"pytest ended with status {status}"]


def tested(torch: str, python: str, selection: list[str]) -> dict[str, Any]:
    """The row of a pair of versions."""
    folder, junit = (ROOT / name / f"{torch}-{python}" for name in (".versions", "runs"))
    own = environment(folder, torch, python)
    row: dict[str, Any] = {"commit": output("git", "rev-parse", "HEAD"), "commit_alone": None}
    first, early = outcomes(own, junit.with_suffix(".xml"), [*WORKERS, *selection])
    later: dict[str, str] = {}
    if failed := [name for name, outcome in first.items() if outcome == "failed"]:
        later, more = outcomes(own, junit.with_suffix(".again.xml"), [*ALONE, *failed])
        early, row["commit_alone"] = early + more, output("git", "rev-parse", "HEAD")
    counts = collections.Counter((first | later).values())
    row["torch"] = output(own, "-c", "import torch; print(torch.__version__)")
    row["python"] = output(own, "-c", "import platform; print(platform.python_version())")
    row |= {"selection": " ".join(selection), "passed": counts.pop("passed", 0)}
    row["failed"] = early + [name for name, outcome in (first | later).items() if outcome == "failed"]
    row["failed_at_first"] = [name for name, outcome in later.items() if outcome != "failed"]
    row["skipped"] = dict(sorted((counts - collections.Counter({"failed": counts["failed"]})).items()))
    shutil.rmtree(folder)
    return row


def main() -> int:
    """1 if a test fails on some version, or none could run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="torch versions that start so")
    parser.add_argument("--python", default="", help="only this Python, as 3.12")
    parser.add_argument("selection", nargs="*", help="arguments of pytest; default: -m 'not slow'")
    options = parser.parse_args()
    bad, ran = False, 0
    for torch, python in VERSIONS:
        if not torch.startswith(options.only) or options.python not in ("", python):
            continue
        if shutil.which(f"python{python}") is None:
            print(f"torch {torch}, Python {python}: not run, this machine has no python{python}")
            continue
        new = tested(torch, python, options.selection or ["-m", "not slow"])
        rows = [old for old in json.loads(RESULTS.read_text())
                if (old["torch"], old["python"]) != (new["torch"], new["python"])]  # fmt: skip
        rows = sorted([*rows, new], key=lambda one: (one["torch"], one["python"]))
        RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
        print(f"torch {torch}, Python {python}: {new['passed']} passed, failed: {new['failed'] or 'none'}")
        bad, ran = bad or bool(new["failed"]), ran + 1
    return int(bad or not ran)


if __name__ == "__main__":
    sys.exit(main())
