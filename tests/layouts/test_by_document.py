"""Layouts built document by document: they tile the sequence, are balanced and stay inside hosts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spanwise
from benchmarks import host_bounds
from spanwise import make_plan
from spanwise.layouts import by_document, traffic
from spanwise.layouts.by_document import ByDocument
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem, offsets_of_documents
from spanwise.masks.span_mask import SpanMask
from spanwise.routes.route import read_pairs
from tests.planning.test_scale import lognormal as scaled


def lognormal(total, median, sigma, seed):
    """Document offsets: lognormal lengths until the tokens are used up."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(max(1, min(rng.lognormal(np.log(median), sigma), total - sum(lengths)))))
    return np.append(0, np.cumsum(lengths))


def imbalance(layout, mask):
    work = traffic.area(mask, layout, mask.batch_size)
    return work.max() / work.mean()


def plan_of(mask, ranks, **options):
    shape = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
    return make_plan(mask, ranks, hardware=spanwise.H100, **{"exchange": "hierarchical"} | shape | options)


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 20),
    host_size=st.integers(1, 9),
)
def test_any_documents_and_any_work(seed, num_ranks, host_size):
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, 400))
    documents = np.unique(np.append(rng.integers(0, units + 1, rng.integers(0, 30)), [0, units]))
    causal = np.concatenate([np.arange(1.0, n + 1) for n in np.diff(documents)])
    work = [causal, rng.choice([0.0, 1.0, 7.5], units), np.zeros(units)][rng.integers(3)]
    sizes = units // num_ranks + (np.arange(num_ranks) < units % num_ranks)
    before = np.append(0.0, np.cumsum(work))
    pieces, again = (by_document.pieces_of_ranks(documents, before, sizes, host_size, 1.02) for _ in range(2))
    layout = Layout([pieces], num_ranks, units)  # checks that the pieces tile the sequence
    assert layout.tokens_per_rank.tolist() == sizes.tolist()
    assert layout == Layout([again], num_ranks, units)


def test_the_ranks_of_a_host_share_what_a_document_over_several_hosts_has_there():
    documents = np.array([0, 4000, *range(4400, 8001, 400)])
    work = np.arange(8000) - documents[np.searchsorted(documents, np.arange(8000), side="right") - 1] + 1.0
    before, sizes = np.append(0.0, np.cumsum(work)), np.full(32, 250)
    pieces = by_document.pieces_of_ranks(documents, before, sizes, 8, 1.02)
    parts = pieces[pieces[:, 2] <= 4000]
    held = np.bincount(parts[:, 0], parts[:, 2] - parts[:, 1], 32).reshape(4, 8)
    assert (held.sum(axis=1) > 0).sum() > 2
    assert (held.max(axis=1) - held.min(axis=1) <= 16).all()


@given(seed=st.integers(0, 2**32 - 1))
def test_documents_are_what_no_span_crosses(seed):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 40))
    masks = []
    for _ in range(rng.integers(1, 3)):
        token = np.arange(length)
        edges = np.sort(np.clip(token + rng.integers(-4, 5, (4, length)), 0, length), axis=0)
        edges[:, rng.random(length) < 0.3] = 0
        masks.append(SpanMask(edges[::2], edges[1::2], length))
    dense = np.any([mask.dense()[0] for mask in masks], axis=0)
    whole = [0, *(p for p in range(1, length) if not dense[:p, p:].any() and not dense[p:, :p].any()), length]
    assert offsets_of_documents(masks, 0).tolist() == whole


@pytest.mark.parametrize("host_size", [None, 8])
@pytest.mark.parametrize("median, sigma", [(2_000, 1.6), (16_000, 1.2)])
@pytest.mark.parametrize("num_ranks", [32, 96])
def test_lognormal_documents_are_balanced(median, sigma, num_ranks, host_size):
    mask = SpanMask.documents(lognormal(2**15 * num_ranks, median, sigma, seed=num_ranks))
    layout = ByDocument(host_size=host_size).assign(LayoutProblem({"default": mask}), num_ranks)
    assert np.ptp(layout.tokens_per_rank) == 0
    assert imbalance(layout, mask) <= 1.03


