"""One rank's chunks of a gated recurrence: states, outputs and gradients, without a loop over tokens.

Inside a chunk the recurrence is a few products of matrices; states pass from chunk to chunk, all segments and heads at
once. With S the state before a chunk, D[i, j] the decay from token j to token i, and tril the lower triangle:

    U = V                                                          linear
    U = (I + tril(β (K Kᵀ · D), -1))⁻¹ β (V - (decay · K) S)        delta rule
    out = (decay · Q) S + tril(Q Kᵀ · D) U
    S' = decay S + (decay to the end · K)ᵀ U

The delta rule's form is that of DeltaNet (Yang et al., arXiv 2406.06484) with decays (arXiv 2412.06464). Sums of log
decays run over exactly the tokens between j and i, so that nothing cancels: decays may be 0 and products may underflow,
but no exponent is positive.
"""

# n chunks, H heads, C tokens of a chunk, K key dim, V value dim, d 1 or K: dims of a decay; P segments

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """Tokens of a rank: q, k ``[T, h, K]``, v ``[T, H, V]``, log_decay ``[T, H, d]``, beta ``[T, H]``.

    h divides H: a head of q or k serves consecutive heads of v. `beta` is None for linear attention, q or v where
    they are not used.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    log_decay: Tensor
    beta: Tensor | None

    @property
    def heads(self) -> int:
        """H."""
        return self.log_decay.shape[1]


class Slab(NamedTuple):
    """Consecutive steps of some segments: their chunks ``[n, C]``, and how many chunks each step has."""

    tokens: Tensor
    sizes: list[int]


class Terms(NamedTuple):
    """What the chunks of a slab need whatever the state; ``[n, H, …]``, in float32 at least."""

    k: Tensor  # [C, K]
    q: Tensor | None  # [C, K]
    v: Tensor | None  # [C, V]
    beta: Tensor | None  # [C, 1]
    pairs: Tensor  # [C, C, d], decay from token j to token i
    since: Tensor  # [C, d], decay from the chunk's start, with token i's own
    until: Tensor  # [C, d], decay from token i to the chunk's end
    kk: Tensor | None  # [C, C]
    qk: Tensor | None  # [C, C]
    system: Tensor | None  # [C, C], I + tril(beta kk, -1)
    solved_k: Tensor | None  # [C, K]
    values: Tensor | None  # [C, V], v, or solved


# Elements of the largest tensor of a slab. CPU seconds on one core, 4,096 tokens, 8 heads of 64, forward and backward:
# gdn 0.35, kda 0.82; with 2**24 elements 0.52 and 1.31; with chunks of 32 tokens in place of 16 0.35 and 1.11.
_SLAB = 1 << 20


def slabs(tokens: Tensor, counts: Tensor, heads: int, dims: int) -> Iterator[tuple[int, int, list[Slab]]]:
    """Batches ``[first, stop)`` of the segments, by length, each with its slabs in order.

    Args:
        tokens: ``[N, C]``, chunks step by step.
        counts: segments that have a chunk at each step.
        dims: elements of a chunk's largest tensor, over C.
    """
    steps: list[int] = counts.tolist()
    offsets = [sum(steps[:i]) for i in range(len(steps))]
    most = max(1, _SLAB // max(heads * tokens.shape[1] * dims, 1))
    for first in range(0, steps[0] if steps else 0, most):
        found: list[Slab] = []
        rows: list[Tensor] = []
        sizes: list[int] = []
        stop = min(first + most, steps[0])
        for offset, count in zip(offsets, steps, strict=True):
            size = min(count, stop) - first
            if size <= 0:
                break
            if sum(sizes) + size > most and sizes:
                found.append(Slab(torch.cat(rows), sizes))
                rows, sizes = [], []
            rows.append(tokens[offset + first : offset + first + size])
            sizes.append(size)
        yield first, stop, [*found, Slab(torch.cat(rows), sizes)]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and sums: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def rows(x: Tensor, tokens: Tensor) -> Tensor:
    """The rows `tokens` of `x` ``[T, …]``, in float32 at least; zeros in places that no token fills."""
    found = x.index_select(0, tokens.flatten().clamp(max=x.shape[0] - 1)).to(wide(x.dtype))
    empty = (tokens.flatten() == x.shape[0]).view(-1, *[1] * (x.dim() - 1))
    return found.masked_fill_(empty, 0).unflatten(0, tokens.shape)


def taken(x: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """``[n, H, C, …]``, the tokens of chunks of ``[T, h, …]``."""
    chunks = rows(x, tokens).transpose(1, 2)
    return chunks if chunks.shape[1] == heads else chunks.repeat_interleave(heads // chunks.shape[1], 1)


def write(out: Tensor, tokens: Tensor, found: Tensor) -> None:
    """Writes ``[*tokens.shape, H, …]`` to rows of `out` ``[T + 1, h, …]``, summed over heads that share one of `out`.

    The last row of `out` takes what is empty.
    """
    if found.shape[2] != out.shape[1]:
        found = found.unflatten(2, (out.shape[1], -1)).sum(3)
    out.index_copy_(0, tokens.flatten(), found.flatten(0, 1).to(out.dtype))


def put(out: Tensor, tokens: Tensor, chunks: Tensor) -> None:
    """Writes ``[n, H, C, …]`` to the tokens of `out`; as `write`."""
    write(out, tokens, chunks.transpose(1, 2))


def between(log_decay: Tensor) -> Tensor:
    """The decay ``[n, H, C, C, d]`` of token j's part in token i, 0 where i comes before j; of ``[n, H, C, d]``.

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
    q, k, v, g, beta = (x if x is None else taken(x, slab.tokens, inputs.heads) for x in inputs)
    assert k is not None and g is not None
    size = k.shape[2]
    pairs = between(g)
    since = g.cumsum(2).exp()
    until = pairs[:, :, -1]
    if g.shape[-1] == 1:
        qk = None if q is None else q @ k.mT * pairs[..., 0]
        kk = None if beta is None else k @ k.mT * pairs[..., 0]
    else:
        decayed = pairs * k.unsqueeze(2)
        qk = None if q is None else (decayed @ q.unsqueeze(-1)).squeeze(-1)
        kk = None if beta is None else (decayed @ k.unsqueeze(-1)).squeeze(-1)
    if beta is None:
        return Terms(k, q, v, None, pairs, since, until, None, qk, None, None, v)
    beta = beta.unsqueeze(-1)
    assert kk is not None
    system = (beta * kk).tril(-1) + torch.eye(size, dtype=k.dtype, device=k.device)
    right = since * k if v is None else torch.cat([since * k, v], dim=-1)
    solved = torch.linalg.solve_triangular(system, beta * right, upper=False, unitriangular=True)
    keys = k.shape[-1]
    values = None if v is None else solved[..., keys:]
    return Terms(k, q, v, beta, pairs, since, until, kk, qk, system, solved[..., :keys], values)


