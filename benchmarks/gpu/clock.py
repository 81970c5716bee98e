"""Median times of calls on a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.rank_share import seconds


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
