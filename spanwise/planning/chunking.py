"""Cut of the K/V that ranks need of one another into chunks, for exchange "needed". Pure arrays.

Sender and receiver both know, from the plan, the list of tokens that goes from one to the other. Each list is cut into
parts of whole blocks, as equal as possible. A chunk holds one part of every list, so it has nearly the proportions of
the whole traffic. The first part rotates from pair to pair, so that short lists fill all chunks alike.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64

# Columns of a table of moves, int64 `[m, 5]`: in a batch row, a group receives a run of keys from another.
ROW, RECEIVER, SENDER, START, STOP = range(5)


def chunk_tokens(traffic: Int64, num_chunks: int, block_size: int) -> Int64:
    """Tokens of each pair in each chunk, ``[num_chunks, P, P]``, from `traffic` ``[P receivers, P senders]``."""
    if num_chunks == 1:
        return traffic[None].astype(np.int64)
    moved = np.zeros((num_chunks, traffic.size), np.int64)
    pair = np.flatnonzero(traffic)  # often few talk
    receiver, sender = np.divmod(pair, traffic.shape[1])
    tokens, before = traffic.ravel()[pair], np.zeros_like(pair)
    blocks = -(-tokens // block_size)
    at = (receiver - sender) % num_chunks * traffic.size + pair
    for p in range(1, num_chunks + 1):  # part p - 1 has the blocks j with j * num_chunks // blocks == p - 1
        end = np.minimum(-(-p * blocks // num_chunks) * block_size, tokens)
        moved.ravel()[at] = end - before
        at, before = (at + traffic.size) % moved.size, end
    return moved.reshape(num_chunks, *traffic.shape)


def num_chunks(traffic: Int64, stages: int, block_size: int) -> int:
    """`stages` if some pair has that many blocks; else 1, or 0 if nothing travels.

    Few numbers are possible, because torch.compile makes one graph for each.
    """
    blocks = -(-int(traffic.max(initial=0)) // block_size)
    return stages if blocks >= stages else min(blocks, 1)


def cut(moves: Int64, num_chunks: int, block_size: int) -> tuple[Int64, Int64]:
    """Moves of one group, cut where their chunk changes, and the chunk of each.

    Args:
        moves: all that one group receives, or all that it sends; by batch row, then start.

    Returns:
        Moves by the other group, batch row and start, int64 ``[m, 5]``, and int64 ``[m]`` in ``[0, num_chunks)``.
    """
    apart = moves[:, RECEIVER] - moves[:, SENDER]
    order = np.argsort(apart, kind="stable")
    moves = moves[order]
    if num_chunks == 1 or len(moves) == 0:
        return moves, np.zeros(len(moves), np.int64)
    # The lists of all pairs, one after the other, are positions of one line. Part p of a list ends at `ends[:, p]`.
    apart, first = np.unique(apart[order], return_index=True)
    tokens = moves[:, STOP] - moves[:, START]
    begin, count = np.cumsum(tokens) - tokens, np.add.reduceat(tokens, first)
    blocks = -(-count // block_size)
    parts = -(-np.arange(1, num_chunks + 1) * blocks[:, None] // num_chunks) * block_size
    ends = (begin[first][:, None] + np.minimum(parts, count[:, None])).ravel()
    edges = np.unique(np.concatenate([begin, ends]))
    left = edges[:-1]
    move = np.searchsorted(begin, left, side="right") - 1
    pair, part = np.divmod(np.searchsorted(ends, left, side="right"), num_chunks)
    pieces = moves[move]
    pieces[:, START] += left - begin[move]
    pieces[:, STOP] = pieces[:, START] + np.diff(edges)
    return pieces, (part + apart[pair]) % num_chunks
