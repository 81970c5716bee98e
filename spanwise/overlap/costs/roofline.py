"""Milliseconds of fx nodes: compute by a roofline of one device, collectives by the levels of a network.

`CostModel` computes them from a `Hardware`; `as_cost` makes a cost of a `Hardware`, a table or a function.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from spanwise.hardware import Hardware, Link
from spanwise.overlap import _torch
from spanwise.overlap.costs.flops import hides_its_mask, is_attention, node_flops
from spanwise.overlap.dag import GraphError
from spanwise.overlap.fx import operators
from spanwise.overlap.fx.operators import Cost, Role, group_of, host_copy, is_free, nodes_in, tensors_of, traits

_aten = torch.ops.aten

TENSOR_CORES: Mapping[torch.dtype, float] = MappingProxyType({
    torch.bfloat16: 1.0, torch.float16: 1.0, torch.float8_e4m3fn: 2.0, torch.float8_e5m2: 2.0, torch.int8: 2.0,
    torch.float32: 67 / 989.4, torch.float64: 67 / 989.4,
})  # fmt: skip
"""FLOP/s of matrix products relative to bf16, dense, by the H100 SXM5 data sheet.

float32 is without TF32, torch's default; with ``torch.backends.cuda.matmul.allow_tf32`` it is 494.7 / 989.4."""

VECTOR_UNITS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 1.0, torch.float64: 0.5, torch.bfloat16: 2.0}
)
"""FLOP/s of matrix products relative to float32, for `hardware.CPU_HOST`, with VDPBF16PS as on Zen 4."""

# Operators that do not read their first argument: they overwrite it, or use its shape.
_UNREAD = frozenset({
    _aten.copy, _aten.copy_, _aten.fill, _aten.fill_, _aten.full_like, _aten.new_full, _aten.new_ones, _aten.new_zeros,
    _aten.ones_like, _aten.rand_like, _aten.randn_like, _aten.zero_, _aten.zeros_like
})  # fmt: skip
# Kinds of collectives, by the names of `Hardware.wire`.
_KINDS: dict[Any, str] = {
    **dict.fromkeys(operators.ALL_GATHER, "all_gather"),
    **dict.fromkeys(operators.REDUCE_SCATTER, "reduce_scatter"),
    **dict.fromkeys(operators.ALL_REDUCE, "all_reduce"),
    **dict.fromkeys(operators.ALL_TO_ALL, "all_to_all"),
    **dict.fromkeys(operators.BROADCAST, "broadcast"),
    **dict.fromkeys(operators.MESSAGES, "message"),
    _torch.shard_dim_alltoall: "all_to_all",
}
# Operators that read as much of their table as they return.
_LOOKUPS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
_SPARING = _UNREAD | _LOOKUPS
# Namespaces whose operators have formulas for FLOPs, or are bound by memory.
_KNOWN_BY_BYTES = frozenset({"aten", "prims", "bucketing", "fsdp"})


def _fused_away(node: fx.Node) -> bool:
    """Whether a result never reaches memory: the node is pointwise, writes no argument, and its one reader is too."""
    if len(node.users) != 1:
        return False
    known = traits(node)
    if not known.pointwise or known.writes:
        return False
    (user,) = node.users
    known = traits(user)
    while not known.pointwise and len(user.users) == 1 and is_free(user, known):  # views do not write
        (user,) = user.users
        known = traits(user)
    return known.pointwise


def node_bytes(node: fx.Node, *, fuse: bool = True) -> int:
    """Bytes that a node reads and writes.

    Each tensor counts once, an expanded one with the elements it has in memory. A lookup reads as much of its table as
    it returns.

    Args:
        fuse: count pointwise neighbours as one kernel: a pointwise result with one pointwise user is neither written
            nor read. Views between them change nothing.
    """
    known = traits(node)
    if is_free(node, known):
        return 0
    packet = getattr(node.target, "overloadpacket", None)
    results = _held_by(node)
    total = 0
    if known.writes:
        written = [value for name, value in operators.arguments(node, known) if name in known.writes]
        total += sum(map(_held_by, nodes_in(written)))
    fuse = fuse and known.pointwise
    in_place = known.is_alias and (known.never_copies or bool(known.writes))  # a `reshape` comes here only if it copies
    if not in_place and not (fuse and _fused_away(node)):
        total += results
    first = node.args[0] if node.args and packet in _SPARING else None
    for arg in node.all_input_nodes:
        if fuse and len(arg.users) == 1 and _fused_away(_source(arg)):
            continue
        if arg is not first:
            total += _held_by(arg)
        elif packet in _LOOKUPS:
            total += min(_held_by(arg), results)
        elif arg in node.args[1:]:
            total += _held_by(arg)
    return total


