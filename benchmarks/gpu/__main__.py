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
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.device import Context, Row, read_rows
from benchmarks.gpu.steps import ROOT, STEPS

RESULT, DRY_RESULT = ROOT / "benchmarks" / "results" / "gpu" / "campaign.json", ROOT / "runs" / "gpu-dry.json"
LIMIT = 600.0
_DRY_SECONDS = 120.0  # a dry run shares its cores
_LEAST, _PERIOD = 3.0, 0.5  # seconds below which a step is not begun, and between reads of new rows
_TAIL = 4000  # characters kept of what a failed step printed
_GOOD = ("ok", "not possible", "skipped")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--dry", action="store_true", help="on the CPU, over gloo, at tiny sizes")
    parser.add_argument("--out", type=Path, help=f"JSON to write; default: {RESULT}, and {DRY_RESULT} with --dry")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for all steps together")
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs all of it on the CPU, at tiny sizes")
    begin, out = time.monotonic(), given.out or (DRY_RESULT if given.dry else RESULT)
    out.parent.mkdir(parents=True, exist_ok=True)
    found: Row = {"dry": given.dry, "date": datetime.date.today().isoformat(), "facts": {}, "steps": []}

    def save() -> None:
        found["facts"] = next((row for step in found["steps"][:1] for row in step["rows"] if "torch" in row), {})
        half = out.with_suffix(".part")
        half.write_text(json.dumps(found | {"seconds": round(time.monotonic() - begin, 1)}, indent=1) + "\n")
        half.replace(out)

    for name in (name for name in STEPS if name in given.only):
        limit = min(_DRY_SECONDS if given.dry else STEPS[name][1], begin + given.seconds - time.monotonic())
        result: Row = {"name": name, "status": "running", "seconds": 0.0, "rows": [], "error": ""}
        found["steps"].append(result)
        if limit < _LEAST:
            result |= {"status": "skipped", "error": f"no time was left of {given.seconds:.0f} s"}
        else:
            _run_step(result, given.dry, limit, save)
        save()
        print(f"{name:12} {result['status']:8} {result['seconds']:7.1f} s  {len(result['rows'])} rows")
        failed = [json.dumps(row)[:400] for row in result["rows"] if row.get("status") == "failed"]
        print(*failed[:10], result["error"], sep="\n", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all; wrote {out}" + ("" if given.dry else "; next: docs/make_gpu.py"))
    return int(any(result["status"] != "ok" for result in found["steps"]))


def _run_step(result: Row, dry: bool, limit: float, changed: Callable[[], None]) -> None:
    """Run a step in a process of its own, and end it with all that it started; fills in its result."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spanwise-gpu-") as folder:
        file, log = Path(folder, "rows"), Path(folder, "log")
        command = f"from benchmarks.gpu.__main__ import step; step({result['name']!r}, {dry}, {str(file)!r}, {limit})"
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
        result["rows"], printed = read_rows(file), log.read_text(errors="replace").strip()[-_TAIL:]
    bad = sum(row.get("status", "ok") not in _GOOD for row in result["rows"])
    error = f"{bad} of its rows failed" if bad else "" if result["rows"] else "no rows were written"
    if code != 0:
        what = f"did not end within {limit:.0f} s" if code is None else f"ended with code {code}"
        error = f"{what}\n{printed}".strip()
    status = "timeout" if code is None else "failed" if error else "ok"
    result |= {"status": status, "error": error, "seconds": round(time.monotonic() - begin, 2)}


def step(name: str, dry: bool, rows: str, seconds: float) -> None:
    """A step, in its process."""
    if dry:
        torch.set_num_threads(1)
    STEPS[name][0](Context(dry, Path(rows), seconds))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the step under way is ended, too
    sys.exit(main())
