"""The states of a gated recurrence, passed through the runs of all ranks; forward and backward.

    forward    first, middle runs -> | whole documents, last runs | -> compose, add to middle and last ones
    backward   last, middle runs -> | whole documents | -> compose, first and middle runs

Maps travel between the arrows. A run acts on the state as S -> A S + B, and its outputs are linear in the state
before it, so that a forward computes all of its runs once, most of them before the state is known. The adjoint of a
run acts on the gradient of the state as G -> Aᵀ G + C, with C the gradient through its own outputs. So one exchange
brings either, and neither pass differentiates a composition: the backward computes each run again, from the true
state before it and the true gradient behind it.
"""

# R rows of a shard, H heads, K key dim, V value dim, d dims of a decay, P runs, F features of a map

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from spanwise import _torch
from spanwise.attention import failure
from spanwise.attention.compare import Compared
from spanwise.attention.executor import check_first_order
from spanwise.recurrence import _ops
from spanwise.recurrence.route import ChunkTable, RecurrenceRoute

Tensor = torch.Tensor


_TABLES, _COUNT = 4 * 5, 4 * 5 + 2 * 6  # tensors of four tables, and of two passages behind them


def _tables(tensors: list[Tensor]) -> list[ChunkTable]:
    return [ChunkTable(*tensors[at : at + 5]) for at in range(0, _TABLES, 5)]


def _cut(table: ChunkTable) -> list[Tensor]:
    return [table.tokens, table.order, table.counts]


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _skipped(table: ChunkTable) -> bool:
    """Whether there is nothing to compute; compiled code does not know."""
    return not torch.compiler.is_compiling() and table.order.shape[0] == 0


