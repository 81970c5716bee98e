"""Options and output of the benchmarks: ``python -m benchmarks.layout --quick --out rows.json``.

docs/make_benchmarks.py makes the tables of docs/benchmarks.md from the JSON.
"""

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


def publish(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Print the result's rows, and write it to `out`."""
    for name, value in result.items():
        for row in value if isinstance(value, list) else [{name: value}]:
            print(json.dumps(row))
    return write(result, out)


def write(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Write `result` to `out`, if it is given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result