def _source(node: fx.Node) -> fx.Node:
    """The node that a chain of views starts from."""
    while node.op == "call_function" and len(node.users) == 1:
        known = traits(node)
        given = node.all_input_nodes
        if known.pointwise or len(given) != 1 or not is_free(node, known):
            break
        (node,) = given
    return node


def _held_by(node: fx.Node) -> int:
    value = node.meta.get("val")
    return _held(value) if isinstance(value, torch.Tensor) else sum(map(_held, operators.tensors_in(value)))


def _held(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements in memory; an expanded dim has one."""
    if tensor.layout is torch.strided and 0 in (strides := tensor.stride()):
        sizes = [1 if stride == 0 and size else size for size, stride in zip(tensor.shape, strides, strict=True)]
        return math.prod(sizes) * tensor.element_size()
    return tensor.nbytes


class CostModel:
    """Milliseconds of fx nodes on one device and network, from data sheets or `spanwise calibrate`.

    Compute is a roofline (Williams, Waterman and Patterson, 2009): the larger of FLOPs / rate of the dtype and bytes /
    memory bandwidth. Launches are not counted. Attention has its own rates. Views, items of tuples, waits and
    uninitialised memory take no time. DTensor's blocking all-to-all costs as much as an all-to-all; other unknown
    communication costs as much as its bytes.

    A collective takes ``α + bytes / B`` on each level of the network on which its ranks meet, and the slowest level
    counts. With n ranks, an all-gather and a reduce-scatter move (n-1)/n of the whole over every rank's link; ranks of
    one host share the traffic from outside, as in `Hardware.all_gather_seconds`. An all-reduce is both. An all-to-all
    sends 1/n to each rank, in a broadcast each rank receives everything once, and a message takes the link on which
    all ranks of its group meet. Ranks may price an uneven all-to-all differently; `backend` makes that an error.

    Args:
        hardware: rates, bandwidths and links.
        rates: FLOP/s by dtype, relative to ``hardware.matmul_flops``; `TENSOR_CORES` or `VECTOR_UNITS`. Other dtypes
            run at 1.
        ranks: global ranks of process groups by name; torch.distributed gives those of other groups.
        fuse: price pointwise chains as one kernel (`node_bytes`); False for a graph that runs uncompiled.

    Raises:
        ValueError: a rate that is not positive and finite.

    >>> from spanwise.hardware import H100
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    >>> product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    >>> product.meta["val"] = x.meta["val"].clone()
    >>> round(CostModel(H100)(product), 3)
    0.185
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        rates: Mapping[torch.dtype, float] = TENSOR_CORES,
        ranks: Mapping[str, Sequence[int]] | None = None,
        fuse: bool = True,
    ) -> None:
        for dtype, rate in rates.items():
            if not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"rates[{dtype}] must be positive and finite, got {rate}")
        self.hardware = hardware
        self.rates = dict(rates)
        self.ranks = {name: tuple(members) for name, members in (ranks or {}).items()}
        self.fuse = fuse

    def uuid(self) -> str:
        """Digest of all that costs depend on: equal for equal models, in every process."""
        return hashlib.sha256(repr(sorted(vars(self).items(), key=str)).encode()).hexdigest()

    def __call__(self, node: fx.Node) -> float:
        target = node.target
        if target in _KINDS:
            return 1e3 * self._collective_seconds([node])
        known = traits(node)
        if known.role is Role.WAIT or is_free(node, known):
            return 0.0
        if copies := host_copy(node):
            rate = self.hardware.to_host if copies == "to host" else self.hardware.from_host
            return 1e3 * sum(t.nbytes for t in tensors_of(node)) / rate
        memory = 1e3 * node_bytes(node, fuse=self.fuse) / self.hardware.memory_bandwidth
        if not (flops := node_flops(node)):
            return memory
        rate = self.hardware.matmul_flops
        if is_attention(node):
            backward = operators.operator_name(node).endswith("_backward")
            rate = self.hardware.attention_backward_flops if backward else self.hardware.attention_flops
        # The operands' dtype: a product of bf16 may return float32.
        dtypes = [t.dtype for arg in node.all_input_nodes for t in tensors_of(arg)]
        rate *= self.rates.get(dtypes[0] if dtypes else torch.float32, 1.0)
        return max(memory, 1e3 * flops / rate)

    def is_guess(self, node: fx.Node) -> bool:
        """Whether a cost is a guess: of a custom operator priced by its bytes alone, or of attention by all scores."""
        if node.target in _KINDS or traits(node).role is Role.WAIT or host_copy(node) or is_free(node):
            return False
        if hides_its_mask(node):
            return True
        return getattr(node.target, "namespace", None) not in _KNOWN_BY_BYTES and not node_flops(node)

    def merged(self, nodes: Sequence[fx.Node]) -> float:
        """Milliseconds of one coalesced collective, of starts of one kind and group: one latency, all bytes."""
        return 1e3 * self._collective_seconds(nodes)

    def latency(self, node: fx.Node) -> float:
        """Milliseconds of a collective without bytes: the latency of the outermost link on which its ranks meet."""
        return 1e3 * self.hardware.links[self.level(group_of(node))].latency

    def level(self, group: str) -> int:
        """The innermost of ``hardware.links`` on which all ranks of a group meet: inside a host 0, across hosts 1."""
        members, links = ranks_of(group, self.ranks), self.hardware.links
        meets = (not link.ranks or len({rank // link.ranks for rank in members}) == 1 for link in links)
        return next(at for at, meet in enumerate(meets) if meet)

    def link(self, group: str) -> tuple[str, bool]:
        """The level of links on which a group's ranks meet, and whether groups share it; see `Link.shared`."""
        if group in operators.COPIES.values():
            return "", False
        level = self.level(group)
        return f"links {level}", self.hardware.links[level].shared

    def _collective_seconds(self, nodes: Sequence[fx.Node]) -> float:
        sent = received = 0
        for node in nodes:
            given = operators.named_arguments(node)
            inputs = nodes_in(given.get("input", given.get("inputs", node.all_input_nodes)))
            sent += sum(t.nbytes for n in inputs for t in tensors_of(n))
            received += sum(t.nbytes for t in tensors_of(node))
        ranks = ranks_of(group_of(nodes[0]), self.ranks)
        size, kind = len(ranks), _KINDS[nodes[0].target]
        if size == 1:
            return 0.0
        if kind == "message":  # both directions at once
            link, landing = self.hardware.links[self.level(group_of(nodes[0]))], operators.received(nodes[0])
            arrives = sum(t.nbytes for x in landing if x is not None for t in tensors_of(x))
            return link.latency + max(arrives, sent - arrives) / link.bandwidth
        shards, pairs = _levels(self.hardware.links, ranks)
        if kind == "all_to_all":
            return self._seconds(pairs * max(sent, received) / size, kind)
        shard = {"all_gather": sent, "reduce_scatter": received, "all_reduce": sent / size}.get(kind, sent / (size - 1))
        halves = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
        return sum(self._seconds(shards * shard, half) for half in halves)

    def _seconds(self, num_bytes: np.ndarray, collective: str) -> float:
        wire = dict(self.hardware.wire).get(collective, 1.0)
        pairs = zip(self.hardware.links, num_bytes.tolist(), strict=True)
        return max((link.latency + moved * wire / link.bandwidth for link, moved in pairs if moved), default=0.0)


def ranks_of(group: str, given: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Global ranks of a group, from `given` or torch.distributed; ``ValueError`` for an unknown group."""
    if group in given:
        return tuple(given[group])
    try:
        return tuple(torch.distributed.get_process_group_ranks(_torch.find_group(group)))
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"no process group {group!r} here, and none in ranks {sorted(given)}") from error


@functools.lru_cache(maxsize=256)
def _levels(links: tuple[Link, ...], ranks: tuple[int, ...]) -> np.ndarray:
    """What the busiest block of each level receives from outside its parts: shards of a ring, and pairs of ranks.

    A block of a level consists of blocks of the level inside it. The ranks of such a part share its traffic from
    outside. float64 ``[2, levels]``.
    """
    of_rank, levels = np.array(sorted(ranks)), []
    inside = np.arange(len(ranks))  # the block of each rank
    for link in links:
        block = of_rank // link.ranks if link.ranks else np.zeros_like(of_rank)
        of_parts = np.bincount(inside)[inside]  # ranks of the part of each rank
        sizes = np.bincount(block)[block]
        outside = sizes - of_parts
        levels.append((float((outside / of_parts * len(ranks) / sizes).max()), float(outside.max())))
        inside = block
    return np.array(levels).T


def as_cost(cost: Cost | Hardware | Mapping[str, float]) -> Cost:
    """Make a function from fx nodes to milliseconds.

    Args:
        cost: a function from an fx node to milliseconds, such as a `CostModel`; a `Hardware`; or milliseconds by node
            name, with every node that takes time.

    Raises:
        ValueError: `cost` is neither. A table raises `GraphError` later, for a node that it lacks.

    >>> as_cost({"x": 2.0})(fx.Graph().placeholder("x"))
    2.0
    """
    if isinstance(cost, Hardware):
        return CostModel(cost)
    if isinstance(cost, Mapping):
        table = dict(cost)

        def look_up(node: fx.Node) -> float:
            if node.name not in table:
                raise GraphError(node.name, f"it is not in the table of costs, which has {len(table)} nodes")
            return table[node.name]

        return look_up
    if not callable(cost):
        raise ValueError(f"cost must be a function of a node, a Hardware or a table by node names, got {cost!r}")
    return cost