@pytest.mark.parametrize("host_size", [None, 8])
def test_windows_stay_contiguous_and_one_document_is_balanced(host_size):
    balancer = ByDocument(host_size=host_size)
    window, causal = SpanMask.sliding_window(2**16, 256), SpanMask.causal(2**16)
    layout = balancer.assign(LayoutProblem({"default": window}), 128)
    assert [len(layout.runs(rank)) for rank in range(128)] == [1] * 128
    assert imbalance(balancer.assign(LayoutProblem({"default": causal}), 128), causal) <= 1.03


@pytest.mark.parametrize("host_size", [None, 8])
def test_a_tree_with_a_long_root_is_balanced(host_size):
    parents = [-1] + [0] * 8 + list(np.repeat(np.arange(1, 9), 7))
    tree = SpanMask.tree(parents, [2**13] + [2**11] * 8 + [2**9] * 50 + [2**14] + [2**8] * 5)
    assert imbalance(ByDocument(host_size=host_size).assign(LayoutProblem({"default": tree}), 128), tree) <= 1.05


@pytest.mark.parametrize("num_ranks, host_size", [(16, 8), (96, 8), (96, None)])
def test_no_rank_sends_a_long_document_alone(num_ranks, host_size):
    """Ascending parts, each as long as work allows, make the first rank send its tokens to all others."""
    lengths = np.array([2500 * num_ranks, *[2000] * (5 * num_ranks)])
    mask = SpanMask.documents(np.cumsum([0, *lengths]))
    layout = ByDocument(host_size=host_size).assign(LayoutProblem({"default": mask}), num_ranks)
    assert np.ptp(layout.tokens_per_rank) <= 1 and imbalance(layout, mask) <= 1.03
    tokens = read_pairs(traffic.needs(mask, layout, layout), layout)
    assert tokens.sum(axis=0).max() <= 3 * tokens.sum(axis=0).mean()


@pytest.mark.parametrize(
    "ranks, tokens, count, median, sigma, most",
    [
        (128, 2**21, 1250, 2_000, 1.6, 1.65),
        pytest.param(1024, 2**24, 10_000, 2_000, 1.6, 1.65, marks=pytest.mark.slow),
        pytest.param(1024, 2**24, 10_000, 16_000, 1.2, 1.75, marks=pytest.mark.slow),
    ],
)
def test_few_rows_enter_a_host(ranks, tokens, count, median, sigma, most):
    mask = SpanMask.documents(scaled(tokens, count, median, sigma))
    plan, usual = (plan_of(mask, ranks, balancer=ByDocument(host_size=size)) for size in (8, None))
    assert np.ptp(plan.layout.tokens_per_rank) == 0
    assert plan.imbalance() <= 1.05
    moved = plan.host_traffic()
    bound = host_bounds.bounds(plan, 8)[1]
    assert 0 < bound <= moved.once <= most * bound
    assert moved.inside >= 0.9 * (moved.inside + moved.between)
    assert moved.once < 0.9 * usual.host_traffic().once
    # The ranks of a host share what enters it and what leaves it: the busiest do not wait for one another.
    host, tokens = np.arange(ranks) // 8, plan.traffic()
    far = tokens * (host[:, None] != host)
    longest = np.diff(mask.cu_seqlens[0]).max()
    assert far.sum(axis=1).max() <= 1.1 * longest / 8
    assert far.sum(axis=0).max() <= 1.6 * longest / 8
    assert plan.predict()["total"] < 0.95 * usual.predict()["total"]


def test_auto_takes_it_where_the_step_is_shorter():
    mask = SpanMask.documents(scaled(2**21, 1250, 2_000, 1.6))
    plan = plan_of(mask, 128, balancer="auto", exchange="auto")
    assert (plan.balancer, plan.exchange, plan.stages) == ("local, by host", "hierarchical", 1)
    assert plan.predict()["total"] == min(each.seconds["total"] for each in plan.candidates)
