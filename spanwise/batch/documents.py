"""Documents of a packed sequence, token by token: shifts inside them, and positions where they may begin.

`sharding` builds labels and rolls from these arrays. A `Packing` gives each token its document id: a number >= 0 that
neighbouring documents do not share, or -1 in padding.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spanwise.masks.arrays import Bool, Int64
from spanwise.masks.span_mask import SpanMask


def shift(ids: Int64, shifts: int) -> tuple[Int64, Bool]:
    """Index of token ``i - shifts`` for each token ``i``, and whether it exists in the same document.

    Args:
        ids: document of each token, int64 ``[rows, seq_len]``.

    Returns:
        Source int64 ``[seq_len]``, clipped to the sequence; and bool ``[rows, seq_len]``: false where the source does
        not exist or lies in another document, and where the token is padding.
    """
    seq_len = ids.shape[1]
    wanted = np.arange(seq_len) - shifts
    source = np.clip(wanted, 0, max(seq_len - 1, 0))
    return source, (source == wanted) & (ids[:, source] == ids) & (ids >= 0)


def cuts(masks: Iterable[SpanMask], seq_len: int) -> Int64:
    """Positions in ``(0, seq_len)`` that no span of any mask and batch row crosses, ascending."""
    crossed = np.zeros(seq_len + 1, dtype=bool)
    position = np.arange(seq_len)
    for mask in masks:
        is_span = mask.end > mask.start
        first = np.where(is_span, np.minimum(mask.start, position), position).min(axis=(0, 1))
        last = np.where(is_span, np.maximum(mask.end, position + 1), position + 1).max(axis=(0, 1))
        # Token i and its keys span [first, last): no cut strictly inside.
        steps = np.bincount(first + 1, minlength=seq_len + 2) - np.bincount(last, minlength=seq_len + 2)
        crossed |= np.cumsum(steps)[: seq_len + 1] > 0
    return np.flatnonzero(~crossed[1:-1]) + 1
