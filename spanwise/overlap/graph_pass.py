"""graph_pass: the overlap pass for pipelines of passes, ``(gm, example_inputs) -> gm``. It compiles nothing.

    traced fx graph ─► optimize ─► consensus ─► scheduled fx graph

torchtitan's graph trainer, SimpleFSDP and other pipelines trace a step themselves, with ``make_fx`` or AOTAutograd: its
forward, its backward, both as one graph, or the whole step with the optimizer.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from spanwise.hardware import Hardware
from spanwise.overlap import _torch, consensus
from spanwise.overlap.costs.roofline import as_cost
from spanwise.overlap.explain.report import Result
from spanwise.overlap.fx.operators import Cost, is_start
from spanwise.overlap.fx.sizes import Sizes
from spanwise.overlap.optimize import check_options, optimize


def graph_pass(
    cost: Cost | Hardware | Mapping[str, float],
    *,
    sizes: Sizes = 4096,
    on_result: Callable[[Result], None] | None = None,
    **options: Any,
) -> Callable[..., fx.GraphModule]:
    """A pass ``(gm, example_inputs) -> gm`` that hides the collectives of a graph behind compute.

    The graph is one of ATen operators with functional collectives: of a forward, a backward, both, or a whole step with
    its optimizer. It does not change; the result is a copy, or without collectives the graph itself. Where
    process groups exist, the copy begins with a comparison of the ranks' schedules, as with `backend`. Compilers that
    run after the pass may reorder again. Inductor does; `backend` makes it keep the order.

    Args:
        cost: milliseconds of a node, as in `optimize`.
        sizes: numbers for symbolic sizes while a graph is scheduled, the same on all ranks; see `optimize`.
        on_result: called with the `Result` of each graph with collectives.
        options: other arguments of `optimize`: ``memory_budget=``, ``bucket=``, ``multiplier=``, …

    Returns:
        The pass. It does not read its `example_inputs`, and raises the errors of `optimize`.

    Raises:
        TypeError: an option that `optimize` lacks.
        ValueError: one that no graph allows.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=2, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, dp=2, device="cpu")
    >>> cost = lambda node: 2.0 if "gather" in node.name else 1.0  # milliseconds
    >>> forward = capture(config).forward
    >>> scheduled = graph_pass(cost=cost)(forward, ())
    >>> optimize(scheduled, cost).before.makespan < optimize(forward, cost).before.makespan
    True
    """
    inspect.signature(optimize).bind(None, cost, sizes=sizes, **options)
    check_options(sizes=sizes, **options)
    priced = as_cost(cost)

    def spanwise_overlap_pass(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> fx.GraphModule:
        if not isinstance(gm, fx.GraphModule):
            raise TypeError(f"a graph pass takes an fx.GraphModule of ATen operators, got {type(gm).__name__}")
        if not (any(map(is_start, gm.graph.nodes)) or options.get("offload")):
            return gm
        with consensus.failure_reported(gm):
            given = _torch.copy_module(gm)
            consensus.remove(given.graph)
            result = optimize(given, priced, sizes=sizes, **options)
        if on_result is not None:
            with consensus.failure_reported(gm, "raised in on_result"):
                on_result(result)
        made = result.graph_module
        if consensus.has_peers(made.graph):
            consensus.insert(made.graph, traced(result))
            made.recompile()
        return made

    return spanwise_overlap_pass  # torchtitan's pipelines know their passes by name


def describe(cost: Cost | Hardware | Mapping[str, float]) -> str | None:
    """A text that is equal for equal costs in every process; None if the costs have no ``uuid``."""
    if isinstance(cost, Mapping):
        return hashlib.sha256(repr(sorted(cost.items())).encode()).hexdigest()
    uuid = getattr(as_cost(cost), "uuid", None)
    return None if uuid is None else str(uuid())


def traced(result: Result) -> list[list[int]]:
    """For each start in issue order, the starts of the given graph that it replaces, by their numbers there."""
    number = {start: k for k, start in enumerate(result.given.starts)}
    starts = set(result.timeline.dag.starts)
    return [[number[i] for i in result.members[unit]] for unit in result.timeline.order.tolist() if unit in starts]
