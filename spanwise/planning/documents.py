"""Documents of a plan: where they lie, where they may begin, and each token's position in its document.

`batch` shifts labels and rolls inside them; `attention.rank_plan` gives each rank the positions of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spanwise.layouts.packing import Packing, Side
from spanwise.masks.arrays import Int64
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan_data import PlanData


def packings(plan: PlanData, side: Side = "q") -> list[Packing]:
    """The documents of every batch row (one entry serves all), with their padding.

    From the plan's packing, or its offsets. Otherwise one document, if the mask cannot hold several.

    Raises:
        ValueError: the plan does not know its documents; says why.
    """
    if plan.packing is not None:
        return [plan.packing]
    if plan.cu_seqlens is not None:
        return [Packing(row) for row in plan.cu_seqlens]
    if plan.kv_layout != plan.layout:
        length = plan.seq_len if side == "q" else plan.kv_len
        raise ValueError(
            f"a mask of cross attention does not tell where documents start; pass cu_seqlens ([0, {length}] for one "
            f"document)"
        )
    if not plan.causal and len(possible := cuts(plan.masks.values(), plan.seq_len)):
        raise ValueError(
            f"no span of the mask crosses token {possible[0]}, so a document may start there, and spans alone do not "
            f"tell; pass cu_seqlens here or to make_plan ([0, {plan.seq_len}] for one document)"
        )
    return [Packing([0, plan.seq_len])]


def positions(plan: PlanData, rank: int) -> Int64 | None:
    """Position of each of a rank's tokens in its document, 0 in padding; None if the plan does not know documents.

    Returns:
        int64 ``[rows, tokens of the rank]``; one row where layout and documents are the same in every batch row.
    """
    try:
        found = packings(plan)
    except ValueError:
        return None
    tokens = [plan.layout.indices(rank, row) for row in range(plan.layout.batch_size)]
    rows = range(max(len(found), len(tokens)))
    return np.stack([_positions(found[row % len(found)], tokens[row % len(tokens)]) for row in rows])


def _positions(packing: Packing, tokens: Int64) -> Int64:
    """``packing.positions()[tokens]``, without going through the whole sequence."""
    if packing.num_sequences == 0:
        return np.zeros_like(tokens)
    sequence = np.searchsorted(packing.q_offsets, tokens, side="right") - 1
    inside = np.clip(sequence, 0, packing.num_sequences - 1)
    position = tokens - packing.q_offsets[inside]
    return np.where((sequence == inside) & (position < packing.q_lens[inside]), position, 0)


def cuts(masks: Iterable[SpanMask], seq_len: int) -> Int64:
    """Positions in ``(0, seq_len)`` that no span of any mask and batch row crosses, ascending."""
    crossed = np.zeros(seq_len + 1, dtype=bool)
    position = np.arange(seq_len)
    for mask in masks:
        is_span = mask.end > mask.start
        first = np.where(is_span, np.minimum(mask.start, position), position).min(axis=(0, 1))
        last = np.where(is_span, np.maximum(mask.end, position + 1), position + 1).max(axis=(0, 1))
        # Token i and its keys span [first, last): no cut strictly inside.
        steps = np.bincount(first + 1, minlength=seq_len + 2) - np.bincount(last, minlength=seq_len + 2)
        crossed |= np.cumsum(steps)[: seq_len + 1] > 0
    return np.flatnonzero(~crossed[1:-1]) + 1
