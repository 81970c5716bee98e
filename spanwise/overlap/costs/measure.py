"""measure: time the operators of a graph on this device and over these process groups.

    fx graph ─► jobs of different signature ─► timing, on every rank ─► one table for all ranks ─► Measured ─► to_dag

Ranks that schedule by different costs may start collectives in different orders, so all ranks use one table: the
largest time of any rank. A node that a rank cannot run is an error on all ranks, or a model prices it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from spanwise.hardware import Hardware
from spanwise.overlap import _torch
from spanwise.overlap.costs.roofline import as_cost, node_bytes, ranks_of
from spanwise.overlap.costs.timing import Call, calls, milliseconds, trial, why_not
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx.operators import STARTS, Cost, Role, group_of, is_free, tensors_of, traits

Timer = Callable[[fx.Node, Callable[[], Any]], float]
"""``(node, call) -> milliseconds``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Measured milliseconds of nodes, the same on all ranks; a cost for `optimize`, `simulate` and `backend`.

    Equal operators on equal shapes cost the same in every graph. A pointwise operator was timed alone; in a fused
    kernel its cost shrinks with the bytes that it moves (`roofline.node_bytes`).

    Attributes:
        table: milliseconds by signature (`timing.Call.signature`; for a collective, followed by its ranks).
        fallback: cost of nodes that are not in the table.
        ranks: global ranks of process groups by name, as in `CostModel`.
        fuse: whether pointwise neighbours are one kernel; False for a graph that runs uncompiled.
        left_out: nodes of this rank's graphs that `fallback` prices, each with the reason.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(8, device="meta")
    >>> node = graph.call_function(torch.ops.aten.relu.default, (x,))
    >>> node.meta["val"] = x.meta["val"].clone()
    >>> Measured({"aten.relu.default(self=float32[8])": 2.0}, fuse=False)(node)
    2.0
    """

    table: Mapping[str, float]
    fallback: Cost | None = None
    ranks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    fuse: bool = True
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    half_rate: ClassVar[int] = 0  # products of few rows were timed, or `fallback` prices them: `optimize(split=True)`

    def __call__(self, node: fx.Node) -> float:
        if not _runs(node):
            return 0.0
        ms = self._known([node])
        if ms is None:
            if self.fallback is not None:
                return self.fallback(node)
            text = f"it was not measured ({calls(node)[0].signature()}), and there is no fallback"
            raise GraphError(node.name, text)
        if self.fuse and traits(node).pointwise:
            apart = node_bytes(node, fuse=False)
            ms *= node_bytes(node) / apart if apart else 1.0
        return ms

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        """Milliseconds of one coalesced collective: the sum of its members, with one latency if `fallback` tells it."""
        ms = self._known(nodes)
        of_fallback = getattr(self.fallback, "merged", lambda nodes: math.fsum(map(self, nodes)))
        return float(of_fallback(nodes)) if ms is None else ms

    def link(self, group: str) -> tuple[str, bool]:
        """What a group's collectives may share with those of others, and whether they do, as `fallback` says."""
        link = getattr(self.fallback, "link", None)
        return link(group) if link else ("", False)

    def uuid(self) -> str:
        """Digest of all that costs depend on: equal for equal costs in every process.

        With a fallback that has no ``uuid()``, it differs in every call.
        """
        of_fallback = getattr(self.fallback, "uuid", None)
        rest = "none" if self.fallback is None else of_fallback() if of_fallback else uuid.uuid4().hex
        everything = sorted(self.table.items()), sorted(self.ranks.items()), self.fuse, rest
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def _known(self, nodes: Sequence[fx.Node]) -> float | None:
        """Milliseconds of a node, or of collectives as one; None if they were not measured."""
        try:
            keys = [key for node in nodes for key in _keys(node, self.ranks)]
        except ValueError:  # a group that this process does not know
            return None
        times = [self.table.get(key) for key in keys]
        if None in times:
            return None
        known = [ms for ms in times if ms is not None]
        if len(known) == 1:
            return known[0]
        latency = min(getattr(self.fallback, "latency", lambda node: 0.0)(nodes[0]), *known)
        return max(math.fsum(known) - (len(known) - 1) * latency, *known)


