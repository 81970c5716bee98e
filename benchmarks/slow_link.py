"""Attention over a slow link: what sending only the needed K/V gains, and how much of its travel is hidden.

    sudo python benchmarks/slow_link.py --out benchmarks/results/slow-link-cpu.json
    sudo python benchmarks/slow_link.py --quick                     # less than a minute
    sudo python benchmarks/slow_link.py --calibrate --peers SITE    # predictions, and other packages beside it

Hosts are network namespaces with one process each (`hosts.py`). On one mask and one layout it times, in turns within
one run, forward + backward of `context_parallel_attention` with K/V brought by all_gather and by the needed exchange;
the kernels alone, their K/V already there, on all hosts at once (T_compute); and each exchange alone (T_gather,
T_needed). From the medians follow

    reached   T(step, all_gather) / T(step, needed)
    possible  (1 + T_gather / T_compute) / (1 + T_needed / T_compute): nothing hidden by either
    share     (reached - 1) / (possible - 1)
    exposed   (T(step) - T_compute) / T_exchange, of each exchange

Bytes are read from the interfaces' counters; the floor is the planned bytes over the rate. Outputs and gradients are
compared with float64 attention on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hosts import INTERFACE, Hosts, missing
from slow_link_cases import Scenario, Variant, make_plan, reference

from spanwise import Plan
from spanwise.layout import count_tokens, intersect_runs

# Of the largest entry of each result: float32 sums over thousands of keys, as one device has them too.
TOLERANCE = 2e-5
VARIANTS = (Variant("all_gather", "all_gather"), Variant("needed", "needed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the document masks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 hosts, 8,192 tokens, one seed, 3 repeats")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    lack = missing()
    if lack:
        parser.exit(2, f"{parser.prog}: {lack}\n")
    if args.quick:
        args.hosts, args.seq_len, args.seeds, args.repeats = [2], 8192, [0], 3

    result: dict[str, Any] = {"machine": machine(), "rows": []}
    print(result["machine"])
    for num_hosts in args.hosts:
        with start_hosts(num_hosts, args.rate * 1e6) as hosts:
            for scenario in scenarios(num_hosts, args):
                row = measure(hosts, scenario, VARIANTS, args.repeats)
                result["rows"].append(row)
                show(row)
                if args.out is not None:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row["scenario"]["name"] for row in result["rows"] if not row["correct"]]
    if wrong:
        sys.exit(f"wrong results: {wrong}")


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def scenarios(num_hosts: int, args: argparse.Namespace) -> list[Scenario]:
    documents = [
        Scenario(f"documents, seed {seed}", "documents", args.seq_len, num_hosts, args.rate * 1e6, seed=seed)
        for seed in args.seeds
    ]
    return documents


def start_hosts(num_hosts: int, rate: float) -> Hosts:
    command = [sys.executable, str(Path(__file__).with_name("slow_link_rank.py"))]
    # PYTHONPATH as it is here, so that the hosts import the same spanwise.
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Hosts(num_hosts, rate, command, environment)


def measure(hosts: Hosts, scenario: Scenario, variants: tuple[Variant, ...], repeats: int) -> dict[str, Any]:
    print(f"\n{scenario.name}: {scenario.num_hosts} hosts, {scenario.rate / 1e6:g} Mbit/s, {scenario.seq_len:,} tokens")
    expected = reference(scenario)
    ranks = run(hosts, scenario, variants, repeats)
    plans = {variant.name: make_plan(scenario, variant) for variant in variants}
    seconds = step_seconds([rank["times"] for rank in ranks])
    median = {name: statistics.median(values) for name, values in seconds.items()}
    # The same kernels on the same tokens: the least of the variants is what the exchange has to be measured against.
    compute = median["compute needed"]
    rows = []
    for variant in variants:
        plan = plans[variant.name]
        received, sent = plan.recv_bytes(), send_bytes(plan)
        step, exchange = median[f"step {variant.name}"], median[f"exchange {variant.name}"]
        wire = {part: [rank["wire"][variant.name][part] for rank in ranks] for part in ("forward", "backward")}
        error = compare(plan, [rank["outputs"][variant.name] for rank in ranks], expected)
        rows.append(
            {
                **dataclasses.asdict(variant),
                "step_seconds": step,
                "compute_seconds": median[f"compute {variant.name}"],
                "exchange_seconds": exchange,
                "exposed_seconds": step - compute,
                "exposed_share": (step - compute) / exchange,
                # Forward: a host receives and sends its part; backward the other way round.
                "floor_seconds": 2 * float(max(received.max(), sent.max())) * 8 / scenario.rate,
                "planned_recv_bytes": received.tolist(),
                "planned_send_bytes": sent.tolist(),
                "wire_recv_bytes": {part: [host[0] for host in wire[part]] for part in wire},
                "wire_send_bytes": {part: [host[1] for host in wire[part]] for part in wire},
                "relative_error": error,
            }
        )
    base = rows[0]
    for row in rows[1:]:
        possible = (1 + base["exchange_seconds"] / compute) / (1 + row["exchange_seconds"] / compute)
        reached = base["step_seconds"] / row["step_seconds"]
        row |= {"reached": reached, "possible": possible, "share": (reached - 1) / (possible - 1)}
    plan = plans["needed"]
    return {
        "scenario": dataclasses.asdict(scenario),
        "threads": ranks[0]["threads"],
        "balancer": plan.balancer,
        "imbalance": plan.imbalance(),
        "documents": len(scenario.offsets()) - 1,
        "compute_seconds": compute,
        "variants": rows,
        "seconds": seconds,
        "correct": all(max(row["relative_error"].values()) <= TOLERANCE for row in rows),
    }


def run(hosts: Hosts, scenario: Scenario, variants: tuple[Variant, ...], repeats: int) -> list[dict[str, Any]]:
    """One job on every host; what each rank measured."""
    threads = max(1, len(os.sched_getaffinity(0)) // hosts.num_hosts)
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        jobs: list[dict[str, Any]] = [
            {
                "rank": rank,
                "num_ranks": hosts.num_hosts,
                "store": str(Path(folder) / "store"),
                "out": str(Path(folder) / f"rank-{rank}.pt"),
                "threads": threads,
                "scenario": dataclasses.asdict(scenario),
                "variants": [dataclasses.asdict(variant) for variant in variants],
                "repeats": repeats,
                "peers": None,
            }
            for rank in range(hosts.num_hosts)
        ]
        hosts.run(jobs, 1800.0, lambda text: print(f"  {text}", flush=True))
        return [torch.load(job["out"], weights_only=True) for job in jobs]


def step_seconds(times: list[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Seconds of each repeat, from the first rank's begin to the last one's end."""
    return {
        name: [
            max(end for _, end in repeat) - min(begin for begin, _ in repeat)
            for repeat in zip(*(rank[name] for rank in times), strict=True)
        ]
        for name in times[0]
    }


