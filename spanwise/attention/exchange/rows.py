"""Copies between two layouts of K/V: one row a token, as they travel, and by head, as attention takes them."""

# B batch, H heads of K/V, T tokens of a rank, K keys of a chunk, D head dim, F features of a token: K, then V

from __future__ import annotations

import torch


def side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[B, T, F]`` from ``[B, H, T, D]`` and ``[B, H, T, Dv]``: one collective moves both."""
    return torch.cat([k.transpose(1, 2).flatten(2), v.transpose(1, 2).flatten(2)], dim=-1)


def by_head(data_BKF: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, H, K, D]`` of a chunk, with the heads and head dims of `k` and `v`; views."""
    k_flat, v_flat = data_BKF.split([k.shape[1] * k.shape[3], v.shape[1] * v.shape[3]], dim=-1)
    return (
        k_flat.unflatten(-1, (k.shape[1], k.shape[3])).transpose(1, 2),
        v_flat.unflatten(-1, (v.shape[1], v.shape[3])).transpose(1, 2),
    )
