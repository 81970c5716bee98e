"""Offload: keep activations in host memory between forward and backward, so that a step fits a memory budget.

    graph ─► activations and when they are idle ─► those that leave ─► copies in the graph ─► schedule

An activation leaves where it is idle longest: PyTorch's ``ao.offload`` copies it to the host and its wait frees it;
``ao.reload`` brings it back before its next reader, which gets views of it made anew. Until the own order of the graph
fits, the activation that is alive at the peak and idle for longest leaves; then those that need not have left stay.
Memory below the budget lets copies start earlier, so room for a few copies in flight is tried, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.dag import Dag, Kind
from spanwise.overlap.fx.graph import Captured, bind
from spanwise.overlap.fx.operators import Role, is_free, storage_of, tensors_of, traits

_IN_FLIGHT = (0, 1, 2, 4)  # copies of the largest size that the own order leaves room for


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """What left for the host.

    Attributes:
        num_bytes: of each activation, by the name of its node.
        dag: the graph with the copies in its own order; `Result.members` refers to it.
    """

    num_bytes: dict[str, int]
    dag: Dag


class Activation(NamedTuple):
    """A tensor with a time in which nothing reads it.

    Attributes:
        node: number of the node that makes it, or that takes it from a tuple.
        begin, end: numbers of its last user before that time, and of the first after it.
        ms: compute in that time.
        num_bytes: of the tensor.
        views: itself and its views that are made before that time, by number.
    """

    node: int
    begin: int
    end: int
    ms: float
    num_bytes: int
    views: tuple[int, ...]


def activations(captured: Captured) -> list[Activation]:
    """Activations that can leave, in the order of the graph: dense tensors of their own memory that nothing writes."""
    number = {node: i for i, node in enumerate(captured.nodes)}
    storages = Counter(storage_of(tensors_of(node)[0]) for node in captured.nodes if _makes_tensor(node))
    busy = np.cumsum(np.where(captured.dag.kinds == Kind.COMPUTE, captured.dag.ms, 0.0))
    found = []
    for node in filter(_makes_tensor, captured.nodes):
        value = tensors_of(node)[0]
        num_bytes = value.numel() * value.element_size()
        if storages[storage_of(value)] > 1 or not num_bytes or value.untyped_storage().nbytes() != num_bytes:
            continue
        readers = _readers(node, number, captured)
        if readers is None:
            continue
        views, users = readers
        at = sorted({number[node], *users})
        idle = [(busy[after - 1] - busy[before], before, after) for before, after in itertools.pairwise(at)]
        ms, begin, end = max(idle, default=(0.0, 0, 0))
        if ms > 0:
            early = tuple(sorted(view for view in views if view <= begin))
            found.append(Activation(number[node], begin, end, float(ms), num_bytes, early))
    return found


def _makes_tensor(node: fx.Node) -> bool:
    """Whether a node makes one tensor in new memory, or takes it from the results of one that does."""
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or source.op != "call_function":
        return False
    known, value = traits(source), node.meta.get("val")
    makes = known.role is Role.COMPUTE and not (known.writes or known.is_alias)
    return makes and isinstance(value, torch.Tensor) and storage_of(value) is not None


def _readers(node: fx.Node, number: dict[fx.Node, int], captured: Captured) -> tuple[list[int], set[int]] | None:
    """Numbers of a tensor's views, itself first, and of all that reads them; None if its memory must stay."""
    views, users, todo = [number[node]], set[int](), [node]
    for view in todo:
        for user in view.users:
            known = traits(user)
            if user.op == "output" or known.writes or known.role in (Role.BARRIER, Role.WAIT):
                return None
            i = number[user]
            users.add(i)
            if known.role is Role.START:  # it reads until its wait
                if i not in captured.dag.wait_of:
                    return None
                users.update(range(i, captured.dag.wait_of[i] + 1))
            elif storage_of(node.meta["val"]) in map(storage_of, tensors_of(user)):
                if not (known.is_alias and is_free(user) and isinstance(user.meta["val"], torch.Tensor)):
                    return None
                views.append(i)
                todo.append(user)
    return views, users


