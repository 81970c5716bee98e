"""Recurrence: layers of a model that carry a state along the sequence, as `make_plan` takes them. Data.

Such layers run in the layout of attention, or tokens move to a contiguous layout for them and back. In a layout with
more runs of documents more maps of the state travel, each of a whole state or larger. `seconds.recurrent` prices both.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from spanwise.masks.checks import check_positive

_STATE_BYTES = 4  # an element of a map


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """Layers of a model that carry a state, for `make_plan`.

    Args:
        layers: how many there are.
        heads: of the values, on one rank.
        key_dim, value_dim: of a head; a state is ``[heads, key_dim, value_dim]``.
        delta_rule: True for gated delta rules (GDN, KDA), whose maps hold a matrix ``[key_dim, key_dim]`` for each
            head; False for diagonal decays (Mamba-2, GLA, lightning).
        hidden_size: numbers of a token that move between layouts; default ``heads * value_dim``.

    Raises:
        ValueError: a value that is not positive, or not an integer (`layers` may be any number).

    >>> Recurrence(layers=36, heads=32, key_dim=128, value_dim=128).map_bytes
    4194304
    """

    layers: float
    heads: int
    key_dim: int
    value_dim: int
    delta_rule: bool = True
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.delta_rule, (bool, np.bool_)):
            raise ValueError(f"delta_rule of a Recurrence must be True or False, got {self.delta_rule!r}")
        if not isinstance(self.layers, (int, float, np.number)) or not 0 < self.layers < math.inf:
            raise ValueError(f"layers of a Recurrence must be a number above 0, got {self.layers!r}")
        for name in ("heads", "key_dim", "value_dim", "hidden_size"):
            if name != "hidden_size" or self.hidden_size is not None:
                check_positive(getattr(self, name), f"{name} of a Recurrence")

    @property
    def map_bytes(self) -> int:
        """Bytes of the map of one run: what it adds to the state, and by what it multiplies it."""
        factor = self.key_dim * (self.key_dim if self.delta_rule else 1)
        return _STATE_BYTES * self.heads * (factor + self.key_dim * self.value_dim)

    @property
    def hidden(self) -> int:
        """Numbers of a token that move between layouts."""
        return self.hidden_size or self.heads * self.value_dim
