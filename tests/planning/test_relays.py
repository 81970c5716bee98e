"""Which rank passes what on, against tables of tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

import spanwise
from spanwise import SpanMask, make_plan
from spanwise.attention.rank_plan import build
from spanwise.layouts.traffic import num_rows
from spanwise.planning.plan import Plan
from spanwise.routes import relays
from spanwise.routes.route import RouteProblem
from tests.planning.test_traffic import Dense, problems


@given(problems(exchange="hierarchical"), st.integers(2, 8))
def test_a_row_arrives_once_and_enters_a_host_once(problem: tuple[Plan, Dense], host_size: int) -> None:
    plan, dense = problem
    plan = plan.replace(hardware=spanwise.H100.with_host_size(host_size))
    groups = plan.num_groups
    places = plan.hardware.groups_on_a_host(groups, plan.inner) or groups
    host = np.arange(groups) // places
    rows = num_rows(plan.mask(), plan.layout)
    first, second = relays.moves(
        RouteProblem(plan.readings().needs, plan.readings().pairs, plan.kv_groups, host_groups=places)
    )
    for row in range(rows):
        owner = dense.kv_rank[row] // plan.inner
        came = np.zeros((groups, plan.kv_len), int)
        for _, receiver, sender, start, stop in first[first[:, 0] == row]:
            assert (owner[start:stop] == sender).all()
            came[receiver, start:stop] += 1
        direct = came > 0
        for _, receiver, sender, start, stop in second[second[:, 0] == row]:
            assert host[sender] == host[receiver]
            assert direct[sender, start:stop].all() and (host[owner[start:stop]] != host[receiver]).all()
            came[receiver, start:stop] += 1
        reads = np.stack([dense.reads(group, plan.inner)[row] & (owner != group) for group in range(groups)])
        assert (came == reads).all()
        for one in range(host[-1] + 1):
            entering = direct[host == one][:, host[owner] != one].sum(axis=0)
            assert (entering == reads[host == one][:, host[owner] != one].any(axis=0)).all()


@given(problems(exchange="hierarchical"), st.integers(2, 4))
def test_what_is_sent_is_what_is_received(problem: tuple[Plan, Dense], host_size: int) -> None:
    """On every pair of ranks, in each all-to-all; and all of it is in `moved`."""
    plan, _ = problem
    plan = plan.replace(hardware=spanwise.H100.with_host_size(host_size))
    alike = plan.batch_size // num_rows(plan.mask(), plan.layout)
    chunks = [build(plan, group * plan.inner).chunks["default"][1:] for group in range(plan.num_groups)]
    if plan.exchange == "ulysses":
        return
    assert {len(of_rank) for of_rank in chunks} == {plan.num_chunks()} == {len(plan.route().wire_tokens)}
    for i, tokens in enumerate(plan.route().wire_tokens):
        steps = [of_rank[i].step for of_rank in chunks]
        sizes = np.array([[x.shape[0] for x in (*step.send_sizes, *step.recv_sizes)] for step in steps])
        sent, received = np.split(alike * sizes, 2, axis=1)
        assert (received == sent.T).all() and (received == tokens).all()
    assert (plan.route().wire_tokens.sum(axis=(0, 2)) == plan.needed_tokens()[:: plan.inner]).all()


@given(
    arrays.arrays(np.int64, (3, 5), elements=st.integers(0, 30)),
    arrays.arrays(bool, (3, 5)),
    arrays.arrays(np.int64, 3, elements=st.integers(1, 60)),
)
def test_shares_go_to_the_least_loaded(load: np.ndarray, may: np.ndarray, amount: np.ndarray) -> None:
    may[:, 2] = True  # somebody reads it
    shares = relays._filled(load, may, amount)
    for one, allowed, tokens, share in zip(load, may, amount, shares, strict=True):
        level = one.copy()
        for _ in range(tokens):  # one after another
            level[np.flatnonzero(allowed)[np.argmin(level[allowed])]] += 1
        assert share.sum() == tokens and (share >= 0).all() and not share[~allowed].any()
        assert sorted((one + share)[allowed]) == sorted(level[allowed])


def plan_of_reads(reads: list[dict[int, tuple[int, int]]]) -> Plan:
    """Four ranks on hosts of two, ten tokens each; in each batch row the rows of some ranks read a few keys."""
    spans = np.zeros((2, len(reads), 40), int)
    for row, ranks in enumerate(reads):
        for rank, span in ranks.items():
            spans[:, row, 10 * rank : 10 * rank + 10] = np.array(span)[:, None]
    mask = SpanMask(*spans[:, :, None], 40)
    hosts = spanwise.H100.with_host_size(2)
    return make_plan(mask, 4, balancer="contiguous", exchange="hierarchical", hardware=hosts, block_size=1)


def test_a_rank_that_must_take_rows_passes_fewer_on() -> None:
    plan = plan_of_reads([{2: (0, 20), 3: (10, 20)}])  # rank 2 alone reads the first ten
    direct, passed = plan.route().wire_tokens
    assert direct.sum(axis=1).tolist() == [0, 0, 10, 10]
    assert passed.sum(axis=1).tolist() == [0, 0, 10, 0]
    plan = plan_of_reads([{2: (i, i + 1), 3: (i, i + 1)} for i in range(6)])  # one token a batch row
    assert [each.sum(axis=1).tolist() for each in plan.route().wire_tokens] == [[0, 0, 3, 3]] * 2


def test_ranks_wait_for_their_host_in_the_second_all_to_all() -> None:
    plan = plan_of_reads([{2: (0, 20), 3: (10, 20)}])
    assert plan.route().joined.tolist() == [[0, 1, 0, 1], [-1, -1, 2, 2]]
    plan = plan_of_reads([{0: (20, 21), 1: (20, 21), 2: (0, 1), 3: (0, 1)}])
    assert plan.route().joined.tolist() == [[0, -1, 0, -1], [0, 0, 2, 2]]
