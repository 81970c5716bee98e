"""What tests compare with: dense float64 attention of the whole sequence, free of spanwise code."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch


class Problem(NamedTuple):
    """One attention problem over the whole sequence, and what dense float64 attention makes of it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under a bool mask ``[B, Tq, Tk]``; out and lse. Rows without a key: 0 and −inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores.masked_fill(~visible.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    some = visible.any(-1).unsqueeze(1)
    weights = torch.exp(scores - torch.where(some, lse, torch.zeros_like(lse)).unsqueeze(-1))
    return weights @ v, lse


def make_problem(
    visible: np.ndarray,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    """Random q, k, v and cotangent in `dtype`, with float64 results of exactly those numbers.

    Args:
        visible: bool ``[1 or batch, S, S]``.
        heads: query heads, key/value heads.
        dims: query/key head dim, value head dim.
    """
    generator = torch.Generator().manual_seed(seed)
    length = visible.shape[-1]

    def draw(num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(batch, num_heads, length, dim, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = draw(heads[0], dims[0]), draw(heads[1], dims[0]), draw(heads[1], dims[1])
    grad_out = draw(heads[0], dims[1])
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, torch.from_numpy(visible).expand(batch, length, length))
    out.backward(grad_out.double())
    dq, dk, dv = (x.grad for x in leaves)
    return Problem(q, k, v, grad_out, out.detach(), lse.detach(), dq, dk, dv)


def reached_by(visible: np.ndarray, tensor: str, tokens: slice) -> tuple[torch.Tensor, ...]:
    """Tokens of out, dq, dk and dv, bool ``[S]`` each, that may be NaN if `tokens` of `tensor` are.

    Args:
        visible: bool ``[S, S]``.
        tensor: "q", "k", "v" or "grad_out".
    """
    reads, poisoned = torch.from_numpy(visible), torch.zeros(visible.shape[0], dtype=torch.bool)
    poisoned[tokens] = True
    rows = reads[:, poisoned].any(1) if tensor in ("k", "v") else poisoned & reads.any(1)
    keys = reads[rows].any(0)
    return rows & (tensor != "grad_out"), rows, keys, keys


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """``max |x - reference| / max |reference|``; 0 for two empty tensors."""
    if reference.numel() == 0:
        assert x.shape == reference.shape
        return 0.0
    return float((x.double() - reference).abs().max() / reference.abs().max().clamp(min=1e-300))


def chunk_of(position: np.ndarray, count: int, num_chunks: int, block_size: int, distance: int) -> np.ndarray:
    """The chunk in which each token travels with exchange "needed", token by token.

    Args:
        position: int64 ``[n]``, place of the token in its pair's list.
        count: tokens of that list, at least one.
        distance: receiver minus sender.

    Returns:
        int64 ``[n]`` in ``[0, num_chunks)``.
    """
    if num_chunks == 1:
        return np.zeros_like(position)
    blocks = -(-count // block_size)
    return (position // block_size * num_chunks // max(blocks, 1) + distance) % num_chunks
