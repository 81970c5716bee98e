"""Attention over a slow link: what sending only the needed K/V gains, and how much of its travel is hidden.

    sudo python benchmarks/slow_link.py --calibrate --out benchmarks/results/slow-link-cpu.json
    sudo python benchmarks/slow_link.py --calibrate --exchanges --seeds 0 --repeats 3 --out …    # ring, Ulysses
    sudo python benchmarks/slow_link.py --quick                     # less than a minute
    sudo python benchmarks/slow_link.py --peers SITE                # other packages beside it

Hosts are network namespaces (`hosts.py`) of one process each. On one mask it times, in turns within one run, forward +
backward of `context_parallel_attention` with K/V brought by all_gather and by the needed exchange in one piece and in
several; the kernels alone, their K/V already there, on all hosts at once (T_compute); and each exchange alone
(T_gather, T_needed). With `--exchanges` it compares needed, ring (one shard after the other, fetched again in the
backward) and Ulysses, 8 query heads and 2 of K/V; and on two hosts of two processes Ulysses inside the hosts with
needed or a ring between them. From the medians follow

    reached   T(step, all_gather) / T(step, needed), and so for every other way against the first
    possible  (1 + T_gather / T_compute) / (1 + T_needed / T_compute): nothing hidden by either
    share     (reached - 1) / (possible - 1)
    exposed   (T(step) - T_compute) / T(exchange), of each exchange
    predicted `plan.predict()` over T(step), from figures that were calibrated on these hosts on other shapes

Bytes are read from the interfaces' counters; the floor is the planned bytes of the busiest host over the rate, forward
and backward. Outputs and gradients are compared with float64 attention on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from hosts import INTERFACE, Hosts, missing
from slow_link_cases import Scenario, Variant, reference
from slow_link_peers import INSTALL, PEERS
from slow_link_rows import describe, peer_row, scenario_row, show, show_peer

from spanwise.hardware import Hardware

TIMEOUT = 1800.0
# Seconds after which a package that has not answered is reported as such.
PEER_TIMEOUT = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--seq-len", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the document masks")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 4], help="in which the needed K/V arrive")
    parser.add_argument("--exchanges", action="store_true", help="ring, Ulysses and two levels beside needed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 hosts, 4,096 tokens, one seed, 3 repeats")
    parser.add_argument("--hardware", type=Path, help="a file of spanwise calibrate, for predictions")
    parser.add_argument("--calibrate", action="store_true", help="measure the hardware on these hosts first")
    parser.add_argument("--peers", type=Path, metavar="SITE", help=f"folder with other packages, made by: {INSTALL}")
    parser.add_argument("--peer-repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    lack = missing()
    if lack:
        parser.exit(2, f"{parser.prog}: {lack}\n")
    if args.quick:
        args.hosts, args.seq_len, args.seeds, args.repeats = [2], 4096, [0], 3
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: the hosts are ended, folders removed

    references = functools.cache(reference)
    result: dict[str, Any] = {"machine": machine(), "hardware": [], "rows": [], "peers": []}
    print(f"{result['machine']}\n{args.seq_len:,} tokens, hosts {args.hosts}, {args.rate:g} Mbit/s")
    for num_hosts, per_host in [*((n, 1) for n in args.hosts), *([(2, 2)] if args.exchanges else [])]:
        todo = scenarios(num_hosts, per_host, args)
        with start_hosts(num_hosts, args.rate * 1e6, per_host) as hosts:
            hardware = None if args.hardware is None else Hardware.load(args.hardware)
            if args.calibrate:
                hardware = calibrate(hosts, todo[0].kv_heads)
            if hardware is not None:
                result["hardware"].append(hardware.to_dict())
            for scenario in todo:
                variants = ways(scenario, args)
                print(f"\n{describe(scenario)}")
                expected = references(scenario.without_hosts())
                ranks = run(hosts, job(scenario, variants, args.repeats, hardware))
                result["rows"].append(scenario_row(scenario, variants, ranks, expected, hardware))
                show(result["rows"][-1])
                write(result, args.out)
    if args.peers is None:
        print(f"\nother packages: not measured. To measure them:\n  {INSTALL}\nand pass --peers SITE")
    else:
        for scenario in peer_scenarios(args):
            expected = reference(scenario)
            for peer in PEERS:
                print(f"\n{peer}, {describe(scenario)}")
                row = {"scenario": dataclasses.asdict(scenario), "peer": peer}
                # On hosts of its own: what it breaks goes with them.
                try:
                    with start_hosts(num_hosts := scenario.num_hosts, scenario.rate) as hosts:
                        about = {"peer": peer, "site": str(args.peers), "memory": available_memory() // num_hosts}
                        one = job(scenario, [Variant("needed", "needed", 1)], args.peer_repeats, None)
                        row |= peer_row(run(hosts, one | about, PEER_TIMEOUT), expected)
                except (RuntimeError, TimeoutError) as error:
                    row["failed"] = str(error)
                result["peers"].append(row)
                show_peer(row)
                write(result, args.out)
    wrong = [describe(Scenario(**row["scenario"])) for row in result["rows"] if not row["correct"]]
    if wrong:
        sys.exit(f"wrong results: {wrong}")


def ways(scenario: Scenario, args: argparse.Namespace) -> list[Variant]:
    """What a scenario compares, the first one with each of the others."""
    needed = [Variant("needed" if n == 1 else f"needed, {n} pieces", "needed", n) for n in args.pieces]
    if not args.exchanges:
        return [Variant("all_gather", "all_gather"), *needed]
    if scenario.per_host == 1:
        return [needed[0], Variant("ring", "ring", keep_kv=False), Variant("ulysses", "ulysses")]
    return [
        needed[0],
        Variant("ulysses, needed", "needed", 1, two_level=True),
        Variant("ulysses, ring", "ring", keep_kv=False, two_level=True),
    ]


def scenarios(num_hosts: int, per_host: int, args: argparse.Namespace) -> list[Scenario]:
    """Documents, and masks under which compute takes at least as long as the needed traffic (measured, two cores).

    At 200 Mbit/s that is a window of 2,048 keys, where `local` cuts contiguously, and causal attention under head_tail,
    where nearly all K/V are needed.
    """
    rate = args.rate * 1e6
    documents = [
        Scenario(f"documents, seed {seed}", "documents", args.seq_len, num_hosts, rate, seed=seed)
        for seed in args.seeds
    ]
    window = Scenario("window 2048", "window", args.seq_len, num_hosts, rate, window=2047)
    causal = Scenario("causal", "causal", args.seq_len // 2, num_hosts, rate, balancer="head_tail")
    if not args.exchanges:
        return documents if args.quick else [*documents, window, causal]
    # The mask that needs the least of others' K/V, and the one that needs the most.
    found = documents if args.quick or per_host > 1 else [*documents, causal]
    return [dataclasses.replace(one, kv_heads=2, per_host=per_host) for one in found]


def peer_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """Documents, and the causal mask that every package takes; shorter, for on CPU all of them compute densely."""
    rate = args.rate * 1e6
    return [
        scenario
        for num_hosts in args.hosts
        for scenario in (
            Scenario("documents, seed 0", "documents", args.seq_len // 2, num_hosts, rate),
            Scenario("causal", "causal", args.seq_len // 4, num_hosts, rate, balancer="head_tail"),
        )
    ]


def start_hosts(num_hosts: int, rate: float, per_host: int = 1) -> Hosts:
    command = [sys.executable, str(Path(__file__).with_name("slow_link_rank.py"))]
    # As it is here, so that the hosts import the same spanwise.
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return Hosts(num_hosts, rate, command, environment, per_host)


def job(scenario: Scenario, variants: list[Variant], repeats: int, hardware: Hardware | None) -> dict[str, Any]:
    return {
        "scenario": dataclasses.asdict(scenario),
        "variants": [dataclasses.asdict(variant) for variant in variants],
        "repeats": repeats,
        "hardware": None if hardware is None else hardware.to_dict(),
    }


def calibrate(hosts: Hosts, kv_heads: int) -> Hardware:
    """The hardware as these hosts measure it together, on shapes of calibration's own."""
    print(f"\ncalibrating {hosts.num_hosts} hosts of {hosts.per_host} ranks")
    hardware = Hardware.from_dict(run(hosts, {"calibrate": True, "kv_heads": kv_heads})[0]["hardware"])
    print(f"  {hardware}")
    return hardware


def run(hosts: Hosts, task: dict[str, Any], timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """One task on every host; what each rank measured."""
    num_ranks = hosts.num_hosts * hosts.per_host
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    outs = [str(hosts.folder / f"rank-{rank}.pt") for rank in range(num_ranks)]
    store = str(hosts.folder / "store")
    about = {"num_ranks": num_ranks, "per_host": hosts.per_host, "store": store, "threads": threads}
    jobs = [{**about, **task, "rank": rank, "out": out} for rank, out in enumerate(outs)]
    hosts.run(jobs, timeout, lambda text: print(f"  {text}", flush=True))
    return [torch.load(out, weights_only=True) for out in outs]


def write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def available_memory() -> int:
    """Bytes that new processes can have without harm to others."""
    with open("/proc/meminfo") as file:
        kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    return int(0.85 * 1024 * kib)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; hosts and links are removed")
