"""Attention of small problems by torch's flash kernel with a dense mask, for kernel "sdpa".

The loop of `sdpa` spends 20 to 30 calls of torch on a tile, however small. Below `_MOST_SCORES` computing masked scores
too is the cheaper way.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spanwise.attention.kernels.merge import lse_dtype

# Scores of all heads up to which this is faster than the loop, forward and backward.
_MOST_SCORES = 1 << 18
_LARGE_LSE = 16.0  # its lse is float32: beyond, rounding it would show in the weights
_LOG2_E = math.log2(math.e)
_aten = torch.ops.aten


def is_small(q: Tensor, k: Tensor, softcap: float | None) -> bool:
    """Whether this is faster than the loop; a softcap is left to the loop."""
    return softcap is None and 0 < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= _MOST_SCORES


def forward(q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Out in float32 at least, and lse in float64; None where the loop is needed to be exact."""
    bias, is_empty = _mask_of(start, end, q, k)
    tensors = _alike(q, k, v)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, False, attn_mask=bias, scale=scale)
    if not _is_exact(lse):
        return None
    lse = lse.double()
    return out[..., : v.shape[3]], lse if is_empty is None else lse.masked_fill_(is_empty, -math.inf)


def backward(
    grad_out: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    start: Tensor,
    end: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk, dv in float32 at least, from q, k, v, out and lse; None as of `forward`."""
    q, k, v, out, lse = tensors
    bias, is_empty = _mask_of(start, end, q, k)
    given, row_lse = _alike(q, k, v), lse.to(lse_dtype(q))
    if is_empty is not None:
        row_lse = row_lse.masked_fill(lse == -math.inf, 0)
    if not _is_exact(row_lse):
        return None
    of_out = [_padded(x.to(row_lse.dtype), given[0].shape[3]) for x in (grad_out, out)]
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        of_out[0], *given, of_out[1], row_lse, 0.0, False, attn_mask=bias, scale=scale
    )
    dq, dk, dv = (x[..., : y.shape[3]] for x, y in zip(grads, (q, k, v), strict=True))
    if q.shape[1] > k.shape[1]:  # summed over the query heads that read a head
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def split_lse(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 lse as ``shift``, ``share`` of ``dtype``: ``exp(score - lse) = exp2(score * log2 e - shift) * share``.

    Rows of grad_out and delta times `share` make all gradients right, at no cost for each score.
    """
    exact = lse * _LOG2_E
    shift = exact.to(dtype)
    # Beyond 2^24 scores of one row differ by 1 or more, and float64 knows less and less of the remainder.
    rest = torch.where(shift.abs() < 2**24, shift.to(lse.dtype) - exact, 0)
    return shift, rest.exp2_().to(dtype)


def _alike(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """q, k and v in one dtype, with equally many heads and features, as torch's kernel wants them."""
    dtype, dim, group = lse_dtype(q), max(q.shape[3], v.shape[3]), q.shape[1] // k.shape[1]
    wide = [_padded(x.to(dtype), dim) for x in (q, k, v)]
    return wide if group == 1 else [wide[0], *(x.repeat_interleave(group, 1) for x in wide[1:])]


def _padded(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[3] == dim else F.pad(x, (0, dim - x.shape[3]))


def _is_exact(lse: Tensor) -> bool:
    """Whether this lse, where it is float32, is as exact as the scores; NaN is not."""
    return lse.dtype == torch.float64 or bool(lse.abs().amax() <= _LARGE_LSE)


def _mask_of(start: Tensor, end: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    first, last = start.numpy(), end.numpy()
    return _dense_mask(first.tobytes(), last.tobytes(), first.shape, first.dtype.str, k.shape[2], lse_dtype(q))


@functools.lru_cache(maxsize=8)  # layers, their forwards and backwards have the same few masks
def _dense_mask(
    start: bytes, end: bytes, shape: tuple[int, ...], kind: str, num_keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Of spans ``[B or 1, N, Q]``: 0 where a query reads a key and -inf elsewhere, and rows without a key, if any."""
    first, last = (np.frombuffer(x, kind).reshape(*shape, 1) for x in (start, end))
    key = np.arange(num_keys, dtype=kind)
    reads = torch.from_numpy(((first <= key) & (key < last)).any(1))[:, None]
    is_empty = ~reads.any(-1)
    return torch.where(reads, 0.0, -math.inf).to(dtype), is_empty if is_empty.any() else None
