"""PTRR on the device: the schedule of `balancers.ptrr` as torch ops, for use inside a compiled step.

For models that compute block counts on the accelerator, for instance from a mask that depends on data. Planning on the
host does not need it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ptrr_schedule(process_time: Tensor, num_ranks: int) -> Tensor:
    """Assigns blocks to ranks in zig-zag order of falling processing time (PTRR, pytorch/pytorch #163617).

    Uses torch ops whose shapes follow from the argument's shape alone: no host sync, and compilable with
    ``fullgraph=True``. Equal times keep the order of their blocks. With ``P = num_ranks``, rank r takes the sorted
    blocks r, 2P-1-r, 2P+r, ….

    Args:
        process_time: ``[num_blocks]`` or ``[batch, num_blocks]``, any real dtype and device; `SpanMask.block_counts`
            or `BlockMask.kv_num_blocks` plus `full_kv_num_blocks`, for instance.
        num_ranks: number of ranks; need not divide ``num_blocks``.

    Returns:
        int64 ``[num_ranks, ceil(num_blocks / num_ranks)]``, or ``[batch, …]`` of that: each rank's blocks, ascending.
        The row of a rank that holds one block less than others ends with -1.

    Raises:
        ValueError: ``num_ranks`` below 1, or ``process_time`` without exactly one or two dims.

    >>> import torch
    >>> from spanwise import ptrr_schedule
    >>> ptrr_schedule(torch.tensor([9, 1, 7, 3, 5]), num_ranks=2)
    tensor([[ 0,  1,  3],
            [ 2,  4, -1]])
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if process_time.ndim not in (1, 2):
        raise ValueError(
            f"process_time must have shape [num_blocks] or [batch, num_blocks], got {list(process_time.shape)}"
        )
    num_blocks = process_time.shape[-1]
    laps = -(-num_blocks // num_ranks)
    order = torch.sort(process_time, dim=-1, descending=True, stable=True).indices
    # Fill the last lap with block num_blocks: it sorts behind all others and becomes -1.
    order = torch.nn.functional.pad(order, (0, laps * num_ranks - num_blocks), value=num_blocks)
    order = order.unflatten(-1, (laps, num_ranks))
    is_forward = (torch.arange(laps, device=order.device) % 2 == 0).unsqueeze(-1)
    assigned = torch.where(is_forward, order, order.flip(-1)).transpose(-1, -2).sort(dim=-1).values
    return assigned.masked_fill(assigned == num_blocks, -1)
