"""Shifts inside the documents of a packed sequence, token by token.

`sharding` builds labels and rolls from them. A `Packing` gives each token its document id: a number >= 0 that
neighbouring documents do not share, or -1 in padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spanwise import _torch


def shift(ids: torch.Tensor, shifts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of token ``i - shifts`` for each token ``i``, and whether it exists in the same document.

    Args:
        ids: document of each token, int64 ``[rows, seq_len]``.

    Returns:
        Source int64 ``[seq_len]``, clipped to the sequence; and bool ``[rows, seq_len]``: false where the source does
        not exist or lies in another document, and where the token is padding.
    """
    wanted = torch.arange(ids.shape[1], device=ids.device) - shifts
    source = wanted.clamp(0, max(ids.shape[1] - 1, 0))
    return source, (source == wanted) & (ids[:, source] == ids) & (ids >= 0)


def traced_ids(cu_seqlens: Any, seq_len: int, device: torch.device) -> torch.Tensor:
    """Document of each token in compiled code, int64 ``[rows, seq_len]``, from offsets as `check_offset_rows` takes.

    The host does not read offsets in tensors: wrong ones stop the program when it runs.
    """
    if isinstance(cu_seqlens, Sequence):
        nested = len(cu_seqlens) > 0 and not isinstance(cu_seqlens[0], int)
    else:
        nested = len(cu_seqlens.shape) > 1
    at = torch.arange(seq_len, device=device)
    ids = []
    for row in cu_seqlens if nested else [cu_seqlens]:
        cu = _torch.to_device(torch.as_tensor(row), device)
        if cu.dim() != 1 or cu.shape[0] == 0 or cu.is_floating_point():
            raise ValueError(f"cu_seqlens must be integers [number of documents + 1], got {cu.dtype} {tuple(cu.shape)}")
        good = (cu[0] == 0) & (cu[-1] == seq_len) & (cu[1:] >= cu[:-1]).all()
        _torch.assert_async(good, f"cu_seqlens must begin with 0, not decrease, and end with {seq_len}")
        ids.append(torch.bucketize(at, cu, right=True))
    return torch.stack(ids)
