"""Split: what was cut, and what it is expected to gain. Plain data for results and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spanwise.overlap.dag import Dag
from spanwise.overlap.split.cut import Cut


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """What ``optimize(split=True)`` cut into pieces.

    Attributes:
        pieces: pieces of each cut node; 1 if nothing was cut.
        why: why nothing was cut; "" otherwise.
        group: process group of the collectives that were cut.
        collectives: cut collectives by operator, with their number in the given graph.
        products: cut matrix products.
        tokens: tokens of a rank, along the axis that was cut.
        cuts: of each cut node, by name, where its result has the tokens.
        unsplit: milliseconds of the best schedule found without cuts. `unsplit_bound`: the bound of that graph.
        copies: milliseconds of tensors taken apart and put together.
        half_rate: a product of M rows was assumed to run at M / (M + half_rate) of the rate.
        sensitivity: makespan of the order if a product of M rows runs at M / (M + n) of the rate, by n.
        dag: the cut graph in its own order; `Result.members` refers to it.
        heavy: names of the given graph's nodes that count as compute which hides.

    >>> Split(pieces=2, cuts={"mm": Cut(0, blocks=8)}).is_cut, Split(why="no cut makes it shorter").is_cut
    (True, False)
    """

    pieces: int = 1
    why: str = ""
    group: str = ""
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    products: int = 0
    tokens: int = 0
    cuts: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    unsplit: float = 0.0
    unsplit_bound: float = 0.0
    copies: float = 0.0
    half_rate: int = 0
    sensitivity: Mapping[int, float] = dataclasses.field(default_factory=dict)
    dag: Dag | None = None
    heavy: frozenset[str] = frozenset()

    @property
    def is_cut(self) -> bool:
        """Whether anything was cut."""
        return bool(self.cuts)

    def as_dict(self) -> dict[str, Any]:
        """What a report shows, for JSON."""
        if not self.is_cut:
            return {"pieces": self.pieces, "why": self.why}
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("why", "tokens", "cuts", "dag", "heavy"):
            del found[name]
        return found
