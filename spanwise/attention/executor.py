"""The executor of routes: two autograd functions that start a step's collective and wait for it, and the way back.

The caller computes between the two, in both directions. The backward of the wait starts the collective that brings
gradients home; the backward of the start waits for it and sums what several receivers send. Autograd runs ready nodes
in the reverse order of their creation, so the backward is the forward's mirror image:

    forward    start 1 … n | local attention | wait 1 | attention 1 | … | wait n | attention n
    backward   attention n | start n | attention n-1 | start n-1 | … | local attention | wait n … 1, sum

A step whose senders pass on what came to them starts after that has come, and the gradients of what they passed on
join their own on the way home:

    forward    start 1 | local attention | wait 1, start 2 | attention 1 | wait 2 | …
    backward   … | start 2 | attention 1 | wait 2, add, start 1 | local attention | wait 1, sum

An *anchor* joins start and wait: an output of the start and an input of the wait, without memory and never read, whose
gradient is the collective under way. Every rank knows the plan, so no sizes travel.
"""

# A row is what travels for one token. R rows of a rank, S rows sent (a row may go to several ranks), N rows received,
# F features of a row

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.compare import Compared
from spanwise.attention.failure import explained

Tensors = tuple[torch.Tensor, ...]
INDEXED, GATHERED = "indexed", "gathered"


@dataclasses.dataclass(frozen=True)
class RankStep:
    """What one rank sends and receives in a step; a pytree of tensors.

    Attributes:
        send: int64 ``[S]``, which rows of the source, those for rank 0 first; None where all of them leave.
        order: int64 ``[keys]``, for each key its place among the rows received, rank 0's first; None where they stay
            as they come. N, one past the last, stands for a row of zeros.
        send_sizes, recv_sizes: for each rank a tensor ``[rows, 0]``, which carries a size in its shape. Of an
            all-gather one tensor: the rows that each rank sends, padding included.
        source: the step whose received rows are sent; -1: the rank's own.
        kind: INDEXED: an all-to-all of rows; GATHERED: an all-gather of the rank's own rows.
        spare: whether `order` holds N: keys that no span reads.
        passed: whether a later step sends rows of this one.
        direct: brings the same rows straight from their owners, where `source` is another step.
        peers: the one rank that it sends to and the one that it receives from, -1 for none; None where there may be
            several.
    """

    send: torch.Tensor | None
    order: torch.Tensor | None
    send_sizes: tuple[torch.Tensor, ...]
    recv_sizes: tuple[torch.Tensor, ...]
    source: int = -1
    kind: str = INDEXED
    spare: bool = False
    passed: bool = False
    direct: RankStep | None = None
    peers: tuple[int, int] | None = None


_torch.register_pytree_dataclass(RankStep, static=("source", "kind", "spare", "passed", "peers"))


class Link(NamedTuple):
    """Where rows travel.

    Attributes:
        name: of the process group.
        size: its ranks.
        label: names what travels in errors.
        compare: compares what starts in the backward of the call that this is part of; None in compiled code.
    """

    name: str
    size: int
    label: str
    compare: Compared | None = None


def bring(rows: torch.Tensor, steps: Sequence[RankStep], link: Link, *, sums: bool = True) -> Iterator[torch.Tensor]:
    """Start the steps that send the rank's own rows; iterate to wait for each step and get what it brings.

    Differentiable. Collectives are in flight when this returns; between two items the caller computes. All ranks of
    the group run the same steps.

    Args:
        rows: ``[R, F]``.
        sums: whether gradients travel in float32 at least, because several of them are summed.

    Returns:
        Iterator over the rows that each step brings, in order.

    Raises:
        spanwise.ExchangeError: a rank is gone or too late, here, at an item or in the backward.
    """
    pending: dict[int, Tensors] = {}

    def leave(source: int, rows: torch.Tensor | None, carrier: torch.Tensor) -> None:
        which = [i for i, step in enumerate(steps) if step.source == source]
        if which:
            leaving = [steps[i] for i in which]
            sends = [step.send for step in leaving if step.send is not None]
            meta = [(i, step.kind, _sizes(step), step.send is not None) for i, step in zip(which, leaving, strict=True)]
            made = _Start.apply(link, sums, len(steps), meta, rows, carrier, *sends)
            pending.update(zip(which, zip(made[: len(which)], made[len(which) :], strict=True), strict=True))

    def arrived(i: int) -> torch.Tensor:
        step = steps[i]
        what = f"{link.label}, chunk {i + 1} of {len(steps)}"
        # With one peer, sizes come from the tensors' shapes: Dynamo fails when one size has two symbols.
        meta = step.kind, step.peers, _sizes(step) if step.peers is None else None, step.spare, step.passed
        found = _Wait.apply(link, sums, what, meta, *pending.pop(i), *([] if step.order is None else [step.order]))
        if not step.passed:
            return found
        in_order, rows, anchor = found
        leave(i, rows, anchor)
        return in_order

    for step in steps:
        if step.kind == GATHERED:  # here, so that no copy without padding is alive while they travel
            rows = padded(rows, step.send_sizes[0].shape[0])
    leave(-1, None, rows)
    return (arrived(i) for i in range(len(steps)))


