"""The steps of the campaign, most important first; each runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import compiled, device as on, parity
from benchmarks.gpu.device import RANKS, Context, Row, call_of_a_rank, masks, milliseconds
from spanwise import SpanMask
from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.fit import fit_attention
from spanwise.calibrate.measure import _device_name, _memory
from spanwise.calibrate.rates import Ranks, copy_rate, matmul_rate, time_attention

ROOT = Path(__file__).parents[2]
PACKAGES = ("spanwise", "numpy", "numba", "triton", "pytest", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
EXCHANGES = {"needed": {"stages": 2}, "all_gather": {}, "ring": {}, "ulysses": {}, "hierarchical": {}}
Interval = tuple[float, float]


def environment(context: Context) -> None:
    """What the machine is: versions, device, memory."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    facts |= {"cores": os.cpu_count(), "device": f"CPU, {platform.machine()}"}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if not context.dry:
        found, driver = torch.cuda.get_device_properties(0), None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
        facts |= {
            "device": found.name, "devices": torch.cuda.device_count(), "capability": f"{found.major}.{found.minor}",
            "memory": found.total_memory, "multiprocessors": found.multi_processor_count, "driver": driver,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        facts["computes"] = bool((x @ x).isfinite().all())
    context.write(**facts)


def tests(context: Context) -> None:
    """tests/gpu by pytest, a row for each test as it ends, so that a crash or a hang leaves the others' results."""
    import pytest

    passed = 0

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            nonlocal passed
            if report.when == "call" or not report.passed:
                passed += report.passed
                # pytest's "E" lines are what the error says.
                lines = report.longreprtext.strip().split("\n") if report.failed else [""]
                error = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:300]
                status = "ok" if report.passed else report.outcome
                context.write(test=report.nodeid, status=status, seconds=round(report.duration, 2), error=error)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                context.write(test=report.nodeid, status="failed", error=report.longreprtext.strip()[-300:])

    # Options of the project that need plugins are cleared, and warnings of torch and Triton are not ours to fix.
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", "tests/gpu"]
    code = pytest.main(arguments, plugins=[Recorder()])
    if code not in (0, 1) or not (passed or context.dry):
        sys.exit(f"pytest ended with {code}, {passed} tests passed")