def passed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, initial: Tensor | None,
    route: RecurrenceRoute, scale: float, label: str, call: Compared | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and the states after documents.

    Args:
        q, k: ``[R, h, K]``; v ``[R, H, V]``; log_decay ``[R, H, d]``; beta ``[R, H]`` or None.
        initial: ``[documents, H, K, V]``, in float32 at least, or None for zeros.
        label: names the transfer in errors.
        call: the layer, if it is compared.

    Returns:
        ``[R, H, V]`` in the dtype of v; ``[documents, H, K, V]`` in float32 at least.
    """
    name = "" if route.mesh is None else _torch.group_name(route.mesh.get_group())
    tables, passages = (route.whole, route.first, route.middle, route.last), (route.forward, route.backward)
    halves = (half for of in passages for half in (of.step.send_sizes, of.step.recv_sizes))
    sizes = [[x.shape[0] for x in half] for half in halves]
    tensors = [
        *(x for of in tables for x in (of.starts, of.ends, of.tokens, of.order, of.counts)),
        *(x for of in passages for x in (of.step.send, of.chain, of.counts, of.reads, of.read_from, of.read_counts)),
    ]
    if initial is None:
        state = (route.starts.shape[0], log_decay.shape[1], k.shape[2], v.shape[2])
        initial = k.new_zeros(state, dtype=_ops.wide(k.dtype))
    out, final = _Passing.apply(
        q, k, v, log_decay, beta, initial, float(scale), route.apart, name, label, call, sizes, route.ends, *tensors
    )
    return out, final


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        # Not named: with as many arguments as names, torch.compile without gradients passes no ctx.
        q, k, v, log_decay, beta, initial, scale, apart, name, label, call, sizes, ends, *tensors = args
        inputs, (whole, first, middle, last) = _present(q, k, v, log_decay, beta), _tables(tensors)
        dims = (log_decay.shape[1], k.shape[2], v.shape[2], 0 if beta is not None else log_decay.shape[2])
        entries = [initial.index_select(0, whole.starts)]
        outs, a = [], k.new_empty(0)
        final = initial.new_empty(ends.shape[0], *initial.shape[1:])
        if apart:
            entries.append(initial.index_select(0, first.starts))
            out, states = _ops.run(inputs, entries[1], _cut(first), scale)
            (send, *chain), in_middle = tensors[_TABLES : _TABLES + 6], _ops.opened(inputs, _cut(middle), scale)
            own, what = _rows(states, in_middle[2]), f"all-to-all of {label}"
            pending = _start(own, send, sizes[:2], name, what)
            outs.append(out)
        if not (apart and _skipped(whole)):
            out, states = _ops.run(inputs, entries[0], _cut(whole), scale)
            outs.append(out)
            final = final.index_copy(0, whole.ends, states)
        if apart:
            at_end = _ops.opened(inputs, _cut(last), scale)
            rows = torch.cat([own, failure.wait(pending, what, name)])
            entries += _ops.compose(rows, *chain, middle.order, last.order, *dims, False)
            later = ((middle, in_middle, entries[2]), (last, at_end, entries[3]))
            for table, (opened, reads, maps), entry in later:
                if not _skipped(table):
                    more, states = _ops.read(reads, maps, entry, _cut(table))
                    outs.append((opened + more).to(v.dtype))
                    final = final if table is middle else final.index_copy(0, last.ends, states)
            a = in_middle[2][:, : -entries[0].shape[1:].numel()].clone()
        ctx.save_for_backward(q, k, v, log_decay, beta, a, *tensors, *entries)
        ctx.scale, ctx.apart, ctx.name, ctx.label, ctx.call, ctx.sizes = scale, apart, name, label, call, sizes
        ctx.dims, ctx.num_starts = dims, initial.shape[0]
        return sum(outs[1:], outs[0]), final

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        check_first_order()
        q, k, v, log_decay, beta, a, *tensors = ctx.saved_tensors
        entries, (whole, first, middle, last) = tensors[_COUNT:], _tables(tensors)
        inputs, d_out = _present(q, k, v, log_decay, beta), d_out.contiguous()
        d_initial = d_final.new_empty(ctx.num_starts, *d_final.shape[1:])
        found = []
        if ctx.apart:
            d_states = d_final.index_select(0, last.ends)
            *grads, d_states = _ops.vjp(inputs, entries[3], d_out, d_states, _cut(last), ctx.scale)
            through = _ops.adjoint(inputs, d_out, _cut(middle), ctx.scale)
            (send, *chain), what = tensors[_TABLES + 6 : _COUNT], f"all-to-all of gradients, {ctx.label}"
            own = _rows(d_states, torch.cat([a, through.flatten(1)], dim=1))
            if ctx.call is not None:
                ctx.call(ctx.label)
            pending = _start(own, send, ctx.sizes[2:], ctx.name, what)
            found.append(grads)
        if not (ctx.apart and _skipped(whole)):
            d_states = d_final.index_select(0, whole.ends)
            *grads, d_states = _ops.vjp(inputs, entries[0], d_out, d_states, _cut(whole), ctx.scale)
            found.append(grads)
            d_initial = d_initial.index_copy(0, whole.starts, d_states)
        if ctx.apart:
            rows = torch.cat([own, failure.wait(pending, what, ctx.name)])
            behind = _ops.compose(rows, *chain, middle.order, first.order, *ctx.dims, True)
            for table, entry, d_states in ((middle, entries[2], behind[0]), (first, entries[1], behind[1])):
                if not _skipped(table):
                    *grads, d_states = _ops.vjp(inputs, entry, d_out, d_states, _cut(table), ctx.scale)
                    found.append(grads)
                    d_initial = d_initial if table is middle else d_initial.index_copy(0, first.starts, d_states)
        grads = [sum(each[1:], each[0]) for each in zip(*found, strict=True)]
        return (
            *grads,
            *[None] * (5 - len(grads)),
            d_initial if ctx.needs_input_grad[5] else None,
            *[None] * (7 + _COUNT),
        )


def _rows(known: Tensor, middle: Tensor) -> Tensor:
    """Own maps ``[P, F]``: of known runs the state behind them, without an A that nobody needs; then the others."""
    known_PF = known.flatten(1)
    return torch.cat([F.pad(known_PF, (middle.shape[1] - known_PF.shape[1], 0)), middle])


def _start(rows: Tensor, send: Tensor, sizes: list[list[int]], name: str, what: str) -> Tensor:
    """Starts the exchange of own maps; do not read the result before `failure.wait`."""
    send_sizes, recv_sizes = sizes
    sent = rows.index_select(0, send)
    return failure.start(what, name, _torch.start_all_to_all, sent, recv_sizes, send_sizes, name)
