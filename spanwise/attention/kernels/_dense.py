"""Attention of small problems in one step, for kernel "sdpa": every score at once, no loop over tiles.

The loop of `sdpa` spends 20 to 30 calls of torch on a tile, however small. Below `_MOST_SCORES` computing masked scores
too is the cheaper way. The maths, and what is computed in which dtype, are those of `sdpa`.
"""

# B rows, H heads, K key heads, Q queries, T keys, D head dim, V value dim, N spans; G = H / K

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from spanwise.attention.kernels._checks import lse_dtype

# Scores of all heads up to which this is faster than the loop, forward and backward; benchmarks/small_steps.py.
_MOST_SCORES = 1 << 18
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)


def is_small(q: Tensor, k: Tensor, softcap: float | None) -> bool:
    """Whether one step is faster; a softcap is left to the loop."""
    return softcap is None and 0 < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= _MOST_SCORES


@torch.autocast("cpu", enabled=False)  # products keep the dtype that the maths asks for
def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Out in float32 at least, and lse in float64; 0 and -inf for rows without keys."""
    scores = _scores(q, k, start, end, scale)
    top = scores.amax(-1, keepdim=True)
    is_empty = top == -math.inf
    weights = scores.sub_(top.masked_fill(is_empty, 0)).exp2_()  # -inf - -inf is nan
    total = weights.sum(-1, keepdim=True)
    out = (weights @ v.to(weights.dtype)).div_(total.masked_fill(is_empty, 1))
    lse = total.double().log_().add_(top, alpha=_LN_2)
    return out.view(*q.shape[:3], -1), lse.view(q.shape[:3])


@torch.autocast("cpu", enabled=False)
def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    start: Tensor,
    end: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 at least, from q, k, v, out and lse; see `sdpa_backward`."""
    q, k, v, out, lse = tensors
    dtype, shape = lse_dtype(q), (*k.shape[:2], -1)
    keys, values, do = k.to(dtype), v.to(dtype), grad_out.to(dtype).reshape(*shape, v.shape[3])
    row_lse = lse.reshape(*shape, 1)
    shift, share = split_lse(row_lse.masked_fill(row_lse == -math.inf, 0), dtype)
    weights = _scores(q, k, start, end, scale).sub_(shift).exp2_()
    delta = -grad_lse.reshape(*shape, 1).to(dtype)
    if out is not None:
        delta = delta + (out.to(dtype).reshape(do.shape) * do).sum(-1, keepdim=True)
    do, delta = do * share, delta.masked_fill(row_lse == -math.inf, 0) * share
    ds = (do @ values.mT).sub_(delta).mul_(weights)
    dq = (ds @ keys).mul_(scale).view(q.shape)
    dk = (ds.mT @ q.to(dtype).reshape(*shape, q.shape[3])).mul_(scale)
    return dq, dk, weights.mT @ do


def split_lse(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 lse as ``shift``, ``share`` of ``dtype``: ``exp(score - lse) = exp2(score * log2 e - shift) * share``.

    Rows of grad_out and delta times `share` make all gradients right, at no cost for each score.
    """
    exact = lse * _LOG2_E
    shift = exact.to(dtype)
    # Beyond 2^24 scores of one row differ by 1 or more, and float64 knows less and less of the remainder.
    rest = torch.where(shift.abs() < 2**24, shift.to(lse.dtype) - exact, 0)
    return shift, rest.exp2_().to(dtype)


def _scores(q: Tensor, k: Tensor, start: Tensor, end: Tensor, scale: float) -> Tensor:
    """``[B, K, G * Q, T]``, times log2 e; -inf where masked."""
    dtype = lse_dtype(q)
    folded = (q.to(dtype) * (scale * _LOG2_E)).reshape(*k.shape[:2], -1, q.shape[3])
    scores = folded @ k.to(dtype).mT
    spans = start.numpy(), end.numpy()
    bias = _bias(spans[0].tobytes(), spans[1].tobytes(), spans[0].shape, spans[0].dtype.str, k.shape[2], dtype)
    scores.unflatten(2, (-1, q.shape[2])).add_(bias)
    return scores


@functools.lru_cache(maxsize=8)  # layers, their forwards and backwards have the same few masks
def _bias(start: bytes, end: bytes, shape: tuple[int, ...], kind: str, keys: int, dtype: torch.dtype) -> Tensor:
    """0 where a row reads a key and -inf elsewhere, ``[B or 1, 1, 1, Q, T]``; of spans ``[B or 1, N, Q]``."""
    first, last = (np.frombuffer(x, kind).reshape(*shape, 1) for x in (start, end))
    key = np.arange(keys, dtype=kind)
    reads = torch.from_numpy(((first <= key) & (key < last)).any(1))
    return torch.where(reads, 0.0, -math.inf).to(dtype)[:, None, None]
