"""A peer that is gone or late is an error that names it and the collective, on every rank that is left, in time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import threading
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
from spanwise import _torch
from spanwise.attention import failure
from tests.limits import HANG
from tests.ranks.calls import HOSTS
from tests.ranks.gloo import NEVER, Outcome, World

TIMEOUT = 2.0  # seconds, of the process groups of a mesh on which a rank is late


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


def waits_and_dies(rank: int, mesh: DeviceMesh) -> None:
    collective(mesh, "all-to-all")
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:  # while it waits

        def die() -> None:
            store.wait(["all but rank 0 wait"], timedelta(seconds=HANG))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()
    if rank == 0:
        store.set("all but rank 0 wait", "")
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


def check(outcome: Outcome, what: str, lost: tuple[int, ...]) -> str:
    assert isinstance(outcome.error, spanwise.ExchangeError), outcome
    text = str(outcome.error)
    assert outcome.error.lost_global == lost, text
    # The rank may be lost before its call has been compared.
    assert re.match(rf"{what}|comparison of call \d", outcome.error.what), text
    assert text.startswith(f"{outcome.error.what} failed on rank ")
    assert outcome.seconds < HANG
    return text


NEEDED, RING = {"exchange": "needed", "stages": 3}, {"exchange": "ring", "keep_kv": True}
GATHER, ULYSSES, RELAYED = (
    {"exchange": "all_gather"},
    {"exchange": "ulysses"},
    {"exchange": "hierarchical", "hardware": HOSTS},
)
TWO_LEVELS: Any = {"mesh_shape": (2, 2), "names": ("outer", "inner")}
SUB_MESH: Any = {"mesh_shape": (2, 2), "names": ("dp", "cp")}
HOP = "all-to-all of K/V, mask 'full', chunk 2 of 3"
HOP_BACK = "all-to-all of gradients, K/V, mask 'full', chunk 2 of 3"
SLOW = (pytest.mark.slow,)


class Scenario(NamedTuple):
    """A world, the collective in which each of the ranks that are asked fails, and the rank that they name, if any."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    asked: tuple[int, ...]
    lost: tuple[int, ...]
    what: str
    world: dict[str, Any] = {}  # noqa: RUF012
    marks: tuple[Any, ...] = ()
    texts: tuple[str, ...] = ()


def attention(way: dict[str, Any], moment: str, what: str, *marks: Any) -> Scenario:
    """Rank 2 of four is lost at that moment of the second step."""
    return Scenario(attends, (way, moment, "killed", 2), (0, 1, 3), (2,), what, {}, marks)


def on_two_levels(exchange: str, moment: str, *marks: Any) -> Scenario:
    """Rank 1 shares no axis with rank 2, which is lost."""
    args = ({"exchange": exchange}, moment, "killed", 2)
    texts = (r"mesh_outer|mesh_inner|mesh of global ranks \[0, 1, 2, 3\]",)
    return Scenario(attends, args, (0, 1, 3), (2,), ".*(, mask 'full'|max_logit)", TWO_LEVELS, marks, texts)


