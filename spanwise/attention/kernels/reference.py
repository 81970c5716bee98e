"""Dense span-masked attention in differentiable torch ops: kernel "reference", the oracle for every other kernel.

Runs on any device and in any float dtype, materialises the full Q x T score matrix, takes every option
(`score_mod`, `softcap`). Letters of shapes: see `base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, lse_dtype


class Reference(Kernel):
    """Dense attention on any device, with every option."""

    name = "reference"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """float64 is computed in float64, every other dtype in float32. A score_mod is vmapped over scalars."""
        batch, num_heads, q_len, _ = q.shape
        kv_heads, kv_len = k.shape[1], k.shape[2]
        dtype = lse_dtype(q)
        with torch.autocast(q.device.type, enabled=False):  # or its products would be rounded to bfloat16
            keys = torch.arange(kv_len, device=q.device)
            mask = ((keys >= chunk.start[..., None]) & (keys < chunk.end[..., None])).any(1)  # [B or 1, Q, T]
            group = num_heads // kv_heads
            k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))

            scores = q.to(dtype) @ k.mT * options.scale_for(q)
            if options.score_mod is not None and scores.numel() > 0:
                scores = _apply_score_mod(scores, options.score_mod, q_pos, chunk.kv_pos)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
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
            out = weights @ v / torch.where(has_key & total.isfinite(), total, 1)
        return out.to(q.dtype), lse

    def queries(self, q: Tensor) -> Tensor:
        """`q` in float32 (float64 for float64): its gradient is summed over all chunks before it is rounded."""
        return q.to(lse_dtype(q))

    def attend_part(
        self, queries: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """`attend` with out in float32 (float64 for float64): it is rounded once, after the merge."""
        return super().attend_part(queries, k.to(queries.dtype), v.to(queries.dtype), chunk, q_pos, options)


def _apply_score_mod(scores: Tensor, score_mod: ScoreMod, q_pos: Tensor, kv_pos: Tensor) -> Tensor:
    """``score_mod`` on every element of scores ``[B, H, Q, T]``, vmapped as in FlexAttention's eager form."""
    batch, num_heads, q_len, kv_len = scores.shape
    mapped = score_mod
    for in_dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None), (0, 0, None, 0, 0)):
        mapped = torch.vmap(mapped, in_dims=in_dims)
    with _torch.index_with_scalars():
        return mapped(
            scores,
            torch.arange(batch, device=scores.device),
            torch.arange(num_heads, device=scores.device),
            q_pos.expand(batch, q_len),
            kv_pos.expand(batch, kv_len),
        ).to(scores.dtype)
