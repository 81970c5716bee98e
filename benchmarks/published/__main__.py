"""Predict published measurements, row by row, and print how far the predictions are off.

    python -m benchmarks.published FILE [--json OUT]

FILE has rows of measurements by others, each with a source and a setting (`settings.read`). Times come from the cost
model of spanwise (`Hardware`, `Plan.timeline`) and from the methods' own padding and copies (`attention`).

Of each source one number is fitted, on one row: a factor of all compute rates; where that would be outside 0.4 to 2.5,
the fixed seconds of the host. The row is the one with the smallest cp degree, then the fewest GPUs and tokens; it does
not count in the errors. Packed masks are never fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import predict
from benchmarks.published.settings import Row, read

_FACTORS = 0.4, 2.5
# What methods of one comparison differ in.
_COMPARED = ("method", "variant", "kernel", "exchange", "mode", "collectives", "layout", "code", "async_tp")
Result = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("file", help="rows of published measurements, JSON")
    parser.add_argument("--json", metavar="OUT", help="write the table here")
    options = parser.parse_args(arguments)
    result = table(read(options.file))
    print(text(result))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


def table(rows: list[Row]) -> Result:
    """Every measurement with its prediction, and figures per source and over all."""
    names = dict.fromkeys(row.source for row in rows)
    fits = {source: fit([row for row in rows if row.source == source]) for source in names}
    found = [one for row in rows for one in _predicted(row, *fits[row.source])]
    sources = {}
    for source, (factor, fixed, fitted) in fits.items():
        figures = _figures([one for one in found if one["source"] == source])
        sources[source] = figures | {"factor": factor, "fixed_seconds": fixed, "fitted_row": fitted}
    numbers = {key: i for i, key in enumerate(dict.fromkeys(one.get("comparison") for one in found))}
    packed = [one for one in found if one["packed"] and "Magi" in one["source"]]
    result = {"rows": found, "sources": sources, "packed": _figures(packed), "all": _figures(found)}
    for one in found:
        if "comparison" in one:
            one["comparison"] = numbers[one["comparison"]]
    # Measured over predicted, with nominal and with fitted rates: intervals of advice.
    nominal = [one for row in rows for one in _predicted(row)]
    steps, fitted = ([x for x in y if x["group"].endswith("-train") and "ratio" in x] for y in (nominal, found))
    intervals = {
        "nominal": _quantiles([x["measured"] / x["predicted"] for x in steps]),
        "fitted": _quantiles([1 / x["ratio"] for x in fitted if not x["fitted"]]),
    }
    return result | {"steps": intervals, "memory": _quantiles(predict.memory(rows))}


def _quantiles(values: list[float]) -> list[float]:
    return [float(np.quantile(values, part)) for part in (0.05, 0.5, 0.95)] if values else []


def _predicted(row: Row, factor: float = 1.0, fixed: float = 0.0, fitted: int | None = None) -> list[Result]:
    base = {"id": row.id, "source": row.source, "group": row.group, "packed": row.packed}
    try:
        pairs = predict.pairs(row, factor, fixed)
    except predict.NOT_EXPRESSED as error:
        return [base | {"reason": str(error) if isinstance(error, ValueError) else repr(error)}]
    comparison = {key: value for key, value in row.setting.items() if key not in _COMPARED}
    words = next((str(row.setting[key]) for key in _COMPARED if key in row.setting), "")
    ranks = row.setting.get("cp", 1) or 1
    return [
        base
        | {
            "ranks": ranks, "method": words, "name": pair.name, "measured": pair.measured, "predicted": pair.predicted,
            "ratio": pair.predicted / pair.measured, "fitted": row.id == fitted and pair is pairs[0],
            "comparison": json.dumps([row.source, comparison, pair.name[:3]], sort_keys=True),
        }
        for pair in pairs
    ]  # fmt: skip


def fit(rows: list[Row]) -> tuple[float, float, int | None]:
    """Factor on all compute rates, fixed seconds, and the row that one of them is fitted on, None without one."""

    def size(row: Row) -> tuple[float, ...]:
        setting = row.setting
        total = setting.get("seq_len_total") or setting.get("seq_len")
        sizes = (setting.get("cp") or 1, setting.get("gpus") or 1, total if isinstance(total, int) else 0)
        return *sizes, setting.get("shard_mib") or 0, row.id

    def error(factor: float) -> float:
        pair = predict.pairs(row, factor)[0]
        return pair.predicted - pair.measured

    expressed = [row for row in rows if "reason" not in _predicted(row)[0]]
    free = sorted((row for row in expressed if not row.packed), key=size)
    if len(expressed) < 2 or not free:
        return 1.0, 0.0, None
    row, (low, high) = free[0], _FACTORS
    if row.group == "collective" or error(low) < 0 or error(high) > 0:
        if error(1.0) >= 0:
            return 1.0, 0.0, None
        pair = predict.pairs(row)[0]
        return 1.0, pair.measured - (0.0 if row.group == "collective" else pair.predicted), row.id
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return math.sqrt(low * high), 0.0, row.id


def _figures(found: list[Result]) -> Result:
    """Errors over what was not fitted, and whether the order of methods is right."""
    rows = {one["id"] for one in found}
    own = [one for one in found if "ratio" in one]
    errors = np.array([abs(one["ratio"] - 1) for one in own if not one["fitted"]])
    groups: dict[str, list[Result]] = defaultdict(list)
    for one in own:
        groups[one["comparison"]].append(one)
    taus = [tau for group in groups.values() if (tau := kendall(group)) is not None]
    return {
        "rows": len(rows), "expressed": len({one["id"] for one in own}), "errors": len(errors),
        "median": float(np.median(errors)) if len(errors) else None,
        "nine_tenths": float(np.quantile(errors, 0.9)) if len(errors) else None,
        "worst": float(errors.max()) if len(errors) else None,
        "tau": float(np.mean(taus)) if taus else None, "groups": len(taus),
    }  # fmt: skip


def kendall(group: Iterable[Result]) -> float | None:
    """Kendall's τ-b of predicted and measured seconds; None for fewer than two that differ."""
    agree, theirs, ours = 0.0, 0, 0
    for one, other in itertools.combinations(group, 2):
        a = np.sign(one["measured"] - other["measured"])
        b = np.sign(round(one["predicted"] / other["predicted"] - 1, 6))
        agree, theirs, ours = agree + a * b, theirs + (a != 0), ours + (b != 0)
    return agree / math.sqrt(theirs * ours) if theirs and ours else (0.0 if theirs else None)


