"""What must be equal in the calls of all ranks, in eager and in compiled code; `call_log` compares it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.call_log import REFUSED, Call, CallLog, ExchangeError, log_of, logs, switch
from spanwise.attention.failure import explained

PATIENCE = 2.0  # seconds in which all ranks must fail in a call for the calls to go on
_Function = TypeVar("_Function", bound=Callable[..., Any])
Compared = Callable[[str], None]
"""Of a call in eager code: compares what a backward starts, called with its name before."""


class Compare(NamedTuple):
    """A call that is compared.

    Attributes:
        groups, ranks: of its mesh; in compiled code `groups` are names, in one string.
        number: of the call; in compiled code a tensor.
    """

    groups: Any
    ranks: Any
    name: str
    number: Any

    def backward(self, exchange: str = "") -> None:
        """Compare what a backward of the call starts, in eager code."""
        facts = (("exchange", exchange),) if exchange else ()
        record(Call(f"backward of {self.name}", facts), self.groups, self.ranks, self.number)


def compare_calls(mesh: DeviceMesh, enabled: bool) -> None:
    """Compare the calls of the ranks of `mesh`, as is the default, or do not.

    Every rank makes it, at the same place. Without the comparison ranks that make different calls, or whose plans
    differ, hang, abort or compute wrong numbers; a host connection for each pair of ranks is saved, and some 10 µs a
    call.

    >>> import torch.distributed as dist, spanwise
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> spanwise.compare_calls(init_device_mesh("cpu", (1,)), False)
    >>> dist.destroy_process_group()
    """
    switch(mesh.get_all_groups(), enabled)


def tells_refusals(function: _Function) -> _Function:
    """Decorator of a collective call: that it raised on this rank is compared too, so that the others learn why.

    In eager code. Its mesh is an argument, or the attribute `mesh` of one. If it raised after the comparison, other
    ranks may wait for its collectives. Unless all ranks soon raise there, it is a failed collective.
    """

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        # Not Exception: torch ends the recomputation of a checkpoint by one of its own.
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ExchangeError) or hasattr(error, "told"):
                raise
            error.told = True  # type: ignore[union-attr]
            meshes = [x if isinstance(x, DeviceMesh) else getattr(x, "mesh", None) for x in [*args, *kwargs.values()]]
            ranks = [list(_global_ranks(x)) for x in meshes if isinstance(x, DeviceMesh)]
            for log in [log for log in logs() if list(log.ranks) in ranks]:
                compared = log.added >= began
                number, _ = log.add(Call(REFUSED, (("raised", f"{type(error).__name__}: {error}"),)))
                if compared and not log.confirm(number, PATIENCE) and not log.error:
                    explained(error, function.__name__, log.name, log.ranks, time.monotonic() - began)
            raise

    return told  # type: ignore[return-value]


def compare_call(
    name: str, facts: dict[str, Any], mesh: DeviceMesh, tensors: Sequence[torch.Tensor],
    *, sizes: tuple[str, Sequence[int]], plan: torch.Tensor | None = None, sums: bool = False,
    amount: float | torch.Tensor | None = None,
) -> Compare | None:  # fmt: skip
    """Compare a call across the ranks of `mesh`; returns when its collectives may start.

    Args:
        facts: what must be equal, by label.
        tensors: of the call; fake ones are not compared.
        sizes: more of what must be equal, with their label. In compiled code they may be symbols.
        plan: the digest of its plan.
        sums: its collectives are all-reduces, which are the same in compiled code; so they are without a plan.
        amount: a number that changes from call to call. One in a tensor of a device is not compared.

    Returns:
        an argument for `compare_backward`, `compared` and `executor.Link`; None if the call is not compared.

    Raises:
        MismatchError: ranks make different calls.
        ExchangeError: a rank is gone or too late.
    """
    groups, ranks = mesh_ranks(mesh)
    facts = {"requires grad": tuple([torch.is_grad_enabled() and x.requires_grad for x in tensors])} | facts
    fresh = amount if plan is None else plan
    if isinstance(fresh, torch.Tensor) and fresh.device.type != "cpu":
        fresh = None
    if torch.compiler.is_compiling():
        name = name if plan is None or sums else f"compiled {name}"
        if fresh is not None and not isinstance(fresh, torch.Tensor):
            fresh = scalar(fresh, torch.device("cpu"))
        lines = [f"{label}\t{value}".replace("\n", " ") for label, value in facts.items()]
        call = " ".join([group.group_name for group in groups]), ranks(), name
        number = torch.ops.spanwise.compare_call(fresh, *call, "\n".join([*lines, sizes[0]]), sizes[1], [])
        return Compare(*call, number)
    if any(map(_torch.is_fake, tensors)):
        return None
    number = record(Call(name, (*facts.items(), (sizes[0], tuple(sizes[1]))), _fresh(fresh)), groups, ranks)
    return Compare(groups, ranks, name, number)


def _fresh(value: float | torch.Tensor | None) -> tuple[str, Hashable] | None:
    """`Call.fresh` of a plan's digest, which is uint8, or of an amount."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return "plan", value.numpy().tobytes().hex()
    return None if value is None else ("amount", float(value))


