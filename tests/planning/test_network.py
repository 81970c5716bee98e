"""What crosses between hosts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask, make_plan


def brute_force_crossing(mask, owner, host_size):
    """Tokens that each rank reads from other hosts, summed."""
    owner = np.asarray(owner)
    dense, host = mask.dense()[0], owner // host_size
    return sum(int((dense[owner == r].any(axis=0) & (host != r // host_size)).sum()) for r in range(owner.max() + 1))


@pytest.mark.parametrize("seed", range(4))
def test_host_traffic_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    mask = SpanMask.documents(np.unique(np.append(rng.integers(0, 60, 4), [0, 60])))
    plan = make_plan(mask, 6, balancer="lpt", exchange="needed", block_size=3)
    owner = np.empty(60, np.int64)
    for rank in range(6):
        owner[plan.layout.indices(rank)] = rank
    for size in (1, 2, 3, 4):
        moved = plan.host_traffic(host_size=size)
        assert moved.between == brute_force_crossing(mask, owner, size)
        assert moved.inside + moved.between == plan.traffic().sum()


def test_hosts_must_be_known():
    one_link = dataclasses.replace(spanwise.H100, links=spanwise.H100.links[1:])
    with pytest.raises(ValueError, match="has no hosts below 16 ranks: give host_size"):
        make_plan(SpanMask.causal(64), 16, exchange="needed", hardware=one_link).host_traffic()
    with pytest.raises(ValueError, match="'hierarchical' needs hardware that has hosts, such as spanwise.H100"):
        make_plan(SpanMask.causal(64), 4, exchange="hierarchical", hardware=one_link)
