"""Time of a call on a device: CUDA events, or the clock of the host on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Of one call, until the device has finished it."""
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    step()
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3


def medians(cases: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each case, timed in turns after two calls that compile and warm up."""
    for step in cases.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, step in cases.items():
            times[name].append(seconds(step, device))
    return {name: statistics.median(found) for name, found in times.items()}


def device_of(name: str) -> torch.device:
    """The CPU, or the first GPU."""
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", 0)
