"""emit: the order that was decided on, put into an fx graph. The only module here that changes one.

    Captured, order, members ─► emit ─► the same graph, in that order

All is checked first; only then is anything moved. Inputs stay in front in their own order, the output at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from spanwise.overlap.graph import Captured


def emit(captured: Captured, order: Sequence[int], members: Sequence[Sequence[int]] | None = None) -> None:
    """Put the graph of `captured` into `order`, in place; linear.

    Its module goes on running the old code until ``recompile()``.

    Args:
        order: each node of `captured.dag` once.

    Raises:
        GraphError: `order` breaks a dependency. Nothing is changed then, nor upon the next.
        ValueError: `order` is no order of these nodes, or the graph is no longer the one that was captured.
    """
    if members is not None and any(tuple(of) != (i,) for i, of in enumerate(members)):
        raise NotImplementedError("buckets cannot be emitted yet")
    captured.dag.check_order(order)
    if not captured.nodes:
        return
    graph = captured.nodes[0].graph
    output = _output_of(captured, graph)
    place(graph, [*captured.inputs, *(captured.nodes[i] for i in order), *output])


def _output_of(captured: Captured, graph: fx.Graph) -> list[fx.Node]:
    """The node that returns, if there is one; checks that the graph has the other nodes that it had."""
    known = {*captured.inputs, *captured.nodes}
    rest = [node for node in graph.nodes if node not in known]
    if len(graph.nodes) != len(known) + len(rest) or any(node.op != "output" for node in rest):
        names = [node.name for node in rest if node.op != "output"]
        raise ValueError(f"the graph has changed since it was captured: {names or 'nodes are gone'}")
    return rest


def place(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Put all nodes of a graph into the given order."""
    at = next(iter(graph.nodes))
    for node in nodes:
        if node is at:
            at = node.next
        else:
            at.prepend(node)
