"""``spanwise calibrate``: starts ranks, or takes part in those of torchrun, and measures on all of them.

`spanwise.calibrate` measures; this module starts the ranks and shows the figures.
"""

from __future__ import annotations

import dataclasses
import statistics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.measure import Calibration, measure
from spanwise.cli.output import check_writable
from spanwise.cli.ranks import join_torchrun, run_ranks, torchrun_size
from spanwise.cli.report.terminal import console, table
from spanwise.cli.report.units import percent, seconds

_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """Options of ``spanwise calibrate``.

    Attributes:
        ranks: local processes to start. Default: 2, or what torchrun started.
        out: file for the figures; plan takes it as --hardware.
        device: of the ranks: cpu (gloo) or cuda (NCCL).
        kernel: as `context_parallel_attention` takes it.
        heads: query heads.
        kv_heads: heads of K and V. Default: as --heads.
        head_dim: width of a head.
        dtype: of q, K and V.
        host_size: ranks of a host, where host names do not tell them apart.
    """

    ranks: int = 2
    out: str | None = None
    device: str = "cpu"
    kernel: str = "auto"
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: str = "float32"
    host_size: int | None = None

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
        check_writable(self.out)


def calibrate(options: CalibrateOptions) -> int:
    """Measure this machine and its links. Plans are priced with the figures.

    Starts --ranks local processes, or takes part in those that torchrun started, on one host or several:
    torchrun --nnodes 2 --nproc-per-node 8 ... -m spanwise calibrate --device cuda --out cluster.json
    """
    if torchrun_size() is None:
        return run_ranks(calibrate_rank, options, options.ranks, options.device)
    join_torchrun(options.device)
    return calibrate_rank(options)


def calibrate_rank(options: CalibrateOptions) -> int:
    """One rank's part; rank 0 prints the figures and writes the file."""
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    result = measure(
        mesh,
        device=device,
        kernel=options.kernel,
        num_q_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        host_size=options.host_size,
    )
    if dist.get_rank() == 0:
        show(result)
        if options.out is not None:
            result.hardware.save(options.out)
            print(f"written to {options.out}")
    return 0


def show(result: Calibration) -> None:
    """Print the figures, and the errors of their fit."""
    hardware = result.hardware
    columns = ("figure", "measured", "error of the fit, mean and largest")
    shown = table(f"{hardware.name}, measured in {result.seconds:.1f} s", columns, ("figure",))

    def row(figure: str, measured: str) -> None:
        errors = [abs(sample.error) for sample in result.samples if sample.figure == figure]
        fit = (
            f"{percent(statistics.mean(errors), 1)}, {percent(max(errors), 1)} of {len(errors)} samples"
            if errors
            else ""
        )
        shown.add_row(figure, measured, fit)

    row("attention forward", f"{hardware.attention_flops / 1e9:,.1f} GFLOP/s")
    row("attention backward", f"{hardware.attention_backward_flops / 1e9:,.1f} GFLOP/s")
    row("call of the attention kernel", seconds(hardware.kernel_seconds))
    row("pairs at a query's edge", f"{hardware.edge_pairs:.0f}")
    row("matrix product", f"{hardware.matmul_flops / 1e9:,.1f} GFLOP/s")
    row("memory, read and written", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s")
    figures = list(dict.fromkeys(s.figure for s in result.samples if s.figure.startswith("link")))
    for figure, link in zip(figures, reversed(hardware.links), strict=False):
        row(figure, f"{link.bandwidth / 1e6:,.1f} MB/s a rank, {seconds(link.latency)}")
    for collective, factor in hardware.wire:
        row(f"{collective} on the wire", f"{factor:.2f} × its bytes")
    console().print(shown)
