"""A gated recurrence on whole tensors and on the shards of ranks: outputs and all gradients."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

import spanwise
from spanwise import recurrence
from tests.recurrence import oracle

KINDS = ("mamba2", "gla", "lightning", "gdn", "kda", "mamba", "griffin", "conv")


def documents_of(cuts: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cuts))


def plan_of(cuts: list[int], ranks: int, balancer: Any = "head_tail", block_size: int = 4) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents(cuts)
    return spanwise.make_plan(mask, ranks, balancer=balancer, exchange="needed", block_size=block_size)


@dataclasses.dataclass
class Problem:
    """Inputs ``[T, …]`` of one kind of layer and a cotangent; documents by (start, stop)."""

    kind: str
    inputs: list[torch.Tensor]  # q, k, v, log_decay, and beta for delta rules; of a convolution x, weight and bias
    d_out: torch.Tensor
    documents: list[tuple[int, int]]
    scale: float | None = 0.5
    activation: str | None = None
    shared: tuple[int, ...] = ()  # inputs that all ranks have whole

    def to(self, dtype: torch.dtype) -> Problem:
        return dataclasses.replace(self, inputs=[x.to(dtype) for x in self.inputs], d_out=self.d_out.to(dtype))

    def cut(self, plan: spanwise.Plan, rank: int) -> list[torch.Tensor]:
        return [x if n in self.shared else plan.shard(x, rank, dim=0) for n, x in enumerate(self.inputs)]

    def of_tokens(self) -> list[torch.Tensor]:
        return [*(x for n, x in enumerate(self.inputs) if n not in self.shared), self.d_out]


def make(kind: str, length: int, documents: list[tuple[int, int]], seed: int = 0, decay: float = 0.5) -> Problem:
    """Random tensors in float64; `decay` scales the log decays."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if kind == "conv":
        x, weight, bias, d_out = (normal(*shape) for shape in ((length, 3), (3, 1 + seed % 5), (3,), (length, 3)))
        return Problem(kind, [x, weight, bias], d_out, documents, None, "silu" if seed % 2 else None, (1, 2))
    heads, keys, values = {"mamba": (4, 3, 1), "griffin": (4, 1, 1)}.get(kind, (2, 3, 5))
    shape: tuple[int, ...] = (length, heads, keys) if kind in ("gla", "kda", "mamba") else (length, heads)
    inputs = [
        normal(length, 1, keys),
        normal(length, {"mamba2": 1, "mamba": 1, "griffin": 2}.get(kind, heads), keys),
        normal(length, heads, values),
        -decay * normal(*((heads,) if kind == "lightning" else shape)).abs(),
    ]
    if kind in ("gdn", "kda"):
        inputs[1] = torch.nn.functional.normalize(inputs[1], dim=-1)
        inputs.append(normal(length, heads).sigmoid())
    shared = (3,) if kind == "lightning" else ()
    return Problem(kind, inputs, normal(length, heads, values), documents, shared=shared)


def expected(problem: Problem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs and the gradients of inputs, on one device in float64."""
    double = problem.to(torch.float64)
    inputs = [x.clone().requires_grad_() for x in double.inputs]
    if problem.kind == "conv":
        out = oracle.convolution(*inputs, problem.documents, problem.activation)
    else:
        scale = inputs[0].shape[-1] ** -0.5 if problem.scale is None else problem.scale
        out = oracle.recurrence(*inputs[:4], inputs[4] if len(inputs) > 4 else None, problem.documents, scale)
    return out.detach(), list(torch.autograd.grad(out, inputs, double.d_out, materialize_grads=True))


def layer(problem: Problem, inputs: list[torch.Tensor], route: Any) -> Any:
    """The sharded layer of the problem's kind."""
    if problem.kind == "conv":
        return recurrence.causal_conv(*inputs, route, problem.activation)
    call = recurrence.gated_delta if len(inputs) > 4 else recurrence.gated_linear
    return call(*inputs, route, scale=problem.scale)


def on_rank(rank: int, mesh: Any, plan: spanwise.Plan, problem: Problem) -> Any:
    """The same on one rank: outputs and gradients of its inputs. Convolutions may be narrower than the route's."""
    route = recurrence.recurrence_route(plan, mesh if plan.num_ranks > 1 else None, conv_width=5)
    leaves = [x.clone().requires_grad_() for x in problem.cut(plan, rank)]
    out = layer(problem, leaves, route)
    return out.detach(), torch.autograd.grad(out, leaves, plan.shard(problem.d_out, rank, dim=0))


def check(plan: spanwise.Plan, problem: Problem, results: list[Any], tolerance: float) -> None:
    """Compare all ranks' results with one device; errors are relative to the largest entry of each tensor."""
    out, grads = expected(problem)
    for rank, (mine, mine_grads) in enumerate(results):
        _close(mine, plan.shard(out, rank, dim=0), out, tolerance, f"out of rank {rank}")
        for number, (got, want) in enumerate(zip(mine_grads, grads, strict=True)):
            if number not in problem.shared:
                _close(got, plan.shard(want, rank, dim=0), want, tolerance, f"gradient of input {number}, rank {rank}")
    for number in problem.shared:
        total = sum(mine_grads[number].double() for _, mine_grads in results)
        _close(total, grads[number], grads[number], tolerance, f"gradient of the shared input {number}")


def _close(got: Any, want: torch.Tensor, whole: torch.Tensor, tolerance: float, what: str) -> None:
    assert got.shape == want.shape, what
    error = (got.double() - want).abs().max().item() if want.numel() else 0.0
    assert error <= tolerance * max(1.0, whole.abs().max().item() if whole.numel() else 0.0), f"{what}: {error}"
