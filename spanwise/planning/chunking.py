"""Cut of the K/V that ranks need of one another into chunks, for exchange "needed". Pure arrays.

Sender and receiver both know, from the plan, the list of tokens that goes from one to the other. Each list is cut into
parts of whole blocks, as equal as possible. A chunk holds one part of every list, so it has nearly the proportions of
the whole traffic. The first part rotates from pair to pair, so that short lists fill all chunks alike.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64


def chunk_of(position: Int64, count: Int64 | int, num_chunks: int, block_size: int, distance: Int64 | int) -> Int64:
    """The chunk in which each token travels.

    Args:
        position: int64 ``[n]``, place of the token in its pair's list.
        count: tokens of that list, at least one.
        distance: receiver minus sender.

    Returns:
        int64 ``[n]`` in ``[0, num_chunks)``.
    """
    if num_chunks == 1:
        return np.zeros_like(position)
    blocks = -(-np.asarray(count) // block_size)
    return (position // block_size * num_chunks // np.maximum(blocks, 1) + distance) % num_chunks


def chunk_tokens(traffic: Int64, num_chunks: int, block_size: int) -> Int64:
    """Tokens of each pair in each chunk, ``[num_chunks, P, P]``, from `traffic` ``[P receivers, P senders]``."""
    if num_chunks == 1:
        return traffic[None].astype(np.int64)
    moved = np.zeros((num_chunks, *traffic.shape), np.int64)
    receiver, sender = np.nonzero(traffic)  # few pairs talk
    tokens = traffic[receiver, sender]
    blocks = -(-tokens // block_size)
    # Part p has the blocks j with j * num_chunks // blocks == p.
    edges = [np.minimum(-(-p * blocks // num_chunks) * block_size, tokens) for p in range(num_chunks + 1)]
    for p in range(num_chunks):
        moved[(p + receiver - sender) % num_chunks, receiver, sender] = edges[p + 1] - edges[p]
    return moved


def num_chunks(traffic: Int64, stages: int, block_size: int) -> int:
    """`stages` if some pair has that many blocks; else 1, or 0 if nothing travels.

    Few numbers are possible, because torch.compile makes one graph for each.
    """
    blocks = -(-int(traffic.max(initial=0)) // block_size)
    return stages if blocks >= stages else min(blocks, 1)


def chunks_received(sender: Int64, rank: int, num_chunks: int, block_size: int) -> Int64:
    """The chunk in which each token comes to `rank`, from its `sender` ``[n]``, in the order in which that sends."""
    if num_chunks == 1:
        return np.zeros_like(sender)
    first = np.flatnonzero(np.diff(sender, prepend=-1))  # tokens of one sender come in long runs
    of, length = sender[first], np.diff(np.append(first, len(sender)))
    by_sender = np.argsort(of, kind="stable")
    total = np.cumsum(length[by_sender])
    count = np.bincount(of, length).astype(np.int64)
    before = np.empty(len(of), dtype=np.int64)  # tokens of earlier runs of the same sender
    before[by_sender] = total - length[by_sender] - (np.cumsum(count) - count)[of[by_sender]]
    position = np.arange(len(sender)) - np.repeat(first - before, length)
    counts, distance = (np.repeat(each, length) for each in (count[of], rank - of))
    return chunk_of(position, counts, num_chunks, block_size, distance)
