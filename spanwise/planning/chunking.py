"""How the K/V that ranks need of one another is cut into pieces: pure arrays, between `layout` and `plan`.

A sender and a receiver both know, from the plan, the list of tokens that goes from one to the other. Each such list is
cut into parts of whole blocks, as equal as they come; a piece is one part of every list. So every piece has nearly the
proportions of the whole traffic, and no rank becomes its bottleneck. Where the parts begin is rotated from pair to
pair, so that lists of fewer blocks than there are pieces fill all pieces alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


def piece_of(position: Int64, count: Int64 | int, num_pieces: int, block_size: int, distance: Int64 | int) -> Int64:
    """The piece in which each token travels.

    Args:
        position: int64 ``[n]``, place of the token in its pair's list.
        count: tokens of that list, at least one.
        distance: receiver minus sender.

    Returns:
        int64 ``[n]`` in ``[0, num_pieces)``.
    """
    blocks = -(-np.asarray(count) // block_size)
    return (position // block_size * num_pieces // np.maximum(blocks, 1) + distance) % num_pieces


def piece_tokens(traffic: Int64, num_pieces: int, block_size: int) -> Int64:
    """Tokens of each pair in each piece: what :func:`piece_of` gives, counted.

    Args:
        traffic: int64 ``[P receivers, P senders]``, tokens.

    Returns:
        int64 ``[num_pieces, P, P]``.
    """
    blocks = -(-traffic // block_size)
    # Part p has the blocks j with j * num_pieces // blocks == p.
    edges = np.stack([np.minimum(-(-p * blocks // num_pieces) * block_size, traffic) for p in range(num_pieces + 1)])
    parts = np.diff(edges, axis=0)
    ranks = np.arange(len(traffic))
    shift = (ranks[:, None] - ranks) % num_pieces
    part = (np.arange(num_pieces)[:, None, None] - shift) % num_pieces
    return np.take_along_axis(parts, part, axis=0)


def num_pieces(traffic: Int64, stages: int, block_size: int) -> int:
    """`stages` if some pair has a block for each; else one piece, or none if nothing travels.

    Few possible numbers, for each of them is a graph of its own to torch.compile.
    """
    blocks = -(-int(traffic.max(initial=0)) // block_size)
    return stages if blocks >= stages else min(blocks, 1)
