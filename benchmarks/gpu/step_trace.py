"""A profile of three calls: how long the device computes, copies, idles between, and how much copies hide."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.calls import call_of_a_rank
from benchmarks.gpu.clock import device_of, masks
from benchmarks.gpu.rows import Context, attempt, write_row

Interval = tuple[float, float]


def run(context: Context) -> None:
    device = device_of(context.device)
    dtype = torch.float32 if context.dry else torch.bfloat16
    mask = masks(512 if context.dry else 65_536)["documents"]
    for kernel in ("sdpa",) if context.dry else ("varlen", "flex"):
        with attempt(context.rows, what="three calls", kernel=kernel) as found:
            with call_of_a_rank(mask, 8, kernel, device, dtype, exchange="needed", stages=2) as call:
                for _ in range(2):
                    call.step()
                activities = [ProfilerActivity.CPU, *([] if context.dry else [ProfilerActivity.CUDA])]
                with profile(activities=activities) as profiler:
                    for _ in range(3):
                        call.step()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "trace.json")
                profiler.export_chrome_trace(str(file))
                events = json.loads(file.read_text())["traceEvents"]
            kinds = ("cpu_op",) if context.dry else ("kernel", "gpu_memcpy", "gpu_memset")
            events = [event for event in events if event.get("cat") in kinds]
            found |= summary(events)
            for name, count, ms in longest(events, 12):
                write_row(context.rows, what="launches", kernel=kernel, name=name, count=count, ms=ms)


def summary(events: list[dict]) -> dict[str, float]:
    """Milliseconds on the busiest stream and the others, gaps on the busiest, and copies under its work."""
    streams: dict[object, list[Interval]] = {}
    for event in events:
        at = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        streams.setdefault(event.get("args", {}).get("stream", event.get("tid")), []).append(at)
    merged = {stream: _union(found) for stream, found in streams.items()}
    busiest = max(merged, key=lambda stream: _length(merged[stream]))
    compute = merged[busiest]
    others = _union([at for stream, found in merged.items() if stream != busiest for at in found])
    hidden = _length(compute) + _length(others) - _length(_union([*compute, *others]))
    span = compute[-1][1] - compute[0][0]
    return {
        "span ms": span / 1e3, "compute ms": _length(compute) / 1e3, "gaps ms": (span - _length(compute)) / 1e3,
        "other streams ms": _length(others) / 1e3, "of them hidden ms": hidden / 1e3, "launches": len(events),
    }  # fmt: skip


def _union(intervals: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def longest(events: list[dict], most: int) -> list[tuple[str, int, float]]:
    """Name, number and milliseconds of the launches that take longest together."""
    total: dict[str, list[float]] = {}
    for event in events:
        total.setdefault(event["name"][:80], []).append(float(event["dur"]) / 1e3)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:most]
    return [(name, len(found), sum(found)) for name, found in ranked]
