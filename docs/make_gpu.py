"""Write gpu.md from what ``make gpu`` measures on a machine with a GPU, and ``make cuda-check`` compiles without one.

    python docs/make_gpu.py

No number of that page is typed. Without a result of a GPU, or with that of a dry run, it says that nothing has run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import DOCS, filled, table

RESULT = DOCS.parent / "benchmarks" / "results" / "gpu" / "campaign.json"
COMPILED = DOCS.parent / "benchmarks" / "results" / "cuda-compile.json"
Row = dict[str, Any]
_NOT_RUN = "**The code has not run on a GPU yet.**"


def page(text: str, found: Row | None) -> str:
    """gpu.md with its block made anew from a result, None if there is none."""
    made = compiled(json.loads(COMPILED.read_text()))
    return filled(text, Path(__file__).name, {"results": results(found), "compiled": made})


def compiled(found: Row) -> str:
    """Figures of the forward and the backward of each case; torch's own spills in parentheses."""
    body = []
    for name, row in found["cases"].items():
        kernels, plain = (_attention(of) for of in (row, row["plain"]))
        spills = [
            f"{kernel['spilled']:,}" + (f" ({other['spilled']:,})" if other else "")
            for kernel, other in zip(kernels, plain or [None] * len(kernels), strict=True)
        ]
        figures = ([f"{kernel[what]:,}" for kernel in kernels] for what in ("registers", "shared"))
        registers, shared = map("; ".join, figures)
        body.append([name, registers, shared, "; ".join(spills)])
    header = ["case", "registers", "shared memory, bytes", "spilled, bytes (torch's)"]
    return f"Compiled by {found['by']}.\n\n{table(header, body)}"


def _attention(row: Row | None) -> list[Row]:
    return [kernel for kernel in row["kernels"] if kernel["name"].startswith("triton_tem")] if row else []


def results(found: Row | None) -> str:
    if found is None:
        return _NOT_RUN
    if found["dry"]:
        return f"{_NOT_RUN} The only result is a dry run: the same steps on a CPU.\n\n{_steps(found)}"
    facts = found["facts"]
    lines = [f"Ran on {found['date']} in {found['seconds']:.0f} s: {', '.join(_facts(facts))}.", _steps(found)]
    for step in found["steps"]:
        if step["rows"] and step["name"] != "environment":  # its facts are above
            lines += [f"## {step['name'].capitalize()}", _SHOWN.get(step["name"], _tables)(step["rows"])]
    return "\n\n".join(lines)


def _facts(facts: Row) -> list[str]:
    return [f"{name} {value}" for name, value in facts.items() if value is not None and not isinstance(value, bool)]


def _steps(found: Row) -> str:
    body = []
    for step in found["steps"]:
        counts = Counter(row.get("status", "ok") for row in step["rows"])
        rows = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        error = "" if step["status"] == "ok" else step["error"].strip().split("\n")[0]
        body.append([step["name"], step["status"], f"{step['seconds']:.0f}", rows, _cell(error)])
    return table(["step", "status", "seconds", "rows", "error"], body)


def _parity(rows: list[Row]) -> str:
    """The largest error of each kernel, dtype and exchange over all masks, outputs and gradients."""
    cells = [row for row in rows if row["what"] == "attention"]
    exchanges = list(dict.fromkeys(row["exchange"] for row in cells))
    body = []
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in cells):
        of_kernel = [row for row in cells if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        by_exchange = ([row for row in of_kernel if row["exchange"] == exchange] for exchange in exchanges)
        body.append([kernel, dtype, *map(_worst, by_exchange)])
    others = [row for row in rows if row["what"] != "attention" or row["status"] != "ok"]
    return f"{table(['kernel', 'dtype', *exchanges], body)}\n\n{_tables(others)}"


def _worst(rows: list[Row]) -> str:
    errors = [max(row[name] for name in ("out", "dq", "dk", "dv")) for row in rows if row["status"] == "ok"]
    rest = Counter(row["status"] for row in rows if row["status"] != "ok")
    shown = [f"{max(errors):.1e}"] if errors else []
    return ", ".join([*shown, *(f"{number} {status}" for status, number in rest.items())]) or "–"


def _tests(rows: list[Row]) -> str:
    failed = [{"what": "tests that failed", **row} for row in rows if row["status"] == "failed"]
    return _tables(failed) or "No test failed."


def _tables(rows: list[Row]) -> str:
    """A table for each kind of row, with a column for each figure."""
    parts = []
    for what in dict.fromkeys(row["what"] for row in rows):
        of_kind = [{**row, "status": row.get("status", "ok")} for row in rows if row["what"] == what]
        columns = list(dict.fromkeys(name for row in of_kind for name in row if name != "what"))
        columns = [name for name in columns if any(row.get(name) not in (None, "") for row in of_kind)]
        body = [[_cell(row.get(name)) for name in columns] for row in of_kind]
        parts.append(f"{what.capitalize()}:\n\n{table(columns, body)}")
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")[:200]


_SHOWN: dict[str, Callable[[list[Row]], str]] = {"nccl": _parity, "parity": _parity, "tests": _tests}


def load() -> Row | None:
    """The committed result; None if there is none."""
    return json.loads(RESULT.read_text()) if RESULT.exists() else None


if __name__ == "__main__":
    path = DOCS / "gpu.md"
    path.write_text(page(path.read_text(), load()))
