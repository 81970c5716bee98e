"""From pytest's JUnit file to a record of a whole test run that can be committed: counts, and where the time goes.

python -m tests.summary runs/test-all.xml tests/results/test-all.json
"""

from __future__ import annotations

import collections
import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import torch


def summary(junit: ET.Element) -> dict[str, Any]:
    """Counts of tests by outcome, reasons of skips, seconds by file, and the slowest tests."""
    outcomes: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    tests: list[tuple[float, str]] = []
    for case in junit.iter("testcase"):
        tags = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[tags[0] if tags else "passed"] += 1
        reasons.update(str(child.get("message")) for child in case if child.tag == "skipped")
        seconds, name = float(case.get("time", 0)), str(case.get("classname"))
        files[name] += seconds  # type: ignore[assignment]
        tests.append((seconds, f"{name}::{case.get('name')}"))
    suite = next(junit.iter("testsuite"))
    return {
        "tests": len(tests),
        "outcomes": dict(outcomes),
        "skipped": dict(reasons),
        "wall_seconds": round(float(suite.get("time", 0))),
        "test_seconds": round(sum(seconds for seconds, _ in tests)),
        "seconds_by_file": {name: round(seconds, 1) for name, seconds in files.most_common() if seconds >= 1},
        "slowest": {name: round(seconds, 1) for seconds, name in sorted(tests, reverse=True)[:20]},
    }


def environment() -> dict[str, Any]:
    """The machine and the versions that a run depends on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "cuda": torch.cuda.is_available(),
    }


def main(junit: str, out: str) -> int:
    """Writes the record; 1 if a test failed, else 0."""
    found = {**environment(), **summary(ET.parse(junit).getroot())}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(json.dumps(found, indent=2) + "\n")
    failed = found["outcomes"].get("failure", 0) + found["outcomes"].get("error", 0)
    print(f"{found['tests']} tests, {failed} failed, {found['wall_seconds']} s: {out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
