"""Conversions between the dual-chunk order of packed sequences and the order of storage, on whole tensors.

For batches laid out for TransformerEngine's or Megatron's THD context parallelism, where the ranks' shards stand one
after the other. A plan's `shard` needs neither function: it takes tokens in the order of storage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spanwise.layouts.packing import check_chunks, check_storage
from spanwise.masks.checks import check_offsets


def dualchunk_to_contiguous_order_thd(
    x: torch.Tensor, cu_seqlens_padded: Any, num_ranks: int, dim: int = 0
) -> torch.Tensor:
    """From all ranks' dual-chunk shards, one after the other, to storage order. Differentiable.

    Args:
        x: ``T`` tokens along `dim`: rank 0's shard, then rank 1's, … (as an all-gather of the shards returns them).
        cu_seqlens_padded: storage offsets ``[num_sequences + 1]``: list, numpy array or torch tensor. A tensor on an
            accelerator is not read by the host, and hence not checked either; indices are computed where `x` is.
        num_ranks: ranks of the dual-chunk order (see `Packing.dual_chunk_layout`).

    Returns:
        `x` with its tokens along `dim` in storage order.

    Raises:
        ValueError: `dim` does not exist, or ``T``, or a slot of offsets that the host can read, is no multiple of
            ``2 * num_ranks``.
    """
    edges, start, slot = _slots(x, cu_seqlens_padded, num_ranks, dim, 1)
    within = start - edges[slot]
    size = ((edges[slot + 1] - edges[slot]) // (2 * num_ranks)).clamp(min=1)
    chunk = within // size
    second = chunk >= num_ranks
    rank = chunk.where(~second, 2 * num_ranks - 1 - chunk)
    position = rank * (x.shape[dim] // num_ranks) + edges[slot] // num_ranks + within - chunk * size + size * second
    return x.index_select(dim, position)


def contiguous_to_dualchunk_order_thd(
    x: torch.Tensor, cu_seqlens_padded: Any, num_ranks: int, dim: int = 0
) -> torch.Tensor:
    """From storage order to all ranks' dual-chunk shards, one after the other. Differentiable.

    The inverse of `dualchunk_to_contiguous_order_thd`, with the same arguments; rank ``r``'s shard is the ``r``-th of
    `num_ranks` equal parts of the result.
    """
    edges, position, slot = _slots(x, cu_seqlens_padded, num_ranks, dim, num_ranks)
    rank = position // max(x.shape[dim] // num_ranks, 1)
    within = position - rank * (x.shape[dim] // num_ranks) - edges[slot] // num_ranks
    size = (edges[slot + 1] - edges[slot]) // (2 * num_ranks)
    second = within >= size
    chunk = rank.where(~second, 2 * num_ranks - 1 - rank)
    return x.index_select(dim, edges[slot] + chunk * size + within - size * second)


def check_dim(x: torch.Tensor, dim: int) -> int:
    """`dim` counted from the front; ``ValueError`` if `x` has no such dim."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _slots(
    x: torch.Tensor, cu_seqlens_padded: Any, num_ranks: int, dim: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """0, storage offsets and `x`'s tokens; every token's position; its slot if every slot is cut to ``1 / parts``."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    tokens = x.shape[check_dim(x, dim)]
    if tokens % (2 * num_ranks):
        raise ValueError(f"dim {dim} must be a multiple of 2 * num_ranks = {2 * num_ranks} tokens, got {tokens}")
    if not isinstance(cu_seqlens_padded, torch.Tensor) or cu_seqlens_padded.device.type == "cpu":
        host = check_offsets(cu_seqlens_padded, "cu_seqlens_padded", start_at_zero=False)
        check_storage(f"dim {dim}", host, tokens)
        check_chunks(np.concatenate([[0], host, [tokens]]), num_ranks)
        cu_seqlens_padded = torch.from_numpy(host.copy())
    # On the way to an accelerator the host need not wait; what comes from one may be read at once.
    offsets = cu_seqlens_padded.to(x.device, torch.int64, non_blocking=x.device.type != "cpu")
    first, last = torch.zeros(1, dtype=torch.int64, device=x.device), torch.full_like(offsets[:1], tokens)
    edges = torch.cat([first, offsets, last])
    position = torch.arange(tokens, device=x.device)
    own = position % max(tokens // parts, 1)
    slot = torch.searchsorted(edges // parts, own, right=True) - 1
    return edges, position, slot
