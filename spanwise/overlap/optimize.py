"""optimize: hide the collectives of an ATen fx graph behind compute. Also `simulate` and `lower_bound` of a graph.

fx graph, cost ─► to_dag ─► contract ─► schedule ─► bucket ─► expand ─► emit, on a copy ─► Result
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from spanwise.hardware import Hardware
from spanwise.overlap import _torch
from spanwise.overlap.bounds import lower_bounds
from spanwise.overlap.buckets import bucket as into_buckets
from spanwise.overlap.costs.roofline import as_cost
from spanwise.overlap.dag import Dag, GraphError
from spanwise.overlap.engine import Timeline, simulate as run
from spanwise.overlap.explain.report import Result
from spanwise.overlap.fx.emit import bucket_keys, emit, has_equal_waits, merge_waits
from spanwise.overlap.fx.graph import Captured, bind, to_dag
from spanwise.overlap.fx.operators import Cost, operator_name
from spanwise.overlap.fx.sizes import Sizes, assumed, check_sizes, has_symbols
from spanwise.overlap.offload import Offloaded, choices, with_copies
from spanwise.overlap.quotient import Quotient, alone, joined
from spanwise.overlap.search import schedule
from spanwise.overlap.split.choose import Split, find_split


def optimize(
    gm: fx.GraphModule,
    cost: Cost | Hardware | Mapping[str, float],
    *,
    memory_budget: int | None = None,
    bucket: bool = True,
    split: bool = False,
    offload: bool = False,
    multiplier: float = 1.0,
    effort: int | None = None,
    sizes: Sizes | None = None,
    links: Mapping[str, str] | None = None,
) -> Result:
    """Reorder and bucket the nodes of `gm` so that compute hides its collectives. `gm` does not change.

    The same graph and costs give the same result on every rank.

    Args:
        gm: ATen graph with ``meta["val"]``: of a forward, a backward, or both.
        cost: milliseconds of a node: a function, a `CostModel`, a `Hardware`, or a table by node name.
        memory_budget: most bytes that the graph's nodes may allocate at once; default: `search.default_budget`. If
            the graph's own order exceeds it, the result fits but may take longer than that order.
        bucket: whether collectives may be merged where that costs no time. A method ``merged(nodes)`` of `cost`, as of
            `CostModel`, prices a bucket; without it a bucket costs the sum of its members.
        split: whether collectives of activations may be cut into pieces along the tokens, together with the token-wise
            compute next to them, where that makes the step shorter. Results may round differently. `cost` must price
            nodes that are not in `gm`, as a `CostModel` does. Graphs with symbolic sizes are not cut.
        offload: whether activations may wait in the host's memory between forward and backward, where the step does
            not fit `memory_budget` otherwise or is shorter so. `gm` has both; `cost` must price the copies, as a
            `CostModel` does. Not together with `split` or symbolic sizes.
        multiplier: factor on the time of collectives during the search, for costs that are guesses.
        effort: most orders to try at each of up to seven budgets; default: `search.default_effort`. Without buckets,
            more effort never gives a longer order.
        sizes: numbers for symbolic sizes while the graph is scheduled, by symbol (``{"s0": 4096}``), or one for all.
            Give all ranks the same.
        links: names of links by process group: groups of one link run one after the other on it. Default: as `cost`
            says, for a `Hardware` by `Link.shared`. The report has the makespan under the other assumption, too.

    Returns:
        The new graph on a copy, with its timeline and a report.

    Raises:
        TypeError: `gm` is no fx.GraphModule.
        GraphError: the graph cannot be scheduled, or a cost is invalid; names the node. See `to_dag`.
        ValueError: no order within the budget was found (the text has the least peak found); `offload` without a
            budget, or with `split` or symbolic sizes; or an invalid memory_budget, multiplier, effort or size.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=2, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, device="cpu")
    >>> cost = lambda node: 2.0 if "gather" in node.name else 1.0  # milliseconds
    >>> result = optimize(capture(config).forward, cost)
    >>> result.timeline.makespan < result.before.makespan
    True
    >>> result.report().startswith("makespan")
    True
    """
    cost = as_cost(cost)
    options: dict[str, Any] = {"bucket": bucket, "multiplier": multiplier, "effort": effort}
    check_options(memory_budget=memory_budget, split=split, offload=offload, sizes=sizes, **options)
    options["links"] = links
    if isinstance(gm, fx.GraphModule) and has_equal_waits(gm.graph):
        gm = _torch.copy_module(gm)
        merge_waits(gm.graph)
    if offload:
        if memory_budget is None or split or (sizes is not None and has_symbols(gm)):
            raise ValueError("offload=True needs a memory_budget, and neither split=True nor symbolic sizes")
        return _offloaded(gm, cost, memory_budget, options)
    if sizes is None or not has_symbols(gm):
        result = _optimized(gm, cost, memory_budget, **options)
        return _split(gm, cost, result, options) if split else result
    with assumed(gm, sizes) as restore:
        result = _optimized(gm, cost, memory_budget, **options)
        restore(result.graph_module)
    return dataclasses.replace(not_split(result) if split else result, sizes=sizes)


def not_split(result: Result) -> Result:
    """The result of a graph with symbolic sizes, for which cuts were asked."""
    return dataclasses.replace(result, split=Split(why="its sizes are symbolic, and pieces need numbers"))


def _split(gm: fx.GraphModule, cost: Cost, whole: Result, options: Mapping[str, Any]) -> Result:
    """The result for `gm` with nodes cut into pieces, if that is shorter than `whole`."""

    def of_cut(cut: fx.GraphModule, of: Cost, most: int | None) -> Result:
        return _optimized(cut, of, whole.budget, **options, most=most)

    split, found = find_split(gm, cost, of_cut, whole.timeline)
    return dataclasses.replace(found or whole, before=whole.before, split=split)


def _offloaded(gm: fx.GraphModule, cost: Cost, budget: int, options: Mapping[str, Any]) -> Result:
    """The shortest of the results for `gm` with each choice of activations in host memory, and with none."""
    captured, best, error = _captured(gm, cost, options["links"]), None, None
    try:
        best = _optimized(gm, cost, budget, **options)
    except GraphError:
        raise
    except ValueError as no_order:
        error = no_order
    for chosen in choices(captured, budget):
        result = _optimized(with_copies(gm, captured, chosen), cost, budget, **options)
        if best is None or result.timeline.makespan < best.timeline.makespan:
            left = {captured.nodes[one.node].name: one.num_bytes for one in chosen}
            best = dataclasses.replace(result, before=run(captured.dag), offloaded=Offloaded(left, result.before.dag))
    if best is None:
        raise ValueError(f"{error}; activations that are idle between forward and backward do not take so much")
    return best


def _optimized(
    gm: fx.GraphModule,
    cost: Cost,
    memory_budget: int | None,
    *,
    bucket: bool,
    multiplier: float,
    effort: int | None,
    links: Mapping[str, str] | None,
    most: int | None = None,
) -> Result:
    """`optimize` of a graph whose sizes are numbers; with `most`, quickly, with at most so many orders."""
    captured = _captured(gm, cost, links)
    own, contracted = run(captured.dag), captured.contracted
    first = most if effort is None else min(effort, most or effort)
    found = schedule(contracted.dag, budget=memory_budget, multiplier=multiplier, effort=first)
    merged = alone(contracted.dag)
    if bucket:
        keys, price_of = bucket_keys(captured), getattr(cost, "merged", None)

        def price(starts: Sequence[int]) -> float:
            if price_of is None:
                return math.fsum(contracted.dag.nodes[i].ms for i in starts)
            return float(price_of([captured.nodes[contracted.members[i][0]] for i in starts]))

        of_units = [keys[of_unit[0]] for of_unit in contracted.members]
        quick, dag = most is not None, contracted.dag
        merged, found = into_buckets(dag, found, of_units, price, multiplier=multiplier, effort=effort, quick=quick)
    made = _torch.copy_module(gm)
    whole, timeline = _expanded(captured, merged, found.order)
    emit(bind(captured.dag, made.graph), timeline.order.tolist(), whole.members)
    nodes, is_guess = captured.nodes, getattr(cost, "is_guess", lambda node: False)
    guesses = [nodes[i] for i in captured.outside_waits] + list(filter(is_guess, nodes))
    return Result(
        graph_module=made,
        timeline=timeline,
        before=own,
        bounds=found.bounds,
        members=whole.members,
        budget=found.budget,
        barriers=tuple(operator_name(nodes[i]) for i in captured.barriers),
        guesses=tuple(map(operator_name, guesses)),
        links=_other_links(captured.dag, cost, links),
    )


def _expanded(captured: Captured, merged: Quotient, order: Sequence[int]) -> tuple[Quotient, Timeline]:
    """The same buckets in the same order, of all nodes of the graph."""
    given, contracted = captured.dag, captured.contracted
    if len(merged.dag.starts) == len(given.starts):
        return alone(given), run(given, contracted.expand(merged.expand(order)))
    members: list[tuple[int, ...]] = []
    ms: dict[int, float] = {}
    for unit in order:
        of_unit = [contracted.members[i] for i in merged.members[unit]]
        if len(of_unit) == 1:
            members += [(i,) for i in of_unit[0]]
        else:  # a bucket of the leaders; then their views
            members += [tuple(of[0] for of in of_unit), *((i,) for of in of_unit for i in of[1:])]
            ms[of_unit[0][0]] = merged.dag.nodes[unit].ms
    whole = joined(given, members, ms)
    return whole, run(whole.dag)


def _other_links(dag: Dag, cost: Cost, given: Mapping[str, str] | None) -> dict[str, str] | None:
    """The groups' links under the other assumption than the dag's, for the report; None if both give the same."""
    of_cost = getattr(cost, "link", None)
    if given is None:
        given = {} if of_cost is None else {group: of_cost(group)[0] for group in dag.groups}
    found = {group: given.get(group) or group for group in dag.groups}
    if len(set(found.values())) == len(found):
        return None
    return {} if any(node.link for node in dag.nodes) else found


def check_options(**given: Any) -> None:
    """``ValueError`` for options of `optimize` that no graph allows."""
    for name in ("bucket", "split", "offload"):
        if not isinstance(given.get(name, True), bool):
            raise ValueError(f"{name} must be True or False, got {given[name]!r}")
    for name in ("memory_budget", "effort", "multiplier"):
        value = given.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not (isinstance(value, numbers.Real) and value < 2**63):  # NaN fails too
            raise ValueError(f"{name} must be a number below 2**63, got {value!r}")
        if name == "effort" and value % 1:
            raise ValueError(f"{name} must be a whole number, got {value}")
    if given.get("sizes") is not None:
        check_sizes(given["sizes"])


def simulate(
    gm: fx.GraphModule, cost: Cost | Hardware | Mapping[str, float], order: Sequence[int] | None = None
) -> Timeline:
    """Timeline of `gm` in its own order, or in another; milliseconds.

    Args:
        gm, cost: as in `optimize`.
        order: numbers of the nodes of its `Dag`, each once; default: the graph's own order.

    Raises:
        TypeError, GraphError: as `optimize`.
        ValueError: `order` misses or repeats a node.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=1, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, device="cpu")
    >>> timeline = simulate(capture(config).forward, lambda node: 1.0)
    >>> timeline.counts()
    {'hidden': 0, 'partly': 0, 'exposed': 9}
    """
    return run(_captured(gm, as_cost(cost)).dag, order)


def lower_bound(gm: fx.GraphModule, cost: Cost | Hardware | Mapping[str, float]) -> float:
    """Milliseconds that no order of the nodes of `gm` can beat, memory aside; see `bounds`.

    Raises:
        TypeError, GraphError: as `optimize`.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=1, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, device="cpu")
    >>> gm = capture(config).forward
    >>> lower_bound(gm, lambda node: 1.0) <= simulate(gm, lambda node: 1.0).makespan
    True
    """
    return lower_bounds(_captured(gm, as_cost(cost)).dag).makespan


def _captured(gm: fx.GraphModule, cost: Cost, links: Mapping[str, str] | None = None) -> Captured:
    """`to_dag`, with an error for what is no graph."""
    if not isinstance(gm, fx.GraphModule):
        raise TypeError(
            f"expected an fx.GraphModule of ATen operators, got {type(gm).__name__}: pass the graph_module of a "
            "program of torch.export, or the graphs that on_result= of overlap.backend receives"
        )
    captured = to_dag(gm, cost)
    return captured if links is None else dataclasses.replace(captured, dag=captured.dag.with_links(links))
