"""The simulated timeline by hand-computed examples, and what a plan predicts from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spanwise import Hardware, Link, SpanMask, make_plan, timeline
from spanwise.cost import attention_flops

SHAPE = dict(num_q_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=24)


def test_forward_waits_for_each_piece() -> None:
    # Rank 1 packs longer, so that both pieces depart at 2; rank 0 is done with its own part at 4, rank 1 at 7.
    one = timeline.forward(np.array([1.0, 2.0]), np.array([[3.0, 1.0, 1.0], [5.0, 2.0, 2.0]]), np.array([3.0, 4.0]))
    assert one.exchange_start.tolist() == [2, 5] and one.exchange_end.tolist() == [5, 9]
    assert one.start[0].tolist() == [0, 1, 5, 9] and one.end[0].tolist() == [1, 4, 6, 10]
    assert one.start[1].tolist() == [0, 2, 7, 9] and one.end[1].tolist() == [2, 7, 9, 11]
    assert (one.seconds, one.compute, one.exchange, one.exposed) == (11, 11, 7, 0)


def test_backward_sends_each_piece_home() -> None:
    attention, exchange = np.array([[4.0, 1.0, 2.0], [3.0, 2.0, 1.0]]), np.array([3.0, 5.0])
    one = timeline.backward(attention, exchange, np.array([1.0, 1.0]))
    # Piece 2 is done at 2 and 1, piece 1 at 3 on both ranks, the local part at 7 and 6.
    assert one.exchange_names == ("dK/dV, piece 2", "dK/dV, piece 1")
    assert one.exchange_start.tolist() == [2, 7] and one.exchange_end.tolist() == [7, 10]
    assert one.start[:, -1].tolist() == [10, 10] and one.seconds == 11 and one.compute == 8 and one.exposed == 3


def test_backward_fetches_the_next_piece_beside_this_one() -> None:
    attention, exchange = np.array([[4.0, 1.0, 2.0]]), np.array([3.0, 5.0])
    one = timeline.backward(attention, exchange, np.array([0.0]), np.array([1.0, 2.0]))
    assert one.exchange_names == ("K/V again, piece 2", "K/V again, piece 1", "dK/dV, piece 2", "dK/dV, piece 1")
    assert one.exchange_start.tolist() == [0, 2, 4, 9] and one.exchange_end.tolist() == [2, 3, 9, 12]
    assert one.start[0].tolist() == [2, 4, 5, 12]


@pytest.mark.parametrize("exchange", ["all_gather", "needed"])
@pytest.mark.parametrize("keep_kv", [True, False])
def test_timeline_of_a_plan(exchange: str, keep_kv: bool) -> None:
    hardware = Hardware("toy", 1e6, 5e5, 1e6, 1e7, 1e6, (Link(1e6, 1e-3, ranks=2), Link(1e5, 0.5)), edge_pairs=3)
    plan = make_plan(
        SpanMask.documents([0, 100, 101, 400]), 4, balancer="lpt", exchange=exchange, block_size=8, keep_kv=keep_kv,
        hardware=hardware, weights={"default": 3}, **SHAPE,
    )  # fmt: skip
    simulated, parts = plan.timeline(), plan.predict()
    assert parts["total"] == pytest.approx(3 * simulated.seconds)
    for key, one in (("forward", simulated.forward), ("backward", simulated.backward)):
        assert parts[f"compute_{key}"] == pytest.approx(3 * one.compute)
        assert parts[f"exchange_{key}"] == pytest.approx(3 * one.exchange)
        assert one.seconds == pytest.approx(one.compute + one.exposed)
    # At least the kernels of the busiest rank, at least the bytes of the busiest receiver.
    flops = attention_flops(float(plan.work().max()), 8, 16, 24, backward=False)
    assert simulated.forward.compute >= flops / 1e6 > 0
    fetches = simulated.backward.exchange_names
    assert any("again" in name for name in fetches) != keep_kv
    # Streams are in order, and nothing overlaps with itself.
    for rank, stream in itertools.product(range(4), ("compute", "exchange")):
        mine = [x for x in simulated.intervals if x.rank == rank and x.stream == stream]
        assert mine and all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(mine))
        assert mine[-1].end <= simulated.seconds + 1e-12


def test_nothing_travels_on_one_rank_or_between_whole_documents() -> None:
    hardware = Hardware("toy", 1e6, 1e6, 1e6, 1e30, 1e6, (Link(1e5, 0.5),))
    one = make_plan(SpanMask.causal(64), 1, hardware=hardware, **SHAPE)
    apart = make_plan(
        SpanMask.documents([0, 64, 128]), 2, balancer="contiguous", exchange="needed", block_size=8,
        hardware=hardware, **SHAPE,
    )  # fmt: skip
    for plan in (one, apart):
        assert plan.num_pieces() == 0
        parts = plan.predict()
        assert parts["exchange_forward"] == parts["exposed_forward"] == parts["exposed_backward"] == 0
        assert parts["total"] == pytest.approx(attention_flops(64 * 65 / 2, 8, 16, 24, backward=False) / 1e6 * 3.4)
