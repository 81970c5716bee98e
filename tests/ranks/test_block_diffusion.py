"""Block diffusion on ranks: exact, balanced, both copies of a block mostly on one rank; labels on the noisy copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from tests.ranks.harness import run_ranks

CU = np.array([0, 37, 101, 160])
MASK = spanwise.SpanMask.block_diffusion(CU, 8)


@pytest.mark.parametrize("balancer", ["contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local"])
def test_attention(balancer: str) -> None:
    plan = spanwise.make_plan(MASK, 3, balancer=balancer, block_size=8)
    for report in run_ranks(3, lambda rank, mesh: spanwise.verify(spanwise.context_parallel_attention, plan, mesh)):
        assert report.ok, str(report)


def test_positions_and_labels() -> None:
    plan = spanwise.make_plan(MASK, 2, block_size=8)
    ids = torch.arange(320)[None]
    labels = torch.where(ids < 160, ids, -100)

    def on_rank(rank: int, mesh: Any) -> Any:
        return spanwise.shard_batch({"input_ids": ids, "labels": labels}, plan, mesh, shift_labels=False)

    positions = torch.from_numpy(np.concatenate([np.arange(n) for n in np.tile(np.diff(CU), 2)]))
    for shard in run_ranks(2, on_rank):
        tokens = shard["input_ids"]
        assert torch.equal(shard["position_ids"], positions[tokens])
        assert torch.equal(shard["labels"], torch.where(tokens < 160, tokens, -100))


def test_layout() -> None:
    """Long documents: equal work, fewer keys and a shorter step than by head-tail pairs, many copies on one rank."""
    mask = spanwise.SpanMask.block_diffusion([0, 3000, 8192], 32)
    found, pairs = (spanwise.make_plan(mask, 4, balancer=name, exchange="needed") for name in ("auto", "head_tail"))
    assert found.imbalance() <= 1.021
    assert found.recv_tokens().mean() <= 0.8 * pairs.recv_tokens().mean()
    assert found.recv_tokens().max() <= pairs.recv_tokens().max()
    rank = np.concatenate([np.full(int(n), r) for r, n in enumerate(found.layout.tokens_per_rank)])
    rank = rank[found.layout.restore_indices()[0].numpy()]
    assert (rank[:8192] == rank[8192:]).mean() > 0.45
