"""The operators of a recurrence, which compiled code takes whole: their loops follow the plan's tensors.

Runs are in the order of their `ChunkTable`, and go through `chunkwise` by length. All tensors are in float32 at least;
autocast does not reach inside.
"""

# T tokens of a rank, H heads, h those of q or k, K key dim, V value dim, d 1 or K; P runs, N chunks of C tokens
# F features of a map: A, then B

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef

from spanwise import _torch
from spanwise.recurrence.chunkwise import Inputs, put, slabs, step, taken

Tensor = torch.Tensor


def _operator(function: Callable[..., Any]) -> CustomOpDef:
    """The function as an operator ``spanwise::recurrence_…``; without autocast."""

    @functools.wraps(function)
    def exact(*args: Any) -> Any:
        with torch.autocast(args[1].device.type, enabled=False):
            return function(*args)

    return torch.library.custom_op(f"spanwise::recurrence_{function.__name__.strip('_')}", exact, mutates_args=())


@_operator
def run(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor,
    tokens: Tensor, order: Tensor, counts: Tensor, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs ``[T, H, V]`` of runs, 0 elsewhere, and the states after them. Differentiable.

    Args:
        q, k, v, log_decay, beta: those of `Inputs`.
        state: ``[P, H, K, V]``, before the runs.
        tokens, order, counts: of a `ChunkTable`.
        scale: of the outputs.
    """
    given, out, state = Inputs(q, k, v, log_decay, beta), _one_more(v), state.index_select(0, order)
    for first, stop, group in slabs(tokens, counts, given.heads, given.largest):
        for slab in group:
            found, state[first:stop] = step(given.of(slab), slab.sizes, state[first:stop])
            put(out, slab.tokens, found.mul_(scale))
    return out[:-1].clone(), _restored(state, order)


@run.register_fake
def _(q, k, v, log_decay, beta, state, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(state)


@_operator
def vjp(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor,
    tokens: Tensor, order: Tensor, counts: Tensor, scale: float, d_out: Tensor, d_state: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs of `run` that there are, 0 outside the runs, and of the states before; from those after.

    The states before each slab are computed again.
    """
    given, grads = Inputs(q, k, v, log_decay, beta), [_one_more(x) for x in (q, k, v, log_decay, beta) if x is not None]
    state, d_state = state.index_select(0, order), d_state.index_select(0, order)
    for first, stop, group in slabs(tokens, counts, given.heads, given.largest):
        entries = [state[first:stop]]
        for slab in group[:-1]:
            entries.append(step(given.of(slab), slab.sizes, entries[-1], outputs=False)[1])
        for slab, entry in zip(reversed(group), reversed(entries), strict=True):
            d_slab = taken(d_out, slab.tokens, given.heads) * scale
            with _torch.recording():
                chunks, entry = given.of(slab), entry.detach()
                leaves = [x.requires_grad_() for x in (*chunks, entry) if x is not None]
                results = step(chunks, slab.sizes, entry)
                *found, d_entry = torch.autograd.grad(results, leaves, (d_slab, d_state[first:stop]))
            d_state[first:stop] = d_entry
            for grad, x in zip(grads, found, strict=True):
                put(grad, slab.tokens, x)
    return [*(x[:-1].clone() for x in grads), _restored(d_state, order)]


@vjp.register_fake
def _(q, k, v, log_decay, beta, state, *_):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, state) if x is not None]


def _compose(
    rows: Tensor, chain: Tensor, counts: Tensor, reads: Tensor, read_from: Tensor, read_counts: Tensor,
    heads: int, keys: int, values: int, dense: bool,
) -> Tensor:  # fmt: skip
    """States ``[P, H, K, V]`` that enter this rank's runs, from the maps of all runs before. Differentiable.

    Args:
        rows: ``[maps, F]``; of the first map of a chain only B is read.
        chain, counts: maps to compose, document beside document, step by step; documents that go on at each step.
        reads, read_from, read_counts: which run gets the state after a step, of which document, and how many.
        dense: whether A is ``[H, K, K]``; else ``[H, d]``.
    """
    split, read = rows.shape[1] - heads * keys * values, read_counts.tolist()
    a, b = rows[:, :split].unflatten(1, (heads, -1)), rows[:, split:].unflatten(1, (heads, keys, values))
    entering, state = rows.new_empty(reads.shape[0], heads, keys, values), b[:0]
    steps = zip(chain.split(counts.tolist()), reads.split(read), read_from.split(read), strict=True)
    for number, (maps, to, of) in enumerate(steps):
        before, state = state[: len(maps)], b[maps]
        if number and dense:
            state = a[maps].unflatten(2, (keys, keys)) @ before + state
        elif number:
            state = a[maps].unsqueeze(-1) * before + state
        entering[to] = state[of]
    return entering


compose = _operator(_compose)


@compose.register_fake
def _(rows, chain, counts, reads, read_from, read_counts, heads, keys, values, dense):  # type: ignore[no-untyped-def]
    return rows.new_empty(reads.shape[0], heads, keys, values)


@_operator
def compose_vjp(
    rows: Tensor, chain: Tensor, counts: Tensor, reads: Tensor, read_from: Tensor, read_counts: Tensor,
    heads: int, keys: int, values: int, dense: bool, d_entering: Tensor,
) -> list[Tensor]:  # fmt: skip
    """The gradient of `rows` from that of what `compose` returns, by autograd of its few products."""
    if chain.shape[0] == 0:
        return [torch.zeros_like(rows)]
    with _torch.recording():
        leaf = rows.detach().requires_grad_()
        entering = _compose(leaf, chain, counts, reads, read_from, read_counts, heads, keys, values, dense)
        return list(torch.autograd.grad(entering, leaf, d_entering, materialize_grads=True))


@compose_vjp.register_fake
def _(rows, *_):  # type: ignore[no-untyped-def]
    return [torch.empty_like(rows)]


def _set_gradient(operator: CustomOpDef, gradient: CustomOpDef, tensors: int) -> None:
    """Let autograd call `gradient` with the arguments of `operator`, of which so many may be tensors, and gradients."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.rest = inputs[tensors:]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _torch.check_first_order()
        saved = ctx.saved_tensors
        found = iter(gradient(*saved, *ctx.rest, *(x.contiguous() for x in grads)))
        floating = [x is not None and x.is_floating_point() for x in saved]
        return *(next(found) if x else None for x in floating), *[None] * len(ctx.rest)

    operator.register_autograd(backward, setup_context=save)


_set_gradient(run, vjp, 9)
_set_gradient(compose, compose_vjp, 6)


def _one_more(x: Tensor) -> Tensor:
    """Zeros for all tokens, and one row for what is empty."""
    return x.new_zeros(x.shape[0] + 1, *x.shape[1:])


def _restored(by_length: Tensor, order: Tensor) -> Tensor:
    """Runs in the order of their table."""
    return torch.empty_like(by_length).index_copy_(0, order, by_length)
