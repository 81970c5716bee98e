"""Plans stay as they are: choices, layouts, traffic, bytes and seconds, compared with a file.

`python -m tests.planning.test_golden` writes the file anew; do so only where plans are meant to change, and say why in
the commit. Every mask meets three of the ways to plan, every way several masks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask

FILE = Path(__file__).parent / "golden_plans.json"
SHAPE: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64}
ENFORCED = {"num_ranks": 4, "exchange": "needed", "stages": 2}
TWO_LEVELS = {"num_ranks": (2, 2), "keep_kv": False, "dtype": "float32"}
WAYS: dict[str, dict[str, Any]] = (
    {f"auto, {ranks}": {"num_ranks": ranks} for ranks in (1, 2, 4, 8, 16)}
    | {name: {"num_ranks": 4, "exchange": name} for name in ("all_gather", "needed", "ring", "ulysses")}
    | {name: ENFORCED | {"balancer": name} for name in ("contiguous", "head_tail", "ptrr", "lpt", "spt", "local")}
    | {f"two levels, {name}": TWO_LEVELS | {"exchange": name} for name in ("needed", "ring")}
)


def documents(seed: int, length: int, median: float) -> list[int]:
    """Offsets of log-normal documents that fill `length` tokens."""
    rng, offsets = np.random.default_rng(seed), [0]
    while offsets[-1] < length:
        offsets.append(min(length, offsets[-1] + max(1, int(rng.lognormal(np.log(median), 1.0)))))
    return offsets


def masks() -> Iterator[tuple[str, SpanMask]]:
    for seed, length, median in ((0, 4096, 300), (1, 5000, 90), (2, 8191, 1500)):
        offsets = documents(seed, length, median)
        yield f"documents {seed}", SpanMask.documents(offsets)
        yield f"documents {seed}, window", SpanMask.documents(offsets, window=(200, 0))
        yield f"documents {seed}, full", SpanMask.documents(offsets, causal=False)
    offsets = documents(3, 3000, 400)
    yield "prefix", SpanMask.prefix_lm(offsets, [(b - a) // 3 for a, b in itertools.pairwise(offsets)])
    yield "causal, odd", SpanMask.causal(3001)
    yield "window", SpanMask.sliding_window(6000, 500, 20)
    yield "shared prefix", SpanMask.shared_prefix(700, [300, 20, 0, 911, 5])
    yield "video", SpanMask.block_causal(4100, 96, num_previous=6, global_tokens=64)
    yield "full", SpanMask.full(1000)
    yield "short", SpanMask.documents([0, 40, 103])
    yield "batch", SpanMask.stack([SpanMask.documents(documents(seed, 2048, 200)) for seed in (4, 5, 6)])
    yield "union", SpanMask.sliding_window(3000, 100) | SpanMask.block_causal(3000, 50, 0, 30)


def requests() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, mask or masks, and the other arguments of `make_plan`."""
    for i, (name, mask) in enumerate(masks()):
        for j in (i, i + 6, i + 11):
            way = list(WAYS)[j % len(WAYS)]
            yield f"{name}; {way}", mask, SHAPE | WAYS[way]
    offsets = documents(7, 4096, 500)
    several = {"full": SpanMask.documents(offsets), "near": SpanMask.documents(offsets, window=(128, 0))}
    yield "two masks", several, SHAPE | {"num_ranks": 16, "weights": {"full": 1, "near": 5}}
    by_document = {"num_ranks": 4, "balancer": "per_document_head_tail"}
    yield "per document", SpanMask.documents(offsets), SHAPE | by_document
    yield "no shape", SpanMask.causal(4096), {"num_ranks": 8}
    yield "budget", SpanMask.documents(offsets), SHAPE | {"num_ranks": 8, "memory_budget": 2_000_000}
    yield "latents", SpanMask.documents(offsets), SHAPE | {"num_ranks": 4, "kv_row_dim": 96}
    padded = spanwise.Packing([0, 5, 13, 13, 40], cu_seqlens_q_padded=[0, 16, 32, 48, 96])
    yield "packing", padded.mask(), SHAPE | {"num_ranks": 4, "packing": padded, "balancer": "dual_chunk"}
    cross = spanwise.Packing([0, 50, 90], cu_seqlens_kv=[0, 200, 270])
    yield "cross", cross.mask(causal=False), SHAPE | {"num_ranks": 2, "packing": cross}


def record(mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a plan says in numbers: a digest of whole ones, and seconds."""
    plan = spanwise.make_plan(mask, **given)
    sha = hashlib.sha256()
    figures = [plan.work, plan.local_work, plan.traffic, plan.recv_tokens, plan.needed_tokens]
    if plan.num_q_heads:
        figures += [plan.recv_bytes, plan.resident_bytes, plan.saved_bytes]
    for array in (
        *(plan.runs(rank) for rank in range(plan.num_ranks)),
        *(f(name) for f in figures for name in plan.masks),
    ):
        sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    chosen = [plan.balancer, plan.exchange, plan.stages, plan.inner, plan.keep_kv, len(plan.candidates)]
    return {"chosen": chosen, "digest": sha.hexdigest()[:16], "seconds": plan.predict() if plan.num_q_heads else {}}


REQUESTS = {name: (mask, given) for name, mask, given in requests()}
GOLDEN = json.loads(FILE.read_text())


def test_every_way_and_case_is_in_the_file() -> None:
    assert list(REQUESTS) == list(GOLDEN)
    assert {name.split("; ")[1] for name in REQUESTS if "; " in name} == set(WAYS)


@pytest.mark.parametrize("group", sorted({name.split(";")[0] for name in REQUESTS}))
def test_plans_are_as_they_were(group: str) -> None:
    for name, (mask, given) in REQUESTS.items():
        if name.split(";")[0] == group:
            found, wanted = record(mask, given), dict(GOLDEN[name])
            assert found.pop("seconds") == pytest.approx(wanted.pop("seconds"), rel=1e-9), name
            assert found == wanted, name


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(record(*given))}" for name, given in REQUESTS.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
