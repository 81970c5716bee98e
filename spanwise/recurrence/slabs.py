"""Tokens of a rank in chunks, and chunks in slabs: what `chunkwise` and `tokenwise` compute on at a time."""

# T tokens of a rank, h heads of q or k, H heads, K key dim, V value dim, d 1 or K: dims of a decay
# P runs, n chunks of C tokens

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """Tokens of a rank: q, k ``[T, h, K]``, v ``[T, H, V]``, log_decay ``[T, H, d]``, beta ``[T, H]``.

    h divides H: a head of q or k serves consecutive heads of v. `beta` is None for linear attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    @property
    def heads(self) -> int:
        """H."""
        return self.log_decay.shape[1]


class Slab(NamedTuple):
    """Consecutive steps of runs: their chunks ``[n, C]``, and how many chunks each step has."""

    tokens: Tensor
    sizes: list[int]


# Elements of the largest tensor of a slab. CPU seconds on one core, 4,096 tokens, 8 heads of 64, forward and backward:
# gdn 0.35, kda 0.82; with 2**24 elements 0.52 and 1.31; with chunks of 32 tokens in place of 16 0.35 and 1.11.
_SLAB = 1 << 20


def slabs(tokens: Tensor, counts: Tensor, heads: int, dims: int) -> Iterator[tuple[int, int, list[Slab]]]:
    """Batches ``[first, stop)`` of the runs, by length, each with its slabs in order.

    Args:
        tokens, counts: of a `ChunkTable`.
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


def rows(x: Tensor, tokens: Tensor) -> Tensor:
    """The rows `tokens` of `x` ``[T, …]``; zeros in places that no token fills."""
    found = x.index_select(0, tokens.flatten().clamp(max=x.shape[0] - 1))
    empty = (tokens.flatten() == x.shape[0]).view(-1, *[1] * (x.dim() - 1))
    return found.masked_fill_(empty, 0).unflatten(0, tokens.shape)


def write(out: Tensor, tokens: Tensor, found: Tensor) -> None:
    """Writes ``[*tokens.shape, H, …]`` to rows of `out` ``[T + 1, h, …]``, summed over heads that share one of `out`.

    The last row of `out` takes what is empty.
    """
    if found.shape[2] != out.shape[1]:
        found = found.unflatten(2, (out.shape[1], -1)).sum(3)
    out.index_copy_(0, tokens.flatten(), found.flatten(0, 1))
