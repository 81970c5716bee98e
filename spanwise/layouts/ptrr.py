"""PTRR on the device: the schedule of `balancers.PTRR` as torch ops, for use inside a compiled step.

Planning on the host does not need it; a model that computes its block counts on the accelerator, for instance from a
mask that depends on data, does. Imports torch and nothing from spanwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ptrr_schedule(process_time: Tensor, num_ranks: int) -> Tensor:
    """Deals blocks to ranks, by falling processing time and in zig-zag order (PTRR, pytorch/pytorch #163617).

    Torch ops whose shapes follow from the argument's shape alone: no host sync, and compilable with ``fullgraph=True``.
    Equal times keep the order of their blocks. Rank r takes turns r, 2P-1-r, 2P+r, … of the sorted blocks, P being
    ``num_ranks``.

    Args:
        process_time: ``[num_blocks]`` or ``[batch, num_blocks]``, any real dtype and device; `SpanMask.block_counts`
            or `BlockMask.kv_num_blocks` plus `full_kv_num_blocks`, for instance.
        num_ranks: ranks to deal to; need not divide ``num_blocks``.

    Returns:
        int64 ``[num_ranks, ceil(num_blocks / num_ranks)]``, with the batch dim in front if there was one: each rank's
        blocks, ascending. Ranks that hold one block less than others have a -1 at the end of their row.

    Raises:
        ValueError: ``num_ranks`` below 1, or ``process_time`` not of one or two dims.
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
    # The missing blocks of the last lap count as block num_blocks: they sort behind all others, and are -1 in the end.
    order = torch.nn.functional.pad(order, (0, laps * num_ranks - num_blocks), value=num_blocks)
    order = order.unflatten(-1, (laps, num_ranks))
    is_forward = (torch.arange(laps, device=order.device) % 2 == 0).unsqueeze(-1)
    dealt = torch.where(is_forward, order, order.flip(-1)).transpose(-1, -2).sort(dim=-1).values
    return dealt.masked_fill(dealt == num_blocks, -1)
