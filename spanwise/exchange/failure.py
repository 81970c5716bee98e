"""A collective that failed, as an error that names the collective and the ranks that are lost.

`start` and `wait` stand where a collective would otherwise be called in `_compat`. What torch raises when a peer is
gone or late names neither; here it becomes an `ExchangeError`. The ranks that are left find out who is lost through
their group's store: each writes down that it failed, and who has not after a few seconds is named. In compiled code the
collective stays a bare operator, and torch's own error surfaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _compat

# Seconds that the ranks give one another to report a failure, and that the host of the store stays to be read.
GRACE = 5.0
LINGER = 2.0

_PROBE_TAG = 0x5BA7  # no message of this tag is ever received
# How gloo's TCP transport says that the other end of a connection is gone (gloo/transport/tcp/pair.cc); its other
# texts mean that this end closed it.
_GLOO = "gloo/transport"
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")


class ExchangeError(RuntimeError):
    """A collective failed: a rank is gone, stuck or too late.

    The group of the collective is of no more use after it: the connections between its ranks are closed.

    Attributes:
        what: the collective.
        rank: this rank in the group of the collective.
        lost: ranks of the group that are lost, as far as this rank can tell.
        lost_global: the same as ranks of the world.
    """

    what: str = ""
    rank: int = -1
    lost: tuple[int, ...] = ()
    lost_global: tuple[int, ...] = ()


class Report(NamedTuple):
    """What a rank tells the others: where it failed, after how many seconds in the collective, and what torch said."""

    what: str
    seconds: float
    said: str


@dataclasses.dataclass
class Findings:
    """What a rank learns about the others after a failure.

    Attributes:
        reports: of each rank that failed, this one too, in the order of their arrival.
        closed: ranks whose connection was closed from their end.
        silence: seconds that this rank has waited for reports.
        trouble: why the store could not be asked to the end; empty if it could.
    """

    reports: dict[int, Report] = dataclasses.field(default_factory=dict)
    closed: tuple[int, ...] = ()
    silence: float = 0.0
    trouble: str = ""


def start(what: str, name: str, begin: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``begin(*args)``, one of the starts in `_compat`, on the group called `name`.

    Args:
        what: the collective in words, for an error.

    Raises:
        ExchangeError: the backend failed. Arguments that it refuses are errors as they were.
    """
    if torch.compiler.is_compiling():
        return begin(*args)
    began = time.monotonic()
    try:
        return begin(*args)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and _GLOO not in str(error):
            raise
        raise _explain(error, what, name, args[0].device, time.monotonic() - began) from error


def wait(x: torch.Tensor, what: str, name: str) -> torch.Tensor:
    """Wait for a started collective on the group called `name`.

    On a CPU it returns when the data have arrived, and fails within the group's timeout plus a few seconds. With NCCL
    it only orders streams, unless torch was told to block (``TORCH_NCCL_BLOCKING_WAIT``): there torch's watchdog ends
    the process, and nothing is raised here.

    Args:
        what: the collective in words, for an error.

    Raises:
        ExchangeError: the collective failed, on this rank or because of another.
    """
    if torch.compiler.is_compiling():
        return _compat.wait(x)
    began = time.monotonic()
    try:
        return _compat.wait(x)
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # out of memory, not implemented
        raise _explain(error, what, name, x.device, time.monotonic() - began) from error