WORD = "lost: rank {}, no word within"
OF_FOUR = ("of 4 ranks, after", WORD.format(3))
DEAD_LINK = "if no rank is late, a connection is cut or too slow"
SCENARIOS: dict[str, Scenario] = {
    **{kind: Scenario(one_is_lost, (kind, how, 3), (0, 1, 2), (3,), f"{kind} of K/V", {}, marks, OF_FOUR)
       for kind, how, marks in (("all-gather", "killed", SLOW), ("reduce-scatter", "raised", ()),
                                ("all-to-all", "killed", SLOW))},
    "waiting": Scenario(waits_and_dies, (), (0, 1, 3), (2,), "all-to-all of dK/dV", {}, SLOW),
    "sub-mesh": Scenario(one_is_lost, ("all-gather", "killed", 3), (2,), (3,), "all-gather of K/V", SUB_MESH, (),
                         (WORD.format(3), "failed on rank 2, ", " of 2 ranks, after", "mesh_cp")),
    "a start fails": Scenario(backend_fails, (), (0, 1), (), "all-to-all of K/V", {"mesh_shape": (2,), "grace": HANG},
                              (), ("all ranks are there", "torch said: no communicator on ")),
    "a closed link": Scenario(link_is_cut, ("closed",), (0, 1), (), "all-to-all of K/V",
                              {"mesh_shape": (2,), "grace": HANG}, (), (DEAD_LINK,)),
    "a silent link": Scenario(link_is_cut, ("silent",), (0, 1), (), "all-to-all of K/V",
                              {"mesh_shape": (2,), "grace": HANG, "timeout": TIMEOUT}, SLOW, ("Timed out", DEAD_LINK)),
    "plan": Scenario(attends, (GATHER, "plan", "killed", 0), (1, 2, 3), (0,), "connections to compare calls"),
    "all_gather, forward": attention(GATHER, "forward", "all-gather of K/V, mask 'full'", *SLOW),
    "all_gather, backward": attention(GATHER, "backward", "reduce-scatter of gradients, K/V, mask 'full'", *SLOW),
    "needed, forward": attention(NEEDED, "forward", "all-to-all of K/V, mask 'full'", *SLOW),
    "needed, backward": attention(NEEDED, "backward", "all-to-all of gradients, K/V, mask 'full'"),
    "ring, forward": attention(RING, "forward", "all-to-all of K/V, mask 'full'", *SLOW),
    "ring, backward": attention(RING, "backward", "all-to-all of gradients, K/V, mask 'full'", *SLOW),
    "ring, a hop": attention(RING, HOP, "all-to-all of K/V, mask 'full'", *SLOW),
    "ring, a hop back": attention(RING, HOP_BACK, "all-to-all of gradients, K/V, mask 'full'"),
    "ulysses, forward": attention(ULYSSES, "forward", "all-to-all of heads of (q|K/V), mask 'full'", *SLOW),
    "ulysses, backward": attention(ULYSSES, "backward", "all-to-all of gradients, output, mask 'full'", *SLOW),
    "needed, refetched": attention(NEEDED | {"keep_kv": False}, "backward",
                                   "all-to-all of K/V refetched for the backward, mask 'full'", *SLOW),
    "ring, refetched": attention({"exchange": "ring"}, "backward",
                                 "all-to-all of .*K/V( refetched for.*)?, mask 'full'", *SLOW),
    "max_logit": attention(GATHER, "all-reduce of max_logit", "all-reduce of max_logit"),
    "hierarchical, forward": attention(RELAYED, "forward", "all-to-all of K/V, mask 'full'", *SLOW),
    "hierarchical, backward": attention(RELAYED, "backward", "all-to-all of gradients, K/V, mask 'full'", *SLOW),
    "two levels, all_gather": on_two_levels("all_gather", "forward", *SLOW),
    "two levels, needed": on_two_levels("needed", "backward", *SLOW),
    "two levels, ring": on_two_levels("ring", "backward", *SLOW),
    "two levels, a hop": on_two_levels("ring", "all-to-all of K/V, mask 'full', chunk 1 of 1"),
    "two levels, max_logit": on_two_levels("needed", "all-reduce of max_logit", *SLOW),
    "stuck": Scenario(attends, (NEEDED, "forward", "stuck", 1), (0, 2, 3), (1,), "all-to-all of K/V, mask 'full'",
                      {"timeout": TIMEOUT}, SLOW, ("no word within",)),
    # Those that wait for it fail when the timeout of their group is over, the others then.
    "stuck, two levels": Scenario(attends, (GATHER, "forward", "stuck", 2), (0, 1, 3), (2,), ".*, mask 'full'",
                                  {"timeout": TIMEOUT, **TWO_LEVELS}),
    "compiled": Scenario(compiles, (1,), (0,), (1,), "a collective of compiled code", {"mesh_shape": (2,)},
                         (pytest.mark.compiles,)),
    "compiled, two levels": Scenario(compiles, (1,), (0, 2, 3), (1,), "a collective of compiled code", TWO_LEVELS,
                                     (pytest.mark.compiles, *SLOW)),
}  # fmt: skip


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Iterator[Callable[[str], World]]:
    """Those of all scenarios that are to run, made before the first: most of the time they wait for a lost rank."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = [item.callspec.params["name"] for item in items if "name" in item.callspec.params]
    started = {name: World(SCENARIOS[name].run, *SCENARIOS[name].args, **SCENARIOS[name].world) for name in wanted}
    yield started.__getitem__
    for world in started.values():
        world.end()


@pytest.mark.parametrize("name", [pytest.param(name, marks=x.marks) for name, x in SCENARIOS.items()])
def test_ranks_that_are_left_name_the_lost_one(worlds: Callable[[str], World], name: str) -> None:
    scenario = SCENARIOS[name]
    stuck = scenario.lost if "stuck" in scenario.args else ()
    outcomes = worlds(name).outcomes(but=stuck)
    for rank in scenario.asked:
        text = check(outcomes[rank], scenario.what, scenario.lost)
        assert all(re.search(each, text) for each in scenario.texts), text
        if scenario.lost and "stuck" not in name and "compiled" not in name:
            assert f"lost: rank {scenario.lost[0]}, no word" in text, text
    if "killed" in scenario.args:
        assert outcomes[scenario.lost[0]].exit_code == -signal.SIGKILL
    if scenario.run is one_is_lost and scenario.world:  # the other half of the mesh goes on
        assert [outcome.result for outcome in outcomes[:2]] == [4 * 2 * 100_000.0] * 2


def test_a_rank_that_wakes_up_finds_that_the_others_were_there() -> None:
    world = World(one_is_lost, "all-gather", "asleep", 1, timeout=TIMEOUT)
    outcomes = world.outcomes()
    for rank in (0, 2, 3):
        text = check(outcomes[rank], "all-gather of K/V", (1,))
        found = re.search(r"lost: rank 1, no word within (\d+\.\d) s", text)
        assert found is not None and float(found[1]) >= failure.GRACE, text
    assert "all ranks are there" in check(outcomes[1], "all-gather of K/V", ())


def test_a_late_rank_is_no_lost_one() -> None:
    outcomes = World(one_is_lost, "all-to-all", "late", 1, grace=HANG, timeout=TIMEOUT).outcomes()
    seconds = []
    for outcome in outcomes:
        text = check(outcome, "all-to-all of K/V", ())
        assert "Timed out" in text and "all ranks are there" in text, text
        seconds += [float(each) for each in re.findall(r"on rank \d, .*?, after (\d+\.\d) s; all", text)]
    assert len(seconds) == 4 and min(seconds) == seconds[1] and max(seconds) >= TIMEOUT


def test_the_host_of_the_store_is_lost() -> None:
    for outcome in World(one_is_lost, "all-to-all", "killed", 0, store_in_rank_0=True).outcomes()[1:]:
        assert isinstance(outcome.error, spanwise.ExchangeError) and 0 in outcome.error.lost, outcome
        assert "the group's store is gone, for its host (usually rank 0) has ended" in str(outcome.error)


@pytest.mark.slow
def test_ranks_that_share_no_axis_with_the_lost_one() -> None:
    """Rank 0 waits for 4, that for 6, and that for 7."""
    outcomes = World(sums, 7, mesh_shape=(2, 2, 2), names=("dp", "tp", "cp")).outcomes()
    axes = ["dp", "dp", "dp", "dp", "tp", "tp", "cp"]
    texts = [check(outcomes[r], f"all-reduce of the loss over {axes[r]}", (7,)) for r in range(7)]
    assert outcomes[0].error.lost == () and outcomes[6].error.lost == (1,)
    assert re.search(r"group '\d+' \(mesh_dp\).*; lost: rank 7, no word", texts[0]), texts[0]
    assert re.search(r"failed as well: rank 6 in .* \(mesh_cp\)", texts[0]), texts[0]


def test_other_errors_pass() -> None:
    for error in (RuntimeError("shape"), spanwise.MismatchError("x"), ValueError("x")):
        with pytest.raises(type(error)) as raised, spanwise.exchange_errors(None):  # type: ignore[arg-type]
            raise error
        assert raised.value is error
