"""backend: the overlap pass as a backend of ``torch.compile``.

    model ─► torch.compile ─► forward, backward graph ─► optimize ─► agree ─► Inductor, or the graph itself

AOTAutograd's graphs are scheduled one by one: where Inductor has done with them and has not lowered them yet, or, with
"aot_eager", as they are. Inductor orders what it lowers anew, by data dependencies and memory; control dependencies
between collectives, their waits and heavy compute hold it to the schedule, and leave everything that it fuses alone.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _torch
from spanwise.hardware import Hardware
from spanwise.overlap import consensus as agree
from spanwise.overlap.costs.roofline import as_cost, node_flops
from spanwise.overlap.fx.emit import emit
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.fx.operators import STARTS, WAIT, Cost, traits
from spanwise.overlap.fx.sizes import assumed
from spanwise.overlap.optimize import Result, optimize

# Namespaces of operators that Inductor has code of its own for, most of them.
_INDUCTORS = frozenset({"aten", "prims"})


def backend(
    name: str = "inductor",
    *,
    cost: Cost | Hardware | Mapping[str, float],
    dynamic_size: int = 4096,
    on_result: Callable[[Result], None] | None = None,
    **options: Any,
) -> Backend:
    """A backend for ``torch.compile`` that hides the communication of forward and backward graphs behind compute.

        torch.compile(model, backend=overlap.backend("inductor", cost=hardware))

    Graphs without collectives compile as ever. With collectives, all ranks compare what they decided at the first call
    of a graph and raise ``ValueError`` if it differs, or if a rank could not schedule its own; see `agree`. Where sizes
    vary from rank to rank, compile with ``dynamic=True``: a rank that compiles anew must come to the same order.
    FSDP2's ``fully_shard`` communicates in hooks outside of the graphs; parameters that are DTensors, gathered by the
    model, communicate inside.

    Args:
        name: "inductor", or "aot_eager", which runs the ATen graphs as they are; ``mode=`` and ``options=`` of
            ``torch.compile`` go on to Inductor.
        cost: of `optimize.optimize`. Inductor's caches of compiled graphs hold those whose cost is a `Hardware`, a
            table, or has a method ``uuid() -> str`` that changes when what it returns does, as `CostModel` and
            `Measured` have; graphs of other functions compile anew in every process.
        dynamic_size: what a size is taken for that a graph leaves open, by dynamic shapes or an exchange that changes
            from plan to plan. The same on all ranks, whatever sizes they happen to see first.
        on_result: called with what was made of each graph that has collectives, when it is compiled; graphs that come
            from a cache are not scheduled again.
        options: more of `optimize.optimize`: ``memory_budget=``, ``bucket=``, ``multiplier=``, …

    Raises:
        ValueError: another name, or no size.
        TypeError: options that `optimize` does not have.
    """
    inspect.signature(optimize).bind(None, cost, **options)
    if name not in ("inductor", "aot_eager"):
        raise ValueError(f'the backend must be "inductor" or "aot_eager", got {name!r}')
    if dynamic_size < 1:
        raise ValueError(f"dynamic_size must be at least 1, got {dynamic_size}")
    return Backend(name, cost, options, dynamic_size, on_result or (lambda result: None))


class Backend:
    """What `backend` returns: ``(gm, example_inputs) -> callable``, as ``torch.compile`` calls it."""

    def __init__(
        self,
        name: str,
        cost: Cost | Hardware | Mapping[str, float],
        options: Mapping[str, Any],
        dynamic_size: int,
        on_result: Callable[[Result], None],
    ) -> None:
        self.name, self._cost, self._options, self._on_result = name, as_cost(cost), dict(options), on_result
        self._dynamic_size, self._costs = dynamic_size, _describe(cost)
        self.__name__ = f"spanwise.overlap.backend({name!r})"  # in torch.compile's errors

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if self.name == "aot_eager":
            if mode or options:
                raise ValueError(f'"aot_eager" takes no mode and no options, got mode={mode!r}, options={options!r}')
            return _torch.compile_aot_eager(gm, example_inputs, functools.partial(self._schedule, hold=False))
        return _torch.compile_inductor(
            gm,
            example_inputs,
            functools.partial(self._schedule, hold=True),
            self.fingerprint(),
            mode=mode,
            options=options,
        )

    def fingerprint(self) -> str | None:
        """What schedules depend on beside the graph, as a digest; None if the costs do not say what they are."""
        if self._costs is None:
            return None
        groups = sorted((_torch.group_name(g), tuple(dist.get_process_group_ranks(g))) for g in _groups())
        everything = [self._facts(), groups, _source()]
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def _facts(self) -> dict[str, str]:
        facts = {"torch": str(torch.__version__), "costs": self._costs or "a function"}
        facts["dynamic_size"] = str(self._dynamic_size)
        return facts | {option: str(value) for option, value in self._options.items()}

    def _schedule(self, gm: fx.GraphModule, *, hold: bool) -> fx.GraphModule:
        """Put `gm` into its new order, in place; `hold` Inductor to it."""
        if not any(node.target in STARTS for node in gm.graph.nodes):
            return gm
        try:
            with assumed(gm, self._dynamic_size):
                result = optimize(gm, self._cost, **self._options)
                captured = to_dag(gm, lambda node: 0.0)  # numbered as the copy that was optimized
                emit(captured, result.timeline.order.tolist(), result.members)
                tied = [node for node in gm.graph.nodes if _is_tied(node)]
            self._on_result(result)
        except Exception as error:
            agree.give_up(gm.graph, f"{type(error).__name__}: {error}")
            raise
        first = agree.insert(gm.graph, self._facts(), _traced(result))
        if hold and first is not None:
            _torch.keep_order(gm.graph, _implicit(gm.graph, [first, *tied]))
        return gm


def _traced(result: Result) -> list[list[int]]:
    """Of each start as it is issued, the starts of the graph before that it stands for, by their numbers there."""
    number = {start: k for k, start in enumerate(result.before.dag.starts)}
    starts = set(result.timeline.dag.starts)
    return [[number[i] for i in result.members[unit]] for unit in result.timeline.order.tolist() if unit in starts]


def _implicit(graph: fx.Graph, tied: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What keeps Inductor to the order of the nodes that are `tied`: each follows the one before it.

    Left out where data say so anyhow. Pointwise operators, reductions and views are not tied to anything, so that they
    fuse as they would; Inductor makes a buffer of whatever another node is tied to.
    """
    places = {node: place for place, node in enumerate(tied)}
    found: dict[fx.Node, list[fx.Node]] = {}
    reached: dict[fx.Node, int] = {}  # the last of them that a node follows by data
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
    """Starts, waits, and what Inductor calls rather than fuses: matrix products, attention, custom operators."""
    if node.op != "call_function":
        return False
    if node.target in STARTS or node.target is WAIT or traits(node).talks or node_flops(node) > 0:
        return True
    return isinstance(node.target, _torch.OpOverload) and node.target.namespace not in _INDUCTORS


def _groups() -> list[dist.ProcessGroup]:
    return _torch.groups() if dist.is_initialized() else []


def _describe(cost: Cost | Hardware | Mapping[str, float]) -> str | None:
    """The same text for costs that are the same in every process; None if that cannot be said."""
    if isinstance(cost, Mapping):
        return hashlib.sha256(repr(sorted(cost.items())).encode()).hexdigest()
    uuid = getattr(as_cost(cost), "uuid", None)
    return None if uuid is None else str(uuid())


@functools.cache
def _source() -> str:
    """Digest of the source of this package: another version may schedule differently."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
