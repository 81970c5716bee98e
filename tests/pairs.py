"""Few cells of a product of settings that hold every pair of settings: most defects depend on one setting or two.

A full product of five axes is thousands of tests. A selection that covers all pairs is about as long as the product of
the two longest axes (Cohen, Dalal, Fredman and Patton, "The AETG system", 1997).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

_MOST = 4000  # cells to choose from; of a larger product, so many at random


def covering(*axes: Sequence[Any], possible: Callable[..., bool] = lambda *cell: True) -> list[tuple[Any, ...]]:
    """Cells, one value of each axis, that hold every pair of values that a possible cell holds.

    Greedy: the cell with the most new pairs comes next. The same cells on every run.

    Args:
        axes: values of each setting; they need not be hashable.
        possible: whether a cell, given as its values, can be tested.
    """
    shuffled = random.Random(0)
    if math.prod(map(len, axes)) <= _MOST:
        cells = [at for at in itertools.product(*(range(len(axis)) for axis in axes)) if possible(*_values(axes, at))]
        shuffled.shuffle(cells)  # or most cells would repeat the first settings of each axis
    else:
        drawn = (tuple(shuffled.randrange(len(axis)) for axis in axes) for _ in itertools.count())
        cells = list(itertools.islice((at for at in drawn if possible(*_values(axes, at))), _MOST))
    number: dict[Any, int] = {}
    bits = [sum(1 << number.setdefault(pair, len(number)) for pair in _pairs(at)) for at in cells]
    missing, chosen = (1 << len(number)) - 1, []
    queue = [(-bit.bit_count(), i) for i, bit in enumerate(bits)]
    heapq.heapify(queue)
    while missing:  # what a cell adds only becomes less: the first whose number is up to date is the best
        _, i = heapq.heappop(queue)
        new = (bits[i] & missing).bit_count()
        if new and queue and new < -queue[0][0]:
            heapq.heappush(queue, (-new, i))
        elif new:
            chosen.append(cells[i])
            missing &= ~bits[i]
    return [_values(axes, at) for at in sorted(chosen)]


def named(value: Any) -> str | None:
    """The id of a setting that is a dictionary: its values, or their names; of others pytest's own."""
    if not isinstance(value, dict):
        return None
    return "-".join(str(getattr(x, "name", getattr(x, "__name__", x))) for x in value.values())


def _values(axes: Sequence[Sequence[Any]], at: Sequence[int]) -> tuple[Any, ...]:
    return tuple(axis[i] for axis, i in zip(axes, at, strict=True))


def _pairs(at: Sequence[int]) -> list[tuple[tuple[int, int], ...]]:
    """Any two settings of a cell, each with the number of its axis."""
    return list(itertools.combinations(enumerate(at), 2))
