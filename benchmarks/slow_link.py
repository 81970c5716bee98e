"""Attention over a slow link: needed exchanges against an all-gather, a ring, Ulysses, and other packages.

    sudo python benchmarks/slow_link.py --out benchmarks/results/slow-link-cpu.json
    sudo python benchmarks/slow_link.py --exchanges --seeds 0 --repeats 3 --out …    # ring, Ulysses
    sudo python benchmarks/slow_link.py --peers SITE                                 # other packages beside it

Hosts are network namespaces (`hosts.py`) of one process each. On one mask it times, in turns within one run, forward +
backward of `context_parallel_attention` by each way to bring K/V, and its kernels alone, on all hosts at once, K/V
already there. With `--exchanges` it compares needed, ring (one shard after the other, fetched again in the backward)
and Ulysses, 8 query heads and 2 of K/V; and on two hosts of two processes Ulysses inside the hosts with needed or a
ring between them. "reached" is the step of the first way over that of another; "step_ratio" is `plan.predict()` over
the step, from figures that were calibrated on these hosts on other shapes. Outputs and gradients are compared with
float64 attention on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from hosts import Hosts, machine, missing, run, spans
from slow_link_cases import HEADS, RESULTS, Results, Scenario, Variant, make_plan, reference
from slow_link_peers import INSTALL, PEERS

from benchmarks.publish import write
from spanwise.hardware import Hardware

PEER_TIMEOUT = 900.0  # seconds
# Of the largest entry of each result: float32 sums over thousands of keys, as one device has them too.
TOLERANCE = 2e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the document masks")
    parser.add_argument("--exchanges", action="store_true", help="ring, Ulysses and two levels beside needed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", type=Path, metavar="SITE", help=f"folder with other packages, made by: {INSTALL}")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if lack := missing():
        parser.exit(2, f"{parser.prog}: {lack}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: the hosts are ended, folders removed
    references = functools.cache(reference)
    result: dict[str, Any] = {"machine": machine(), "hardware": [], "rows": [], "peers": []}
    for num_hosts, per_host in [*((n, 1) for n in args.hosts), *([(2, 2)] if args.exchanges else [])]:
        with Hosts(num_hosts, args.rate * 1e6, "slow_link_rank.py", per_host) as hosts:
            task = {"calibrate": True, "kv_heads": 2 if args.exchanges else HEADS}
            hardware = Hardware.from_dict(run(hosts, task)[0]["hardware"])
            result["hardware"].append(hardware.to_dict())
            for scenario in scenarios(num_hosts, per_host, args):
                variants = variants_of(scenario, args.exchanges)
                ranks = run(hosts, job(scenario, variants, args.repeats, hardware))
                expected = references(dataclasses.replace(scenario, num_hosts=1, per_host=1))
                result["rows"].append(scenario_row(scenario, variants, ranks, expected, hardware))
                write(result, args.out)
    for num_hosts in args.hosts if args.peers else ():
        for scenario in peer_scenarios(num_hosts, args):
            result["peers"] += [peer_row(scenario, peer, args.peers) for peer in PEERS]
            write(result, args.out)
    wrong = [row["scenario"]["name"] for row in result["rows"] if not row["correct"]]
    if wrong:
        sys.exit(f"wrong results: {wrong}")


def variants_of(scenario: Scenario, exchanges: bool) -> list[Variant]:
    """What a scenario compares, the first one with each of the others."""
    if not exchanges:
        needed = [Variant("needed", "needed", 1), Variant("needed, 4 pieces", "needed", 4)]
        return [Variant("all_gather", "all_gather"), *needed]
    if scenario.per_host == 1:
        others = [Variant("ring", "ring", keep_kv=False), Variant("ulysses", "ulysses")]
    else:
        others = [
            Variant("ulysses, needed", "needed", 1, two_level=True),
            Variant("ulysses, ring", "ring", keep_kv=False, two_level=True),
        ]
    return [Variant("needed", "needed", 1), *others]


def scenarios(num_hosts: int, per_host: int, args: argparse.Namespace) -> list[Scenario]:
    """Documents, and masks under which compute takes at least as long as the needed traffic (measured, two cores).

    At 200 Mbit/s that is a window of 2,048 keys, where `local` cuts contiguously, and causal attention under head_tail,
    where nearly all K/V are needed.
    """
    common: dict[str, Any] = {"num_hosts": num_hosts, "rate": args.rate * 1e6, "per_host": per_host}
    common |= {"kv_heads": 2} if args.exchanges else {}
    found = [Scenario(f"documents, seed {n}", "documents", args.seq_len, seed=n, **common) for n in args.seeds]
    if not args.exchanges:
        found.append(Scenario("window 2048", "window", args.seq_len, window=2047, **common))
        found.append(Scenario("causal", "causal", args.seq_len // 2, balancer="head_tail", **common))
    return found


def peer_scenarios(num_hosts: int, args: argparse.Namespace) -> list[Scenario]:
    """Documents, and the causal mask that every package takes; shorter, for on CPU all of them compute densely."""
    rate = args.rate * 1e6
    return [
        Scenario("documents, seed 0", "documents", args.seq_len // 2, num_hosts, rate),
        Scenario("causal", "causal", args.seq_len // 4, num_hosts, rate, balancer="head_tail"),
    ]


def job(scenario: Scenario, variants: list[Variant], repeats: int, hardware: Hardware | None) -> dict[str, Any]:
    return {
        "scenario": dataclasses.asdict(scenario), "variants": [dataclasses.asdict(variant) for variant in variants],
        "repeats": repeats, "hardware": None if hardware is None else hardware.to_dict(),
    }  # fmt: skip


def scenario_row(
    scenario: Scenario, variants: list[Variant], ranks: list[dict[str, Any]], expected: Results, hardware: Hardware
) -> dict[str, Any]:
    """All variants of one scenario, of what each rank measured and the float64 results of the whole sequence."""
    seconds = spans([rank["times"] for rank in ranks])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for variant in variants:
        plan, step = make_plan(scenario, variant, hardware), median[f"step {variant.name}"]
        tokens = [torch.from_numpy(plan.layout.indices(rank)) for rank in range(plan.num_ranks)]
        predicted = plan.predict()
        row = {
            **dataclasses.asdict(variant),
            "step_seconds": step,
            "compute_seconds": median[f"compute {variant.name}"],
            "reached": median[f"step {variants[0].name}"] / step,
            "relative_error": errors(tokens, [rank["outputs"][variant.name] for rank in ranks], expected),
            "predicted": {**predicted, "step_ratio": predicted["total"] / step},
        }
        rows.append(row)
        print(
            f"{scenario.name}, {scenario.num_hosts} hosts of {scenario.per_host}, {variant.name}: step {step:.3f} s, "
            f"compute {row['compute_seconds']:.3f} s, {row['reached']:.2f} times as fast, "
            f"predicted / measured {row['predicted']['step_ratio']:.2f}",
            flush=True,
        )
    return {
        "scenario": dataclasses.asdict(scenario), "threads": ranks[0]["threads"],
        "documents": len(scenario.offsets()) - 1, "variants": rows, "seconds": seconds,
        "correct": not any(wrong(row["relative_error"]) for row in rows),
    }  # fmt: skip


def peer_row(scenario: Scenario, peer: str, site: Path) -> dict[str, Any]:
    """What another package's call takes, beside ours in the same run, on hosts of its own."""
    row: dict[str, Any] = {"scenario": dataclasses.asdict(scenario), "peer": peer}
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    about = {"peer": peer, "site": str(site), "memory": int(0.85 * free) // scenario.num_hosts}
    try:
        with Hosts(scenario.num_hosts, scenario.rate, "slow_link_rank.py") as hosts:
            ranks = run(hosts, job(scenario, [Variant("needed", "needed", 1)], 3, None) | about, PEER_TIMEOUT)
    except (RuntimeError, TimeoutError) as error:
        row["failed"] = str(error)
    else:
        if "refused" in ranks[0]:
            row["refused"] = ranks[0]["refused"]
        else:
            seconds = spans([rank["times"] for rank in ranks])
            found = [rank["tokens"] for rank in ranks], [rank["outputs"] for rank in ranks]
            error = errors(*found, reference(scenario))
            ratio = statistics.median(seconds["peer"]) / statistics.median(seconds["needed"])
            row |= {"ratio": ratio, "relative_error": error, "wrong": wrong(error), "seconds": seconds}
    shown = {key: str(row[key])[-200:] for key in ("ratio", "wrong", "refused", "failed") if key in row}
    print(f"{peer}, {scenario.name}, {scenario.num_hosts} hosts: {shown}", flush=True)
    return row


def errors(tokens: list[torch.Tensor], shards: list[Results], expected: Results) -> dict[str, float]:
    """Largest difference of each result over its largest entry; `tokens` are the positions of each rank's rows."""
    found = {}
    for i, name in enumerate(RESULTS):
        pairs = zip(tokens, shards, strict=True)
        differences = [float((shard[i].double() - expected[i][:, :, at]).abs().max()) for at, shard in pairs]
        found[name] = max(differences) / float(expected[i].abs().max())
    return found


def wrong(error: dict[str, float]) -> list[str]:
    """Names of the results that are off; NaN is."""
    return [name for name, value in error.items() if not value <= TOLERANCE]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; hosts and links are removed")
