"""Planning for up to 1,024 ranks: CPU time, balance, and bytes between hosts beside a lower bound.

Exchange "hierarchical" is compared with "needed" in the same layout: bytes that stay inside hosts, and the predicted
seconds of attention in a step ("needed" in 1, 2 or 4 chunks, the best).
`by_host` has the layout in which few rows enter a host, where documents need several.

Documents have lognormal lengths, as in packed training data. Masks of one document are there for comparison. Times are
CPU seconds of one process with one thread; each is the least of a few calls. `floor` is the CPU time of the least that
any plan has to do: read the mask once and sum its area.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_scale benchmarks/results/plan-scale.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import spanwise
from benchmarks import host_bounds
from spanwise import SpanMask
from spanwise.attention.rank_plan import build
from spanwise.layouts.by_document import ByDocument
from spanwise.layouts.local import Local
from spanwise.routes.exchanges import EXCHANGES

HOST = 8
SHAPE = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
MIX = {"median 2k": (2_000, 1.6), "median 16k": (16_000, 1.2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for name, mask, ranks in cases():
        rows.append(measured(name, mask, ranks, args.repeats))
        print(json.dumps(rows[-1]), flush=True)
    found = {"torch": torch.__version__, "machine": {"cpu": platform.machine()}, "host_size": HOST, "rows": rows}
    args.output.write_text(json.dumps(found, indent=1) + "\n")


def cases() -> list[tuple[str, SpanMask, int]]:
    """Name, mask and ranks of each row."""
    found = []
    for ranks in (32, 128, 1024):
        tokens = 2**14 * ranks if ranks == 1024 else 2**15 * ranks
        for mix, (median, sigma) in MIX.items():
            found.append((f"documents, {mix}", SpanMask.documents(lognormal(tokens, median, sigma)), ranks))
    for mix, (median, sigma) in MIX.items():
        scaled = lognormal(2**24, median, sigma, count=10_000)
        found.append((f"10,000 documents, {mix}, scaled to fit", SpanMask.documents(scaled), 1024))
    tokens = 2**24
    found += [
        ("causal", SpanMask.causal(tokens), 1024),
        ("window of 4,096", SpanMask.sliding_window(tokens, 4096), 1024),
        ("frames of 1,536, 8 before", SpanMask.block_causal(tokens, 1536, 8), 1024),
    ]
    return found


def lognormal(tokens: int, median: float, sigma: float, count: int | None = None) -> np.ndarray:
    """Document offsets; `count` documents scaled to the tokens, or as many as fit."""
    rng = np.random.default_rng(0)
    if count is not None:
        drawn = rng.lognormal(np.log(median), sigma, count)
        lengths = np.maximum(1, (drawn * tokens / drawn.sum()).astype(np.int64))
        lengths[np.argmax(lengths)] += tokens - lengths.sum()
        return np.append(0, np.cumsum(lengths))
    offsets = [0]
    while offsets[-1] < tokens:
        offsets.append(min(offsets[-1] + max(1, int(rng.lognormal(np.log(median), sigma))), tokens))
    return np.array(offsets)


def measured(name: str, mask: SpanMask, ranks: int, repeats: int) -> dict[str, Any]:
    """One row: CPU seconds, balance and traffic of the plan."""

    def planned(**options: Any) -> Any:
        return spanwise.make_plan(mask, ranks, hardware=spanwise.H100, **SHAPE, **options)

    plan_seconds, plan = cpu_seconds(lambda: planned(balancer=Local(), exchange="needed", stages=1), repeats)
    auto_seconds, auto = cpu_seconds(lambda: planned(), 1)
    traffic_seconds, _ = cpu_seconds(lambda: plan.replace(layout=plan.layout).traffic(), 1)
    plan.traffic()
    build(plan, 0)  # digests the mask, once for all ranks
    tensor_seconds, _ = cpu_seconds(lambda: build(plan, 1), repeats + 1)
    bound, once_bound = host_bounds.bounds(plan, HOST)
    moved, relayed = plan.host_traffic(host_size=HOST), plan.replace(kv_exchange=EXCHANGES["hierarchical"])
    talks = (plan.traffic() + plan.traffic().T > 0).sum(axis=1)  # ranks that each rank sends to or receives from
    plan.count()
    relay_seconds, _ = cpu_seconds(relayed.route, 1)
    relayed_tensor_seconds, _ = cpu_seconds(lambda: build(relayed, 1), repeats + 1)
    once = relayed.host_traffic(host_size=HOST)
    needed_steps = [plan.replace(stages=stages).predict()["total"] for stages in (1, 2, 4)]
    return {
        "mask": name,
        "ranks": ranks,
        "tokens": plan.seq_len,
        "documents": 1 if mask.cu_seqlens is None else len(mask.cu_seqlens[0]) - 1,
        "floor_seconds": cpu_seconds(lambda: np.cumsum(mask.area()), repeats)[0],
        "plan_seconds": plan_seconds,
        "traffic_seconds": traffic_seconds,
        "tensor_seconds": tensor_seconds,
        "auto_seconds": auto_seconds,
        "auto_choice": f"{auto.balancer} with {auto.exchange} in {auto.stages}",
        "imbalance": plan.imbalance(),
        "tokens_a_rank": [int(plan.layout.tokens_per_rank.min()), int(plan.layout.tokens_per_rank.max())],
        "received_a_rank": (moved.inside + moved.between) / ranks,
        "inside_share": moved.inside / max(moved.inside + moved.between, 1),
        "between_a_rank": moved.between / ranks,
        "bound_a_rank": bound / ranks,
        "between_over_bound": moved.between / bound if bound else None,
        "once_a_rank": moved.once / ranks,
        "hierarchical": {
            "relay_seconds": relay_seconds,
            "tensor_seconds": relayed_tensor_seconds,
            "inside_share": once.inside / max(once.inside + once.between, 1),
            "between_a_rank": once.between / ranks,
            "bound_a_rank": once_bound / ranks,
            "between_over_bound": once.between / once_bound if once_bound else None,
            "step_seconds": relayed.predict()["total"],
            "needed_step_seconds": min(needed_steps),
        },
        "by_host": by_host(mask, ranks),
        "peers_mean_max": [float(talks.mean()), int(talks.max())],
    }


def by_host(mask: SpanMask, ranks: int) -> dict[str, Any] | None:
    """The layout in which few rows enter a host, with exchange "hierarchical"; None where no document needs hosts."""
    given = dict(balancer=ByDocument(host_size=HOST), exchange="hierarchical", hardware=spanwise.H100, **SHAPE)
    seconds, plan = cpu_seconds(lambda: spanwise.make_plan(mask, ranks, **given), 2)
    moved, bound = plan.host_traffic(host_size=HOST), host_bounds.bounds(plan, HOST)[1]
    if bound == 0:
        return None
    return {
        "plan_seconds": seconds,
        "imbalance": plan.imbalance(),
        "tokens_a_rank": [int(plan.layout.tokens_per_rank.min()), int(plan.layout.tokens_per_rank.max())],
        "inside_share": moved.inside / (moved.inside + moved.between),
        "between_a_rank": moved.between / ranks,
        "bound_a_rank": bound / ranks,
        "between_over_bound": moved.between / bound,
        "step_seconds": plan.predict()["total"],
    }


def cpu_seconds(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Least CPU seconds of `repeats` calls, and the last result."""
    least, result = float("inf"), None
    for _ in range(repeats):
        started = time.process_time()
        result = call()
        least = min(least, time.process_time() - started)
    return least, result


if __name__ == "__main__":
    main()
