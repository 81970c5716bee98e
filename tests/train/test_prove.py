"""The verdict on the ranks: what counts as the same, and that nothing wrong, NaN least of all, goes unnoticed."""

from __future__ import annotations

import math

import pytest
import torch

from spanwise.train.display import Display
from spanwise.train.prove import TOLERANCES, gradient_error, largest

NAN = float("nan")


def gradients(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=generator) for name in ("a", "b", "c")}


def test_equal_gradients_have_no_error_and_a_wrong_one_has_its_size() -> None:
    reference = gradients()
    assert gradient_error(gradients(), reference, 1e-4) == 0
    for name in reference:
        wrong = gradients()
        wrong[name] = wrong[name] * 1.25
        assert gradient_error(wrong, reference, 1e-4) == pytest.approx(0.25)
        wrong[name] = torch.zeros(3, 4)
        assert gradient_error(wrong, reference, 1e-4) == pytest.approx(1)


def test_one_wrong_entry_is_measured_against_its_own_tensor() -> None:
    reference = gradients()
    reference["b"] *= 1e-3
    wrong = {name: value.clone() for name, value in reference.items()}
    wrong["b"][2, 3] += 1e-4
    assert gradient_error(wrong, reference, 1e-4) == pytest.approx(1e-4 / reference["b"].abs().max().item(), rel=1e-4)


def test_rounding_of_a_gradient_that_is_zero_is_no_error() -> None:
    reference = gradients()
    top = max(value.abs().max().item() for value in reference.values())
    reference["b"] *= 1e-19
    noise = {**reference, "b": -reference["b"]}
    assert gradient_error(noise, reference, 1e-6) < 1e-12
    # The floor is a share of the model's largest gradient, and no more.
    noise["b"] = torch.full((3, 4), 1e-6 * top)
    assert gradient_error(noise, reference, 1e-6) == pytest.approx(1)
    zero = {name: torch.zeros(2) for name in "ab"}
    assert gradient_error(zero, zero, 1e-6) == 0
    assert gradient_error({**zero, "b": torch.ones(2)}, zero, 1e-6) == 1


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_is_an_error_whichever_side_and_tensor_holds_it(name: str, side: int) -> None:
    sides = gradients(), gradients()
    sides[side][name][1, 1] = NAN
    assert math.isnan(gradient_error(*sides, 1e-4))


def test_largest_keeps_nan() -> None:
    assert largest([1.0, 3.0, 2.0]) == 3
    assert largest([]) == 0
    for values in ([NAN, 1.0], [1.0, NAN], [0.0, NAN, 2.0]):
        assert math.isnan(largest(values))


def test_tensors_of_one_side_only_are_named() -> None:
    with pytest.raises(ValueError, match=r"one side only: \['d'\]"):
        gradient_error(gradients(), {**gradients(), "d": torch.ones(1)}, 1e-4)


@pytest.mark.parametrize(("proved", "word"), [(True, "proved"), (False, "FAILED")])
def test_the_summary_gives_the_verdict_and_the_definition(
    proved: bool, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"losses": [1.0], "tokens_per_second": [1.0], "imbalance": [1.0], "recv_tokens": [[3]], "eval_losses": []}
    proof = {"tolerance": TOLERANCES["float32"]._asdict()}
    found = {"reference_losses": [1.0], "max_loss_error": 0.0, "max_grad_error": NAN, "proof": proof, "proved": proved}
    Display(True, 1).summary({**one, **found, "steps": 1, "ranks": 1, "dp": 1, "cp": 1}, None)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert word in text and ("proved" in text) == proved
    assert "|g − g_ref|" in text and "loss within 0.0001 nats" in text