def send_bytes(plan: Plan) -> np.ndarray:
    """Bytes of K and V that each rank sends in one forward, int64: what the others need of it, or its whole shard."""
    received = plan.recv_bytes()
    if plan.exchange != "needed":
        return received
    ranks = range(plan.num_ranks)
    tokens = [sum(count_tokens(intersect_runs(plan.needs(to), plan.runs(rank))) for to in ranks) for rank in ranks]
    return np.array(tokens) * (int(received.sum()) // max(1, sum(tokens)))


def compare(plan: Plan, shards: list[tuple[torch.Tensor, ...]], expected: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Largest difference of each result over its largest entry, all ranks together."""
    errors = {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        apart = [
            float((shard[i].double() - plan.shard(expected[i], rank, dim=2)).abs().max())
            for rank, shard in enumerate(shards)
        ]
        errors[name] = max(apart) / float(expected[i].abs().max())
    return errors


def show(row: dict[str, Any]) -> None:
    print(f"  T_compute {row['compute_seconds']:.3f} s, imbalance {row['imbalance']:.3f}")
    print(
        f"  {'variant':12}{'step s':>8}{'alone s':>9}{'floor s':>9}{'exposed':>9}{'recv MB':>9}{'wire MB':>9}"
        f"{'reached':>9}{'possible':>9}{'share':>7}{'error':>9}"
    )
    for one in row["variants"]:
        gain = f"{one['reached']:9.3f}{one['possible']:9.3f}{one['share']:7.2f}" if "share" in one else " " * 25
        print(
            f"  {one['name']:12}{one['step_seconds']:8.3f}{one['exchange_seconds']:9.3f}{one['floor_seconds']:9.3f}"
            f"{one['exposed_share']:9.2f}{max(one['planned_recv_bytes']) / 1e6:9.2f}"
            f"{max(one['wire_recv_bytes']['forward']) / 1e6:9.2f}{gain}{max(one['relative_error'].values()):9.1e}"
        )


if __name__ == "__main__":
    main()
