"""Put an order and buckets into an fx graph. Only this module changes graphs.

    Captured, order, members ─► emit ─► the same graph, in that order

Inputs stay in front in their own order, the output stays at the end. A bucket becomes one coalesced collective of
torch: nothing is copied in or out, and every tensor keeps its dtype, shape, bits and wait.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.dag import Kind
from spanwise.overlap.fx.graph import Captured
from spanwise.overlap.fx.operators import COALESCED, WAIT, Role, group_of, named_arguments, nodes_in, tensors_of, traits

_ops = _torch.functional_collectives
_TOGETHER = {one: several for several, one in COALESCED.items()}
# AOTAutograd cuts a joint graph by these: the side of a node, and whether it is recomputed.
_CUT_BY = ("partitioner_tag", "autograd_backward", "recompute", "ac_graph_id")


def bucket_keys(captured: Captured) -> list[Hashable | None]:
    """A key for each node of the dag; starts of equal keys may share a bucket. None: never in a bucket.

    A key is the operator, group, reduction, device, side of a joint graph, and dtype. Reduce-scatters, and all-gathers
    of NCCL, may mix dtypes. gloo reduces one dtype at a time and gathers garbage of several: torch 2.13 promotes the
    operands into one tensor and gives it a buffer of the first one's dtype. Never in a bucket: collectives in place or
    into an ``out`` argument, those of autograd, coalesced ones, complex dtypes, and results with users besides one
    wait.
    """
    waits = captured.dag.wait_of
    found: list[Hashable | None] = [None] * len(captured.dag)
    for start in captured.dag.starts:
        node = captured.nodes[start]
        if node.target in _TOGETHER and start in waits and list(node.users) == [captured.nodes[waits[start]]]:
            given = _given(node)
            (operand,) = nodes_in(given.pop("input"))
            given.pop("group_name")
            tensors = [*tensors_of(operand), *tensors_of(node)]
            known = all(isinstance(value, (int, str)) for value in given.values())
            if not known or len(tensors) != 2 or tensors[0].dtype.is_complex:
                continue
            group, device = group_of(node), tensors[0].device
            mixed = node.target is _ops.reduce_scatter_tensor.default or (
                node.target is _ops.all_gather_into_tensor.default and _torch.is_nccl(group, device)
            )
            dtype = "" if mixed else str(tensors[0].dtype)
            side = tuple(str(node.meta.get(tag)) for tag in _CUT_BY)
            found[start] = str(node.target), group, tuple(given.values()), str(device), dtype, side
    return found


def _given(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, in the schema's order."""
    given = named_arguments(node)
    return {name: given[name] for name in traits(node).names}


def merge_waits(graph: fx.Graph) -> None:
    """Leave one wait of equal waits, in place; a wait returns its argument, so they are one tensor.

    torch 2.14 and later merge equal gathers and leave their waits, which they regard as impure. Only a collective with
    one wait gets into a bucket. Kept are waits that the graph returns, as its results stay separate tensors, and those
    of memory that another collective writes in between.
    """
    first: dict[tuple[fx.Node, ...], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=WAIT):
        kept = first.setdefault(tuple(node.all_input_nodes), node)
        returned = [any(user.op == "output" for user in wait.users) for wait in (kept, node)]
        if kept is not node and not all(returned) and not _written_again(kept):
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _written_again(wait: fx.Node) -> bool:
    """Whether a collective in place writes the memory of a wait."""
    todo = [wait]
    for node in todo:
        for user in node.users:
            known = traits(user)
            if known.role is Role.START and known.writes:
                return True
            if known.role is Role.WAIT or known.is_alias:
                todo.append(user)
    return False


def has_equal_waits(graph: fx.Graph) -> bool:
    """Whether a tensor is waited for several times."""
    waits = graph.find_nodes(op="call_function", target=WAIT)
    return len({tuple(node.all_input_nodes) for node in waits}) < len(waits)


def emit(captured: Captured, order: Sequence[int], members: Sequence[Sequence[int]]) -> None:
    """Put the graph of `captured` into `order`, and each bucket into one collective; in place, in linear time.

    Afterwards `captured` no longer describes the graph. Its module runs the old code until ``recompile()``. After an
    error the graph is unchanged.

    Args:
        order: the numbers of `members`, each once.
        members: nodes of `captured.dag` that become one: starts of equal `bucket_keys`, their waits, or a single node.

    Raises:
        GraphError: the order breaks a dependency.
        ValueError: a node is missing or there twice.
    """
    if not captured.nodes:
        return
    captured.dag.check_order([i for at in order for i in members[at]])
    graph = captured.nodes[0].graph
    outputs = graph.find_nodes(op="output")
    nodes = list(captured.inputs)
    for at in order:
        of_unit = [captured.nodes[i] for i in members[at]]
        if len(of_unit) > 1 and captured.dag.nodes[members[at][0]].kind == Kind.START:
            of_unit = _coalesced(graph, of_unit)
        nodes += of_unit
    at = next(iter(graph.nodes))
    for node in [*_with_items(nodes), *outputs]:  # nodes already in place do not move
        if node is at:
            at = node.next
        else:
            at.prepend(node)


def _coalesced(graph: fx.Graph, starts: Sequence[fx.Node]) -> list[fx.Node]:
    """Replace `starts` by one collective and its items; the items are waited for."""
    first = starts[0]
    operands, *rest = zip(*(_given(start).values() for start in starts), strict=True)
    target = _TOGETHER[first.target]
    args = (list(operands), *(values[0] for values in rest))
    with graph.inserting_before(first):
        merged = graph.create_node("call_function", target, args, name=target.overloadpacket.__name__)
        items = [graph.create_node("call_function", operator.getitem, (merged, at)) for at in range(len(starts))]
    # Stack trace, module and side of a joint graph are the first start's. Results are a list.
    merged.meta = dict(first.meta)
    for name in ("val", "example_value", "tensor_meta", "eager_input_vals"):
        merged.meta.pop(name, None)
    for name in ("val", "tensor_meta"):
        if all(name in start.meta for start in starts):
            merged.meta[name] = [start.meta[name] for start in starts]
    for start, item in zip(starts, items, strict=True):
        item.meta = dict(start.meta)
        (wait,) = start.users
        wait.replace_input_with(start, item)
        graph.erase_node(start)
    return [merged, *items]


def _with_items(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Each node with the items that are taken from it right behind it.

    A tuple keeps all its tensors alive until the last of them is taken out. Each item then lives as long as it is used.
    """
    found: dict[fx.Node, None] = {}
    for node in nodes:
        todo = [] if node in found else [node]
        while todo:
            one = todo.pop()
            found[one] = None
            if isinstance(one.meta.get("val"), (list, tuple)):
                items = (user for user in reversed(one.users) if user.target is operator.getitem)
                todo += [user for user in items if user.all_input_nodes == [one]]
    return list(found)
