"""Spread: equal seconds, unequal tokens within the limit, and long documents on few ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise import LayoutProblem, SpanMask, make_plan
from spanwise.layouts.spread import Spread


def problem(lengths: list[int], **options) -> LayoutProblem:
    cu_seqlens = np.cumsum([0, *lengths])
    return LayoutProblem({"default": SpanMask.documents(cu_seqlens, **options)}, cu_seqlens=cu_seqlens)


def seconds_of(layout, given: LayoutProblem, pair: float, token: float) -> np.ndarray:
    each = given.area[0] * pair + token
    return np.array([each[layout.indices(rank)].sum() for rank in range(layout.num_ranks)])


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any),
    st.integers(1, 7),
    st.sampled_from([1.0, 1.2, 2.0, 9.0]),
    st.sampled_from([(1.0, 0.0), (1.0, 30.0), (0.0, 1.0)]),
    st.booleans(),
    st.sampled_from([None, 1, 2, 3]),
)
def test_any_documents_fit(
    lengths: list[int], ranks: int, slack: float, rates: tuple[float, float], causal: bool, host_size: int | None
) -> None:
    tokens = sum(lengths)
    limit = int(np.ceil(slack * tokens / ranks))
    given = problem(lengths, causal=causal)
    layout = Spread(*rates, max_tokens=limit, host_size=host_size).assign(given, ranks)  # a Layout tiles the sequence
    assert layout.tokens_per_rank.max() <= limit
    assert np.count_nonzero(layout.tokens_per_rank) == min(ranks, tokens)


@pytest.mark.parametrize("token_seconds", [0.0, 1.0, 30.0])
def test_no_rank_is_empty_where_documents_have_one_token(token_seconds: float) -> None:
    layout = Spread(1.0, token_seconds, max_tokens=2).assign(problem([1, 1, 2, 1, 1], causal=True), 5)
    assert sorted(layout.tokens_per_rank) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("window", [None, (500, 0)])
@pytest.mark.parametrize("seed", range(4))
def test_seconds_are_balanced_where_the_limit_allows(seed: int, window: tuple[int, int] | None) -> None:
    lengths = np.random.default_rng(seed).lognormal(7, 1.4, 80).astype(int).tolist()
    given = problem(lengths, window=window)
    layout = Spread(1.0, 2000.0, max_tokens=sum(lengths)).assign(given, 16)
    busy = seconds_of(layout, given, 1.0, 2000.0)
    assert busy.max() <= 1.03 * busy.mean()
    # A document lies on about as many ranks as its seconds need; a short one may fill what others left.
    offsets = np.cumsum([0, *lengths])
    for start, stop in itertools.pairwise(offsets.tolist()):
        held = sum(any(a < stop and b > start for a, b in layout.runs(rank)) for rank in range(16))
        share = (given.area[0, start:stop] + 2000.0).sum() / busy.mean()
        assert held <= max(3, np.ceil(1.3 * share))


def test_a_document_crosses_hosts_only_if_it_needs_more_ranks() -> None:
    """Of 4 ranks: a document needs 5 of 16, two need 3, one needs 2; in a row the last would cross, too."""
    lengths = [50_000, 30_000, 30_000, 20_000, *[1_000] * 30]
    given = problem(lengths, causal=False, window=(0, 0))  # seconds by tokens alone
    for host_size, crossing in ((None, 2), (4, 1)):
        layout = Spread(0.0, 1.0, 13_000, host_size).assign(given, 16)
        ranks = layout.pieces()[np.argsort(layout.pieces()[:, 1]), 0]
        starts = np.sort(layout.pieces()[:, 1])
        hosts = [
            {int(rank) // 4 for rank in ranks[(starts >= begin) & (starts < end)]}
            for begin, end in itertools.pairwise(np.cumsum([0, *lengths[:4]]))
        ]
        assert sum(len(each) > 1 for each in hosts) == crossing
        assert layout.tokens_per_rank.max() <= 1.05 * layout.tokens_per_rank.mean()


def test_unequal_tokens_need_fewer_bytes() -> None:
    lengths = [40_000, *[1_000] * 60]
    mask = SpanMask.documents(np.cumsum([0, *lengths]))
    equal = make_plan(mask, 8, balancer="local", exchange="needed")
    unequal = make_plan(mask, 8, balancer=Spread(1.0, 20_000.0, 25_000), exchange="needed")
    assert unequal.recv_tokens().sum() < 0.8 * equal.recv_tokens().sum()
    tokens = unequal.layout.tokens_per_rank
    assert tokens.max() > 1.5 * tokens.min() and tokens.max() <= 25_000
    busy = unequal.work() + 20_000.0 * tokens
    assert busy.max() <= 1.02 * busy.mean()


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="not both 0"):
        Spread(0.0, 0.0, 5)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Spread(1.0, 0.0, 0)
    with pytest.raises(ValueError, match="host_size must be at least 1, or None .* got 0"):
        Spread(1.0, 0.0, 4, host_size=0)
    with pytest.raises(ValueError, match="10 tokens do not fit on 2 ranks of at most max_tokens=4"):
        Spread(1.0, 0.0, 4).assign(problem([10]), 2)
    with pytest.raises(ValueError, match="Spread needs cu_seqlens and masks of batch 1"):
        Spread(1.0, 0.0, 4).assign(LayoutProblem({"default": SpanMask.causal(8)}), 2)
