"""Graphs of training steps on fake ranks, for `overlap_zoo`: process groups, sharded parameters, tracing.

Everything is a fake tensor on the CPU: nothing is computed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional as F

from spanwise.overlap import _torch
from spanwise.overlap.fx.capture import recompute_gathers
from spanwise.overlap.fx.decoder import Axis, Moved


class Traced(NamedTuple):
    """Graphs of one step by name, and the ranks of their groups."""

    graphs: dict[str, fx.GraphModule]
    ranks: dict[str, tuple[int, ...]]


class Family(NamedTuple):
    """A training step.

    Attributes:
        groups: ranks by label. Parameters are sharded over "dp"; their gradients are summed over "replicas", those of
            experts over "edp" alone.
        model: makes a module whose forward returns the loss; parameters of its `units` are gathered together.
        inputs: dtype and shape of each argument of the forward, and whether it requires a gradient.
        recomputed: label of the group whose gathers are repeated in the backward.
        whole: forward, backward and AdamW are one graph.
    """

    groups: dict[str, Sequence[int]]
    model: Callable[[dict[str, Axis]], nn.Module]
    inputs: Sequence[tuple[torch.dtype, Sequence[int], bool]]
    recomputed: str = "dp"
    whole: bool = False


def trace(family: Family) -> Traced:
    """The graphs of a family."""
    with _fake_groups(family.groups) as groups, _torch.fake_mode():
        model = family.model(groups)
        shards, given = _sharded(model, groups)
        data = [torch.empty(shape, dtype=dtype, requires_grad=wants) for dtype, shape, wants in family.inputs]

        def loss(*args: torch.Tensor) -> torch.Tensor:
            given[:] = args[len(data) :]
            return model(*args[: len(data)])

        if family.whole:
            graphs = {"step": _whole_step(loss, data, shards)}
        else:
            recomputed = groups[family.recomputed].name if family.recomputed in groups else ""
            graphs = _passes(loss, [*data, *shards], recomputed)
    return Traced(graphs, {group.name: group.ranks for group in groups.values()})


@contextlib.contextmanager
def _fake_groups(members: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Axis]]:
    """Fake process groups by label; rank 0 is in all of them. Their names are the same every time."""
    size = 1 + max(max(ranks) for ranks in members.values())
    dist.init_process_group("fake", rank=0, world_size=size, store=_torch.fake_store())
    try:
        yield {
            label: Axis(_torch.group_name(dist.new_group(list(ranks))), tuple(ranks), 0)
            for label, ranks in members.items()
        }
    finally:
        dist.destroy_process_group()


def _passes(loss: Callable[..., torch.Tensor], inputs: list[torch.Tensor], recomputed: str) -> dict[str, Any]:
    """Forward and backward; the gathers of a group may be repeated in the backward, everything else may be saved."""
    with _torch.compiling():  # transformers looks into masks that it does not know to be traced
        joint = _torch.joint_graph(lambda *args: (loss(*args),), inputs)
    _torch.drop_assertions(joint.graph)
    recompute_gathers(joint, recomputed)
    return dict(zip(("forward", "backward"), _torch.partition(joint, 1), strict=True))


def _whole_step(
    loss: Callable[..., torch.Tensor], data: list[torch.Tensor], shards: list[torch.Tensor]
) -> fx.GraphModule:
    """One graph of forward, backward and AdamW."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(data: Any, shards: Any, means: Any, squares: Any) -> Any:
        shards = [shard.detach().requires_grad_(shard.requires_grad) for shard in shards]
        value = loss(*data, *shards)
        updated, trained = [], [shard for shard in shards if shard.requires_grad]
        for p, g, m, v in zip(trained, torch.autograd.grad(value, trained), means, squares, strict=True):
            m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
            updated.append((p.detach() * 0.9999 - 1e-4 * m / (v.sqrt() + 1e-8), m, v))
        return value.detach(), updated

    zeros = [torch.empty_like(shard, requires_grad=False) for shard in shards if shard.requires_grad]
    gm = make_fx(step)(data, shards, zeros, [torch.empty_like(z) for z in zeros])
    _torch.drop_assertions(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def all_gather(x: torch.Tensor, group: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x.contiguous(), group.size, group.name))


