"""Plans for hundreds of ranks: balanced, equal tokens, close to the bound between hosts; pairs counted once."""

from __future__ import annotations

import time

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask, make_plan
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
    assert plan.host_traffic().between <= most  # tokens
    build(plan, 0)
    started = time.process_time()
    build(plan, 1)
    assert time.process_time() - started < 0.1  # 0.04 s on a quiet machine
