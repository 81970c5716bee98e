"""Gradients of `chunkwise`: the adjoint state passes through a document from its end to its start.

With G the gradient of the state after a chunk and dO that of its outputs, times the scale:

    dU = tril(Q Kᵀ · D)ᵀ dO + (decay to the end · K) G
    G' = (decay · Q)ᵀ dO + decay G - Wᵀ dU         W = (I + …)⁻¹ β (decay · K), delta rule only

Everything else follows chunk by chunk, from the states before and the gradients after each chunk, all at once. A slab's
states are computed again from the state before it.
"""

# n chunks, H heads, C tokens of a chunk, K key dim, V value dim, d 1 or K: dims of a decay; P segments

from __future__ import annotations

import torch

from spanwise.recurrence.chunkwise import Inputs, Slab, Tensor, Terms, largest, put, scan, slabs, taken, terms, wide


def adjoint(inputs: Inputs, tokens: Tensor, counts: Tensor, segments: int, d_out: Tensor, scale: float) -> Tensor:
    """Gradients of the states before the segments through the segments' outputs, ``[P, H, K, V]``, by length."""
    heads, keys = inputs.heads, inputs.k.shape[-1]
    d_state = d_out.new_zeros(segments, heads, keys, d_out.shape[-1], dtype=wide(d_out.dtype))
    for first, stop, group in slabs(tokens, counts, heads, largest(inputs)):
        for slab in reversed(group):
            scan_back(slab, terms(slab, inputs), taken(d_out, slab.tokens, inputs.heads) * scale, d_state[first:stop])
    return d_state


def scan_back(slab: Slab, of: Terms, d_out: Tensor, d_state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the state after, and of U of, every chunk of a slab.

    Args:
        d_out: ``[n, H, C, V]``, times the scale.
        d_state: ``[P, H, K, V]``, of the states after the slab; afterwards of those before it.
    """
    assert of.q is not None and of.qk is not None
    through_out, read, written = of.qk.mT @ d_out, (of.since * of.q).mT @ d_out, of.until * of.k
    after, d_new, stop = [], [], sum(slab.sizes)
    for size in reversed(slab.sizes):
        chunks, leaving = slice(stop - size, stop), d_state[:size].clone()
        after.append(leaving)
        found = through_out[chunks] + written[chunks] @ leaving
        d_new.append(found)
        entering = read[chunks] + of.since[chunks, :, -1].unsqueeze(-1) * leaving
        if of.solved_k is not None:
            entering -= of.solved_k[chunks].mT @ found
        d_state[:size] = entering
        stop -= size
    return torch.cat(after[::-1]), torch.cat(d_new[::-1])


def vjp(
    inputs: Inputs, tokens: Tensor, counts: Tensor, state: Tensor, d_out: Tensor, d_state: Tensor, scale: float,
    grads: Inputs,
) -> None:  # fmt: skip
    """Writes the gradients of tokens to `grads`, and those of the states before the segments to `d_state`.

    Args:
        state: ``[P, H, K, V]``, before the segments, by length; overwritten.
        d_out: ``[T, H, V]``.
        d_state: ``[P, H, K, V]``, of the states after the segments, by length.
        grads: as `inputs`, with one row more for what is empty.
    """
    for first, stop, group in slabs(tokens, counts, inputs.heads, largest(inputs)):
        mine, entries = state[first:stop], []
        for slab in group[:-1]:
            entries.append(mine.clone())
            scan(slab, terms(slab, inputs), mine)
        entries.append(mine)
        for slab, entry in zip(reversed(group), reversed(entries), strict=True):
            of = terms(slab, inputs)
            before, new = scan(slab, of, entry)
            slab_out = taken(d_out, slab.tokens, inputs.heads) * scale
            after, d_new = scan_back(slab, of, slab_out, d_state[first:stop])
            found = _of_chunks(of, before, new, after, slab_out, d_new)
            for grad, chunks in zip(grads, found, strict=True):
                if grad is not None:
                    assert chunks is not None
                    put(grad, slab.tokens, chunks)


def _of_chunks(of: Terms, before: Tensor, new: Tensor, after: Tensor, d_out: Tensor, d_new: Tensor) -> Inputs:
    """Gradients of the tokens of chunks, each ``[n, H, C, …]``."""
    assert of.q is not None and of.v is not None
    d_qk = (d_out @ new.mT).tril()
    d_read = d_out @ before.mT  # of decay · Q
    d_written = new @ after.mT  # of decay to the end · K
    d_total = (after * before).sum(-1)  # of the decay of the whole chunk
    d_v, d_kk, d_beta, d_entered = d_new, None, None, None
    if of.system is not None:
        assert of.beta is not None and of.kk is not None
        d_right = torch.linalg.solve_triangular(of.system.mT, d_new, upper=True, unitriangular=True)
        d_system = (d_right @ new.mT).tril(-1).neg_()
        error = of.v - (of.since * of.k) @ before
        d_beta = (d_right * error).sum(-1) + (d_system * of.kk).sum(-1)
        d_v = of.beta * d_right
        d_kk, d_entered = of.beta * d_system, -(d_v @ before.mT)  # of K Kᵀ · D and of decay · K
    d_q, d_k, d_decay = _of_pairs(of, d_qk, d_kk)
    d_q += of.since * d_read
    d_k += of.until * d_written
    d_since = of.since * of.q * d_read  # gradients of the logarithms of decays
    d_until = of.until * of.k * d_written
    if d_entered is not None:
        d_k += of.since * d_entered
        d_since += of.since * of.k * d_entered
    d_total = of.since[:, :, -1] * d_total
    if of.since.shape[-1] == 1:
        d_since, d_until, d_total = (x.sum(-1, keepdim=True) for x in (d_since, d_until, d_total))
    d_decay += d_since.flip(2).cumsum(2).flip(2) + d_total.unsqueeze(2)
    d_decay[:, :, 1:] += d_until.cumsum(2)[:, :, :-1]
    return Inputs(d_q, d_k, d_v, d_decay, d_beta)


def _of_pairs(of: Terms, d_qk: Tensor, d_kk: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and log_decay through the products of pairs of tokens."""
    assert of.q is not None and of.qk is not None
    if of.pairs.shape[-1] == 1:
        pairs = of.pairs[..., 0]
        d_q, d_k = (d_qk * pairs) @ of.k, (d_qk * pairs).mT @ of.q
        d_log = d_qk * of.qk
        if d_kk is not None:
            assert of.kk is not None
            d_k += (d_kk * pairs) @ of.k + (d_kk * pairs).mT @ of.k
            d_log += d_kk * of.kk
        d_log = d_log.unsqueeze(-1)
    else:
        decayed = of.pairs * of.k.unsqueeze(2)
        d_q = (d_qk.unsqueeze(3) @ decayed).squeeze(3)
        sent = d_qk.unsqueeze(-1) * of.q.unsqueeze(3)  # [i, j, K]
        d_k = torch.zeros_like(d_q)
        if d_kk is not None:
            d_k += (d_kk.unsqueeze(3) @ decayed).squeeze(3)
            sent += d_kk.unsqueeze(-1) * of.k.unsqueeze(3)
        d_k += (sent * of.pairs).sum(2)
        d_log = sent * decayed
    # Token l decays the pairs with j < l <= i; as in `between`, a row of all chunks at a time.
    d_decay, below = torch.zeros_like(d_log[:, :, 0]), torch.zeros_like(d_log[:, :, 0])
    for row in reversed(range(d_log.shape[2])):
        below += d_log[:, :, row]
        d_decay[:, :, row] = below[:, :, :row].sum(2)
    return d_q, d_k, d_decay
