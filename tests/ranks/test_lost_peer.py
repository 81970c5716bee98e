"""A peer that is gone or late is an error that names it and the collective, on every rank that is left, in time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise.attention import executor, failure
from tests.limits import HANG
from tests.ranks.gloo import Processes, started

TIMEOUT = 2.0  # seconds, of the process groups of a mesh on which a rank is late


def lose(how: str) -> None:
    """What becomes of a lost rank, or of a rank that loses its connections."""
    store: Any = dist.distributed_c10d._get_default_store()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "late":  # is back when the others have timed out, and before they give it up
        while store.add(failure.REPORTS, 0) < 3:
            time.sleep(0.01)
    if how == "asleep":  # until the others have given it up
        store.wait([f"{rank} has failed" for rank in (0, 2, 3)], timedelta(seconds=HANG))
    if how == "closed":  # all connections of this process but that to the store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        for link in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link))) as connection:
                if connection.family == socket.AF_INET and connection.getpeername()[1] != store.port:
                    connection.shutdown(socket.SHUT_RDWR)


def attends(rank: int, mesh: DeviceMesh, exchange: dict[str, Any], moment: str, how: str, lost: int) -> None:
    """Nine steps; in the last a rank is lost: before the forward or the backward, or when it starts a collective.

    By then calls are expected: they start without waiting for the comparison with other ranks.

    Of a mesh of an axis "dp" and one "cp" attention takes the second.
    """
    assert mesh.mesh_dim_names is not None
    mesh = mesh["cp"] if "dp" in mesh.mesh_dim_names else mesh
    num_ranks: Any = mesh.size() if mesh.ndim == 1 else tuple(mesh.mesh.shape)
    masks = {"full": spanwise.SpanMask.causal(256)}
    plan = spanwise.make_plan(masks, num_ranks, balancer="head_tail", block_size=8, **exchange)
    if rank == lost and moment == "plan":
        lose(how)
    local = plan.local(mesh, "cpu")
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 16, requires_grad=True) for _ in range(3))
    grace = HANG if how in ("late", "closed") else failure.GRACE
    try:
        for step in range(9):
            is_lost = rank == lost and step == 8
            if is_lost and moment == "forward":
                lose(how)
            begin = dying(moment, how) if is_lost else executor.start
            with mock.patch.object(executor, "start", begin), mock.patch.object(failure, "GRACE", grace):
                out = spanwise.context_parallel_attention(q, k, v, local, mesh, mask_name="full")
                if is_lost and moment == "backward":
                    lose(how)
                out.sum().backward()
    finally:
        if how == "asleep":
            dist.distributed_c10d._get_default_store().set(f"{rank} has failed", "")


def dying(moment: str, how: str) -> Callable[..., torch.Tensor]:
    """`executor.start` of a rank that is lost when it comes to the collective `moment`."""
    begin = executor.start

    def start(what: str, *args: Any) -> torch.Tensor:
        if what.startswith(moment):
            lose(how)
        return begin(what, *args)

    return start


def compiles(rank: int, mesh: DeviceMesh, lost: int) -> None:
    """Compiled steps; before the last a rank is lost."""
    plan = spanwise.make_plan(spanwise.SpanMask.causal(256), 2, exchange="needed", block_size=8)
    local = plan.local(mesh, "cpu")
    q, k, v = (torch.ones(1, 4, local.tokens.shape[1], 16) for _ in range(3))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: spanwise.RankPlan) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, mesh)

    for step in range(20):  # by then calls are expected and start without waiting
        if rank == lost and step == 19:
            lose("killed")
        with spanwise.exchange_errors(mesh):
            attend(q, k, v, local)


class Scenario(NamedTuple):
    """A world, the collective in which each of the ranks that are asked fails, and the rank that they name, if any."""

    args: tuple[Any, ...]
    asked: tuple[int, ...]
    lost: tuple[int, ...]
    what: str
    texts: tuple[str, ...] = ()
    world: dict[str, Any] = {}  # noqa: RUF012
    marks: Any = ()
    run: Callable[..., Any] = attends


NEEDED, GATHER = {"exchange": "needed", "stages": 3}, {"exchange": "all_gather"}
RING = {"exchange": "ring", "keep_kv": True}
TWO: dict[str, Any] = {"mesh_shape": (2,)}
LEVELS: dict[str, Any] = {"mesh_shape": (2, 2), "names": ("outer", "inner")}
SUB_MESH: dict[str, Any] = {"mesh_shape": (2, 2), "names": ("dp", "cp")}
TO_ALL, GRADIENTS = "all-to-all of K/V", "all-to-all of gradients, K/V, mask 'full'"
OTHERS, ALL = (0, 1, 3), (0, 1, 2, 3)
NO_WORD = r"lost: rank 2, no word within \d+\.\d s"
DEAD_LINK = "if no rank is late, a connection is cut or too slow"


SCENARIOS: dict[str, Scenario] = {
    "plan": Scenario((GATHER, "plan", "killed", 0), (1, 2, 3), (0,), "connections to compare calls"),
    "backward": Scenario((GATHER, "backward", "killed", 2), OTHERS, (2,),
                         "reduce-scatter of gradients, K/V, mask 'full'", ("of 4 ranks, after", NO_WORD)),
    "a hop back": Scenario((RING, f"{GRADIENTS}, chunk 2 of 3", "killed", 2), OTHERS, (2,), GRADIENTS, (NO_WORD,)),
    # Rank 1 shares no axis with rank 2.
    "two levels": Scenario(({"exchange": "ring"}, f"{TO_ALL}, mask 'full', chunk 1 of 1", "killed", 2), OTHERS, (2,),
                           ".*, mask 'full'", (r"mesh_outer|mesh_inner|mesh of global ranks \[0, 1, 2, 3\]",), LEVELS),
    "sub-mesh": Scenario((GATHER, "forward", "killed", 3), (2,), (3,), "all-gather of K/V",
                         (r"failed on rank 2, group '\d+'.* of 2 ranks, after",), SUB_MESH),
    "asleep": Scenario((NEEDED, "forward", "asleep", 1), (0, 2, 3), (1,), TO_ALL, ("lost: rank 1, no word within",),
                       {"timeout": TIMEOUT}),
    "late": Scenario((NEEDED, "forward", "late", 1), ALL, (), TO_ALL, ("Timed out", "all ranks are there"),
                     {"timeout": TIMEOUT}),
    "a closed link": Scenario((NEEDED, "backward", "closed", 0), (0, 1), (), GRADIENTS, (DEAD_LINK,), TWO),
    "the store": Scenario((NEEDED, "forward", "killed", 0), (1, 2, 3), (0,), TO_ALL,
                          ("the group's store is gone, for its host .usually rank 0. has ended",),
                          {"store_in_rank_0": True}),
    "the store stops": Scenario((NEEDED, "forward", "stopped", 0), (1, 2, 3), (0,), TO_ALL, ("store does not answer",),
                                {"store_in_rank_0": True, "timeout": TIMEOUT}),
    "compiled": Scenario((1,), (0,), (1,), "a collective of compiled code", (), TWO, pytest.mark.compiles, compiles),
}  # fmt: skip


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Processes]]:
    """Those of all scenarios that are to run, made before the first: most of the time they wait for a lost rank."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = [item.callspec.params["name"] for item in items]
    worlds = {name: started(SCENARIOS[name].run, *SCENARIOS[name].args, **SCENARIOS[name].world) for name in wanted}
    yield worlds.__getitem__
    for world in worlds.values():
        world.end()


