"""Few cells of a product of settings that hold every pair of settings: most defects depend on one setting or two.

A full product of five axes is thousands of tests. A selection that covers all pairs is about as long as the product of
the two longest axes (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any


def covering(*axes: Sequence[Any], possible: Callable[..., bool] = lambda *cell: True) -> list[tuple[Any, ...]]:
    """Cells, one value of each axis, that hold every pair of values that a possible cell holds.

    Greedy: again and again the cell with the most new pairs. The same cells on every run.

    Args:
        axes: values of each setting; they need not be hashable.
        possible: whether a cell, given as its values, can be tested.
    """
    product = itertools.product(*(range(len(axis)) for axis in axes))
    cells = [at for at in product if possible(*_values(axes, at))]
    random.Random(0).shuffle(cells)  # or most cells would repeat the first settings of each axis
    number: dict[Any, int] = {}
    bits = [sum(1 << number.setdefault(pair, len(number)) for pair in _pairs(at)) for at in cells]
    missing, chosen = (1 << len(number)) - 1, []
    while missing:
        best = max(range(len(cells)), key=lambda i: (bits[i] & missing).bit_count())
        chosen.append(cells[best])
        missing &= ~bits[best]
    return [_values(axes, at) for at in sorted(chosen)]


def named(value: Any) -> str | None:
    """The id of a setting that is a dictionary: its values, or their names; of others pytest's own."""
    return "-".join(str(getattr(x, "name", x)) for x in value.values()) if isinstance(value, dict) else None


def _values(axes: Sequence[Sequence[Any]], at: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis[i] for axis, i in zip(axes, at, strict=True))


def _pairs(at: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Any two settings of a cell, each with the number of its axis."""
    return list(itertools.combinations(enumerate(at), 2))
