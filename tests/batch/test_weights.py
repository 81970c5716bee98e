"""Weights of labels: the weighted mean and sum of both losses, against the sum of single losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spanwise


def drawn() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((2, 5, 3), (7, 3)))
    labels = torch.randint(0, 7, (2, 5), generator=generator)
    labels[0, 1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels, torch.rand(2, 5, generator=generator) * 0.01


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("num_valid", [None, 0.25, torch.tensor(0.25)])
def test_each_loss_counts_by_its_weight(reduction: Any, num_valid: Any) -> None:
    """The sum of the weights is far below 1, where a number of tokens cannot be."""
    hidden, weight, labels, weights = drawn()
    each = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(2, 5) * weights
    count = weights[labels != -100].sum() if num_valid is None else num_valid
    expected = {"mean": each.sum() / count, "sum": each.sum(), "none": each}[reduction]
    cotangent = torch.randn_like(expected)
    given = {"num_valid": num_valid} if reduction == "mean" else {}
    losses = [
        spanwise.linear_cross_entropy(
            hidden, weight, labels, loss_mesh=None, reduction=reduction, weights=weights, chunk=3, **given
        )
    ]
    if reduction == "mean":
        losses.append(spanwise.cross_entropy(hidden @ weight.T, labels, None, weights=weights, **given))
    grads = torch.autograd.grad(expected, (hidden, weight), cotangent, retain_graph=True)
    for loss in losses:
        torch.testing.assert_close(loss, expected.to(loss.dtype))
        found = torch.autograd.grad(loss, (hidden, weight), cotangent, retain_graph=True)
        torch.testing.assert_close(found, grads)


def test_equal_weights_are_none_and_no_weight_is_a_loss_of_0() -> None:
    hidden, weight, labels, weights = drawn()
    for call in (
        lambda w: spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None, weights=w),
        lambda w: spanwise.cross_entropy(hidden @ weight.T, labels, None, weights=w),
    ):
        torch.testing.assert_close(call(torch.full_like(weights, 3)), call(None))
        assert call(torch.zeros_like(weights)).item() == 0
        with pytest.raises(ValueError, match=r"shape of labels, \(2, 5\), got \(5,\)"):
            call(weights[0])
        with pytest.raises(ValueError, match="weights are constants"):
            call(weights.clone().requires_grad_())


@pytest.mark.parametrize(
    ("labels", "options", "match"),
    [
        *(([[1, 2]], {"dtype": dtype}, f"labels must be int64, got {dtype}") for dtype in (torch.float32, torch.int32)),
        ([[1, -100], [0, 9]], {}, r"labels must be -100 or in \[0, 8\); labels\[1, 1\] is 9"),
        ([[1, 2, 3]], {"shape": (1, 2, 8)}, r"logits must be \[\*labels.shape, dim\], got \(1, 2, 8\)"),
        *(([[1]], {"num_valid": n}, f"num_valid must be a number of tokens, got {n!r}") for n in ("3", -1, math.nan)),
    ],
)
def test_wrong_losses(labels: Any, options: dict[str, Any], match: str) -> None:
    made = torch.tensor(labels, dtype=options.pop("dtype", torch.int64))
    logits = torch.zeros(options.pop("shape", (*made.shape, 8)))
    with pytest.raises(ValueError, match=match):
        spanwise.cross_entropy(logits, made, None, **options)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch, as it traces
def test_compiled_with_numbers_of_tokens_that_change() -> None:
    torch.compiler.reset()
    x, labels = torch.randn(1, 4, 5), torch.tensor([[1, -100, 2, 0]])
    compiled = torch.compile(spanwise.cross_entropy, backend="eager", fullgraph=True)
    for num_valid in (6, 9, 7.5, 2.5, torch.tensor(3)):
        whole = spanwise.cross_entropy(x, labels, None, num_valid=num_valid)
        torch.testing.assert_close(compiled(x, labels, None, num_valid=num_valid), whole)
    for zero in (0, torch.tensor(0)):  # it does not read labels
        assert compiled(x, labels, None, num_valid=zero) == math.inf
        assert compiled(x, torch.full_like(labels, -100), None, num_valid=zero) == 0
    torch.compiler.reset()
