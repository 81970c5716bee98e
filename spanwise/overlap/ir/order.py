"""Positions of nodes in an order, for everything that asks which of two nodes comes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def positions(order: Sequence[int]) -> NDArray[np.int64]:
    """Invert an order: the position of each node in it; int64 ``[n]``.

    Args:
        order: every number from 0 to n - 1, once.

    Examples:
        >>> positions([2, 0, 1]).tolist()
        [1, 2, 0]
    """
    found = np.empty(len(order), np.int64)
    found[np.asarray(order, np.int64)] = np.arange(len(order))
    return found
