"""Attention of small problems in a few blocks of queries, for kernel "sdpa": every score of a block at once.

The loop of `sdpa` spends 20 to 30 calls of torch on a tile, however small. Below `_MOST_SCORES` computing masked scores
too is the cheaper way. The maths, and what is computed in which dtype, are those of `sdpa`.
"""

# B rows, H heads, K key heads, Q queries, T keys, D head dim, V value dim, N spans; G = H / K; R queries of a block

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanwise.attention.kernels.merge import lse_dtype

# Scores of all heads up to which this is faster than the loop, forward and backward.
_MOST_SCORES = 1 << 18
_MOST_QUERIES = 64  # of a block; 48 to 96 are as fast, all 237 queries of a small step at once are 1.25 times slower
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)


class _Block(NamedTuple):
    """Queries, the keys from the first to the last that one of them reads, and what hides the others.

    Attributes:
        rows: of ``[B * K, Q * G, …]``.
        keys: of T; at least one.
        bias: ``[B or 1, 1, R, 1, keys]``, 0 where a query reads a key and -inf elsewhere.
    """

    rows: slice
    keys: slice
    bias: Tensor


def is_small(q: Tensor, k: Tensor, softcap: float | None) -> bool:
    """Whether this is faster than the loop; a softcap is left to the loop."""
    return softcap is None and 0 < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= _MOST_SCORES


@torch.autocast("cpu", enabled=False)  # products keep the dtype that the maths asks for
def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out in float32 at least, and lse in float64; 0 and -inf for rows without keys."""
    dtype = lse_dtype(q)
    rows = _by_query(q.to(dtype) * (scale * _LOG2_E), k)
    keys, values = (x.to(dtype).flatten(0, 1) for x in (k, v))
    parts = []
    for block in _blocks_of(start, end, q, k):
        scores = _scores(rows, keys, block, k)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)  # -inf - -inf is nan
        weights = scores.sub_(top).exp2_()
        parts.append((torch.bmm(weights, values[:, block.keys]), weights.sum(-1, keepdim=True), top))
    out, total, top = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    lse = total.double().log().add_(top, alpha=_LN_2)
    return _by_head(out.div_(total.clamp_(min=1)), q, k), _by_head(lse, q, k).squeeze(-1)


@torch.autocast("cpu", enabled=False)
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    start: Tensor,
    end: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 at least, from q, k, v, out and lse; see `sdpa_backward`."""
    q, k, v, out, lse = tensors
    dtype = lse_dtype(q)
    keys, values = (x.to(dtype).flatten(0, 1) for x in (k, v))
    do, row_lse = grad_out.to(dtype), lse.unsqueeze(-1)
    is_empty = row_lse == -math.inf
    shift, share = split_lse(row_lse.masked_fill(is_empty, 0), dtype)
    delta = (out.to(dtype) * do).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1).to(dtype)
    delta = delta.masked_fill_(is_empty, 0).mul_(share)
    do, delta, shift, rows = (_by_query(x, k) for x in (do * share, delta, shift, q.to(dtype) * (scale * _LOG2_E)))
    # Contiguous, whatever k and v are, as compiled code is told.
    dqs, dk, dv = list[Tensor](), keys.new_zeros(keys.shape), values.new_zeros(values.shape)
    for block in _blocks_of(start, end, q, k):
        own, read = block.rows, block.keys
        weights = _scores(rows, keys, block, k).sub_(shift[:, own]).exp2_()
        ds = torch.bmm(do[:, own], values[:, read].mT).sub_(delta[:, own]).mul_(weights)
        dqs.append(torch.bmm(ds, keys[:, read]))
        dk[:, read].baddbmm_(ds.mT, rows[:, own])
        dv[:, read].baddbmm_(weights.mT, do[:, own])
    dq = _by_head(torch.cat(dqs, 1).mul_(scale), q, k)
    return dq, dk.mul_(_LN_2).view(k.shape), dv.view(v.shape)


def split_lse(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 lse as ``shift``, ``share`` of ``dtype``: ``exp(score - lse) = exp2(score * log2 e - shift) * share``.

    Rows of grad_out and delta times `share` make all gradients right, at no cost for each score.
    """
    exact = lse * _LOG2_E
    shift = exact.to(dtype)
    # Beyond 2^24 scores of one row differ by 1 or more, and float64 knows less and less of the remainder.
    rest = torch.where(shift.abs() < 2**24, shift.to(lse.dtype) - exact, 0)
    return shift, rest.exp2_().to(dtype)


def _by_query(x: Tensor, k: Tensor) -> Tensor:
    """``[B, H, Q, D]`` as ``[B * K, Q * G, D]``, so that the queries of a block lie side by side."""
    return x.unflatten(1, (k.shape[1], -1)).transpose(2, 3).reshape(k.shape[0] * k.shape[1], -1, x.shape[3])


def _by_head(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``[B * K, Q * G, D]`` as ``[B, H, Q, D]``."""
    # Contiguous, as compiled code is told: with one K/V head the reshape is a view.
    return x.view(*k.shape[:2], q.shape[2], -1, x.shape[2]).transpose(2, 3).reshape(*q.shape[:3], -1).contiguous()


def _scores(rows: Tensor, keys: Tensor, block: _Block, k: Tensor) -> Tensor:
    """``[B * K, R * G, keys]``, times log2 e; -inf where masked."""
    scores = torch.bmm(rows[:, block.rows], keys[:, block.keys].mT)
    scores.view(*k.shape[:2], block.bias.shape[2], -1, scores.shape[2]).add_(block.bias)
    return scores


def _blocks_of(start: Tensor, end: Tensor, q: Tensor, k: Tensor) -> tuple[_Block, ...]:
    first, last = start.numpy(), end.numpy()
    group = q.shape[1] // k.shape[1]
    return _blocks(first.tobytes(), last.tobytes(), first.shape, first.dtype.str, group, lse_dtype(q))


@functools.lru_cache(maxsize=8)  # layers, their forwards and backwards have the same few masks
def _blocks(
    start: bytes, end: bytes, shape: tuple[int, ...], kind: str, group: int, dtype: torch.dtype
) -> tuple[_Block, ...]:
    """The blocks of spans ``[B or 1, N, Q]``."""
    first, last = (np.frombuffer(x, kind).reshape(*shape, 1) for x in (start, end))
    number, blocks = -(-shape[2] // _MOST_QUERIES), []
    for i in range(number):
        own = slice(i * shape[2] // number, (i + 1) * shape[2] // number)
        lower, upper = first[:, :, own], last[:, :, own]
        stop = max(1, int(upper.max(initial=0, where=lower < upper)))
        key = np.arange(int(lower.min(initial=stop - 1, where=lower < upper)), stop, dtype=kind)
        reads = torch.from_numpy(((lower <= key) & (key < upper)).any(1))
        bias = torch.where(reads, 0.0, -math.inf).to(dtype)[:, None, :, None]
        blocks.append(_Block(slice(group * own.start, group * own.stop), slice(int(key[0]), stop), bias))
    return tuple(blocks)
