"""Collectives whose errors name the collective and the lost ranks; torch's own error names neither.

A rank that fails reports in the store of the process group and closes its gloo connections, so that ranks fail that
wait for it. A rank that others wait for, and that has not reported a few seconds later, is lost.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.call_log import CallLog, close, logs, probe, ranks_in_words

GRACE = 5.0  # seconds to wait for reports of other ranks
_SETTLE = 1.0  # seconds that a failed rank waits to learn whether ranks made different calls
REPORTS = "spanwise/failures"  # key of their number, and prefix of their keys
Reports = dict[int, Any]
"""By global rank the text of its failure, and the global ranks of the group in which it failed."""


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


def start(what: str, name: str, begin: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``begin(*args)``, one of the starts in `_torch`, on the group called `name`; `what` is the collective in words.

    ``ExchangeError`` if the backend failed; errors of other types pass unchanged.
    """
    _torch.check_compiling()
    return _watched(what, name, begin, *args)


def _watched(what: str, name: str, act: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return act(*args)
    began = time.monotonic()
    try:
        return act(*args)
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # out of memory, not implemented
        group = _torch.find_group(name)
        label = f"group '{name}'" + (f" ({group.group_desc})" if group.group_desc not in ("", "undefined") else "")
        ranks = dist.get_process_group_ranks(group)
        raise explained(error, what, label, ranks, time.monotonic() - began) from error


def wait(x: torch.Tensor, what: str, name: str) -> torch.Tensor:
    """Wait for a started collective on the group called `name`; `what` is the collective in words.

    On a CPU it returns when the data have arrived. It raises ``ExchangeError`` a few seconds after a process of the
    group has ended, and for a stuck process after the timeout of the group. Groups that `init_device_mesh` makes have
    torch's default timeout of half an hour, not that of the world; its ``backend_override`` sets another. With NCCL a
    wait only orders streams, unless ``TORCH_NCCL_BLOCKING_WAIT`` is set: torch's watchdog ends the process.
    """
    return _watched(what, name, _torch.wait, x)


def all_reduce(x: torch.Tensor, op: str, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """All-reduce (``"sum"`` or ``"max"``) over every axis of `mesh`, without autograd; `what` is the value in words.

    One axis after the other, so that a sliced or multi-dimensional mesh needs no extra group.
    """
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            name = _torch.group_name(mesh.get_group(axis))
            label = f"all-reduce of {what}"
            x = wait(start(label, name, _torch.start_all_reduce, x, op, name), label, name)
    return x


@contextlib.contextmanager
def exchange_errors(mesh: DeviceMesh) -> Iterator[None]:
    """Turn torch's errors of failed collectives into `ExchangeError`, around compiled code and its backward.

    In compiled code a collective is a bare operator, and torch's error names neither it nor the lost rank. Other errors
    pass unchanged, also those of collectives in eager code. Every rank uses it; no communication where nothing fails.

    Args:
        mesh: the cp mesh, or the mesh of all axes that the code communicates over.

    Raises:
        ExchangeError: a collective failed. Its seconds count from the start of the block.
        MismatchError: it failed because ranks made different calls.

    >>> import torch.distributed as dist, spanwise
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with spanwise.exchange_errors(init_device_mesh("cpu", (1,))):
    ...     pass  # loss = compiled_model(batch); loss.backward()
    >>> dist.destroy_process_group()
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain errors, and closes connections where it does.
        if not isinstance(error, dist.DistError) and not (type(error) is RuntimeError and probe()[0]):
            raise
        what, ranks = "a collective of compiled code", mesh.mesh.flatten().tolist()
        raise explained(error, what, f"the mesh of global ranks {ranks}", ranks, time.monotonic() - began) from error


def raise_mismatch(log: CallLog) -> None:
    """``MismatchError`` if calls of the ranks of `log` differ."""
    if text := log.raised():
        error = MismatchError(text)
        error.what, error.rank = "comparison of calls", log.rank
        raise error


def explained(error: Exception, what: str, group: str, ranks: Sequence[int], seconds: float) -> ExchangeError:
    """The error of `what` among global `ranks`, after a look at all ranks; closes the connections of this one."""
    for log in logs():
        log.confirm(log.count, _SETTLE)
        raise_mismatch(log)
    cut, open_sends = probe()
    ranks, rank, said = list(ranks), dist.get_rank(), str(error).strip().split("\n")[0][:500]
    text = f"{what} failed on rank {rank}, {group} of {len(ranks)} ranks, after {seconds:.1f} s, with {said!r}"
    reports: Reports = {rank: (text, ranks)}
    lost, text = explanation(rank, reports, cut, _ask(open_sends, rank, reports))
    found = ExchangeError(text)
    found.what, found.rank, found.lost_global = what, ranks.index(rank), lost
    found.lost = tuple(ranks.index(r) for r in lost if r in ranks)
    return found


def explanation(rank: int, reports: Reports, cut: set[int], trouble: str) -> tuple[tuple[int, ...], str]:
    """Lost ranks, and the text of an `ExchangeError`; all ranks are global.

    Ranks are lost that others wait for and that did not report; if the store failed, those of them that are cut off.

    Args:
        reports: by rank, that of this rank included.
        cut: ranks that this rank cannot reach any more.
        trouble: reason why the store could not be read to the end; empty if it could.
    """
    silent = {r for _, ranks in reports.values() for r in ranks} - reports.keys()
    lost = tuple(sorted(silent & cut if trouble else silent))
    why = "whose connection is closed" if trouble else f"no word within {GRACE:.1f} s"
    found = f"lost: {ranks_in_words(lost)}, {why}: the process or its host has ended, is stuck or busy"
    nobody = "all ranks are there; if no rank is late, a connection is cut or too slow"
    others = [text for r, (text, _) in sorted(reports.items()) if r != rank]
    parts = [reports[rank][0], *([found] if lost else []), trouble or ("" if lost else nobody), *others]
    return lost, "; ".join(filter(None, parts))


def _ask(open_sends: list[dist.Work], rank: int, reports: Reports) -> str:
    """Report this rank's failure, and add the `reports` of the ranks that others wait for; returns why it could not.

    In a thread, because a store whose host is stopped answers no question, whatever its timeout.
    """
    found, trouble = dict(reports), list[str]()
    asking = threading.Thread(target=lambda: trouble.append(_asked(open_sends, rank, found)), daemon=True)
    asking.start()
    asking.join(GRACE + _SETTLE)
    if asking.is_alive():
        close(open_sends)
        return "the group's store does not answer, for its host (usually rank 0) is stopped or busy"
    reports.update(found)
    return trouble[0]


def _asked(open_sends: list[dist.Work], rank: int, reports: Reports) -> str:
    """Reports are numbered in their order, so that one question, for their number, serves for all ranks."""
    until, seen, silent = time.monotonic() + GRACE, 0, True
    assert dist.group.WORLD is not None
    store = _torch.group_store(dist.group.WORLD)  # one for all groups
    try:
        try:
            store.set(f"{REPORTS}/{store.add(REPORTS, 1)}", json.dumps([rank, reports[rank]]))
        finally:
            close(open_sends)
        while silent and time.monotonic() < until:
            time.sleep(0.02)
            count = store.add(REPORTS, 0)
            for r, report in map(json.loads, store.multi_get([f"{REPORTS}/{n + 1}" for n in range(seen, count)])):
                reports.setdefault(r, report)
            seen, silent = count, any(r not in reports for _, ranks in reports.values() for r in ranks)
    except RuntimeError as error:
        return (
            f"the group's store is gone, for its host (usually rank 0) has ended ({str(error).splitlines()[0][:200]})"
        )
    return ""
