"""Which call of a rank is expected: it follows from the calls before it alone."""

from __future__ import annotations

import itertools

from spanwise.attention.exchange.expectation import Call, Expectation


def test_equal_histories_expect_the_same_and_repeating_ones_expect_what_comes() -> None:
    kinds = [Call(b"plan", "attention", ("mask",), (mask,)) for mask in ("near", "near", "near", "full")]
    steps = (*kinds, *kinds[::-1]) * 6
    expected = Expectation()
    met = [expected.meets(call) for call in steps]
    assert all(met[-8:]) and not met[0]
    other = Expectation()
    assert [other.meets(call) for call in steps] == met
    # What is expected follows from the calls before, not from the call itself.
    for steps in itertools.product(kinds[2:], repeat=6):
        first, second = Expectation(), Expectation()
        assert [first.meets(call) for call in steps[:-1]] == [second.meets(call) for call in steps[:-1]]
        assert first.meets(kinds[2]) + second.meets(kinds[3]) <= 1
    assert not expected.meets(kinds[0]._replace(plan=b"other")) and expected.meets(kinds[0]._replace(plan=b"other"))


def test_all_calls_of_a_deep_model_are_expected_from_the_third_step_on() -> None:
    forward = [Call(b"plan", "attention", ("mask",), (mask,)) for mask in 10 * ("near", "near", "near", "full")]
    for layers in (forward, forward[:1] * 32, forward[:1] * 3):
        expected = Expectation()
        step = layers + [call._replace(name="backward") for call in layers[::-1]]
        assert all([expected.meets(call) for call in 4 * step][2 * len(step) :])
    expected = Expectation()  # evaluation: equal calls without an end
    assert all([expected.meets(forward[0]) for _ in range(9000)][2:4000])


def test_expectations_of_values_that_never_come_back_do_not_grow() -> None:
    expected = Expectation()
    for number in range(20_000):
        expected.meets(Call(b"plan", "attention", ("scale",), (number,)))
    assert len(expected._kinds) < 5000