def text(result: Result) -> str:
    """A line for each measurement, and two for each source."""
    lines = [f"{'row':>4} {'measured':>10} {'predicted':>10} {'ratio':>6}  method, measurement"]
    for one in result["rows"]:
        line = f"{one['id']:4} not expressed: {one.get('reason')}"
        if "ratio" in one:
            times = f"{one['measured'] * 1e3:8.2f}ms {one['predicted'] * 1e3:8.2f}ms {one['ratio']:6.2f}"
            line = f"{one['id']:4} {times}  {one['method']}, {one['name']}{' (fitted)' * one['fitted']}"
        lines.append(line)
    for source, one in [*result["sources"].items(), ("packed masks", result["packed"]), ("all", result["all"])]:
        parts = [f"{one['expressed']} of {one['rows']} rows"]
        if one["median"] is not None:
            worst = f"{one['nine_tenths']:.1%} nine tenths, {one['worst']:.1%} worst"
            parts.append(f"error {one['median']:.1%} median, {worst}")
        if one["tau"] is not None:
            parts.append(f"order of methods τ {one['tau']:.2f} over {one['groups']} comparisons")
        if one.get("fitted_row") is not None:
            fixed = f"{one['fixed_seconds'] * 1e3:.2f} ms"
            parts.append(f"fitted on row {one['fitted_row']}: factor {one['factor']:.2f}, {fixed}")
        lines.append(f"{source[:90]}\n    {'; '.join(parts)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
