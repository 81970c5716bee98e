"""Numbers that are arguments of compiled code: torch makes symbols of them under dynamic=True."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import recurrence
from tests.ranks.gloo import GlooPool

pytestmark = pytest.mark.compiles

LENGTH = 12
QUICK = ("count",)
NAMES = (*QUICK, "attention", "gated_linear", "gated_delta", "scores", "loss")


def three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v. Dynamo takes no tensor twice."""
    return x, x + 1, 2 * x


def doors(mesh: DeviceMesh) -> dict[str, tuple[Callable[[torch.Tensor, Any], torch.Tensor], list[Any], int | None]]:
    """By name: a call of a tensor and an argument, values of the argument, and the number of graphs, if it matters."""
    plan = spanwise.make_plan(spanwise.SpanMask.causal(LENGTH), mesh.size(), block_size=2, balancer="contiguous")
    local, route = plan.local(mesh), recurrence.recurrence_route(plan, mesh)
    tokens = local.tokens.shape[1]
    gates, weight = torch.ones(1, tokens, 2, dtype=torch.float64), torch.linspace(-1, 1, 28).view(7, 4)
    labels = torch.arange(tokens)[None]
    labels_of_all = torch.arange(5)[None]
    attend, loss = spanwise.context_parallel_attention, spanwise.linear_cross_entropy

    def scores(x: torch.Tensor, n: float) -> torch.Tensor:
        return spanwise.token_logprobs(
            x[:, :5, 0], labels_of_all, vocab_weight=weight, temperature=n, softcap=2 * n, vocab_mesh=mesh
        )

    numbers: list[Any] = [0.5, 0.25]
    return {
        "attention": (lambda x, n: attend(*three(x.transpose(1, 2)), local, scale=n, softcap=3 * n), numbers, None),
        "gated_linear": (lambda x, n: recurrence.gated_linear(*three(x), -gates, route, scale=n), numbers, None),
        "gated_delta": (lambda x, n: recurrence.gated_delta(*three(x), -gates, gates, route, scale=n), numbers, None),
        "scores": (scores, numbers, None),
        "loss": (lambda x, n: loss(x[:, :, 0], weight, labels, loss_mesh=mesh, softcap=n), numbers, None),
        # Another number of tokens is no other graph: it changes in every step.
        "count": (lambda x, n: spanwise.cross_entropy(x[:, :, 0], labels % 4, mesh, num_valid=n), [9.0, 8.5], 1),
    }


def differences(rank: int, mesh: DeviceMesh, name: str, backend: str) -> tuple[list[float], int]:
    """Of outputs and gradients from eager code; graphs that were made beyond those expected."""
    call, values, graphs = doors(mesh)[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    apart = []
    for value in values:
        x = torch.randn(1, LENGTH // mesh.size(), 2, 4, dtype=torch.float64)
        x, weight, results = x.requires_grad_(), torch.randn(()), []
        for run in (compiled, call):
            out = run(x.to(torch.float32) if name in ("scores", "loss") else x, value)
            (grad,) = torch.autograd.grad((out * weight).sum(), x)
            results.append((out.detach(), grad))
        apart += [(got - want).abs().max().item() for got, want in zip(*results, strict=True)]
    return apart, counter.frame_count - (graphs or counter.frame_count)


CASES = [
    pytest.param(name, backend, marks=[] if name in QUICK and backend == "aot_eager" else pytest.mark.slow)
    for name in NAMES
    for backend in ("aot_eager", "inductor")
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_numbers_are_arguments(gloo_pool: GlooPool, name: str, backend: str) -> None:
    for apart, too_many in gloo_pool.run(2, differences, name, backend):
        assert max(apart) < 1e-6 and not too_many
