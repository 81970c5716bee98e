"""FlexAttention on the CPU, with the lse that torch's CPU kernel does not return. Inference only; called by `flex`.

The lse is read off the kernel's own softmax. A *sentinel*, one key more, gets a score of our choice, the row's
*anchor* c. Two channels of the values tell how the softmax divides between the real keys, r, and the sentinel, s; then

    r / s = sum_j exp(score_j) / exp(c),    lse = c + log r - log s,

with the relative accuracy of float32 as long as neither share underflows, that is |lse - c| < 87. A good anchor:

- Without a score_mod, the mean score E under the softmax. lse - E is the softmax's entropy, between 0 and log T
  whatever the scores are, and E needs no look at the scores: it is scale * q @ (mean key), and the mean key comes out
  of the same call as the output if the keys stand beside the values.
- With a score_mod, the lse at temperature 8, times 8, found the same way with anchor 0. It lies between the row's
  maximum and the maximum + 8 log n for n visible keys, and can be read while the scores are within 8 * 80.

Letters of shapes: see `_checks`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from spanwise.attention.kernels._flex_tables import FlexTables, Mod, block_mask

_TEMPERATURE = 8.0
_LARGEST = 80.0  # exp of it and of its negative are normal float32 numbers


def roomy(pos: torch.Tensor) -> torch.Tensor:
    """``pos`` ``[B or 1, T]`` padded to a length that is one number for any T up to 131,072, then doubling.

    A score_mod that captures a tensor of dynamic size trips the CPU kernel's code generation in torch 2.13 (it replaces
    the name of one size symbol inside the name of another).
    """
    room = 1 << 17
    while room < pos.shape[1]:
        room *= 2
    return _realized(F.pad(pos, (0, room - pos.shape[1])))


def _realized(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, in a buffer when compiled: the CPU kernel cannot capture an expression still to be fused."""
    return x.as_strided(x.shape, x.stride())


def flex_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible_BQ: torch.Tensor,
    tables: FlexTables,
    mask_mod: Mod,
    score_mod: Mod | None,
    *,
    scale: float,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse, float32.

    Args:
        q, k, v: float32, contiguous ``[B, H, Q, D]``, ``[B, K, T, D]``, ``[B, K, T, V]``.
        visible_BQ: Keys that each row reads, integer ``[B or 1, Q]``.
        tables, mask_mod, score_mod: Blocks and functions of FlexAttention, without the sentinel.
    """
    gqa = q.shape[1] != k.shape[1]
    batch, kv_heads, kv_len, _ = k.shape
    v_dim = v.shape[3]

    # The sentinel is key 0, and has a block of its own in front of the others.
    padded_k = F.pad(k, (0, 0, block_size, 0))
    key_T = torch.arange(kv_len + block_size)
    shares_T2 = torch.stack((key_T >= block_size, key_T == 0), -1).float()
    shares = shares_T2.expand(batch, kv_heads, -1, -1)

    def with_sentinel(values: torch.Tensor, anchor_BHQ: torch.Tensor | None, temperature: float) -> torch.Tensor:
        captured = None if anchor_BHQ is None else _realized(anchor_BHQ)

        def mask(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
            return (kv_idx == 0) | mask_mod(b, h, q_idx, kv_idx - block_size)

        def mod(
            score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
        ) -> torch.Tensor:
            if score_mod is not None:
                # At the sentinel's block too the function must meet only indices that exist.
                score = score_mod(score, b, h, q_idx, (kv_idx - block_size).clamp(min=0)) / temperature
            anchor = torch.zeros_like(score) if captured is None else captured[b, h, q_idx]
            return torch.where(kv_idx == 0, anchor, score)

        blocks = BlockMask(
            (q.shape[2], padded_k.shape[2]),
            kv_num_blocks=tables.kv_num_blocks + 1,
            kv_indices=F.pad(tables.kv_indices + 1, (1, 0)),
            full_kv_num_blocks=tables.full_kv_num_blocks,
            full_kv_indices=tables.full_kv_indices + 1,
            q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None,
            BLOCK_SIZE=(block_size, block_size),
            mask_mod=mask,
        )  # fmt: skip
        return flex_attention(q, padded_k, values, score_mod=mod, block_mask=blocks, scale=scale, enable_gqa=gqa)

    def ratio(out: torch.Tensor) -> torch.Tensor:
        """log r - log s from the last two channels."""
        return out[..., -2].log() - out[..., -1].log()

    if score_mod is None:
        blocks = block_mask(q.shape[2], kv_len, tables, mask_mod, block_size, transposed=False)
        means = flex_attention(q, k, torch.cat((v, k), -1), block_mask=blocks, scale=scale, enable_gqa=gqa)
        out, mean_key = means.split((v_dim, k.shape[3]), -1)
        anchor = scale * (q * mean_key).sum(-1)
        return out, anchor + ratio(with_sentinel(shares, anchor, 1.0))

    hot = ratio(with_sentinel(shares, None, _TEMPERATURE)).clamp(-_LARGEST, _LARGEST)
    # Between max and max + 8 log n: aim at the middle.
    anchor = _TEMPERATURE * (hot - 0.5 * visible_BQ.clamp(min=1).log()[:, None])
    both = with_sentinel(torch.cat((F.pad(v, (0, 0, block_size, 0)), shares), -1), anchor, 1.0)
    share = both[..., -2:-1]
    out = torch.where(share > 0, both[..., :v_dim] / share, 0.0)
    return out, anchor + ratio(both)
