"""Calls of all ranks of a mesh, compared by number.

Ranks that make different calls compute wrong numbers without an error, or abort inside the backend. So every rank
numbers its calls and keeps a digest of each. The digests travel over gloo connections of their own. A thread gathers
them while the calls run, so that a call costs microseconds.

A call that was to be expected does not wait: its collectives start at once, and the comparison comes later. Any other
call waits until all ranks have made it. What is expected follows from the calls so far, in the same way on all ranks.
So of the ranks that agreed until now and differ in this call, only those with the expected call go on. The others wait,
raise and start no collective. Therefore collectives of two sizes never meet.
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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spanwise import _torch
from spanwise.attention.exchange.errors import calls_in_words, in_words
from spanwise.attention.exchange.expectation import Call, Expectation
from spanwise.attention.exchange.findings import alarm, meet, probe

# Seconds between two looks of the thread. An all-gather takes some 0.3 ms of CPU time on each rank. Where all cores
# compute, one every millisecond made calls of 4 ms 1.3 times as long, one every 50 ms 1.004 times; see
# benchmarks/compare_calls.py.
PERIOD = 50e-3
POLL = 1e-3  # seconds between two looks of a rank that waits
GRACE = 5.0  # seconds to wait for the descriptions of other ranks after a mismatch
FLUSH = 2.0  # seconds to compare the last calls before the process ends
RECENT = 4  # calls of a rank in an error
PATIENCE = 2.0  # seconds that a rank waits for others before it asks whether their calls were refused
_WIDTH = 120  # digests in one all-gather
_log = logging.getLogger("spanwise")


class _Gather:
    """An all-gather of numbers over a `_torch.host_group`, started when it is made.

    Args:
        numbers: int64, equally many on every rank.
    """

    def __init__(self, host: Any, numbers: list[int], num_ranks: int) -> None:
        with _torch.without_modes():
            rows = torch.empty(num_ranks, len(numbers), dtype=torch.int64)
            self._handed = _torch.Handed(torch.tensor(numbers, dtype=torch.int64), *rows.unbind())
            self._work = host.allgather([self._handed.tensors[1:]], self._handed.tensors[:1])

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()

    def wait(self) -> list[list[int]]:
        """The numbers of every rank."""
        self._work.wait()
        self._work = None
        self._handed.await_release()
        with _torch.without_modes():
            return [row.tolist() for row in self._handed.tensors[1:]]


_alive: weakref.WeakSet[CallLog] = weakref.WeakSet()  # to end with the process, also after their group was destroyed
os.register_at_fork(after_in_child=_alive.clear)  # a forked process has neither the threads nor the connections


class CallLog:
    """The calls of this rank on one mesh, compared with those of the other ranks.

    Making one is a collective of the mesh.

    Args:
        name: of the mesh's groups, in one string.
        ranks: global ranks of the mesh, in its order.
        groups: of each axis; the timeout of the first holds.
        on_mismatch: called where this rank may wait in a collective that other ranks will never start.

    Raises:
        RuntimeError: not all ranks came within the timeout, or one of them has ended.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup], on_mismatch: Callable[[], None]
    ) -> None:
        group = groups[0]
        self.name = f"group '{name}'" if " " not in name else f"the mesh of global ranks {ranks}"
        self.group_name, self.ranks = _torch.group_name(group), ranks
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.count = self.confirmed = 0  # calls made; calls that all ranks made alike
        self.error = ""
        self._recent: deque[tuple[int, Call]] = deque()  # those that a comparison may still be about, by number
        self._store, self._on_mismatch = _torch.group_store(dist.group.WORLD or group), on_mismatch
        timeout = _torch.group_timeout(group)
        until = time.monotonic() + timeout.total_seconds()
        # Names of groups may differ by rank; each rank counts its logs of these ranks, alike.
        self.key = f"spanwise/calls/{','.join(map(str, ranks))}"
        self.key += f"/{self._store.add(f'{self.key}/{self.rank}', 1)}"
        meet(self._store, f"{self.key}/come", self.size, groups, until)
        self.host = _torch.host_group(self._store, f"{self.key}/connect", self.rank, self.size, timeout)
        self._lock = threading.Lock()
        self._expected = Expectation()
        self._digests: dict[Call, int] = {}
        self._own: deque[int] = deque()  # digests that were not sent
        self._heard: list[deque[int]] = [deque() for _ in range(self.size)]
        self._round: _Gather | None = None
        self._next_question = 0.0  # when to ask whether a call was refused on another rank
        self._refused_after = -1  # calls before the last one that was refused here
        self._added = 0.0  # when the last call was recorded
        self._backwards: set[int] = set()  # numbers of those that made a call and have not ended
        self._failed = False  # whether a rank failed in the middle of a call
        self._broken = False
        _alive.add(self)
        threading.Thread(target=_look, args=(weakref.ref(self),), name="spanwise calls", daemon=True).start()

    def add(self, call: Call) -> tuple[int, bool]:
        """Record a call; returns its number, and whether it was expected."""
        digest = self._digests.get(call)
        if digest is None:
            if len(self._digests) >= 1024:
                self._digests.clear()
            plain = repr((call.plan, call.name, call.values, call.amount, call.forward)).encode()
            digest = int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "little") >> 2
            self._digests[call] = digest
        expected = self._expected.meets(call)
        number = self.count + 1
        self._recent.append((number, call))
        while len(self._recent) > RECENT and self._recent[0][0] < self.confirmed:
            self._recent.popleft()
        self._own.append(2 * digest + expected)
        self.count, self._added = number, time.monotonic()
        return number, expected

    def recent(self) -> list[str]:
        """The last calls in words."""
        return [f"{number}. {in_words(call.facts())}" for number, call in list(self._recent)[-RECENT:]]

    @property
    def behind(self) -> bool:
        """Whether more digests are there than a round takes."""
        return len(self._own) >= _WIDTH and not self.error and not self._broken

    def confirm(self, number: int) -> None:
        """Return when all ranks have made call `number` alike, or `error` is set.

        Raises:
            RuntimeError: the connections failed, or a rank is too late.
        """
        while self.confirmed < number and not self.error:
            with self._lock:
                if self.confirmed < number and not self.error:
                    self._advance()

    def settle(self, seconds: float) -> None:
        """Compare what can be compared within some seconds; errors of connections are ignored."""
        until = time.monotonic() + seconds
        while self.confirmed < self.count and not self.error and not self._broken and time.monotonic() < until:
            self.look()
            time.sleep(POLL)

    def end(self) -> None:
        """Compare the last calls, then nothing any more; says what differs on standard error."""
        self.settle(FLUSH)
        if text := self.raised():
            print(f"spanwise: {text}", file=sys.stderr)
        with self._lock:  # the thread is not in the middle of a step
            self._broken = True

    def refuse(self, error: Exception, began: float) -> None:
        """Tell ranks that may wait for this one that its call, which `began` then, raised `error`.

        If it was recorded before, its collectives may have started, and those of a next call would meet them. So this
        log ends then, and the connections are closed, unless all ranks say soon that they failed in the same way.
        """
        self._refused_after = self.count
        self._tell(f"{type(error).__name__}: {str(error)[:500]}", inside=self._added >= began)

    def notice(self, backward: int) -> None:
        """Find out at a call, in the backward of this number or in none (-1), that an earlier backward has raised."""
        if backward == -1 and self._backwards:
            self._backwards.clear()
            if not self.error and not self._broken:  # those are why it has raised
                self._tell("an error in its backward", inside=True)
        elif backward != -1 and backward not in self._backwards:
            self._backwards.add(backward)
            _torch.after_backward(functools.partial(self._backwards.discard, backward))

    def _tell(self, said: str, inside: bool) -> None:
        failed = inside and not self._all_raise(said)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self.key}/refused/{self.rank}", json.dumps([self.count, said, failed]))
            self._store.add(f"{self.key}/refused", 1)
        if failed:
            self._fail(self.rank, self.count, said)

    def _all_raise(self, said: str) -> bool:
        """Whether all ranks raise this in the last call."""
        key, until = f"{self.key}/raise/{self.count}/{said}", time.monotonic() + PATIENCE
        with contextlib.suppress(RuntimeError):
            self._store.add(key, 1)
            while self._store.add(key, 0) % self.size:  # a call may be told by two functions, one in the other
                if time.monotonic() > until:
                    return False
                time.sleep(POLL)
            return True
        return False

    def _fail(self, rank: int, number: int, said: str) -> None:
        """Set `error` for all calls to come: `rank` failed in the middle of a call."""
        self._failed = True
        self._give_up(f"rank {rank} of {self.name} failed in call {number}, where it raised {said}")

    def _give_up(self, text: str) -> None:
        self.error = text
        _log.error(text)
        self._on_mismatch()
        alarm(probe(self.host)[1])

    def ask_for_refusals(self) -> None:
        """Set `error` if a rank has failed, or if one that is waited for was refused its call and made no other."""
        with contextlib.suppress(RuntimeError):
            if self._store.add(f"{self.key}/refused", 0) == 0:
                return
            for rank, heard in enumerate(self._heard):
                key = f"{self.key}/refused/{rank}"
                if rank == self.rank or self.error or not self._store.check([key]):
                    continue
                after, said, failed = json.loads(self._store.get(key))
                if failed:
                    self._fail(rank, after, said)
                elif self.confirmed + len(heard) == after < self.count and self._refused_after != after:
                    text = f"rank {rank} of {self.name} has not made call {after + 1}; before it, it raised {said}"
                    self._give_up(text)

    def look(self) -> None:
        """A step of the comparison, if there is one to make; never waits."""
        if self.error or self._broken or self.confirmed == self.count:
            return
        if self._round is not None and time.monotonic() > self._next_question:
            self._next_question = time.monotonic() + PATIENCE
            self.ask_for_refusals()
        if self.error or not self._lock.acquire(blocking=False):
            return
        try:
            self._advance(wait=False)
        except RuntimeError:
            self._broken = True  # a collective, or `confirm`, says why
        finally:
            self._lock.release()

    def _advance(self, *, wait: bool = True) -> None:
        # A rank takes part in a round while it has a call that some rank was not heard to make. All ranks that have
        # made the next call see the same, so rounds of all ranks match.
        if self._round is None:
            self._round = self._start_round()
        if wait or self._round.is_completed():
            rows = self._round.wait()
            self._round = None
            self._take(rows)

    def _start_round(self) -> _Gather:
        digests = [self._own.popleft() for _ in range(min(len(self._own), _WIDTH))]
        numbers = [len(digests), *digests, *[0] * (_WIDTH - len(digests))]
        self._next_question = time.monotonic() + PATIENCE
        return _Gather(self.host, numbers, self.size)

    def _take(self, rows: list[list[int]]) -> None:
        if rows.count(rows[0]) == self.size and not any(self._heard):
            self.confirmed += rows[0][0]  # the usual case
            return
        for heard, row in zip(self._heard, rows, strict=True):
            heard.extend(row[1 : 1 + row[0]])
        while all(self._heard):
            digests = {heard.popleft() for heard in self._heard}
            if len(digests) > 1:
                self._mismatch(self.confirmed + 1, any(digest & 1 for digest in digests))
                return
            self.confirmed += 1

    def _mismatch(self, number: int, started: bool) -> None:
        """Set `error`. If no rank has started the call, all raise in it, and the log can go on."""
        calls = list(self._recent)  # at once: the rank may be adding to it
        mine = [(n, call.facts()) for n, call in calls if number - 1 <= n <= number]
        text = calls_in_words(number, self.name, self._told(number, mine))
        if started:
            _log.error(text)  # compiled code and other libraries raise torch's own error where they wait
            self.error = text
            self._on_mismatch()
            return
        self.error = text  # first: who waits for `confirmed` must see it
        self._expected = Expectation()
        self.confirmed = number

    def raised(self) -> str:
        """The text of a mismatch, empty if there is none."""
        if not self.error:
            return ""
        with self._lock:  # the thread may be about to set more than `error`
            text = self.error
            if self.confirmed == self.count and not self._failed:
                self.error = ""  # all ranks raise here
                self._backwards.clear()
        return text

    def _told(self, number: int, mine: list[tuple[int, dict[str, str]]]) -> dict[int, list[tuple[int, dict[str, str]]]]:
        """The last calls of each rank that answers, by rank."""
        prefix = f"{self.key}/{number}"
        told, until = {self.rank: mine}, time.monotonic() + GRACE
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{prefix}/{self.rank}", json.dumps(mine))
            for rank in range(self.size):
                while rank not in told and time.monotonic() < until:
                    if self._store.check([f"{prefix}/{rank}"]):
                        told[rank] = json.loads(self._store.get(f"{prefix}/{rank}"))
                    else:
                        time.sleep(POLL)
        return told


