"""The ways to spread a global batch that `global_batch.py` compares, and its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import spanwise
from spanwise.hardware import Hardware
from spanwise.planning.grids import in_order, longest_first, spread

MODEL = {"dim": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 768}
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}
#: Most tokens of a rank over the mean, where tokens may be unequal.
MOST = 1.5


@dataclass(frozen=True)
class Way:
    """`dp` replicas, and how documents are assigned to them; one replica has a plan over all ranks.

    Attributes:
        documents: "in order", "longest first"; of one replica "one plan", "unequal tokens", or "every document over all
            ranks": head and tail of each on every rank, with an all-gather.
    """

    dp: int
    documents: str

    @property
    def name(self) -> str:
        return f"{self.dp} replicas, {self.documents}" if self.dp > 1 else self.documents


def ways(ranks: int) -> list[Way]:
    """One plan, with equal and unequal tokens, and all grids."""
    grids = [Way(dp, how) for dp in range(2, ranks + 1) if ranks % dp == 0 for how in ("in order", "longest first")]
    return [Way(1, "one plan"), Way(1, "unequal tokens"), Way(1, "every document over all ranks"), *grids]


def share(
    way: Way, lengths: np.ndarray, ranks: int, hardware: Hardware, linear_flops: float
) -> list[tuple[np.ndarray, spanwise.Plan] | None]:
    """Documents and plan of each replica; None without a document."""
    owner = np.zeros(len(lengths), dtype=int)
    if way.dp > 1:
        work = lengths * (lengths + 1) / 2.0
        owner = in_order(lengths, way.dp) if way.documents == "in order" else longest_first(work, way.dp)
    found: list[tuple[np.ndarray, spanwise.Plan] | None] = []
    for replica in range(way.dp):
        mine = lengths[owner == replica]
        found.append((mine, _plan(way, mine, ranks // way.dp, hardware, linear_flops)) if len(mine) else None)
    return found


def _plan(way: Way, lengths: np.ndarray, ranks: int, hardware: Hardware, linear_flops: float) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents(np.append(0, np.cumsum(lengths)))
    given = {"hardware": hardware, "weights": {"default": MODEL["num_layers"]}, **SHAPE}
    if way.documents.startswith("every"):
        given |= {"balancer": "per_document_head_tail", "exchange": "all_gather"}
    plan = spanwise.make_plan(mask, ranks, **given)
    if way.documents != "unequal tokens":
        return plan
    most = int(np.ceil(MOST * lengths.sum() / ranks))
    return spanwise.make_plan(mask, ranks, balancer=spread(plan, linear_flops, most), **given)
