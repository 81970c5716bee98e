"""verify compares the gradients of parameters that FSDP2 or tensor parallelism shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import spanwise
from spanwise import SpanMask
from tests.ranks.gloo import GlooPool

LENGTH = 24
PLAN = spanwise.make_plan(SpanMask.documents([0, 1, 10, LENGTH]), 2, block_size=4)


class Layer(nn.Module):
    """An attention layer of 2 heads; `forgets` is the share of a gradient that is lost."""

    def __init__(self, forgets: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forgets = forgets
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
        if plan.num_ranks > 1:
            heads = heads * (1 - self.forgets) + heads.detach() * self.forgets
        return x + self.out(spanwise.context_parallel_attention(*heads, plan).transpose(1, 2).flatten(2))


def report_of(model: nn.Module, mesh: DeviceMesh) -> tuple[bool, dict[str, float]]:
    x = torch.randn(1, LENGTH, 8, generator=torch.Generator().manual_seed(1))
    report = spanwise.verify(model, PLAN, mesh, inputs=[x])
    assert all(p.grad is None for p in model.parameters())
    return report.ok, report.errors


def sharded(rank: int, mesh: DeviceMesh, forgets: float, axes: tuple[str, ...]) -> Any:
    model = Layer(forgets)
    fully_shard(model, mesh=mesh[axes])
    return report_of(model, mesh["cp"])


def parallel(rank: int, mesh: DeviceMesh, forgets: float) -> Any:
    columns = ColwiseParallel(output_layouts=Replicate())  # the last dim holds all heads, as the layer unflattens it
    plan = {"qkv": columns, "out": RowwiseParallel(input_layouts=Replicate())}
    return report_of(parallelize_module(Layer(forgets), mesh["tp"], plan), mesh["cp"])


def check(pool: GlooPool, ranks: int, run: Any, *args: Any, **mesh: Any) -> None:
    for forgets in (0.0, 0.1):
        for ok, errors in pool.run(ranks, run, forgets, *args, **mesh):
            assert ok is (forgets == 0.0) and set(errors) == {"out", "dinputs[0]", "dparameters"}, errors
            assert forgets == 0.0 or 0.01 < errors["dparameters"] < 0.2, errors


def test_fully_sharded(gloo_pool: GlooPool) -> None:
    check(gloo_pool, 2, sharded, ("cp",), mesh_dim_names=("cp",))
    axes: Any = dict(mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    check(gloo_pool, 4, sharded, ("dp", "cp"), **axes)


def test_tensor_parallel(gloo_pool: GlooPool) -> None:
    check(gloo_pool, 4, parallel, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