@pytest.mark.parametrize("name", [pytest.param(name, marks=x.marks) for name, x in SCENARIOS.items()])
def test_ranks_that_are_left_name_the_lost_one(worlds: Callable[[str], Processes], name: str) -> None:
    scenario = SCENARIOS[name]
    outcomes = worlds(name).outcomes(but=(0,) if "stopped" in scenario.args else ())
    for rank in scenario.asked:
        error, text = outcomes[rank].error, str(outcomes[rank].error)
        assert isinstance(error, spanwise.ExchangeError), outcomes[rank]
        # A host of the store that is gone takes what others have said along.
        assert error.lost_global == scenario.lost or (name.startswith("the store") and 0 in error.lost), text
        # The rank may be lost before its call has been compared.
        assert re.match(rf"{scenario.what}|comparison of call \d", error.what), text
        assert text.startswith(f"{error.what} failed on rank ") and outcomes[rank].seconds < HANG
        assert all(re.search(each, text) for each in scenario.texts), text
    if "killed" in scenario.args:
        assert outcomes[scenario.lost[0]].exit_code == -signal.SIGKILL
    if name == "sub-mesh":  # the other half of the mesh goes on
        assert all(outcome.error is outcome.exit_code is None for outcome in outcomes[:2])
        assert outcomes[2].error.lost == (1,)
    if name == "asleep":  # it wakes up and finds that the others were there
        assert outcomes[1].error.lost == () and "all ranks are there" in str(outcomes[1].error)