def reduce_scatter(x: torch.Tensor, group: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x.contiguous(), group.size, group.name))


def all_reduce(x: torch.Tensor, group: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_reduce(x.contiguous(), "sum", group.name))


def all_to_all(x: torch.Tensor, group: Axis) -> torch.Tensor:
    parts = [x.shape[0] // group.size] * group.size
    start = _torch.functional_collectives.all_to_all_single.default
    return _torch.wait(start(x.contiguous(), parts, parts, group.name))


def gathered(x: torch.Tensor, group: Axis) -> torch.Tensor:
    """Gather dim 0; the gradient is reduce-scattered."""
    return Moved.apply(x, group, all_gather, reduce_scatter)


def exchanged(x: torch.Tensor, group: Axis) -> torch.Tensor:
    """All-to-all of dim 0, in both directions."""
    return Moved.apply(x, group, all_to_all, all_to_all)


class _Parameter(torch.autograd.Function):
    """A parameter gathered over `shard`; its gradient is reduce-scattered there, then summed over `replicas`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: Sequence[int], shard: Axis | None, replicas: Axis | None
    ) -> torch.Tensor:
        ctx.given, ctx.padded, ctx.shard, ctx.replicas = x.dtype, x.numel(), shard, replicas
        full = x.to(torch.bfloat16)
        if shard is not None:
            full = all_gather(full, shard)
            ctx.padded *= shard.size
        return full[: math.prod(shape)].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.reshape(-1).to(ctx.given)
        if ctx.padded > grad.numel():
            grad = F.pad(grad, (0, ctx.padded - grad.numel()))
        size = 1
        for group, move in ((ctx.shard, reduce_scatter), (ctx.replicas, all_reduce)):
            if group is not None:
                grad, size = move(grad, group), size * group.size
        return grad / size, None, None, None


def _sharded(model: nn.Module, groups: Mapping[str, Axis]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make a model take its parameters from flat shards, gathered where a unit begins, as FSDP2 does.

    Returns the shards, and the list that must hold them, or what stands for them in a graph, during a forward.
    """
    shards: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    places = {id(p): (module, name) for module in model.modules() for name, p in module._parameters.items()}
    units = getattr(model, "units", [])

    def gather_in(unit: nn.Module, owned: list[tuple[nn.Module, str, int, Callable[..., torch.Tensor]]]) -> None:
        def gather(*_: Any) -> None:
            for module, name, number, make in owned:
                whole = make(given[number])
                module._parameters.pop(name, None)
                setattr(module, name, whole)

        unit.register_forward_pre_hook(gather)

    for unit in (*units, *(module for module in model.modules() if module._parameters)):
        owned = []
        for parameter in unit.parameters(recurse=unit in units):
            if id(parameter) not in places:  # another unit has it
                continue
            module, name = places.pop(id(parameter))
            expert = name.startswith("expert_")
            shard, replicas = None if expert else groups.get("dp"), groups.get("edp" if expert else "replicas")
            rest = tuple(parameter.shape), shard, replicas
            owned.append((module, name, len(shards), lambda x, rest=rest: _Parameter.apply(x, *rest)))
            shards.append(torch.empty(-(-parameter.numel() // (shard.size if shard else 1)), requires_grad=True))
        gather_in(unit, owned)
    buffers = []
    for module in model.modules():  # a graph must not contain fake tensors
        for name, buffer in module._buffers.items():
            buffers.append((module, name, len(shards), lambda x: x))
            shards.append(torch.empty_like(buffer))
    gather_in(model, buffers)
    return shards, given
