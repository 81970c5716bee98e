"""backend: the overlap pass as a backend of ``torch.compile``.

    model ─► torch.compile ─► forward, backward graph ─► optimize ─► consensus ─► Inductor, or the graph itself

AOTAutograd's graphs are scheduled one by one: after Inductor's passes and before lowering, or with "aot_eager" as they
are. Inductor orders lowered nodes by data dependencies and memory. Control dependencies between collectives, waits and
heavy compute make it keep the schedule; nodes that it fuses stay free.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise.hardware import Hardware
from spanwise.overlap import _torch, consensus
from spanwise.overlap.costs.roofline import as_cost, node_flops
from spanwise.overlap.fx.emit import emit, merge_waits
from spanwise.overlap.fx.graph import bind
from spanwise.overlap.fx.operators import Cost, Role, is_start, traits
from spanwise.overlap.fx.sizes import assumed, has_symbols
from spanwise.overlap.graph_pass import describe, traced
from spanwise.overlap.optimize import Result, check_options, not_split, optimize
from spanwise.overlap.split.rewrite import rewrite

# Inductor generates code for most operators of these namespaces, and calls those of others.
_GENERATED = frozenset({"aten", "prims"})


def backend(
    name: str = "inductor",
    *,
    cost: Cost | Hardware | Mapping[str, float],
    dynamic_size: int = 4096,
    on_result: Callable[[Result], None] | None = None,
    **options: Any,
) -> Backend:
    """A backend for ``torch.compile`` that hides the collectives of forward and backward graphs behind compute.

    Graphs without collectives compile as usual. With collectives, all ranks compare their schedules at the first call
    of a graph. ``ValueError`` is raised if they differ, or if a rank could not schedule its graph or its `on_result`
    raised; see `consensus`. Where sizes vary from rank to rank, compile with ``dynamic=True``, so that a rank that
    recompiles finds the same order. FSDP2's ``fully_shard`` communicates in hooks outside of the graphs; DTensor
    parameters that the model gathers communicate inside.

    Args:
        name: "inductor", or "aot_eager", which runs the ATen graphs as they are. ``mode=`` and ``options=`` of
            ``torch.compile`` go to Inductor.
        cost: milliseconds of a node, as in `optimize`. Inductor caches compiled graphs if the cost is a `Hardware`, a
            table, or has a method ``uuid() -> str`` that changes with its costs, as `CostModel` and `Measured` have.
            With other functions every process compiles anew.
        dynamic_size: size assumed for each symbol of a graph (dynamic shapes, or an exchange whose rows change from
            plan to plan). It is the same on all ranks, whatever sizes they see first.
        on_result: called with the `Result` of each graph with collectives when it is compiled. Graphs that come from a
            cache are not scheduled again.
        options: other arguments of `optimize`: ``memory_budget=``, ``bucket=``, ``multiplier=``, …

    Raises:
        ValueError: an unknown name, a size below 1, or an option that no graph allows.
        TypeError: an option that `optimize` lacks.

    >>> import torch
    >>> from spanwise.hardware import CPU_HOST
    >>> model = torch.compile(torch.nn.Linear(2, 2), backend=backend("aot_eager", cost=CPU_HOST))
    """
    inspect.signature(optimize).bind(None, cost, **options)
    if name not in ("inductor", "aot_eager"):
        raise ValueError(f'the backend must be "inductor" or "aot_eager", got {name!r}')
    if "sizes" in options:
        raise ValueError(f"a backend takes dynamic_size=, one number for all symbols; got sizes={options['sizes']!r}")
    if type(dynamic_size) is not int or dynamic_size < 1:
        raise ValueError(f"dynamic_size must be a whole number of at least 1, got {dynamic_size!r}")
    if options.get("offload"):
        raise ValueError("offload=True needs forward and backward in one graph: use overlap.optimize or graph_pass")
    check_options(**options)
    return Backend(name, as_cost(cost), describe(cost), options, dynamic_size, on_result or (lambda result: None))


@dataclasses.dataclass
class Backend:
    """Result of `backend`: ``(gm, example_inputs) -> callable``, as ``torch.compile`` calls it."""

    name: str
    _cost: Cost
    _costs: str | None
    _options: Mapping[str, Any]
    _dynamic_size: int
    _on_result: Callable[[Result], None]

    def __post_init__(self) -> None:
        self.__name__ = f"spanwise.overlap.backend({self.name!r})"  # in torch.compile's errors

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        schedule = functools.partial(self._schedule, hold=self.name == "inductor")
        if self.name == "inductor":
            return _torch.compile_inductor(gm, example_inputs, schedule, self.fingerprint(), mode=mode, options=options)
        if mode or options:
            raise ValueError(f'"aot_eager" takes no mode and no options, got mode={mode!r}, options={options!r}')
        return _torch.compile_aot_eager(gm, example_inputs, schedule)

    def fingerprint(self) -> str | None:
        """Digest of all that schedules depend on besides the graph; None if the costs have no ``uuid``."""
        if self._costs is None:
            return None
        known = _torch.groups() if dist.is_initialized() else []
        groups = sorted((_torch.group_name(g), tuple(dist.get_process_group_ranks(g))) for g in known)
        options = sorted((name, str(value)) for name, value in self._options.items())
        everything = [torch.__version__, self._costs, self._dynamic_size, options, groups, _source()]
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def _schedule(self, gm: fx.GraphModule, *, hold: bool) -> fx.GraphModule:
        """Put `gm` into its new order, in place; with `hold`, make Inductor keep it."""
        if not any(map(is_start, gm.graph.nodes)):
            return gm
        with consensus.failure_reported(gm):
            merge_waits(gm.graph)
            cut = self._options.get("split", False)
            is_static = not has_symbols(gm)
            with assumed(gm, self._dynamic_size):
                result = optimize(gm, self._cost, **{**self._options, "split": cut and is_static})
                if not is_static:
                    result = dataclasses.replace(not_split(result) if cut else result, sizes=self._dynamic_size)
                if result.split is not None and result.split.is_cut:
                    rewrite(gm.graph, result.split.cuts, result.split.tokens, result.split.pieces)
                emit(bind(result.given, gm.graph), result.timeline.order.tolist(), result.members)
                tied = [node for node in gm.graph.nodes if _is_tied(node)]
        with consensus.failure_reported(gm, "raised in on_result"):
            self._on_result(result)
        first = consensus.insert(gm.graph, traced(result))
        if hold and first is not None:
            _torch.keep_order(gm.graph, _implicit(gm.graph, [first, *tied]))
        return gm


def _implicit(graph: fx.Graph, tied: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Control dependencies that make Inductor keep the order of `tied` nodes: each follows the one before it.

    Dependencies that data already imply are left out. Pointwise operators, reductions and views are never tied, so that
    they fuse as usual: Inductor makes a buffer of every node that another is tied to.
    """
    places = {node: place for place, node in enumerate(tied)}
    found: dict[fx.Node, list[fx.Node]] = {}
    reached: dict[fx.Node, int] = {}  # the last tied node that a node follows by data
    for node in graph.nodes:
        reached[node] = max((reached[arg] for arg in node.all_input_nodes), default=-1)
        place = places.get(node)
        if place is None:
            continue
        if place and reached[node] < place - 1:
            found[node] = [tied[place - 1]]
        reached[node] = place
    return found


def _is_tied(node: fx.Node) -> bool:
    """Whether a node is a start, a wait, or called by Inductor rather than fused: products, attention, custom ones."""
    if node.op != "call_function":
        return False
    known = traits(node)
    if known.role in (Role.START, Role.WAIT) or known.communicates or node_flops(node) > 0:
        return True
    return isinstance(node.target, _torch.OpOverload) and node.target.namespace not in _GENERATED


@functools.cache
def _source() -> str:
    """Digest of this package's source: another version may schedule differently."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
