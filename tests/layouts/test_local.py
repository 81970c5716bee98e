"""The local balancer: balance and traffic on known masks, the equal-token rules, any mask, several masks, batches."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan import document_offsets
from spanwise import H100, make_plan
from spanwise.layouts.assignment import assign_layout
from spanwise.layouts.balancers import LPT
from spanwise.layouts.local import Local, block_reads
from spanwise.layouts.problem import LayoutProblem
from spanwise.masks.span_mask import SpanMask


def busiest(owner, problem, num_ranks):
    """Largest work of a rank in each batch row."""
    work = np.broadcast_to(problem.block_area, np.atleast_2d(owner).shape)
    return np.array([np.bincount(o, w, num_ranks).max() for o, w in zip(np.atleast_2d(owner), work, strict=True)])


def owners(layout, problem):
    """Owner of each block, ``[batch, num_blocks]``."""
    token = np.arange(problem.num_blocks) * problem.block_size
    runs = np.column_stack([token, token + 1])
    return np.stack([layout.owners_of(runs, row)[1] for row in range(layout.batch_size)])


def assert_rules(layout, problem, num_ranks):
    """Equal tokens; equal shards in every batch row; balanced within the bound, or as well as LPT balances."""
    bound = 1.02 if problem.num_blocks >= 32 * num_ranks else 1.03
    mean = np.broadcast_to(problem.block_area.sum(axis=1), problem.batch_size) / num_ranks
    lpt = busiest(LPT().assign(problem, num_ranks), problem, num_ranks)
    limit = np.maximum(bound * mean, lpt) * (1 + 1e-9)
    owner = owners(layout, problem)
    few, left_over = divmod(problem.num_blocks, num_ranks)
    for row in owner:
        counts = np.bincount(row, minlength=num_ranks)
        assert counts.tolist() == [few + 1] * left_over + [few] * (num_ranks - left_over)
    if problem.seq_len % problem.block_size:
        assert (owner[:, -1] == 0).all()
    assert (busiest(owner, problem, num_ranks) <= limit).all()


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


@given(
    problem=problems(),
    num_ranks=st.integers(1, 9),
)
def test_any_masks_any_shape(problem, num_ranks):
    balancer = Local(quality="fast")
    layout = balancer.assign(problem, num_ranks)
    assert_rules(layout, problem, num_ranks)
    assert layout == balancer.assign(problem, num_ranks) == assign_layout(balancer, problem, num_ranks)
    assert layout.tokens_per_rank.sum() == problem.seq_len


@pytest.mark.parametrize("seed", range(3))
def test_block_reads_cover_exactly_the_block_table(seed):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, 101, (6, 100)), axis=0)
    wanted = [SpanMask(edges[::2], edges[1::2], 100), SpanMask.documents([0, 37, 60, 100])]
    offsets, low, high = block_reads(wanted, 7)
    for m, mask in enumerate(wanted):
        table = np.zeros((15, 15), dtype=bool)
        for q in range(15):
            for i in range(offsets[m, q], offsets[m, q + 1]):
                table[q, low[i] : high[i]] = True
        np.testing.assert_array_equal(table, mask.block_table(7)[0] > 0)


@functools.cache
def planned(num_ranks, seed, balancer=None):
    return make_plan(
        SpanMask.documents(document_offsets(131_072, seed)), num_ranks, balancer=balancer or Local(), exchange="needed"
    )


# Mean received, largest sent. Contiguous layouts receive 2,206 to 5,214 tokens with an imbalance of 1.8 to 4.5; LPT
# receives 23,000 to 34,000. A search on 64 ranks finds 8,950, 6,960 and 13,850, but one rank then sends 29,000 to
# 76,000, and the predicted step is 1.6 to 2.6 times as long.
KNOWN = [
    (8, 0, 5_500, 40_000), (8, 1, 4_650, 20_000), (8, 2, 10_000, 60_000), (64, 0, 11_600, 16_800),
    (64, 1, 9_650, 16_000), (64, 2, 16_600, 25_500),
]  # fmt: skip


@pytest.mark.parametrize(("num_ranks", "seed", "most", "most_sent"), KNOWN)
def test_traffic_of_packed_documents(num_ranks, seed, most, most_sent):
    plan = planned(num_ranks, seed)
    assert plan.traffic().sum(axis=0).max() <= most_sent
    received = plan.recv_tokens()
    assert plan.imbalance() <= (1.02 if num_ranks == 8 else 1.03)
    assert received.mean() <= most
    assert received.max() <= 2.5 * received.mean()
    assert (plan.layout.tokens_per_rank == 131_072 // num_ranks).all()


@pytest.mark.parametrize(("num_ranks", "received"), [(8, 3_584), (64, 4_032)])
def test_a_window_stays_contiguous(num_ranks, received):
    plan = make_plan(SpanMask.sliding_window(131_072, 4_096), num_ranks, balancer="local", exchange="needed")
    assert plan.imbalance() <= 1.02
    assert plan.recv_tokens().mean() <= received


@pytest.mark.parametrize(("seq_len", "num_ranks"), [(131_072, 8), (131_072, 64), (100_000, 8)])
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_a_dense_mask_is_assigned_no_worse_than_head_tail(kind, seq_len, num_ranks):
    mask = getattr(SpanMask, kind)(seq_len)
    plan, head_tail = (make_plan(mask, num_ranks, balancer=b, exchange="needed") for b in ("local", "head_tail"))
    slack = 0 if seq_len % (2 * 128 * num_ranks) == 0 else 256  # blocks cannot be cut as finely as tokens
    assert plan.recv_tokens().mean() <= head_tail.recv_tokens().mean() + slack
    if seq_len == 131_072:  # else some ranks hold a block more than others
        assert plan.imbalance() <= 1.03


def test_hardly_any_traffic_may_be_lopsided():
    # A document a rank; one is a block too long for it, and one a block shorter. So one rank reads a block or two, and
    # 2.5 times the mean is out of reach.
    offsets = np.cumsum([0, 17, 15, 16, 16, 16, 16, 16, 16]) * 128
    plan = make_plan(SpanMask.documents(offsets), 8, balancer=Local(max_imbalance=1.2), exchange="needed")
    assert plan.imbalance() <= 1.2
    assert plan.recv_tokens().sum() == plan.recv_tokens().max() == 128


@pytest.mark.parametrize(("num_ranks", "host_size", "share"), [(8, 4, 0.75), (64, 8, 1.0)])
def test_hosts_exchange_less_than_a_flat_search_lets_them(num_ranks, host_size, share):
    hardware = H100.with_host_size(host_size)

    def given(mask):
        return make_plan(mask, num_ranks, balancer="local", exchange="hierarchical", hardware=hardware)

    def across_hosts(plan):
        return plan.host_traffic(host_size=host_size).once

    flat, hosts = 0, 0
    for seed in range(3):
        two_level = given(SpanMask.documents(document_offsets(131_072, seed)))
        assert two_level.imbalance() <= 1.03
        flat += across_hosts(planned(num_ranks, seed))
        hosts += across_hosts(two_level)
    assert hosts <= share * flat
    for mask in (SpanMask.sliding_window(131_072, 4_096), SpanMask.causal(131_072)):
        assert across_hosts(given(mask)) <= across_hosts(
            make_plan(mask, num_ranks, balancer=Local(), exchange="needed")
        )


def test_each_of_several_masks_is_balanced():
    documents = document_offsets(131_072, 0)
    masks = {
        "documents": SpanMask.documents(documents),
        "window": SpanMask.documents(documents, window=(1_024, 0)),
        "causal": SpanMask.causal(131_072),
    }
    plan = make_plan(masks, 8, weights={"documents": 1, "window": 5, "causal": 2}, balancer="local", exchange="needed")
    for name in masks:
        assert plan.imbalance(name) <= 1.02


def test_the_layout_serves_the_mask_with_the_weight():
    seq_len = 4096
    masks = {"documents": SpanMask.documents([0, 3000, 3400, 4096]), "window": SpanMask.sliding_window(seq_len, 256)}

    def received(**weights):
        balancer = Local(max_imbalance=1.5)
        plan = make_plan(masks, 4, weights=weights, balancer=balancer, block_size=64, exchange="needed")
        assert all(plan.imbalance(name) <= 1.5 for name in masks)
        return {name: plan.recv_tokens(name).mean() for name in masks}

    window_first, documents_first = received(documents=1, window=50), received(documents=50, window=1)
    assert window_first["window"] < documents_first["window"]
    assert window_first["documents"] > documents_first["documents"]


def test_batch_rows_get_layouts_of_their_own():
    rows = [SpanMask.documents([0, 500, 2000]), SpanMask.documents([0, 1500, 1600, 2000])]
    problem = LayoutProblem({"default": SpanMask.stack(rows)}, block_size=32)
    layout = Local().assign(problem, 4)
    assert_rules(layout, problem, 4)
    for row, mask in enumerate(rows):
        alone = Local().assign(LayoutProblem({"default": mask}, block_size=32), 4)
        np.testing.assert_array_equal(layout.pieces(row), alone.pieces())


@pytest.mark.parametrize(
    "bad",
    [
        {"max_imbalance": 0.9},
        {"max_imbalance": math.nan},
        {"quality": "good"},
        {"most_runs": 0},
    ],
)
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Local(**bad)


@pytest.mark.slow
def test_the_first_search_of_an_installation_says_that_it_compiles(tmp_path):
    code = "import spanwise; spanwise.make_plan(spanwise.SpanMask.documents([0, 300, 2048]), 4)"
    given = {
        "env": os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        "capture_output": True,
        "text": True,
        "check": True,
    }
    first, second = (subprocess.run([sys.executable, "-c", code], **given).stderr for _ in range(2))
    assert first.count("compiling the search of layouts, once") == 1 and "compiling" not in second
