"""Plans for hundreds of ranks: balanced, equal tokens, close to the bound between hosts; pairs counted once."""

from __future__ import annotations

import time

import numpy as np
import pytest

import spanwise
from spanwise import SpanMask, make_plan
from spanwise.attention.rank_plan import build
from spanwise.planning import chunking


def lognormal(tokens, count, median, sigma):
    """Offsets of `count` documents with lognormal lengths, scaled to the tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, count)
    lengths = np.maximum(1, (drawn * tokens / drawn.sum()).astype(np.int64))
    lengths[np.argmax(lengths)] += tokens - lengths.sum()
    return np.append(0, np.cumsum(lengths))


def check_quality(plan, most_over_bound):
    assert np.ptp(plan.layout.tokens_per_rank) == 0
    assert plan.imbalance() <= 1.05
    moved = plan.host_traffic()
    assert 0 < moved.bound <= moved.between <= most_over_bound * moved.bound
    assert moved.inside + moved.between == plan.needed_traffic().sum()


def test_128_ranks_are_balanced_and_close_to_the_bound():
    mask = SpanMask.documents(lognormal(2**21, 1250, 2_000, 1.6))
    check_quality(make_plan(mask, 128, balancer="local", exchange="needed", hardware=spanwise.H100), 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("median, sigma", [(2_000, 1.6), (16_000, 1.2)])
def test_1024_ranks_with_10_000_documents(median, sigma):
    mask = SpanMask.documents(lognormal(2**24, 10_000, median, sigma))
    make_plan(SpanMask.causal(2**15), 128, balancer="local")  # loads the compiled loop
    started = time.process_time()
    plan = make_plan(mask, 1024, balancer="local", exchange="needed", stages=1, hardware=spanwise.H100)
    assert time.process_time() - started < 2
    check_quality(plan, 1.5)
    build(plan, 0)
    started = time.process_time()
    build(plan, 1)
    assert time.process_time() - started < 0.1  # 0.04 s on a quiet machine


@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_each_pair_are_what_chunk_of_says(seed):
    rng = np.random.default_rng(seed)
    traffic = rng.integers(0, 50, (7, 7)) * (rng.random((7, 7)) < 0.4)
    found = chunking.chunk_tokens(traffic, 4, 5)
    for receiver in range(7):
        for sender in range(7):
            count = traffic[receiver, sender]
            chunks = chunking.chunk_of(np.arange(count), max(count, 1), 4, 5, receiver - sender)
            assert found[:, receiver, sender].tolist() == np.bincount(chunks, minlength=4).tolist()


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_received_chunks_are_what_chunk_of_says_of_each_sender(num_chunks):
    rng = np.random.default_rng(0)
    sender = np.repeat(rng.integers(0, 6, 40), rng.integers(0, 9, 40))  # senders come again, as for batch rows
    found = chunking.chunks_received(sender, 4, num_chunks, 5)
    for one in range(6):
        count = np.count_nonzero(sender == one)
        chunks = chunking.chunk_of(np.arange(count), max(count, 1), num_chunks, 5, 4 - one)
        assert found[sender == one].tolist() == chunks.tolist()
    assert chunking.chunks_received(sender[:0], 4, num_chunks, 5).tolist() == []


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
