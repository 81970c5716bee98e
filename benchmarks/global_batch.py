"""Global batches: steps under one plan over all ranks, and under fixed dp × cp grids, predicted and measured.

    sudo python benchmarks/global_batch.py --out benchmarks/results/global-batch-cpu.json
    sudo python benchmarks/global_batch.py --quick
    python benchmarks/global_batch.py --predict            # 32 nominal H100s alone; no root, no ranks

Hosts are network namespaces (`hosts.py`) of one process each, which keeps to one core. A step is forward and backward
of a small decoder on a global batch of packed documents. It takes as long as its slowest rank. Sums of gradients and
the optimizer are left out: they are the same in all ways. Two hosts have a core each, and steps are measured. Four
hosts share two cores here: CPU seconds of each rank are measured, and the step is predicted. Predictions use figures
that were calibrated on the two hosts, or those of --hardware, and the CPU seconds of a token without attention.

Where others use the machine, medians of measured steps hold their time, too; CPU seconds hold less of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from global_batch_ways import MODEL, Way, share, ways
from hosts import INTERFACE, Hosts, missing
from slow_link import machine, write

import spanwise
from spanwise.hardware import Hardware
from spanwise.planning.grids import Grid, compare_grids, grid_of

TIMEOUT = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s that each host sends, and receives")
    parser.add_argument("--tokens", type=int, default=8192, help="of a global batch")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the documents")
    parser.add_argument("--hardware", type=Path, help="a file of spanwise calibrate, in place of calibrating here")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="4,096 tokens, one seed, 3 repeats, two hosts")
    parser.add_argument("--predict", action="store_true", help="only what is predicted for 32 nominal H100s")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "predicted": predicted(args.seeds), "measured": []}
    if not args.predict:
        if lack := missing():
            parser.exit(2, f"{parser.prog}: {lack}\n")
        if args.quick:
            args.tokens, args.seeds, args.repeats = 4096, args.seeds[:1], 3
        measure(args, result)
    write(result, args.out)


def documents(median: float, sigma: float, seed: int, tokens: int) -> np.ndarray:
    """Lengths of lognormal documents that fill so many tokens; the last is cut."""
    random, lengths = np.random.default_rng(seed), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(int(max(1, min(random.lognormal(np.log(median), sigma), left))))
    return np.array(lengths)


def predicted(seeds: list[int]) -> list[dict[str, Any]]:
    """32 nominal H100s, 1,048,576 tokens, a layer as in Llama 3 8B: grids, and one plan with 1.5 × the mean tokens."""
    flops = 6.0 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hardware": spanwise.H100}
    rows = []
    for median, sigma in ((2_000, 1.6), (16_000, 1.2)):
        for seed in seeds:
            lengths = documents(median, sigma, seed, 1 << 20)
            grids = compare_grids(lengths, 32, linear_flops=flops, max_tokens=3 << 14, **shape)  # type: ignore[arg-type]
            about = {"median": median, "sigma": sigma, "seed": seed, "longest": int(lengths.max())}
            rows.append(about | {"documents": len(lengths), "ways": [summary(grid) for grid in grids]})
            print(f"\nmedian {median:,}, sigma {sigma}, seed {seed}: longest {lengths.max():,}")
            for grid in grids:
                show(f"{grid.dp} × {grid.cp} {grid.assignment}", summary(grid))
    return rows


def summary(grid: Grid) -> dict[str, Any]:
    return {
        "dp": grid.dp, "cp": grid.cp, "documents": grid.assignment, "seconds": grid.seconds,
        "work_imbalance": grid.work_imbalance, "token_imbalance": grid.token_imbalance,
        "recv_bytes_mean": float(grid.recv_bytes.mean()), "recv_bytes_max": float(grid.recv_bytes.max()),
    }  # fmt: skip


def show(name: str, row: dict[str, Any]) -> None:
    measured = f", measured {1e3 * row['measured']:.0f} ms" if "measured" in row else ""
    cpu = f", CPU {[round(1e3 * x) for x in row['cpu']]} ms" if "cpu" in row else ""
    print(
        f"  {name:42} predicted {1e3 * row['seconds']:.1f} ms{measured}{cpu}, work {row['work_imbalance']:.2f}, tokens "
        f"{row['token_imbalance']:.2f}",
        flush=True,
    )


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Rows of two hosts and of four, added to `result`."""
    hardware, flops = None, 0.0
    given = None if args.hardware is None else Hardware.load(args.hardware)
    for ranks in (2,) if args.quick else (2, 4):
        command = [sys.executable, str(Path(__file__).with_name("global_batch_rank.py"))]
        environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with Hosts(ranks, args.rate * 1e6, command, environment) as hosts:
            if hardware is None:
                found = run(hosts, {"calibrate": given is None})
                hardware = given or Hardware.from_dict(found[0]["hardware"])
                flops = float(np.median([x["token_seconds"] for x in found])) * hardware.matmul_flops
                result |= {"hardware": hardware.to_dict(), "linear_flops": flops, "model": MODEL}
                print(f"\n{hardware}\n{flops:,.0f} FLOPs a token at the rate of products")
            for seed in args.seeds:
                lengths = documents(300, 1.4, seed, args.tokens)
                job = {"lengths": lengths.tolist(), "hardware": hardware.to_dict(), "linear_flops": flops}
                tried = ways(ranks)
                job |= {"ways": [dataclasses.asdict(way) for way in tried], "repeats": args.repeats}
                print(f"\n{ranks} hosts, seed {seed}: {len(lengths)} documents, longest {lengths.max():,}")
                load = os.getloadavg()[0]
                answers = run(hosts, job)
                rows = [row(way, lengths, ranks, hardware, flops, answers) for way in tried]
                about = {"ranks": ranks, "seed": seed, "tokens": args.tokens, "documents": lengths.tolist()}
                result["measured"].append(about | {"load_before": load, "ways": rows})
                for way, one in zip(tried, rows, strict=True):
                    show(way.name, one)
                write(result, args.out)


