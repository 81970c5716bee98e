"""The simulated timeline by hand-computed examples, and what a plan predicts from it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spanwise import Hardware, Link, SpanMask, make_plan
from spanwise.hardware import attention_flops
from spanwise.planning import seconds as timeline

SHAPE = dict(num_q_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=24)


def test_forward_waits_for_each_piece() -> None:
    # Rank 1 packs longer, so that both pieces depart at 2; rank 0 is done with its own part at 4, rank 1 at 7.
    one = timeline.forward(np.array([1.0, 2.0]), np.array([[3.0, 1.0, 1.0], [5.0, 2.0, 2.0]]), np.array([3.0, 4.0]))
    assert one.sent[0].tolist() == [2, 5] and one.sent[1].tolist() == [5, 9]
    assert one.steps[0][0].tolist() == [0, 1, 5, 9] and one.steps[1][0].tolist() == [1, 4, 6, 10]
    assert one.steps[0][1].tolist() == [0, 2, 7, 9] and one.steps[1][1].tolist() == [2, 7, 9, 11]
    assert (one.seconds, one.compute, one.exchange, one.exposed) == (11, 11, 7, 0)


def test_ranks_wait_for_those_that_they_join_alone() -> None:
    """Ranks 0 and 2 exchange, rank 1 exchanges with nobody else here, rank 3 takes no part."""
    joined, pack = np.array([[0, 1, 0, -1]]), np.array([1.0, 5.0, 2.0, 2.0])
    one = timeline.forward(pack, np.ones((4, 2)), np.array([3.0]), joined=joined)
    assert one.steps[0][:, -1].tolist() == [5, 8, 5, 3] and one.sent[1].tolist() == [8]
    home = timeline.backward(np.stack([np.ones(4), pack], axis=1), np.array([3.0]), np.zeros(4), joined=joined)
    assert home.steps[0][:, -1].tolist() == [5, 8, 5, 3]


def test_backward_fetches_the_next_piece_beside_this_one() -> None:
    attention, exchange = np.array([[4.0, 1.0, 2.0]]), np.array([3.0, 5.0])
    one = timeline.backward(attention, exchange, np.array([0.0]), np.array([1.0, 2.0]))
    assert one.exchange_names == [
        *("K/V refetched, chunk 2", "K/V refetched, chunk 1"),
        *("dK/dV, chunk 2", "dK/dV, chunk 1"),
    ]
    assert one.sent[0].tolist() == [0, 2, 4, 9] and one.sent[1].tolist() == [2, 3, 9, 12]
    assert one.steps[0][0].tolist() == [2, 4, 5, 12]


def test_a_ring_passes_a_piece_on_when_its_turn_comes() -> None:
    attention, exchange = np.array([[3.0, 4.0, 1.0], [5.0, 1.0, 1.0]]), np.array([2.0, 3.0])
    one = timeline.forward(np.array([1.0, 1.0]), attention, exchange, chained=True)
    # Piece 1 is there at 3, rank 1 turns to it at 6: only then piece 2 leaves.
    assert one.sent[0].tolist() == [1, 6] and one.sent[1].tolist() == [3, 9]
    assert one.steps[0].tolist() == [[0, 1, 4, 9], [0, 1, 6, 9]] and one.exposed == 1
    at_once = timeline.forward(np.array([1.0, 1.0]), attention, exchange)
    assert at_once.sent[0].tolist() == [1, 3] and at_once.exposed == 0
    # Where the exchange is slow a piece leaves as soon as it has come.
    slow = timeline.forward(np.zeros(2), attention, np.array([20.0, 30.0]), chained=True)
    assert slow.sent[1].tolist() == [20, 50] and slow.seconds == 51


def test_gradients_on_a_ring_join_those_of_the_piece_after() -> None:
    attention, exchange, unpack = np.array([[4.0, 1.0, 2.0]]), np.array([3.0, 5.0]), np.array([1.0])
    one = timeline.backward(attention, exchange, unpack, chained=True)
    # Those of piece 2 leave at 2 and come at 7. Piece 1 is done at 3 and waits for them: the local part begins at 7.
    assert one.sent[0].tolist() == [2, 7] and one.sent[1].tolist() == [7, 10]
    assert one.steps[0][0].tolist() == [0, 2, 7, 11] and one.seconds == 12
    apart = timeline.backward(attention, exchange, unpack)
    assert apart.steps[0][0].tolist() == [0, 2, 3, 10] and apart.sent[1].tolist() == [7, 10]


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring"])
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
    assert any("refetched" in name for name in fetches) != keep_kv
    # Streams are in order, and nothing overlaps with itself.
    for rank, stream in itertools.product(range(4), ("compute", "exchange")):
        mine = [x for x in simulated.intervals if x.rank == rank and x.stream == stream]
        assert mine and all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(mine))
        assert mine[-1].end <= simulated.seconds + 1e-12
