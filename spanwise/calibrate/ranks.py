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
        if mesh is None or mesh.ndim != 1 or mesh.size() < 2:
            given = "no mesh" if mesh is None else f"one of shape {tuple(mesh.shape)}"
            raise ValueError(f"calibration measures links, and a link needs two ranks on a 1-D mesh; got {given}")
        self.group = mesh.get_group()
        self.members = dist.get_process_group_ranks(self.group)
        self.size = len(self.members)
        self.rank = mesh.get_local_rank()
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._where = _torch.comparison_device(self.group)

    def over_ranks(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        x = torch.tensor(values, dtype=torch.float64, device=self._where)
        return _torch.wait(_torch.start_all_reduce(x, "max", _torch.group_name(self.group))).tolist()

    def timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds until the device has finished `call`, and its result."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda _: None
        synchronize(self.device)
        begin = time.perf_counter()
        result = call()
        synchronize(self.device)
        return time.perf_counter() - begin, result

    def medians(self, calls: Sequence[Callable[[], Sequence[float]]], rounds: int) -> list[float]:
        """The median over `rounds`, after one that warms up, of the times that each call returns, on the slowest rank.

        All ranks begin a call together. All are timed round after round, so that a moment's disturbance does not hit a
        single one.
        """
        found = []
        for _ in range(rounds + 1):
            times: list[float] = []
            for call in calls:
                self.over_ranks([0.0])
                times += call()
            found.append(self.over_ranks(times))
        return [statistics.median(column) for column in zip(*found[1:], strict=True)]

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