def record(
    call: Call, groups: Sequence[dist.ProcessGroup], ranks: Callable[[], Sequence[int]], forward: int = 0
) -> int:
    """Compare a call, the backward of call `forward` if there is one; its number, -1 where calls are not compared.

    Args:
        groups, ranks: from `mesh_ranks`.
    """
    began = time.monotonic()
    try:
        log = log_of(groups, ranks)
    except RuntimeError as error:
        what, everyone = "connections to compare calls", list(ranks())
        label = f"the mesh of global ranks {everyone} (spanwise.compare_calls leaves them out)"
        raise explained(error, what, label, everyone, time.monotonic() - began) from error
    if log is None:
        return -1
    log.check()
    _notice(log, _torch.backward_number())
    if forward > 0:
        _confirm(log, forward)  # so that no gradient comes from calls that differ
        call = call._replace(age=log.count + 1 - forward)
    number, expected = log.add(call)
    if not expected:
        _confirm(log, number)
    return number


def _notice(log: CallLog, backward: int) -> None:
    """Raise at a call, in the backward of this number or in none (-1), if an earlier backward of this rank has raised.

    Its messages may be under way on other ranks, and those of this call would meet them. If all ranks have raised there
    alike, calls go on.
    """
    if backward == -1 and log.backwards:
        log.backwards.clear()
        number, _ = log.add(Call(REFUSED, (("raised", "an error in its backward"),)))
        alike = log.confirm(number, PATIENCE)
        log.check()
        if not alike:
            error = RuntimeError("an error that other ranks do not have")
            raise explained(error, "an earlier backward", log.name, log.ranks, PATIENCE)
    elif backward not in (-1, *log.backwards):
        log.backwards.add(backward)
        _torch.after_backward(functools.partial(log.backwards.discard, backward))


def _confirm(log: CallLog, number: int) -> None:
    """Return when all ranks have made call `number`."""
    began, alike = time.monotonic(), log.confirm(number)
    log.check()
    if not alike:
        error, what = RuntimeError(log.broken), f"comparison of call {number}"
        raise explained(error, what, log.name, log.ranks, time.monotonic() - began) from error


def compared(sums: tuple[torch.Tensor, ...], compare: Compare | None) -> Sequence[torch.Tensor]:
    """The `sums` of a call; in compiled code they depend on its comparison, or all-reduces could start before it."""
    return sums if compare is None or not torch.compiler.is_compiling() else [x + compare.number * 0 for x in sums]


def compare_backward(
    outputs: tuple[torch.Tensor, ...], compare: Compare | None, *, travels: bool = False
) -> tuple[torch.Tensor, ...]:
    """The `outputs` of a call, whose backward begins with `compare`.

    Args:
        travels: whether the executor compares the backward in eager code, where its first exchange starts.
    """
    if compare is None or not any(out.requires_grad for out in outputs):
        return outputs
    if torch.compiler.is_compiling():
        return _InBackward.apply(compare, *outputs)
    for out in outputs:
        if out.grad_fn is not None and not travels:
            out.grad_fn.register_prehook(lambda _: compare.backward())
    return outputs


def eager(compare: Compare | None) -> Compared | None:
    """What compares a backward in eager code, for the executor."""
    return None if compare is None or torch.compiler.is_compiling() else compare.backward


class _InBackward(torch.autograd.Function):
    """Identity of outputs; a comparison in the backward of compiled code."""

    @staticmethod
    def forward(ctx: Any, compare: Compare, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(compare.number)
        ctx.call = compare.groups, compare.ranks, f"backward of {compare.name}"
        return tuple([out.view_as(out) for out in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        torch.ops.spanwise.compare_call(None, *ctx.call, "", [], [*ctx.saved_tensors, grads[0]])
        return None, *grads


def plain(number: Any) -> Any:
    """Equal numbers look alike on all ranks, whether one is an int, of numpy or a tensor."""
    if number is None:
        return None
    return _torch.constant(number) if torch.compiler.is_compiling() else float(number)


def scalar(number: float, device: torch.device) -> torch.Tensor:
    """`number` in float64, without a copy that the host waits for; with `full`, each number would make a graph."""
    return torch.ones((), dtype=torch.float64, device=device) * number


@torch.compiler.assume_constant_result
def _global_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    with _torch.without_modes():
        return tuple(mesh.mesh.flatten().tolist())


def mesh_ranks(mesh: DeviceMesh) -> tuple[list[dist.ProcessGroup], Callable[[], tuple[int, ...]]]:
    """The group of each axis, and a function that gives the global ranks in the order of the mesh."""
    num_axes = mesh.ndim  # most have one; an attention call asks each time
    groups = [mesh.get_group(0)] if num_axes == 1 else [mesh.get_group(axis) for axis in range(num_axes)]
    return groups, lambda: _global_ranks(mesh)


# A CUDA graph that had captured the operator would compare only once.
@torch.library.custom_op("spanwise::compare_call", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _compare_call(
    fresh: torch.Tensor | None, groups: str, ranks: Sequence[int], name: str, facts: str, sizes: Sequence[int],
    forward: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """A call of compiled code; returns its number.

    Args:
        forward: of a backward the number of its call, and a gradient, or torch could put it into the forward graph.
    """
    *lines, label = facts.split("\n")
    found: list[tuple[str, Hashable]] = [(line.split("\t")[0], line.split("\t")[1]) for line in lines]
    call = Call(name, (*found, (label, tuple(sizes))) if label else (), _fresh(fresh))
    of = int(forward[0]) if forward else 0
    return torch.tensor(record(call, [*map(_torch.find_group, groups.split())], lambda: ranks, of))


@_compare_call.register_fake
def _(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


_torch.mark_effectful(torch.ops.spanwise.compare_call.default)
