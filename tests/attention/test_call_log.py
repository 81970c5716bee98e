"""Which call of a rank is expected, from the calls before it alone; and what a rank knows after a failure."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import utils

import spanwise.attention.compare  # noqa: F401  # registers the operator
from spanwise.attention import call_log
from spanwise.attention.call_log import Expectation
from spanwise.attention.failure import explanation

NEAR, FULL, LOSS = 1, 2, 3


def meets(kinds: list[int], expected: Expectation | None = None, fresh: Hashable = "plan") -> list[bool]:
    """Whether each call was expected; negative numbers are backwards."""
    expected = Expectation() if expected is None else expected
    return [expected.meets(kind, fresh, kind < 0) for kind in kinds]


def test_equal_histories_expect_the_same_and_repeating_ones_expect_what_comes() -> None:
    kinds = [NEAR, NEAR, NEAR, FULL]
    met = meets([*kinds, *kinds[::-1]] * 6)
    assert all(met[-8:]) and not met[0] and met == meets([*kinds, *kinds[::-1]] * 6)
    # What is expected follows from the calls before, not from the call itself.
    for history in itertools.product((NEAR, FULL), repeat=6):
        assert [meets([*history, last])[-1] for last in (NEAR, FULL)].count(True) <= 1


def test_all_calls_of_a_model_are_expected_from_the_third_step_on() -> None:
    """A small one's later, because twelve calls are looked at."""
    for layers in (10 * [NEAR, NEAR, NEAR, FULL], 32 * [NEAR], 3 * [NEAR]):
        step = [*layers, *[-10 - 2 * place for place in range(len(layers))]]  # each backward names its forward
        assert all(meets(6 * step)[max(2 * len(step), len(step) + 12) :])
    met = meets(9000 * [NEAR])  # evaluation: equal calls without an end
    assert all(met[13:8000]) and met.count(False) < 30
    expected = Expectation()
    meets(list(range(20_000)), expected)  # values that never come back
    assert len(expected._after) < 10_000 and len(expected._fresh) < 10_000


def test_what_is_fresh_is_expected_once_it_is_known() -> None:
    """Another plan, or number of tokens, is not; it spoils nothing for the calls after it."""
    for changes in (False, True):
        expected = Expectation()
        for step in range(6):
            met = meets([NEAR, FULL], expected, fresh="plan")
            met += meets([LOSS], expected, fresh=step if changes else 1)
            met += meets([-4, -6], expected, fresh=None)
        assert met == [True, True, not changes, True, True]
        assert meets([NEAR, FULL, NEAR], expected, fresh="another plan")[:2] == [False, True]


def test_no_cuda_graph_captures_a_comparison() -> None:
    """It would then compare once, and not in the steps that replay the graph."""
    graph = torch.fx.Graph()
    assert utils.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.spanwise.compare_call.default, ()))
    assert not utils.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.add.Tensor, ()))


def report(what: str = "all-to-all of K/V", ranks: Sequence[int] = (0, 1, 2, 3)) -> tuple[str, Sequence[int]]:
    return f"{what} failed", ranks


# Rank, reports, ranks that are cut off, trouble with the store; lost ranks and parts of the text.
FAILURES: dict[str, tuple[int, dict[int, Any], set[int], str, tuple[int, ...], tuple[str, ...]]] = {
    "two are silent": (2, {2: report(), 0: report("an all-gather")}, {3}, "", (1, 3), ("ranks 1, 3", "an all-gather")),
    # A mesh of 2 x 2 x 2 whose rank 7 is lost: rank 0 waits for 1, that for 3, and that for 7.
    "ranks of other groups lead to the lost one": (
        0, {0: report("q", (0, 1)), 1: report("a hop", (1, 3)), 3: report("a loss", (3, 7))}, set(), "", (7,),
        ("rank 7", "a hop failed", "a loss failed"),
    ),
    "without a store connections tell": (1, {1: report()}, {0}, "no store", (0,), ("lost: rank 0", "no store")),
    "without both": (1, {1: report()}, set(), "no store", (), ("no store",)),
    "nobody is lost": (1, {0: report(ranks=(0, 1)), 1: report(ranks=(0, 1))}, set(), "", (), ("all ranks are there",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_lost_ranks(name: str) -> None:
    rank, reports, cut, trouble, lost, parts = FAILURES[name]
    found, text = explanation(rank, reports, cut, trouble)
    assert found == lost and all(part in text for part in parts), text
    assert text.startswith(reports[rank][0]) and ("lost:" in text) == bool(lost)


def test_connections_are_closed_though_a_peer_has_closed_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a send that times out closes those to the others; without one, a rank waited for them until its timeout."""
    waited: list[int] = []

    def send(tensors: Any, peer: int, tag: int) -> Any:
        def wait(timeout: timedelta) -> None:
            waited.append(peer)
            raise RuntimeError("Connection closed by peer" if peer == 0 else "Timed out waiting 1ms")

        return SimpleNamespace(wait=wait)

    # Of three: rank 0 has just closed its end, so that a send to it begins and then fails; rank 1 lives.
    peers = SimpleNamespace(size=lambda: 3, rank=lambda: 2, send=send)
    monkeypatch.setattr(call_log, "logs", lambda: [SimpleNamespace(host=peers, ranks=range(3))])
    cut, open_sends = call_log.probe()
    call_log.close(open_sends)
    assert waited == [0, 1] and not cut