def row(
    way: Way, lengths: np.ndarray, ranks: int, hardware: Hardware, flops: float, answers: list[dict[str, Any]]
) -> dict[str, Any]:
    """What was predicted and measured of one way; the losses of all ways must agree."""
    plans = [None if one is None else one[1] for one in share(way, lengths, ranks, hardware, flops)]
    found = summary(grid_of(way.dp, ranks // way.dp, way.documents, plans, flops))
    mine = [answer[way.name] for answer in answers]
    times = np.array([one["times"] for one in mine])  # [ranks, repeats, 2]
    steps = times[:, :, 1].max(axis=0) - times[:, :, 0].min(axis=0)
    loss, first = (sum(answer[name]["loss"] for answer in answers) for name in (way.name, "one plan"))
    if abs(loss - first) > 1e-4 * abs(first):
        raise SystemExit(f"{way.name} has loss {loss}, one plan {first}")
    found |= {"cpu": [float(np.median(one["cpu"])) for one in mine], "name": way.name}
    if ranks <= len(os.sched_getaffinity(0)):
        found |= {"measured": float(np.median(steps)), "measured_least": float(steps.min())}
    return found


def run(hosts: Hosts, task: dict[str, Any]) -> list[dict[str, Any]]:
    """One task on every host; what each rank measured."""
    outs = [str(hosts.folder / f"rank-{rank}.pt") for rank in range(hosts.num_hosts)]
    about = {"num_ranks": hosts.num_hosts, "store": str(hosts.folder / "store"), "cores": list(os.sched_getaffinity(0))}
    jobs = [{**about, **task, "rank": rank, "out": out} for rank, out in enumerate(outs)]
    hosts.run(jobs, TIMEOUT, lambda text: None)
    return [torch.load(out, weights_only=True) for out in outs]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; hosts and links are removed")
