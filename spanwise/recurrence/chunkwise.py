"""One rank's chunks of a gated recurrence: states, outputs and gradients, without a loop over tokens.

`_ops` calls these functions slab by slab.

Inside a chunk the recurrence is a few products of matrices; states pass from chunk to chunk, all runs and heads at
once. With S the state before a chunk, D[i, j] the decay from token j to token i, and tril the lower triangle:

    U = V                                                          linear
    U = (I + tril(β (K Kᵀ · D), -1))⁻¹ β (V - (decay · K) S)        delta rule
    out = (decay · Q) S + tril(Q Kᵀ · D) U
    S' = decay S + (decay to the end · K)ᵀ U

The delta rule's form is that of DeltaNet (Yang et al., arXiv 2406.06484) with decays (arXiv 2412.06464). Sums of log
decays run over exactly the tokens between j and i, so that nothing cancels: decays may be 0 and products may underflow,
but no exponent is positive.

In the backward the adjoint state passes from the end to the start. With G the gradient of the state after a chunk and
dO that of its outputs, times the scale:

    dU = tril(Q Kᵀ · D)ᵀ dO + (decay to the end · K) G
    G' = (decay · Q)ᵀ dO + decay G - Wᵀ dU         W = (I + …)⁻¹ β (decay · K), delta rule only

Everything else follows chunk by chunk, from the states before and the gradients after each chunk, all at once.
docs/decisions says how much slower autograd of the forward is.
"""

# n chunks, H heads, C tokens of a chunk, K key dim, V value dim, d 1 or K: dims of a decay; P runs

from __future__ import annotations

from typing import NamedTuple

import torch

from spanwise.recurrence.slabs import Inputs, Slab, rows, write

Tensor = torch.Tensor

#: Dim of the tokens in tensors of chunks.
TOKENS = 2


class Terms(NamedTuple):
    """What the chunks of a slab need whatever the state; ``[n, H, …]``, in float32 at least."""

    k: Tensor  # [C, K]
    q: Tensor  # [C, K]
    v: Tensor  # [C, V]
    beta: Tensor | None  # [C, 1]
    pairs: Tensor  # [C, C, d], decay from token j to token i
    since: Tensor  # [C, d], decay from the chunk's start, with token i's own
    until: Tensor  # [C, d], decay from token i to the chunk's end
    kk: Tensor | None  # [C, C]
    qk: Tensor  # [C, C]
    system: Tensor | None  # [C, C], I + tril(beta kk, -1)
    solved_k: Tensor | None  # [C, K]
    values: Tensor  # [C, V], v, or solved


def largest(inputs: Inputs) -> int:
    """Elements of a chunk's largest tensor, over C."""
    keys = inputs.k.shape[-1]
    return keys * (16 if inputs.log_decay.shape[-1] > 1 else 4)


