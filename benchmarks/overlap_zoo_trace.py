"""Graphs of parallel training steps on fake ranks, for `overlap_zoo`: groups, sharded parameters, tracing.

Everything is a fake tensor on the CPU: nothing is computed, and sizes are those of real models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from spanwise.overlap import _torch
from spanwise.overlap.fx.decoder import Moved


@dataclasses.dataclass(frozen=True)
class Group:
    """A process group: its name in graphs, and its ranks."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Traced:
    """Graphs of one step by name, and the ranks of their groups."""

    graphs: dict[str, fx.GraphModule]
    ranks: dict[str, tuple[int, ...]]


@contextlib.contextmanager
def fake_groups(**members: Sequence[int]) -> Iterator[dict[str, Group]]:
    """Fake process groups by label; rank 0 is in all of them. Their names are the same every time."""
    size = 1 + max(max(ranks) for ranks in members.values())
    dist.init_process_group("fake", rank=0, world_size=size, store=_torch.fake_store())
    try:
        yield {
            label: Group(_torch.group_name(dist.new_group(list(ranks))), tuple(ranks))
            for label, ranks in members.items()
        }
    finally:
        dist.destroy_process_group()


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x.contiguous(), group.size, group.name))


def reduce_scatter(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x.contiguous(), group.size, group.name))


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    return _torch.wait(_torch.start_all_reduce(x.contiguous(), "sum", group.name))


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Exchange equal parts of dim 0."""
    parts = [x.shape[0] // group.size] * group.size
    start = _torch.functional_collectives.all_to_all_single.default
    return _torch.wait(start(x.contiguous(), parts, parts, group.name))


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather dim 0; the gradient is reduce-scattered."""
    return Moved.apply(x, group, all_gather, reduce_scatter)


def scattered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group and keep a part of dim 0; the gradient is gathered."""
    return Moved.apply(x, group, reduce_scatter, all_gather)


def exchanged(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All-to-all of dim 0, in both directions."""
    return Moved.apply(x, group, all_to_all, all_to_all)


class _Parameter(torch.autograd.Function):
    """A parameter gathered over `shard`; its gradient is reduce-scattered there, then summed over `replicas`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, shard: Group | None, replicas: Group | None
    ) -> torch.Tensor:
        ctx.given, ctx.padded, ctx.shard, ctx.replicas = x.dtype, x.numel(), shard, replicas
        full = x.to(dtype)
        if shard is not None:
            full = all_gather(full, shard)
            ctx.padded *= shard.size
        return full[: math.prod(shape)].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.reshape(-1).to(ctx.given)
        if ctx.padded > grad.numel():
            grad = nn.functional.pad(grad, (0, ctx.padded - grad.numel()))
        size = 1
        for group, move in ((ctx.shard, reduce_scatter), (ctx.replicas, all_reduce)):
            if group is not None:
                grad, size = move(grad, group), size * group.size
        return grad / size, None, None, None, None


class Sharded:
    """A module whose parameters are flat shards, each gathered where its unit begins (as FSDP2 and SimpleFSDP do).

    Args:
        units: modules that gather all their parameters when they begin; other parameters are gathered by their owner.
        local: whether a parameter, by its name, is not sharded: expert weights.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module] = (),
        *,
        shard: Group | None = None,
        replicas: Group | None = None,
        dtype: torch.dtype = torch.bfloat16,
        local: Callable[[str], bool] = lambda name: False,
        local_replicas: Group | None = None,
    ) -> None:
        self.model, self.shards = model, []
        self.given: list[torch.Tensor] = []
        names = {id(p): name for name, p in model.named_parameters()}
        places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each parameter; tied ones have several
        for module in model.modules():
            for name, parameter in module._parameters.items():
                places.setdefault(id(parameter), []).append((module, name))
        for unit in (*units, *(m for m in model.modules() if m._parameters)):
            owned = []
            for parameter in unit.parameters(recurse=unit in units):
                if not (where := places.pop(id(parameter), None)):
                    continue
                is_local = local(names[id(parameter)])
                of = None if is_local else shard
                count = -(-parameter.numel() // (of.size if of else 1))
                shape = tuple(parameter.shape)
                summed = local_replicas if is_local else replicas
                owned.append(
                    (where, len(self.shards), lambda x, s=shape, o=of, r=summed: _Parameter.apply(x, s, dtype, o, r))
                )
                self.shards.append(torch.empty(count, dtype=torch.float32, requires_grad=True))
            if owned:
                unit.register_forward_pre_hook(self._hook(owned))
        owned = []
        for module in model.modules():  # a graph must not contain fake tensors
            for name, buffer in module._buffers.items():
                owned.append(([(module, name)], len(self.shards), lambda x: x))
                self.shards.append(torch.empty_like(buffer))
        model.register_forward_pre_hook(self._hook(owned))

    def _hook(self, owned: list[tuple[list[tuple[nn.Module, str]], int, Any]]) -> Callable[..., None]:
        def gather(*_: Any) -> None:
            for places, number, make in owned:
                whole = make(self.given[number])
                for module, name in places:
                    module._parameters.pop(name, None)
                    setattr(module, name, whole)

        return gather

    def __call__(self, shards: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        self.given = list(shards)
        return self.model(*args, **kwargs)


def traced(
    function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], groups: Mapping[str, Group], keep: str = ""
) -> Traced:
    """Forward and backward of `function`, which returns a loss.

    Args:
        keep: label of the group whose gathers are made again in the backward; "": everything may be saved.
    """
    with _torch.compiling():  # transformers looks into masks that it does not know to be traced
        joint = _torch.joint_graph(lambda *args: (function(*args),), list(inputs))
    _torch.drop_assertions(joint.graph)
    if keep:
        start = _torch.functional_collectives.all_gather_into_tensor.default
        for node in joint.graph.find_nodes(op="call_function", target=start):
            if node.args[2] == groups[keep].name:
                for one in (node, *node.users, *node.all_input_nodes):
                    if one.op == "call_function":
                        one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    forward, backward = _torch.partition(joint, 1)
    return Traced({"forward": forward, "backward": backward}, {g.name: g.ranks for g in groups.values()})


def whole_step(
    function: Callable[..., torch.Tensor],
    data: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    groups: Mapping[str, Group],
) -> Traced:
    """One graph of forward, backward and AdamW; `function` takes the data, then the shards."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(data: Any, shards: Any, means: Any, squares: Any) -> Any:
        shards = [shard.detach().requires_grad_(shard.requires_grad) for shard in shards]
        loss = function(*data, *shards)
        updated, trained = [], [shard for shard in shards if shard.requires_grad]
        for p, g, m, v in zip(trained, torch.autograd.grad(loss, trained), means, squares, strict=True):
            m, v = m * 0.9 + g * 0.1, v * 0.999 + g * g * 0.001
            updated.append((p.detach() * 0.9999 - 1e-4 * m / (v.sqrt() + 1e-8), m, v))
        return loss.detach(), updated

    zeros = [torch.empty_like(shard, requires_grad=False) for shard in shards if shard.requires_grad]
    gm = make_fx(step)(list(data), list(shards), zeros, [torch.empty_like(z) for z in zeros])
    _torch.drop_assertions(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return Traced({"step": gm}, {g.name: g.ranks for g in groups.values()})
