"""A peer that is gone or late is an error that names it and the collective, on every rank that is left, in time."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import _compat
from spanwise.exchange import failure

TIMEOUT = 2.0  # seconds, of the process groups
NEVER = 50.0  # a timeout that no test reaches
GRACE = 3.0  # `failure.GRACE` in the processes here, shortened


class Outcome(NamedTuple):
    """How a rank ended: its result or error, or an exit code if it did not get so far."""

    result: Any = None
    error: BaseException | None = None
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
        timeout: float = TIMEOUT,
        store_in_rank_0: bool = False,
        stay: float = 60.0,
    ) -> None:
        # The processes of a forkserver start in milliseconds once it has imported torch.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks.test_lost_peer", "torch._dynamo"])
        self._folder = tempfile.mkdtemp(prefix="lost-peer-")
        if not store_in_rank_0:  # as under torchrun, where the agent hosts it
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            (Path(self._folder) / "port").write_text(str(self._store.port))
        self._ranks = []
        for rank in range(math.prod(mesh_shape)):
            ours, theirs = context.Pipe(duplex=False)
            group = (self._folder, rank, mesh_shape, names, timeout, store_in_rank_0, stay)
            process = context.Process(target=_rank_main, args=(theirs, group, fn, args), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def outcomes(self) -> list[Outcome]:
        """How each rank ended; then all processes are ended."""
        outcomes = []
        for process, ours in self._ranks:
            try:
                outcomes.append(Outcome(*ours.recv()) if ours.poll(60) else Outcome())
            except EOFError:
                process.join(5)
                outcomes.append(Outcome(exit_code=process.exitcode))
        self.end()
        return outcomes

    def end(self) -> None:
        for process, ours in self._ranks:
            process.kill()
            process.join()
            ours.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _rank_main(connection: Connection, group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    folder, rank, mesh_shape, names, timeout, store_in_rank_0, stay = group
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    failure.GRACE = GRACE
    hosts = store_in_rank_0 and rank == 0
    port = Path(folder) / "port"
    while not hosts and not (port.exists() and port.read_text()):
        time.sleep(0.01)
    at = 0 if hosts else int(port.read_text())
    store = dist.TCPStore("127.0.0.1", at, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=60))
    if hosts:
        port.write_text(str(store.port))
    num_ranks = math.prod(mesh_shape)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    dist.barrier()
    began = time.monotonic()
    try:
        answer = (fn(rank, mesh, *args), None)
    except failure.ExchangeError as error:
        answer = (None, error)
    connection.send((*answer, None, time.monotonic() - began))
    if store_in_rank_0 and rank == 0:
        return
    time.sleep(stay)  # a rank whose process ended would release the others; the test ends it
    connection.close()
    os._exit(0)


def lose(how: str) -> None:
    """What becomes of a lost rank."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise SystemExit(1)  # as an error of the model would, but quietly
    if how == "late":
        time.sleep(TIMEOUT + GRACE - 0.5)  # is back before the others give it up
    if how == "stuck":
        time.sleep(TIMEOUT + GRACE + 1.5)


COLLECTIVES = {
    "all-gather": lambda x, n, name: (_compat.start_all_gather, x, n, name),
    "reduce-scatter": lambda x, n, name: (_compat.start_reduce_scatter, x, n, name),
    "all-to-all": lambda x, n, name: (_compat.start_all_to_all, x, [2] * n, [2] * n, name),
}


def collective(mesh: DeviceMesh, kind: str, what: str = "") -> torch.Tensor:
    what = what or f"{kind} of K/V"
    group = mesh.get_group("cp")
    name = _compat.group_name(group)
    x = torch.ones(2 * group.size(), 100_000)
    return failure.wait(failure.start(what, name, *COLLECTIVES[kind](x, group.size(), name)), what, name)


def one_is_lost(rank: int, mesh: DeviceMesh, kind: str, how: str, lost: int) -> float:
    collective(mesh, kind)
    if rank == lost:
        lose(how)
    return float(collective(mesh, kind).sum())


def check(outcome: Outcome, what: str, lost: tuple[int, ...], within: float) -> str:
    assert isinstance(outcome.error, failure.ExchangeError), outcome
    text = str(outcome.error)
    assert outcome.error.lost == lost, text
    assert re.match(what, outcome.error.what), text
    assert outcome.error.what in text
    assert outcome.seconds < within
    return text