def scan(slab: Slab, of: Terms, state: Tensor) -> tuple[Tensor, Tensor]:
    """States before, and U of every chunk of a slab.

    Args:
        state: ``[P, H, K, V]``, before the slab; afterwards behind it.
    """
    assert of.values is not None
    before, new, first, written = [], [], 0, of.until * of.k
    for size in slab.sizes:
        chunks, entry = slice(first, first + size), state[:size].clone()
        before.append(entry)
        found = of.values[chunks]
        if of.solved_k is not None:
            found = F.pad(found, (0, entry.shape[-1] - found.shape[-1])) - of.solved_k[chunks] @ entry
        state[:size] = of.since[chunks, :, -1].unsqueeze(-1) * entry + written[chunks].mT @ found
        new.append(found)
        first += size
    return torch.cat(before), torch.cat(new)


def run(inputs: Inputs, tokens: Tensor, counts: Tensor, state: Tensor, scale: float, out: Tensor) -> None:
    """Writes outputs to `out` ``[T + 1, H, V]`` and the states after the segments to `state` ``[P, H, K, V]``.

    Args:
        state: before the segments, by length.
    """
    for first, stop, group in slabs(tokens, counts, inputs.heads, largest(inputs)):
        for slab in group:
            of = terms(slab, inputs)
            put(out, slab.tokens, _outputs(of, *scan(slab, of, state[first:stop]), scale))


def _outputs(of: Terms, before: Tensor, new: Tensor, scale: float) -> Tensor:
    assert of.q is not None and of.qk is not None
    return scale * ((of.since * of.q) @ before + of.qk @ new)


def largest(inputs: Inputs) -> int:
    """Elements of a chunk's largest tensor, over C."""
    keys = inputs.k.shape[-1]
    return keys * (16 if inputs.log_decay.shape[-1] > 1 else 4)


def opened(
    inputs: Inputs, tokens: Tensor, counts: Tensor, segments: int, scale: float, out: Tensor, reads: Tensor
) -> tuple[Tensor, Tensor]:
    """Segments before which the state S is not known yet: their outputs are ``out + reads @ S``.

    Args:
        out: ``[T + 1, H, V]``, written.
        reads: ``[T + 1, H, K]``, written.

    Returns:
        The maps ``S -> A S + B`` of the segments, by length: A ``[P, H, K, K]``, or for linear attention, whose maps
        are diagonal, ``[P, H, d]``; and B ``[P, H, K, V]``.
    """
    assert inputs.v is not None
    heads, keys, values = inputs.heads, inputs.k.shape[-1], inputs.v.shape[-1]
    delta = inputs.beta is not None
    decay = inputs.k.new_ones(segments, heads, inputs.log_decay.shape[-1], dtype=wide(inputs.k.dtype))
    # The columns of A are states that begin as the identity and get no values.
    state = decay.new_zeros(segments, heads, keys, values + delta * keys)
    if delta:
        state[..., values:] = torch.eye(keys, dtype=state.dtype, device=state.device)
    for first, stop, group in slabs(tokens, counts, heads, largest(inputs)):
        for slab in group:
            of = terms(slab, inputs)
            found = _outputs(of, *scan(slab, of, state[first:stop]), scale)
            put(out, slab.tokens, found[..., :values])
            if delta:
                put(reads, slab.tokens, found[..., values:])
                continue
            assert of.q is not None
            earlier = passed(slab.sizes, of.since[:, :, -1], decay[first:stop])
            put(reads, slab.tokens, scale * (earlier.unsqueeze(2) * of.since) * of.q)
    return (state[..., values:] if delta else decay), state[..., :values]


def passed(sizes: list[int], decay: Tensor, total: Tensor) -> Tensor:
    """The decay before each chunk of a slab; `total` ``[P, H, d]`` passes through all of them."""
    before = []
    for size, each in zip(sizes, decay.split(sizes), strict=True):
        before.append(total[:size].clone())
        total[:size] *= each
    return torch.cat(before)
