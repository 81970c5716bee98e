"""The job behind ``spanwise calibrate``: starts ranks, or takes part in those of torchrun, and measures on all of them.

Stands above `calibrate`, which only measures; shows what was measured, and borrows how ranks are started from `train`.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from spanwise import calibrate
from spanwise.attention.kernels.table import resolve
from spanwise.cli.report.terminal import console
from spanwise.train.launch import Rank, cores, launch

_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """What the command line asks for; ``ValueError`` names what does not serve, before a process starts."""

    ranks: int
    out: str | None
    device: str
    kernel: str
    heads: int
    kv_heads: int | None
    head_dim: int
    dtype: str
    host_size: int | None

    def __post_init__(self) -> None:
        for name in ("ranks", "heads", "kv_heads", "head_dim", "host_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.ranks == 1:
            raise ValueError("calibration measures links, and a link needs two ranks; got ranks=1")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {list(_DTYPES)}, got {self.dtype!r}")
        if self.host_size and self.ranks % self.host_size:
            raise ValueError(f"{self.ranks} ranks are not hosts of {self.host_size}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda needs a GPU for each local rank, found none; use --device cpu")
        resolve(self.kernel, torch.device(self.device))
        if self.out is not None and (Path(self.out).is_dir() or not Path(self.out).absolute().parent.is_dir()):
            raise ValueError(f"--out must be a file in a folder that exists, got {self.out}")


def run(options: CalibrateOptions, mine: Rank | None) -> int:
    """Measure on local ranks, or as the rank ``mine``. Returns the exit status."""
    if mine is not None:
        return calibrate_rank(mine, options)
    return launch(calibrate_rank, options, ranks=options.ranks)


def calibrate_rank(rank: Rank, options: CalibrateOptions) -> int:
    """One rank's part; the first prints what was measured and writes the file."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank.local_rank)
        device = torch.device("cuda", rank.local_rank)
    else:
        torch.set_num_threads(max(1, cores() // rank.local_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=rank.init_method, rank=rank.rank, world_size=rank.size)
    mesh = init_device_mesh(options.device, (rank.size,), mesh_dim_names=("cp",))
    result = calibrate.measure(
        mesh,
        device=device,
        kernel=options.kernel,
        num_q_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        host_size=options.host_size,
    )
    if rank.rank == 0:
        show(result)
        if options.out is not None:
            result.hardware.save(options.out)
            print(f"written to {options.out}")
    dist.destroy_process_group()
    return 0


def show(result: calibrate.Calibration) -> None:
    """Print the figures, and how well they fit what was timed."""
    hardware = result.hardware
    table = Table(title=f"{hardware.name}, measured in {result.seconds:.1f} s")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("error of the fit, mean and largest", justify="right")

    def row(figure: str, measured: str) -> None:
        errors = [abs(sample.error) for sample in result.samples if sample.figure == figure]
        fit = f"{statistics.mean(errors):.1%}, {max(errors):.1%} of {len(errors)} samples" if errors else ""
        table.add_row(figure, measured, fit)

    row("attention forward", f"{hardware.attention_flops / 1e9:,.1f} GFLOP/s")
    row("attention backward", f"{hardware.attention_backward_flops / 1e9:,.1f} GFLOP/s")
    row("call of the attention kernel", f"{hardware.kernel_seconds * 1e3:.3f} ms")
    row("pairs at a query's edge", f"{hardware.edge_pairs:.0f}")
    row("matrix product", f"{hardware.matmul_flops / 1e9:,.1f} GFLOP/s")
    row("memory, read and written", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s")
    figures = list(dict.fromkeys(s.figure for s in result.samples if s.figure.startswith("link")))
    for figure, link in zip(figures, reversed(hardware.links), strict=False):
        row(figure, f"{link.bandwidth / 1e6:,.1f} MB/s a rank, {link.latency * 1e3:.3f} ms")
    for collective, factor in hardware.wire:
        row(f"{collective} on the wire", f"{factor:.2f} × its bytes")
    console().print(table)
