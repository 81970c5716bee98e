"""What the benchmarks share: options, timing in turns, and JSON for docs/make_benchmarks.py.

python -m benchmarks.plan layouts --quick --out rows.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def main(cases: Mapping[str, Callable[[bool], Result]], text: str) -> None:
    """Run the case that the command line names, and publish its result; `quick`: smaller sizes and fewer repeats."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=cases, default=next(iter(cases)))
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats")
    given = parser.parse_args()
    publish(cases[given.case](given.quick), given.out)


def publish(result: Result, out: Path | None) -> None:
    """Print the result's rows, and write it to `out`."""
    for name, value in result.items():
        for row in value if isinstance(value, list) else [{name: value}]:
            print(json.dumps(row))
    write(result, out)


def write(result: Result, out: Path | None) -> None:
    """Write `result` to `out`, if it is given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def take_turns(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round; all take turns, so that a busy machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds
