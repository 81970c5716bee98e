"""measure: what the operators of a graph really take, on this device and over these process groups.

    fx graph ─► jobs of unequal signature ─► timing, on every rank ─► one table for all ranks ─► Measured ─► to_dag
                                  └───────────── file ──────────────────────────┘

Ranks that schedule by different costs may start collectives in different orders. So nothing is priced by what one rank
saw: ranks tell each other what they have on file before anything is timed, and their times before anything is
scheduled, in one exchange each, and take the largest, for a step is as fast as its slowest rank. With everything on
file there is one exchange and no timing. What a rank cannot run is an error of all, or is priced by a model.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import socket
import tempfile
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _torch
from spanwise.hardware import Hardware
from spanwise.overlap.costs.roofline import as_cost, is_pointwise, node_bytes, ranks_of
from spanwise.overlap.costs.timing import calls, device_of, milliseconds, name_of, smallest, trial, why_not
from spanwise.overlap.fx.operators import COALESCED, STARTS, WAIT, Cost, group_of, is_free, tensors_of
from spanwise.overlap.ir.dag import GraphError

_FORMAT = "spanwise measured costs 1"
_LATENCY, _OVER = "latency of ", " over +0"

Timer = Callable[[fx.Node, Callable[[], Any]], float]
"""``(node, call) -> milliseconds`` of the call."""


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Milliseconds of nodes by what was measured, the same on all ranks; hand it to `optimize`, `simulate`, `backend`.

    Equal operators on equal shapes cost the same, whatever graph they are in. A pointwise operator was timed alone, and
    costs as much less as it moves fewer bytes in a kernel with its neighbours (`costs.node_bytes`): what is fused away
    is free. That holds where bandwidth is what it takes; of arithmetic that takes longer, it is too little.

    Attributes:
        table: milliseconds by signature (`timing.Call.signature`; a collective's goes on with its ranks, see `_over`).
        fallback: prices what is not in the table.
        ranks: global ranks of process groups, as `CostModel` takes them.
        fuse: whether pointwise neighbours are one kernel; False for a graph that runs uncompiled.
        left_out: nodes of the graphs that were measured which `fallback` prices, and why. This rank's own.
        timed: how many signatures this rank has timed; 0 if all were on file.
    """

    table: Mapping[str, float]
    fallback: Cost | None = None
    ranks: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    fuse: bool = True
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timed: int = 0

    def __call__(self, node: fx.Node) -> float:
        if not _runs(node):
            return 0.0
        ms = self._known([node])
        if ms is None:
            if self.fallback is None:
                raise GraphError(
                    node.name, f"it was not measured ({calls(node)[0].signature()}), and there is no fallback"
                )
            return self.fallback(node)
        if self.fuse and is_pointwise(node):
            apart = node_bytes(node, fuse=False)
            ms *= node_bytes(node) / apart if apart else 1.0
        return ms

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        """Milliseconds of one coalesced collective of these: as all of them, but for the latencies of all but one.

        The latency of a kind of collective over a group is measured, with one element from each rank.
        """
        ms = self._known(nodes)
        if ms is not None:
            return ms
        of_fallback = getattr(self.fallback, "merged", None)
        if of_fallback is not None:
            return float(of_fallback(nodes))
        return math.fsum(map(self, nodes))

    def uuid(self) -> str:
        """The same for equal costs in every process, for caches of what was made by them.

        A fallback that has no ``uuid()`` itself makes one that no other process has.
        """
        of_fallback = getattr(self.fallback, "uuid", None)
        rest = "none" if self.fallback is None else of_fallback() if of_fallback else uuid.uuid4().hex
        everything = sorted(self.table.items()), sorted(self.ranks.items()), self.fuse, rest
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def _known(self, nodes: Sequence[fx.Node]) -> float | None:
        """Of one node, or of collectives at once; None if they were not measured."""
        try:
            keys = [key for node in nodes for key in _keys(node, self.ranks)]
        except ValueError:  # a group that is not known here
            return None
        times = [self.table.get(key) for key in keys]
        if None in times:
            return None
        known = [ms for ms in times if ms is not None]
        if len(known) == 1:
            return known[0]
        latency = min(self.table.get(_latency_key(nodes[0], self.ranks), 0.0), *known)
        return max(math.fsum(known) - (len(known) - 1) * latency, *known)


