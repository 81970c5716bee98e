"""consensus: ranks compare their schedules of a graph before its first collective runs.

    scheduled fx graph ─► insert ─► the graph with a call of ``spanwise::agree`` in front ─► compiled code

Ranks that start collectives in different orders wait for each other forever. Each rank schedules alone, or takes a
graph from a cache that others lack. So the comparison is an operator in the graph, which survives the caches of
compiled code. At its first call, ranks exchange a digest through their group's store; later calls look it up in a set.
It uses no collective, so a rank that runs something else is an error as well.

The ranks of a group must agree on their collectives (operators, dtypes, numbers in the traced graph), and on the places
of these in the order of all starts, other groups included. Then no rank waits forever: a rank that has not started the
first collective which has not ended waits for one with an earlier place, and those have ended.

A graph that differs only in sizes is not compared again: ranks whose input keeps its size do not recompile.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import re
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise.overlap import _torch
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import ALL_TO_ALL, MESSAGES, STARTS, Traits, arguments, group_of, is_start, nodes_in

# Digests on which the ranks of each group have agreed; an entry dies with its group.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()

_ONE_PEER = frozenset({"src", "dst", "peer_list"})

_library = torch.library.Library("spanwise", "FRAGMENT")
_library.define("agree(str groups, str digests, str records) -> ()")


def insert(graph: fx.Graph, traced: Sequence[Sequence[int]] | None = None) -> fx.Node | None:
    """Put the comparison in front of all calls, in place; return its node, or None if the graph does not communicate.

    Args:
        traced: for each start in the order of `graph`, the collectives that it replaces, by their numbers in the graph
            before it was scheduled. Default: the graph was not scheduled.
    """
    communication = [(node, known) for node in graph.nodes if (known := _communicates(node)) is not None]
    if not communication:
        return None
    every = iter(traced or ([k] for k in itertools.count()))
    replaced = {node: next(every) for node in graph.nodes if is_start(node)}
    # Messages and copies are not numbered: each rank has its own.
    order = sorted(k for node, _ in communication for k in replaced.get(node, ()))
    numbers = {k: number for number, k in enumerate(order, 1)}
    starts: dict[str, list[str]] = {}
    for place, (node, known) in enumerate(communication, 1):
        of = "+".join(str(numbers[k]) for k in replaced.get(node, ())) or "-"
        starts.setdefault(group_of(node), []).append(_describe(node, known, f"{place}.", of))
    digests = [_digest([re.sub(r"\[.*?\]", "", start) for start in of_group]) for of_group in starts.values()]
    packed = [base64.b85encode(zlib.compress(json.dumps(of).encode(), 9)).decode() for of in starts.values()]
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        node = graph.call_function(torch.ops.spanwise.agree.default, tuple(map(" ".join, (starts, digests, packed))))
    node.meta["val"] = None
    return node


def remove(graph: fx.Graph) -> None:
    """Erase comparisons of an earlier schedule, in place."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.spanwise.agree.default):
        graph.erase_node(node)


def has_peers(graph: fx.Graph) -> bool:
    """Whether a group of `graph` exists here, with other ranks that answer."""
    if not dist.is_initialized():
        return False
    try:
        return any(map(_is_real, _groups_of(graph)))
    except (RuntimeError, ValueError, KeyError):  # a graph from elsewhere
        return False


