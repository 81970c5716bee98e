"""FlexAttention on the CPU, with the lse that torch's CPU kernel does not return. Inference only; called by `flex`.

The lse is read off the kernel's own softmax. One more key, the *sentinel*, gets a score that we choose, the row's
*anchor* c. Two channels of the values show how the softmax divides between the real keys, r, and the sentinel, s; then

    r / s = sum_j exp(score_j) / exp(c),    lse = c + log r - log s,

with the relative accuracy of float32 while neither share underflows, that is |lse - c| < 87. A good anchor:

- Without a score_mod, the mean score E under the softmax. lse - E is the softmax's entropy, between 0 and log T for
  any scores. E is scale * q @ (mean key). The call that gives the output also gives the mean key, from the keys as
  further channels of the values.
- With a score_mod, the lse at temperature 8, times 8, found the same way with anchor 0. It lies between the row's
  maximum and the maximum + 8 log n for n visible keys. It is exact while the scores are within 8 * 80.

Letters of shapes: see `_checks`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from spanwise.attention.kernels._flex_tables import BLOCK_SIZE, FlexTables, Mod, block_mask

_TEMPERATURE = 8.0
_LARGEST = 80.0  # exp of it and of its negative are normal float32 numbers


def padded_positions(pos: Tensor) -> Tensor:
    """``pos`` ``[B or 1, T]`` padded to 131,072, or the next power of two: one length for nearly all T.

    A score_mod that captures a tensor of dynamic size breaks the CPU kernel's code generation in torch 2.13, which
    replaces the name of one size symbol inside the name of another.
    """
    length = 1 << 17
    while length < pos.shape[1]:
        length *= 2
    return _realized(F.pad(pos, (0, length - pos.shape[1])))


def _realized(x: Tensor) -> Tensor:
    """The same tensor, in a buffer when compiled: the CPU kernel cannot capture an expression not fused yet."""
    return x.as_strided(x.shape, x.stride())


def flex_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible_BQ: Tensor,
    tables: FlexTables,
    mask_mod: Mod,
    score_mod: Mod | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and lse, float32.

    Args:
        q, k, v: float32, contiguous ``[B, H, Q, D]``, ``[B, K, T, D]``, ``[B, K, T, V]``.
        visible_BQ: Keys that each row reads, integer ``[B or 1, Q]``.
        tables, mask_mod, score_mod: Blocks and functions of FlexAttention, without the sentinel.
    """
    gqa = q.shape[1] != k.shape[1]
    batch, kv_heads, kv_len, _ = k.shape
    v_dim = v.shape[3]

    padded_k = F.pad(k, (0, 0, BLOCK_SIZE, 0))
    key_T = torch.arange(kv_len + BLOCK_SIZE)
    shares_T2 = torch.stack((key_T >= BLOCK_SIZE, key_T == 0), -1).float()
    shares = shares_T2.expand(batch, kv_heads, -1, -1)
    blocks = _sentinel_blocks(q.shape[2], kv_len, tables, mask_mod)

    def with_sentinel(values: Tensor, anchor_BHQ: Tensor | None, temperature: float) -> Tensor:
        mod = _sentinel_mod(score_mod, anchor_BHQ, temperature)
        return flex_attention(q, padded_k, values, score_mod=mod, block_mask=blocks, scale=scale, enable_gqa=gqa)

    def ratio(out: Tensor) -> Tensor:
        """log r - log s from the last two channels."""
        return out[..., -2].log() - out[..., -1].log()

    if score_mod is None:
        own = block_mask(q.shape[2], kv_len, tables, mask_mod, transposed=False)
        means = flex_attention(q, k, torch.cat((v, k), -1), block_mask=own, scale=scale, enable_gqa=gqa)
        out, mean_key = means.split((v_dim, k.shape[3]), -1)
        anchor = scale * (q * mean_key).sum(-1)
        return out, anchor + ratio(with_sentinel(shares, anchor, 1.0))

    hot = ratio(with_sentinel(shares, None, _TEMPERATURE)).clamp(-_LARGEST, _LARGEST)
    # Between max and max + 8 log n: aim at the middle.
    anchor = _TEMPERATURE * (hot - 0.5 * visible_BQ.clamp(min=1).log()[:, None])
    both = with_sentinel(torch.cat((F.pad(v, (0, 0, BLOCK_SIZE, 0)), shares), -1), anchor, 1.0)
    share = both[..., -2:-1]
    out = torch.where(share > 0, both[..., :v_dim] / share, 0.0)
    return out, anchor + ratio(both)


def _sentinel_blocks(q_len: int, kv_len: int, tables: FlexTables, mask_mod: Mod) -> BlockMask:
    """The blocks of ``tables`` after one more block of keys, whose first key is the sentinel; every row reads it."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx == 0) | mask_mod(b, h, q_idx, kv_idx - BLOCK_SIZE)

    return BlockMask(
        (q_len, kv_len + BLOCK_SIZE),
        kv_num_blocks=tables.kv_num_blocks + 1,
        kv_indices=F.pad(tables.kv_indices + 1, (1, 0)),
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices + 1,
        q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=mask,
    )  # fmt: skip


def _sentinel_mod(score_mod: Mod | None, anchor_BHQ: Tensor | None, temperature: float) -> Mod:
    """``score_mod`` at a temperature, with the row's anchor (0 if None) as the sentinel's score."""
    captured = None if anchor_BHQ is None else _realized(anchor_BHQ)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if score_mod is not None:
            # In the sentinel's block, too, the function must get only indices that exist.
            score = score_mod(score, b, h, q_idx, (kv_idx - BLOCK_SIZE).clamp(min=0)) / temperature
        anchor = torch.zeros_like(score) if captured is None else captured[b, h, q_idx]
        return torch.where(kv_idx == 0, anchor, score)

    return mod
