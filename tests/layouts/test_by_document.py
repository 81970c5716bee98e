"""Layouts built document by document: they tile the sequence, are balanced and stay inside hosts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise import make_plan
from spanwise.layouts import by_document, traffic
from spanwise.layouts.layout import Layout
from spanwise.layouts.local import Local
from spanwise.layouts.problem import LayoutProblem, offsets_of_documents
from spanwise.masks.span_mask import SpanMask


def lognormal(total, median, sigma, seed):
    """Document offsets: lognormal lengths until the tokens are used up."""
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < total:
        lengths.append(int(max(1, min(rng.lognormal(np.log(median), sigma), total - sum(lengths)))))
    return np.append(0, np.cumsum(lengths))


def crossing(layout, mask, host_size):
    """K/V tokens received in all, and from other hosts."""
    tokens = traffic.needed_traffic(traffic.needs(mask, layout, layout, 1), layout)
    host = np.arange(layout.num_ranks) // host_size
    return tokens.sum(), tokens[host[:, None] != host].sum()


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 20),
    host_size=st.integers(1, 9),
    way=st.sampled_from(by_document.WAYS),
)
def test_any_documents_and_any_work(seed, num_ranks, host_size, way):
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, 400))
    documents = np.unique(np.append(rng.integers(0, units + 1, rng.integers(0, 30)), [0, units]))
    work = rng.choice([0.0, 1.0, 7.5], units) if rng.integers(2) else np.zeros(units)
    sizes = units // num_ranks + (np.arange(num_ranks) < units % num_ranks)
    before = np.append(0.0, np.cumsum(work))
    pieces, again = (by_document.pieces_of_ranks(documents, before, sizes, host_size, 1.02, way) for _ in range(2))
    layout = Layout([pieces], num_ranks, units)  # checks that the pieces tile the sequence
    assert layout.tokens_per_rank.tolist() == sizes.tolist()
    assert layout == Layout([again], num_ranks, units)


def test_the_ranks_of_a_host_share_the_head_of_a_document_over_many_hosts():
    documents = np.array([0, 4000, *range(4400, 8001, 400)])
    work = np.arange(8000) - documents[np.searchsorted(documents, np.arange(8000), side="right") - 1] + 1.0
    before, sizes = np.append(0.0, np.cumsum(work)), np.full(32, 250)
    pieces = by_document.pieces_of_ranks(documents, before, sizes, 8, 1.02, (True, True))
    for host in range(3):  # head and tail of the last one are one piece
        mine = pieces[(pieces[:, 0] // 8 == host) & (pieces[:, 2] <= 2000)]  # the first half of the long document
        held = np.bincount(mine[:, 0] % 8, mine[:, 2] - mine[:, 1], 8)
        assert held.max() <= held.min() + 0.2 * held.mean() + 1


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


@pytest.mark.parametrize("median, sigma", [(2_000, 1.6), (16_000, 1.2)])
@pytest.mark.parametrize("num_ranks", [32, 96])
def test_lognormal_documents_are_balanced_and_stay_inside_hosts(median, sigma, num_ranks):
    mask = SpanMask.documents(lognormal(2**15 * num_ranks, median, sigma, seed=num_ranks))
    problem = LayoutProblem({"default": mask})
    layout = by_document.assign(problem, num_ranks, 8, 1.02)
    assert np.ptp(layout.tokens_per_rank) == 0
    assert by_document.busiest(layout, problem)[0, 0] <= 1.03 * by_document.mean_work(problem, num_ranks)[0, 0]
    total, outside = crossing(layout, mask, 8)
    # Documents longer than a host must cross.
    longest = np.diff(mask.cu_seqlens[0]).max()
    if longest**2 / 2 < 8 * problem.area.sum() / num_ranks:
        assert outside <= 0.05 * total


@pytest.mark.parametrize("host_size", [None, 8])
def test_many_ranks_take_regular_layouts_where_these_are_better(host_size):
    window = LayoutProblem({"default": SpanMask.sliding_window(2**16, 256)})
    layout = Local(host_size=host_size).assign(window, 128)
    assert [len(layout.runs(rank)) for rank in range(128)] == [1] * 128
    causal = LayoutProblem({"default": SpanMask.causal(2**16)})
    layout = Local(host_size=host_size).assign(causal, 128)
    assert by_document.busiest(layout, causal)[0, 0] <= 1.03 * by_document.mean_work(causal, 128)[0, 0]


def test_a_tree_with_a_long_root_is_balanced_though_hosts_are_not():
    parents = [-1] + [0] * 8 + list(np.repeat(np.arange(1, 9), 7))
    tree = SpanMask.tree(parents, [2**13] + [2**11] * 8 + [2**9] * 50 + [2**14] + [2**8] * 5)
    problem = LayoutProblem({"default": tree})
    limit = 1.05 * by_document.mean_work(problem, 128)[0, 0]
    assert by_document.busiest(by_document.assign(problem, 128, 8, 1.02), problem)[0, 0] > limit
    assert by_document.busiest(Local(host_size=8).assign(problem, 128), problem)[0, 0] <= limit


@pytest.mark.parametrize("num_ranks, host_size, share", [(16, 8, 0.6), (96, 8, 0.3), (96, None, 0.3)])
def test_no_rank_sends_a_long_document_alone(num_ranks, host_size, share):
    lengths = [2500 * num_ranks, *[2000] * (5 * num_ranks)]
    problem = LayoutProblem({"default": SpanMask.documents(np.cumsum([0, *lengths]))})
    found = {}
    for way in by_document.WAYS:
        layout = by_document.assign(problem, num_ranks, host_size, 1.02, way)
        assert np.ptp(layout.tokens_per_rank) <= 1
        assert by_document.busiest(layout, problem)[0, 0] <= 1.03 * by_document.mean_work(problem, num_ranks)[0, 0]
        recv, sent = by_document.priced_tokens(layout, problem, host_size, 0.1)
        assert recv.sum() == pytest.approx(sent.sum())
        found[way] = sent.max()
    assert min(found.values()) <= share * found[False, False]
    chosen = make_plan(
        problem.masks["default"], num_ranks, balancer=Local(host_size=host_size), exchange="needed"
    ).layout
    recv, sent = by_document.priced_tokens(chosen, problem, host_size, 0.1)
    assert sent.max() <= 1.1 * min(found.values())
