"""Collectives whose errors name the collective and the lost ranks; calls that are compared across ranks.

`start` and `wait` wrap the collectives of `_torch`. torch's own error names neither the collective nor the lost rank;
`findings` finds them. In compiled code the collective stays a bare operator, and torch's own error surfaces;
`exchange_errors` around the call translates it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import calls
from spanwise.attention.exchange.errors import ExchangeError, MismatchError
from spanwise.attention.exchange.expectation import Call
from spanwise.attention.exchange.findings import Report, close_connections, describe, investigate, lost_ranks, probe

# Texts of gloo. The second has no path: this process has closed the connection, as `close_connections` does.
_GLOO = ("gloo/transport", "Application timeout caused pair closure")
_SETTLE = 1.0  # seconds that a failed rank waits to learn whether ranks made different calls


class Compared(NamedTuple):
    """A call in eager code that is compared with those of the other ranks.

    Attributes:
        number: of the call on its mesh, the same on all ranks; -1 where ranks are threads or simulated.
        backward: compares its backward, once for each backward; called where the first of its collectives starts.
    """

    number: int
    backward: Callable[[], None]


def start(what: str, name: str, begin: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``begin(*args)``, one of the starts in `_torch`, on the group called `name`; `what` is the collective in words.

    ``ExchangeError`` if the backend failed; errors about arguments pass unchanged.
    """
    _torch.check_compiling()
    if torch.compiler.is_compiling():
        return begin(*args)
    began = time.monotonic()
    try:
        return begin(*args)
    except RuntimeError as error:
        if not _of_backend(error):
            raise
        raise _explain(error, what, name, args[0].device, time.monotonic() - began) from error


def wait(x: torch.Tensor, what: str, name: str) -> torch.Tensor:
    """Wait for a started collective on the group called `name`; `what` is the collective in words.

    On a CPU it returns when the data have arrived. It raises ``ExchangeError`` a few seconds after a process of the
    group has ended, and for a stuck process after the timeout of the group. Groups that `init_device_mesh` makes have
    torch's default timeout of half an hour, not that of the world; its ``backend_override`` sets another. (A timeout
    set later does not reach sends and receives of gloo.) With NCCL a wait only orders streams, unless
    ``TORCH_NCCL_BLOCKING_WAIT`` is set: torch's watchdog ends the process after the timeout, and this function raises
    nothing.
    """
    if torch.compiler.is_compiling():
        return _torch.wait(x)
    began = time.monotonic()
    try:
        return _torch.wait(x)
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise  # out of memory, not implemented
        raise _explain(error, what, name, x.device, time.monotonic() - began) from error


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
        if isinstance(error, ExchangeError) or not _of_backend(error):
            raise
        what, seconds = "a collective of compiled code", time.monotonic() - began
        name, ranks = _torch.group_name(mesh.get_group(0)), mesh.mesh.flatten().tolist()
        log = next((each for each in calls.logs() if list(each.ranks) == ranks), None)
        if mesh.ndim > 1 and log is not None:  # the axis is unknown; the log has all ranks
            raise _found(error, Report(what, seconds, "", log.key, log.name, log.ranks), log.host, log) from error
        raise _explain(error, what, name, torch.device(mesh.device_type), seconds) from error


def connect(groups: Sequence[dist.ProcessGroup], ranks: Callable[[], Sequence[int]]) -> calls.CallLog | None:
    """The log of calls of a mesh; connects its ranks when first asked for, which is a collective of the mesh.

    ``ExchangeError`` if a rank is gone or too late; arguments as in `calls.log_of`.
    """
    began = time.monotonic()
    try:
        return calls.log_of(groups, ranks, close_connections)
    except RuntimeError as error:
        what, seconds = "connections to compare calls", time.monotonic() - began
        if len(groups) == 1:
            raise _explain(error, what, _torch.group_name(groups[0]), torch.device("cpu"), seconds) from error
        everyone = list(ranks())
        own = Report(what, seconds, "", f"spanwise/calls/{everyone}", f"the mesh of global ranks {everyone}", everyone)
        raise _found(error, own, None, None) from error


