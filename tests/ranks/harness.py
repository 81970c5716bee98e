"""Ranks as threads of the test process: the numerics of rank-divergent code in milliseconds.

``run_ranks(4, fn)`` calls ``fn(rank, mesh)`` in four threads that share PyTorch's threaded process group and returns
the four results. Collectives of `torch.distributed` and functional collectives work in it, forward and backward; P2P
does not exist there, and a rank waits in a start until all have started, so order and overlap are for
`tests.ranks.gloo`. But results come late: until a wait they hold NaN, and what was sent must not change.

Threads share what a process shares: the default random generator, default dtype, warning filters. So generate data
before the call, hand it in as arguments, and draw nothing inside. Grad mode and autocast are per thread and do not
pass from the caller into the ranks.

The threaded group pairs whatever arrives on a group and copies with broadcasting; on real ranks the same mistakes
hang. So here they are errors: ranks that call different collectives, and shapes or split sizes that do not agree.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.limits import HANG

T = TypeVar("T")


def run_ranks(
    num_ranks: int, fn: Callable[..., T], *args: Any, mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] = ("cp",), timeout: float = HANG, **kwargs: Any,
) -> list[T]:  # fmt: skip
    """Runs ``fn(rank, mesh, *args, **kwargs)`` on every rank, each a thread, and returns the results by rank.

    Raises:
        The first exception that any rank raised, with the `rank`. The others are released from their collectives.
        TimeoutError: Ranks did not finish within `timeout` seconds; the text holds the stack of each.
    """
    shape = (num_ranks,) if mesh_shape is None else tuple(mesh_shape)
    assert math.prod(shape) == num_ranks and len(shape) == len(mesh_dim_names)
    store = dist.HashStore()
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []  # in the order in which they were raised

    def rank_main(rank: int) -> None:
        try:
            dist.init_process_group(
                backend="threaded", rank=rank, world_size=num_ranks, store=store, timeout=timedelta(seconds=timeout)
            )
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(mesh_dim_names))
            results[rank] = fn(rank, mesh, *args, **kwargs)
        except BaseException as error:
            errors.append((rank, error))
            threaded.ProcessLocalGroup.exception_handle(error)  # releases ranks that wait in a collective
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    # Daemons, so that a rank that never comes back cannot keep the test process alive.
    threads = [threading.Thread(target=rank_main, args=(r,), name=f"rank {r}", daemon=True) for r in range(num_ranks)]
    # The C++ side looks up process groups by name, in a table for each thread while this mode is on.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 asks for it all the same
        threaded.ThreadLocalWorld.comms = []
    try:
        with (
            mock.patch.object(threaded.ProcessLocalGroup, "_start_coll", _start_checked),
            mock.patch.object(threaded.Collective, "join", _join_late),
        ):
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + timeout
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
            if stuck and not errors:
                errors.append((stuck[0], TimeoutError(_stacks(threads, timeout))))
            if stuck:
                threaded.ProcessLocalGroup.exception_handle(errors[0][1])
                for thread in threads:
                    thread.join(1.0)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        rank, error = errors[0]
        error.rank = rank
        raise error
    return results


def _stacks(threads: Sequence[threading.Thread], timeout: float) -> str:
    frames, text = sys._current_frames(), f"ranks did not finish within {timeout} s"
    for rank, thread in enumerate(threads):
        frame = frames.get(thread.ident or 0) if thread.is_alive() else None
        text += f"\nrank {rank}: {''.join(traceback.format_stack(frame)) if frame else 'has returned'}"
    return text


_start_unchecked = threaded.ProcessLocalGroup._start_coll
_join_at_once = threaded.Collective.join


def _start_checked(collective: Any, pg: dist.ProcessGroup) -> Any:
    """`ProcessLocalGroup._start_coll`, but a rank joins only a collective of the kind that it calls itself."""
    joined = _start_unchecked(_Checked(collective), pg)
    waiting = joined._collective
    if waiting.kind != (kind := _kind(collective)):
        raise RuntimeError(f"collectives do not match: rank {pg.rank()} calls {kind}, others wait in {waiting.kind}")
    return joined


def _join_late(self: threaded.Collective, rank: int, data: Any) -> dist.Work:
    """`Collective.join`, but the results are there after a wait. A broadcast's are at once: torch itself reads them."""
    collective = self._collective.collective
    if isinstance(collective, (threaded.AllReduce, threaded.Broadcast)):  # results overwrite what is sent
        results, sent = list(data), []
    else:
        results, sent = tree_leaves(data[0]), tree_leaves(data[1])
    with torch.inference_mode(False), _disable_current_modes():
        before = [(x, x.clone()) for x in map(_alias, sent)]
    work = _join_at_once(self, rank, data)
    return work if isinstance(collective, threaded.Broadcast) else _LateWork(self._collective.kind, results, before)


def _alias(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` in a tensor that autograd does not know: writing to it is no change of `x` in place."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


class _LateWork(dist.Work):
    """Delivers the results of a collective when waited for; until then they hold NaN, integers nonsense."""

    def __init__(self, kind: str, results: list[torch.Tensor], sent: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.kind, self.sent = kind, sent
        with torch.inference_mode(False), _disable_current_modes():
            self.results = [(x, x.clone()) for x in map(_alias, results)]
            for x, _ in self.results:
                inexact = x.is_floating_point() or x.is_complex()
                x.fill_(math.nan if inexact else 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max - 1)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        results, sent, self.results, self.sent = self.results, self.sent, [], []
        with torch.inference_mode(False), _disable_current_modes():
            for x, arrived in results:
                x.copy_(arrived)
            for x, before in sent:
                if not ((x == before) | ((x != x) & (before != before))).all():
                    raise RuntimeError(f"{self.kind}: what was sent changed before the wait")
        return True


def _kind(collective: Any) -> str:
    # The arguments of a collective: its root, or its reduction (a `ReduceOp` object for some, its `.op` for others).
    arguments = (f"{name}={getattr(value, 'op', value)}" for name, value in sorted(vars(collective).items()))
    return " ".join([type(collective).__name__, *arguments])


class _Checked:
    """A collective of the threaded group that compares the shapes of all ranks before it moves data."""

    def __init__(self, collective: Any) -> None:
        self.collective, self.kind = collective, _kind(collective)

    def work(self, data: list[Any]) -> None:
        ranks, alike = range(len(data)), True
        if isinstance(self.collective, threaded.AllToAllBase):  # what each rank sends to each, and what that expects
            sent = [_splits(inputs, sizes, len(data)) for _, inputs, _, sizes in data]
            expected = [_splits(outputs, sizes, len(data)) for outputs, _, sizes, _ in data]
            alike = all(sent[s][t] == expected[t][s] for s in ranks for t in ranks)
        elif isinstance(self.collective, (threaded.AllGather, threaded.ReduceScatter, threaded.AllReduce)):
            alike = len({str([(x.shape, x.dtype) for x in tree_leaves(given)]) for given in data}) == 1
        if not alike:
            raise RuntimeError(f"{self.kind}: shapes of the ranks do not agree")
        self.collective.work(data)


def _splits(buffer: torch.Tensor, sizes: Sequence[int] | None, num_ranks: int) -> list[tuple[Any, ...]]:
    sizes = list(sizes) if sizes else [buffer.shape[0] // num_ranks] * num_ranks
    if sum(sizes) != buffer.shape[0]:
        raise RuntimeError(f"AllToAllBase: split sizes {sizes} do not add up to the buffer's {buffer.shape[0]} rows")
    return [(size, *buffer.shape[1:], buffer.dtype) for size in sizes]
