"""Options and output of the benchmarks that print tables: ``python -m benchmarks.layout --quick --out rows.json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(run: Callable[[Path | None, bool], object], text: str) -> None:
    """Run a benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats")
    given = parser.parse_args()
    run(given.out, given.quick)


def publish(result: dict[str, Any], out: Path | None, *tables: Any) -> dict[str, Any]:
    """Print `tables` (empty ones are left out) and write `result` to `out`."""
    for table in filter(None, tables):
        print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
