"""`chunkwise` for linear attention with one value a head, such as Mamba's channels: states of all tokens, elementwise.

`chunkwise` multiplies matrices of pairs of tokens. Where a head has one value and a decay for each of its few keys,
pairs outnumber the states themselves. Here the states of a slab's tokens are written out, by one step along all chunks
at a time, first from zeros:

    S[i] = decay[i] S[i-1] + k[i] v[i]          since[i] = decay[i] since[i-1]
    S[i] += since[i] (state before the chunk)    out[i] = q[i] · S[i]

Decays only multiply: nothing cancels, and products may underflow. CPU seconds on one core, forward and backward of
1,024 channels with 16 states, 256 tokens: 0.07, and 1.05 with `chunkwise`; 2,048 tokens: 0.98.

The functions are those of `chunkwise`. Tensors of chunks are ``[C, n, h, …]`` with h 1 or H, in float32 at least;
states of the runs ``[P, H, K, 1]``.
"""

# C tokens of a chunk, n chunks, H heads, K key dim, d 1 or K: dims of a decay; P runs. Values have one dim.

from __future__ import annotations

from typing import NamedTuple

import torch

from spanwise.recurrence.slabs import Inputs, Slab, rows, write

Tensor = torch.Tensor

#: Dim of the tokens in tensors of chunks.
TOKENS = 0


class Terms(NamedTuple):
    """What the chunks of a slab need whatever the state."""

    q: Tensor  # [K]
    k: Tensor  # [K]
    v: Tensor  # [1]
    decay: Tensor  # [d]
    since: Tensor  # [d], decay from the chunk's start, with token i's own


def largest(inputs: Inputs) -> int:
    """Elements of a chunk's largest tensor, over C."""
    return inputs.k.shape[-1]


def taken(x: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """``[C, n, h, …]``, with heads that serve several heads of v repeated, where there is more than one."""
    found = rows(x, tokens.T)
    return found if found.shape[2] in (1, heads) else found.repeat_interleave(heads // found.shape[2], 2)


def put(out: Tensor, tokens: Tensor, found: Tensor) -> None:
    """Writes ``[C, n, H, …]`` to the tokens of `out`; as `slabs.write`."""
    write(out, tokens.T, found)


def terms(slab: Slab, inputs: Inputs) -> Terms:
    """What the chunks of a slab need whatever the state."""
    q, k, v, g = (taken(x, slab.tokens, inputs.heads) for x in inputs[:4])
    decay = g.exp_()
    since = decay.clone()
    for i in range(1, len(since)):
        since[i].mul_(since[i - 1])
    return Terms(q, k, v, decay, since)


def scan(slab: Slab, of: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """States before each chunk ``[n, H, K]`` and after each token ``[C, n, H, K]``; `state` as for `chunkwise.scan`."""
    after, state = of.k * of.v, state[..., 0]
    for i in range(1, len(after)):
        after[i].addcmul_(of.decay[i], after[i - 1])
    before, first = torch.empty_like(after[-1]), 0
    for size in slab.sizes:
        chunks = slice(first, first + size)
        before[chunks] = state[:size]
        state[:size] = torch.addcmul(after[-1, chunks], of.since[-1, chunks], state[:size])
        first += size
    return before, after.addcmul_(of.since, before)


def outputs(of: Terms, states: tuple[Tensor, Tensor]) -> Tensor:
    """``[C, n, H, 1]``, not scaled yet; `states` from `scan`."""
    return (of.q * states[1]).sum(-1, keepdim=True)


def scan_back(slab: Slab, of: Terms, d_out: Tensor, d_state: Tensor) -> Tensor:
    """Gradients ``[C, n, H, K]`` of the state after each token of a slab; arguments as for `chunkwise.scan_back`."""
    grads, until, d_state = of.q * d_out, torch.ones_like(of.decay), d_state[..., 0]
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


def gradients(of: Terms, states: tuple[Tensor, Tensor], d_out: Tensor, d_after: Tensor) -> list[Tensor]:
    """Gradients of q, k, v and log_decay; `d_after` from `scan_back`."""
    (before, after), d_k = states, d_after * of.v
    d_v = (d_after * of.k).sum(-1, keepdim=True)
    d_decay = d_after.mul_(of.decay)
    d_decay[0] *= before
    d_decay[1:] *= after[:-1]
    return [after * d_out, d_k, d_v, d_decay if of.decay.shape[-1] > 1 else d_decay.sum(-1, keepdim=True)]
