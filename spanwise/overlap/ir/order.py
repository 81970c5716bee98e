"""Positions of nodes in an order, for everything that asks which of two nodes comes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def positions(order: Sequence[int]) -> NDArray[np.int64]:
    """The position of each number from 0 to n - 1 in an order of them, int64 ``[n]``.

    >>> positions([2, 0, 1]).tolist()
    [1, 2, 0]
    """
    found = np.empty(len(order), np.int64)
    found[np.asarray(order, np.int64)] = np.arange(len(order))
    return found
