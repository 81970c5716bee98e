"""Who gets which tokens: from a balancer's name to the token runs of all ranks, keys and queries.

Between `balancers`, which deal blocks out to equal receivers, and `planner`, which knows of ranks, hosts and the levels
of a mesh. Pure numpy; the compiled search is imported when it is asked for.

    mask -> balancer -> layout -> Plan
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from spanwise import hardware as cost
from spanwise.layouts import balancers
from spanwise.layouts.layout import Layout
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask


class Dealing:
    """Who gets which tokens: balancers for square masks, two orders that need no balancer for all others."""

    def __init__(
        self,
        masks: dict[str, SpanMask],
        weights: Mapping[str, float] | None,
        block_size: int,
        cu_seqlens: Any,
        packing: Packing | None,
        hardware: cost.Hardware,
        quality: str,
    ) -> None:
        first = next(iter(masks.values()))
        self.q_len, self.kv_len = first.q_len, first.kv_len
        self.square = self.q_len == self.kv_len and (packing is None or packing.square)
        self.packing, self.hardware, self.quality = packing, hardware, quality
        if packing is not None and self.square:
            cu_seqlens = np.unique([0, *packing.q_offsets, packing.q_len])
        if not self.square and cu_seqlens is not None:
            raise ValueError("cu_seqlens is for self-attention; where keys differ from queries, give a packing")
        # Of masks that are not square the problem is their queries'.
        self.problem = balancers.LayoutProblem(masks, weights, block_size, cu_seqlens, square=self.square)
        self.weights = {name: float(weight) for name, weight in (self.problem.weights or {}).items()}
        self.cu_seqlens = self.problem.cu_seqlens_rows if packing is None else None
        self.num_blocks = self.problem.num_blocks

    def layouts(self, balancer: str | balancers.LoadBalancer, outer: int, inner: int) -> tuple[Layout, Layout]:
        """Token runs and K/V token runs of ``outer * inner`` ranks.

        A balancer deals out to the groups, and each group's tokens are split among its ranks; with Ulysses alone there
        is one group, and the balancer deals out to its ranks.
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
            return layout, layout if kv_layout == layout else kv_layout
        if not self.square:
            if balancer != "contiguous":
                raise ValueError(
                    f"queries and keys lie differently ({self.q_len} and {self.kv_len} tokens): use "
                    f"balancer='contiguous' or, with a packing, 'dual_chunk'; got {balancer!r}"
                )
            return balancers.contiguous(self.q_len, num_ranks), balancers.contiguous(self.kv_len, num_ranks)
        groups, parts = (num_ranks, 1) if outer == 1 else (outer, inner)
        assigned = self.search(groups, parts, self.quality) if balancer == "local" else balancer
        layout = balancers.assign_layout(assigned, self.problem, groups).split(parts)
        return layout, layout

    def search(
        self, groups: int, inner: int, quality: str, max_imbalance: float | None = None
    ) -> balancers.LoadBalancer:
        """The local search over `groups` of `inner` ranks; it prefers traffic inside hosts where there are hosts.

        A host is the innermost level of the network that holds several whole groups. Where it holds all, or where none
        does, all traffic between groups costs the same.
        """
        from spanwise.layouts.local import Local  # loads a compiler

        for link in self.hardware.links:
            host_groups = groups if link.ranks is None else link.ranks // inner
            if 1 < host_groups < groups:
                price = min(1.0, self.hardware.links[-1].bandwidth / link.bandwidth)
                return Local(max_imbalance, quality, host_size=host_groups, host_price=price)
        return Local(max_imbalance, quality)
