"""A rank whose call is refused there, and that lives on: the others learn of it soon, not after their timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask, recurrence
from spanwise.attention import call_log
from tests.limits import HANG
from tests.ranks.gloo import GlooPool, hear, tell

Door = Callable[[bool], Any]


def doors(mesh: DeviceMesh) -> dict[str, Door]:
    """Calls of every kind, with wrong arguments or right ones."""
    mask = SpanMask.causal(12)
    plan = spanwise.make_plan(mask, mesh.size(), block_size=2, balancer="contiguous")
    local, route = plan.local(mesh), recurrence.recurrence_route(plan, mesh)
    way = spanwise.relayout_route(plan, spanwise.make_plan(mask, mesh.size(), block_size=2, balancer="head_tail"), mesh)
    q, x = torch.ones(1, 2, 4, 8), torch.ones(1, 4, 2, 8)
    labels, weight = torch.zeros(4, dtype=torch.int64), torch.ones(3, 8)
    gates = -torch.ones(1, 4, 2)
    return {
        "attention": lambda bad: spanwise.context_parallel_attention(q, q, q[:, :, bad:], local),
        "packed": lambda bad: spanwise.packed_attention(x[0], x[0], x[0, bad:], local),
        "unshard": lambda bad: spanwise.unshard(local, x=x[:, bad:]),
        "roll": lambda bad: spanwise.roll(x, 1, local, cu_seqlens=[bad, 12]),
        "gated_linear": lambda bad: recurrence.gated_linear(x, x, x, gates[:, bad:], route),
        "gated_delta": lambda bad: recurrence.gated_delta(x, x, x, gates, gates[:, bad:], route),
        "causal_conv": lambda bad: recurrence.causal_conv(x[..., 0], torch.ones(2 - bad, 2), None, route),
        "relayout": lambda bad: spanwise.relayout(x[:, bad:], way),
        "cross_entropy": lambda bad: spanwise.cross_entropy(x[0, :, 0], labels[bad:], mesh),
        "linear": lambda bad: spanwise.linear_cross_entropy(x[0, :, 0], weight, labels - int(bad), loss_mesh=mesh),
        "logprobs": lambda bad: spanwise.token_logprobs(x[0, :, 0], labels[bad:], vocab_weight=weight, vocab_mesh=mesh),
    }


def lives_on(rank: int, mesh: DeviceMesh, name: str, steady: int) -> str:
    """Rank 1 makes no further call until the others have learned of its error."""
    call = doors(mesh)[name]
    for _ in range(steady):
        call(False)
    if rank == 1:
        with pytest.raises(ValueError) as raised:
            call(True)
        hear(mesh, "0 has learned", "2 has learned")
        return str(raised.value)
    with pytest.raises(spanwise.MismatchError) as raised:
        for _ in range(100):
            call(False)
    tell(mesh, f"{rank} has learned")
    return str(raised.value)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("steady", [0, 16])
@pytest.mark.parametrize(
    "name",
    ["attention", "linear", *(pytest.param(x, marks=SLOW) for x in (
        "packed", "unshard", "roll", "gated_linear", "gated_delta", "causal_conv", "relayout", "cross_entropy",
        "logprobs",
    ))],
)  # fmt: skip
def test_the_others_learn_why(gloo_pool: GlooPool, name: str, steady: int) -> None:
    first, second, third = gloo_pool.run(3, lives_on, name, steady)
    for text in (first, third):
        assert f"rank 1: an error(raised ValueError: {second})" in text, text


def alike(rank: int, mesh: DeviceMesh) -> tuple[int, int]:
    """All ranks are refused a call, in other words; one is late by more than the patience."""
    call = doors(mesh)["attention" if rank else "unshard"]
    for late in (0, 1):
        with pytest.raises(ValueError):
            call(True)
        if rank == late:
            time.sleep(call_log.PATIENCE + 1.0)
        doors(mesh)["attention"](False)
    call = doors(mesh)["attention"]
    for _ in range(3):
        call(False)
    (log,) = call_log.logs()
    log.confirm(log.count, HANG)
    return log.count, log.confirmed


def test_ranks_that_go_on_together_are_no_error(gloo_pool: GlooPool) -> None:
    for count, confirmed in gloo_pool.run(3, alike):
        assert count == confirmed


def fails_inside(rank: int, mesh: DeviceMesh, exchange: str, steady: int) -> list[str]:
    """Rank 1 fails in the middle of a call, as when its memory is full, leaves it out and goes on; nobody trains."""
    plan = spanwise.make_plan(SpanMask.causal(12), mesh.size(), block_size=2, exchange=exchange)
    local = plan.local(mesh)
    x, said = torch.ones(1, 4, local.tokens.shape[1], 8), []

    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        if rank == 1 and number == steady:
            raise torch.OutOfMemoryError("no memory")
        return score

    for number in range(steady + 3):  # noqa: B007 (score_mod reads it)
        try:
            spanwise.context_parallel_attention(x, x, x, local, kernel="reference", score_mod=score_mod)
        except RuntimeError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


@pytest.mark.parametrize(
    ("exchange", "steady"),
    [("needed", 8), *(pytest.param(*case, marks=SLOW) for case in [("needed", 0), ("ring", 8)])],
)
def test_a_rank_that_fails_inside_a_call_ends_it_for_all(gloo_pool: GlooPool, exchange: str, steady: int) -> None:
    """Its next call would meet what the others still do in this one: wrong numbers, or a hang."""
    first, second, third = gloo_pool.run(3, fails_inside, exchange, steady)
    for text in (*first, *second[1:], *third):  # who needs nothing of rank 1 finds its error in place of the next call
        assert text.startswith("MismatchError") and "OutOfMemoryError: no memory" in text and "rank 1" in text, text
    assert second[0] == "OutOfMemoryError no memory" and min(map(len, (first, second, third))) >= 2


class Fragile(torch.autograd.Function):
    """Identity whose backward fails where the number is negative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.number < 0:
            raise torch.OutOfMemoryError("no memory")
        return grad, None