def _runs(node: fx.Node) -> bool:
    """Whether it takes the device any time: it does something, with tensors."""
    if node.target is WAIT or is_free(node):
        return False
    return any(map(tensors_of, (node, *node.all_input_nodes)))


def _keys(node: fx.Node, ranks: Mapping[str, Sequence[int]]) -> list[str]:
    """In the table: one for a node, one for each member of a coalesced collective."""
    after = f" {_over(ranks_of(group_of(node), ranks))}" if node.target in STARTS else ""
    return [call.signature() + after for call in calls(node)]


def _latency_key(node: fx.Node, ranks: Mapping[str, Sequence[int]]) -> str:
    return f"{_LATENCY}{calls(node)[0].target} {_over(ranks_of(group_of(node), ranks))}"


def _over(ranks: Sequence[int]) -> str:
    """A group by how far its ranks are from its first: ranks 0, 8 and ranks 1, 9 have to be priced alike."""
    return f"over {', '.join(f'+{rank - ranks[0]}' for rank in ranks)}"


@dataclasses.dataclass(frozen=True)
class _Job:
    node: fx.Node
    make: Callable[[torch.device], Callable[[], Any]]
    ranks: tuple[int, ...] = ()  # of a collective


def measure(
    *graphs: fx.GraphModule,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    fallback: Cost | Hardware | Mapping[str, float] | None = None,
    cache: str | os.PathLike[str] | None = None,
    ranks: Mapping[str, Sequence[int]] | None = None,
    repeats: int = 10,
    fuse: bool = True,
    timer: Timer | None = None,
) -> Measured:
    """Time the operators of `graphs`, each that differs once, and agree with the other ranks on what they take.

    Operators run by themselves on made-up inputs (`timing`), all ranks at the same time, as they do in a step;
    collectives over their own groups, one after the other in one order on all ranks. Not run, and priced by `fallback`:
    what calls no operator (FlexAttention and other higher-order operators), barriers, operators whose integer tensors
    mean more than indices, sizes that are left open, what torch refuses, and collectives that not all ranks of their
    group have alike or whose group is a simulated one.

    Call it on all ranks of `group` at once, outside of compilation. What `backend` schedules it hands to ``on_result``;
    these are the graphs to measure for it, as Inductor's are not those of "aot_eager".

    Args:
        graphs: ATen graphs with ``meta["val"]``, a forward and its backward say; left as they are.
        device: where operators run, "cuda" being the current one; default: where the graph's tensors are.
        group: whose ranks agree; default: all, or this process alone where torch.distributed is not initialised.
        fallback: a model for what cannot be run; without one that is an error.
        cache: JSON file of what was measured, by signature, device and torch's version, of collectives by host and
            backend, too; read first, written (atomically) if anything is new, which warns where it fails. Each rank may
            have its own, or all one.
        ranks: global ranks of groups by name, for groups that this process does not have.
        repeats: calls that each time is the median of.
        fuse: price pointwise chains as one kernel.
        timer: instead of the clock, ``(node, call) -> milliseconds``.

    Raises:
        GraphError: a node that cannot be run, without a `fallback`, or whose time is negative or not finite.
        ValueError: `cache` is no such file; on all ranks if on any.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    where = torch.device(device) if device is not None else device_of(*graphs)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if where == torch.device("cuda"):
        where = torch.device("cuda", torch.cuda.current_device())
    alone = group is None or _torch.is_simulated(group)
    known_ranks = {name: tuple(members) for name, members in (ranks or {}).items()}
    places, on_file = _places(where, group), {}
    jobs: dict[str, _Job] = {}
    left_out: dict[str, str] = {}
    try:  # the others would wait for a rank that raises here
        jobs, left_out = _jobs(graphs, known_ranks)
        error = _refusal(left_out) if fallback is None else None
        on_file = _on_file(cache, places) if cache is not None else {}
    except (OSError, ValueError) as refused:
        error = "", str(refused)
    own = {key: (on_file.get(key), job.ranks, job.node.name) for key, job in jobs.items()}
    of_ranks = _exchange(None if alone else group, error, own)
    table = _largest([{key: ms for key, (ms, *_) in keys.items()} for keys in of_ranks])
    held = Counter((key, members) for keys in of_ranks for key, (_, members, _) in keys.items())
    missing = [(key, name) for keys in of_ranks for key, (_, _, name) in keys.items() if key not in table]
    timed: dict[str, float | None] = {}
    if missing:
        clock = timer or (lambda node, call: milliseconds(call, where, repeats, once=node.target in STARTS))
        todo = {key: job for key, job in jobs.items() if key not in table and held[key, job.ranks] >= len(job.ranks)}
        timed, refused_by_torch, error = _time(todo, where, clock)
        table = _largest([table, *_exchange(None if alone else group, error, timed)])
        for key, job in jobs.items():
            if key not in table and not key.startswith(_LATENCY):
                reason = refused_by_torch.get(key, "not all ranks of its group have it alike")
                left_out.setdefault(job.node.name, reason)
        if fallback is None:
            for key, name in missing:
                if key not in table and not key.startswith(_LATENCY):
                    text = f"it cannot be measured: {left_out.get(name, 'another rank could not')}; pass fallback="
                    raise GraphError(name, text)
    if cache is not None and any(on_file.get(key) != ms for key, ms in table.items()):
        try:
            _save(cache, places, table)
        except (OSError, ValueError) as failed:  # the other ranks have what was measured, and go on
            warnings.warn(f"what was measured is not in {os.fspath(cache)}: {failed}", stacklevel=2)
    model = None if fallback is None else as_cost(fallback)
    return Measured(table, model, known_ranks, fuse, left_out, len(timed))


def _jobs(
    graphs: Sequence[fx.GraphModule], ranks: Mapping[str, Sequence[int]]
) -> tuple[dict[str, _Job], dict[str, str]]:
    """What to time, by its key in the table; nodes that cannot be, and why not."""
    jobs: dict[str, _Job] = {}
    left_out: dict[str, str] = {}
    for node in (node for gm in graphs for node in gm.graph.nodes):
        if not node.op.startswith("call_") or not _runs(node):
            continue
        reason = why_not(node)
        members: tuple[int, ...] = ()
        if reason is None and node.target in STARTS:
            reason, members = _members(node, ranks)
        if reason is not None:
            left_out[node.name] = reason
            continue
        for key, call in zip(_keys(node, ranks), calls(node), strict=True):
            jobs.setdefault(key, _Job(node, functools.partial(trial, call), members))
            if call.target in COALESCED.values():
                make = functools.partial(smallest, call, len(members))
                jobs.setdefault(_latency_key(node, ranks), _Job(node, make, members))
    return jobs, left_out


def _members(node: fx.Node, ranks: Mapping[str, Sequence[int]]) -> tuple[str | None, tuple[int, ...]]:
    """Why a collective cannot be run, and its ranks."""
    name = group_of(node)
    try:
        group = _torch.find_group(name)
    except (RuntimeError, ValueError, KeyError):
        return f"there is no process group {name!r} here", ()
    if _torch.is_simulated(group):
        return f"its process group {name!r} is simulated", ()
    return None, ranks_of(name, ranks)


def _refusal(left_out: Mapping[str, str]) -> tuple[str, str] | None:
    for name, reason in left_out.items():
        return name, f"it cannot be measured: {reason}; pass fallback="
    return None


def _time(
    jobs: Mapping[str, _Job], device: torch.device, clock: Timer
) -> tuple[dict[str, float | None], dict[str, str], tuple[str, str] | None]:
    """Milliseconds by key, None for what torch refuses to run; why it does; and the node whose time is none, if any."""
    timed: dict[str, float | None] = {}
    refused: dict[str, str] = {}
    error: tuple[str, str] | None = None
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        # Collectives last, and in one order on all ranks, so that none waits for another.
        for key, job in sorted(jobs.items(), key=lambda item: (bool(item[1].ranks), item[0], item[1].ranks)):
            timed[key] = None
            try:
                ms = float(clock(job.node, job.make(device)))
            except Exception as failed:  # whatever an operator may raise
                refused[key] = f"{type(failed).__name__}: {failed}"
                continue
            if math.isfinite(ms) and ms >= 0:
                timed[key] = ms
            else:
                error = error or (job.node.name, f"it was measured to take {ms} ms")
    return timed, refused, error


def _exchange(group: dist.ProcessGroup | None, error: tuple[str, str] | None, mine: Any) -> list[Any]:
    """What all ranks have, by rank; the error of the first that has one, a node's if it names a node."""
    found: list[Any] = [(error, mine)]
    if group is not None:
        found = [None] * group.size()
        dist.all_gather_object(found, (error, mine), group=group)
    for rank, (of_rank, _) in enumerate(found):
        if of_rank is not None:
            node, text = of_rank
            text = f"rank {rank}: {text}" if len(found) > 1 else text
            raise GraphError(node, text) if node else ValueError(text)
    return [value for _, value in found]


