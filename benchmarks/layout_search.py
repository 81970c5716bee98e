"""Predicted step and CPU seconds of "auto" over families of masks, 8 to 1,024 ranks: to compare two versions.

    OMP_NUM_THREADS=1 python benchmarks/layout_search.py before.json    # in a checkout of the old version
    OMP_NUM_THREADS=1 python benchmarks/layout_search.py after.json --against before.json

`step` is that of the plan that "auto" takes, the simplest within 5 % of the fastest; `least` is the fastest's. Links
are all alike ("flat") or join hosts of 8. `--only` takes cases whose name contains a text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import spanwise
from spanwise import SpanMask

RANKS = {8: 2**14, 16: 2**15, 32: 2**15, 64: 2**14, 128: 2**14, 256: 2**14, 1024: 2**13}  # ranks: tokens of each
NETWORKS = {"flat": dataclasses.replace(spanwise.H100, links=spanwise.H100.links[-1:]), "hosts": spanwise.H100}
SHAPE = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--against", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    before = {row["case"]: row for row in json.loads(args.against.read_text())["rows"]} if args.against else {}
    rows: list[dict[str, Any]] = []
    for _, network, mask, ranks in cases("lognormal 60k; 64"):  # compiles the search
        spanwise.make_plan(mask, ranks, hardware=network, **SHAPE)
    for case, network, mask, ranks in cases(args.only):
        seconds = []
        for _ in range(3 if ranks < 1024 else 1):
            started = time.process_time()
            plan = spanwise.make_plan(mask, ranks, hardware=network, **SHAPE)
            seconds.append(time.process_time() - started)
        rows.append({"case": case, "choice": f"{plan.balancer}, {plan.exchange}, {plan.stages}"})
        rows[-1]["cpu_seconds"] = min(seconds)
        totals = [each.seconds["total"] for each in plan.candidates]
        rows[-1] |= {"step": plan.predict()["total"], "least": min(totals)}
        if old := before.get(case):
            for key in ("step", "least", "cpu_seconds"):
                rows[-1][f"{key}_ratio"] = rows[-1][key] / old[key]
            rows[-1]["choice_before"] = old["choice"]
        print(json.dumps(rows[-1]), flush=True)
        args.output.write_text(json.dumps({"rows": rows, "summary": summary(rows)}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


def cases(only: str) -> Iterator[tuple[str, Any, Any, int]]:
    """Name, hardware, mask or masks, ranks."""
    for ranks, tokens in RANKS.items():
        for name in FAMILIES:
            found = None
            for network, hardware in NETWORKS.items():
                if only in (case := f"{name}; {ranks} {network}"):
                    if found is None:
                        found = FAMILIES[name](ranks * tokens, np.random.default_rng(ranks))
                    yield case, hardware, found, ranks


def lognormal(tokens: int, rng: np.random.Generator, median: float, sigma: float) -> np.ndarray:
    """Document offsets."""
    lengths = rng.lognormal(math.log(median), sigma, int(2 * tokens / median) + 50).astype(np.int64) + 1
    return np.append(0, np.minimum(np.cumsum(lengths), tokens)[: np.searchsorted(np.cumsum(lengths), tokens) + 1])


def trees(tokens: int, rng: np.random.Generator) -> SpanMask:
    """Prompts of different lengths, each with answers that branch again; the last one fills up the sequence."""
    parents: list[int] = []
    lengths: list[int] = []
    left = tokens
    while left > 50_000:
        root, begun = len(parents), len(lengths)
        parents.append(-1)
        for _ in range(rng.integers(2, 7)):
            parents.append(root)
            parents += [len(parents) - 1] * int(rng.integers(0, 4))
        median = np.where(np.array(parents[begun:]) == root, 2000, 1000)
        median[0] = 4000
        lengths += np.minimum(rng.lognormal(np.log(median), 1) + 1, left // len(median)).astype(np.int64).tolist()
        left -= sum(lengths[begun:])
    return SpanMask.tree([*parents, -1], [*lengths, left])


def prefixes(tokens: int, rng: np.random.Generator) -> SpanMask:
    offsets = lognormal(tokens, rng, 16_000, 1.2)
    return SpanMask.prefix_lm(offsets, (np.diff(offsets) * rng.random(len(offsets) - 1)).astype(np.int64))


def mixed(tokens: int, rng: np.random.Generator) -> dict[str, SpanMask]:
    offsets = lognormal(tokens, rng, 16_000, 1.2)
    return {"full": SpanMask.documents(offsets), "near": SpanMask.documents(offsets, window=(1024, 0))}


FAMILIES = {
    "lognormal 2k": lambda tokens, rng: SpanMask.documents(lognormal(tokens, rng, 2_000, 1.6)),
    "lognormal 6k": lambda tokens, rng: SpanMask.documents(lognormal(tokens, rng, 6_000, 1.0)),
    "lognormal 16k": lambda tokens, rng: SpanMask.documents(lognormal(tokens, rng, 16_000, 1.2)),
    "lognormal 60k": lambda tokens, rng: SpanMask.documents(lognormal(tokens, rng, 60_000, 1.0)),
    "short": lambda tokens, rng: SpanMask.documents(lognormal(tokens // 8, rng, 4_000, 1.0)),
    "window": lambda tokens, rng: SpanMask.sliding_window(tokens, 4096),
    "causal": lambda tokens, rng: SpanMask.causal(tokens),
    "prefix": prefixes,
    "video": lambda tokens, rng: SpanMask.block_causal(tokens, 1536, 8),
    "trees": trees,
    "mixed": mixed,
}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and worst ratios, and of the CPU seconds the ratio of the sums."""
    compared = [row for row in rows if "step_ratio" in row]
    if not compared:
        return {}
    of = {key: [row[f"{key}_ratio"] for row in compared] for key in ("step", "least")}
    seconds = sum(row["cpu_seconds"] for row in compared)
    return {
        **{f"{key}, mean": float(np.mean(values)) for key, values in of.items()},
        **{f"{key}, worst": float(np.max(values)) for key, values in of.items()},
        "cpu_seconds": seconds / sum(row["cpu_seconds"] / row["cpu_seconds_ratio"] for row in compared),
    }


if __name__ == "__main__":
    main()