def fails_backward(rank: int, mesh: DeviceMesh, whom: tuple[int, ...], steady: int) -> list[str]:
    """The backward of some ranks fails between two layers; they leave the step out and go on."""
    local = spanwise.make_plan(SpanMask.causal(12), mesh.size(), block_size=2).local(mesh)
    said = []
    for number in range(steady + 3):
        x = torch.ones(1, 2, local.tokens.shape[1], 8, requires_grad=True)
        try:
            out = spanwise.context_parallel_attention(x, x, x, local)
            out = Fragile.apply(out, -1 if rank in whom and number == steady else 1)
            spanwise.context_parallel_attention(out, out, out, local).sum().backward()
        except RuntimeError as error:
            said.append(f"{type(error).__name__} {error}")
    return said


@pytest.mark.parametrize("steady", [8, pytest.param(0, marks=SLOW)])
def test_a_backward_that_fails_on_one_rank_ends_it_for_all(gloo_pool: GlooPool, steady: int) -> None:
    """The forward of the next step would meet the others' backward: they waited, or aborted inside gloo."""
    first, second, third = gloo_pool.run(3, fails_backward, (1,), steady)
    for text in (*first, *second[1:], *third):
        assert text.startswith("MismatchError") and "rank 1" in text and "an error in its backward" in text, text
    assert second[0] == "OutOfMemoryError no memory" and len(first) == len(second) == len(third) == 3


def fail_alike(rank: int, mesh: DeviceMesh, steady: int) -> list[str]:
    """However late a rank is."""
    with mock.patch.object(call_log, "PATIENCE", HANG):
        return fails_backward(rank, mesh, (0, 1, 2), steady)


def test_ranks_that_fail_alike_go_on(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, fail_alike, 3) == [["OutOfMemoryError no memory"]] * 3
