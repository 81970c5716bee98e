"""Graphs of all ranks in one process, side by side: what their collectives would give, without process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from spanwise.overlap.capture import Axis

OPS = torch.ops._c10d_functional


class Lockstep:
    """Runs the graphs of all ranks node by node; collectives are computed from all ranks' operands.

    Args:
        axes: of each rank, its process groups.
    """

    def __init__(self, modules: Sequence[fx.GraphModule], axes: Sequence[Mapping[str, Axis]]) -> None:
        self.modules = list(modules)
        self.axes = [{axis.name: axis for axis in of_rank.values()} for of_rank in axes]

    def run(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Any, ...]]:
        nodes = [list(module.graph.nodes) for module in self.modules]
        feeds = [iter(of_rank) for of_rank in inputs]
        values: list[dict[fx.Node, Any]] = [{} for _ in self.modules]
        for row in zip(*nodes, strict=True):
            assert len({(node.op, node.name, str(node.target)) for node in row}) == 1
            operands = [fx.map_arg((n.args, n.kwargs), v.get) for n, v in zip(row, values, strict=True)]
            for rank, node in enumerate(row):
                args, kwargs = operands[rank]
                if node.op == "placeholder":
                    values[rank][node] = next(feeds[rank])
                elif node.op == "output":
                    continue
                elif str(node.target).startswith("_c10d_functional"):
                    values[rank][node] = self.collective(node, rank, [args for args, _ in operands])
                else:
                    values[rank][node] = node.target(*args, **kwargs)
        return [operands[rank][0][0] for rank in range(len(self.modules))]

    def collective(self, node: fx.Node, rank: int, args: Sequence[tuple[Any, ...]]) -> Any:
        if node.target == OPS.wait_tensor.default:
            return args[rank][0]
        name = str(node.target).split(".")[1]
        axis = self.axes[rank][args[rank][-1]]
        parts = [args[other][0] for other in axis.ranks]
        if name == "all_to_all_single":
            sent = [part.split(args[other][2])[axis.index] for part, other in zip(parts, axis.ranks, strict=True)]
            assert [len(x) for x in sent] == args[rank][1]
            return torch.cat(sent)
        if name.endswith("_coalesced"):
            items = zip(*parts, strict=True)
            return [self._joined(name.removesuffix("_coalesced"), item, args[rank][1], axis) for item in items]
        return self._joined(name, parts, args[rank][1], axis)

    def _joined(self, name: str, parts: Sequence[torch.Tensor], how: Any, axis: Axis) -> torch.Tensor:
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        if name == "all_gather_into_tensor":
            return torch.cat(list(parts))
        stacked = torch.stack(list(parts))
        total = stacked.amax(0) if how == "max" else stacked.sum(0)
        if name == "all_reduce":
            return total
        assert name == "reduce_scatter_tensor", name
        return total.chunk(axis.size)[axis.index].clone()
