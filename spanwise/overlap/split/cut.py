"""Cut: where the tokens of a tensor are, and which of them are in a piece.

A region of a graph has one token axis of `tokens` rows on each rank. A gathered tensor has that axis once for each
rank, a flattened one has other dims inside. All layouts are one dim of size ``blocks * tokens * unit``: piece i takes
the same part of the tokens of each block. Pieces of a gathered tensor are thus rank-interleaved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tensor whose dim `dim` has size ``blocks * tokens * unit``, with the tokens of the region in the middle.

    Attributes:
        blocks: how often the region's token axis repeats, such as once for each gathered rank.
        unit: elements of the dim for one token of a block.
    """

    dim: int
    blocks: int = 1
    unit: int = 1

    def size(self, tokens: int) -> int:
        """Size of the dim in a piece of that many tokens of each block."""
        return self.blocks * tokens * self.unit


def bounds(tokens: int, pieces: int) -> list[tuple[int, int]]:
    """First token and end of each piece; sizes differ by at most one.

    >>> bounds(7, 2)
    [(0, 3), (3, 7)]
    """
    return [(tokens * i // pieces, tokens * (i + 1) // pieces) for i in range(pieces)]


def through_view(old: Sequence[int], new: Sequence[int], cut: Cut, tokens: int) -> Cut | None:
    """The cut of a tensor of shape `old` after a view as `new`; None if no single dim holds the tokens then.

    >>> through_view([8, 2, 6], [16, 6], Cut(0), 8)
    Cut(dim=0, blocks=1, unit=2)
    >>> through_view([2, 8, 6], [16, 6], Cut(1), 8)
    Cut(dim=0, blocks=2, unit=1)
    >>> through_view([16, 6], [2, 8, 6], Cut(0, 2), 8)
    Cut(dim=1, blocks=1, unit=1)
    >>> through_view([8, 6], [4, 2, 6], Cut(0), 8) is None
    True
    """
    if math.prod(old) != math.prod(new) or 0 in old:
        return None
    # Elements after the tokens, and the repetitions of the token axis before it.
    inside = cut.unit * math.prod(old[cut.dim + 1 :])
    outside = math.prod(old[: cut.dim]) * cut.blocks
    for dim in range(len(new)):
        after, before = math.prod(new[dim + 1 :]), math.prod(new[:dim])
        if inside % after or outside % before or new[dim] == 1:
            continue
        unit, blocks = inside // after, outside // before
        if blocks * tokens * unit == new[dim]:
            return Cut(dim, blocks, unit)
    return None
