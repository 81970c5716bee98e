"""``spanwise calibrate``: starts ranks, or takes part in those of torchrun, and measures on all of them.

`spanwise.calibrate` measures; this module starts the ranks and shows the figures.
"""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spanwise.advice.advise import MEASURED, NOMINAL
from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.measure import Calibration, measure
from spanwise.cli.options import CalibrateOptions
from spanwise.cli.output import check_sizes, check_writable
from spanwise.cli.ranks import join_torchrun, run_ranks, torchrun_size
from spanwise.cli.report.page import Table
from spanwise.units import seconds


def calibrate(options: CalibrateOptions, command: str = "spanwise calibrate") -> int:
    """Measure on local ranks, or take part in the ranks of torchrun."""
    started = torchrun_size()
    if started is not None and options.ranks not in (None, started):
        raise ValueError(f"torchrun started {started} processes, and --ranks says {options.ranks}; leave --ranks out")
    ranks = started or (2 if options.ranks is None else options.ranks)
    if ranks < 2:
        raise ValueError(f"calibration measures links, and a link needs two ranks; got {ranks}")
    check_sizes(options, heads=1024, kv_heads=1024, head_dim=1024, host_size=ranks)
    if options.host_size and ranks % options.host_size:
        raise ValueError(f"{ranks} ranks are not hosts of {options.host_size}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU for each local rank, found none; use --device cpu")
    resolve(options.kernel, torch.device(options.device))
    check_writable(options.out)
    if started is None:
        return run_ranks(calibrate_rank, options, ranks, options.device)
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
    rows = [
        ("attention forward", f"{hardware.attention_flops / 1e9:,.1f} GFLOP/s"),
        ("attention backward", f"{hardware.attention_backward_flops / 1e9:,.1f} GFLOP/s"),
        ("call of the attention kernel", seconds(hardware.kernel_seconds)),
        ("pairs at a query's edge", f"{hardware.edge_pairs:.0f}"),
        ("matrix product", f"{hardware.matmul_flops / 1e9:,.1f} GFLOP/s"),
        ("memory, read and written", f"{hardware.memory_bandwidth / 1e9:,.1f} GB/s"),
    ]
    figures = list(dict.fromkeys(s.figure for s in result.samples if s.figure.startswith("link")))
    for figure, link in zip(figures, reversed(hardware.links), strict=False):
        rows.append((figure, f"{link.bandwidth / 1e6:,.1f} MB/s a rank, {seconds(link.latency)}"))
    rows += [(f"{collective} on the wire", f"{factor:.2f} × its bytes") for collective, factor in hardware.wire]
    columns = ("figure", "measured", "error of the fit, mean and largest")
    shown = [
        (*row, _fit([abs(sample.fitted / sample.seconds - 1) for sample in result.samples if sample.figure == row[0]]))
        for row in rows
    ]
    print(Table(f"{hardware.name}, measured in {result.seconds:.1f} s", columns, shown))
    (low, _, high), (nominal_low, _, nominal_high) = MEASURED, NOMINAL
    print(
        f"Of published steps nine tenths took {low:.2f} to {high:.2f} times what fitted rates predict, and "
        f"{nominal_low:.2f} to {nominal_high:.2f} times what nominal ones do; `spanwise plan --advise` says so."
    )


def _fit(errors: list[float]) -> str:
    if not errors:
        return ""
    return f"{statistics.mean(errors):.1%}, {max(errors):.1%} of {len(errors)} samples"