def compare(
    call: Call, groups: Sequence[dist.ProcessGroup], ranks: Callable[[], Sequence[int]]
) -> tuple[int, Callable[[], None] | None]:
    """Compare a call with those of the other ranks of a mesh; returns when it may start its collectives.

    Args:
        groups, ranks: as in `calls.log_of`.

    Returns:
        The number of the call, -1 where calls are not compared; and None if all ranks were found to make the call, else
        a function that waits until they are.

    Raises:
        MismatchError: ranks make different calls, this one or one before.
        ExchangeError: a rank is gone or too late.
    """
    log = connect(groups, ranks)
    if log is None:
        return -1, None
    log.notice(_torch.backward_number())
    _raise_mismatch(log)
    number, expected = log.add(call)

    def confirm() -> None:
        began = time.monotonic()
        try:
            log.confirm(number)
        except RuntimeError as error:
            seconds = time.monotonic() - began
            own = Report(f"comparison of call {number}", seconds, "", log.key, log.name, log.ranks)
            raise _found(error, own, log.host, log) from error
        _raise_mismatch(log)

    if expected:
        return number, confirm
    confirm()
    return number, None


def report_refusal(error: Exception, ranks: Sequence[int], began: float) -> None:
    """Tell the other `ranks` of a mesh that the call of this one, which `began` then, raised `error`.

    Only after a call that was compared; without communication among the ranks.
    """
    for log in calls.logs():
        if not isinstance(error, ExchangeError) and log.ranks == ranks:
            log.refuse(error, began)


def _of_backend(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _GLOO)


def _raise_mismatch(log: calls.CallLog) -> None:
    text = log.raised()
    if text:
        raise _mismatch(log, text)


def _mismatch(log: calls.CallLog, text: str) -> MismatchError:
    error = MismatchError(text)
    error.what, error.rank = "comparison of calls", log.rank
    return error


def _explain(error: RuntimeError, what: str, name: str, device: torch.device, seconds: float) -> ExchangeError:
    """The error of a collective of the group called `name`."""
    group = _torch.find_group(name)
    label = f"'{name}'" + (f" ({group.group_desc})" if group.group_desc not in ("", "undefined") else "")
    ranks = dist.get_process_group_ranks(group)
    log = next((each for each in calls.logs() if each.group_name == name), None)
    near = group if device.type == "cpu" and _torch.is_gloo(group) else None
    return _found(error, Report(what, seconds, "", name, f"group {label}", ranks), near, log)


def _found(error: RuntimeError, own: Report, near: Any, log: calls.CallLog | None) -> ExchangeError:
    """The error after a look at the other ranks.

    Args:
        own: what failed, and where.
        near, log: gloo connections of its ranks, and their calls, where there are such.
    """
    for each in calls.logs():
        each.settle(_SETTLE)
        each.ask_for_refusals()
        if text := each.raised():
            return _mismatch(each, text)
    lost_here, open_sends = probe(near) if near is not None else ((), [])
    open_sends += [send for each in calls.logs() for send in probe(each.host)[1]]
    ranks = own.ranks
    report = own._replace(
        said=str(error).strip().split("\n")[0][:500].rstrip("."),
        closed=tuple(ranks[peer] for peer in lost_here),
        calls=log.recent() if log is not None else [],
    )
    found = investigate(report, open_sends)
    explained = ExchangeError(describe(found))
    explained.what, explained.rank = own.what, list(ranks).index(dist.get_rank())
    lost = lost_ranks(found)
    explained.lost = tuple(list(ranks).index(r) for r in lost if r in ranks)
    explained.lost_global = lost
    explained.calls = {list(ranks).index(r): tuple(each.calls) for r, each in found.reports.items() if r in ranks}
    return explained
