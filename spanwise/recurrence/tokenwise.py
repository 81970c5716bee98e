"""`chunkwise` for linear attention with one value a head, such as Mamba's channels: states of all tokens, elementwise.

`chunkwise` multiplies matrices of pairs of tokens. Where a head has one value and a decay for each of its few keys,
pairs outnumber the states themselves. Here the states of a slab's tokens are written out, by one step along all chunks
at a time, first from zeros:

    S[i] = decay[i] S[i-1] + k[i] v[i]          since[i] = decay[i] since[i-1]
    S[i] += since[i] (state before the chunk)    out[i] = q[i] · S[i]

Decays only multiply: nothing cancels, and products may underflow. CPU seconds on one core, forward and backward of
1,024 channels with 16 states, 256 tokens: 0.07, and 1.05 with `chunkwise`; 2,048 tokens: 0.98.
"""

# C tokens of a chunk, n chunks, H heads, K key dim, d 1 or K: dims of a decay; P segments. Values have one dim.

from __future__ import annotations

from typing import NamedTuple

import torch

from spanwise.recurrence.chunkwise import Inputs, Slab, Tensor, passed, rows, slabs, wide, write


class Tokens(NamedTuple):
    """The tokens of a slab; ``[C, n, h, …]`` with h 1 or H, in float32 at least."""

    q: Tensor | None  # [K]
    k: Tensor | None  # [K]
    v: Tensor | None  # [1]
    decay: Tensor  # [d]


class States(NamedTuple):
    """States of a slab."""

    before: Tensor  # [n, H, K], before each chunk
    since: Tensor  # [C, n, H, d], decay from the chunk's start, with token i's own
    after: Tensor  # [C, n, H, K], after each token


def run(inputs: Inputs, tokens: Tensor, counts: Tensor, state: Tensor, scale: float, out: Tensor) -> None:
    """As `chunkwise.run`."""
    for first, stop, group in slabs(tokens, counts, inputs.heads, inputs.k.shape[-1]):
        for slab in group:
            of = _tokens(slab, inputs)
            assert of.q is not None
            states = _scan(slab, of, state[first:stop, ..., 0])
            write(out, slab.tokens.T, scale * (of.q * states.after).sum(-1, keepdim=True))


def opened(
    inputs: Inputs, tokens: Tensor, counts: Tensor, segments: int, scale: float, out: Tensor, reads: Tensor
) -> tuple[Tensor, Tensor]:
    """As `chunkwise.opened`."""
    heads, keys = inputs.heads, inputs.k.shape[-1]
    decay = inputs.k.new_ones(segments, heads, inputs.log_decay.shape[-1], dtype=wide(inputs.k.dtype))
    state = decay.new_zeros(segments, heads, keys)
    for first, stop, group in slabs(tokens, counts, heads, keys):
        for slab in group:
            of = _tokens(slab, inputs)
            assert of.q is not None
            states = _scan(slab, of, state[first:stop])
            write(out, slab.tokens.T, scale * (of.q * states.after).sum(-1, keepdim=True))
            earlier = passed(slab.sizes, states.since[-1], decay[first:stop])
            write(reads, slab.tokens.T, scale * of.q * (states.since * earlier))
    return decay, state.unsqueeze(-1)


def adjoint(inputs: Inputs, tokens: Tensor, counts: Tensor, segments: int, d_out: Tensor, scale: float) -> Tensor:
    """As `chunkwise_backward.adjoint`."""
    keys = inputs.k.shape[-1]
    d_state = d_out.new_zeros(segments, inputs.heads, keys, dtype=wide(d_out.dtype))
    for first, stop, group in slabs(tokens, counts, inputs.heads, keys):
        for slab in reversed(group):
            _scan_back(slab, _tokens(slab, inputs), rows(d_out, slab.tokens.T) * scale, d_state[first:stop])
    return d_state.unsqueeze(-1)


