"""Run on a GPU whatever has only run on CPUs: tests, parity, a rank of eight replayed, rates, training, overlap.

    python -m benchmarks.gpu                        # needs a CUDA device; at most 10 minutes
    python -m benchmarks.gpu --only parity replay   # some steps
    python -m benchmarks.gpu --dry                  # all of it on a CPU, at tiny sizes, to see that it runs

Every step is a process with its own time limit: one that fails, crashes or hangs does not keep the others from running.
Writes its JSON after every row, so that a kill loses nothing; docs/make_gpu.py makes docs/gpu.md of it. Ends with
status 1 if a step failed. Needs an installed torch, and no package index.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu.rows import Context, Row, read_rows

ROOT = Path(__file__).parents[2]
RESULT, DRY_RESULT = ROOT / "benchmarks" / "results" / "gpu" / "campaign.json", ROOT / "runs" / "gpu-dry.json"
LIMIT = 600.0
# Seconds of each step, less than `LIMIT` in all. What would be worst to miss comes first, and what may crash last.
SECONDS = {
    "environment": 20, "tests": 70, "syncs": 35, "parity": 120, "replay": 120, "trace": 30, "layers": 40, "lengths": 45,
    "calibrate": 35, "train": 35, "overlap": 40,
}  # fmt: skip
_DRY_SECONDS = 120.0  # a dry run shares its cores
_LEAST, _PERIOD = 3.0, 0.5  # seconds below which a step is not begun, and between looks for new rows
_TAIL = 4000  # characters kept of what a failed step printed
_GOOD = ("ok", "not possible", "skipped")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=SECONDS, default=list(SECONDS), metavar="STEP")
    parser.add_argument("--dry", action="store_true", help="on the CPU, over gloo, at tiny sizes")
    parser.add_argument("--out", type=Path, help=f"JSON to write; default: {RESULT}, and {DRY_RESULT} with --dry")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for all steps together")
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs all of it on the CPU, at tiny sizes")
    begin, out = time.monotonic(), given.out or (DRY_RESULT if given.dry else RESULT)
    out.parent.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()

    def save(results: list[Row]) -> None:
        facts = [row for result in results if result["name"] == "environment" for row in result["rows"]]
        found = {"dry": given.dry, "date": today, "seconds": round(time.monotonic() - begin, 1)}
        half = out.with_suffix(".part")
        half.write_text(as_text({**found, "facts": facts[0] if facts else {}, "steps": results}))
        half.replace(out)

    results = run([name for name in SECONDS if name in given.only], given.dry, given.seconds, save)
    print(f"{time.monotonic() - begin:.0f} s in all; wrote {out}" + ("" if given.dry else "; next: docs/make_gpu.py"))
    return int(any(result["status"] != "ok" for result in results))


def run(names: Sequence[str], dry: bool, total: float, save: Callable[[list[Row]], None]) -> list[Row]:
    """Run steps, whatever becomes of each; returns one result for each.

    A result has ``name``, ``status`` (ok, failed, timeout or skipped), ``seconds``, ``limit``, ``rows`` and ``error``.

    Args:
        total: seconds for all steps together; steps for which no time is left are skipped.
        save: called with all results whenever there are new rows; a step that still runs is "running".
    """
    results: list[Row] = []
    until = time.monotonic() + total
    for name in names:
        limit = min(_DRY_SECONDS if dry else SECONDS[name], until - time.monotonic())
        result = {"name": name, "seconds": 0.0, "limit": round(limit, 1), "rows": []}
        if limit < _LEAST:
            results.append(result | {"status": "skipped", "error": f"no time was left of {total:.0f} s"})
        else:
            results.append(result | {"status": "running", "error": ""})
            _run_step(results[-1], "cpu" if dry else "cuda", limit, lambda: save(results))
        show(results[-1])
        save(results)
    return results


def _run_step(result: Row, device: str, limit: float, changed: Callable[[], None]) -> None:
    """Run a step in a process of its own, and end it with all that it started; fills in its result."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spanwise-gpu-") as folder:
        file, log = Path(folder, "rows"), Path(folder, "log")
        arguments = f"{result['name']!r}, {device!r}, {str(file)!r}, {limit}"
        command = f"from benchmarks.gpu.__main__ import step; step({arguments})"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None and time.monotonic() < begin + limit:
                    time.sleep(_PERIOD)
                    if len(rows := read_rows(file)) != len(result["rows"]):
                        result["rows"] = rows
                        changed()
                code = process.poll()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result["rows"], said = read_rows(file), log.read_text(errors="replace").strip()[-_TAIL:]
    bad = [row for row in result["rows"] if row.get("status", "ok") not in _GOOD]
    if code is None:
        error = f"did not end within {limit:.0f} s\n{said}".strip()
    elif code:
        error = f"ended with code {code}\n{said}".strip()
    else:
        error = f"{len(bad)} of its rows failed" if bad else "" if result["rows"] else "no rows were written"
    status = "timeout" if code is None else "failed" if error else "ok"
    result |= {"status": status, "error": error, "seconds": round(time.monotonic() - begin, 2)}


def step(name: str, device: str, rows: str, seconds: float) -> None:
    """A step, in its process."""
    if device == "cpu":
        torch.set_num_threads(1)
    importlib.import_module(f"benchmarks.gpu.step_{name}").run(Context(device, Path(rows), seconds))


def as_text(found: Row) -> str:
    """JSON with one line for each row."""
    rows = {f"rows of {step['name']}": step["rows"] for step in found["steps"]}
    text = json.dumps(
        {**found, "steps": [{**step, "rows": f"rows of {step['name']}"} for step in found["steps"]]}, indent=1
    )
    for name, of_step in rows.items():
        lines = ",\n   ".join(json.dumps(row) for row in of_step)
        text = text.replace(f'"rows": {json.dumps(name)}', f'"rows": [\n   {lines}\n  ]')
    return text + "\n"


def show(result: Row) -> None:
    """Print a line for a step, and the error of one that failed."""
    failed = [json.dumps(row)[:400] for row in result["rows"] if row.get("status") == "failed"][:10]
    print(f"{result['name']:12} {result['status']:8} {result['seconds']:7.1f} s  {len(result['rows'])} rows")
    print("\n".join([*failed, *filter(None, [result["error"]])]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the step under way is ended, too
    sys.exit(main())
