"""Graphs of all ranks in one process, side by side: what their collectives would give, without process groups."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from spanwise.overlap.fx.capture import Axis

OPS = torch.ops._c10d_functional


@dataclasses.dataclass
class _UnderWay:
    """A collective that nobody has waited for."""

    node: fx.Node
    args: list[tuple[Any, ...]]  # by rank
    results: list[Any]  # by rank, tensors or lists of them, not yet filled
    ended: bool = False
    wait: fx.Node | None = None  # the first


class Lockstep:
    """Runs the graphs of all ranks node by node; collectives are computed from all ranks' operands.

    Args:
        axes: of each rank, its process groups.
        late: whether collectives read and write at their wait rather than at their start; what they return is garbage
            until then. What is free of races gives the same both ways.
        track: whether to measure `peak`.

    Attributes:
        peak: most bytes alive at once on rank 0, without inputs and attributes.
    """

    def __init__(
        self,
        modules: Sequence[fx.GraphModule],
        axes: Sequence[Mapping[str, Axis]],
        *,
        late: bool = False,
        track: bool = False,
    ) -> None:
        self.modules, self.late, self.track, self.peak = list(modules), late, track, 0
        self.axes = [{axis.name: axis for axis in of_rank.values()} for of_rank in axes]

    def run(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[tuple[Any, ...]]:
        ranks = range(len(self.modules))
        feeds = [iter(of_rank) for of_rank in inputs]
        values: list[dict[fx.Node, Any]] = [{} for _ in ranks]
        under_way: dict[int, _UnderWay] = {}  # by the identity of each result, which `values` keeps
        for row in zip(*(module.graph.nodes for module in self.modules), strict=True):
            assert len({(node.op, node.name, str(node.target)) for node in row}) == 1
            operands = [fx.map_arg((n.args, n.kwargs), v.__getitem__) for n, v in zip(row, values, strict=True)]
            args = [given for given, _ in operands]
            node = row[0]
            if node.op == "output":
                return [given[0] for given in args]
            if node.op == "placeholder":
                results = [next(feed) for feed in feeds]
            elif node.op == "get_attr":
                results = [getattr(n.graph.owning_module, str(n.target)) for n in row]
            elif node.target == OPS.wait_tensor.default:
                results = [given[0] for given in args]
                for result in results:
                    if (started := under_way.get(id(result))) is not None:
                        started.wait = started.wait or node
                        self._end(started)
            elif str(node.target).startswith("_c10d_functional"):
                started = self._start(node, args, [named.get("out") for _, named in operands])
                results = started.results
                under_way.update((id(x), started) for of_rank in results for x in tree_leaves(of_rank))
            elif str(node.target).startswith("spanwise.compare_"):
                results = [given[0] for given in args]  # the ranks are in step, with no process group to compare in
            else:
                results = [n.target(*given, **named) for n, (given, named) in zip(row, operands, strict=True)]
            for rank, node in enumerate(row):
                values[rank][node] = results[rank]
            if self.track:
                self._measure(row[0], values[0], under_way.values())
        raise AssertionError("a graph without an output")

    def _start(self, node: fx.Node, args: list[tuple[Any, ...]], outs: list[Any]) -> _UnderWay:
        in_place = _name(node).endswith("_")
        results = [given[0] for given in args] if in_place else outs
        if not in_place and outs[0] is None:
            results = [torch.utils._pytree.tree_map(_garbage, self._result(node, r, args)) for r in range(len(args))]
        started = _UnderWay(node, args, results)
        if not self.late:
            self._end(started)
        return started

    def _measure(self, node: fx.Node, values: dict[fx.Node, Any], under_way: Iterable[_UnderWay]) -> None:
        """Bytes while a node of rank 0 runs: of all that it or a later node reads, and of what travels."""
        later = {node, *node.all_input_nodes}
        for other in itertools.takewhile(lambda other: other is not node, reversed(node.graph.nodes)):
            later.update(other.all_input_nodes)
        held = [v for n, v in values.items() if n in later or n.op in ("placeholder", "get_attr")]
        held += [(started.args[0], started.results[0]) for started in under_way if started.wait in (None, node)]
        given = {v.untyped_storage()._cdata for n, v in values.items() if n.op in ("placeholder", "get_attr")}
        alive = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_leaves(held) if _is_tensor(x)}
        self.peak = max(self.peak, sum(size for storage, size in alive.items() if storage not in given))

    def _end(self, started: _UnderWay) -> None:
        if started.ended:
            return
        started.ended = True
        found = [self._result(started.node, rank, started.args) for rank in range(len(self.modules))]
        for into, value in zip(tree_leaves(started.results), tree_leaves(found), strict=True):
            into.copy_(value)

    def _result(self, node: fx.Node, rank: int, args: Sequence[tuple[Any, ...]]) -> Any:
        name = _name(node).removesuffix("_").removesuffix("_out")
        axis = self.axes[rank][args[rank][-1]]
        parts = [args[other][0] for other in axis.ranks]
        if name == "all_to_all_single":
            sent = [part.split(args[other][2])[axis.index] for part, other in zip(parts, axis.ranks, strict=True)]
            assert [len(x) for x in sent] == args[rank][1]
            return torch.cat(sent)
        if name == "broadcast":
            return parts[args[rank][1]]
        if name.endswith("_coalesced"):
            items = zip(*parts, strict=True)
            return [self._joined(name.removesuffix("_coalesced"), item, args[rank][1], axis) for item in items]
        return self._joined(name, parts, args[rank][1], axis)

    def _joined(self, name: str, parts: Sequence[torch.Tensor], how: Any, axis: Axis) -> torch.Tensor:
        assert len({(part.shape, part.dtype) for part in parts}) == 1
        if name == "all_gather_into_tensor":
            assert how == axis.size
            return torch.cat(list(parts))
        stacked = torch.stack(list(parts))
        total = stacked.amax(0) if how == "max" else stacked.sum(0, dtype=stacked.dtype)
        if name == "all_reduce":
            return total
        assert name == "reduce_scatter_tensor", name
        return total.chunk(axis.size)[axis.index].clone()


def _name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _garbage(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan if x.dtype.is_floating_point else 77)
