"""Conversions between the dual-chunk order of packed sequences and storage order, on whole tensors.

For batches in the THD context parallel layout of TransformerEngine and Megatron, which concatenates the ranks' shards.
A plan's `shard` needs neither function: it takes tokens in storage order.
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
    """Reorders tokens from the concatenated dual-chunk shards of all ranks to storage order. Differentiable.

    Args:
        x: ``T`` tokens along `dim`: rank 0's shard, then rank 1's, … (as an all-gather of the shards returns them).
        cu_seqlens_padded: storage offsets ``[num_sequences + 1]``: list, numpy array or torch tensor. The host does
            not read, and so does not check, a tensor on an accelerator; indices are computed on the device of `x`.
        num_ranks: ranks of the dual-chunk order (see `Packing.dual_chunk_layout`).

    Returns:
        `x` with its tokens along `dim` in storage order.

    Raises:
        ValueError: `dim` does not exist; or ``T``, or a slot of offsets that the host can read, is not a multiple of
            ``2 * num_ranks``.

    >>> import torch
    >>> from spanwise import dualchunk_to_contiguous_order_thd
    >>> dualchunk_to_contiguous_order_thd(torch.tensor([0, 3, 1, 2]), [0, 4], num_ranks=2)
    tensor([0, 1, 2, 3])
    """
    return x.index_select(dim, _positions(x, cu_seqlens_padded, num_ranks, dim))


def contiguous_to_dualchunk_order_thd(
    x: torch.Tensor, cu_seqlens_padded: Any, num_ranks: int, dim: int = 0
) -> torch.Tensor:
    """Reorders tokens from storage order to the concatenated dual-chunk shards of all ranks. Differentiable.

    The inverse of `dualchunk_to_contiguous_order_thd`, with the same arguments. The shard of rank ``r`` is the ``r``-th
    of `num_ranks` equal parts of the result.

    >>> import torch
    >>> from spanwise import contiguous_to_dualchunk_order_thd
    >>> contiguous_to_dualchunk_order_thd(torch.arange(4), [0, 4], num_ranks=2)
    tensor([0, 3, 1, 2])
    """
    position = _positions(x, cu_seqlens_padded, num_ranks, dim)
    return x.index_select(
        dim, torch.empty_like(position).scatter_(0, position, torch.arange(len(position)).to(position))
    )


def check_dim(x: torch.Tensor, dim: int) -> int:
    """`dim` counted from the front; ``ValueError`` if `x` has no such dim."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def check_batch_dim(x: torch.Tensor, dim: int, batch_dim: int | None, rows: int, why: str) -> int:
    """`batch_dim` counted from the front, which must have `rows` and differ from `dim`; `why` begins the message."""
    if batch_dim is None or check_dim(x, batch_dim) == check_dim(x, dim) or x.shape[batch_dim] != rows:
        raise ValueError(
            f"{why}, so batch_dim must be a dim of that size other than dim={dim}; got batch_dim={batch_dim} of a "
            f"tensor of shape {tuple(x.shape)}"
        )
    return check_dim(x, batch_dim)


def _positions(x: torch.Tensor, cu_seqlens_padded: Any, num_ranks: int, dim: int) -> torch.Tensor:
    """Where the dual-chunk order has each token of storage, int64 ``[T]``, on the device of `x`."""
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
    # A copy to an accelerator need not block the host; a copy from one must, because it is read next.
    offsets = cu_seqlens_padded.to(x.device, torch.int64, non_blocking=x.device.type != "cpu")
    first, last = torch.zeros(1, dtype=torch.int64, device=x.device), torch.full_like(offsets[:1], tokens)
    edges = torch.cat([first, offsets, last])  # of slots, and of storage before and after them
    token = torch.arange(tokens, device=x.device)
    slot = torch.searchsorted(edges, token, right=True) - 1
    within = token - edges[slot]
    size = ((edges[slot + 1] - edges[slot]) // (2 * num_ranks)).clamp(min=1)
    chunk = within // size
    second = chunk >= num_ranks
    rank = chunk.where(~second, 2 * num_ranks - 1 - chunk)
    return rank * (tokens // num_ranks) + edges[slot] // num_ranks + within - chunk * size + size * second
