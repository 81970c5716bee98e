"""What it costs to compare the calls of all ranks, per attention call.

    torchrun --nproc-per-node 2 benchmarks/compare_calls.py --out benchmarks/results/compare_calls.json

Figures in microseconds:

    compare    of the thread that calls: a call that was expected, with the hook for its backward
    thread     CPU time of the other threads for it: all-gathers of digests, for many calls at once
    attention  a whole attention call, with the comparison and without it, in turns
    wait       a call that was not expected: until all ranks have made it
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import spanwise
from spanwise.attention import attention, compare
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import resolve


def seconds(fn: Callable[[], Any], calls: int, times: int = 10) -> float:
    """The least of some means, so that other work on the machine does not count."""
    means = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        means.append((time.perf_counter() - began) / calls)
    return min(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    plan = spanwise.make_plan(spanwise.SpanMask.causal(given.tokens), mesh.size(), exchange="needed", stages=1)
    local = plan.local(mesh, kernel="sdpa")
    q, k, v = (torch.randn(1, heads, local.tokens.shape[1], 64, requires_grad=True) for heads in (4, 2, 2))
    kernel, out, scales = resolve("sdpa", q.device, None), q * 2, itertools.count(1)

    def compared(scale: float | None = None) -> None:
        options = AttentionOptions(scale, None, None)
        later = compare.compare_attention((q, k, v), local, mesh, kernel, "default", options, None, (False, False))
        compare.compare_backward((out,), later)

    def attend() -> None:
        spanwise.context_parallel_attention(q, k, v, local, mesh, kernel="sdpa")

    for _ in range(30):
        compared()
    spent = time.process_time() - time.thread_time()
    figures: dict[str, Any] = {"compare": 1e6 * seconds(compared, 50, times=200)}
    figures["thread"] = 1e6 * (time.process_time() - time.thread_time() - spent) / (50 * 200)
    for _ in range(30):
        attend()
    rows: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(9):
        rows["with"].append(seconds(attend, 5))
        with mock.patch.object(attention, "compare_attention", lambda *_: None):
            rows["without"].append(seconds(attend, 5))
    figures["attention"] = {name: 1e6 * statistics.median(each) for name, each in rows.items()}
    figures["attention"]["ratio"] = statistics.median(a / b for a, b in zip(*rows.values(), strict=True))
    figures["wait"] = 1e6 * seconds(lambda: compared(float(next(scales))), 20)
    if dist.get_rank() == 0:
        record = {"ranks": mesh.size(), "tokens": given.tokens, "torch": torch.__version__, "microseconds": figures}
        print(json.dumps(record, indent=1))
        if given.out is not None:
            given.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
