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
import datetime
import json
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu import campaign
from benchmarks.gpu.steps import LIMIT, NAMES, make_steps

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu" / "campaign.json"
DRY_RESULT = ROOT / "runs" / "gpu-dry.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="STEP", help=", ".join(NAMES))
    parser.add_argument("--dry", action="store_true", help="on the CPU, over gloo, at tiny sizes")
    parser.add_argument("--out", type=Path, default=None, help=_default_out())
    parser.add_argument("--seconds", type=float, default=LIMIT, help="for all steps together")
    given = parser.parse_args(arguments)
    if not given.dry:
        import torch

        if not torch.cuda.is_available():
            parser.error("needs a CUDA device; --dry runs all of it on the CPU, at tiny sizes")
    begin = time.monotonic()
    steps = [step for step in make_steps("cpu" if given.dry else "cuda") if step.name in given.only]
    out = given.out or (DRY_RESULT if given.dry else RESULT)
    out.parent.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()

    def save(results: list[campaign.Row]) -> None:
        facts = [row for result in results if result["name"] == "environment" for row in result["rows"]]
        found = {"dry": given.dry, "date": today, "seconds": round(time.monotonic() - begin, 1)}
        half = out.with_suffix(".part")
        half.write_text(as_text({**found, "facts": facts[0] if facts else {}, "steps": results}))
        half.replace(out)

    results = campaign.run(steps, given.seconds, show, ROOT, save)
    print(f"{time.monotonic() - begin:.0f} s in all; wrote {out}" + ("" if given.dry else "; next: docs/make_gpu.py"))
    return int(any(result["status"] != "ok" for result in results))


def _default_out() -> str:
    names = [str(path.relative_to(ROOT)) for path in (RESULT, DRY_RESULT)]
    return f"JSON to write; default: {names[0]}, and {names[1]} with --dry"


def as_text(found: campaign.Row) -> str:
    """JSON with one line for each row."""
    rows = {f"rows of {step['name']}": step["rows"] for step in found["steps"]}
    text = json.dumps(
        {**found, "steps": [{**step, "rows": f"rows of {step['name']}"} for step in found["steps"]]}, indent=1
    )
    for name, of_step in rows.items():
        lines = ",\n   ".join(json.dumps(row) for row in of_step)
        text = text.replace(f'"rows": {json.dumps(name)}', f'"rows": [\n   {lines}\n  ]')
    return text + "\n"


def show(result: campaign.Row) -> None:
    """Print a line for a step, and the error of one that failed."""
    failed = [row for row in result["rows"] if row.get("status") == "failed"]
    print(
        f"{result['name']:12} {result['status']:8} {result['seconds']:7.1f} s  {len(result['rows'])} rows", flush=True
    )
    for row in failed[:10]:
        print("    " + json.dumps(row)[:400], flush=True)
    if result["error"]:
        print("    " + result["error"].replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the step under way is ended, too
    sys.exit(main())
