"""Run on a GPU whatever has only run on CPUs: tests, parity, a rank of eight replayed, rates, overlap.

    python -m benchmarks.gpu                        # needs a CUDA device; at most 10 minutes
    python -m benchmarks.gpu --only parity replay   # some steps
    python -m benchmarks.gpu --dry                  # all of it on a CPU, at tiny sizes, to see that it runs

Every step runs in processes with a time limit of their own (`runner`). Writes its JSON after every row, so that a kill
loses nothing; docs/make_gpu.py makes docs/gpu.md of it. Ends with status 1 if a step failed. Needs an installed torch,
and no package index.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.runner import DRY_SECONDS, Row
from benchmarks.gpu.steps import ROOT, STEPS

RESULT, DRY_RESULT = ROOT / "benchmarks" / "results" / "gpu" / "campaign.json", ROOT / "runs" / "gpu-dry.json"
_GOOD = ("ok", "not possible", "skipped")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--dry", action="store_true", help="on the CPU, over gloo, at tiny sizes")
    parser.add_argument("--out", type=Path, help=f"JSON to write; default: {RESULT}, and {DRY_RESULT} with --dry")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all steps together")
    given = parser.parse_args(arguments)
    if not given.dry and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --dry runs all of it on the CPU, at tiny sizes")
    begin, out = time.monotonic(), given.out or (DRY_RESULT if given.dry else RESULT)
    out.parent.mkdir(parents=True, exist_ok=True)
    found: Row = {"dry": given.dry, "date": datetime.date.today().isoformat(), "facts": {}, "steps": []}
    for name in (name for name in STEPS if name in given.only):
        result: Row = {"name": name, "status": "running", "seconds": 0.0, "rows": [], "error": ""}
        found["steps"].append(result)
        began, step = time.monotonic(), STEPS[name]

        def save(rows: list[Row], result: Row = result) -> None:
            result["rows"] = rows
            known = next((row for row in found["steps"][0]["rows"] if "torch" in row), {})
            found["facts"] = {name: x for name, x in known.items() if name not in ("what", "status", "seconds")}
            half = out.with_suffix(".part")
            half.write_text(json.dumps(found | {"seconds": round(time.monotonic() - begin, 1)}, indent=1) + "\n")
            half.replace(out)

        limit = min(DRY_SECONDS if given.dry else step.seconds, begin + given.seconds - time.monotonic())
        rows = step.run(given.dry, limit, save)
        states = {row.get("status", "ok") for row in rows}
        bad = sum(row.get("status", "ok") not in _GOOD for row in rows)
        result["status"] = "failed" if bad else "skipped" if states == {"skipped"} else "ok"
        result |= {"error": f"{bad} of its rows failed" if bad else "", "seconds": round(time.monotonic() - began, 2)}
        save(rows)
        print(f"{name:12} {result['status']:8} {result['seconds']:7.1f} s  {len(rows)} rows", flush=True)
        for row in [row for row in rows if row.get("status") == "failed"][:10]:
            print({key: value for key, value in row.items() if key != "error"}, row["error"], sep="\n", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all; wrote {out}" + ("" if given.dry else "; next: docs/make_gpu.py"))
    return int(any(result["status"] != "ok" for result in found["steps"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the step under way is ended, too
    sys.exit(main())
