"""optimize: a graph whose communication is hidden, made from an ATen fx graph and costs; simulations and bounds of one.

    fx graph, cost ─► graph ─► schedule ─► bucket ─► emit, on a copy ─► Result

What users call. A graph that is handed in is never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from spanwise import _torch
from spanwise.hardware import Hardware
from spanwise.overlap.bucketing.bucket import bucket as into_buckets
from spanwise.overlap.bucketing.merge import without_buckets
from spanwise.overlap.costs.roofline import as_cost
from spanwise.overlap.explain.trace import save_chrome_trace
from spanwise.overlap.fx import emit as emission
from spanwise.overlap.fx.graph import NO_VALUE, Captured, to_dag
from spanwise.overlap.fx.operators import Cost
from spanwise.overlap.ir.bounds import Bounds, lower_bounds
from spanwise.overlap.ir.dag import GraphError
from spanwise.overlap.ir.simulate import Timeline
from spanwise.overlap.ir.simulate import simulate as run
from spanwise.overlap.search.schedule import schedule


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What `optimize` made.

    Attributes:
        graph_module: the new graph; it shares parameters and attributes with the one that was given.
        timeline: of the new graph. Its nodes are those of `before`, or several starts or waits of them as one.
        before: of the graph that was given, in its own order.
        bounds: what no order of the new graph's nodes can beat, memory aside.
        members: of each node of `timeline.dag`, the nodes of `before.dag` that it stands for.
        budget: bytes that the new order was allowed.
    """

    graph_module: fx.GraphModule
    timeline: Timeline
    before: Timeline
    bounds: Bounds
    members: tuple[tuple[int, ...], ...]
    budget: int

    def report(self, groups: Mapping[str, str] | None = None) -> str:
        """What was gained, what is left and why, as text; see `report`.

        Args:
            groups: what to call process groups, by the names that the graph has for them.
        """
        from spanwise.overlap.explain.report import report

        return report(self, groups)

    def save_chrome_trace(self, path: str | os.PathLike[str], groups: Mapping[str, str] | None = None) -> None:
        """Write both timelines as Chrome's trace events, to look at in Perfetto; see `trace`.

        Args:
            groups: as `report` has it.
        """
        timelines = {"as given": self.before, "optimized": self.timeline}
        save_chrome_trace(path, timelines, budget=self.budget, groups=groups)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Python's collector of cycles off for a while: it looks through all graphs of the process again and again.

    That was a sixth of the time of `optimize` with buckets, of 9,000 nodes. What is made here holds no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collector()
