"""The states of a gated recurrence, passed through the segments of all ranks; forward and backward.

    forward    known segments: outputs | their states, and the maps of middle segments -> | compose | carried segments
    backward   the same, the other way: segments that close documents are known, and gradients of states pass

A segment acts on the state as S -> A S + B. Its adjoint acts on the gradient of the state as G -> Aᵀ G + C, with C the
gradient through its own outputs. So one exchange brings either, and neither pass differentiates a composition: the
backward computes each segment again, from the true state before it and the true gradient behind it.
"""

# R rows of a shard, H heads, K key dim, V value dim, d dims of a decay, P segments, F features of a map

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from spanwise import _torch
from spanwise.attention.exchange import failure
from spanwise.attention.exchange._gradients import check_first_order
from spanwise.recurrence import _ops
from spanwise.recurrence.route import ChunkTable, Passage, RecurrenceRoute

Tensor = torch.Tensor


class _Way(NamedTuple):
    """A `Passage` as an autograd function takes it: tensors in a list, and numbers."""

    known: list[Tensor]
    carried: list[Tensor]
    send: Tensor
    compose: list[Tensor]  # chain, counts, reads, read_from, read_counts
    leaving: Tensor


_TENSORS = 2 * 3 + 1 + 5 + 1


def _flat(of: Passage) -> list[Tensor]:
    compose = (of.chain, of.counts, of.reads, of.read_from, of.read_counts)
    return [*_table(of.known), *_table(of.carried), of.send, *compose, of.leaving]


def _table(of: ChunkTable) -> list[Tensor]:
    return [of.tokens, of.order, of.counts]


def _way(tensors: list[Tensor]) -> _Way:
    return _Way(tensors[:3], tensors[3:6], tensors[6], tensors[7:12], tensors[12])


def passed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, initial: Tensor | None,
    route: RecurrenceRoute, scale: float, label: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and the states after documents.

    Args:
        q, k: ``[R, h, K]``; v ``[R, H, V]``; log_decay ``[R, H, d]``; beta ``[R, H]`` or None.
        initial: ``[documents, H, K, V]``, in float32 at least, or None for zeros.
        label: names the transfer in errors.

    Returns:
        ``[R, H, V]`` in the dtype of v; ``[documents, H, K, V]`` in float32 at least.
    """
    name = "" if route.mesh is None else _torch.group_name(route.mesh.get_group())
    forward, backward = route.forward, route.backward
    assert backward.inputs_known is not None and backward.inputs_carried is not None
    sizes = [
        [x.shape[0] for x in part]
        for way in (forward, backward)
        for part in (way.send_sizes, way.recv_sizes)
    ]  # fmt: skip
    out, final = _Passing.apply(
        q, k, v, log_decay, beta, initial, float(scale), route.apart, name, label, sizes,
        *_flat(forward), *_flat(backward), *_table(route.middle), backward.inputs_known, backward.inputs_carried,
    )  # fmt: skip
    return out, final


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        # Not named: with as many arguments as names, torch.compile without gradients passes no ctx.
        q, k, v, log_decay, beta, initial, scale, apart, name, label, sizes, *tensors = args
        way, middle = _way(tensors[:_TENSORS]), tensors[2 * _TENSORS : 2 * _TENSORS + 3]
        heads, keys, values, decays = log_decay.shape[1], k.shape[2], v.shape[2], log_decay.shape[2]
        entry = initial
        if entry is None:
            entry = k.new_zeros(way.known[1].shape[0], heads, keys, values, dtype=_ops.wide(k.dtype))
        out, states = _ops.run(q, k, v, log_decay, beta, entry, *way.known, scale)
        maps = k.new_empty(0)
        if apart:
            maps = _ops.maps(k, v, log_decay, beta, *middle)
            rows = _rows(states, maps)
            rows = _exchanged(rows, way.send, sizes[:2], name, f"all-to-all of {label}")
            dims = (heads, keys, values, 0 if beta is not None else decays)
            carried = _ops.compose(rows, *way.compose, *dims, False)
            more, later = _ops.run(q, k, v, log_decay, beta, carried, *way.carried, scale)
            out, states, entry = out + more, torch.cat([states, later]), torch.cat([entry, carried])
            maps = maps[:, : maps.shape[1] - heads * keys * values].clone()
        ctx.save_for_backward(q, k, v, log_decay, beta, entry, maps, *tensors[_TENSORS:])
        ctx.scale, ctx.apart, ctx.name, ctx.label, ctx.sizes = scale, apart, name, label, sizes
        ctx.has_initial = initial is not None
        return out, states.index_select(0, way.leaving)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_final: Tensor) -> tuple[Any, ...]:
        check_first_order()
        q, k, v, log_decay, beta, entry, maps, *tensors = ctx.saved_tensors
        way, middle = _way(tensors[:_TENSORS]), tensors[_TENSORS : _TENSORS + 3]
        inputs_known, inputs_carried = tensors[_TENSORS + 3 :]
        inputs = (q, k, v, log_decay, beta)
        d_out = d_out.contiguous()
        states = entry.index_select(0, inputs_known)
        *grads, d_states = _ops.vjp(*inputs, states, d_out, d_final, *way.known, ctx.scale)
        if ctx.apart:
            heads, keys, values = entry.shape[1:]
            through = _ops.adjoint(q, k, log_decay, beta, d_out, *middle, ctx.scale)
            rows = _rows(d_states, torch.cat([maps, through.flatten(1)], dim=1))
            what = f"all-to-all of gradients, {ctx.label}"
            rows = _exchanged(rows, way.send, ctx.sizes[2:], ctx.name, what)
            dims = (heads, keys, values, 0 if beta is not None else log_decay.shape[2])
            carried = _ops.compose(rows, *way.compose, *dims, True)
            states = entry.index_select(0, inputs_carried)
            *more, later = _ops.vjp(*inputs, states, d_out, carried, *way.carried, ctx.scale)
            grads = [x + y for x, y in zip(grads, more, strict=True)]
            d_states = torch.cat([d_states, later])
        d_beta = None if beta is None else grads[4]
        d_initial = d_states.index_select(0, way.leaving) if ctx.has_initial else None
        rest = 5 + 2 * _TENSORS + 3 + 2
        return *grads[:4], d_beta, d_initial, *[None] * rest


def _rows(known: Tensor, middle: Tensor) -> Tensor:
    """Own maps ``[P, F]``: of known segments the state behind them, without an A that nobody needs; then the others."""
    known_PF = known.flatten(1)
    return torch.cat([F.pad(known_PF, (middle.shape[1] - known_PF.shape[1], 0)), middle])


def _exchanged(rows: Tensor, send: Tensor, sizes: list[list[int]], name: str, what: str) -> Tensor:
    """Own maps and, behind them, those that arrive."""
    sent = rows.index_select(0, send)
    send_sizes, recv_sizes = sizes
    pending = failure.start(what, name, _torch.start_all_to_all, sent, recv_sizes, send_sizes, name)
    return torch.cat([rows, failure.wait(pending, what, name)])
