"""The job behind ``spanwise calibrate``: starts ranks, or takes part in those of torchrun, and measures on all of them.

Stands above `calibrate`, which only measures, and borrows how ranks are started from `train`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spanwise import calibrate, kernels
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
        kernels.resolve(self.kernel, torch.device(self.device))
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
    mesh = None
    if rank.size > 1:
        dist.init_process_group(backend, init_method=rank.init_method, rank=rank.rank, world_size=rank.size)
        mesh = init_device_mesh(options.device, (rank.size,), mesh_dim_names=("cp",))
    calibrate.run(
        mesh,
        out=Path(options.out) if options.out else None,
        device=device,
        kernel=options.kernel,
        num_q_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        host_size=options.host_size,
    )
    if mesh is not None:
        dist.destroy_process_group()
    return 0
