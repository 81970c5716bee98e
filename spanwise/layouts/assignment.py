"""Which rank gets which tokens: from a balancer's name to checked layouts of queries and keys.

Above the balancers, below planning:

    mask -> LayoutProblem -> balancer -> Layout -> Plan
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from spanwise.layouts import balancers
from spanwise.layouts.balancers import contiguous
from spanwise.layouts.layout import Layout
from spanwise.layouts.local import Local
from spanwise.layouts.packing import Packing
from spanwise.layouts.problem import LayoutProblem, LoadBalancer
from spanwise.masks.checks import check_positive
from spanwise.masks.offsets import common
from spanwise.masks.span_mask import SpanMask

# Where blocks must be cut finer. Worst imbalance of 29 short packings on 4 to 16 ranks with 2, 4, 8, 16 blocks a rank:
# "lpt" 1.49, 1.07, 1.01, 1.00; "ptrr" 2.08, 1.47, 1.19, 1.09. "local" receives least with 2 to 16 alike (4.7 to 5.7 S).
_BLOCKS_PER_GROUP = 8

BY_NAME: Mapping[str, Callable[[LayoutProblem, int], ArrayLike | Layout]] = {
    "contiguous": lambda problem, num_ranks: contiguous(problem.seq_len, num_ranks),
    "head_tail": balancers.head_tail,
    "per_document_head_tail": balancers.per_document_head_tail,
    "ptrr": balancers.ptrr,
    "lpt": balancers.lpt,
    "spt": functools.partial(balancers.lpt, longest_first=False),
    "local": Local().assign,
}


def assign_layout(balancer: str | LoadBalancer, problem: LayoutProblem, num_ranks: int) -> Layout:
    """Run a balancer; ``ValueError`` for what is none, and if the answer is not a layout of this problem."""
    check_positive(num_ranks, "num_ranks")
    known = ", ".join(map(repr, BY_NAME))
    if isinstance(balancer, str) and balancer not in BY_NAME:
        raise ValueError(
            f"unknown balancer {balancer!r}; use {known} or an object with assign(problem, num_ranks); make_plan also "
            f"takes 'auto' and 'dual_chunk'"
        )
    if isinstance(balancer, type):
        raise ValueError(f"a balancer is an object, got the class {balancer.__name__}: pass {balancer.__name__}()")
    assign = BY_NAME[balancer] if isinstance(balancer, str) else getattr(balancer, "assign", None)
    if not callable(assign):
        raise ValueError(f"a balancer needs a method assign(problem, num_ranks), {balancer!r} has none; or use {known}")
    answer, name = assign(problem, num_ranks), balancer if isinstance(balancer, str) else type(balancer).__name__
    if not isinstance(answer, Layout):
        try:
            answer = Layout.from_owners(answer, num_ranks, problem.seq_len, problem.block_size)
        except (TypeError, ValueError) as error:
            raise ValueError(f"balancer {name}: {error}") from error
    got = (answer.seq_len, answer.num_ranks, answer.batch_size)
    if got[:2] != (problem.seq_len, num_ranks) or got[2] not in (1, problem.batch_size):
        wanted = (problem.seq_len, num_ranks, problem.batch_size)
        raise ValueError(f"balancer {name} returned a layout of (seq_len, num_ranks, batch) {got}, wanted {wanted}")
    return answer


def problem_of(
    masks: dict[str, SpanMask], weights: Mapping[str, float] | None, block_size: int, cu_seqlens: Any,
    packing: Packing | None,
) -> LayoutProblem:  # fmt: skip
    """The layout problem of a plan's masks; of masks that are not square, that of the queries."""
    first = next(iter(masks.values()))
    square = first.q_len == first.kv_len and (packing is None or packing.square)
    if packing is not None and square:
        cu_seqlens = np.unique([0, *packing.q_offsets, packing.q_len])
    elif square and cu_seqlens is None:
        cu_seqlens = common([mask.cu_seqlens for mask in masks.values()])
    if not square and cu_seqlens is not None:
        raise ValueError("cu_seqlens is for self-attention; where keys differ from queries, give a packing")
    return LayoutProblem(masks, weights, block_size, cu_seqlens, square=square)


def layouts(
    problem: LayoutProblem, packing: Packing | None, balancer: str | LoadBalancer, outer: int, inner: int
) -> tuple[Layout, Layout, int]:
    """Layouts of queries and of keys for ``outer * inner`` ranks, and the block size that was used.

    Balancers assign square masks; all others have two fixed orders, "contiguous" and "dual_chunk" of a packing. The
    balancer assigns tokens to groups of `inner` ranks, and each group splits its tokens among its ranks. With one group
    (Ulysses alone) the balancer assigns to the ranks of the group. Blocks are cut finer where a rank would otherwise
    hold no token although there are enough.
    """
    num_ranks, q_len, kv_len = outer * inner, problem.seq_len, next(iter(problem.masks.values())).kv_len
    if balancer == "dual_chunk":
        if packing is None:
            raise ValueError(
                "balancer 'dual_chunk' is the order of a packing: give packing=spanwise.Packing(…), or use "
                "'per_document_head_tail' with cu_seqlens, which needs no padding"
            )
        layout, kv_layout = packing.dual_chunk_layout(num_ranks, "q"), packing.dual_chunk_layout(num_ranks, "kv")
        return layout, layout if kv_layout == layout else kv_layout, problem.block_size
    if not problem.square:
        if balancer != "contiguous":
            raise ValueError(
                f"queries and keys lie differently ({q_len} and {kv_len} tokens): use balancer='contiguous' or, with a "
                f"packing, 'dual_chunk'; got {balancer!r}"
            )
        return contiguous(q_len, num_ranks), contiguous(kv_len, num_ranks), problem.block_size
    groups, parts = (num_ranks, 1) if outer == 1 else (outer, inner)
    whole = assign_layout(balancer, problem, groups).split(parts)
    for block_size in (problem.block_size, max(q_len // (_BLOCKS_PER_GROUP * groups), 1), 1):
        layout = whole
        if block_size < problem.block_size:
            layout = assign_layout(balancer, dataclasses.replace(problem, block_size=block_size), groups).split(parts)
        if np.count_nonzero(layout.tokens_per_rank) == min(num_ranks, q_len):
            return layout, layout, min(block_size, problem.block_size)
    return whole, whole, problem.block_size  # a balancer of the caller that wants it so
