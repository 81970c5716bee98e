"""Plans as they were before the package was rearranged, for test_golden.py: one JSON record a case.

`python -m tests.planning.golden > tests/planning/golden_plans.json` writes the file anew; do so only where plans are
meant to change, and say why in the commit. Only public names are used.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import spanwise
from spanwise import SpanMask

SHAPE = dict(num_q_heads=8, num_kv_heads=4, head_dim=64)
EXCHANGES = ("all_gather", "needed", "ring", "ulysses")


def documents(seed: int, length: int, median: float) -> list[int]:
    """Offsets of log-normal documents that fill `length` tokens."""
    rng, offsets = np.random.default_rng(seed), [0]
    while offsets[-1] < length:
        offsets.append(min(length, offsets[-1] + max(1, int(rng.lognormal(np.log(median), 1.0)))))
    return offsets


def masks() -> Iterator[tuple[str, SpanMask, dict[str, Any]]]:
    """Name, mask, and what `make_plan` is told with it."""
    for seed, length, median in ((0, 4096, 300), (1, 5000, 90), (2, 8191, 1500)):
        offsets = documents(seed, length, median)
        told = {"cu_seqlens": offsets}
        yield f"documents {seed}", SpanMask.documents(offsets), told
        yield f"documents {seed}, window", SpanMask.documents(offsets, window=(200, 0)), told
        yield f"documents {seed}, full", SpanMask.documents(offsets, causal=False), told
    offsets = documents(3, 3000, 400)
    yield "prefix", SpanMask.prefix_lm(offsets, [(b - a) // 3 for a, b in itertools.pairwise(offsets)]), {}
    yield "causal", SpanMask.causal(4096), {"cu_seqlens": [0, 4096]}
    yield "causal, odd", SpanMask.causal(3001), {"cu_seqlens": [0, 3001]}
    yield "window", SpanMask.sliding_window(6000, 500, 20), {}
    yield "shared prefix", SpanMask.shared_prefix(700, [300, 20, 0, 911, 5]), {}
    yield "video", SpanMask.block_causal(4100, 96, num_previous=6, global_tokens=64), {}
    yield "full", SpanMask.full(1000), {}
    yield "short", SpanMask.documents([0, 40, 103]), {"cu_seqlens": [0, 40, 103]}
    rows = [SpanMask.documents(documents(seed, 2048, 200)) for seed in (4, 5, 6)]
    yield "batch", SpanMask.stack(rows), {}
    yield "union", SpanMask.sliding_window(3000, 100) | SpanMask.block_causal(3000, 50, 0, 30), {}


def requests() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, mask or masks, and the other arguments of `make_plan`."""
    for name, mask, told in masks():
        for ranks in (1, 2, 4, 8):
            yield f"{name}; auto, {ranks}", mask, {**told, **SHAPE, "num_ranks": ranks}
        for exchange in EXCHANGES:
            yield f"{name}; {exchange}", mask, {**told, **SHAPE, "num_ranks": 4, "exchange": exchange}
        for balancer in ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local"):
            if balancer == "per_document_head_tail" and "cu_seqlens" not in told:
                continue
            given = {"num_ranks": 4, "balancer": balancer, "exchange": "needed", "stages": 2}
            yield f"{name}; {balancer}", mask, {**told, **SHAPE, **given}
        for exchange in ("needed", "ring"):
            given = {"num_ranks": (2, 2), "exchange": exchange, "keep_kv": False, "dtype": "float32"}
            yield f"{name}; two levels, {exchange}", mask, {**told, **SHAPE, **given}
    offsets = documents(7, 4096, 500)
    several = {"full": SpanMask.documents(offsets), "near": SpanMask.documents(offsets, window=(128, 0))}
    for ranks in (3, 16):
        weights = {"full": 1, "near": 5}
        yield (
            f"two masks; {ranks}",
            several,
            {**SHAPE, "num_ranks": ranks, "weights": weights, "hardware": spanwise.H100},
        )
    yield "no shape", SpanMask.causal(4096), {"num_ranks": 8}
    yield "budget", SpanMask.documents(offsets), {**SHAPE, "num_ranks": 8, "memory_budget": 2_000_000}
    padded = spanwise.Packing([0, 5, 13, 13, 40], cu_seqlens_q_padded=[0, 16, 32, 48, 96])
    yield "packing", padded.mask(), {**SHAPE, "num_ranks": 4, "packing": padded, "balancer": "dual_chunk"}
    cross = spanwise.Packing([0, 50, 90], cu_seqlens_kv=[0, 200, 270])
    yield "cross", cross.mask(causal=False), {**SHAPE, "num_ranks": 2, "packing": cross}


def _digest(*arrays: np.ndarray) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return sha.hexdigest()[:16]


def record(mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Everything a plan says in numbers; the text of the error where it refuses."""
    try:
        plan = spanwise.make_plan(mask, **given)
    except ValueError as error:
        return {"error": type(error).__name__}
    found: dict[str, Any] = {
        "fingerprint": plan.fingerprint,
        "chosen": [plan.balancer, plan.exchange, plan.stages, plan.num_ranks, plan.inner, plan.keep_kv],
        "considered": len(plan.candidates),
        "runs": _digest(*(plan.runs(rank) for rank in range(plan.num_ranks))),
        "masks": {},
    }
    for name in plan.masks:
        found["masks"][name] = {
            "work": plan.work(name).tolist(),
            "local_work": plan.local_work(name).tolist(),
            "traffic": _digest(plan.traffic(name)),
            "recv_tokens": plan.recv_tokens(name).tolist(),
            "needed_tokens": plan.needed_tokens(name).tolist(),
        }
        if plan.num_q_heads:
            sizes = {
                "recv": plan.recv_bytes(name),
                "resident": plan.resident_bytes(name),
                "saved": plan.saved_bytes(name),
            }
            found["masks"][name] |= {key: value.tolist() for key, value in sizes.items()}
    if plan.num_q_heads:
        found["seconds"] = plan.predict()
    return found


if __name__ == "__main__":
    records = {name: record(mask, given) for name, mask, given in requests()}
    lines = [f" {json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in records.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
