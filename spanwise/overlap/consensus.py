"""agree: what ranks decided about the collectives of a graph is compared before the first of them runs.

    scheduled fx graph ─► insert ─► the graph with a call of ``spanwise::agree`` in front ─► compiled code

Ranks that start collectives in different orders wait for each other for ever. Each rank schedules on its own, from its
own costs and with its own torch, or takes a graph from a cache that others do not have; so the comparison cannot be
made while compiling. It is an operator in the graph, which survives the caches of compiled code: at its first call in a
process group, ranks exchange a digest through the group's store, and later ones look it up in a set. No collective
takes part, so that a rank which runs something else is an error as well.

The ranks of a group have to agree on what its collectives are (operators, dtypes, which ones of the graph as it was
traced), and on their places in the order of all starts, those of other groups counted. Then nothing waits for ever: of
the collectives that have not ended take one of the foremost place. A rank of it that has not started it yet waits for
one that it started before, in a place further in front, which has ended. Compute and waits may be placed differently.

Sizes are compared too, where they are numbers on all ranks, but a graph that differs in sizes alone is not compared
again: a rank whose input changes its size compiles anew, and others, whose input does not, know nothing of it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _torch
from spanwise.overlap.fx.operators import (
    ALL_TO_ALL,
    STARTS,
    Traits,
    arguments,
    group_of,
    nodes_in,
    tensors_of,
    traits,
)

# Digests on which the ranks of a group have agreed in this process; goes with the group.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()

_ONE_PEER = frozenset({"src", "dst", "peer_list"})

_Sizes = list[list[int | None]]  # of each tensor, in each dim; None for those that are open
_Start = tuple[str, _Sizes]

_library = torch.library.Library("spanwise", "FRAGMENT")
_library.define("agree(str groups, str digests, str records) -> ()")


def insert(graph: fx.Graph, facts: Mapping[str, str], traced: Sequence[Sequence[int]] | None = None) -> fx.Node | None:
    """Put the comparison in front of all calls, in place; None, and nothing is done, if the graph does not talk.

    Args:
        facts: by name, what the decision depended on; not compared, but said where decisions differ.
        traced: of each start in the order of `graph`, the collectives that it was made from, by their numbers in the
            graph before it was scheduled. Default: it is as it was.
    """
    talking = [(node, known) for node in graph.nodes if (known := _talks(node)) is not None]
    if not talking:
        return None
    numbers = iter(traced or [(k,) for k in range(len(talking))])
    starts: dict[str, list[_Start]] = {}
    for place, (node, known) in enumerate(talking, 1):
        of = "+".join(str(k + 1) for k in next(numbers)) if node.target in STARTS else "-"
        starts.setdefault(group_of(node), []).append(_described(node, known, f"{place}.", of))
    digests = [_digest([what for what, _ in of_group]) for of_group in starts.values()]
    records = [json.dumps({"facts": dict(facts), "starts": of_group}) for of_group in starts.values()]
    packed = [base64.b85encode(zlib.compress(record.encode(), 9)).decode() for record in records]
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        node = graph.call_function(torch.ops.spanwise.agree.default, tuple(map(" ".join, (starts, digests, packed))))
    node.meta["val"] = None
    return node


def give_up(graph: fx.Graph, why: str) -> None:
    """Say in the groups of `graph` that this rank has none to run: the others come to compare theirs, and would wait.

    What the store raises is for nobody: there is an error already.
    """
    with contextlib.suppress(Exception):
        found = [_torch.find_group(group_of(node)) for node in graph.nodes if _talks(node) is not None]
        for group in dict.fromkeys(found):
            if group.size() > 1 and not _torch.is_simulated(group):
                _Told(group, "", "").fail(f"rank {dist.get_rank()} could not schedule its graph: {why}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _talks(node: fx.Node) -> Traits | None:
    """Traits of a node that all ranks of a named group have to call; sends and receives are for two of them."""
    known = traits(node)
    named = known.talks and isinstance(dict(arguments(node, known)).get("group_name"), str)
    return known if node.target in STARTS or (named and not _ONE_PEER & set(known.names)) else None


def _described(node: fx.Node, known: Traits, place: str, of: str) -> _Start:
    given = [t for _, value in arguments(node, known) for n in nodes_in(value) for t in tensors_of(n)]
    ways = [str(value) for name, value in arguments(node, known) if name in ("reduce_op", "src")]
    dtypes = [str(t.dtype).removeprefix("torch.") for t in given]
    sizes: _Sizes = [[size if type(size) is int else None for size in t.shape] for t in given]
    if node.target in ALL_TO_ALL:  # ranks send and receive different numbers of rows
        sizes = [[None, *rest] for _, *rest in sizes]
    elif node.target not in STARTS:  # of which that is not known
        sizes = [[None] * len(of_tensor) for of_tensor in sizes]
    return " ".join([place, str(node.target).split(".")[1], f"(traced as {of})", *ways, *dtypes]), sizes


@torch.library.impl(_library, "agree", "CompositeExplicitAutograd")
def _agree(groups: str, digests: str, records: str) -> None:
    found = [_torch.find_group(name) for name in groups.split()]
    told = [_Told(*each) for each in zip(found, digests.split(), records.split(), strict=True)]
    new = [one for one in told if one.digest not in _agreed.get(one.group, ())]
    _compare([one for one in new if one.group.size() > 1 and not _torch.is_simulated(one.group)], len(found))
    for one in new:
        _agreed.setdefault(one.group, set()).add(one.digest)


@dataclasses.dataclass(frozen=True)
class _Told:
    """What this rank tells those of one group; what it hears from them, through the group's store."""

    group: dist.ProcessGroup
    digest: str
    record: str

    @functools.cached_property
    def store(self) -> dist.Store:
        return _torch.group_store(self.group)

    @functools.cached_property
    def prefix(self) -> str:
        """Of the keys of this comparison: each rank counts its own, and comes to the same number."""
        return f"spanwise/agree/{self.store.add(f'spanwise/agree/count/{self.group.rank()}', 1)}"

    def tell(self) -> None:
        self.store.set(f"{self.prefix}/rank/{self.group.rank()}", self.record)
        self.store.add(f"{self.prefix}/same/{_digest(_unpacked(self.record)['starts'])}", 1)

    def arrive(self, hop: int) -> None:
        self.store.set(f"{self.prefix}/arrived/{hop}/{self.group.rank()}", "here")
        if self.store.add(f"{self.prefix}/arrived/{hop}", 1) == self.group.size():
            self.store.set(f"{self.prefix}/all/{hop}", "here")

    def is_complete(self, hop: int) -> bool:
        return self.store.check([f"{self.prefix}/all/{hop}"])

    def fail(self, text: str) -> None:
        self.store.set(f"{self.prefix}/failed", text)

    def failure(self) -> str:
        """What a rank of the group has found; empty if nothing."""
        key = f"{self.prefix}/failed"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def difference(self) -> str:
        """How the ranks' decisions differ, once all have arrived; empty if they do not."""
        size, own = self.group.size(), _digest(_unpacked(self.record)["starts"])
        if self.store.add(f"{self.prefix}/same/{own}", 0) == size:
            return ""
        records = [self.store.get(f"{self.prefix}/rank/{rank}").decode() for rank in range(size)]
        return _difference(self.group, [_unpacked(record) for record in records])

    def lateness(self, hop: int) -> str:
        """Who has not arrived, or has not come at all."""
        ranks = enumerate(dist.get_process_group_ranks(self.group))
        late = [rank for r, rank in ranks if not self.store.check([f"{self.prefix}/arrived/{hop}/{r}"])]
        return (
            f"ranks {late} of {_named(self.group)} did not come to compare a compiled graph within "
            f"{_torch.group_timeout(self.group)}: they run something else or are gone, and their own errors say more; "
            "or sizes changed here and not there, and led to another order: then compile with dynamic=True"
        )