def _look(ref: weakref.ref[CallLog]) -> None:
    period = PERIOD
    while True:
        time.sleep(period)
        log = ref()
        if log is None or sys.is_finalizing():
            return
        log.look()
        period = POLL if log.behind else PERIOD
        del log


# The logs of meshes by the group of their first axis, with which they die, and by the names of all their groups. None:
# no log can be.
_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, CallLog | None]] = weakref.WeakKeyDictionary()


def log_of(
    groups: Sequence[dist.ProcessGroup], ranks: Callable[[], Sequence[int]], on_mismatch: Callable[[], None]
) -> CallLog | None:
    """The log of a mesh, made at the first call; None where ranks are simulated or are threads.

    Args:
        groups: of each axis of the mesh.
        ranks: gives the global ranks of the mesh, in its order.
    """
    found = _logs.setdefault(groups[0], {})
    name = " ".join([_torch.group_name(group) for group in groups])
    if name not in found:
        real = all(_torch.has_processes(group) for group in groups)
        found[name] = CallLog(name, list(ranks()), groups, on_mismatch) if real else None
    return found[name]


def logs() -> list[CallLog]:
    """The logs of this process; groups that were destroyed may live on as objects."""
    found = [_logs.get(group, {}) for group in (_torch.groups() if dist.is_initialized() else ())]
    return [log for of_group in found for log in of_group.values() if log is not None]


@atexit.register
def _finish() -> None:
    """Compare the last calls before the process ends, so that no thread is inside the backend while Python ends."""
    for log in list(_alive):
        log.end()
