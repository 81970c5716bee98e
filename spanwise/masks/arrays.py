"""Types of numpy arrays: one set of names for the whole package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bool = NDArray[np.bool_]
Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
IntArray = NDArray[np.integer]
"""Integers of any width."""
