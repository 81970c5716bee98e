"""One rank of many on one device: a process group whose collectives are device copies of exactly their bytes.

    with replayed(rank=3, ranks=8, device=torch.device("cuda", 0)) as mesh: ...

A collective copies as many bytes as the rank receives, on a stream of its own, beside compute; its wait makes the
current stream wait for that copy. So a whole call of one rank runs as it would among the others, with links as fast as
the device's memory. What arrives is the rank's own data repeated: times mean something, numbers do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import spanwise


class _Copied(dist._Work):
    """A collective under way on the stream of copies."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: Any = None) -> bool:
        if self.end is not None:
            torch.cuda.current_stream().wait_event(self.end)
        return True


class Replay(dist.ProcessGroup):
    """Collectives of one rank, as copies; `received` counts the bytes that came from other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.received, self.launches, self._stream = 0, 0, None

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "replay"

    def _fill(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], received: int) -> _Copied:
        self.received, self.launches = self.received + received, self.launches + 1
        if not outputs or outputs[0].device.type != "cuda":
            _copy(outputs, inputs)
            return _Copied(None)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(outputs, inputs)
            for x in (*outputs, *inputs):
                x.record_stream(self._stream)
            end = torch.cuda.Event()
            end.record()
        return _Copied(end)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, recv: list[int], sent: list[int], options: Any = None
    ) -> _Copied:
        own = recv[self.rank()] if recv else output.shape[0] // self.size()
        row = output[:1].numel() * output.element_size()
        return self._fill([output], [given], (output.shape[0] - own) * row)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> _Copied:
        return self._fill(outputs, given, sum(_bytes(x) - _bytes(y) for x, y in zip(outputs, given, strict=True)))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> _Copied:
        return self._fill(outputs, given, sum(_bytes(y) - _bytes(x) for x, y in zip(outputs, given, strict=True)))

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Copied:
        return self._fill(tensors, tensors, sum(map(_bytes, tensors)))


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _copy(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Write every output, and read as many bytes, from the inputs over and over."""
    for output, given in zip(outputs, inputs, strict=True):
        into, source = output.view(-1), given.reshape(-1)
        if output is given or not into.numel():
            continue
        if not source.numel():
            into.zero_()
            continue
        for at in range(0, into.numel(), source.numel()):
            part = into[at : at + source.numel()]
            part.copy_(source[: part.numel()])


@contextmanager
def replayed(rank: int, ranks: int, device: torch.device) -> Iterator[DeviceMesh]:
    """The mesh of a default group of `ranks`, of which this process is `rank`; calls are not compared across ranks."""
    dist.Backend.register_backend("replay", _create, devices=["cpu", "cuda"])
    dist.init_process_group("replay", rank=rank, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
        spanwise.compare_calls(mesh, False)
        yield mesh
    finally:
        dist.destroy_process_group()


def _create(store: Any, rank: int, size: int, timeout: Any) -> Replay:
    return Replay(rank, size)