def vjp(
    inputs: Inputs, tokens: Tensor, counts: Tensor, state: Tensor, d_out: Tensor, d_state: Tensor, scale: float,
    grads: Inputs,
) -> None:  # fmt: skip
    """As `chunkwise_backward.vjp`."""
    for first, stop, group in slabs(tokens, counts, inputs.heads, inputs.k.shape[-1]):
        mine, entries = state[first:stop, ..., 0], []
        for slab in group[:-1]:
            entries.append(mine.clone())
            _scan(slab, _tokens(slab, inputs), mine)
        for slab, entry in zip(reversed(group), [mine, *reversed(entries)], strict=True):
            of, slab_out = _tokens(slab, inputs), rows(d_out, slab.tokens.T) * scale
            states = _scan(slab, of, entry)
            after = _scan_back(slab, of, slab_out, d_state[first:stop, ..., 0])
            _write_grads(slab, of, states, slab_out, after, grads)


def _write_grads(slab: Slab, of: Tokens, states: States, d_out: Tensor, d_after: Tensor, grads: Inputs) -> None:
    assert of.k is not None and of.v is not None and grads.q is not None and grads.v is not None
    tokens = slab.tokens.T
    write(grads.q, tokens, states.after * d_out)
    write(grads.k, tokens, d_after * of.v)
    write(grads.v, tokens, (d_after * of.k).sum(-1, keepdim=True))
    d_decay = d_after.mul_(of.decay)
    d_decay[0] *= states.before
    d_decay[1:] *= states.after[:-1]
    write(grads.log_decay, tokens, d_decay if of.decay.shape[-1] > 1 else d_decay.sum(-1, keepdim=True))


def _tokens(slab: Slab, inputs: Inputs) -> Tokens:
    """With heads of q and k that serve several heads of v repeated, where there is more than one."""
    q, k, v, g = (x if x is None else rows(x, slab.tokens.T) for x in inputs[:4])
    assert g is not None
    q, k = (x if x is None or x.shape[2] == 1 else x.repeat_interleave(inputs.heads // x.shape[2], 2) for x in (q, k))
    return Tokens(q, k, v, g.exp_())


def _scan(slab: Slab, of: Tokens, state: Tensor) -> States:
    """States of a slab; `state` ``[P, H, K]`` is before the slab, afterwards behind it."""
    assert of.k is not None and of.v is not None
    after, since = of.k * of.v, of.decay.clone()
    for i in range(1, len(after)):
        after[i].addcmul_(of.decay[i], after[i - 1])
        since[i].mul_(since[i - 1])
    before, first = torch.empty_like(after[-1]), 0
    for size in slab.sizes:
        chunks = slice(first, first + size)
        before[chunks] = state[:size]
        state[:size] = torch.addcmul(after[-1, chunks], since[-1, chunks], state[:size])
        first += size
    return States(before, since, after.addcmul_(since, before))


def _scan_back(slab: Slab, of: Tokens, d_out: Tensor, d_state: Tensor) -> Tensor:
    """Gradients ``[C, n, H, K]`` of the state after each token of a slab.

    Args:
        d_out: ``[C, n, H, 1]``, times the scale.
        d_state: ``[P, H, K]``, of the states behind the slab; afterwards of those before it.
    """
    assert of.q is not None
    grads, until = of.q * d_out, torch.ones_like(of.decay)
    for i in reversed(range(len(grads) - 1)):
        grads[i].addcmul_(of.decay[i + 1], grads[i + 1])
        torch.mul(until[i + 1], of.decay[i + 1], out=until[i])
    behind, stop = torch.empty_like(grads[0]), sum(slab.sizes)
    for size in reversed(slab.sizes):
        chunks = slice(stop - size, stop)
        behind[chunks] = d_state[:size]
        d_state[:size] = of.decay[0, chunks] * (grads[0, chunks] + until[0, chunks] * d_state[:size])
        stop -= size
    return grads.addcmul_(until, behind)