def _compare(all_of: Sequence[_Told], hops: int) -> None:
    """Wait for the ranks of all groups; ``ValueError`` on each of them if some decided differently or did not come.

    Ranks of other groups have to hear of it too, or they would wait for these in the first collective: whoever finds or
    hears of a failure says so in all its groups, and all wait for one another as many times as the graph has groups,
    after which it has come from any rank of a mesh to any other, along one axis at a time.
    """
    for one in all_of:
        one.tell()
    for hop in range(hops):
        for one in all_of:
            one.arrive(hop)
        for one in all_of:
            text = _wait(one, hop, all_of) or (one.difference() if hop == 0 else "")
            if text:
                for other in all_of:
                    other.fail(text)
                raise ValueError(text)


def _wait(one: _Told, hop: int, all_of: Sequence[_Told]) -> str:
    """Wait until all ranks of a group have arrived, or one has failed in any group; what it said."""
    until, pause = time.monotonic() + _torch.group_timeout(one.group).total_seconds(), 1e-3
    while not one.is_complete(hop):
        for other in all_of:
            if text := other.failure():
                return text
        if time.monotonic() > until:
            return one.lateness(hop)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)  # ranks may compile for minutes
    return ""


def _named(group: dist.ProcessGroup) -> str:
    return f"the process group of ranks {dist.get_process_group_ranks(group)}"