def _runs(node: fx.Node) -> bool:
    """Whether a node takes device time: it is not free, and has tensors."""
    if traits(node).role is Role.WAIT or is_free(node):
        return False
    return any(map(tensors_of, (node, *node.all_input_nodes)))


def _keys(node: fx.Node, ranks: Mapping[str, Sequence[int]]) -> list[str]:
    """Keys in the table: one of a node, one of each member of a coalesced collective."""
    after = ""
    if node.target in STARTS:  # distances of ranks from the first: ranks 0, 8 and ranks 1, 9 must cost the same
        members = ranks_of(group_of(node), ranks)
        after = f" over {', '.join(f'+{rank - members[0]}' for rank in members)}"
    return [call.signature() + after for call in calls(node)]


class _Job(NamedTuple):
    node: fx.Node
    call: Call
    ranks: tuple[int, ...]  # of a collective


def measure(
    *graphs: fx.GraphModule,
    device: torch.device | str | None = None,
    fallback: Cost | Hardware | Mapping[str, float] | None = None,
    ranks: Mapping[str, Sequence[int]] | None = None,
    repeats: int = 10,
    fuse: bool = True,
    timer: Timer | None = None,
) -> Measured:
    """Time the operators of `graphs`, each signature once, and take the largest time of all ranks.

    Operators run alone on made-up inputs, on all ranks at once; collectives over their own groups, one after the other.
    `fallback` prices what is not run: higher-order operators such as FlexAttention, barriers, operators whose integer
    tensors are more than indices, symbolic sizes, calls that torch refuses, and collectives that some rank lacks.

    Call it on all ranks at once, outside of compilation. For `backend`, measure the graphs that its
    ``on_result`` receives: Inductor's differ from those of "aot_eager".

    Args:
        graphs: ATen graphs with ``meta["val"]``, such as a forward and its backward; they do not change.
        device: where operators run, "cuda" being the current device; default: the device of the graph's tensors.
        fallback: cost of nodes that cannot run; without it they are an error.
        ranks: global ranks of groups by name, for groups that this process does not have.
        repeats: number of calls; a time is their median.
        fuse: price pointwise chains as one kernel.
        timer: ``(node, call) -> milliseconds``, instead of the clock.

    Returns:
        `Measured`, the same on all ranks.

    Raises:
        GraphError: a node that cannot run, without a `fallback`, or a time that is negative or not finite. On all ranks
            if on any.
        ValueError: `repeats` is below 1.

    >>> from spanwise.overlap.fx.capture import CaptureConfig, capture
    >>> config = CaptureConfig(layers=1, dim=64, heads=4, kv_heads=2, ffn=128, seq_len=32, device="cpu")
    >>> cost = measure(capture(config).forward, timer=lambda node, call: 2.0)
    >>> max(cost.table.values())
    2.0
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    of_graphs = (t.device for gm in graphs for node in gm.graph.nodes for t in tensors_of(node))
    where = torch.device(next(of_graphs, "cpu") if device is None else device)
    world = dist.group.WORLD if dist.is_initialized() else None
    shared = None if world is None or _torch.is_simulated(world) else world
    known_ranks = {name: tuple(members) for name, members in (ranks or {}).items()}
    jobs: dict[str, _Job] = {}
    left_out: dict[str, str] = {}
    error: tuple[str, str] | None = None
    try:  # if one rank raised here, the others would wait for it
        jobs, left_out = _jobs(graphs, known_ranks)
        if fallback is None and left_out:
            name, reason = next(iter(left_out.items()))
            error = name, f"it cannot be measured: {reason}; pass fallback="
    except GraphError as refused:
        error = refused.node, str(refused)
    of_ranks = _exchange(shared, error, {key: (job.ranks, job.node.name) for key, job in jobs.items()})
    held = Counter((key, members) for keys in of_ranks for key, (members, _) in keys.items())
    clock = timer or (lambda node, call: milliseconds(call, where, repeats))
    todo = {key: job for key, job in jobs.items() if held[key, job.ranks] >= len(job.ranks)}
    timed, refusals, error = _time(todo, where, clock)
    table: dict[str, float] = {}
    for of_rank in _exchange(shared, error, timed):
        for key, ms in of_rank.items():
            table[key] = max(ms, table.get(key, 0.0))
    names = {key: name for keys in of_ranks for key, (_, name) in keys.items()}
    for key in sorted(names.keys() - table.keys()):
        reason = refusals.get(key, "not all ranks of its group have it alike")
        if key in jobs:
            left_out.setdefault(jobs[key].node.name, reason)
        if fallback is None:
            raise GraphError(names[key], f"it cannot be measured: {reason}; pass fallback=")
    model = None if fallback is None else as_cost(fallback)
    return Measured(dict(sorted(table.items())), model, known_ranks, fuse, left_out)


def _jobs(
    graphs: Sequence[fx.GraphModule], ranks: Mapping[str, Sequence[int]]
) -> tuple[dict[str, _Job], dict[str, str]]:
    """Jobs to time by key in the table, and the reason for each node that cannot run."""
    jobs: dict[str, _Job] = {}
    left_out: dict[str, str] = {}
    for node in (node for gm in graphs for node in gm.graph.nodes):
        if not node.op.startswith("call_") or not _runs(node):
            continue
        reason = why_not(node)
        members: tuple[int, ...] = ()
        if reason is None and node.target in STARTS:
            name = group_of(node)
            try:
                if _torch.is_simulated(_torch.find_group(name)):
                    reason = f"its process group {name!r} is simulated"
                members = ranks_of(name, ranks)
            except (RuntimeError, ValueError, KeyError):
                reason = f"there is no process group {name!r} here"
        if reason is not None:
            left_out[node.name] = reason
            continue
        for key, call in zip(_keys(node, ranks), calls(node), strict=True):
            jobs.setdefault(key, _Job(node, call, members))
    return jobs, left_out


def _time(
    jobs: Mapping[str, _Job], device: torch.device, clock: Timer
) -> tuple[dict[str, float], dict[str, str], tuple[str, str] | None]:
    """Milliseconds by key, reasons for what torch refuses, and an error of the first bad time."""
    timed: dict[str, float] = {}
    refused: dict[str, str] = {}
    error: tuple[str, str] | None = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        # Collectives last, and in one order on all ranks, so that none waits for another.
        for key, job in sorted(jobs.items(), key=lambda item: (bool(item[1].ranks), item[0], item[1].ranks)):
            try:
                ms = float(clock(job.node, trial(job.call, device)))
            except Exception as failed:  # an operator may raise anything
                refused[key] = f"{type(failed).__name__}: {failed}"
                continue
            if math.isfinite(ms) and ms >= 0:
                timed[key] = ms
            else:
                error = error or (job.node.name, f"it was measured to take {ms} ms")
    return timed, refused, error


def _exchange(group: dist.ProcessGroup | None, error: tuple[str, str] | None, mine: Any) -> list[Any]:
    """Values of all ranks, by rank; raises the error of the first rank that has one."""
    found: list[Any] = [(error, mine)]
    if group is not None:
        found = [None] * group.size()
        dist.all_gather_object(found, (error, mine), group=group)
    for rank, (of_rank, _) in enumerate(found):
        if of_rank is not None:
            node, text = of_rank
            raise GraphError(node, f"rank {rank}: {text}" if len(found) > 1 else text)
    return [value for _, value in found]
