"""Documents of a plan: where they lie, where they may begin, and each token's position in its document.

`batch` shifts labels and rolls inside them; `attention.rank_plan` gives each rank the positions of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import cuts
from spanwise.layouts.runs import ragged_arange
from spanwise.layouts.token_tree import TokenTree
from spanwise.masks import even_runs
from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_offset_rows
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan_data import PlanData


def packings(plan: PlanData, cu_seqlens: Any = None, *, state: bool = False) -> list[Packing]:
    """The documents of every batch row (one entry serves all), with their padding: of the plan's packing or offsets.

    `cu_seqlens` of a caller go before the plan's. Without any, one document if the mask cannot hold several; else
    ``ValueError``. `state`: for layers that carry a state along a document, which cannot follow the branches of a tree.
    """
    if plan.packing is not None:
        if cu_seqlens is not None:
            raise ValueError("the plan's packing already gives documents and padding; leave cu_seqlens out")
        return [plan.packing]
    if cu_seqlens is not None:
        return [Packing(row) for row in check_offset_rows(cu_seqlens, plan.seq_len)]
    if plan.cu_seqlens is not None:
        return [Packing(row) for row in plan.cu_seqlens]
    if plan.kv_layout != plan.layout:
        raise ValueError("a mask of cross attention does not tell where documents start; pass cu_seqlens")
    if plan.causal:
        return [Packing([0, plan.seq_len])]
    if len(possible := cuts(list(plan.masks.values()), range(plan.batch_size))):
        raise ValueError(
            f"a document may start at token {possible[0]}, which no span of the mask crosses; pass cu_seqlens here or "
            f"to make_plan ([0, {plan.seq_len}] for one document)"
        )
    for token in branches(plan.masks.values(), plan.seq_len)[:1]:
        tree = "give each path of a tree as a document" if state else "pass tree=spanwise.TokenTree(…)"
        raise ValueError(
            f"token {token} may follow another token than {token - 1}, which it does not read: {tree}, or cu_seqlens "
            f"([0, {plan.seq_len}] for one document)"
        )
    return [Packing([0, plan.seq_len])]


def check_tree(plan: PlanData, tree: TokenTree) -> None:
    """``ValueError`` unless all masks of the plan keep to the paths of the tree."""
    if plan.packing is not None or plan.kv_layout != plan.layout:
        raise ValueError("a tree lies in storage without gaps; a plan with a packing, or of cross attention, has none")
    check_tree_length(plan.seq_len, tree)
    whole = tree.mask()
    for name, mask in plan.masks.items():
        if mask == whole:
            continue
        wrong = mask.area() > (mask & whole).area()
        for row, token in np.argwhere(wrong)[:1]:
            raise ValueError(f"mask {name!r} lets token {token} (batch row {row}) read tokens off its path in the tree")


def check_tree_length(seq_len: int, tree: TokenTree) -> None:
    """``ValueError`` unless it is a tree with as many tokens as the plan."""
    if not isinstance(tree, TokenTree):
        raise ValueError(f"tree must be a spanwise.TokenTree, got a {type(tree).__name__}")
    if tree.num_tokens != seq_len:
        raise ValueError(f"the tree has {tree.num_tokens} tokens, the plan {seq_len}; padding can be one more root")


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


def branches(masks: Iterable[SpanMask], seq_len: int) -> Int64:
    """Tokens that neither read the token before them nor are read by it, in any mask of some batch row; ascending."""
    every = list(masks)
    apart = [np.zeros(0, np.int64)]
    for row in range(max((mask.batch_size for mask in every), default=0)):
        of = (slot.joined for mask in every for slot in mask.even_runs(row))
        apart.append(ragged_arange(even_runs.outside(of, seq_len)))
    return np.unique(np.concatenate(apart))
