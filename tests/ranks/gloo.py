"""Ranks as real processes over gloo: what threads cannot show.

Splits that are really validated, collectives that run asynchronously, ranks that die, and ranks that wait for each
other. The processes are started once in a test session and make a new process group for every call, so that no call
sees what an earlier one left behind. Use the `gloo_pool` fixture:

    def gathers(rank, mesh, x): ...            # at module level: it travels by its qualified name

    def test_gathers(gloo_pool):
        results = gloo_pool.run(4, gathers, x)

For numerics `tests.ranks.harness` does the same in threads, many times faster.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import _torch
from spanwise.attention import failure
from tests.limits import HANG
from tests.scripts import forked

T = TypeVar("T")

CONNECTED = b"connected"
CONNECTS = (20.0, 100.0, HANG)  # seconds for gloo to connect all ranks, by attempt; rarely it never does


class RemoteTraceback(Exception):
    """The traceback of a rank as text: the cause of the exception that the caller sees."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class NeverConnected(TimeoutError):
    """No rank has got past the making of the process group."""


class GlooPool:
    """Processes that run functions as the ranks of a gloo group; a context manager.

    A call that hangs or kills a rank costs the pool its processes: they are ended, and the next call starts new ones.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="gloo-pool-")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._calls = 0

    def __enter__(self) -> GlooPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(
        self,
        num_ranks: int,
        fn: Callable[..., T],
        *args: Any,
        mesh_shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] = ("cp",),
        timeout: float = HANG,
        **kwargs: Any,
    ) -> list[T]:
        """Runs ``fn(rank, mesh, *args, **kwargs)`` on the first `num_ranks` processes; results by rank.

        Raises:
            The exception that a rank raised first, with its `rank` and the rank's traceback as its cause.
            RuntimeError: A process died; the text names the rank and holds what it left behind.
            TimeoutError: Ranks did not answer within `timeout` seconds of their connection; the text holds the stack of
                each.
        """
        if num_ranks > self.num_ranks:
            raise ValueError(f"{num_ranks} ranks asked of a pool of {self.num_ranks}")
        shape = (num_ranks,) if mesh_shape is None else tuple(mesh_shape)
        for connects in CONNECTS[:-1]:
            with contextlib.suppress(NeverConnected):  # `fn` has not run on any rank then
                return self._call(num_ranks, fn, args, kwargs, shape, tuple(mesh_dim_names), connects, timeout)
        return self._call(num_ranks, fn, args, kwargs, shape, tuple(mesh_dim_names), CONNECTS[-1], timeout)

    def _call(
        self,
        num_ranks: int,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: tuple[int, ...],
        mesh_dim_names: tuple[str, ...],
        connects: float,
        timeout: float,
    ) -> list[T]:
        self._start()
        self._calls += 1
        group = (f"{self._folder.name}/store-{self._calls}", num_ranks, shape, mesh_dim_names, timeout)
        message = pickle.dumps((group, fn, args, kwargs))
        for _, connection in self._workers[:num_ranks]:
            connection.send_bytes(message)
        return self._collect(num_ranks, connects, timeout)

    def _collect(self, num_ranks: int, connects: float, timeout: float) -> list[Any]:
        connected, deadline = 0, time.monotonic() + connects
        results: list[Any] = [None] * num_ranks
        failures: list[tuple[float, int, BaseException, str]] = []
        pending = {self._workers[rank][1]: rank for rank in range(num_ranks)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:  # who still waits, waits for a rank that failed
                    self._stop()
                    break
                each = [f"rank {rank}:\n{self._stack(rank)}" for rank in pending.values()]
                stacks = "\n".join(each)
                self._stop()
                if not connected:
                    raise NeverConnected(f"the ranks did not connect in time\n{stacks}")
                raise TimeoutError(f"ranks {sorted(pending.values())} did not answer in time\n{stacks}")
            for connection in ready:
                rank = pending[connection]
                try:
                    message = connection.recv_bytes()
                except (EOFError, ConnectionError):
                    raise RuntimeError(self._obituary(rank)) from None
                if message == CONNECTED:
                    connected += 1
                    if not failures:
                        deadline = time.monotonic() + timeout
                    continue
                del pending[connection]
                answer = pickle.loads(message)
                if answer[0] == "result":
                    results[rank] = answer[1]
                else:
                    failures.append((answer[1], rank, *answer[2:]))
                    deadline = min(deadline, time.monotonic() + 30)  # its peers fail when its connections close
        for _, connection in self._workers[:num_ranks]:
            connection.send_bytes(b"all have answered")
        if failures:
            _, rank, error, text = min(failures, key=lambda failure: failure[0])
            error.rank = rank
            raise error from RemoteTraceback(f"rank {rank} of {num_ranks}:\n{text}")
        return results

    def _obituary(self, rank: int) -> str:
        process = self._workers[rank][0]
        process.join(5)
        text = f"rank {rank} died with exit code {process.exitcode}: {self._log(rank).read_text() or 'no traceback'}"
        self._stop()
        return text

    def _start(self) -> None:
        if self._workers:
            return
        context = forked()
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            self._log(rank).write_text("")
            process = context.Process(target=_serve, args=(rank, theirs, str(self._log(rank))), daemon=True)
            process.start()
            theirs.close()  # so that our end reads end-of-file when the process dies
            self._workers.append((process, ours))
        for rank, (_, connection) in enumerate(self._workers):
            try:
                connection.recv_bytes()  # has imported torch: the timeout of a call does not pay for it
            except EOFError:
                raise RuntimeError(self._obituary(rank)) from None

    def _stop(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers = []

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _stack(self, rank: int) -> str:
        """What the process is doing: faulthandler writes it to the rank's log on a signal."""
        process = self._workers[rank][0]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.1)
        return self._log(rank).read_text()


