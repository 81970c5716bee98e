"""Ranks as real processes over gloo: what threads cannot show.

Splits that are really validated, collectives that run asynchronously, ranks that die, and ranks that wait for each
other. ``gloo_pool.run(4, fn, x)`` runs ``fn(rank, mesh, x)`` in processes that are started once in a test session and
make a new process group for every call; functions travel by their qualified names. Ranks that are to die get processes
of their own: ``started(fn, …).outcomes()``. For numerics `tests.ranks.harness` does the same in threads, many times
faster.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spanwise import _torch
from tests.limits import HANG
from tests.scripts import forked

T = TypeVar("T")

NEVER = 2 * HANG  # a timeout that no test reaches
CONNECTED = b"connected"
CONNECTS = (20.0, 100.0, HANG)  # seconds for gloo to connect all ranks, by attempt; rarely it never does


class RemoteTraceback(Exception):
    """The traceback of a rank as text: the cause of the exception that the caller sees."""


class Outcome(NamedTuple):
    """How a rank ended: with a result, an error, or the exit code of its process; all None if it has not ended."""

    result: Any = None
    error: Any = None
    exit_code: int | None = None
    seconds: float = 0.0
    failed_at: float = math.inf
    text: str = ""  # traceback


class Processes:
    """Processes that serve calls, one a rank, and may die."""

    def __init__(self, num_ranks: int) -> None:
        context = forked()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = 0
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()  # so that our end reads end-of-file when the process dies
            self._ranks.append((process, ours))
        for _, ours in self._ranks:
            ours.recv_bytes()  # it has imported torch: the timeout of a call does not pay for that

    def start(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, shape: tuple[int, ...], names: tuple[str, ...],
        timeout: float | None = None, *, hosts: bool = False, stays: bool = False,
    ) -> None:  # fmt: skip
        """Begin a call on the first ranks, over a mesh of this shape and names.

        Args:
            timeout: seconds, of the groups of the mesh; that of the world is out of reach. None: the world's, for all.
            hosts: whether rank 0 hosts the store, as without torchrun.
            stays: whether a rank that has failed keeps its connections, so that others are not released by their end.
        """
        self._calls += 1  # the name of the call keeps its keys in the store apart
        port = self._store.port
        if hosts:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
        group = (port, str(self._calls), hosts, shape, names, timeout, stays)
        self.tell_all(pickle.dumps((group, fn, args, kwargs)), math.prod(shape))

    def tell_all(self, message: bytes, num_ranks: int) -> None:
        for _, ours in self._ranks[:num_ranks]:
            ours.send_bytes(message)

    def collect(
        self, ranks: Sequence[int], connects: float = HANG, timeout: float = HANG, patience: float = HANG
    ) -> list[Outcome]:
        """How each of `ranks` ended; nothing if none has made its group after `connects` seconds.

        From then on they have `timeout` seconds, and `patience` when a rank has failed.
        """
        outcomes = {rank: Outcome() for rank in ranks}
        pending = {self._ranks[rank][1]: rank for rank in ranks}
        deadline, connected = time.monotonic() + connects, False
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                return list(outcomes.values()) if connected or connects == HANG else []
            for ours in ready:
                rank = pending[ours]
                try:
                    message = ours.recv_bytes()
                except (EOFError, ConnectionError):
                    process = self._ranks[rank][0]
                    process.join(5)
                    message = pickle.dumps(Outcome(exit_code=process.exitcode))
                if message == CONNECTED:
                    deadline, connected = (deadline if connected else time.monotonic() + timeout), True
                    continue
                connected = True
                outcomes[rank] = pickle.loads(message)
                del pending[ours]
                if outcomes[rank].failed_at < math.inf or outcomes[rank].exit_code is not None:
                    deadline = min(deadline, time.monotonic() + patience)
        return list(outcomes.values())

    def outcomes(self, but: Sequence[int] = ()) -> list[Outcome]:
        """How each rank ended, `but` some that are not waited for; then all processes are ended."""
        ranks = [rank for rank in range(len(self._ranks)) if rank not in but]
        found = dict(zip(ranks, self.collect(ranks), strict=True))
        late = self.late(found)
        self.end()
        assert not late, late
        return [found.get(rank, Outcome()) for rank in range(len(self._ranks))]

    def late(self, outcomes: dict[int, Outcome]) -> list[int]:
        """Ranks that have not ended; they write their stacks to stderr."""
        late = [rank for rank, outcome in outcomes.items() if outcome == Outcome()]
        for rank in late:
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5 if late else 0)
        return late

    def end(self) -> None:
        for process, ours in self._ranks:
            process.kill()
            process.join()
            ours.close()


def started(
    fn: Callable[..., Any], *args: Any, mesh_shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("cp",),
    timeout: float = NEVER, store_in_rank_0: bool = False,
) -> Processes:  # fmt: skip
    """Ranks of their own that run ``fn(rank, mesh, *args)`` and may die; see `Processes.start`."""
    processes = Processes(math.prod(mesh_shape))
    processes.start(fn, args, {}, mesh_shape, names, timeout, hosts=store_in_rank_0, stays=True)
    for _, ours in processes._ranks:  # so that calls do not start all at once
        assert ours.poll(HANG) and ours.recv_bytes() == CONNECTED
    return processes


class GlooPool:
    """Ranks that are reused; a context manager.

    A call that hangs or kills a rank costs the pool its processes: they are ended, and the next call starts new ones.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: Processes | None = None

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._processes is not None:
            self._processes.end()
        self._processes = None

    def run(
        self, num_ranks: int, fn: Callable[..., T], *args: Any, mesh_shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] = ("cp",), timeout: float = HANG, **kwargs: Any,
    ) -> list[T]:  # fmt: skip
        """Runs ``fn(rank, mesh, *args, **kwargs)`` on the first `num_ranks` processes; results by rank.

        Raises:
            The exception that a rank raised first, with its `rank` and the rank's traceback as its cause.
            RuntimeError: A process died.
            TimeoutError: Ranks did not answer within `timeout` seconds; their stacks are in stderr.
        """
        assert num_ranks <= self.num_ranks
        shape = (num_ranks,) if mesh_shape is None else tuple(mesh_shape)
        for connects in CONNECTS:
            self._processes = processes = self._processes or Processes(self.num_ranks)
            processes.start(fn, args, kwargs, shape, tuple(mesh_dim_names))
            if outcomes := processes.collect(range(num_ranks), connects, timeout, patience=30):
                break
            self.__exit__()  # `fn` has run on no rank
        late = processes.late(dict(enumerate(outcomes)))
        if late or any(outcome.exit_code is not None for outcome in outcomes):
            self.__exit__()
        else:  # let ranks leave their groups: one that left early would fail those that still talk
            processes.tell_all(b"all have answered", num_ranks)
        for rank, outcome in enumerate(outcomes):
            if outcome.exit_code is not None:
                raise RuntimeError(f"rank {rank} died with exit code {outcome.exit_code}")
        rank, first = min(enumerate(outcomes), key=lambda found: found[1].failed_at)
        if first.error is not None:
            first.error.rank = rank
            raise first.error from RemoteTraceback(f"rank {rank} of {num_ranks}:\n{first.text}")
        if late:
            raise TimeoutError(f"ranks {late} did not answer in time")
        return [outcome.result for outcome in outcomes]