def all_reduce(x: torch.Tensor, op: str, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """All-reduce (``"sum"`` or ``"max"``) over every axis of `mesh`, without autograd.

    Axis after axis, so that a sliced or a multi-dimensional mesh needs no group of its own.

    Args:
        what: what is reduced, in words, for an error.

    Raises:
        ExchangeError: the collective failed.
    """
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            name = _compat.group_name(mesh.get_group(axis))
            label = f"all-reduce of {what}"
            x = wait(start(label, name, _compat.start_all_reduce, x, op, name), label, name)
    return x


def _explain(error: RuntimeError, what: str, name: str, device: torch.device, seconds: float) -> ExchangeError:
    group = _compat.find_group(name)
    rank, global_ranks = group.rank(), dist.get_process_group_ranks(group)
    said = str(error).strip().split("\n")[0][:500].rstrip(".")
    found = _investigate(group, device, Report(what, seconds, said))
    label = f"'{name}'" + (f" ({group.group_desc})" if group.group_desc not in ("", "undefined") else "")
    explained = ExchangeError(describe(found, rank, global_ranks, label))
    explained.what, explained.rank = what, rank
    explained.lost = lost_ranks(found, rank, len(global_ranks))
    explained.lost_global = tuple(global_ranks[r] for r in explained.lost)
    return explained


def lost_ranks(found: Findings, rank: int, num_ranks: int) -> tuple[int, ...]:
    """Ranks of the group that did not report; without a store to report to, only those whose connection is closed."""
    silent = (r for r in range(num_ranks) if r != rank and r not in found.reports)
    return tuple(r for r in silent if r in found.closed or not found.trouble)


def describe(found: Findings, rank: int, global_ranks: Sequence[int], label: str) -> str:
    """The text of an `ExchangeError`.

    Args:
        found: what is known; holds this rank's own report.
        rank: this rank in the group.
        global_ranks: rank of the world of each rank of the group.
        label: the group in words.
    """
    same = list(global_ranks) == list(range(len(global_ranks)))

    def names(ranks: Sequence[int]) -> str:
        each = ", ".join(str(r) if same else f"{r} (global rank {global_ranks[r]})" for r in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {each}"

    own = found.reports[rank]
    others = {r: report for r, report in sorted(found.reports.items()) if r != rank}
    lost = lost_ranks(found, rank, len(global_ranks))
    gone = [r for r in lost if r in found.closed]
    silent = [r for r in lost if r not in found.closed]
    parts = [f"{own.what} failed on {names([rank])} of {len(global_ranks)}, group {label}, after {own.seconds:.1f} s"]
    if gone:
        parts.append(f"lost: {names(gone)}, connection closed from there: the process has ended")
    if silent:
        parts.append(
            f"lost: {names(silent)}, no word within {found.silence:.1f} s: the process or its host has ended, is "
            f"stuck, or is busy elsewhere"
        )
    if found.trouble:
        parts.append(f"the ranks could not tell each other {'more' if lost else 'who is lost'}: {found.trouble}")
    if lost and others:
        parts.append(f"failed as well: {names(list(others))}")
    for r, report in others.items():
        if report.what != own.what:
            parts.append(f"{names([r])} failed in another collective, {report.what}")
    if not lost and not found.trouble:
        last = min(found.reports, key=lambda r: found.reports[r].seconds)
        first = next(iter(found.reports))
        parts.append(
            f"all ranks are there; {names([last])} came last and had waited {found.reports[last].seconds:.1f} s; "
            f"{names([first])} failed first, after {found.reports[first].seconds:.1f} s: {found.reports[first].said}"
        )
    return "; ".join(parts) + f". torch said: {own.said}"


def _investigate(group: dist.ProcessGroup, device: torch.device, report: Report) -> Findings:
    found = Findings(reports={group.rank(): report})
    open_sends = _probe(group, found) if device.type == "cpu" and "cpu:gloo" in dist.get_backend_config(group) else []
    store = _compat.group_store(group)
    # In a thread: a store whose host has lost power may never answer.
    asking = threading.Thread(target=_ask, args=(store, group.rank(), group.size(), open_sends, found), daemon=True)
    asking.start()
    asking.join(GRACE + LINGER + 1.0)
    if asking.is_alive():
        found.trouble = found.trouble or "the group's store does not answer; its host may be down"
    return dataclasses.replace(found, reports=dict(found.reports))


def _probe(group: dist.ProcessGroup, found: Findings) -> list[dist.Work]:
    """Find out whose connection is closed, by messages that nobody receives; returns the sends that are under way.

    A connection that was closed fails the send at once. It is closed by the kernel when a process ends, however it
    does, and by gloo when a rank times out.
    """
    closed, open_sends = [], []
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            send = dist.isend(torch.zeros(1), group=group, group_dst=peer, tag=_PROBE_TAG)
            assert send is not None
            open_sends.append(send)
        except RuntimeError as error:
            if any(text in str(error) for text in _CLOSED):
                closed.append(peer)
    found.closed = tuple(closed)
    return open_sends


def _ask(store: dist.Store, rank: int, num_ranks: int, open_sends: list[dist.Work], found: Findings) -> None:
    """Report this rank's failure and collect the reports of the others into `found`.

    Reports are numbered as they come, so that one question, for the next number, serves for all ranks.
    """
    began, own = time.monotonic(), found.reports[rank]
    try:
        try:
            number = store.add("spanwise/failures", 1)
            store.set(f"spanwise/failure/{number}", json.dumps([rank, own]))
        finally:
            _alarm(open_sends)
        arrived: dict[int, Report] = {}
        number = 0
        while len(arrived) < num_ranks:
            number += 1
            key = f"spanwise/failure/{number}"
            if not _appears(store, [key], began + GRACE):
                break
            peer, report = json.loads(store.get(key))
            arrived[peer] = Report(*report)
            found.reports = arrived | {rank: own}
        found.silence = time.monotonic() - began
        store.set(f"spanwise/failure/read/{rank}", "")
        _appears(store, [f"spanwise/failure/read/{r}" for r in arrived], time.monotonic() + LINGER)
    except RuntimeError as error:
        found.silence = time.monotonic() - began
        found.trouble = (
            f"the group's store is gone, for its host (usually rank 0) has ended ({str(error).splitlines()[0][:200]})"
        )


def _appears(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Whether all keys are there by `deadline`. Polls, for a store's own wait warns when it runs out of time."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _alarm(open_sends: list[dist.Work]) -> None:
    """Make the others fail now, who otherwise wait for a rank that has failed until their own timeout.

    gloo closes all connections of a group when one of its operations times out.
    """
    for send in open_sends:
        with contextlib.suppress(RuntimeError):
            send.wait(timedelta(milliseconds=1))
