"""A training step over a slow link, run and timed: unscheduled, by PyTorch's overlap pass, by `spanwise.overlap`.

    sudo python benchmarks/overlap_link.py --out benchmarks/results/overlap-link-cpu.json
    sudo python benchmarks/overlap_link.py --split --out benchmarks/results/overlap-link-split-cpu.json
    sudo python benchmarks/overlap_link.py --quick               # a minute or two

Two hosts are network namespaces of one process each (`hosts.py`), joined by a link with a limited rate. A model with
sharded parameters gathers each weight where it is used and reduce-scatters its gradient. One step, forward and
backward, is compiled by ``torch.compile``: as AOTAutograd leaves it (unscheduled), with PyTorch's pass on the same
graphs and the same costs, with `overlap.backend("aot_eager")`, and, with `--inductor`, by Inductor as it is and by
`overlap.backend("inductor")`. All are timed in turns within one run.

With `--split`, weights are split over the ranks and activations sharded by tokens (tensor and sequence parallelism):
a gather before two linear layers and a reduce-scatter after them, with nothing else to run. Timed are the schedules of
the whole graphs and those in pieces (`split=True`); operators of pieces are measured, too.

Costs are measured on the hosts by `overlap.measure`, at a first rate; then the link is set to the rate at which
communication equals compute, and what is reported was measured again at that one. Predicted is the simulation of the
order that ran with those costs; the floor is the larger of all compute and all communication. Gradients of all ways are
compared with those of the unscheduled step.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hosts import Hosts, machine, missing, run, spans

from benchmarks.publish import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=1024, help="of each host")
    parser.add_argument("--rate", type=float, default=400.0, help="Mbit/s of the link at first")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0], help="communication over compute, to be timed"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--inductor", action="store_true", help="compile by Inductor, too")
    parser.add_argument("--split", action="store_true", help="tensor parallelism, and schedules in pieces")
    parser.add_argument("--quick", action="store_true", help="2 layers, 3 repeats")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    lack = missing()
    if lack:
        parser.exit(2, f"{parser.prog}: {lack}\n")
    if args.quick:
        args.layers, args.repeats = 2, 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: the hosts are ended, folders removed

    model = {"layers": args.layers, "dim": args.dim, "ffn": 4 * args.dim, "tokens": args.tokens}
    result: dict[str, Any] = {"machine": machine(), "model": model, "rows": []}
    print(f"{result['machine']}\n{model}")
    ways = ["unscheduled", "PyTorch", "spanwise", *(["Inductor", "spanwise, Inductor"] if args.inductor else [])]
    ways += ["spanwise, split"] if args.split else []
    rate = args.rate * 1e6
    with Hosts(2, rate, "overlap_link_rank.py") as hosts:
        task = {"model": model, "split": args.split}
        first = run(hosts, {**task, "rate": rate, "ways": [], "repeats": 0})[0]["costs"]
        for share in args.shares:
            # A collective's time is its bytes over the rate, to a few percent.
            hosts.set_rate(rate * first["communication"] / (share * first["compute"]))
            answers = run(hosts, {**task, "rate": hosts.rate, "ways": ways, "repeats": args.repeats})
            costs = {name: max(answer["costs"][name] for answer in answers) for name in first}
            print(f"\n{hosts.rate / 1e6:.0f} Mbit/s; milliseconds of a step: {costs}")
            print(f"{'':<20}{'predicted':>10}{'measured':>10}{'least':>10}{'faster':>8}{'largest difference':>20}")
            for row in rows(answers):
                result["rows"].append({"rate": hosts.rate, "share": share, **costs, **row})
                print(show(row), flush=True)
    write(result, args.out)


def rows(answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each way; milliseconds from the first start to the last end."""
    taken_by = spans([answer["times"] for answer in answers])
    unscheduled = 1e3 * statistics.median(taken_by["unscheduled"])
    for way, seconds in taken_by.items():
        taken = [1e3 * one for one in seconds]
        yield {
            "way": way,
            "predicted": max((a["predicted"][way] for a in answers if way in a["predicted"]), default=None),
            "measured": statistics.median(taken),
            "least": min(taken),
            "all": taken,
            "faster": unscheduled / statistics.median(taken),
            "difference": max(
                float((ours - theirs).abs().max())
                for answer in answers
                for ours, theirs in zip(answer["outputs"][way], answer["outputs"]["unscheduled"], strict=True)
            ),
        }


def show(row: dict[str, Any]) -> str:
    predicted = "" if row["predicted"] is None else f"{row['predicted']:.0f}"
    return (
        f"{row['way']:<20}{predicted:>10}{row['measured']:>10.0f}{row['least']:>10.0f}{row['faster']:>7.2f}x"
        f"{row['difference']:>20.1e}"
    )


if __name__ == "__main__":
    main()
