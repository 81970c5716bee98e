"""The ranks that measure together: their process group, reductions over them, and the clock of each."""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch


class Ranks:
    """The ranks that measure together, and the clock of this one."""

    def __init__(self, mesh: DeviceMesh | None, device: torch.device) -> None:
        if mesh is None or mesh.size() < 2:
            raise ValueError(
                f"calibration measures links, and a link needs two ranks; got {'no mesh' if mesh is None else '1 rank'}"
            )
        if mesh.ndim != 1:
            raise ValueError(f"calibration needs a 1-D mesh, got one of shape {tuple(mesh.shape)}")
        self.group = mesh.get_group()
        self.members = dist.get_process_group_ranks(self.group)
        self.size = len(self.members)
        self.rank = mesh.get_local_rank()
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._where = _torch.comparison_device(self.group)

    def over_ranks(self, values: Sequence[float], *, largest: bool = True) -> list[float]:
        """The largest of each value over the ranks, or the smallest: those of the slowest rank."""
        sign = 1.0 if largest else -1.0
        x = torch.tensor([sign * v for v in values], dtype=torch.float64, device=self._where)
        x = _torch.wait(_torch.start_all_reduce(x, "max", _torch.group_name(self.group)))
        return (sign * x).tolist()

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.over_ranks([0.0])

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device has finished `call`, and its result."""
        self._synchronize()
        begin = time.perf_counter()
        result = call()
        self._synchronize()
        return time.perf_counter() - begin, result

    def median(self, call: Callable[[], Any], repeats: int) -> float:
        """Seconds of the median call after a warm-up; all ranks begin together."""
        self.barrier()
        call()
        return statistics.median(self.timed(call)[0] for _ in range(repeats))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def host_size(self, given: int | None) -> int:
        """Ranks of a host: `given`, else by host names; all ranks if there is one host."""
        if given is not None:
            if given < 1 or self.size % given:
                raise ValueError(f"host_size must divide the {self.size} ranks, got {given}")
            return self.size if given == 1 else given
        names: list[Any] = [socket.gethostname()] * self.size
        dist.all_gather_object(names, socket.gethostname(), group=self.group)
        runs = [(host, len(list(same))) for host, same in itertools.groupby(names)]
        sizes = {size for _, size in runs}
        if len({host for host, _ in runs}) < len(runs) or len(sizes) > 1:
            raise ValueError(
                f"hosts must be of one size and their ranks consecutive, got {runs}; host_size= overrides the names"
            )
        size = sizes.pop()
        return self.size if size == 1 else size
