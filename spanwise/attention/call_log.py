"""The calls of all ranks of a mesh, compared by number over gloo connections of their own.

Ranks that make different calls compute wrong numbers without an error, or abort inside the backend. So every rank
numbers its calls, and a thread gathers digests of them while the calls run: a call costs microseconds.

A call that follows the last ones as it did before starts at once. Any other call waits until all ranks have made it.
What follows depends on the calls so far alone, which are equal on all ranks. So of ranks that differ in a call, only
those with the expected one go on; the others raise and start no collective, and data of two calls never meet.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spanwise import _torch

PERIOD = 50e-3  # between two looks of the thread; with 1 ms, calls of 4 ms took 1.3 times as long, with this 1.004
POLL = 2e-4  # where a call waits
FLUSH = 2.0  # seconds to compare the last calls before the process ends
REFUSED = "an error"  # name of the call that stands for one that raised
_ROUND = 120  # digests in one all-gather
_TEXT_BYTES = 8192  # that describe the calls of a rank after a mismatch
_PROBE_TAG = 0x5BA7  # no rank receives these messages
_log = logging.getLogger("spanwise")


class ExchangeError(RuntimeError):
    """A collective failed: a rank is gone, stuck or too late.

    Afterwards the gloo groups of this process are unusable, also those of other collectives: their connections are
    closed.

    Attributes:
        what: the collective.
        rank: this rank in the group of the collective.
        lost: lost ranks of the group, as far as this rank knows. Empty on a rank whose peers failed because of a rank
            of another group.
        lost_global: lost ranks, as global ranks, in this group or in the group where the failure began.

    >>> issubclass(ExchangeError, RuntimeError), ExchangeError("rank 1 is lost").lost
    (True, ())
    """

    what: str = ""
    rank: int = -1
    lost: tuple[int, ...] = ()
    lost_global: tuple[int, ...] = ()


class MismatchError(ExchangeError, ValueError):
    """Ranks made different calls: another plan, mask, kernel, dtype, shape, … at the same place. Raised on every rank.

    If every rank raises in the call itself, the groups stay usable. A rank that had gone on, because its call was the
    expected one, raises where it waits for the others, at its next call or in the backward; then the gloo groups of the
    process are unusable. A call that raised on one rank differs from that of the others.

    >>> issubclass(MismatchError, ValueError)
    True
    """


class Call(NamedTuple):
    """A collective call in all that must be equal on all ranks.

    Attributes:
        facts: its arguments by label; hashable, with a `str` that is equal in all processes.
        fresh: one that changes from batch to batch: the plan's digest, or a number of tokens.
        age: calls since the forward whose backward this is; 0 for others.
    """

    name: str
    facts: tuple[tuple[str, Hashable], ...] = ()
    fresh: tuple[str, Hashable] | None = None
    age: int = 0

    def described(self, number: int) -> dict[str, str]:
        """The parts of call `number` in words."""
        of = [("of call", number - self.age)] if self.age else []
        facts = [("call", self.name), *of, *([self.fresh] if self.fresh else []), *self.facts]
        return {label: str(value).removeprefix("torch.").replace("\n", " ") for label, value in facts}


@functools.lru_cache(1024)
def _digest(call: Call) -> int:
    """62 bits. Errors are alike whatever they say."""
    plain = REFUSED if call.name == REFUSED else json.dumps(call.described(0))
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "little") >> 2


class Expectation:
    """Tells whether a call is the one that followed the last twelve before.

    >>> expected = Expectation()
    >>> [expected.meets(kind, None, False) for kind in (0, 1) * 14][-3:]
    [True, True, True]
    """

    def __init__(self) -> None:
        self._backward, self._place, self._last = False, 0, tuple[int, ...]()
        self._after: dict[tuple[int, ...], int] = {}
        self._fresh: dict[int, Hashable] = {}  # of each kind the last one; of -1 that of the last call with one

    def meets(self, kind: int, fresh: Hashable, backward: bool) -> bool:
        """Whether a call is the expected one; the first of a `kind` with another `fresh` fact never is.

        A model makes a call for each layer, then as many backwards; their place is counted.
        """
        self._place = min(self._place + 1, 1024) if backward == self._backward else 0
        placed, plain = (self._place, *self._last), (-1, *self._last)
        expected = self._after.get(placed, self._after.get(plain))
        met = expected == kind and fresh in (None, self._fresh.get(kind), self._fresh.get(-1))
        if len(self._after) > 8192:  # calls that never come back
            self._after.clear()
            self._fresh.clear()
        self._after[placed] = self._after[plain] = kind
        if fresh is not None:
            self._fresh[kind] = self._fresh[-1] = fresh
        self._last, self._backward = (*self._last, kind)[-12:], backward
        return met


class _Gather:
    """An all-gather over a `_torch.host_group`, started when it is made; equally many numbers on every rank."""

    def __init__(self, host: Any, numbers: Sequence[int], dtype: torch.dtype) -> None:
        with _torch.without_modes():
            rows = torch.empty(host.size(), len(numbers), dtype=dtype)
            self._handed = _torch.Handed(torch.tensor(numbers, dtype=dtype), *rows.unbind())
        self.work = host.allgather([self._handed.tensors[1:]], self._handed.tensors[:1])

    def wait(self) -> list[list[int]]:
        """The numbers of every rank."""
        self.work.wait()
        self.work = None
        self._handed.await_release()
        with _torch.without_modes():
            return [row.tolist() for row in self._handed.tensors[1:]]


_alive: weakref.WeakSet[CallLog] = weakref.WeakSet()  # to end with the process, also after their group was destroyed
os.register_at_fork(after_in_child=_alive.clear)  # a forked process has neither the threads nor the connections


class CallLog:
    """The calls of this rank on one mesh, compared with those of the other ranks.

    Making one is a collective of the mesh; ``RuntimeError`` if a rank is gone or too late, or hosts cannot connect.

    Args:
        name: of the mesh's groups, in one string.
        ranks: global ranks of the mesh, in its order.
        groups: of each axis; the timeout of the first holds.

    Attributes:
        count, confirmed: calls made; calls that all ranks made alike.
        error: why this call raises, and later ones. `broken`: why calls are compared no more.
    """

    def __init__(self, name: str, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup]) -> None:
        self.name = f"group '{name}'" if " " not in name else f"the mesh of global ranks {ranks}"
        self.ranks, self.rank = ranks, ranks.index(dist.get_rank())
        self.count = self.confirmed = 0
        self.error = self.broken = ""
        self.added = 0.0  # when the last call was recorded
        self._ends = False  # whether `error` holds for all calls to come
        self.backwards: set[int] = set()  # numbers of passes that made a call and have not ended
        # Names of groups may differ by rank; each rank counts its logs of these ranks, alike.
        store, key = _torch.group_store(dist.group.WORLD or groups[0]), f"spanwise/calls/{','.join(map(str, ranks))}"
        key += f"/{store.add(f'{key}/{self.rank}', 1)}/connect"
        with _torch.without_modes():
            for group in groups:  # gloo's own wait for connections would not end when a process does
                own = torch.zeros(1, device=_torch.comparison_device(group))
                _torch.wait(_torch.start_all_gather(own, group.size(), group.group_name))
        timeout = _torch.group_timeout(groups[0])
        self.host = _torch.host_group(store, key, self.rank, len(ranks), timeout)
        self._calls: deque[Call] = deque()  # those that were not compared yet
        self._own: deque[int] = deque()  # their digests
        self._expected = Expectation()
        self._round: _Gather | None = None
        self._changed, self._wake = threading.Condition(), threading.Event()
        _alive.add(self)
        threading.Thread(target=_compare, args=(weakref.ref(self), self._wake), daemon=True).start()

    def add(self, call: Call) -> tuple[int, bool]:
        """Record a call; returns its number, and whether it was expected."""
        facts = () if call.name == REFUSED else call.facts  # as in `_digest`
        expected = self._expected.meets(hash((call.name, facts, call.age)), call.fresh, call.age > 0)
        self._calls.append(call)
        self._own.append(2 * _digest(call) + expected)  # lowest bit: this rank goes on without waiting
        self.count, self.added = self.count + 1, time.monotonic()
        if len(self._own) > _ROUND // 2:
            self._wake.set()
        return self.count, expected

    def confirm(self, number: int, seconds: float | None = None) -> bool:
        """Whether all ranks made call `number` alike; waits until that is known, for so many seconds at most."""
        if self.confirmed < number:
            self._wake.set()
            with self._changed:
                self._changed.wait_for(lambda: self.confirmed >= number or self.error or self.broken, seconds)
            self._wake.clear()
        return self.confirmed >= number

    def check(self) -> None:
        """``MismatchError`` if calls of the ranks differ."""
        if self.error:
            with self._changed:  # the thread may be about to set more than `error`
                error = MismatchError(self.error)
                error.what, error.rank = "comparison of calls", self.rank
                if not self._ends:
                    self.error = ""  # all ranks raise here
                    self.backwards.clear()
            raise error

    def step(self) -> bool:
        """Compare as far as possible without waiting; whether an all-gather is under way. For the thread."""
        with self._changed:
            if self.error or self.broken or (self._round is None and self.confirmed == self.count):
                self._wake.clear()
                return False
            try:
                # A rank takes part in a round while it has a call that was not compared. All ranks know the same of
                # earlier rounds, so rounds of all ranks match.
                if self._round is None:
                    own = list(self._own)[:_ROUND]
                    self._round = _Gather(self.host, [len(own), *own, *[0] * (_ROUND - len(own))], torch.int64)
                if not self._round.work.is_completed():
                    return True
                (counts, *digests), self._round = zip(*self._round.wait(), strict=True), None
                for found in digests[: min(counts)]:
                    if len(set(found)) > 1:
                        self._differ(self.confirmed + 1, any(digest & 1 for digest in found))
                        break
                    self._calls.popleft()
                    self._own.popleft()
                    self.confirmed += 1
            except RuntimeError as error:
                self.broken = str(error)
            self._changed.notify_all()
            return False

    def _differ(self, number: int, started: bool) -> None:
        """Set `error`. If no rank has started the call, or is in a backward, all raise in it, and the log can go on."""
        own = {label: value[:500] for label, value in self._calls[0].described(number).items()}
        said = json.dumps(own).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        by_facts: dict[bytes, list[int]] = {}
        for rank, row in enumerate(_Gather(self.host, list(said), torch.uint8).wait()):
            by_facts.setdefault(bytes(row), []).append(rank)
        parts, first = [], json.loads(next(iter(by_facts)))
        for facts, ranks in zip(map(json.loads, by_facts), by_facts.values(), strict=True):
            # Of the same call, only the arguments that differ from those of the first ranks.
            alike = facts != first and facts.keys() == first.keys() and facts["call"] == first["call"]
            told = ", ".join([f"{x} {y}" for x, y in facts.items() if x != "call" and not (alike and first[x] == y)])
            parts.append(f"{ranks_in_words(ranks)}: {told if alike else facts['call'] + '(' + told + ')'}")
        everyone = f"ranks disagree on call {number} in {self.name}: {'; '.join(parts)}"
        text = f"{everyone}. Every rank must make the same calls in the same order"
        if started or any(b"backward of" in each for each in by_facts):  # or steps would go on that are not the same
            _log.error(text)  # compiled code and other libraries raise torch's own error where they wait
            self.error, self._ends = text, True
            close(probe()[1])
        else:
            self.error, self._expected, self.confirmed = text, Expectation(), number
            self._calls.clear()
            self._own.clear()


def _compare(ref: weakref.ref[CallLog], wake: threading.Event) -> None:
    pause = POLL
    while True:
        urgent = wake.wait(PERIOD)
        log = ref()
        if log is None or sys.is_finalizing():
            return
        pause = min(2 * pause, 5e-3) if log.step() else POLL
        del log
        if urgent:
            time.sleep(pause)


# The logs of meshes by the group of their first axis, with which they die, and by the names of all their groups. None:
# ranks are simulated or are threads, or the comparison is switched off.
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, CallLog | None]] = weakref.WeakKeyDictionary()


def switch(groups: Sequence[dist.ProcessGroup], enabled: bool) -> None:
    """Compare calls on the mesh of these groups, one of each axis, or do not."""
    found, name = _known.setdefault(groups[0], {}), " ".join([group.group_name for group in groups])
    if not enabled:
        found[name] = None
    elif found.get(name, "") is None:
        del found[name]


def log_of(groups: Sequence[dist.ProcessGroup], ranks: Callable[[], Sequence[int]]) -> CallLog | None:
    """The log of a mesh, made at the first call; None where ranks are not compared.

    Args:
        ranks: gives the global ranks of the mesh, in its order.
    """
    found, name = _known.setdefault(groups[0], {}), " ".join([group.group_name for group in groups])
    if name not in found:
        found[name] = CallLog(name, list(ranks()), groups) if all(map(_torch.has_processes, groups)) else None
    return found[name]


def logs() -> list[CallLog]:
    """The logs of this process; groups that were destroyed may live on as objects."""
    found = [_known.get(group, {}) for group in (_torch.groups() if dist.is_initialized() else ())]
    return [log for of_group in found for log in of_group.values() if log is not None]


@atexit.register
def _finish() -> None:
    """Compare the last calls before the process ends, so that no thread is inside the backend while Python ends."""
    for log in list(_alive):
        log.confirm(log.count, FLUSH)
        if log.error:
            print(f"spanwise: {log.error}", file=sys.stderr)
        with log._changed:  # the thread is not in the middle of a step
            log.broken = log.broken or "the process ends"


def probe() -> tuple[set[int], list[dist.Work]]:
    """Global ranks that a gloo group of this process cannot reach; and messages to the others, which nobody receives.

    A send fails at once where the process has ended, however it ended, or where gloo has closed the connection.
    """
    groups = [(group, dist.get_process_group_ranks(group)) for group in _torch.groups() if _torch.is_gloo(group)]
    cut: set[int] = set()
    open_sends: list[dist.Work] = []
    for group, ranks in [*groups, *[(log.host, log.ranks) for log in logs()]]:
        for peer in {*range(group.size())} - {group.rank()}:
            try:
                with _torch.without_modes():
                    open_sends.append(group.send([torch.zeros(1)], peer, _PROBE_TAG))
            except RuntimeError:
                cut.add(ranks[peer])
    return cut, open_sends


def close(open_sends: Sequence[dist.Work]) -> None:
    """Close the connections that were probed: waits fail that are under way here, and on ranks that wait for this one.

    gloo closes all connections of a group when one of its operations times out. A send may fail instead, because its
    peer has just closed its end, and then the others stay open. So there is one to each peer.
    """
    for send in open_sends:
        with contextlib.suppress(RuntimeError):
            send.wait(timedelta(milliseconds=1))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks for a message: "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
