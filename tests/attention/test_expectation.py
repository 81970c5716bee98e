"""Which call of a rank is expected, from the calls before it alone; and the operator that compares in compiled code."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import torch
from torch._inductor import utils

import spanwise.attention.compare  # noqa: F401  # registers the operator
from spanwise.attention.call_log import Expectation

NEAR, FULL, LOSS = 1, 2, 3


def meets(kinds: list[int], expected: Expectation | None = None, fresh: Hashable = "plan") -> list[bool]:
    """Whether each call was expected; negative numbers are backwards."""
    expected = Expectation() if expected is None else expected
    return [expected.meets(kind, fresh, kind < 0) for kind in kinds]


def test_equal_histories_expect_the_same_and_repeating_ones_expect_what_comes() -> None:
    kinds = [NEAR, NEAR, NEAR, FULL]
    steps = [*kinds, *kinds[::-1]] * 6
    met = meets(steps)
    assert all(met[-8:]) and not met[0]
    assert meets(steps) == met
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


def test_expectations_of_values_that_never_come_back_do_not_grow() -> None:
    expected = Expectation()
    meets(list(range(20_000)), expected)
    assert len(expected._after) < 10_000 and len(expected._fresh) < 10_000


def test_no_cuda_graph_captures_a_comparison() -> None:
    """It would then compare once, and not in the steps that replay the graph."""
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.spanwise.compare_call.default, ())
    assert utils.is_cudagraph_unsafe_fx_node(call)
    assert not utils.is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.add.Tensor, ()))
