"""Candidate: a plan that "auto" considered, and what it would cost. Data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One choice that "auto" considered.

    Attributes:
        balancer, exchange, stages: as the plan's.
        imbalance: work of the busiest rank over the mean work, all masks by weight.
        recv_mean, recv_max: K/V tokens that a rank receives in a forward, all masks by weight; mean and most.
        held: bytes that the busiest rank holds for exchanges; `make_plan` compares them with a memory budget.
        seconds: result of `Plan.predict`.
        relayout: as the plan's.
    """

    balancer: str
    exchange: str
    stages: int
    imbalance: float
    recv_mean: float
    recv_max: float
    held: int
    seconds: Mapping[str, float]
    relayout: bool = False
