"""Whole training steps, each traced as one graph: forward, backward and an optimizer that writes its inputs.

Parallel by DTensor parametrizations (SimpleFSDP), by tensor parallelism, by hand-written gathers. Every function takes
the mesh and returns the graph and its arguments, which differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils import parametrize, stateless
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from spanwise.overlap import _torch

Traced = tuple[torch.fx.GraphModule, tuple[Any, ...]]


def trace(step: Callable[..., Any], *args: Any, mode: str = "fake") -> Traced:
    return make_fx(step, tracing_mode=mode)(*args), args


def rank_data(mesh: DeviceMesh, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1 + mesh.get_local_rank()))


def adam(params: list[Any], grads: list[Any], means: list[Any], squares: list[Any]) -> None:
    """Adam in place, with foreach operators."""
    torch._foreach_lerp_(means, grads, 0.1)
    torch._foreach_mul_(squares, 0.99)
    torch._foreach_addcmul_(squares, grads, grads, 0.01)
    scale = torch._foreach_sqrt(squares)
    torch._foreach_add_(scale, 1e-8)
    torch._foreach_addcdiv_(params, means, scale, -1e-2)


def zeros(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(p) for p in params]


def summed(grads: Sequence[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    name = _torch.group_name(mesh.get_group())
    return [g / mesh.size() for g in [_torch.wait(_torch.start_all_reduce(g, "sum", name)) for g in grads]]


class Gathered(nn.Module):
    """Parametrization of SimpleFSDP: a sharded parameter is gathered where it is read."""

    def forward(self, shard: DTensor) -> torch.Tensor:
        whole = shard.redistribute(placements=[Replicate()])
        assert isinstance(whole, DTensor)
        return whole.to_local(grad_placements=[Partial("avg")])


def of_dtensors(model: nn.Module, mesh: DeviceMesh, x: torch.Tensor, *, clip: bool = False) -> Traced:
    """A step of a model whose parameters are DTensors; the graph's inputs are their shards."""
    params: dict[str, Any] = dict(model.named_parameters())

    def step(shards: dict[str, Any], means: list[Any], squares: list[Any], x: torch.Tensor) -> torch.Tensor:
        whole = {
            name: DTensor.from_local(
                s,
                mesh,
                params[name].placements,
                run_check=False,
                shape=params[name].shape,
                stride=params[name].stride(),
            ).requires_grad_()
            for name, s in shards.items()
        }
        with stateless._reparametrize_module(model, whole):
            out = model(x)
        loss = (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()
        grads = [g.redistribute(placements=w.placements).to_local() for g, w in zip(
            torch.autograd.grad(loss, list(whole.values())), whole.values(), strict=True)]  # fmt: skip
        with torch.no_grad():
            if clip:
                norm = summed([torch.stack(torch._foreach_norm(grads)).square().sum()], mesh)[0].sqrt()
                torch._foreach_mul_(grads, torch.clamp(0.1 / norm, max=1.0))
            adam(list(shards.values()), grads, means, squares)
        return loss.detach()

    shards = {name: p.to_local().detach().clone() for name, p in params.items()}
    return trace(step, shards, zeros(list(shards.values())), zeros(list(shards.values())), x)


def simple_fsdp(mesh: DeviceMesh) -> Traced:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return of_dtensors(model, mesh, rank_data(mesh, 8, 16), clip=True)


def functionalized(mesh: DeviceMesh) -> Traced:
    """The same without writes and views but the ``copy_`` of each input at the end."""
    gm, args = simple_fsdp(mesh)
    inner = make_fx(lambda *flat: gm(*pytree.tree_unflatten(list(flat), spec)), tracing_mode="fake")
    flat, spec = pytree.tree_flatten(args)
    functional = functionalize(inner(*flat), remove="mutations_and_views")
    return trace(lambda *flat: functional(*flat), *flat)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel(mesh: DeviceMesh) -> Traced:
    torch.manual_seed(0)
    model = nn.Sequential(_Residual(), _Residual())
    styles = {
        "*.norm": SequenceParallel(),
        "*.up": ColwiseParallel(input_layouts=Shard(1)),
        "*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    inner = parallelize_module(model, mesh, styles)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(DTensor.from_local(x, mesh, [Shard(1)], run_check=False))

    return of_dtensors(Whole(), mesh, rank_data(mesh, 2, 8, 16))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _torch.wait(_torch.start_all_gather(shard, mesh.size(), _torch.group_name(mesh.get_group())))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name = _torch.group_name(ctx.mesh.get_group())
        return _torch.wait(_torch.start_reduce_scatter(grad.contiguous(), ctx.mesh.size(), name)), None


def two_steps(mesh: DeviceMesh) -> Traced:
    """Two steps in one graph, with checkpointed layers: the second step gathers what the first has written."""
    draw = torch.Generator().manual_seed(0)
    shards = [torch.randn(16 // mesh.size(), 16, generator=draw) / 4 for _ in range(3)]

    def layer(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(x @ _Gather.apply(shard, mesh).t()), 0.2)

    def step(shards: list[Any], x: torch.Tensor) -> Any:
        for part in x.chunk(2):
            given = [shard.detach().requires_grad_() for shard in shards]
            for shard in given:
                part = checkpoint(layer, part, shard, use_reentrant=False)
            torch._foreach_add_(shards, torch.autograd.grad(part.square().mean(), given), alpha=-0.1)
        return shards

    return trace(step, shards, rank_data(mesh, 8, 16))


def updates_travel(mesh: DeviceMesh) -> Traced:
    """Gradients are scattered, a part of each parameter is updated, and the new parameters are gathered (ZeRO-1).

    Traced with real tensors.
    """
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(16, 16, generator=draw) / 4 for _ in range(4)]
    name, size, rank = _torch.group_name(mesh.get_group()), mesh.size(), mesh.get_local_rank()

    def step(params: list[Any], means: list[Any], x: torch.Tensor) -> Any:
        given = [p.detach().requires_grad_() for p in params]
        for p in given:
            x = F.gelu(x @ p.t())
        loss = x.square().mean()
        for p, grad, mean in zip(params, torch.autograd.grad(loss, given), means, strict=True):
            mean.lerp_(_torch.wait(_torch.start_reduce_scatter(grad.contiguous(), size, name)), 0.1)
            part = (p.chunk(size)[rank] - 0.1 * mean).contiguous()
            p.copy_(_torch.wait(_torch.start_all_gather(part, size, name)))
        return loss.detach(), params

    means = [torch.zeros(16 // size, 16) for _ in params]
    return trace(step, params, means, rank_data(mesh, 8, 16), mode="real")


STEPS: dict[str, Callable[[DeviceMesh], Traced]] = {
    "simple_fsdp": simple_fsdp,
    "functionalized": functionalized,
    "tensor_parallel": tensor_parallel,
    "two_steps": two_steps,
    "updates_travel": updates_travel,
}
