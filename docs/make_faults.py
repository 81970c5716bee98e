"""Write the table of faults in guides/faults.md from benchmarks/results/faults-cpu.json.

python docs/make_faults.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import DOCS, filled, table

RESULTS = DOCS.parent / "benchmarks" / "results" / "faults-cpu.json"


def seen(row: dict[str, Any]) -> str:
    return " or ".join(f"`{name}`" for name in row.get("errors", ()))


def seconds(row: dict[str, Any]) -> str:
    return "< 0.1" if row["seconds"] < 0.1 else f"{row['seconds']:.1f}"


def faults() -> str:
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if "spanwise train" not in row["fault"]]
    body = [[row["fault"], seen(row), seconds(row), row["lost"]] for row in rows]
    return table(["fault", "error", "seconds", "lost work"], body)


def page(text: str) -> str:
    """guides/faults.md with its table made anew."""
    return filled(text, Path(__file__).name, {"faults": faults()})


if __name__ == "__main__":
    path = DOCS / "guides" / "faults.md"
    path.write_text(page(path.read_text()))
