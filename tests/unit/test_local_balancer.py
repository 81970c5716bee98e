"""The local balancer: balance and traffic on known masks, the equal-token rules, any mask, several masks, batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise import local_balancer
from spanwise.balancers import LPT, LayoutProblem, assign_layout
from spanwise.local_balancer import Local
from spanwise.mask import SpanMask


def packed_documents(seed, seq_len=131_072):
    """Offsets of documents with log-normal lengths, mean e**0.5 * 4096."""
    rng = np.random.default_rng(seed)
    lengths = []
    while left := seq_len - sum(lengths):
        lengths.append(int(min(max(64, rng.lognormal(math.log(4096), 1.0)), left)))
    return np.append(0, np.cumsum(lengths))


def busiest(owner, problem, num_ranks):
    """Largest work of a rank in each batch row."""
    work = np.broadcast_to(problem.block_area, np.atleast_2d(owner).shape)
    return np.array([np.bincount(o, w, num_ranks).max() for o, w in zip(np.atleast_2d(owner), work, strict=True)])


def assert_rules(owner, problem, num_ranks):
    """Equal tokens; equal shards in every batch row; balanced within the bound, or as well as LPT balances."""
    owner = np.atleast_2d(owner)
    assert owner.shape == (problem.batch_size, problem.num_blocks)
    few, left_over = divmod(problem.num_blocks, num_ranks)
    for row in owner:
        counts = np.bincount(row, minlength=num_ranks)
        assert counts.tolist() == [few + 1] * left_over + [few] * (num_ranks - left_over)
    if problem.seq_len % problem.block_size:
        assert (owner[:, -1] == 0).all()
    bound = 1.02 if problem.num_blocks >= 32 * num_ranks else 1.03
    mean = np.broadcast_to(problem.block_area.sum(axis=1), len(owner)) / num_ranks
    lpt = busiest(LPT().assign(problem, num_ranks), problem, num_ranks)
    assert (busiest(owner, problem, num_ranks) <= np.maximum(bound * mean, lpt) * (1 + 1e-9)).all()


@st.composite
def masks(draw, seq_len, batch=1):
    """A batch of masks with zero to three spans a row, of any shape."""
    seed = draw(st.integers(0, 2**32 - 1))
    kind = draw(st.sampled_from(["documents", "window", "prefix_lm", "shared_prefix", "video", "random"]))
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(batch):
        cu = np.unique(np.concatenate([[0, seq_len], rng.integers(0, seq_len + 1, 4)]))
        if kind == "documents":
            rows.append(SpanMask.documents(cu, causal=bool(rng.integers(2))))
        elif kind == "window":
            rows.append(SpanMask.sliding_window(seq_len, rng.integers(0, seq_len), rng.integers(0, 9)))
        elif kind == "prefix_lm":
            rows.append(SpanMask.prefix_lm(cu, [rng.integers(0, n + 1) for n in np.diff(cu)]))
        elif kind == "shared_prefix":
            rows.append(SpanMask.shared_prefix(cu[1], np.diff(cu[1:])))
        elif kind == "video":
            rows.append(SpanMask.block_causal(seq_len, rng.integers(1, 9), 2, global_tokens=rng.integers(0, seq_len)))
        else:
            edges = np.sort(rng.integers(0, seq_len + 1, (2 * rng.integers(1, 4), seq_len)), axis=0)
            rows.append(SpanMask(edges[::2], edges[1::2], seq_len))
    return SpanMask.stack(rows)


@st.composite
def problems(draw):
    seq_len, batch = draw(st.integers(1, 90)), draw(st.integers(1, 3))
    named = {"a": draw(masks(seq_len, batch))}
    if draw(st.booleans()):
        named["b"] = draw(masks(seq_len, draw(st.sampled_from([1, batch]))))
    weights = {name: draw(st.sampled_from([1, 3, 0.5])) for name in named}
    return LayoutProblem(named, weights=weights, block_size=draw(st.integers(1, 12)))


@settings(max_examples=60, deadline=None)
@given(problem=problems(), num_ranks=st.integers(1, 9))
def test_any_masks_any_shape(problem, num_ranks):
    balancer = Local(quality="fast")
    owner = balancer.assign(problem, num_ranks)
    assert_rules(owner, problem, num_ranks)
    np.testing.assert_array_equal(owner, balancer.assign(problem, num_ranks))
    assert assign_layout(balancer, problem, num_ranks).tokens_per_rank.sum() == problem.seq_len


@pytest.mark.parametrize("seed", range(3))
def test_block_reads_cover_exactly_the_block_table(seed):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, 101, (6, 100)), axis=0)
    wanted = [SpanMask(edges[::2], edges[1::2], 100), SpanMask.documents([0, 37, 60, 100])]
    offsets, low, high = local_balancer._block_reads(wanted, 7)
    for m, mask in enumerate(wanted):
        table = np.zeros((15, 15), dtype=bool)
        for q in range(15):
            for i in range(offsets[m, q], offsets[m, q + 1]):
                table[q, low[i] : high[i]] = True
        np.testing.assert_array_equal(table, mask.block_table(7)[0] > 0)


@pytest.mark.parametrize("bad", [{"max_imbalance": 0.9}, {"max_imbalance": math.nan}, {"quality": "good"}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Local(**bad)