def syncs(context: Context) -> None:
    """Every exchange and kernel, forward and backward, while torch refuses any call that would wait for the device."""
    tokens, ranks = (256, 4) if context.dry else (8192, 4)
    mask = SpanMask.documents([0, tokens // 3, tokens // 2, tokens])
    for kernel, (exchange, options) in itertools.product(context.kernels, EXCHANGES.items()):
        with (
            context.attempt(what="exchange without a wait", exchange=exchange, kernel=kernel) as found,
            call_of_a_rank(mask, ranks, kernel, context.device, context.dtype, exchange=exchange, **options) as call,
        ):
            for _ in range(2):
                call.step()  # compiles, and makes what a plan's first call makes
            call.group.received = call.group.launches = 0
            with _no_waits(context):
                call.step()
            found |= {"collectives": call.group.launches, "bytes received": call.group.received}


@contextlib.contextmanager
def _no_waits(context: Context) -> Iterator[None]:
    """Calls that wait for the device raise."""
    if context.dry:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replay(context: Context) -> None:
    """The whole call of one rank of 8, its collectives replayed as copies, beside torch's attention on one device.

    Each row is the busiest rank of a plan: forward and backward in milliseconds of the device, the host's part, the
    peak of memory, the bytes that arrive. An eighth of one device's time over the whole sequence is the floor: what is
    above it is imbalance, pieces of another shape, packing, merging and gaps.
    """
    device, dtype, until = context.device, context.dtype, time.monotonic() + context.seconds - 8
    repeats = 1 if context.dry else 7

    def times(attend: Any, leaves: Any) -> Row:
        out = attend()
        cotangent = torch.ones_like(out)
        backward = lambda: torch.autograd.grad(out, leaves, cotangent, retain_graph=True)  # noqa: E731
        return milliseconds({"forward ms": attend, "backward ms": backward}, device, repeats)

    floors: dict[tuple[str, int], Row] = {}
    for tokens, kernel in itertools.product((512,) if context.dry else (65_536, 131_072), context.kernels[::-1]):
        for name, mask in masks(tokens).items():
            if (name, tokens) not in floors and time.monotonic() < until:
                with context.attempt(what="one device", mask=name, tokens=tokens) as found:
                    floors[name, tokens] = times(*on.one_device(name, tokens, device, dtype))
                    found |= floors[name, tokens]
            for chunks in (1, 2, 4):
                if time.monotonic() > until:
                    return
                row = {"what": "rank of 8", "mask": name, "tokens": tokens, "kernel": kernel, "chunks": chunks}
                with (
                    context.attempt(**row) as found,
                    call_of_a_rank(mask, RANKS, kernel, device, dtype, exchange="needed", stages=chunks) as call,
                ):
                    found |= times(call.attend, call.leaves)
                    found |= milliseconds({"host ms": call.step}, device, repeats, on.host_seconds)
                    call.group.received = 0
                    call.attend()
                    found |= {"received": call.group.received, "peak": on.allocated(call.step, device)}
                    found |= {"imbalance": call.plan.imbalance()}
                    floor = floors.get((name, tokens), {})
                    found |= {f"{part} over an eighth": found[part] / floor[part] * RANKS for part in floor}


def trace(context: Context) -> None:
    """A profile of three calls: how long the device computes, copies, idles between, and how much copies hide."""
    device, mask = context.device, masks(512 if context.dry else 65_536)["documents"]
    kinds = ("cpu_op",) if context.dry else ("kernel", "gpu_memcpy", "gpu_memset")
    for kernel in context.kernels:
        with context.attempt(what="three calls", kernel=kernel) as found, tempfile.TemporaryDirectory() as folder:
            with call_of_a_rank(mask, RANKS, kernel, device, context.dtype, exchange="needed", stages=2) as call:
                for _ in range(2):
                    call.step()
                activities = [ProfilerActivity.CPU, *([] if context.dry else [ProfilerActivity.CUDA])]
                with profile(activities=activities) as profiler:
                    for _ in range(3):
                        call.step()
                    if not context.dry:
                        torch.cuda.synchronize()
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
            events = [event for event in events if event.get("cat") in kinds]
            found |= _summary(events)
            total: dict[str, list[float]] = {}
            for event in events:
                total.setdefault(event["name"][:80], []).append(float(event["dur"]) / 1e3)
            for name, each in sorted(total.items(), key=lambda item: -sum(item[1]))[:12]:
                context.write(what="launches", kernel=kernel, name=name, count=len(each), ms=sum(each))


def _summary(events: list[Row]) -> Row:
    """Milliseconds on the busiest stream and the others, gaps on the busiest, and copies under its work."""
    streams: dict[object, list[Interval]] = {}
    for event in events:
        at = float(event["ts"]) / 1e3, (float(event["ts"]) + float(event["dur"])) / 1e3
        streams.setdefault(event.get("args", {}).get("stream", event.get("tid")), []).append(at)
    busiest = streams.pop(max(streams, key=lambda stream: _covered(streams[stream])))
    rest = list(itertools.chain(*streams.values()))
    compute, others, together = map(_covered, (busiest, rest, busiest + rest))
    span = max(end for _, end in busiest) - min(begin for begin, _ in busiest)
    return {
        "span ms": span, "compute ms": compute, "gaps ms": span - compute, "other streams ms": others,
        "of them hidden ms": compute + others - together, "launches": len(events),
    }  # fmt: skip


def _covered(intervals: list[Interval]) -> float:
    """Length of the union of intervals."""
    total, covered = 0.0, 0.0
    for begin, end in sorted(intervals):
        total, covered = total + max(0.0, end - max(begin, covered)), max(covered, end)
    return total


def lengths(context: Context) -> None:
    """What grows with the batch: `varlen` with more sequences, and compiled `flex` with other lengths."""
    device, dtype, repeats = context.device, context.dtype, 1 if context.dry else 5
    tokens, many, few = 2048 if context.dry else 65_536, context.kernels[0], context.kernels[-1]
    for sequences in (10, 30, 100) if context.dry else (10, 300, 3000):
        mask = SpanMask.documents(np.linspace(0, tokens, sequences + 1).astype(int))
        with (
            context.attempt(what="sequences", kernel=many, tokens=tokens, sequences=sequences) as found,
            call_of_a_rank(mask, RANKS, many, device, dtype, exchange="needed", stages=1) as call,
        ):
            found |= milliseconds({"ms": call.step}, device, repeats) | {"peak": on.allocated(call.step, device)}
    for length in (tokens, tokens - 512, tokens // 2, tokens // 2 + 256, tokens // 4):
        with (
            context.attempt(what="lengths", kernel=few, tokens=length) as found,
            call_of_a_rank(masks(length)["documents"], RANKS, few, device, dtype, exchange="needed") as call,
        ):
            before, begin = counters["stats"]["unique_graphs"], time.perf_counter()
            call.step()
            if not context.dry:
                torch.cuda.synchronize()
            found["first call s"] = time.perf_counter() - begin
            found["graphs"] = counters["stats"]["unique_graphs"] - before
            found |= milliseconds({"ms": call.step}, device, repeats)


def calibrate(context: Context) -> None:
    """The rates that `spanwise calibrate` measures, on one device; and attention that they were not fitted to.

    Calibration also measures links between devices, so the command needs two. With one device this runs the rest.
    """

    class Alone(Ranks):
        def __init__(self) -> None:
            self.device, self.size, self.rank = context.device, 1, 0

        def over_ranks(self, values: Any) -> list[float]:
            return list(values)

    alone, heads, dtype, repeats = Alone(), (8, 2, 64), context.dtype, 1 if context.dry else 5
    longer = 1 if context.dry else 16
    # Two lengths: FlexAttention compiles for each number of queries.
    fitted = [(longer * n, longer * m) for n, m in ((1024, 64), (1024, 512), (2048, 128), (2048, 1024))]
    others = [(longer * n, longer * m) for n, m in ((1024, 256), (2048, 512))]
    context.write(what="device", name=_device_name(alone.device), memory=_memory(alone, 1))
    context.write(what="matrix product", tflops=matmul_rate(alone, dtype, repeats) / 1e12)
    context.write(what="memory, read and written", gb_per_s=copy_rate(alone, repeats) / 1e9)
    kernel = resolve("auto", alone.device)
    known = time_attention(alone, kernel, heads, dtype, fitted, repeats)
    try:
        rates, _ = fit_attention(*known)
    except ValueError as error:
        # Times of a busy host need not grow with the work; those of a GPU must.
        context.write(what="fit", status="not possible" if context.dry else "failed", error=str(error))
        return
    context.write(what="fit", **rates)
    for call, seconds in zip(*time_attention(alone, kernel, heads, dtype, others, repeats), strict=True):
        rate = rates["attention_backward_flops" if call.backward else "attention_flops"]
        work = call.flops + rates["edge_pairs"] * call.tokens * call.pair_flops
        figures = {"measured_ms": 1e3 * seconds, "predicted_ms": 1e3 * (rates["kernel_seconds"] + work / rate)}
        context.write(what="prediction", call=call.what, backward=call.backward, **figures)


def train(context: Context) -> None:
    """``examples/train_packed.py`` with one rank on the device; its first steps are compared with a dense mask."""
    sizes = {"steps": 2, "seq-len": 256} if context.dry else {"steps": 10, "seq-len": 8192}
    with tempfile.TemporaryDirectory(prefix="spanwise-train-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"{ROOT}/examples/train_packed.py"]
        command += ["--device", context.device.type, "--prove", "2", "--out", folder]
        command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        subprocess.run(command, check=True)  # ends with 1 if the comparison fails
        found = json.loads(Path(folder, "metrics.json").read_text())["steps"]
    row = {**sizes, "first loss": found[0]["loss"], "last loss": found[-1]["loss"], "proved": True}
    for name in ("loss_error", "gradient_error"):
        row[f"max {name.replace('_', ' ')}"] = max(step[name] for step in found[:2])
    context.write(what="train_packed", **row, tokens_per_second=found[-1]["tokens_per_second"])


#: Each step and its seconds, less than ten minutes in all. What would be worst to miss comes first, and what may crash
#: last.
STEPS: dict[str, tuple[Callable[[Context], None], float]] = {
    "environment": (environment, 20), "tests": (tests, 70), "syncs": (syncs, 35), "parity": (parity.run, 120),
    "replay": (replay, 120), "trace": (trace, 30), "layers": (compiled.layers, 40), "lengths": (lengths, 45),
    "calibrate": (calibrate, 35), "train": (train, 35), "overlap": (compiled.step, 40),
}  # fmt: skip