def test_a_process_that_ends_is_named_by_all_others() -> None:
    # A timeout out of reach: ranks that do not talk to the lost one learn of it from those that do.
    cases = [(kind, how) for kind in COLLECTIVES for how in ("killed", "raised")]
    worlds = [World(one_is_lost, kind, how, 3, timeout=NEVER) for kind, how in cases]
    for (kind, how), world in zip(cases, worlds, strict=True):
        outcomes = world.outcomes()
        for rank, outcome in enumerate(outcomes[:3]):
            text = check(outcome, f"{kind} of K/V", (3,), within=10)
            assert f"failed on rank {rank} of 4" in text
            assert "lost: rank 3, connection closed from there" in text
        assert outcomes[3].exit_code == (-signal.SIGKILL if how == "killed" else 1)


def test_late_ranks_are_named() -> None:
    stuck, late = World(one_is_lost, "all-gather", "stuck", 1), World(one_is_lost, "all-to-all", "late", 1)
    outcomes = stuck.outcomes()
    for rank in (0, 2, 3):
        text = check(outcomes[rank], "all-gather of K/V", (1,), within=TIMEOUT + 10)
        assert f"lost: rank 1, no word within {GRACE} s" in text
    # It wakes up later, and finds that the others were there.
    text = check(outcomes[1], "all-gather of K/V", (), within=TIMEOUT + 15)
    assert "rank 1 came last and had waited 0.0 s" in text
    for rank, outcome in enumerate(late.outcomes()):
        text = check(outcome, "all-to-all of K/V", (), within=TIMEOUT + 10)
        assert "rank 1 came last and had waited 0.0 s" in text
        assert "Timed out" in text, rank


def waits_and_dies(rank: int, mesh: DeviceMesh) -> None:
    collective(mesh, "all-to-all")
    if rank == 2:  # while it waits
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 0:
        time.sleep(2.0)
    collective(mesh, "all-to-all", "all-to-all of dK/dV")


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """Those of several tests, started together: what they do most is wait."""
    started = {
        "waiting": World(waits_and_dies, timeout=NEVER),
        "sub-mesh": World(one_is_lost, "all-gather", "killed", 3, mesh_shape=(2, 2), names=("dp", "cp")),
        "all-reduce": World(sums, mesh_shape=(1, 3), names=("dp", "cp"), timeout=NEVER),
        "plan": World(attends, EXCHANGES[0], "plan", "killed", 0, timeout=NEVER),
    }
    yield started
    for world in started.values():
        world.end()


def test_a_process_that_ends_while_all_wait(worlds: dict[str, World]) -> None:
    outcomes = worlds["waiting"].outcomes()
    for rank in (0, 1, 3):
        check(outcomes[rank], "all-to-all of dK/dV", (2,), within=10)


def test_ranks_of_a_sub_mesh(worlds: dict[str, World]) -> None:
    outcomes = worlds["sub-mesh"].outcomes()
    assert [outcome.result for outcome in outcomes[:2]] == [4 * 2 * 100_000.0] * 2
    text = check(outcomes[2], "all-gather of K/V", (1,), within=TIMEOUT + 10)
    assert outcomes[2].error.lost_global == (3,)
    assert "failed on rank 0 (global rank 2) of 2" in text
    assert "mesh_cp" in text
    assert "lost: rank 1 (global rank 3)" in text


def test_the_host_of_the_store_is_lost() -> None:
    outcomes = World(one_is_lost, "all-to-all", "killed", 0, store_in_rank_0=True, timeout=NEVER).outcomes()
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, failure.ExchangeError), outcome
        assert 0 in outcome.error.lost
        assert "the group's store is gone, for its host (usually rank 0) has ended" in str(outcome.error)
        assert outcome.seconds < 10


def backend_fails(rank: int, mesh: DeviceMesh) -> None:
    def begin(x: torch.Tensor) -> torch.Tensor:
        raise dist.DistBackendError(f"no communicator on {rank}")

    failure.start("all-to-all of K/V", _compat.group_name(mesh.get_group()), begin, torch.ones(1))


def test_a_start_that_fails() -> None:
    for rank, outcome in enumerate(World(backend_fails, mesh_shape=(2,)).outcomes()):
        text = check(outcome, "all-to-all of K/V", (), within=10)
        assert "all ranks are there" in text
        assert text.endswith(f"torch said: no communicator on {rank}")


def sums(rank: int, mesh: DeviceMesh) -> float:
    if rank == 1:
        lose("killed")
    return failure.all_reduce(torch.ones(1), "sum", mesh, "the loss").item()


