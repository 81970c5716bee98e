"""A peer that is gone or late is an error that names it and the collective, on every rank that is left, in time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import re
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import _torch
from spanwise.attention import failure
from tests.limits import HANG
from tests.ranks.calls import HOSTS
from tests.scripts import forked

TIMEOUT = 2.0  # seconds, of the process groups of a mesh
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
        timeout: float = TIMEOUT,
        grace: float = failure.GRACE,
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
        with mock.patch.object(failure, "GRACE", grace):
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


def lose(how: str) -> None:
    """What becomes of a lost rank."""
    store = dist.distributed_c10d._get_default_store()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise SystemExit(1)  # as an error of the model would, but quietly
    if how == "late":  # is back when the others have timed out, and before they give it up
        while store.add(failure.REPORTS, 0) < 3:
            time.sleep(0.01)
    if how == "asleep":  # until the others have given it up
        store.wait([f"{rank} has failed" for rank in (0, 2, 3)], timedelta(seconds=HANG))
    if how == "stuck":
        time.sleep(NEVER)


COLLECTIVES = {
    "all-gather": lambda x, n, name: (_torch.start_all_gather, x, n, name),
    "reduce-scatter": lambda x, n, name: (_torch.start_reduce_scatter, x, n, name),
    "all-to-all": lambda x, n, name: (_torch.start_all_to_all, x, [2] * n, [2] * n, name),
}


def collective(mesh: DeviceMesh, kind: str, what: str = "") -> torch.Tensor:
    what = what or f"{kind} of K/V"
    group = mesh.get_group("cp")
    name = _torch.group_name(group)
    x = torch.ones(2 * group.size(), 100_000)
    return failure.wait(failure.start(what, name, *COLLECTIVES[kind](x, group.size(), name)), what, name)


def one_is_lost(rank: int, mesh: DeviceMesh, kind: str, how: str, lost: int) -> float:
    collective(mesh, kind)
    if rank == lost:
        lose(how)
    try:
        return float(collective(mesh, kind).sum())
    finally:
        if how == "asleep":
            dist.distributed_c10d._get_default_store().set(f"{rank} has failed", "")


def check(outcome: Outcome, what: str, lost: tuple[int, ...]) -> str:
    assert isinstance(outcome.error, spanwise.ExchangeError), outcome
    text = str(outcome.error)
    assert outcome.error.lost_global == lost, text
    # The rank may be lost before its call has been compared.
    assert re.match(rf"{what}|comparison of call \d", outcome.error.what), text
    assert text.startswith(f"{outcome.error.what} failed on rank ")
    assert outcome.seconds < HANG
    return text


def waits_and_dies(rank: int, mesh: DeviceMesh) -> None:
    collective(mesh, "all-to-all")
    if rank == 2:  # while it waits
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 0:
        time.sleep(1.0)
    collective(mesh, "all-to-all", "all-to-all of dK/dV")


def link_is_cut(rank: int, mesh: DeviceMesh, how: str) -> None:
    """Rank 0 loses its connections to the other rank, which are closed or silent; that to the store stays."""
    collective(mesh, "all-to-all")
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # a packet filter: accept no byte
    for link in os.listdir("/proc/self/fd") if rank == 0 else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername()[1] != store.port:
                if how == "closed":
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    connection.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(nothing)))
    collective(mesh, "all-to-all")


def backend_fails(rank: int, mesh: DeviceMesh) -> None:
    def begin(x: torch.Tensor) -> torch.Tensor:
        raise dist.DistBackendError(f"no communicator on {rank}")

    failure.start("all-to-all of K/V", _torch.group_name(mesh.get_group()), begin, torch.ones(1))


def sums(rank: int, mesh: DeviceMesh, lost: int) -> float:
    """An all-reduce over one axis after the other, the last first."""
    if rank == lost:
        lose("killed")
    assert mesh.mesh_dim_names is not None
    for name in reversed(mesh.mesh_dim_names):
        total = failure.all_reduce(torch.ones(1), "sum", mesh[name], f"the loss over {name}")
    return float(total)


def attends(rank: int, mesh: DeviceMesh, exchange: dict[str, Any], moment: str, how: str, lost: int) -> None:
    """Two steps; in the second a rank is lost: before the forward or the backward, or when it starts a collective."""
    mask = spanwise.SpanMask.causal(256)
    num_ranks: Any = mesh.size() if mesh.ndim == 1 else tuple(mesh.mesh.shape)
    plan = spanwise.make_plan({"full": mask}, num_ranks, balancer="head_tail", block_size=8, **exchange)
    if rank == lost and moment == "plan":
        lose(how)
    local = plan.local(mesh, "cpu")
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 16, requires_grad=True) for _ in range(3))
    aux = spanwise.AuxRequest(max_logit=True)
    for step in range(2):
        if rank == lost and step == 1 and moment == "forward":
            lose(how)
        with mock.patch.object(failure, "start", dying(moment, how) if rank == lost and step == 1 else failure.start):
            out, _ = spanwise.context_parallel_attention(q, k, v, local, mesh, mask_name="full", return_aux=aux)
            if rank == lost and step == 1 and moment == "backward":
                lose(how)
            out.sum().backward()


def compiles(rank: int, mesh: DeviceMesh, lost: int) -> None:
    """Compiled steps; before the last a rank is lost."""
    num_ranks: Any = mesh.size() if mesh.ndim == 1 else tuple(mesh.mesh.shape)
    plan = spanwise.make_plan(spanwise.SpanMask.causal(256), num_ranks, exchange="needed", block_size=8)
    local = plan.local(mesh, "cpu")
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 16) for _ in range(3))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: spanwise.RankPlan) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, mesh)

    for step in range(5):  # from the third on, calls are expected and start without waiting
        if rank == lost and step == 4:
            lose("killed")
        with spanwise.exchange_errors(mesh):
            attend(q, k, v, local)


def dying(moment: str, how: str) -> Callable[..., torch.Tensor]:
    """`failure.start` of a rank that is lost when it comes to the collective `moment`."""
    begin = failure.start

    def start(what: str, *args: Any) -> torch.Tensor:
        if what.startswith(moment):
            lose(how)
        return begin(what, *args)

    return start


EXCHANGES: list[dict[str, Any]] = [
    {"exchange": "all_gather"},
    {"exchange": "needed", "stages": 3},
    {"exchange": "ring", "keep_kv": True},
    {"exchange": "ulysses"},
]
# (exchange, when a rank is lost)
ATTENTION = [(exchange, moment) for exchange in EXCHANGES for moment in ("forward", "backward")]
ATTENTION.append(({"exchange": "needed", "stages": 2, "keep_kv": False}, "backward"))
ATTENTION.append(({"exchange": "ring", "keep_kv": False}, "backward"))
ATTENTION.append(({"exchange": "ring", "keep_kv": True}, "all-to-all of K/V, mask 'full', chunk 2 of 3"))
ATTENTION.append(({"exchange": "ring", "keep_kv": True}, "all-to-all of gradients, K/V, mask 'full', chunk 2 of 3"))
ATTENTION.append(({"exchange": "all_gather"}, "all-reduce of max_logit"))
ATTENTION += [({"exchange": "hierarchical", "hardware": HOSTS}, moment) for moment in ("forward", "backward")]
TWO_LEVELS = [
    ({"exchange": exchange}, moment)
    for exchange, moment in (("all_gather", "forward"), ("needed", "backward"), ("ring", "backward"))
]
TWO_LEVELS.append(({"exchange": "ring"}, "all-to-all of K/V, mask 'full', chunk 1 of 1"))
TWO_LEVELS.append(({"exchange": "needed"}, "all-reduce of max_logit"))
STUCK = [ATTENTION[i] for i in (0, 5, 6)]
# Of these lists, what `make test` runs.
FEW_ATTENTION, FEW_TWO_LEVELS, FEW_STUCK = (1, 2, 6, 9, 10), (3,), (1,)
MESH_2D: Any = {"mesh_shape": (2, 2), "names": ("outer", "inner")}


def numbers(cases: list[Any], few: tuple[int, ...]) -> list[Any]:
    """Parameters ``i``: all cases by number; those that are not among the few are slow."""
    return [pytest.param(i, marks=[] if i in few else pytest.mark.slow) for i in range(len(cases))]


def names(exchange: dict[str, Any], moment: str) -> str:
    """Pattern of the collective that fails."""
    if moment.startswith("all-reduce"):
        return moment
    if exchange["exchange"] == "ulysses":
        of = "heads of (q|K/V)" if moment == "forward" else "gradients, output"
        return f"all-to-all of {of}, mask 'full'"
    if exchange["exchange"] == "ring":
        forward = moment == "forward" or moment.startswith("all-to-all of K/V")
        of = "K/V" if forward else "gradients, K/V" if exchange["keep_kv"] else ".*K/V( refetched for.*)?"
        return f"all-to-all of {of}, mask 'full'"
    gather, scatter = ("all-gather", "reduce-scatter") if exchange["exchange"] == "all_gather" else ["all-to-all"] * 2
    if moment == "forward":
        return f"{gather} of K/V, mask 'full'"
    if not exchange.get("keep_kv", True):
        return f"{gather} of K/V refetched for the backward, mask 'full'"
    return f"{scatter} of gradients, K/V, mask 'full'"


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[dict[Any, World]]:
    """Those of all tests that are to run, made before the first: what they do most is wait for a rank that is lost.

    Where the timeout is out of reach, ranks that do not talk to the lost one learn of it from those that do.
    """
    started: dict[Any, World] = {}
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {(item.originalname, item.callspec.params.get("i")) for item in items}
    try:
        for key in [("all-gather", "killed"), ("reduce-scatter", "raised"), ("all-to-all", "killed")]:
            started[key] = World(one_is_lost, *key, 3, timeout=NEVER)
        started["asleep"] = World(one_is_lost, "all-gather", "asleep", 1)
        started["late"] = World(one_is_lost, "all-to-all", "late", 1, grace=HANG)
        started["waiting"] = World(waits_and_dies, timeout=NEVER)
        started["host"] = World(one_is_lost, "all-to-all", "killed", 0, store_in_rank_0=True, timeout=NEVER)
        started["backend"] = World(backend_fails, mesh_shape=(2,), grace=HANG)
        started["closed"] = World(link_is_cut, "closed", mesh_shape=(2,), timeout=NEVER, grace=HANG)
        started["silent"] = World(link_is_cut, "silent", mesh_shape=(2,), grace=HANG)
        mesh: Any = {"mesh_shape": (2, 2), "names": ("dp", "cp")}
        started["sub-mesh"] = World(one_is_lost, "all-gather", "killed", 3, **mesh, timeout=NEVER)
        mesh = {"mesh_shape": (2, 2, 2), "names": ("dp", "tp", "cp")}
        started["all-reduce"] = World(sums, 7, **mesh, timeout=NEVER)
        started["plan"] = World(attends, EXCHANGES[0], "plan", "killed", 0, timeout=NEVER)
        for i, case in enumerate(ATTENTION):
            if ("test_attention_that_loses_a_rank", i) in wanted:
                started["attention", i] = World(attends, *case, "killed", 2, timeout=NEVER)
        for i, case in enumerate(TWO_LEVELS):
            if ("test_attention_on_two_levels_that_loses_a_rank", i) in wanted:
                started["two levels", i] = World(attends, *case, "killed", 2, **MESH_2D, timeout=NEVER)
        for i, case in enumerate(STUCK):
            if ("test_attention_with_a_stuck_rank", i) in wanted:
                started["stuck", i] = World(attends, *case, "stuck", 1)
        started["compiled", 1] = World(compiles, 1, mesh_shape=(3,), timeout=NEVER)
        if ("test_a_rank_lost_in_compiled_code", 2) in wanted:
            started["compiled", 2] = World(compiles, 1, **MESH_2D, timeout=NEVER)
        started["stuck", "two levels"] = World(attends, *TWO_LEVELS[0], "stuck", 2, **MESH_2D)
        yield started
    finally:
        for world in started.values():
            world.end()


@pytest.mark.parametrize(
    ("kind", "how"), [("all-gather", "killed"), ("reduce-scatter", "raised"), ("all-to-all", "killed")]
)
def test_a_process_that_ends_is_named_by_all_others(worlds: dict[Any, World], kind: str, how: str) -> None:
    outcomes = worlds[kind, how].outcomes()
    for rank, outcome in enumerate(outcomes[:3]):
        text = check(outcome, f"{kind} of K/V", (3,))
        assert f"failed on rank {rank}, " in text and " of 4 ranks, after" in text
        assert "lost: rank 3, no word within" in text
    assert outcomes[3].exit_code == (-signal.SIGKILL if how == "killed" else 1)


def test_late_ranks_are_named(worlds: dict[Any, World]) -> None:
    asleep = worlds["asleep"].outcomes()
    for rank in (0, 2, 3):
        text = check(asleep[rank], "all-gather of K/V", (1,))
        found = re.search(r"lost: rank 1, no word within (\d+\.\d) s", text)
        assert found is not None and float(found[1]) >= failure.GRACE, text
    # It wakes up later, and finds that the others were there.
    check_last(check(asleep[1], "all-gather of K/V", ()), asleep)
    late = worlds["late"].outcomes()
    for rank, outcome in enumerate(late):
        text = check(outcome, "all-to-all of K/V", ())
        check_last(text, late)
        assert "Timed out" in text, rank


def check_last(text: str, outcomes: list[Outcome]) -> None:
    """Rank 1 came last and failed at once; the first of the others had waited for `TIMEOUT` by then."""
    found = re.search(r"rank 1 came last and had waited (\d+\.\d) s", text)
    assert found is not None, text
    waited = [re.search(r" after (\d+\.\d) s", str(outcome.error)) for outcome in outcomes]
    seconds = [float(each[1]) for each in waited if each is not None]
    assert len(seconds) == 4 and float(found[1]) == seconds[1] == min(seconds), text
    assert max(seconds) >= TIMEOUT, text


def test_a_process_that_ends_while_all_wait(worlds: dict[Any, World]) -> None:
    outcomes = worlds["waiting"].outcomes()
    for rank in (0, 1, 3):
        check(outcomes[rank], "all-to-all of dK/dV", (2,))


def test_ranks_of_a_sub_mesh(worlds: dict[Any, World]) -> None:
    outcomes = worlds["sub-mesh"].outcomes()
    assert [outcome.result for outcome in outcomes[:2]] == [4 * 2 * 100_000.0] * 2
    text = check(outcomes[2], "all-gather of K/V", (3,))
    assert outcomes[2].error.lost == (1,)
    assert "failed on rank 2, " in text and " of 2 ranks, after" in text
    assert "mesh_cp" in text
    assert "lost: rank 3, no word" in text


def test_the_host_of_the_store_is_lost(worlds: dict[Any, World]) -> None:
    for outcome in worlds["host"].outcomes()[1:]:
        assert isinstance(outcome.error, spanwise.ExchangeError), outcome
        assert 0 in outcome.error.lost
        assert "the group's store is gone, for its host (usually rank 0) has ended" in str(outcome.error)


def test_a_start_that_fails(worlds: dict[Any, World]) -> None:
    for rank, outcome in enumerate(worlds["backend"].outcomes()):
        text = check(outcome, "all-to-all of K/V", ())
        assert "all ranks are there" in text
        assert text.endswith(f"torch said: no communicator on {rank}")


def test_a_cut_link_between_ranks_that_live(worlds: dict[Any, World]) -> None:
    for outcome in worlds["closed"].outcomes():
        text = check(outcome, "all-to-all of K/V", ())
        assert "if no rank is late, a connection is cut or too slow" in text, text
    for outcome in worlds["silent"].outcomes():
        text = check(outcome, "all-to-all of K/V", ())
        assert "Timed out" in text and "if no rank is late, a connection is cut or too slow" in text


def test_ranks_that_share_no_axis_with_the_lost_one(worlds: dict[Any, World]) -> None:
    """Rank 0 waits for 4, that for 6, and that for 7."""
    outcomes = worlds["all-reduce"].outcomes()
    axes = ["dp", "dp", "dp", "dp", "tp", "tp", "cp"]
    texts = [check(outcomes[r], f"all-reduce of the loss over {axes[r]}", (7,)) for r in range(7)]
    assert outcomes[0].error.lost == () and outcomes[6].error.lost == (1,)
    assert re.search(r"group '\d+' \(mesh_dp\).*; lost: rank 7, no word", texts[0]), texts[0]
    assert re.search(r"failed as well: rank 6 in .* \(mesh_cp\)", texts[0]), texts[0]


@pytest.mark.parametrize("i", numbers(ATTENTION, FEW_ATTENTION))
def test_attention_that_loses_a_rank(worlds: dict[Any, World], i: int) -> None:
    outcomes = worlds["attention", i].outcomes()
    for rank in (0, 1, 3):
        text = check(outcomes[rank], names(*ATTENTION[i]), (2,))
        assert "lost: rank 2, no word within" in text


@pytest.mark.parametrize("i", numbers(TWO_LEVELS, FEW_TWO_LEVELS))
def test_attention_on_two_levels_that_loses_a_rank(worlds: dict[Any, World], i: int) -> None:
    """Rank 1 shares no axis with it."""
    outcomes = worlds["two levels", i].outcomes()
    for rank in (0, 1, 3):
        text = check(outcomes[rank], ".*(, mask 'full'|max_logit)", (2,))
        compared = text.startswith("comparison of call")  # all four ranks take part in that
        assert "lost: rank 2, no word" in text, text
        assert outcomes[rank].error.lost == ((2,) if compared else ((1,), (), (0,), (0,))[rank]), text
    # Before the forward a rank trades heads; then K/V go between groups.
    for rank in (0, 1, 3):
        text = str(outcomes[rank].error)
        assert "(mesh_outer)" in text or "(mesh_inner)" in text or "mesh of global ranks [0, 1, 2, 3]" in text


@pytest.mark.parametrize("i", numbers(STUCK, FEW_STUCK))
def test_attention_with_a_stuck_rank(worlds: dict[Any, World], i: int) -> None:
    outcomes = worlds["stuck", i].outcomes(but=(1,))
    for rank in (0, 2, 3):
        text = check(outcomes[rank], names(*STUCK[i]), (1,))
        assert "no word within" in text


def test_a_stuck_rank_on_two_levels(worlds: dict[Any, World]) -> None:
    """Those who wait for it fail when the timeout of their group is over, the others then."""
    outcomes = worlds["stuck", "two levels"].outcomes(but=(2,))
    for rank in (0, 1, 3):
        check(outcomes[rank], ".*, mask 'full'", (2,))


def test_plans_are_not_compared_with_a_lost_rank(worlds: dict[Any, World]) -> None:
    for outcome in worlds["plan"].outcomes()[1:]:
        check(outcome, "connections to compare calls", (0,))


@pytest.mark.parametrize("i", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.compiles
def test_a_rank_lost_in_compiled_code(worlds: dict[Any, World], i: int) -> None:
    """On a mesh of one axis and of two."""
    for rank, outcome in enumerate(worlds["compiled", i].outcomes()):
        if rank != 1:
            check(outcome, "a collective of compiled code", (1,))


def test_other_errors_pass() -> None:
    for error in (RuntimeError("shape"), spanwise.MismatchError("x"), ValueError("x")):
        with pytest.raises(type(error)) as raised, spanwise.exchange_errors(None):  # type: ignore[arg-type]
            raise error
        assert raised.value is error