def _serve(rank: int, connection: Connection) -> None:
    """A rank: answers one call after the other until the test process closes its end."""
    gc.freeze()  # what the server has imported: a full garbage collection is 0.4 s shorter
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which may not resolve
    connection.send_bytes(b"ready")
    while True:
        try:
            message = connection.recv_bytes()
            connection.send_bytes(_answer(rank, connection, message))
            connection.recv_bytes()
        except EOFError:
            return
        _leave()


def _answer(rank: int, connection: Connection, message: bytes) -> bytes:
    stays, began = False, time.monotonic()
    try:
        group, fn, args, kwargs = pickle.loads(message)
        stays = group[-1]
        mesh = _meet(rank, *group)
        connection.send_bytes(CONNECTED)
        began = time.monotonic()
        return pickle.dumps(Outcome(result=fn(rank, mesh, *args, **kwargs), seconds=time.monotonic() - began))
    except BaseException as error:
        if stays and not isinstance(error, Exception):
            raise
        failed_at, text = time.monotonic(), traceback.format_exc()
        if not stays:
            mesh = None
            traceback.clear_frames(error.__traceback__)  # nothing may hold the groups
            _leave()  # releases the ranks that wait for this one
        outcome = Outcome(error=error, seconds=failed_at - began, failed_at=failed_at, text=text)
        try:
            return pickle.dumps(outcome)
        except Exception:
            return pickle.dumps(outcome._replace(error=RuntimeError(f"{type(error).__name__}: {error}")))


def _meet(
    rank: int, port: int, name: str, hosts: bool, shape: tuple[int, ...], names: tuple[str, ...],
    seconds: float | None, stays: bool,
) -> DeviceMesh:  # fmt: skip
    timeout, size = timedelta(seconds=HANG), math.prod(shape)
    tcp = dist.TCPStore("127.0.0.1", port, is_master=hosts and rank == 0, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(name, tcp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    override = None
    if seconds is not None:  # ranks start at times of their own, so the world keeps its timeout
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=seconds)
        override = {name: ("gloo", options) for name in names}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
    if stays:
        dist.barrier()
    return mesh


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def tell(mesh: DeviceMesh, event: str) -> None:
    """Let ranks of the group of a mesh that wait for an event go on; each event is told once in a call of the pool."""
    _torch.group_store(mesh.get_group()).set(event, "")


def hear(mesh: DeviceMesh, *events: str) -> None:
    """Return when ranks of the group of a mesh have told all the events."""
    _torch.group_store(mesh.get_group()).wait(list(events), timedelta(seconds=HANG))
