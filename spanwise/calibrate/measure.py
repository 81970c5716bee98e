"""Measures the figures that plans are priced with: rates of this machine, and links of a process group.

    every rank measures at the same time ─► one number for all (slowest rank) ─► fit ─► `Hardware` ─► file

All ranks do the same thing at the same time, as in a training step: they share cores, memory and network cards. Each
time is the median of several calls, then the largest over the ranks, so that all ranks fit the same numbers and return
the same `Hardware`. `spanwise.hardware` explains the figures.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.fit import Sample, fit_attention
from spanwise.calibrate.rates import Ranks, copy_rate, matmul_rate, measure_links, time_attention
from spanwise.hardware import Hardware

#: ``(tokens, median document)``: short and long documents, small and large shards, so that the fit can separate rate,
#: edge and fixed seconds.
_PROBLEMS = ((2048, 128), (2048, 1024), (4096, 256), (4096, 1024), (4096, 4096), (8192, 512), (8192, 1024))


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The figures, the timed samples behind them, and the seconds of the whole measurement."""

    hardware: Hardware
    samples: tuple[Sample, ...]
    seconds: float


def measure(
    mesh: DeviceMesh,
    *,
    device: torch.device | str = "cpu",
    kernel: str = "auto",
    num_q_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    host_size: int | None = None,
    problems: Sequence[tuple[int, int]] | None = None,
    largest: int = 1 << 26,
    repeats: int = 5,
) -> Calibration:
    """Measure this machine and the links of a process group. A collective call.

    Args:
        mesh: 1-D mesh of the ranks that will work together, at least two.
        device: where the ranks compute; one accelerator each.
        kernel, num_q_heads, num_kv_heads, head_dim, dtype: the attention to predict.
        host_size: consecutive ranks of a host, where host names do not tell them apart; 1 means one level.
        problems: packed sequences to time attention on, ``(tokens, median document)``; default: seven of 2,048 to
            8,192 tokens, eight times longer on an accelerator.
        largest: most bytes that a rank receives; a sweep ends with the first call that takes an eighth of a second.
        repeats: timed calls of each kind, after one that is not timed.

    Raises:
        ValueError: fewer than two ranks, hosts of different sizes or scattered over the ranks, or times that do
            not grow with the work.
    """
    begin = time.perf_counter()
    ranks = Ranks(mesh, torch.device(device))
    if problems is None:
        longer = 1 if ranks.device.type == "cpu" else 8  # an accelerator would finish before it is warm
        problems = [(longer * tokens, longer * median) for tokens, median in _PROBLEMS]
    hosts = ranks.host_size(host_size)
    chosen = resolve(kernel, ranks.device)
    heads = (num_q_heads, num_kv_heads or num_q_heads, head_dim)
    if heads[0] % heads[1]:
        raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, got {heads[0]} and {heads[1]}")
    rates, attention = fit_attention(*time_attention(ranks, chosen, heads, dtype, problems, repeats))
    links, wire, collectives = measure_links(ranks, hosts, largest, repeats)
    source = (
        f"measured by spanwise calibrate, torch {torch.__version__}, {ranks.size} ranks of "
        f"{torch.get_num_threads()} threads: kernel {chosen.name}, {heads[0]} and {heads[1]} heads of {heads[2]}, "
        f"{str(dtype).removeprefix('torch.')}"
    )
    hardware = Hardware(
        name=f"{_device_name(ranks.device)}, {ranks.size} ranks",
        **rates,
        matmul_flops=matmul_rate(ranks, dtype, repeats),
        memory_bandwidth=copy_rate(ranks, repeats),
        memory=-int(ranks.over_ranks([-_memory(ranks, hosts)])[0]),
        links=links,
        wire=wire,
        source=source,
    )
    return Calibration(hardware, attention + collectives, time.perf_counter() - begin)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _memory(ranks: Ranks, host_size: int) -> float:
    """Bytes of this rank: its accelerator's, or an equal part of its host's."""
    if ranks.device.type == "cuda":
        return torch.cuda.get_device_properties(ranks.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / host_size