def padded(rows: torch.Tensor, length: int, dim: int = 0) -> torch.Tensor:
    """`rows` with zeros behind them up to `length`; copied only where there are any, except in compiled code."""
    missing = length - rows.shape[dim]
    if not torch.compiler.is_compiling() and missing == 0:
        return rows
    return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1 - dim) + (0, missing))


def _sizes(step: RankStep) -> tuple[list[int], list[int]]:
    """Rows sent to each rank, and rows received."""
    return [x.shape[0] for x in step.send_sizes], [x.shape[0] for x in step.recv_sizes]


def start(what: str, name: str, begin: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``begin(*args)``, one of the starts in `_torch`, on the group called `name`; `what` is the collective in words.

    ``ExchangeError`` if the backend failed; errors of other types pass unchanged.
    """
    _torch.check_compiling()
    if torch.compiler.is_compiling():
        return begin(*args)
    began = time.monotonic()
    try:
        return begin(*args)
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
    group has ended, and for a stuck process after the timeout of the group. With NCCL a wait only orders streams,
    unless ``TORCH_NCCL_BLOCKING_WAIT`` is set: torch's watchdog ends the process.
    """
    return start(what, name, _torch.wait, x)


def all_reduce(x: torch.Tensor, op: str, mesh: DeviceMesh, what: str) -> torch.Tensor:
    """All-reduce (``"sum"`` or ``"max"``) over every axis of `mesh`, without autograd; `what` is the value in words.

    One axis after the other, so that a sliced or multi-dimensional mesh needs no extra group.
    """
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            name = mesh.get_group(axis).group_name
            label = f"all-reduce of {what}"
            x = wait(start(label, name, _torch.start_all_reduce, x, op, name), label, name)
    return x


class _Start(torch.autograd.Function):
    """Starts steps that send rows of one buffer; the backward waits for their gradients and sums them.

    Arguments: link, whether gradients are summed, number of steps, number, kind and sizes of each step that starts, the
    rows (None: the carrier), the carrier of their gradient, then `send` of each indexed step. A row sent to several
    ranks gets several gradients; they are summed in float32 at least and cast once.
    """

    # *args: without gradients, torch.compile passes no ctx to a function of as many names as arguments.
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensors:
        link, sums, of, meta, rows, carrier, *sends = args
        rows = carrier if rows is None else rows
        ctx.save_for_backward(*sends)
        ctx.set_materialize_grads(False)
        ctx.link, ctx.of, ctx.meta, ctx.like, ctx.dtype = link, of, meta, rows.shape, carrier.dtype
        data, anchors = [], []
        for i, kind, (send, recv), indexed in meta:
            sent = rows.index_select(0, sends.pop(0)) if indexed else rows
            what = f"{link.label}, chunk {i + 1} of {of}"
            data.append(_collective(link, kind, what, sent, send, recv, home=False))
            anchors.append(_anchor(sent, sums))
        ctx.mark_non_differentiable(*data)
        return *data, *anchors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        sends, total = list(ctx.saved_tensors), None
        none = [None] * len(sends)
        steps = zip(reversed(ctx.meta), reversed(grads[len(ctx.meta) :]), strict=True)
        for (i, kind, _, indexed), pending in steps:  # the steps that left last come home first
            send = sends.pop() if indexed else None
            if pending is None:
                continue
            what = _name(kind, f"{ctx.link.label}, chunk {i + 1} of {ctx.of}", home=True)
            grad = wait(pending, what, ctx.link.name)
            if send is not None:
                total = grad.new_zeros(ctx.like) if total is None else total
                total.index_add_(0, send, grad)
            else:
                total = grad if total is None else total + grad
        return None, None, None, None, None, None if total is None else total.to(ctx.dtype), *none


class _Wait(torch.autograd.Function):
    """Waits for a step: its rows in order, then the rows and an anchor for steps that pass them on.

    Arguments: link, whether gradients are summed, what travels, (kind, peers or else sizes, spare, whether rows are
    passed on), data and anchor of the start, and the order if there is one. The backward sends their gradients home.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        link, sums, what, meta, data, sent, *order = args
        kind, peers, sizes, spare, passed = meta
        if peers is not None:
            ends = zip((sent, data), peers, strict=True)
            sizes = [[x.shape[0] if rank == peer else 0 for rank in range(link.size)] for x, peer in ends]
        empty = data.new_empty((), dtype=sent.dtype).expand(data.shape)  # has no memory
        # Eager code saves it, or a checkpoint that recomputes would stop before it waits for what it has started.
        ctx.empty = empty if torch.compiler.is_compiling() else None
        ctx.save_for_backward(*order, *([empty] if ctx.empty is None else []))
        ctx.set_materialize_grads(False)
        ctx.link, ctx.what, ctx.meta, ctx.ordered = link, what, (kind, sizes, spare), len(order) > 0
        rows = wait(data, _name(kind, what, home=False), link.name)
        in_order = rows.view(rows.shape)
        if order:
            found = torch.nn.functional.pad(rows, (0, 0, 0, 1)) if spare else rows
            in_order = found.index_select(0, order[0])
        if not passed:
            return in_order
        ctx.mark_non_differentiable(rows)
        return in_order, rows, _anchor(rows, sums)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        _torch.check_first_order()
        *order, like = ctx.saved_tensors if ctx.empty is None else (*ctx.saved_tensors, ctx.empty)
        # After the saved tensors: a checkpoint recomputes for them, and compares that.
        if ctx.link.compare is not None:
            ctx.link.compare(ctx.what)
        kind, (send, recv), spare = ctx.meta
        total, through = grads[0], grads[-1] if len(grads) > 1 else None
        if total is not None:
            total = total.to(like.dtype)
            if order:
                found = total.new_zeros(like.shape[0] + spare, like.shape[1]).index_add_(0, order[0], total)
                total = found[: like.shape[0]] if spare else found
            total = total.contiguous() if through is None else through.add_(total)
        elif through is None:
            total = torch.zeros_like(like, memory_format=torch.contiguous_format)
        else:
            total = through
        home = _collective(ctx.link, kind, ctx.what, total, recv, send, home=True)
        return None, None, None, None, None, returned(home), *([None] if ctx.ordered else [])


def _collective(
    link: Link, kind: str, what: str, rows: torch.Tensor, send: list[int], recv: list[int], *, home: bool
) -> torch.Tensor:
    """Starts a step, or the way home of its gradients; do not read the result before a wait."""
    name = _name(kind, what, home=home)
    if kind == GATHERED:
        begin = _torch.start_reduce_scatter if home else _torch.start_all_gather
        return start(name, link.name, begin, rows, link.size, link.name)
    return start(name, link.name, _torch.start_all_to_all, rows, recv, send, link.name)


def _name(kind: str, what: str, *, home: bool) -> str:
    if kind == GATHERED:
        return f"reduce-scatter of gradients, {what}" if home else f"all-gather of {what}"
    return f"all-to-all of gradients, {what}" if home else f"all-to-all of {what}"


def _anchor(rows: torch.Tensor, sums: bool) -> torch.Tensor:
    """A tensor without memory of the shape of `rows`; its gradient is a collective under way.

    Gradients travel in its dtype, float32 at least if they are summed: autograd would cast, and so read, another one
    before it has arrived.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32) if sums else rows.dtype
    return rows.new_empty((), dtype=dtype).expand(rows.shape)


def returned(pending: torch.Tensor) -> torch.Tensor:
    """`pending`, a started collective, as the gradient that a backward returns."""
    if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
        _torch.wait(pending)  # anomaly mode reads the gradient to look for nan
    return pending
