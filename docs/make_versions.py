"""Write the table of tested versions in status.md from tests/results/versions.json.

python docs/make_versions.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import DOCS, filled, table

RESULTS = DOCS.parent / "tests" / "results" / "versions.json"


def failed(row: dict[str, Any]) -> str:
    return ", ".join(f"`{name.partition('::')[2] or name}`" for name in row["failed"]) or "none"


def commits(row: dict[str, Any]) -> str:
    """Of the run, and of the run of its failures where that was a later one."""
    made = dict.fromkeys([row["commit"][:7], (row["commit_alone"] or row["commit"])[:7]])
    return ", then ".join(f"`{commit}`" for commit in made)


def selection(row: dict[str, Any]) -> str:
    folders = row["selection"].removeprefix("-m not slow").replace("tests/", "").split()
    return ", ".join(folders) or "all but slow"


def versions() -> str:
    body = [
        [row["torch"], row["python"], commits(row), f"{row['passed']:,}", f"{sum(row['skipped'].values()):,}",
         f"{len(row['failed_at_first'])}", failed(row), selection(row)]
        for row in json.loads(RESULTS.read_text())
    ]  # fmt: skip
    header = ["torch", "Python", "commit", "passed", "skipped", "failed at first", "failed", "tests"]
    return table(header, body)


def page(text: str) -> str:
    """status.md with its table made anew."""
    return filled(text, Path(__file__).name, {"versions": versions()})


if __name__ == "__main__":
    path = DOCS / "status.md"
    path.write_text(page(path.read_text()))
