"""Plans for hundreds of ranks: balanced, equal tokens, close to the bound between hosts; pairs counted once."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

import spanwise
from spanwise import SpanMask, _torch, make_plan
from spanwise.attention.rank_plan import build


def lognormal(tokens, count, median, sigma):
    """Offsets of `count` documents with lognormal lengths, scaled to the tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, count)
    lengths = np.maximum(1, (drawn * tokens / drawn.sum()).astype(np.int64))
    lengths[np.argmax(lengths)] += tokens - lengths.sum()
    return np.append(0, np.cumsum(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("median, sigma, most", [(2_000, 1.6, 3_150_000), (16_000, 1.2, 680_000)])
def test_1024_ranks_with_10_000_documents(median, sigma, most):
    mask = SpanMask.documents(lognormal(2**24, 10_000, median, sigma))
    make_plan(SpanMask.causal(2**15), 128, balancer="local")  # imports what planning needs
    started = time.process_time()
    plan = make_plan(mask, 1024, balancer="local", exchange="hierarchical", hardware=spanwise.H100)
    assert time.process_time() - started < 2
    assert np.ptp(plan.layout.tokens_per_rank) == 0 and plan.imbalance() <= 1.05
    moved = plan.host_traffic()
    assert moved.once == moved.between <= most  # tokens
    build(plan, 0)
    started = time.process_time()
    build(plan, 1)
    assert time.process_time() - started < 0.1  # 0.04 s on a quiet machine


def test_a_rank_writes_its_indices_once():
    mask = SpanMask.causal(2**23)  # a rank of 512 receives half of all tokens, and sends as many rows
    plan = make_plan(mask, 512, balancer="contiguous", exchange="needed", stages=1)
    built = build(plan, 256)
    leaves = [x for x in _torch.tree_leaves(built) if isinstance(x, torch.Tensor)]
    count = sum(x.numel() for x in leaves)
    assert count > 2**23
    seconds = {"indices": [], "tensors": []}
    for _ in range(3):
        for what, call in (("indices", lambda: np.ones(count).cumsum()), ("tensors", lambda: build(plan, 256))):
            started = time.process_time()
            call()
            seconds[what].append(time.process_time() - started)
    # Sorted by token, they took ten times as long.
    assert min(seconds["tensors"]) < 3 * min(seconds["indices"])


def test_all_to_all_counts_each_pair_on_the_innermost_level_that_joins_it():
    links = (spanwise.Link(7.0, 0.0, ranks=2), spanwise.Link(3.0, 0.0, ranks=4), spanwise.Link(1.0, 0.0))
    hardware = spanwise.Hardware("three levels", 1, 1, 1, 1, 1, links)
    rng = np.random.default_rng(0)
    for ranks in (1, 3, 4, 6, 9):
        traffic, seconds = rng.integers(0, 100, (ranks, ranks)), 0.0
        np.fill_diagonal(traffic, 0)
        for link, inner, outer in zip(links, (1, 2, 4), (2, 4, ranks), strict=True):
            at = np.arange(ranks)
            level = (at[:, None] // outer == at // outer) & (at[:, None] // inner != at // inner)
            busiest = max((traffic * level).sum(axis=0).max(), (traffic * level).sum(axis=1).max())
            seconds = max(seconds, busiest / link.bandwidth)
        assert hardware.all_to_all_seconds(traffic) == pytest.approx(seconds)
