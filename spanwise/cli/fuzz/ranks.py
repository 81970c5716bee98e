"""Local processes that run calls together as ranks of a gloo group, for thousands of short calls.

Real processes, because the exchanges behave differently in anything else, and torch has no public way to make threads
of one process ranks. A server imports torch once; ranks are forked from it, and keep a process group for each mesh.
A call that hangs or ends a rank costs the pool its processes; the next call starts new ones.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import spanwise

_PRELOAD = ["torch.distributed.tensor.parallel", "torch.nn.attention.flex_attention", "torch.utils.checkpoint"]

#: Seconds for the other ranks to answer after one has failed: they may wait for it in a collective.
_GRACE = 3.0


class Answer(NamedTuple):
    """What one rank answered: its result, or the name, the text and the traceback of its error."""

    result: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


class Ranks:
    """A pool of at most `size` ranks, as a context manager; a call is stuck after `timeout` seconds."""

    def __init__(self, size: int, timeout: float = 120.0) -> None:
        self.size, self.timeout = size, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="spanwise-fuzz-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_preload())
        self._workers: list[tuple[Any, Connection]] = []
        self._meshes: set[tuple[int, ...]] = set()
        self._starts = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._folder.cleanup()

    def start(self, shape: tuple[int, ...], fn: Callable[..., Any], *args: Any) -> None:
        """Begin ``fn(rank, mesh, *args)`` on all ranks of a mesh of that shape; `answers` has the results."""
        try:
            self._begin(shape, fn, args)
        except OSError:  # a rank has ended since its last answer
            self._stop()
            self._begin(shape, fn, args)

    def _begin(self, shape: tuple[int, ...], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self._workers:
            self._start()
        if shape not in self._meshes:  # all processes make the groups of a mesh together
            self._send(self.size, ("mesh", shape))
            self._meshes.add(shape)
        self._waiting = math.prod(shape)
        self._send(self._waiting, ("call", shape, fn, args))

    def answers(self) -> list[Answer]:
        """The answers to the call begun last, by rank."""
        answers: list[Answer | None] = [None] * self._waiting
        pending: dict[Any, int] = {self._workers[rank][1]: rank for rank in range(self._waiting)}
        deadline = time.monotonic() + self.timeout
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                answers[rank] = answer = _received(connection, rank)
                if answer.error:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for rank in pending.values():
            answers[rank] = Answer(error="stuck", text=f"rank {rank} gave no answer")
        done = [answer or Answer() for answer in answers]
        errors = [answer.error for answer in done]
        # Ranks of which some failed are no longer at the same collective.
        if pending or "died" in errors or (any(errors) and not all(errors)):
            self._stop()
        return done

    def _send(self, count: int, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message)
        for _, connection in self._workers[:count]:
            connection.send_bytes(data)

    def _start(self) -> None:
        self._starts += 1
        store = f"file://{self._folder.name}/store-{self._starts}"
        for rank in range(self.size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.size, store, there), name=f"rank {rank}", daemon=True
            )
            process.start()
            there.close()
            self._workers.append((process, here))

    def _stop(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers, self._meshes = [], set()


def _preload() -> list[str]:
    """What the server imports: spanwise too, 1.4 s of each rank, where the server would find this copy of it.

    In Python 3.11 the server looks in the working directory first, where another copy may lie.
    """
    spec = PathFinder.find_spec("spanwise", ["", *sys.path[1:]])
    return [*_PRELOAD, "spanwise.cli.fuzz.build"] if spec is not None and spec.origin == spanwise.__file__ else _PRELOAD


def _received(connection: Any, rank: int) -> Answer:
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        return Answer(error="died", text=f"rank {rank} ended without an answer")


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """A rank: answers calls until the pool goes away."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that holds the pool
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    meshes: dict[Sequence[int], DeviceMesh] = {}
    while True:
        try:
            kind, shape, *call = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        if kind == "mesh":
            names = ("cp",) if len(shape) == 1 else ("cp_outer", "cp_inner")
            meshes[shape] = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)
            continue
        fn, args = call
        try:
            answer = Answer(fn(rank, meshes[shape], *args))
        except Exception as error:
            answer = Answer(None, type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def _end_with(sentinel: Any) -> None:
    """End this process with the one that holds the pool."""
    wait([sentinel])
    os._exit(1)