def _largest(tables: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for table in tables:
        for key, ms in table.items():
            if ms is not None:
                found[key] = max(ms, found.get(key, 0.0))
    return dict(sorted(found.items()))


def _places(device: torch.device, group: dist.ProcessGroup | None) -> dict[bool, str]:
    """Where operators' times are good for, and (True) collectives': on these hosts only, for networks have no names."""
    operators = name_of(device)
    size = 1 if group is None else group.size()
    backend = "" if group is None else f", {dist.get_backend_config(group)}"
    return {False: operators, True: f"{operators}, {size} ranks, {socket.gethostname()}{backend}"}


def _on_file(path: str | os.PathLike[str], places: Mapping[bool, str]) -> dict[str, float]:
    content = _load(path)
    return {
        key: ms
        for of_groups, place in places.items()
        for key, ms in content.get(place, {}).items()
        if (_OVER in key) == of_groups
    }


def _load(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """By device, milliseconds by key; nothing if there is no file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:  # JSON's and Unicode's errors are
        raise ValueError(_no_cache(path, str(error))) from error
    if not (isinstance(content, dict) and content.get("format") == _FORMAT and isinstance(content.get("ms"), dict)):
        raise ValueError(_no_cache(path, f'its format is not "{_FORMAT}"'))
    for place, table in content["ms"].items():
        if not isinstance(table, dict):
            raise ValueError(_no_cache(path, f"{place!r} has no times"))
        for key, ms in table.items():
            if not (isinstance(ms, (int, float)) and math.isfinite(ms) and ms >= 0):
                raise ValueError(_no_cache(path, f"{key!r} takes {ms} ms"))
    return content["ms"]


def _no_cache(path: str | os.PathLike[str], why: str) -> str:
    return f"{os.fspath(path)} is not a file of measured costs ({why}): remove it, or name another"


def _save(path: str | os.PathLike[str], places: Mapping[bool, str], table: Mapping[str, float]) -> None:
    """Add to the file, which others may write at the same time: the last one's is what stays, whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    everything = _load(target)
    for key, ms in table.items():
        everything.setdefault(places[_OVER in key], {})[key] = ms
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
        json.dump({"format": _FORMAT, "ms": everything}, file, indent=1, sort_keys=True)
    os.replace(file.name, target)
