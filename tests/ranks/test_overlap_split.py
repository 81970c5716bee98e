"""Graphs in pieces on real gloo ranks: a compiled tensor-parallel step gives the eager one's outputs and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from spanwise.overlap.backend import backend
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx import operators
from spanwise.overlap.optimize import Result
from tests.ranks.gloo import GlooPool

pytestmark = pytest.mark.compiles

DIM, TOKENS = 32, 24


class BySize:
    """Collectives by their bytes, products by their FLOPs; all else nearly nothing.

    Args:
        per_flop: milliseconds. With 2e-6 collectives are longer than the products next to them.
    """

    half_rate = 0

    def __init__(self, per_flop: float) -> None:
        self.per_flop = per_flop

    def uuid(self) -> str:
        return f"by size, {self.per_flop}"

    def __call__(self, node: fx.Node) -> float:
        if node.target in operators.STARTS:
            return 1e-2 + 1e-3 * sum(t.nbytes for n in node.all_input_nodes for t in operators.tensors_of(n))
        return 1e-4 + self.per_flop * node_flops(node)


class Block(nn.Module):
    """Norm, feed-forward layer, residual: with sequence parallelism a gather and a reduce-scatter each way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = (nn.Linear(DIM, 4 * DIM) for _ in range(2))
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def blocks(num: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num)))


def parallel(module: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """torchtitan's plan of a layer: hidden states in shards of the sequence, dim 1."""
    plan: dict[str, Any] = {"": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))}
    for i in range(len(module)):
        plan |= {
            f"{i}.norm": SequenceParallel(),
            f"{i}.gate": ColwiseParallel(input_layouts=Shard(1)),
            f"{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"{i}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    return parallelize_module(module, mesh, plan)


def step(run: Any, module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    out.backward(grad)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return [out.detach(), x.grad, *(g.clone() for g in grads)]


def errors(
    rank: int, mesh: DeviceMesh, name: str, num: int, batch: int, dtype: torch.dtype, per_flop: float
) -> dict[str, Any]:
    """Errors to float64 of a step: of the compiled one in pieces, and compiled whole."""
    torch._dynamo.reset()
    draw = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, batch, TOKENS, DIM, generator=draw, dtype=torch.float64)
    one_device = blocks(num).double()
    exact = step(one_device, one_device, x, grad)
    found: dict[str, Any] = {"cut": []}
    for split in (False, True):
        torch._dynamo.reset()
        results: list[Result] = []
        module = parallel(copy.deepcopy(blocks(num)).to(dtype), mesh)
        run = torch.compile(
            module, backend=backend(name, cost=BySize(per_flop), split=split, bucket=False, on_result=results.append)
        )
        got = step(run, module, x.to(dtype), grad.to(dtype))
        found[split] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, exact, strict=True)]
        found["cut"] += [dict(r.split.collectives) for r in results if r.split is not None]
    return found


@pytest.mark.parametrize(
    ("name", "num_ranks", "num", "batch", "dtype"),
    [
        ("aot_eager", 2, 1, 1, torch.float32),
        pytest.param("aot_eager", 2, 2, 1, torch.float32, marks=pytest.mark.slow),
        pytest.param("aot_eager", 4, 1, 3, torch.float64, marks=pytest.mark.slow),
        pytest.param("aot_eager", 2, 1, 2, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("inductor", 2, 1, 2, torch.float32, marks=pytest.mark.slow),
        pytest.param("inductor", 4, 1, 1, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_a_step_in_pieces_is_the_eager_one(
    gloo_pool: GlooPool, name: str, num_ranks: int, num: int, batch: int, dtype: torch.dtype
) -> None:
    answers = gloo_pool.run(num_ranks, errors, name, num, batch, dtype, 2e-6, mesh_dim_names=("tp",))
    rounding = 4 * torch.finfo(dtype).eps
    for answer in answers:
        assert len(answer["cut"]) == 2, answer  # forward and backward
        for cut in answer["cut"]:
            assert cut.get("all_gather_into_tensor", 0) >= num and cut.get("reduce_scatter_tensor", 0) >= num, answer
        for in_pieces, whole in zip(answer[True], answer[False], strict=True):
            assert in_pieces <= max(1.5 * whole, rounding)
