"""Faults, made on purpose: what the user sees, after how many seconds, and what is lost.

    python benchmarks/faults.py --out benchmarks/results/faults-cpu.json

`python docs/make_faults.py` writes the table of the guide from the result. `--only TEXT` makes some of the faults, and
keeps the other rows of an existing result.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))  # also for ranks, which start without it

import faults_ranks as ranks
from faults_ranks import LAST, gone, observed

import spanwise

SHORT = 10.0  # seconds, the timeout of a group whose rank is stuck


class Fault(NamedTuple):
    """A fault, what the package does, what is lost, and the function that makes it."""

    name: str
    happens: str
    lost: str
    make: Callable[[Path], dict[str, Any]]


def damaged_plan(folder: Path) -> dict[str, Any]:
    path, began = folder / "plan.npz", time.monotonic()
    spanwise.make_plan(spanwise.SpanMask.causal(64), num_ranks=2).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    row: dict[str, Any] = {"runs": 1, "errors": [], "ranks": 1, "said": None}
    try:
        spanwise.Plan.load(path)
    except ValueError as error:
        row |= {"errors": [type(error).__name__], "said": str(error)}
    return {"seconds": time.monotonic() - began} | row


def on_ranks(fault: ranks.Fault, **options: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: observed(fault, **options)


def lost(who: int = LAST, **options: Any) -> Callable[[Path], dict[str, Any]]:
    return on_ranks(functools.partial(gone, who=who, **options), quiet=[who], own_store=who == 0)


STEP, NOTHING = "the step", "nothing"

FAULTS = [
    Fault("A rank is killed in a forward", "All other ranks fail.", STEP, lost()),
    Fault("A rank is killed in a backward", "All other ranks fail.", STEP, lost(in_backward=True)),
    Fault("Rank 0, which hosts the store, is killed", "All other ranks fail.", STEP, lost(who=0)),
    Fault("A rank is killed in a compiled forward", "All other ranks fail.", STEP, lost(compiled=True)),
    Fault(
        "A rank is stopped; the group's timeout is 10 s",
        "The others wait until the timeout of the process group.",
        STEP,
        on_ranks(functools.partial(gone, how=signal.SIGSTOP), quiet=[LAST], timeout=SHORT, runs=1),
    ),
    Fault(
        "The loss of one rank does not depend on its output; timeout 10 s",
        "The backward of the others waits for that rank until the timeout. Give every rank the same graph.",
        STEP,
        on_ranks(ranks.without_backward, quiet=[LAST], timeout=SHORT, runs=1),
    ),
    Fault(
        "Ranks make different plans",
        "`plan.local` compares fingerprints before the first collective.",
        NOTHING,
        on_ranks(ranks.other_plans),
    ),
    Fault(
        "The first call of one rank has another dtype",
        "Ranks compare their calls before they send anything.",
        NOTHING,
        on_ranks(ranks.other_dtype),
    ),
    Fault(
        "After equal calls one rank takes another plan",
        "That rank raises before it sends anything, the others where they wait for it. No gradient comes out.",
        STEP,
        on_ranks(ranks.other_call),
    ),
    Fault(
        "A call of one rank is refused, and it catches the error",
        "The calls of the others differ from the error that stands in place of its call, and all ranks raise.",
        STEP,
        on_ranks(ranks.refused_call, quiet=[LAST]),
    ),
    Fault(
        "The backward of one rank raises, and it goes on",
        "Calls differ from then on: all ranks raise before anything is sent.",
        STEP,
        on_ranks(ranks.failed_backward),
    ),
    Fault(
        "`overlap.backend`: ranks decide different orders",
        "They compare before the first collective. Seconds include compiling.",
        NOTHING,
        on_ranks(ranks.other_order),
    ),
    Fault(
        "`overlap.backend`: `on_result` of a rank raises",
        "It tells the others. Seconds include compiling.",
        NOTHING,
        on_ranks(ranks.result_raises),
    ),
    Fault("A plan file has a flipped bit", "`Plan.load` compares the fingerprint.", "the plan", damaged_plan),
]


def portable(text: str | None, folder: Path) -> str | None:
    """The first line, without folders of this machine."""
    return text and re.sub(r"(/[\w.+-]+)+/(?=[\w-]+\.py)", "", text.replace(f"{folder}/", "").splitlines()[0])[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make faults and note what happens.")
    parser.add_argument("--only", default="", help="faults whose name has this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    before = json.loads(given.out.read_text())["rows"] if given.out and given.only and given.out.exists() else []
    rows = {row["fault"]: row for row in before}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for fault in FAULTS:
            if given.only not in fault.name:
                continue
            row = fault.make(folder)
            row["said"] = portable(row["said"], folder)
            rows[fault.name] = {"fault": fault.name, "happens": fault.happens, "lost": fault.lost} | row
            print(json.dumps(rows[fault.name]), flush=True)
            made = [rows[fault.name] for fault in FAULTS if fault.name in rows]
            if given.out:
                given.out.write_text(json.dumps({"torch": torch.__version__, "rows": made}, indent=1) + "\n")
    if wrong := [row["fault"] for row in rows.values() if not row["said"] or row.get("resumed")]:
        sys.exit(f"not named, or not resumed after: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
