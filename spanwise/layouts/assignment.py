"""Which rank gets which tokens: from a balancer's name to checked layouts of queries and keys.

Above the balancers, below planning:

    mask -> LayoutProblem -> balancer -> Layout -> Plan
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise.layouts.balancers import LPT, PTRR, Contiguous, HeadTail, PerDocumentHeadTail, contiguous
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

_BY_NAME: Mapping[str, LoadBalancer] = {
    "contiguous": Contiguous(),
    "head_tail": HeadTail(),
    "per_document_head_tail": PerDocumentHeadTail(),
    "ptrr": PTRR(),
    "lpt": LPT(),
    "spt": LPT(longest_first=False),
    "local": Local(),
}


def resolve(balancer: str | LoadBalancer) -> LoadBalancer:
    """The balancer of a name, or an object with ``assign`` as it is; ``ValueError`` for anything else."""
    known = ", ".join(map(repr, _BY_NAME))
    if isinstance(balancer, str):
        if balancer not in _BY_NAME:
            raise ValueError(
                f"unknown balancer {balancer!r}; use {known} or an object with assign(problem, num_ranks); "
                "make_plan also takes 'auto' and 'dual_chunk'"
            )
        return _BY_NAME[balancer]
    if isinstance(balancer, type):
        raise ValueError(f"a balancer is an object, got the class {balancer.__name__}: pass {balancer.__name__}()")
    if not callable(getattr(balancer, "assign", None)):
        raise ValueError(f"a balancer needs a method assign(problem, num_ranks), {balancer!r} has none; or use {known}")
    return balancer


def assign_layout(balancer: str | LoadBalancer, problem: LayoutProblem, num_ranks: int) -> Layout:
    """Run a balancer; ``ValueError`` names it if its answer is not a layout of this problem."""
    check_positive(num_ranks, "num_ranks")
    balancer = resolve(balancer)
    answer, name = balancer.assign(problem, num_ranks), type(balancer).__name__
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


class Assigner:
    """Layouts of one problem for any number of ranks.

    Balancers assign square masks. All other masks have two fixed orders: "contiguous", and "dual_chunk" of a packing.

    Attributes:
        problem: the `LayoutProblem`; of masks that are not square, that of the queries.
        square: whether queries and keys lie alike.
        weights: weight of each mask.
        cu_seqlens: document offsets of each batch row; None with a packing or if unknown.
    """

    def __init__(
        self,
        masks: dict[str, SpanMask],
        weights: Mapping[str, float] | None,
        block_size: int,
        cu_seqlens: Any,
        packing: Packing | None,
    ) -> None:
        first = next(iter(masks.values()))
        self.q_len, self.kv_len = first.q_len, first.kv_len
        self.square = self.q_len == self.kv_len and (packing is None or packing.square)
        self.packing = packing
        if packing is not None and self.square:
            cu_seqlens = np.unique([0, *packing.q_offsets, packing.q_len])
        elif self.square and cu_seqlens is None:
            cu_seqlens = common([mask.cu_seqlens for mask in masks.values()])
        if not self.square and cu_seqlens is not None:
            raise ValueError("cu_seqlens is for self-attention; where keys differ from queries, give a packing")
        self.problem = LayoutProblem(masks, weights, block_size, cu_seqlens, square=self.square)
        self.weights = {name: float(weight) for name, weight in (self.problem.weights or {}).items()}
        self.cu_seqlens = self.problem.cu_seqlens_rows if packing is None else None
        self.num_blocks = self.problem.num_blocks

    def layouts(self, balancer: str | LoadBalancer, outer: int, inner: int) -> tuple[Layout, Layout, int]:
        """Layouts of queries and of keys for ``outer * inner`` ranks, and the block size that was used.

        The balancer assigns tokens to groups of `inner` ranks, and each group splits its tokens among its ranks. With
        one group (Ulysses alone) the balancer assigns to the ranks of the group. Blocks are cut finer where a rank
        would otherwise hold no token although there are enough.
        """
        num_ranks = outer * inner
        if balancer == "dual_chunk":
            if self.packing is None:
                raise ValueError(
                    "balancer 'dual_chunk' is the order of a packing: give packing=spanwise.Packing(…), or use "
                    "'per_document_head_tail' with cu_seqlens, which needs no padding"
                )
            layout = self.packing.dual_chunk_layout(num_ranks, side="q")
            kv_layout = self.packing.dual_chunk_layout(num_ranks, side="kv")
            return layout, layout if kv_layout == layout else kv_layout, self.problem.block_size
        if not self.square:
            if balancer != "contiguous":
                raise ValueError(
                    f"queries and keys lie differently ({self.q_len} and {self.kv_len} tokens): use "
                    f"balancer='contiguous' or, with a packing, 'dual_chunk'; got {balancer!r}"
                )
            return contiguous(self.q_len, num_ranks), contiguous(self.kv_len, num_ranks), self.problem.block_size
        groups, parts = (num_ranks, 1) if outer == 1 else (outer, inner)
        problem, first = self.problem, None
        for block_size in (problem.block_size, max(self.q_len // (_BLOCKS_PER_GROUP * groups), 1), 1):
            if block_size < problem.block_size:
                problem = dataclasses.replace(problem, block_size=block_size)
            layout = assign_layout(balancer, problem, groups).split(parts)
            if np.count_nonzero(layout.tokens_per_rank) == min(num_ranks, self.q_len):
                return layout, layout, problem.block_size
            first = first or layout
        assert first is not None
        return first, first, self.problem.block_size  # a balancer of the caller that wants it so
