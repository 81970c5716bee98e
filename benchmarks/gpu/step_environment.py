"""What the machine is: versions, device, memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess

import torch

from benchmarks.gpu.rows import Context, write_row

PACKAGES = ("spanwise", "numpy", "numba", "triton", "pytest", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def run(context: Context) -> None:
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    facts["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    facts["device"] = f"CPU, {platform.machine()}"
    if not context.dry:
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "device": found.name, "devices": torch.cuda.device_count(), "capability": f"{found.major}.{found.minor}",
            "memory": found.total_memory, "multiprocessors": found.multi_processor_count, "driver": _driver(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        facts["computes"] = bool((x @ x).isfinite().all())
    write_row(context.rows, **facts)


def _driver() -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[0]
    return None
