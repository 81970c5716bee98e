"""Dense span-masked attention in differentiable torch ops: kernel "reference", the oracle for every other kernel.

Runs on any device and in any float dtype, materialises the full Q x T score matrix, takes every option
(`score_mod`, `softcap`). Letters of shapes: see `_checks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels._checks import check_problem
from spanwise.attention.kernels._guard import enter, leave
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, lse_dtype


class Reference(Kernel):
    """Dense attention on any device, with every option; see `reference`."""

    name = "reference"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        return reference(
            q, k, v, chunk.start, chunk.end,
            scale=options.scale_for(q), score_mod=options.score_mod, softcap=options.softcap,
            q_pos=q_pos, kv_pos=chunk.kv_pos,
        )  # fmt: skip

    def queries(self, q: Tensor) -> Tensor:
        """`q` in float32 (float64 for float64): its gradient is summed over all chunks before it is rounded."""
        return q.to(lse_dtype(q))

    def attend_part(
        self, queries: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """`attend` with out in float32 (float64 for float64): it is rounded once, after the merge."""
        return super().attend_part(queries, k.to(queries.dtype), v.to(queries.dtype), chunk, q_pos, options)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    scale: float,
    score_mod: ScoreMod | None = None,
    q_pos: Tensor | None = None,
    kv_pos: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`Kernel.attend`, dense. float64 is computed in float64, every other dtype in float32.

    A row is NaN if its q or a key or value that it reads is not finite; so are its gradients and those of all keys that
    it reads. All else is as exact as without. Tensors that a `score_mod` reads get no gradient from such a row. It is
    vmapped over scalars; positions are ``0, 1, …`` if not given.

    >>> q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    >>> start, end = torch.zeros(1, 1, 6, dtype=torch.int32), torch.arange(1, 7, dtype=torch.int32).view(1, 1, 6)
    >>> out, lse = reference(q, k, k, start, end, scale=8**-0.5)  # causal
    >>> tuple(out.shape), tuple(lse.shape)
    ((1, 4, 6, 8), (1, 4, 6))
    """
    check_problem(q, k, v, start, end, softcap)
    batch, num_heads, q_len, _ = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype = lse_dtype(q)
    with torch.autocast(q.device.type, enabled=False):  # or its products would be rounded to bfloat16
        keys = torch.arange(kv_len, device=q.device)
        mask = ((keys >= start[..., None]) & (keys < end[..., None])).any(1)  # [B or 1, Q, T]
        exact_q, k, v, *rows = enter(q.to(dtype), k.to(dtype), v.to(dtype), mask, (end > start).any(1))
        group = num_heads // kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

        scores = (exact_q @ k.mT) * scale
        if score_mod is not None and scores.numel() > 0:
            scores = _apply_score_mod(scores, score_mod, q_pos, kv_pos)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[:, None], float("-inf"))

        if kv_len == 0:
            top = scores.new_full((batch, num_heads, q_len, 1), float("-inf"))
        else:
            top = scores.detach().amax(-1, keepdim=True)
        has_key = top != float("-inf")
        # Scores that overflow: the weights of keys that a row does not read stay 0.
        top = torch.where(top.isfinite(), top, 0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        lse = torch.where(has_key, top + torch.log(torch.where(has_key, total, 1)), float("-inf")).squeeze(-1)
        out = (weights @ v) / torch.where(has_key & total.isfinite(), total, 1)
        out, lse = leave(out, lse, *rows)
    return out.to(q.dtype), lse


def _apply_score_mod(scores: Tensor, score_mod: ScoreMod, q_pos: Tensor | None, kv_pos: Tensor | None) -> Tensor:
    """``score_mod`` on every element of scores ``[B, H, Q, T]``, vmapped as in FlexAttention's eager form."""
    batch, num_heads, q_len, kv_len = scores.shape
    device = scores.device
    q_idx = torch.arange(q_len, device=device)[None] if q_pos is None else q_pos
    kv_idx = torch.arange(kv_len, device=device)[None] if kv_pos is None else kv_pos
    if q_idx.shape[-1] != q_len or kv_idx.shape[-1] != kv_len:
        raise ValueError(
            f"q_pos and kv_pos must give {q_len} and {kv_len} positions, got {q_idx.shape[-1]} and {kv_idx.shape[-1]}"
        )
    mapped = score_mod
    for in_dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, 0, 0)):
        mapped = torch.vmap(mapped, in_dims=in_dims)
    with _torch.index_with_scalars():
        return mapped(
            scores,
            torch.arange(batch, device=device),
            torch.arange(num_heads, device=device),
            q_idx.expand(batch, q_len),
            kv_idx.expand(batch, kv_len),
        ).to(scores.dtype)
