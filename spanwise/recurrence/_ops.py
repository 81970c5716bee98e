"""`chunkwise` as operators that compiled code takes whole: their loops follow the plan's tensors.

Runs are in the order of the plan, and go through `chunkwise` by length. Autocast does not reach inside. `inputs` are
those of `slabs.Inputs`, beta only of a delta rule; `table` are tokens, order and counts of a `ChunkTable`.
"""

# T tokens of a rank, H heads, h those of q or k, K key dim, V value dim, d 1 or K; P runs, N chunks of C tokens
# F features of a map: A, then B

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import CustomOpDef

from spanwise.recurrence import chunkwise, tokenwise
from spanwise.recurrence.slabs import Inputs, slabs, wide

Tensor = torch.Tensor


def _operator(function: Callable[..., Any]) -> CustomOpDef:
    """The function as an operator ``spanwise::recurrence_…``; without autocast."""

    @functools.wraps(function)
    def exact(first: Any, *args: Any) -> Any:
        with torch.autocast(first.device.type if isinstance(first, Tensor) else first[0].device.type, enabled=False):
            return function(first, *args)

    return torch.library.custom_op(f"spanwise::recurrence_{function.__name__}", exact, mutates_args=())


@_operator
def run(inputs: Sequence[Tensor], state: Tensor, table: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """Outputs ``[T, H, V]`` of runs, 0 elsewhere, and the states after them; `state` ``[P, H, K, V]`` is before."""
    given, order = Inputs(*inputs), table[1]
    form = _form(given)
    out, state = _one_more(inputs[2]), state.index_select(0, order)
    for first, stop, group in slabs(table, given.heads, form.largest(given)):
        for slab in group:
            of = form.terms(slab, given)
            form.put(out, slab.tokens, form.outputs(of, form.scan(slab, of, state[first:stop])).mul_(scale))
    return out[:-1].clone(), _restored(state, order)


@run.register_fake
def _(inputs, state, table, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(inputs[2], memory_format=torch.contiguous_format), torch.empty_like(state)


@_operator
def opened(inputs: Sequence[Tensor], table: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Runs before which the state S is not known yet, in float32 at least.

    Returns:
        ``[T, H, V]`` and ``[T, H, K]``: outputs are the first and the second times S; 0 elsewhere. And the maps of the
        runs, ``[P, F]``.
    """
    given, (_, k, v, log_decay, *_), order = Inputs(*inputs), inputs, table[1]
    form, keys, values, heads = _form(given), k.shape[2], v.shape[2], given.heads
    dtype, dense = wide(v.dtype), given.beta is not None
    out = v.new_zeros(v.shape[0] + 1, heads, values, dtype=dtype)
    reads = v.new_zeros(v.shape[0] + 1, heads, keys, dtype=dtype)
    decay = v.new_ones(order.shape[0], heads, log_decay.shape[2], dtype=dtype)
    # The columns of a dense A are states that begin as the identity and get no values.
    state = v.new_zeros(order.shape[0], heads, keys, values + dense * keys, dtype=dtype)
    state[..., values:] = torch.eye(keys, dtype=dtype, device=v.device)[:, : dense * keys]
    for first, stop, group in slabs(table, heads, form.largest(given)):
        for slab in group:
            of = form.terms(slab, given)
            found = form.outputs(of, form.scan(slab, of, state[first:stop])).mul_(scale)
            form.put(out, slab.tokens, found[..., :values])
            if dense:
                form.put(reads, slab.tokens, found[..., values:])
            else:
                earlier, total = [], decay[first:stop]  # the decay before each chunk, and through all of them so far
                for size, each in zip(slab.sizes, of.since.select(form.TOKENS, -1).split(slab.sizes), strict=True):
                    earlier.append(total[:size].clone())
                    total[:size] *= each
                before = torch.cat(earlier).unsqueeze(form.TOKENS)
                form.put(reads, slab.tokens, scale * of.q * (before * of.since))
    a, b = state[..., values:] if dense else decay, state[..., :values]
    maps = _restored(torch.cat([a.flatten(1), b.flatten(1)], dim=1), order)
    return out[:-1].clone(), reads[:-1].clone(), maps


@opened.register_fake
def _(inputs, table, scale):  # type: ignore[no-untyped-def]
    _, k, v, log_decay, *beta = inputs
    heads, keys, values, dtype = log_decay.shape[1], k.shape[2], v.shape[2], wide(v.dtype)
    features = map_features(heads, keys, values, log_decay.shape[2], len(beta) > 0)
    shapes = (v.shape[0], heads, values), (v.shape[0], heads, keys), (table[1].shape[0], features)
    return tuple(v.new_empty(shape, dtype=dtype) for shape in shapes)


@_operator
def read(reads: Tensor, maps: Tensor, state: Tensor, table: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What the state before runs that were `opened`, ``[P, H, K, V]``, adds to outputs; and the states after."""
    heads, keys, values = state.shape[1:]
    out = reads.new_zeros(reads.shape[0] + 1, heads, values)
    by_length = state.index_select(0, table[1])
    for first, _, group in slabs(table, heads, keys + values):
        for slab in group:
            before = torch.cat([by_length[first : first + size] for size in slab.sizes])
            chunkwise.put(out, slab.tokens, chunkwise.taken(reads, slab.tokens, heads) @ before)
    split = maps.shape[1] - heads * keys * values
    a, b = maps[:, :split].unflatten(1, (heads, -1)), maps[:, split:].view_as(state)
    dense = split == heads * keys * keys
    after = a.unflatten(2, (keys, keys)) @ state if dense else a.unsqueeze(-1) * state
    return out[:-1].clone(), after + b


@read.register_fake
def _(reads, maps, state, table):  # type: ignore[no-untyped-def]
    return reads.new_empty(*reads.shape[:2], state.shape[3]), torch.empty_like(state)


@_operator
def adjoint(inputs: Sequence[Tensor], d_out: Tensor, table: Sequence[Tensor], scale: float) -> Tensor:
    """Gradients ``[P, H, K, V]`` of the states before runs through the outputs of the runs."""
    given, order, k = Inputs(*inputs), table[1], inputs[1]
    form, heads, given = _form(given), given.heads, given._replace(v=None)
    d_state = d_out.new_zeros(order.shape[0], heads, k.shape[2], d_out.shape[2], dtype=wide(k.dtype))
    for first, stop, group in slabs(table, heads, form.largest(given)):
        for slab in reversed(group):
            slab_out = form.taken(d_out, slab.tokens, heads) * scale
            form.scan_back(slab, form.terms(slab, given), slab_out, d_state[first:stop])
    return _restored(d_state, order)


@adjoint.register_fake
def _(inputs, d_out, table, scale):  # type: ignore[no-untyped-def]
    k, runs = inputs[1], table[1].shape[0]
    return d_out.new_empty(runs, d_out.shape[1], k.shape[2], d_out.shape[2], dtype=wide(k.dtype))


@_operator
def vjp(
    inputs: Sequence[Tensor], state: Tensor, d_out: Tensor, d_state: Tensor, table: Sequence[Tensor], scale: float
) -> list[Tensor]:
    """Gradients of the inputs, 0 outside the runs, and of the states before.

    Args:
        state, d_state: ``[P, H, K, V]``, states before the runs, gradients of those after.
    """
    given, order = Inputs(*inputs), table[1]
    form, grads = _form(given), [_one_more(x) for x in inputs]
    state, d_state = state.index_select(0, order), d_state.index_select(0, order)
    for first, stop, group in slabs(table, given.heads, form.largest(given)):
        mine, entries = state[first:stop], []
        for slab in group[:-1]:  # the states before each slab, computed again
            entries.append(mine.clone())
            form.scan(slab, form.terms(slab, given), mine)
        for slab, entry in zip(reversed(group), [mine, *reversed(entries)], strict=True):
            of, slab_out = form.terms(slab, given), form.taken(d_out, slab.tokens, given.heads) * scale
            states = form.scan(slab, of, entry)
            back = form.scan_back(slab, of, slab_out, d_state[first:stop])
            for grad, found in zip(grads, form.gradients(of, states, slab_out, back), strict=False):  # beta's last
                form.put(grad, slab.tokens, found)
    return [*(x[:-1].clone() for x in grads), _restored(d_state, order)]


@vjp.register_fake
def _(inputs, state, d_out, d_state, table, scale):  # type: ignore[no-untyped-def]
    return [*(x.new_empty(x.shape) for x in inputs), torch.empty_like(state)]


@_operator
def compose(
    rows: Tensor, chain: Tensor, counts: Tensor, reads: Tensor, read_from: Tensor, read_counts: Tensor,
    middle: Tensor, end: Tensor, heads: int, keys: int, values: int, decays: int, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States ``[P, H, K, V]`` that enter this rank's runs in the middle of documents, and those at the end.

    Args:
        rows: ``[maps, F]``; of the first map of a chain only B is read.
        chain, counts: maps to compose, document beside document, step by step; documents that go on at each step.
        reads, read_from, read_counts: which run gets the state after a step, of which document, and how many.
        middle, end: ``[P]``, for their numbers of runs.
        decays: d where A is diagonal, else 0.
        backward: compose with the transpose of A.
    """
    entering = rows.new_empty(reads.shape[0], heads, keys, values)
    state, split, maps_done, read = entering[:0], rows.shape[1] - heads * keys * values, 0, 0
    for step, (count, num_reads) in enumerate(zip(counts.tolist(), read_counts.tolist(), strict=True)):
        each = rows.index_select(0, chain[maps_done : maps_done + count])
        a, b = each[:, :split], each[:, split:].view(count, heads, keys, values)
        if step == 0:
            state = b
        elif decays:
            state = a.view(count, heads, decays, 1) * state[:count] + b
        else:
            dense = a.view(count, heads, keys, keys)
            state = (dense.mT if backward else dense) @ state[:count] + b
        now = slice(read, read + num_reads)
        entering.index_copy_(0, reads[now], state.index_select(0, read_from[now]))
        maps_done, read = maps_done + count, read + num_reads
    return entering[: middle.shape[0]].clone(), entering[middle.shape[0] :].clone()


@compose.register_fake
def _(rows, chain, counts, reads, read_from, read_counts, middle, end, heads, keys, values, decays, backward):  # type: ignore[no-untyped-def]
    return tuple(rows.new_empty(x.shape[0], heads, keys, values) for x in (middle, end))


def map_features(heads: int, keys: int, values: int, decays: int, dense: bool) -> int:
    """F: numbers of a map. A is ``[H, K, K]`` if `dense`, else ``[H, d]``; B is ``[H, K, V]``."""
    return heads * ((keys * keys if dense else decays) + keys * values)


def _form(given: Inputs) -> types.ModuleType:
    """The form in which a layer is computed: `tokenwise` a linear one whose heads have one value each."""
    return tokenwise if given.beta is None and given.v is not None and given.v.shape[-1] == 1 else chunkwise


def _one_more(x: Tensor) -> Tensor:
    """Zeros for all tokens, and one row for what is empty."""
    return x.new_zeros(x.shape[0] + 1, *x.shape[1:])


def _restored(by_length: Tensor, order: Tensor) -> Tensor:
    """Runs in the order of the plan."""
    return torch.empty_like(by_length).index_copy_(0, order, by_length)