def taken(x: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """``[n, H, C, …]``, the tokens of chunks of ``[T, h, …]``."""
    chunks = rows(x, tokens).transpose(1, 2)
    return chunks if chunks.shape[1] == heads else chunks.repeat_interleave(heads // chunks.shape[1], 1)


def put(out: Tensor, tokens: Tensor, chunks: Tensor) -> None:
    """Writes ``[n, H, C, …]`` to the tokens of `out`; as `write`."""
    write(out, tokens, chunks.transpose(1, 2))


def between(log_decay: Tensor) -> Tensor:
    """The decay ``[n, H, C, C, d]`` of token j's values in token i, 0 where i is before j; of ``[n, H, C, d]``.

    A row of all chunks at a time, because torch's cumsum along a dim in the middle takes four times as long.
    """
    size = log_decay.shape[2]
    pairs = log_decay.new_zeros(*log_decay.shape[:2], size, *log_decay.shape[2:])
    sums = torch.zeros_like(log_decay)  # from each token j to the row
    for row in range(size):
        sums[:, :, :row] += log_decay[:, :, row : row + 1]
        torch.exp(sums[:, :, : row + 1], out=pairs[:, :, row, : row + 1])
    return pairs


def terms(slab: Slab, inputs: Inputs) -> Terms:
    """What the chunks of a slab need whatever the state."""
    q, k, v, g = (taken(x, slab.tokens, inputs.heads) for x in inputs[:4])
    pairs = between(g)
    since, until = g.cumsum(2).exp(), pairs[:, :, -1]
    decayed = pairs * k.unsqueeze(2) if g.shape[-1] > 1 else None

    def products(x: Tensor) -> Tensor:
        return x @ k.mT * pairs[..., 0] if decayed is None else (decayed @ x.unsqueeze(-1)).squeeze(-1)

    qk = products(q)
    if inputs.beta is None:
        return Terms(k, q, v, None, pairs, since, until, None, qk, None, None, v)
    beta, kk = taken(inputs.beta, slab.tokens, inputs.heads).unsqueeze(-1), products(k)
    system = (beta * kk).tril(-1) + torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    right = beta * torch.cat([since * k, v], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    solved_k, values = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    return Terms(k, q, v, beta, pairs, since, until, kk, qk, system, solved_k, values)


def scan(slab: Slab, of: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """States before, and U of every chunk of a slab.

    Args:
        state: ``[P, H, K, V]``, before the slab; afterwards behind it.
    """
    before, new, first, written = [], [], 0, of.until * of.k
    for size in slab.sizes:
        chunks, entry = slice(first, first + size), state[:size].clone()
        before.append(entry)
        found = of.values[chunks]
        if of.solved_k is not None:
            found = found - of.solved_k[chunks] @ entry
        state[:size] = of.since[chunks, :, -1].unsqueeze(-1) * entry + written[chunks].mT @ found
        new.append(found)
        first += size
    return torch.cat(before), torch.cat(new)


def outputs(of: Terms, states: tuple[Tensor, Tensor]) -> Tensor:
    """``[n, H, C, V]``, not scaled yet; `states` from `scan`."""
    before, new = states
    return (of.since * of.q) @ before + of.qk @ new


def scan_back(slab: Slab, of: Terms, d_out: Tensor, d_state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the state after, and of U of, every chunk of a slab.

    Args:
        d_out: ``[n, H, C, V]``, times the scale.
        d_state: ``[P, H, K, V]``, of the states after the slab; afterwards of those before it.
    """
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


def gradients(of: Terms, states: tuple[Tensor, Tensor], d_out: Tensor, back: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients of q, k, v, log_decay and beta, if there is one, each ``[n, H, C, …]``.

    Args:
        states, back: from `scan` and `scan_back`.
        d_out: ``[n, H, C, V]``, times the scale.
    """
    (before, new), (after, d_new) = states, back
    d_read, d_written = d_out @ before.mT, new @ after.mT  # of decay · Q and of decay to the end · K
    d_k, d_v, d_beta = of.until * d_written, d_new, []
    # Gradients of the logarithms of decays.
    d_since, d_until = of.since * of.q * d_read, of.until * of.k * d_written
    d_total = of.since[:, :, -1] * (after * before).sum(-1)
    pairs = [((d_out @ new.mT).tril(), of.q, of.qk)]
    if of.system is not None:
        assert of.beta is not None and of.kk is not None
        d_right = torch.linalg.solve_triangular(of.system.mT, d_new, upper=True, unitriangular=True)
        d_system = (d_right @ new.mT).tril(-1).neg_()
        error = of.v - (of.since * of.k) @ before
        d_beta = [(d_right * error).sum(-1) + (d_system * of.kk).sum(-1)]
        d_v = of.beta * d_right
        pairs.append((of.beta * d_system, of.k, of.kk))
        d_entered = -(d_v @ before.mT)  # of decay · K
        d_k += of.since * d_entered
        d_since += of.since * of.k * d_entered
    (d_q, *d_left), d_right_k, d_decay = _of_pairs(of, pairs)
    d_q += of.since * d_read
    d_k += sum(d_left, d_right_k)
    if of.since.shape[-1] == 1:
        d_since, d_until, d_total = (x.sum(-1, keepdim=True) for x in (d_since, d_until, d_total))
    d_decay += d_since.flip(2).cumsum(2).flip(2) + d_total.unsqueeze(2)
    d_decay[:, :, 1:] += d_until.cumsum(2)[:, :, :-1]
    return [d_q, d_k, d_v, d_decay, *d_beta]


def _of_pairs(of: Terms, given: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of each x, of k and of log_decay through ``x Kᵀ · D``; `given` are gradients of these, x, and these."""
    d_left, d_k, d_log = [], torch.zeros_like(of.k), torch.zeros_like(of.pairs)
    for d, x, product in given:
        if of.pairs.shape[-1] == 1:
            decayed = d * of.pairs[..., 0]
            d_left.append(decayed @ of.k)
            d_k += decayed.mT @ x
            d_log += (d * product).unsqueeze(-1)
        else:
            sent = d.unsqueeze(-1) * x.unsqueeze(3) * of.pairs  # [i, j, K]
            d_left.append((d.unsqueeze(3) @ (of.pairs * of.k.unsqueeze(2))).squeeze(3))
            d_k += sent.sum(2)
            d_log += sent * of.k.unsqueeze(2)
    # Token l decays the pairs with j < l <= i; as in `between`, a row of all chunks at a time.
    d_decay, below = torch.zeros_like(d_log[:, :, 0]), torch.zeros_like(d_log[:, :, 0])
    for row in reversed(range(d_log.shape[2])):
        below += d_log[:, :, row]
        d_decay[:, :, row] = below[:, :, :row].sum(2)
    return d_left, d_k, d_decay
