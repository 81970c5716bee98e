"""Shifts inside the documents of a packed sequence, token by token.

`sharding` builds labels and rolls from them. A `Packing` gives each token its document id: a number >= 0 that
neighbouring documents do not share, or -1 in padding.
"""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Bool, Int64


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