def _unpacked(record: str) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b85decode(record)))


def _difference(group: dist.ProcessGroup, records: Sequence[dict[str, Any]]) -> str:
    """Where the orders of ranks part, who starts what there, and which facts are not the same; empty if they do not."""
    for entries in itertools.zip_longest(*(record["starts"] for record in records)):
        if None in entries or len({what for what, _ in entries}) > 1 or _clash([sizes for _, sizes in entries]):
            break
    else:
        return ""
    camps: dict[str, list[int]] = {}  # places among `records`
    for at, entry in enumerate(entries):
        camps.setdefault("nothing more here" if entry is None else _said(*entry), []).append(at)
    ranks = dist.get_process_group_ranks(group)
    parts = [f"ranks {[ranks[at] for at in camp]} start {said}" for said, camp in camps.items()]
    different = _differing([records[camp[0]]["facts"] for camp in camps.values()])
    causes = [f"{name} is {' / '.join(values)}" for name, values in different]
    why = "They went by the same options and costs, as far as these can be told apart"
    if causes:
        why = f"Of what they went by, {'; '.join(causes)}"
    return (
        f"ranks of {_named(group)} scheduled the collectives of a graph differently, by their places among all that it "
        f"starts: {'; '.join(parts)}. {why}. "
        "Compile the same model with the same costs, options and versions on every rank"
    )


def _said(what: str, sizes: _Sizes) -> str:
    return " ".join([what, *(f"[{', '.join('?' if n is None else str(n) for n in shape)}]" for shape in sizes)])


def _clash(sizes: Sequence[_Sizes]) -> bool:
    """Whether tensors of one collective have other sizes on some ranks, as far as they are numbers."""
    if len({tuple(map(len, of_rank)) for of_rank in sizes}) > 1:
        return True
    flat = zip(*(itertools.chain.from_iterable(of_rank) for of_rank in sizes), strict=True)
    return any(len({n for n in of_dim if n is not None}) > 1 for of_dim in flat)


def _differing(facts: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for name in facts[0]:
        values = [one.get(name, "not known") for one in facts]
        if len(set(values)) > 1:
            yield name, values


_torch.mark_effectful(torch.ops.spanwise.agree.default)


@torch.library.register_fake("spanwise::agree", lib=_library)
def _(groups: str, digests: str, records: str) -> None:
    return None
