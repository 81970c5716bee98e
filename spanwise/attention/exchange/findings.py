"""Findings of a rank about the others after a failure: who is lost, and where it began.

The remaining ranks find the lost ones through the store of the process group: each rank that fails reports there, and
a rank without a report after a few seconds counts as lost. A rank that fails also closes all its gloo groups. So ranks
fail that wait for it in other groups, and ranks that wait for those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spanwise import _torch
from spanwise.attention.exchange.errors import ranks_in_words

# Seconds to wait for reports of other ranks, and seconds that the host of the store then stays for other readers.
GRACE = 5.0
LINGER = 2.0

GONE = -(2**40)  # added to the number of ranks that have come by one that gives up
_POLL = 1e-3  # seconds between the first looks of a rank that waits for others to come

_PROBE_TAG = 0x5BA7  # no rank receives messages with this tag
# Texts of gloo's TCP transport for a connection closed at the other end (gloo/transport/tcp/pair.cc). Its other texts
# mean that this end closed it.
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")
_TIMED_OUT = "Timed out"


class Report(NamedTuple):
    """Report of one rank that failed, for the others.

    Attributes:
        what: the collective that failed.
        seconds: time from the start of the call to the failure.
        said: torch's error.
        group: name of the group of the collective.
        label: the group or mesh in words.
        ranks: global ranks of the group.
        closed: global ranks that closed their end of the connection.
        calls: the last calls of the rank in the group, in words.
    """

    what: str
    seconds: float
    said: str
    group: str
    label: str
    ranks: Sequence[int]
    closed: Sequence[int] = ()
    calls: Sequence[str] = ()


@dataclasses.dataclass
class Findings:
    """Findings of a rank about the others after a failure.

    Attributes:
        rank: this global rank.
        reports: report by global rank, in order of arrival: of the group of the collective, this rank included; then of
            the groups of `earlier`.
        earlier: a path to the group of the lost rank, if it is not this group: a rank of this group that failed in a
            second group, a rank of the second that failed in a third, and so on.
        silence: seconds that this rank has waited for reports.
        trouble: reason why the store could not be read to the end; empty if it could.
    """

    rank: int
    reports: dict[int, Report]
    earlier: tuple[int, ...] = ()
    silence: float = 0.0
    trouble: str = ""

    @property
    def own(self) -> Report:
        return self.reports[self.rank]


def lost_ranks(found: Findings) -> tuple[int, ...]:
    """Global ranks that others wait for and that did not report, ascending.

    If the store failed, only those whose connection is closed.
    """
    asked = [found.reports[r] for r in (found.rank, *found.earlier)]
    closed = {r for report in asked for r in report.closed}
    silent = {r for report in asked for r in report.ranks} - found.reports.keys()
    return tuple(sorted(r for r in silent if r in closed or not found.trouble))


def describe(found: Findings) -> str:
    """The text of an `ExchangeError`."""
    own, lost = found.own, lost_ranks(found)

    def names(ranks: Sequence[int]) -> str:
        """Ranks in the group, with global ranks where they differ."""
        same = list(own.ranks) == list(range(len(own.ranks)))
        if any(r not in own.ranks for r in ranks):
            return ranks_in_words(ranks, "global rank")
        return ranks_in_words([r if same else f"{own.ranks.index(r)} (global rank {r})" for r in ranks])

    def losses(report: Report, ranks: Sequence[int]) -> list[str]:
        gone = [r for r in ranks if r in report.closed]
        silent = [r for r in ranks if r not in report.closed]
        parts = []
        if gone:
            parts.append(f"lost: {names(gone)}, connection closed from there: the process has ended")
        if silent:
            parts.append(
                f"lost: {names(silent)}, no word within {found.silence:.1f} s: the process or its host has ended, is "
                f"stuck, or is busy elsewhere"
            )
        return parts

    others = {r: report for r, report in sorted(found.reports.items()) if r != found.rank and r in own.ranks}
    here = f"{names([found.rank])} of {len(own.ranks)}, {own.label}"
    parts = [f"{own.what} failed on {here}, after {own.seconds:.1f} s"]
    parts += losses(own, [r for r in lost if r in own.ranks])
    for first in found.earlier:
        report = found.reports[first]
        parts.append(f"{names([first])} failed in {report.what}, {report.label}")
        parts += losses(report, [r for r in lost if r in report.ranks and r not in own.ranks])
    if found.trouble:
        parts.append(f"the ranks could not tell each other {'more' if lost else 'who is lost'}: {found.trouble}")
    if lost and others:
        parts.append(f"failed as well: {names(list(others))}")
    for r, report in others.items():
        if report.what != own.what and r not in found.earlier:
            parts.append(f"{names([r])} failed in another collective, {report.what}")
    if not lost and not found.trouble:
        there = {r: report for r, report in found.reports.items() if r in own.ranks}
        first, last = next(iter(there)), min(there, key=lambda r: there[r].seconds)
        timed_out = any(_TIMED_OUT in report.said for report in there.values())
        cut = [r for r in there[first].closed if r in there]
        if cut and not timed_out:  # otherwise the ranks that time out close their connections
            parts.append(f"no process has ended: the network has cut the connection of {names([first, *cut])}")
        else:
            parts.append(
                f"all ranks are there; {names([last])} came last and had waited {there[last].seconds:.1f} s; "
                f"{names([first])} failed first, after {there[first].seconds:.1f} s: {there[first].said}"
                f"{'; if no rank is late, a connection between them is cut or too slow' if timed_out else ''}"
            )
    return "; ".join(parts) + f". torch said: {own.said}" + _last_calls(found)


def _last_calls(found: Findings) -> str:
    """The last calls of the ranks of the group; one line for ranks that made the same."""
    by_calls: dict[tuple[str, ...], list[int]] = {}
    for rank, report in sorted(found.reports.items()):
        if rank in found.own.ranks and report.calls:
            by_calls.setdefault(tuple(report.calls), []).append(found.own.ranks.index(rank))
    return "".join(f"\nlast calls of {ranks_in_words(ranks)}: {'; '.join(calls)}" for calls, ranks in by_calls.items())


def investigate(own: Report, open_sends: list[dist.Work]) -> Findings:
    """Report this rank's failure, collect the reports of others, and make ranks fail that wait for this one.

    Args:
        open_sends: from `probe`.
    """
    found = Findings(dist.get_rank(), {dist.get_rank(): own})
    others = [other for other in _torch.groups() if _torch.group_name(other) != own.group and other.size() > 1]
    for other in others:
        if _torch.is_gloo(other):
            open_sends += probe(other)[1]
    # In a thread: a store whose host has lost power may never answer.
    names = [own.group, *(_torch.group_name(other) for other in others)]
    assert dist.group.WORLD is not None
    store = _torch.group_store(dist.group.WORLD)  # one for all groups
    asking = threading.Thread(target=_ask, args=(store, names, open_sends, found), daemon=True)
    asking.start()
    asking.join(GRACE + LINGER + 1.0)
    if asking.is_alive():
        alarm(open_sends)
        found.trouble = found.trouble or "the store does not answer; its host may be down"
    return dataclasses.replace(found)


def probe(group: Any) -> tuple[tuple[int, ...], list[dist.Work]]:
    """Find closed connections by sending messages that no rank receives.

    The send on a closed connection fails at once. The kernel closes connections when a process ends, however it ends;
    gloo closes them when a rank times out.

    Args:
        group: a process group or a `_torch.host_group`.

    Returns:
        ranks of the group whose connection is closed, and the sends that are under way.
    """
    closed: list[int] = []
    open_sends: list[dist.Work] = []
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            with _torch.without_modes():
                open_sends.append(group.send([torch.zeros(1)], peer, _PROBE_TAG))
        except RuntimeError as error:
            if any(text in str(error) for text in _CLOSED):
                closed.append(peer)
    return tuple(closed), open_sends


def close_connections() -> None:
    """Close the gloo connections of all groups of this process: its waits fail, and those of ranks that wait for it."""
    alarm([send for group in _torch.groups() if _torch.is_gloo(group) for send in probe(group)[1]])


def meet(store: dist.Store, key: str, size: int, groups: Sequence[dist.ProcessGroup], until: float) -> None:
    """Return when `size` ranks have come; gloo's own wait for them would not end when one of their processes does.

    Args:
        key: of the number of ranks that have come.
        groups: of the axes of their mesh; those of gloo show which processes have ended.

    Raises:
        RuntimeError: not all came `until` then, a process has ended, or another rank has given up.
    """
    began = time.monotonic()
    come, pause, look = store.add(key, 1), _POLL, began + 1.0
    while 0 <= come < size:
        now = time.monotonic()
        closed: tuple[int, ...] = ()
        if now > look:
            look = now + min(now - began, 15.0)
            closed = tuple(peer for group in groups if _torch.is_gloo(group) for peer in probe(group)[0])
        if closed or now > until:
            store.add(key, GONE)
            raise RuntimeError(f"{come} of {size} ranks had come after {now - began:.1f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)  # the store of many ranks answers all of them
        come = store.add(key, 0)
    if come < 0:
        raise RuntimeError(f"another rank gave up; {come % -GONE} of {size} ranks had come")


def _ask(store: dist.Store, names: list[str], open_sends: list[dist.Work], found: Findings) -> None:
    """Report this rank's failure to the groups called `names` and collect the reports of the others into `found`.

    Each group has one list, so that the number of questions does not grow with the world. If a rank failed because a
    peer failed in another group, it finds the peer's report in the list of their common group. It then reads the list
    of the group that the report names.
    """
    began, own = time.monotonic(), found.own
    try:
        try:
            store.add("spanwise/failure/asking", 1)
            for name in names:
                number = store.add(f"spanwise/failures/{name}", 1)
                store.set(f"spanwise/failure/{name}/{number}", json.dumps([found.rank, own]))
        finally:
            alarm(open_sends)
        found.earlier = _trace(store, found.rank, began + GRACE, found, set())[1:]
        found.silence = time.monotonic() - began
        store.add("spanwise/failure/asking", -1)
        until = time.monotonic() + LINGER
        while store.add("spanwise/failure/asking", 0) > 0 and time.monotonic() < until:
            time.sleep(0.02)
    except RuntimeError as error:
        found.silence = time.monotonic() - began
        found.trouble = (
            f"the group's store is gone, for its host (usually rank 0) has ended ({str(error).splitlines()[0][:200]})"
        )


def _trace(store: dist.Store, rank: int, deadline: float, found: Findings, seen: set[str]) -> tuple[int, ...]:
    """Look for lost ranks in the group where `rank` failed, or else in the groups where the ranks of that group failed.

    Returns:
        the path of ranks to the group of a lost rank, `rank` first; empty if no rank is lost.
    """
    at = found.reports[rank]
    seen.add(at.group)
    arrived = _collect(store, at, deadline, found)
    if len(arrived) < len(at.ranks):
        return (rank,)
    for peer in arrived:
        if found.reports[peer].group not in seen and time.monotonic() < deadline:
            way = _trace(store, peer, deadline, found, seen)
            if way:
                return (rank, *way)
    return ()


def _collect(store: dist.Store, at: Report, deadline: float, found: Findings) -> list[int]:
    """Add the reports of the group of `at` to `found` as they come; returns their ranks in order of arrival.

    Reports are numbered as they come, so that one question, for the next number, serves for all ranks.
    """
    before = {} if at is found.own else found.reports
    arrived: dict[int, Report] = {}
    number = 0
    while len(arrived) < len(at.ranks):
        number += 1
        key = f"spanwise/failure/{at.group}/{number}"
        if not _appears(store, [key], deadline):
            break
        rank, report = json.loads(store.get(key))
        arrived.setdefault(rank, Report(*report))  # keep the first report of each rank
        found.reports = before | arrived | {found.rank: found.own}
    return list(arrived)


def _appears(store: dist.Store, keys: list[str], deadline: float) -> bool:
    """Whether all keys are there by `deadline`. Polls, because a store's own wait warns after its timeout."""
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alarm(open_sends: list[dist.Work]) -> None:
    """Make the other ranks fail now; otherwise they would wait for this failed rank until their timeout.

    gloo closes all connections of a group when one of its operations times out. A send may fail instead, because its
    peer has just closed its end, and then the others stay open. So there is one to each peer.
    """
    for send in open_sends:
        with contextlib.suppress(RuntimeError):
            send.wait(timedelta(milliseconds=1))