def test_an_all_reduce_that_loses_a_rank(worlds: dict[str, World]) -> None:
    outcomes = worlds["all-reduce"].outcomes()
    for rank in (0, 2):
        check(outcomes[rank], "all-reduce of the loss", (1,), within=10)


EXCHANGES = [
    {"exchange": "all_gather"},
    {"exchange": "needed", "stages": 1},
    {"exchange": "needed", "stages": 3},
    {"exchange": "ring", "keep_kv": True},
    {"exchange": "ulysses"},
]
ATTENTION = [(exchange, moment) for exchange in EXCHANGES for moment in ("forward", "backward")]
ATTENTION.append(({"exchange": "needed", "stages": 2, "keep_kv": False}, "backward"))
ATTENTION.append(({"exchange": "ring", "keep_kv": False}, "backward"))
TWO_LEVELS = [
    ({"exchange": exchange}, moment) for exchange in ("needed", "ring") for moment in ("forward", "backward")
]


def attends(rank: int, mesh: DeviceMesh, exchange: dict[str, Any], moment: str, how: str, lost: int) -> None:
    mask = spanwise.SpanMask.causal(256)
    num_ranks = 4 if mesh.ndim == 1 else tuple(mesh.mesh.shape)
    plan = spanwise.make_plan({"full": mask}, num_ranks, balancer="head_tail", block_size=16, **exchange)
    if rank == lost and moment == "plan":
        lose(how)
    local = plan.local(mesh, "cpu")
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 16, requires_grad=True) for _ in range(3))
    for step in range(2):
        if rank == lost and step == 1 and moment == "forward":
            lose(how)
        out = spanwise.context_parallel_attention(q, k, v, local, mesh, mask="full")
        if rank == lost and step == 1 and moment == "backward":
            lose(how)
        out.sum().backward()


def names(exchange: dict[str, Any], moment: str) -> str:
    """Pattern of the collective that fails."""
    if exchange["exchange"] == "ulysses":
        of = "heads of (q|K/V)" if moment == "forward" else "gradients, output"
        return f"all-to-all of {of}, mask 'full'"
    if exchange["exchange"] == "ring":
        of = "K/V" if moment == "forward" else "gradients, K/V" if exchange["keep_kv"] else ".*K/V( again for.*)?"
        return f"hop [123] of 3 of {of}, mask 'full'"
    gather, scatter = ("all-gather", "reduce-scatter") if exchange["exchange"] == "all_gather" else ["all-to-all"] * 2
    if moment == "forward":
        return f"{gather} of K/V, mask 'full'"
    if not exchange.get("keep_kv", True):
        return f"{gather} of K/V again for the backward, mask 'full'"
    return f"{scatter} of gradients, K/V, mask 'full'"


def test_attention_that_loses_a_rank() -> None:
    worlds = [World(attends, exchange, moment, "killed", 2, timeout=NEVER) for exchange, moment in ATTENTION]
    for (exchange, moment), world in zip(ATTENTION, worlds, strict=True):
        outcomes = world.outcomes()
        for rank in (0, 1, 3):
            text = check(outcomes[rank], names(exchange, moment), (2,), within=15)
            assert "lost: rank 2, connection closed from there" in text


def test_attention_on_two_levels_that_loses_a_rank() -> None:
    """Ranks that share no axis with the lost one learn of it from those that do, and name it too."""
    mesh: Any = {"mesh_shape": (2, 2), "names": ("outer", "inner"), "timeout": NEVER}
    worlds = [World(attends, exchange, moment, "killed", 2, **mesh) for exchange, moment in TWO_LEVELS]
    for world in worlds:
        outcomes = world.outcomes()
        for rank in (0, 1, 3):
            error = outcomes[rank].error
            assert isinstance(error, failure.ExchangeError), outcomes[rank]
            print(error)
            assert error.lost_global == (2,), error
            assert "mask 'full'" in error.what and "connection closed from there" in str(error)


def test_attention_with_a_stuck_rank() -> None:
    worlds = [World(attends, exchange, moment, "stuck", 1) for exchange, moment in ATTENTION]
    for (exchange, moment), world in zip(ATTENTION, worlds, strict=True):
        outcomes = world.outcomes()
        for rank in (0, 2, 3):
            check(outcomes[rank], names(exchange, moment), (1,), within=TIMEOUT + 10)


def test_plans_are_not_compared_with_a_lost_rank(worlds: dict[str, World]) -> None:
    outcomes = worlds["plan"].outcomes()
    for outcome in outcomes[1:]:
        check(outcome, "all-gather of plan fingerprints", (0,), within=10)