def _serve(rank: int, connection: Connection, log_path: str) -> None:
    """A worker: answers one call after the other until the pool closes its end."""
    gc.freeze()  # what the server has imported: a full garbage collection is 0.4 s shorter
    with open(log_path, "w") as log:
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo looks up the host's name, which may not resolve
        with contextlib.suppress(EOFError):
            connection.send_bytes(b"ready")
            while True:
                connection.send_bytes(_answer(rank, connection))
                connection.recv_bytes()  # a rank that left early would fail those that still talk to each other
                _leave()


def _answer(rank: int, connection: Connection) -> bytes:
    message = connection.recv_bytes()
    try:
        (store_path, num_ranks, shape, names, timeout), fn, args, kwargs = pickle.loads(message)
        store = dist.FileStore(store_path, num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout)
        )
        connection.send_bytes(CONNECTED)
        result = fn(rank, init_device_mesh("cpu", shape, mesh_dim_names=names), *args, **kwargs)
        return pickle.dumps(("result", result))
    except BaseException as error:
        failed_at, text = time.monotonic(), traceback.format_exc()
        _leave()  # releases the ranks that wait for this one
        try:
            return pickle.dumps(("failure", failed_at, error, text))
        except Exception:
            return pickle.dumps(("failure", failed_at, RuntimeError(f"{type(error).__name__}: {error}"), text))


def tell(mesh: DeviceMesh, event: str) -> None:
    """Let ranks of the group of a mesh that wait for an event go on; each event is told once in a call of the pool."""
    _torch.group_store(mesh.get_group()).set(event, "")


def hear(mesh: DeviceMesh, *events: str) -> None:
    """Return when ranks of the group of a mesh have told all the events."""
    _torch.group_store(mesh.get_group()).wait(list(events), timedelta(seconds=HANG))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------- ranks that may die

NEVER = 2 * HANG  # a timeout that no test reaches


class Outcome(NamedTuple):
    """How a rank ended: its result or error, or an exit code if it did not get so far."""

    result: Any = None
    error: Any = None
    exit_code: int | None = None
    seconds: float = 0.0


class World:
    """Processes that run ``fn(rank, mesh, *args)`` as the ranks of a gloo group, and may die."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mesh_shape: tuple[int, ...] = (4,),
        names: tuple[str, ...] = ("cp",),
        timeout: float = NEVER,
        grace: float | None = None,
        store_in_rank_0: bool = False,
    ) -> None:
        context = forked()
        self._folder = tempfile.mkdtemp(prefix="lost-peer-")
        if not store_in_rank_0:  # as under torchrun, where the agent hosts it
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (Path(self._folder) / "port").write_text(str(self._store.port))
        self._ranks = []
        for rank in range(math.prod(mesh_shape)):
            ours, theirs = context.Pipe(duplex=False)
            group = (self._folder, rank, mesh_shape, names, timeout, grace, store_in_rank_0)
            process = context.Process(target=_rank_main, args=(theirs, group, fn, args), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, ours in self._ranks:  # so that worlds that are made one after the other do not start all at once
            assert ours.poll(HANG) and ours.recv() == "started"

    def outcomes(self, but: tuple[int, ...] = ()) -> list[Outcome]:
        """How each rank ended, `but` some that are not waited for; then all processes are ended."""
        outcomes = []
        for rank, (process, ours) in enumerate(self._ranks):
            try:
                ended = ours.poll(0 if rank in but else HANG)
                if not ended and rank not in but:
                    raise TimeoutError(f"rank {rank} has not ended:\n{self._stack(rank)}")
                outcomes.append(Outcome(*ours.recv()) if ended else Outcome())
            except EOFError:
                process.join(5)
                outcomes.append(Outcome(exit_code=process.exitcode))
        self.end()
        return outcomes

    def _stack(self, rank: int) -> str:
        os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return (Path(self._folder) / f"stack-{rank}").read_text()

    def end(self) -> None:
        for process, ours in self._ranks:
            process.kill()
            process.join()
            ours.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _rank_main(connection: Connection, group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    folder, rank, mesh_shape, names, timeout, grace, store_in_rank_0 = group
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, (Path(folder) / f"stack-{rank}").open("w"))
    hosts = store_in_rank_0 and rank == 0
    port = Path(folder) / "port"
    while not hosts and not (port.exists() and port.read_text()):
        time.sleep(0.01)
    at = 0 if hosts else int(port.read_text())
    store = dist.TCPStore("127.0.0.1", at, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=HANG))
    if hosts:
        port.write_text(str(store.port))
    num_ranks = math.prod(mesh_shape)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=HANG))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names, backend_override=_timeouts(names, timeout))
    dist.barrier()
    connection.send("started")
    began = time.monotonic()
    try:
        with mock.patch.object(failure, "GRACE", failure.GRACE if grace is None else grace):
            answer = (fn(rank, mesh, *args), None)
    except spanwise.ExchangeError as error:
        answer = (None, error)
    connection.send((*answer, None, time.monotonic() - began))
    if store_in_rank_0 and rank == 0:
        return
    time.sleep(NEVER)  # a rank whose process ended would release the others; the test ends it


def _timeouts(names: tuple[str, ...], timeout: float) -> dict[int | str, tuple[str, Any]]:
    """For the groups of a mesh. That of the world has a timeout out of reach: ranks start at times of their own."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    return {name: ("gloo", options) for name in names}