def optimize(
    gm: fx.GraphModule,
    cost: Cost | Hardware | Mapping[str, float],
    *,
    memory_budget: int | None = None,
    bucket: bool = True,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
) -> Result:
    """Reorder the nodes of `gm` so that compute hides its collectives, on a copy.

    The same graph and costs give the same result on every rank.

    Args:
        gm: an ATen graph with ``meta["val"]``: of a forward, a backward, or both.
        cost: milliseconds of a node: a function, a `CostModel`, a `Hardware`, or a table by the nodes' names.
        memory_budget: most bytes of what the graph allocates; default: `schedule.default_budget`. Where the graph's own
            order exceeds it, one is looked for that does not; it may take longer than the own one then.
        bucket: whether collectives may be merged where that costs no time. A cost that has a method ``merged(nodes)``
            prices what they become, as `CostModel` does; of any other it is the sum of theirs.
        multiplier: collectives are scheduled as if they took so many times as long, for costs that are guesses.
        in_flight, in_flight_bytes: of each process group, how many collectives at most have been started and not yet
            waited for, and how many bytes they make, read and write; see `schedule.schedule`.
        effort: how many orders are tried at most; default: `schedule.default_effort`. More find better ones as a rule;
            with buckets, which depend on what was found first, that is no promise.

    Raises:
        TypeError: no fx.GraphModule.
        GraphError: a graph that cannot be scheduled, or a cost that is none; names the node. See `graph.to_dag`.
        ValueError: a budget that no order was found for (it names the least peak that was), or a multiplier, a limit or
            an effort that is none.
    """
    cost = as_cost(cost)
    limits = {"effort": effort, "in_flight": in_flight, "in_flight_bytes": in_flight_bytes}
    for name, value in {"memory_budget": memory_budget, **limits}.items():
        if value is not None and not (_is_number(value) and value < 2**63):  # NaN is not, either
            raise ValueError(f"{name} must be a number below 2**63, got {value!r}")
    if effort is not None and effort != int(effort):
        raise ValueError(f"effort must be a whole number of orders, got {effort}")
    if not _is_number(multiplier):
        raise ValueError(f"the multiplier must be a number, got {multiplier!r}")
    captured = _captured(gm, cost)
    options: dict[str, Any] = {"multiplier": multiplier, **limits}
    found = schedule(captured.dag, budget=memory_budget, **options)
    before = found.before if memory_budget is None else run(captured.dag)
    merged = without_buckets(captured.dag)
    if bucket:
        keys, price = emission.bucket_keys(captured), _bucket_price(captured, cost)
        merged, found = into_buckets(captured.dag, found, keys, price, **options)
    graph, copied = _torch.copy_graph(gm.graph)
    ours = dataclasses.replace(
        captured,
        nodes=tuple(map(copied.__getitem__, captured.nodes)),
        inputs=tuple(map(copied.__getitem__, captured.inputs)),
    )
    emission.emit(ours, found.order, merged.members)
    made = _torch.graph_module(gm, graph, type(gm).__name__)
    made.meta = dict(gm.meta)
    return Result(made, found.timeline, before, found.bounds, merged.members, found.budget)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def simulate(
    gm: fx.GraphModule,
    cost: Cost | Hardware | Mapping[str, float],
    order: Sequence[int] | None = None,
    *,
    contention: float = 1.0,
) -> Timeline:
    """Timeline of `gm` in its own order, or in another one of the nodes of its `Dag`; milliseconds.

    Args:
        contention: how much longer compute takes while a collective is under way; see `simulate.simulate`.

    Raises:
        TypeError, GraphError, ValueError: as `optimize`; `order` is no order of these nodes; a contention below 1.
    """
    return run(_captured(gm, as_cost(cost)).dag, order, contention=contention)


def lower_bound(gm: fx.GraphModule, cost: Cost | Hardware | Mapping[str, float]) -> float:
    """Milliseconds that no order of the nodes of `gm` can beat, memory aside; see `bounds`."""
    return lower_bounds(_captured(gm, as_cost(cost)).dag).makespan


def _bucket_price(captured: Captured, cost: Cost) -> Callable[[Sequence[int]], float]:
    """Milliseconds of the collective that starts, by number, become."""
    merged = getattr(cost, "merged", None)

    def price(starts: Sequence[int]) -> float:
        if merged is None:
            return math.fsum(captured.dag.nodes[i].ms for i in starts)
        nodes = [captured.nodes[i] for i in starts]
        try:
            return float(merged(nodes))
        except GraphError:
            raise
        except Exception as error:
            text = f"the cost of a bucket of {nodes} is not known: {type(error).__name__}: {error}"
            raise GraphError(nodes[0].name, text) from error

    return price


def _captured(gm: fx.GraphModule, cost: Cost) -> Captured:
    """`to_dag` of a graph that is in order; says more of missing metadata."""
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"expected an fx.GraphModule of ATen operators, got {type(gm).__name__}: of a program of torch.export hand "
            "over its graph_module; of a model compiled with overlap.backend, on_result= hands its graphs over"
        )
    seen: set[str] = set()
    for node in gm.graph.nodes:
        for arg in node.all_input_nodes:
            if arg.name not in seen:
                raise GraphError(
                    node.name, f"it uses {arg.name!r}, which does not come before it: a cycle, or no order"
                )
        seen.add(node.name)
    try:
        return to_dag(gm, cost)
    except GraphError as error:
        if NO_VALUE not in str(error):
            raise
        text = (
            f'{NO_VALUE}. Graphs lose it when they are saved, ShapeProp makes "tensor_meta" only, and torch.export '
            "leaves it out of what it adds: "
            "torch.fx.passes.fake_tensor_prop.FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True))"
            ".propagate(*inputs) makes it"
        )
        raise GraphError(error.node, text) from error