@contextlib.contextmanager
def failure_reported(gm: fx.GraphModule, what: str = "could not schedule its graph") -> Iterator[None]:
    """Tell the groups of `gm` if this rank fails; the others would wait for it in the comparison.

    Errors of the store are ignored; one is already being raised.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            for group in filter(_is_real, _groups_of(gm.graph)):
                why = f"rank {dist.get_rank()} {what}: {type(error).__name__}: {error}"
                _Comparison(group, "", "").fail(why)
        raise


def _groups_of(graph: fx.Graph) -> list[dist.ProcessGroup]:
    names = dict.fromkeys(group_of(node) for node in graph.nodes if _communicates(node) is not None)
    return [_torch.find_group(name) for name in names]


def _is_real(group: dist.ProcessGroup) -> bool:
    return group.size() > 1 and not _torch.is_simulated(group)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _communicates(node: fx.Node) -> Traits | None:
    """Traits of a node that all ranks of a named group must call, else None; sends and receives involve only two."""
    known = operators.traits(node)
    named = known.communicates and isinstance(dict(arguments(node, known)).get("group_name"), str)
    return known if node.target in STARTS - MESSAGES or (named and not _ONE_PEER & set(known.names)) else None


def _describe(node: fx.Node, known: Traits, place: str, of: str) -> str:
    """A start in words; "?" for sizes that are symbolic or may differ between ranks."""
    given = [t for _, value in arguments(node, known) for n in nodes_in(value) for t in operators.tensors_of(n)]
    how = [str(value) for name, value in arguments(node, known) if name in ("reduce_op", "src")]
    sizes = [[str(size) if type(size) is int else "?" for size in t.shape] for t in given]
    if node.target in ALL_TO_ALL:  # ranks exchange different numbers of rows
        sizes = [["?", *rest] for _, *rest in sizes]
    elif node.target not in STARTS:
        sizes = [["?"] * len(of_tensor) for of_tensor in sizes]
    tensors = [f"{str(t.dtype).removeprefix('torch.')} [{', '.join(of)}]" for t, of in zip(given, sizes, strict=True)]
    return " ".join([place, str(node.target).split(".")[1], f"(traced as {of})", *how, *tensors])


@torch.library.impl(_library, "agree", "CompositeExplicitAutograd")
def _agree(groups: str, digests: str, records: str) -> None:
    found = [_torch.find_group(name) for name in groups.split()]
    every = [_Comparison(*each) for each in zip(found, digests.split(), records.split(), strict=True)]
    new = [one for one in every if one.digest not in _agreed.get(one.group, ())]
    _compare([one for one in new if _is_real(one.group)], len(found))
    for one in new:
        _agreed.setdefault(one.group, set()).add(one.digest)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """One comparison in one group, through the group's store."""

    group: dist.ProcessGroup
    digest: str
    record: str

    @functools.cached_property
    def store(self) -> dist.Store:
        return _torch.group_store(self.group)

    @functools.cached_property
    def prefix(self) -> str:
        """Prefix of this comparison's keys. Each rank counts its comparisons; the numbers are the same on all."""
        return f"spanwise/agree/{self.store.add(f'spanwise/agree/count/{self.group.rank()}', 1)}"

    def publish(self) -> None:
        """Write this rank's record."""
        self.store.set(f"{self.prefix}/rank/{self.group.rank()}", self.record)
        self.store.add(f"{self.prefix}/same/{_digest(_unpacked(self.record))}", 1)

    def fail(self, text: str) -> None:
        self.store.set(f"{self.prefix}/failed", text)

    def difference(self) -> str:
        """The first place where the ranks' orders differ, once all have arrived, and their starts; "" if none does."""
        size, own = self.group.size(), _digest(_unpacked(self.record))
        if self.store.add(f"{self.prefix}/same/{own}", 0) == size:
            return ""
        records = [self.store.get(f"{self.prefix}/rank/{rank}").decode() for rank in range(size)]
        every = itertools.zip_longest(*map(_unpacked, records), fillvalue="nothing more here")
        starts = next((starts for starts in every if not _alike(starts)), None)
        if starts is None:
            return ""
        ranks, alike = dist.get_process_group_ranks(self.group), dict[str, list[int]]()
        for at, start in enumerate(starts):
            alike.setdefault(start, []).append(ranks[at])
        parts = [f"ranks {same} start {start}" for start, same in alike.items()]
        return (
            f"ranks of the process group of ranks {ranks} scheduled the collectives of a graph differently, by places "
            f"in the order of all starts: {'; '.join(parts)}. "
            "Compile the same model with the same costs, options and versions on every rank"
        )


def _compare(every: Sequence[_Comparison], hops: int) -> None:
    """Wait for the ranks of all groups; ``ValueError`` on all ranks if schedules differ or a rank is missing.

    Ranks of other groups must hear of a failure too, or they would wait in the first collective. A rank that finds or
    hears of a failure reports it in all its groups. All ranks wait for one another as many times as the graph has
    groups: then a failure has reached every rank of a mesh, along one axis at a time.
    """
    for one in every:
        one.publish()
    for hop in range(hops):
        for one in every:
            one.store.set(f"{one.prefix}/arrived/{hop}/{one.group.rank()}", "here")
            if one.store.add(f"{one.prefix}/arrived/{hop}", 1) == one.group.size():
                one.store.set(f"{one.prefix}/all/{hop}", "here")
        for one in every:
            text = _wait(one, hop, every) or (one.difference() if hop == 0 else "")
            if text:
                for other in every:
                    other.fail(text)
                raise ValueError(text)


def _wait(one: _Comparison, hop: int, every: Sequence[_Comparison]) -> str:
    """Wait until all ranks of a group have arrived, or one has failed in any group; return the error or ""."""
    until, pause = time.monotonic() + _torch.group_timeout(one.group).total_seconds(), 1e-3
    while not one.store.check([f"{one.prefix}/all/{hop}"]):
        for other in every:
            if other.store.check([f"{other.prefix}/failed"]):
                return other.store.get(f"{other.prefix}/failed").decode()
        if time.monotonic() > until:
            ranks = dist.get_process_group_ranks(one.group)
            late = [rank for r, rank in enumerate(ranks) if not one.store.check([f"{one.prefix}/arrived/{hop}/{r}"])]
            return (
                f"ranks {late} of the process group of ranks {ranks} did not come to compare a compiled graph within "
                f"{_torch.group_timeout(one.group)}: they run something else or have failed, see their own errors; or "
                "sizes changed here and not there and led to another order: then compile with dynamic=True"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.2)  # ranks may compile for minutes
    return ""


def _unpacked(record: str) -> list[str]:
    return json.loads(zlib.decompress(base64.b85decode(record)))


def _alike(starts: Sequence[str]) -> bool:
    """Whether these can be the same collective: an unknown size equals any."""
    words = [re.split(r"[ ,\[\]]+", start) for start in starts]
    return len(set(map(len, words))) == 1 and all(len({*of} - {"?"}) < 2 for of in zip(*words, strict=True))


_torch.mark_effectful(torch.ops.spanwise.agree.default)


@torch.library.register_fake("spanwise::agree", lib=_library)
def _(groups: str, digests: str, records: str) -> None:
    return None
