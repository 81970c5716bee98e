"""Errors that name the collective and the lost ranks; torch's own error names neither.

A rank that fails reports in the store of the process group and closes its gloo connections, so that ranks fail that
wait for it. A rank that others wait for, and that has not reported a few seconds later, is lost.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.call_log import ExchangeError, close, logs, probe, ranks_in_words

GRACE = 5.0  # seconds to wait for reports of other ranks
_SETTLE = 1.0  # seconds that a failed rank waits to learn whether ranks made different calls
REPORTS = "spanwise/failures"  # key of their number, and prefix of their keys


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


def explained(error: Exception, what: str, group: str, ranks: Sequence[int], seconds: float) -> ExchangeError:
    """The error of `what` among global `ranks`, after a look at all ranks; closes the connections of this one."""
    for log in logs():
        log.confirm(log.count, _SETTLE)
        log.check()
    cut, open_sends = probe()
    ranks, rank, said = list(ranks), dist.get_rank(), str(error).strip().split("\n")[0][:500]
    text = f"{what} failed on rank {rank}, {group} of {len(ranks)} ranks, after {seconds:.1f} s, with {said!r}"
    reports: dict[int, Any] = {rank: (text, ranks)}
    lost, text = explanation(rank, reports, cut, _ask(open_sends, rank, reports))
    found = ExchangeError(text)
    found.what, found.rank, found.lost_global = what, ranks.index(rank), lost
    found.lost = tuple(ranks.index(r) for r in lost if r in ranks)
    return found


def explanation(rank: int, reports: dict[int, Any], cut: set[int], trouble: str) -> tuple[tuple[int, ...], str]:
    """Lost ranks, and the text of an `ExchangeError`; all ranks are global.

    Ranks are lost that others wait for and that did not report; if the store failed, those of them that are cut off.

    Args:
        reports: by rank the text of its failure and the ranks of the group in which it failed.
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


def _ask(open_sends: list[dist.Work], rank: int, reports: dict[int, Any]) -> str:
    """Report this rank's failure, and add the `reports` of the ranks that others wait for; returns why it could not.

    Reports are numbered in their order, so that one question, for their number, serves for all ranks. In a thread,
    because a store whose host is stopped answers no question, whatever its timeout.
    """
    found, done = dict(reports), list[str]()
    assert dist.group.WORLD is not None
    store = _torch.group_store(dist.group.WORLD)  # one for all groups

    def ask() -> None:
        until, seen, silent = time.monotonic() + GRACE, 0, True
        try:
            try:
                store.set(f"{REPORTS}/{store.add(REPORTS, 1)}", json.dumps([rank, reports[rank]]))
            finally:
                close(open_sends)
            while silent and time.monotonic() < until:
                time.sleep(0.02)
                count = store.add(REPORTS, 0)
                for r, report in map(json.loads, store.multi_get([f"{REPORTS}/{n + 1}" for n in range(seen, count)])):
                    found.setdefault(r, report)
                seen, silent = count, any(r not in found for _, ranks in found.values() for r in ranks)
            done.append("")
        except RuntimeError as error:
            why = str(error).splitlines()[0][:200]
            done.append(f"the group's store is gone, for its host (usually rank 0) has ended ({why})")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(GRACE + _SETTLE)
    if asking.is_alive():
        close(open_sends)
        return "the group's store does not answer, for its host (usually rank 0) is stopped or busy"
    reports.update(found)
    return done[0]