def choices(captured: Captured, budget: int) -> Iterator[list[Activation]]:
    """Sets of activations without which the graph's own order fits `budget`, each once; none if it fits as it is."""
    idle, alive = activations(captured), captured.dag.alive_bytes()
    seen: list[list[Activation]] = []
    for copies in _IN_FLIGHT:
        largest = max((one.num_bytes for chosen in seen for one in chosen), default=0)
        chosen = chosen_for(idle, alive, budget - copies * largest)
        if chosen is None:
            return  # the next budgets are no larger
        if chosen and chosen not in seen:
            seen.append(chosen)
            yield chosen


def chosen_for(idle: Sequence[Activation], alive: NDArray[np.int64], budget: int) -> list[Activation] | None:
    """The longest idle at each peak above `budget`, in the graph's order; None if all of them are too few."""
    alive, left, chosen = alive.copy(), sorted(idle, key=lambda one: (-one.ms, one.node)), list[Activation]()
    while alive.max(initial=0) > budget:
        peak = int(alive.argmax())
        leaving = next((one for one in left if one.begin < peak < one.end), None)
        if leaving is None:
            return None
        left.remove(leaving)
        chosen.append(leaving)
        alive[leaving.begin + 1 : leaving.end] -= leaving.num_bytes
    for one in reversed(chosen.copy()):
        part = alive[one.begin + 1 : one.end]
        if part.max(initial=0) + one.num_bytes <= budget:
            part += one.num_bytes
            chosen.remove(one)
    return sorted(chosen)


def with_copies(gm: fx.GraphModule, captured: Captured, chosen: Sequence[Activation]) -> fx.GraphModule:
    """A copy of `gm`, which `captured` describes, in which the chosen activations leave and come back."""
    made = _torch.copy_module(gm)
    nodes = bind(captured.dag, made.graph).nodes
    number = {node: i for i, node in enumerate(nodes)}
    for one in chosen:
        _insert(made.graph, one, nodes, number)
    return made


def _insert(graph: fx.Graph, one: Activation, nodes: Sequence[fx.Node], number: dict[fx.Node, int]) -> None:
    ao, node = _torch.activation_offloads(), nodes[one.node]
    value = node.meta["val"]
    layout = () if value.is_contiguous() else (list(value.shape), list(value.stride()))
    mode = _torch.fake_mode_of(value) or _torch.fake_mode()
    with mode:
        on_host = torch.empty(value.shape, dtype=value.dtype)
        again = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    _torch.relabel(again, value.device)

    def call(target: Any, *args: Any, val: torch.Tensor) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta["val"] = val
        return made

    with graph.inserting_before(nodes[one.begin].next):
        leaving = call(ao.offload.default, node, val=on_host)
        gone = call(ao.wait_tensor.default, leaving, node, val=on_host)
    with graph.inserting_before(nodes[one.end]):
        back = call(ao.reload.default, gone, value.device, *layout, val=again)
        remade = {node: call(ao.wait_tensor.default, back, gone, val=again)}
        views = [nodes[i] for i in one.views]  # itself first
        needed = set[fx.Node]()
        for view in reversed(views):
            if any(user in needed or number.get(user, -1) >= one.end for user in view.users):
                needed.add(view)
        for view in views:
            if view in needed and view is not node:
                made = remade[view] = graph.node_copy(view, lambda arg: remade.get(arg, arg))
                with mode:
                    args, kwargs = fx.node.map_arg((made.args, made.kwargs), lambda arg: arg.meta["val"])
                    made.meta["val"] = view.target(*args, **kwargs)  # type: ignore[operator]
            for user in [user for user in view.users if number.get(user, -1) >= one.end]:
                user.replace_input_with(view, remade[view])
