"""What "auto" chooses, on hardware where the answer can be worked out, and that it tells why."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.plan import document_offsets
from spanwise import H100, Hardware, Link, SpanMask, make_plan

LLAMA = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
SHAPE = dict(num_q_heads=8, num_kv_heads=8, head_dim=64, dtype="float32")
DOCUMENTS = SpanMask.documents(document_offsets(32_768, 0))
SLOW = Hardware("slow link", 1e11, 1e11, 1e11, 1e10, 1e9, (Link(25e6, 1e-3),))
FREE = Hardware("free link", 1e11, 1e11, 1e11, 1e15, 1e9, (Link(1e15, 0.0),))
FLAT = dataclasses.replace(H100, name="all joined by NVLink", links=(dataclasses.replace(H100.links[0], ranks=None),))


def best(plan) -> float:
    return min(candidate.seconds["total"] for candidate in plan.candidates)


def chosen(plan):
    (found,) = [
        c for c in plan.candidates if (c.balancer, c.exchange, c.stages) == (plan.balancer, plan.exchange, plan.stages)
    ]
    return found


@pytest.mark.parametrize("hardware", [H100, SLOW, FREE])
@pytest.mark.parametrize(
    "mask", [DOCUMENTS, SpanMask.causal(32_768), SpanMask.sliding_window(32_768, 1024), SpanMask.full(32_768)]
)
def test_auto_takes_the_simplest_within_five_percent(mask: SpanMask, hardware: Hardware) -> None:
    plan = make_plan(mask, 8, hardware=hardware, **SHAPE)
    assert chosen(plan).seconds["total"] <= 1.05 * best(plan)
    within = [c for c in plan.candidates if c.seconds["total"] <= 1.05 * best(plan)]
    alike = [c for c in within if c.searched and (c.exchange, c.stages) == (plan.exchange, plan.stages)]
    if "local" not in plan.balancer:
        alike = [chosen(plan)]
    assert chosen(plan).seconds["total"] <= min(c.seconds["total"] for c in alike)
    for c in within[: within.index(alike[0])]:  # only an all_gather may have been passed over
        assert c.exchange == "all_gather" and min(x.recv_mean for x in within) <= 0.7 * c.recv_mean
    assert plan.predict() == pytest.approx(chosen(plan).seconds)
    assert chosen(plan).recv_max == plan.recv_tokens().max() and chosen(plan).imbalance == plan.imbalance()
    assert {c.exchange for c in plan.candidates} == {"all_gather", "needed", "ulysses"}
    assert {"contiguous", "head_tail", "local"} <= {c.balancer for c in plan.candidates}
    assert hardware.name in plan.reason
    assert all(c.balancer in plan.explain() for c in plan.candidates)


@pytest.mark.parametrize(
    ("mask", "balancer"), [(SpanMask.causal(131_072), "head_tail"), (SpanMask.full(131_072), "contiguous")]
)
def test_dense_masks_gain_nothing(mask: SpanMask, balancer: str) -> None:
    plan = make_plan(mask, 8, **LLAMA)
    assert (plan.balancer, plan.exchange) == (balancer, "all_gather") and "no plan considered is" in plan.reason


@pytest.mark.parametrize(("num_ranks", "bound", "most"), [(8, 1.02, 7_000), (64, 1.03, 10_300)])
def test_packed_documents_joined_by_nvlink_are_balanced_and_local(num_ranks: int, bound: float, most: int) -> None:
    plan = make_plan(SpanMask.documents(document_offsets(131_072, 1)), num_ranks, hardware=FLAT)
    assert plan.balancer.startswith("local") and plan.exchange == "needed" and plan.imbalance() <= bound + 1e-3
    assert plan.recv_tokens().mean() <= most and "times as fast as" in plan.reason
    assert plan.recv_tokens().max() <= 2.5 * plan.recv_tokens().mean()


def test_hosts_of_8_are_the_default() -> None:
    """So "auto" may choose the exchange for hosts, here at 64 ranks, where it is the faster one."""
    mask = SpanMask.documents(document_offsets(131_072, 1))
    plan = make_plan(mask, 64, exchange="auto", **LLAMA)
    assert plan.hardware is H100 and plan.exchange == "hierarchical"
    others = [c.seconds["total"] for c in plan.candidates if c.exchange != "hierarchical"]
    assert plan.predict()["total"] < min(others) and plan.host_traffic().host_size == 8
    assert make_plan(mask, 64, hardware=FLAT, **LLAMA).exchange == "needed"


def test_as_fast_but_far_more_bytes_is_not_simpler() -> None:
    """Where compute hides everything, an all_gather would still hold and send what nobody reads."""
    whole = make_plan(SpanMask.documents(np.arange(9) * 65_536), 8, **LLAMA)
    assert whole.exchange == "needed" and not whole.recv_tokens().any()
    long = SpanMask.documents(document_offsets(1 << 20, 0, median=65_536))
    plan = make_plan(long, 8, **LLAMA)
    assert plan.exchange == "needed" and plan.recv_tokens().mean() < 0.2 * (1 << 20)


def test_pieces_where_local_attention_is_too_short_to_hide_the_exchange() -> None:
    mask = SpanMask.causal(8192)
    base = dict(balancer="head_tail", exchange="needed", block_size=64, **SHAPE)
    per_pass = make_plan(mask, 4, stages=1, hardware=FREE, **base).predict()["compute_forward"]
    received = make_plan(mask, 4, stages=1, hardware=FREE, **base).recv_bytes().max()
    even = dataclasses.replace(FREE, links=(Link(received / per_pass, 0.0),))  # as long as the forward computes
    plan = make_plan(mask, 4, hardware=even, **base)
    assert plan.stages == 4 and {c.stages for c in plan.candidates} == {1, 2, 4}
    totals = [c.seconds["total"] for c in plan.candidates]
    assert totals == sorted(totals, reverse=True) and totals[-1] < 0.9 * totals[0]
    assert make_plan(mask, 4, hardware=FREE, **base).stages == 1  # nothing to hide


def test_what_is_given_is_kept() -> None:
    plan = make_plan(DOCUMENTS, 4, balancer="lpt", hardware=SLOW, **SHAPE)
    assert plan.balancer == "lpt" and {c.exchange for c in plan.candidates} == {"all_gather", "needed", "ulysses"}
    plan = make_plan(DOCUMENTS, 4, exchange="all_gather", hardware=SLOW, **SHAPE)
    assert plan.exchange == "all_gather" and {c.balancer for c in plan.candidates} == {"contiguous", "head_tail", "lpt"}
    plan = make_plan(DOCUMENTS, 4, balancer="lpt", exchange="needed", stages=2, hardware=SLOW, **SHAPE)
    assert (plan.stages, plan.candidates, plan.reason) == (2, (), "chosen by the caller")
    assert "32 query and 8 K/V heads of 128" in make_plan(DOCUMENTS, 8).reason  # as none were given
    assert "36 query and 9 K/V heads of 128" in make_plan(DOCUMENTS, (4, 3)).reason  # that three ranks can share
    one = make_plan(DOCUMENTS, 1)
    assert one.candidates == () and one.reason == "one rank computes everything"
    assert make_plan(DOCUMENTS, 1, stages=4) == one and one.stages == 1


@pytest.mark.parametrize(
    ("ranks", "host", "host_groups"),
    [
        ((8, 2), (4,), 2),  # two groups of two ranks on a host of four
        ((8, 2), (2,), None),  # a group is a host: whatever travels leaves it
        ((8, 2), (2, 8), 4),  # but racks hold four groups
        ((4, 3), (8,), None),  # the host's edge lies inside a group
    ],
    ids=str,
)
def test_layouts_by_host_know_how_many_groups_a_host_holds(ranks, host, host_groups) -> None:
    near = [dataclasses.replace(H100.links[0], ranks=size, bandwidth=4e11 / 4**i) for i, size in enumerate(host)]
    hardware = dataclasses.replace(H100, links=(*near, Link(2e10, 0.0)))
    found = hardware.groups_on_a_host(*ranks)
    assert found == host_groups
    plan = make_plan(DOCUMENTS, ranks, balancer="local", exchange="needed", hardware=hardware, num_q_heads=48)
    assert {c.balancer for c in plan.candidates} == {"local"} | ({"local, by host"} if found else set())


@pytest.mark.parametrize(("num_ranks", "heads"), [(2, None), (3, 6), (4, 6), (8, 8), (6, 4)])
def test_auto_considers_ulysses_where_heads_divide_and_a_ring_only_under_a_budget(num_ranks, heads) -> None:
    shape = {} if heads is None else dict(num_q_heads=heads, num_kv_heads=2, head_dim=16)
    mask = SpanMask.documents([0, 100, 900, 1024])
    plan = make_plan(mask, num_ranks, **shape)
    ulysses = ["ulysses"] * (heads is not None and heads % num_ranks == 0)
    assert {c.exchange for c in plan.candidates} == {"all_gather", "needed", *ulysses}
    for given in (dict(exchange="needed"), dict(keep_kv=False), dict(stages=2)):  # it has no chunks and keeps nothing
        assert not any(c.exchange == "ulysses" for c in make_plan(mask, num_ranks, **shape, **given).candidates)
    if heads is not None:
        plenty = make_plan(mask, num_ranks, memory_budget=10**12, **shape)
        assert {c.exchange for c in plenty.candidates} == {c.exchange for c in plan.candidates} | {"ring"}
        assert plenty.exchange != "ring"


def test_a_budget_picks_what_fits_and_names_the_least() -> None:
    weights = {"default": 3.0}
    given = dict(weights=weights, **SHAPE)

    def held(plan) -> int:  # three layers keep, one holds more
        saved = plan.saved_bytes()
        return int((3 * saved + plan.resident_bytes() - saved).max())

    every = make_plan(DOCUMENTS, 8, memory_budget=10**12, **given).candidates
    sizes = sorted({c.held for c in every})
    assert len(sizes) > 4
    for budget in sizes:
        plan = make_plan(DOCUMENTS, 8, memory_budget=budget, **given)
        assert held(plan) <= budget
        assert all(c.held <= budget for c in plan.candidates)
    least = min(every, key=lambda c: c.held)
    told = rf"memory_budget={least.held - 1:,} .*the least is {least.balancer} with {least.exchange}.* {least.held:,} "
    with pytest.raises(ValueError, match=told):
        make_plan(DOCUMENTS, 8, memory_budget=least.held - 1, **given)
    assert make_plan(DOCUMENTS, 8, memory_budget=least.held, **given).exchange == least.exchange
