"""agree: what ranks decided about the collectives of a graph is compared before the first of them runs.

    scheduled fx graph ─► insert ─► the graph with a call of ``spanwise::agree`` in front ─► compiled code

Ranks that start collectives in different orders wait for each other for ever. Each rank schedules on its own, from its
own costs and with its own torch, or takes a graph from a cache that others do not have; so the comparison cannot be
made while compiling. It is an operator in the graph, which survives the caches of compiled code: at its first call in a
process group, ranks exchange a digest through the group's store, and later ones look it up in a set. No collective
takes part, so that a rank which runs something else is an error as well.

What has to agree is the order of the starts, over all groups, with operators, dtypes and shapes: with one order of
starts on all ranks none can wait for a collective that another one has not reached (of the collectives that somebody
waits for, nobody is held up before the first in that order). Compute and waits may be placed differently.
"""

from __future__ import annotations

import base64
import hashlib
import json
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from spanwise import _compat
from spanwise.overlap.operators import (
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

_library = torch.library.Library("spanwise", "FRAGMENT")
_library.define("agree(str digest, str record, str groups) -> ()")


def insert(graph: fx.Graph, facts: Mapping[str, str]) -> fx.Node | None:
    """Put the comparison in front of all calls, in place; None, and nothing is done, if the graph does not talk.

    Args:
        facts: by name, what the decision depended on; not compared, but said where decisions differ.
    """
    talking = [(node, known) for node in graph.nodes if (known := _talks(node)) is not None]
    if not talking:
        return None
    labels: dict[str, str] = {}
    lines = [_line(node, known, labels) for node, known in talking]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    record = json.dumps({"facts": dict(facts), "starts": lines})
    packed = base64.b85encode(zlib.compress(record.encode(), 9)).decode()
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        node = graph.call_function(torch.ops.spanwise.agree.default, (digest, packed, ",".join(labels)))
    node.meta["val"] = None
    return node


def _talks(node: fx.Node) -> Traits | None:
    """Traits of a node that starts a collective, or talks to a named group in a way that is not known."""
    known = traits(node)
    return known if node.target in STARTS or (known.talks and _groups_of(node, known)) else None


def _groups_of(node: fx.Node, known: Traits) -> list[str]:
    given = dict(arguments(node, known))
    return [given[name] for name in ("group_name",) if isinstance(given.get(name), str)]


def _line(node: fx.Node, known: Traits, labels: dict[str, str]) -> str:
    """A collective in words; groups by the order in which they appear, for ranks know them by different names."""
    group = group_of(node)
    label = labels.setdefault(group, f"group {len(labels)}")
    uneven = node.target in ALL_TO_ALL  # ranks send and receive different numbers of rows
    given = [_shape(t, uneven) for _, value in arguments(node, known) for n in nodes_in(value) for t in tensors_of(n)]
    ways = [value for name, value in arguments(node, known) if name in ("reduce_op", "group_size", "src")]
    return " ".join([str(node.target), label, *map(str, ways), *given])


def _shape(tensor: torch.Tensor, uneven: bool) -> str:
    sizes = [str(size) if type(size) is int else "?" for size in tensor.shape]
    if uneven and sizes:
        sizes[0] = "?"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


@torch.library.impl(_library, "agree", "CompositeExplicitAutograd")
def _agree(digest: str, record: str, groups: str) -> None:
    new = []
    for name in groups.split(","):
        group = _compat.find_group(name)
        if digest not in _agreed.setdefault(group, set()):
            new.append(group)
    # All groups hear of it before any is waited for: ranks may know their groups in another order.
    for group, rounds in [(group, _publish(group, digest, record)) for group in new]:
        _compare(group, rounds, digest)
        _agreed[group].add(digest)


def _publish(group: dist.ProcessGroup, digest: str, record: str) -> str:
    """Say what this rank decided; the prefix of the keys of this comparison."""
    if group.size() == 1 or _compat.is_simulated(group):
        return ""
    store, rank = _compat.group_store(group), group.rank()
    number = store.add(f"spanwise/agree/count/{rank}", 1)
    prefix = f"spanwise/agree/{number}"
    store.set(f"{prefix}/rank/{rank}", f"{digest} {record}")
    store.add(f"{prefix}/digest/{digest}", 1)
    if store.add(f"{prefix}/arrived", 1) == group.size():
        store.set(f"{prefix}/all", "here")
    return prefix


def _compare(group: dist.ProcessGroup, prefix: str, digest: str) -> None:
    """Wait for all ranks of `group`, and raise `ValueError` on each of them if they decided differently."""
    if not prefix:
        return
    store, size = _compat.group_store(group), group.size()
    timeout = _compat.group_timeout(group)
    try:
        store.wait([f"{prefix}/all"], timeout)
    except dist.DistError as error:
        late = [rank for rank in range(size) if not store.check([f"{prefix}/rank/{rank}"])]
        raise ValueError(
            f"ranks {late} of {_named(group)} did not come to compare a compiled graph within {timeout}: they run "
            f"something else, or are gone; their own errors say more"
        ) from error
    if store.add(f"{prefix}/digest/{digest}", 0) != size:
        records = [store.get(f"{prefix}/rank/{rank}").decode().split(" ") for rank in range(size)]
        raise ValueError(_difference(group, records))


def _named(group: dist.ProcessGroup) -> str:
    return f"the process group of ranks {dist.get_process_group_ranks(group)}"


def _difference(group: dist.ProcessGroup, records: Sequence[Sequence[str]]) -> str:
    """What differs between ranks: by digest, who has it, where the orders part, and which facts are not the same."""
    camps: dict[str, list[int]] = {}
    for rank, (digest, _) in enumerate(records):
        camps.setdefault(digest, []).append(rank)
    unpacked = [json.loads(zlib.decompress(base64.b85decode(records[ranks[0]][1]))) for ranks in camps.values()]
    starts = [record["starts"] for record in unpacked]
    at = next(i for i in range(max(map(len, starts)) + 1) if len({tuple(lines[i : i + 1]) for lines in starts}) > 1)
    parts = [
        f"ranks {ranks} start {lines[at] if at < len(lines) else 'nothing more'}"
        for ranks, lines in zip(camps.values(), starts, strict=True)
    ]
    causes = [f"{name} is {' / '.join(values)}" for name, values in _differing(record["facts"] for record in unpacked)]
    return (
        f"ranks of {_named(group)} scheduled the collectives of a graph differently: of {len(starts[0])} collectives "
        f"number {at} is the first that differs: {'; '.join(parts)}. "
        + (f"Of what they went by, {'; '.join(causes)}. " if causes else "They went by the same options and costs. ")
        + "Compile the same model with the same costs, options and versions on every rank"
    )


def _differing(facts: Iterator[dict[str, str]] | Any) -> Iterator[tuple[str, list[str]]]:
    every = list(facts)
    for name in every[0]:
        values = [one.get(name, "not known") for one in every]
        if len(set(values)) > 1:
            yield name, values


_compat.mark_effectful(torch.ops.spanwise.agree.default)


@torch.library.register_fake("spanwise::agree", lib=_library)
def _(digest: str, record: str, groups: str) -> None:
    return None
