"""What layers with a state and relayout refuse on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

import spanwise
from spanwise import SpanMask, recurrence
from tests.ranks.harness import run_ranks
from tests.recurrence import problem as problems

PLAN = spanwise.make_plan(SpanMask.causal(8), 1)
ROUTE = recurrence.recurrence_route(PLAN)
Q, K, V, DECAY, BETA = problems.make("gdn", 8, [(0, 8)]).inputs
X, W = torch.zeros(1, 8, 2), torch.zeros(2, 4)
TWO, OTHER, LONGER = (
    spanwise.make_plan(SpanMask.causal(n), 2, balancer=name)
    for n, name in ((256, "head_tail"), (256, "contiguous"), (257, "contiguous"))
)


MOVE = functools.partial(spanwise.relayout_route, TWO, OTHER)


def linear(*inputs: torch.Tensor, **options: Any) -> Any:
    return recurrence.gated_linear(*inputs, ROUTE, **options)


def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Any = None) -> Any:
    return recurrence.causal_conv(x, weight, bias, ROUTE, activation)


def on_ranks(call: Callable[[Any], Any]) -> Any:
    return run_ranks(2, lambda rank, mesh: call(mesh))


def dtensor(x: torch.Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: recurrence.recurrence_route(TWO), "needs their mesh"),
    (lambda: recurrence.recurrence_route(spanwise.make_plan(SpanMask.full(4, 8), 1)), "cross attention"),
    (lambda: recurrence.recurrence_route(spanwise.make_plan(SpanMask.shared_prefix(2, [3, 3]), 1)), "cu_seqlens"),
    (lambda: linear(Q, K, V, DECAY[:, :1]), "log_decay must have shape"),
    (lambda: linear(Q, K, V, DECAY, scale=torch.ones((), requires_grad=True)), "multiply q by a scale"),
    (lambda: recurrence.gated_linear(Q, K, V, DECAY, PLAN), "route must come from recurrence_route"),
    (lambda: recurrence.gated_delta(Q, K, V, DECAY, None, ROUTE), "gated_delta needs beta"),
    (lambda: conv(X, torch.zeros(2, 5)), "conv_width=5"),
    (lambda: spanwise.relayout(torch.zeros(1, 128, 2), TWO, OTHER), "needs their mesh"),
    (
        lambda: spanwise.relayout(torch.zeros(1, 128, 2), TWO, LONGER),
        r"from_plan has .* = \(256, 2\), to_plan \(257, 2\)",
    ),
    (
        lambda: on_ranks(lambda mesh: spanwise.relayout(torch.zeros(1, 256, 2), TWO, OTHER, mesh)),
        "this rank's 128 tokens",
    ),
    (lambda: on_ranks(lambda mesh: spanwise.relayout(X, MOVE(mesh), OTHER)), "both plans"),
    (lambda: on_ranks(lambda mesh: recurrence.causal_conv(X, dtensor(W, mesh), None, ROUTE)), "weight is a DTensor"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("call", [lambda v: linear(Q, K, v, DECAY), lambda v: conv(v[:, :, 0], W)])
def test_second_derivatives_are_refused(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    v = V.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(call(v).sum(), v, create_graph=True)
