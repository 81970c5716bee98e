"""Layouts in which few rows enter a host: they tile the sequence, are balanced and come close to the bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spanwise
from benchmarks import host_bounds
from spanwise import SpanMask, make_plan
from spanwise.layouts import by_document, by_host, host_filling
from spanwise.layouts.by_host import ByHost
from spanwise.layouts.layout import Layout
from spanwise.layouts.problem import LayoutProblem
from tests.planning.test_scale import lognormal


def plan_of(mask, ranks, **options):
    given = {"balancer": ByHost(8), "exchange": "hierarchical"} | options
    return make_plan(mask, ranks, hardware=spanwise.H100, num_q_heads=32, num_kv_heads=8, head_dim=128, **given)


@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 20), host_size=st.integers(1, 9))
def test_any_documents_and_any_work(seed, num_ranks, host_size):
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, 400))
    documents = np.unique(np.append(rng.integers(0, units + 1, rng.integers(0, 30)), [0, units]))
    causal = np.concatenate([np.arange(1.0, n + 1) for n in np.diff(documents)])
    work = [causal, rng.choice([0.0, 1.0, 7.5], units), np.zeros(units)][rng.integers(3)]
    sizes = units // num_ranks + (np.arange(num_ranks) < units % num_ranks)
    before = np.append(0.0, np.cumsum(work))
    pieces, again = (by_host.pieces_of_ranks(documents, before, sizes, host_size, 1.05) for _ in range(2))
    layout = Layout([pieces], num_ranks, units)  # checks that the pieces tile the sequence
    assert layout.tokens_per_rank.tolist() == sizes.tolist()
    assert layout == Layout([again], num_ranks, units)


@pytest.mark.parametrize("seed", range(4))
def test_crossing_is_what_a_plan_counts(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 12)
    mask = SpanMask.documents(np.append(0, np.cumsum(lengths)))
    cuts = np.unique(np.append(rng.choice(mask.q_len, 15), [0, *np.cumsum(lengths)]))
    pieces = np.column_stack([np.append(np.arange(4), rng.integers(0, 4, len(cuts) - 5)), cuts[:-1], cuts[1:]])
    start = np.cumsum(lengths) - lengths
    document = np.searchsorted(start, pieces[:, 1], side="right") - 1

    class Given:
        def assign(self, problem, num_ranks):
            return Layout([pieces], num_ranks, problem.seq_len)

    plan = make_plan(mask, 4, balancer=Given(), exchange="needed")
    assert by_host._crossing(pieces, document, start) == plan.host_traffic(host_size=1).once > 0


@pytest.mark.parametrize(
    "ranks, tokens, count, median, sigma, most",
    [
        (128, 2**21, 1250, 2_000, 1.6, 1.2),
        pytest.param(1024, 2**24, 10_000, 2_000, 1.6, 1.2, marks=pytest.mark.slow),
        pytest.param(1024, 2**24, 10_000, 16_000, 1.2, 1.2, marks=pytest.mark.slow),
    ],
)
def test_lognormal_documents_come_close_to_the_bound(ranks, tokens, count, median, sigma, most):
    mask = SpanMask.documents(lognormal(tokens, count, median, sigma))
    plan = plan_of(mask, ranks)
    assert np.ptp(plan.layout.tokens_per_rank) == 0
    assert plan.imbalance() <= 1.05
    moved, usual = plan.host_traffic(), plan_of(mask, ranks, balancer="local")
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
    mask = SpanMask.documents(lognormal(2**21, 1250, 2_000, 1.6))
    plan = plan_of(mask, 128, balancer="auto", exchange="auto")
    assert (plan.balancer, plan.exchange, plan.stages) == ("local, by host", "hierarchical", 1)
    assert plan.predict()["total"] == min(each.seconds["total"] for each in plan.candidates)
    needed = plan_of(mask, 128, balancer="auto", exchange="needed")
    assert all("by host" not in each.balancer for each in needed.candidates)


@pytest.mark.parametrize("mask", [SpanMask.causal(2**14), SpanMask.documents(np.arange(0, 2**14 + 1, 2**8))])
def test_it_does_not_suit_one_document_nor_short_ones(mask):
    assert not ByHost(8).suits(LayoutProblem({"default": mask}), 32)
    plan = plan_of(mask, 32, balancer="auto", exchange="auto")
    assert all("by host" not in each.balancer for each in plan.candidates)


def test_one_document_alone_is_spread_by_document():
    sizes, before = np.full(16, 500), np.append(0.0, np.cumsum(np.arange(1.0, 8001)))
    found = by_host.pieces_of_ranks(np.array([0, 8000]), before, sizes, 8, 1.05)
    usual = by_document.pieces_of_ranks(np.array([0, 8000]), before, sizes, 8, 1.05, (True, True))
    assert Layout([found], 16, 8000) == Layout([usual], 16, 8000)


def test_a_document_that_would_send_too_much_gives_its_hosts_heads():
    length, sizes, goal = 10_000, np.full(8, 4000), np.full(8, 1e7)
    before = np.append(0.0, np.cumsum(np.arange(1.0, length + 1)))
    light = np.array([[0.0, 30_000], [0.0, 0.0]])  # others weigh nothing
    one = np.zeros(1, np.int64), np.full(1, length)

    def sent(most):
        pieces, rest = host_filling.cut_wide(*one, before, sizes, goal, light, most)
        parts = [*pieces.tolist(), [int(pieces[-1, 0]) + 1, *rest[0].tolist()]]
        assert sorted(row for _, a, b in parts for row in range(a, b)) == list(range(length))
        last = {host: max(b for h, _, b in parts if h == host) for host, _, _ in parts}
        of_host = dict.fromkeys(last, 0)
        for host, a, b in parts:
            of_host[host] += sum(sum(end > row for end in last.values()) - 1 for row in range(a, b))
        assert host_filling._most_sent(pieces, (int(rest[0, 0]), int(rest[0, 1]))) == max(of_host.values())
        return max(of_host.values())

    assert sent(1.2 * length) <= 1.2 * length < sent(1e9)
