"""Rates of a machine and its network: seconds of attention, copies and collectives.

At the bottom of the package: planning prices layouts with a :class:`Hardware`, and the overlap half prices collectives
with it. Numbers only, no torch. `spanwise calibrate` measures one; the presets come from data sheets.

The network model is Hockney's (1994): a collective in which the busiest rank moves ``n`` bytes takes ``α + n/B``
seconds. For all-to-all the bytes of the busiest rank are exact. For all-gather and reduce-scatter they are those of a
ring (Thakur, Rabenseifner and Gropp, 2005, sections 4.1 and 4.3): every byte of the other ranks, once.

A network has levels, innermost first (NVLink inside a host, InfiniBand between hosts). Ranks are numbered host by host.
The levels work at the same time, so a collective takes as long as its slowest level.
"""

# P ranks of a collective, R receivers, S senders (both P)

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from typing import Any

import numpy as np

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One level of a network, seen from one rank.

    Attributes:
        bandwidth: bytes/s that a rank receives, and sends at the same time, while all ranks do.
        latency: seconds of a collective on this level before its first byte (α).
        ranks: size of the groups that the level joins, ranks ``[0, ranks)``, ``[ranks, 2 ranks)``, …; None for the
            outermost level, which joins all.
        shared: whether collectives of several process groups run one after the other on it, in `overlap`.

    Raises:
        ValueError: a bandwidth that is not positive, a negative latency, groups of fewer than 2 ranks.

    >>> Link(bandwidth=50e9, latency=40e-6)
    Link(bandwidth=50000000000.0, latency=4e-05, ranks=None, shared=False)
    """

    bandwidth: float
    latency: float
    ranks: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth", _number("Link.bandwidth", self.bandwidth))
        object.__setattr__(self, "latency", _number("Link.latency", self.latency, zero=True))
        if self.ranks is not None and (type(self.ranks) is not int or self.ranks < 2):
            raise ValueError(f"Link.ranks must be an integer of 2 or more, or None, got {self.ranks!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one rank and its links.

    Attributes:
        name: shown in reports.
        attention_flops: FLOP/s that the attention kernel reaches in the forward, counted by :func:`attention_flops`.
        attention_backward_flops: the same in the backward.
        matmul_flops: FLOP/s of a large matrix product.
        memory_bandwidth: bytes/s of the rank's memory, read and written together.
        memory: bytes of the rank's memory.
        links: levels of the network, innermost first; only the last has ``ranks=None``.
        kernel_seconds: fixed seconds of one call of the attention kernel.
        edge_pairs: masked (query, key) pairs that the kernel computes for each query, because the mask's edge cuts
            through tiles. The edge nearly always lies among the rank's own keys: a rank with ``tokens`` queries
            computes ``area + edge_pairs * tokens`` pairs on its own keys, and ``area`` on others.
        wire: ``((collective, factor), …)``: bytes that the backend moves, divided by the bytes needed; default 1.
        to_host, from_host: bytes/s of copies between the rank's memory and pinned memory of its host.
        source: where the figures come from.

    Raises:
        ValueError: a rate that is not a positive number, links in the wrong order, or an unknown collective in `wire`.

    >>> import dataclasses
    >>> import spanwise
    >>> slow = dataclasses.replace(spanwise.H100, name="one link", links=(spanwise.Link(10e9, 1e-3),))
    >>> slow.all_gather_seconds(shard_bytes=1e7, num_ranks=3)
    0.003
    """

    name: str
    attention_flops: float
    attention_backward_flops: float
    matmul_flops: float
    memory_bandwidth: float
    memory: int
    links: tuple[Link, ...]
    kernel_seconds: float = 0.0
    edge_pairs: float = 0.0
    wire: tuple[tuple[str, float], ...] = ()
    source: str = ""
    # PCIe 5.0 x16 has 63 GB/s each way; guides to nvbandwidth show 55.6 for host_to_device_memcpy_ce.
    to_host: float = 55e9
    from_host: float = 55e9

    def __post_init__(self) -> None:
        rates = ("attention_flops", "attention_backward_flops", "matmul_flops", "memory_bandwidth", "memory", "to_host")
        for name in (*rates, "from_host", "kernel_seconds", "edge_pairs"):
            number = _number(f"Hardware.{name}", getattr(self, name), zero=name in ("kernel_seconds", "edge_pairs"))
            object.__setattr__(self, name, number)
        object.__setattr__(self, "memory", int(self.memory))
        object.__setattr__(self, "links", tuple(self.links))
        sizes = [link.ranks for link in self.links]
        inner = [size or 0 for size in sizes[:-1]]
        if not sizes or sizes[-1] is not None or any(o <= i or o % i for i, o in itertools.pairwise([1, *inner])):
            raise ValueError(
                f"Hardware.links must go from the innermost level to the outermost, each level's ranks a multiple of "
                f"the one inside it and None for the last alone, got ranks {sizes}"
            )
        names = [name for name, _ in self.wire]
        wire = tuple((name, _number("a factor of Hardware.wire", factor)) for name, factor in self.wire)
        if set(names) - set(COLLECTIVES) or len(set(names)) < len(names) or any(factor < 1 for _, factor in wire):
            raise ValueError(
                f"Hardware.wire holds a factor of 1 or more for each of {list(COLLECTIVES)} at most once, got "
                f"{self.wire!r}"
            )
        object.__setattr__(self, "wire", wire)

    def attention_seconds(self, flops: float | np.ndarray, *, backward: bool) -> Any:
        """Seconds of one call of the attention kernel with ``flops`` operations; 0 for 0 operations.

        >>> float(H100.attention_seconds(378e12, backward=False))
        1.00002
        """
        rate = self.attention_backward_flops if backward else self.attention_flops
        return np.where(np.asarray(flops) > 0, self.kernel_seconds + flops / rate, 0.0)[()]

    def copy_seconds(self, num_bytes: float) -> float:
        """Seconds to copy ``num_bytes`` within the rank's memory: each byte is read and written.

        >>> H200.copy_seconds(2.4e12)
        1.0
        """
        return 2 * _number("num_bytes", num_bytes, zero=True) / self.memory_bandwidth

    def groups_on_a_host(self, num_groups: int, inner: int = 1) -> int | None:
        """Groups of `inner` ranks on a host: the innermost level of the network that joins some groups, but not all.

        None without hosts, and where hosts cut through groups.

        >>> H100.groups_on_a_host(32), H100.groups_on_a_host(8, inner=4), H100.groups_on_a_host(8)
        (8, 2, None)
        """
        sizes = (link.ranks // inner for link in self.links if link.ranks is not None and link.ranks % inner == 0)
        return next((size for size in sizes if 1 < size < num_groups), None)

    def all_to_all_seconds(self, num_bytes: np.ndarray) -> float:
        """Seconds of an uneven all-to-all.

        The time of a level is that of its busiest rank, by the larger of its received and sent bytes. A pair of ranks
        uses the innermost level that joins it.

        Args:
            num_bytes: ``[R, S]``, bytes that each receiver gets from each sender; the diagonal does not travel.

        Raises:
            ValueError: not square, or negative.

        >>> two = dataclasses.replace(H100, links=(Link(10e9, 1e-3),))
        >>> two.all_to_all_seconds(np.array([[5e7, 1e7], [2e7, 0]]))
        0.003
        """
        traffic = np.asarray(num_bytes, dtype=np.float64)
        if traffic.ndim != 2 or traffic.shape[0] != traffic.shape[1] or not (traffic >= 0).all():
            raise ValueError(f"num_bytes must be [P, P], square and not negative, got shape {traffic.shape}")
        return float(self.steps_seconds(traffic[None], 1.0)[0, 0])

    def loads(self, traffic: np.ndarray) -> np.ndarray:
        """What each rank receives and sends over each level in an all-to-all ``[R, S]``; ``[levels, 2, P]``."""
        within = [_within(traffic, link.ranks or len(traffic)) for link in self.links]
        return np.diff([np.stack([np.diagonal(traffic)] * 2), *within], axis=0)

    def steps_seconds(self, tables: np.ndarray, *token_bytes: float) -> np.ndarray:
        """Seconds of all-to-alls with these tokens ``[n, R, S]``, ``[k, n]`` for k numbers of bytes of a token.

        Backwards ranks send what they received: the busiest has as much, so that the seconds are the same.
        """
        found = np.zeros((len(token_bytes), len(tables)))
        for i, table in enumerate(tables):
            most = self.loads(table).max(axis=(1, 2), initial=0.0).tolist()
            for link, tokens in zip(self.links, most, strict=True):
                seconds = [self._seconds(link, tokens * size, "all_to_all") for size in token_bytes]
                found[:, i] = np.maximum(found[:, i], seconds)
        return found

    def all_gather_seconds(self, shard_bytes: float, num_ranks: int) -> float:
        """Seconds of an all-gather in which each of ``num_ranks`` ranks contributes ``shard_bytes``.

        A byte enters a host once, through one of its ranks, and then travels inside: each rank of a host of h takes 1/h
        of the outside bytes over the outer level, and all other bytes over the inner one. NCCL's rings do the same:
        they run through all network cards of a host.

        >>> two = dataclasses.replace(H100, links=(Link(10e9, 1e-3),))
        >>> two.all_gather_seconds(2e7, num_ranks=2)
        0.003
        """
        return self._ring_seconds(shard_bytes, num_ranks, "all_gather")

    def reduce_scatter_seconds(self, shard_bytes: float, num_ranks: int) -> float:
        """Seconds of a reduce-scatter that leaves ``shard_bytes`` on each rank: an all-gather in reverse."""
        return self._ring_seconds(shard_bytes, num_ranks, "reduce_scatter")

    def _ring_seconds(self, shard_bytes: float, num_ranks: int, collective: str) -> float:
        shard_bytes = _number("shard_bytes", shard_bytes, zero=True)
        seconds, inside = 0.0, 1
        for link in self.links:
            size = min(link.ranks or num_ranks, num_ranks)
            shards = 0.0  # of the busiest rank over this level
            for first in range(0, num_ranks, size):
                group = min(size, num_ranks - first)
                # The smallest subgroup has the fewest ranks to share the bytes from outside it.
                part = min(inside, group) if group % inside == 0 else group % inside
                # Bytes from outside the group travel inside it as the group's own shards do.
                shards = max(shards, (group - part) / part * num_ranks / group)
            seconds = max(seconds, self._seconds(link, shards * shard_bytes, collective))
            inside = size
        return seconds

    def _seconds(self, link: Link, num_bytes: float, collective: str) -> float:
        return link.latency + num_bytes * dict(self.wire).get(collective, 1.0) / link.bandwidth if num_bytes else 0.0

    def with_host_size(self, ranks: int) -> Hardware:
        """The same rates with so many ranks on a host: the innermost level of the network joins them.

        Raises:
            ValueError: fewer than two ranks, no integer, one level alone, or a level outside that hosts do not divide.

        >>> [link.ranks for link in H100.with_host_size(4).links]
        [4, None]
        """
        if len(self.links) < 2:
            raise ValueError(f"{self.name} has one level of links, so that no host size matters; add a link for hosts")
        if type(ranks) is not int or ranks < 2:
            raise ValueError(
                f"a host has 2 ranks or more, an integer, got {ranks!r}; where each rank is on a host of its own, give "
                f"dataclasses.replace(hardware, links=hardware.links[1:]) and no host size"
            )
        return dataclasses.replace(self, links=(dataclasses.replace(self.links[0], ranks=ranks), *self.links[1:]))

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts, as in JSON.

        >>> Hardware.from_dict(H100.to_dict()) == H100
        True
        """
        fields = dataclasses.asdict(self)
        return fields | {"links": list(fields["links"]), "wire": [list(pair) for pair in self.wire]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Hardware:
        """The Hardware of :meth:`to_dict`; ``ValueError`` for anything else."""
        try:
            links = tuple(Link(**link) for link in data["links"])
            return Hardware(**{**data, "links": links, "wire": tuple((n, f) for n, f in data.get("wire", ()))})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the fields of a Hardware: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the figures to ``path`` as JSON.

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     H100.save(file.name)
        ...     Hardware.load(file.name) == H100
        True
        """
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Reads a file of :meth:`save`; ``ValueError`` for any other file."""
        try:
            with open(path, encoding="utf-8") as file:
                return Hardware.from_dict(json.load(file))
        except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
            raise ValueError(f"{os.fspath(path)} is not a file written by Hardware.save: {error}") from error


def _within(traffic: np.ndarray, size: int) -> np.ndarray:
    """What each rank receives and sends inside its group of `size` ranks, ``[2, P]``; `traffic` is ``[P, P]``."""
    if size >= len(traffic):
        return np.stack([traffic.sum(axis=1), traffic.sum(axis=0)])
    rank = np.arange(len(traffic))[:, None]
    other = rank // size * size + np.arange(size)
    exists, other = other < len(traffic), np.minimum(other, len(traffic) - 1)
    return np.stack([(both * exists).sum(axis=1) for both in (traffic[rank, other], traffic[other, rank])])


def _number(name: str, value: Any, *, zero: bool = False) -> float:
    """`value` as a float, so that equal figures have equal files; ``ValueError`` unless it is positive."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'a number of at least 0' if zero else 'a positive number'}, got {value!r}")
    return float(value)


# Presets: figures of data sheets, and assumptions where they are silent. `spanwise calibrate` measures a machine.

# Assumed, not measured: the share of the data sheet's peak that a large matrix product and a large collective reach,
# seconds before the first byte inside a host and between hosts, seconds to launch a kernel.
_MATMUL_SHARE, _LINK_SHARE = 0.75, 0.8
_HOST_LATENCY, _NETWORK_LATENCY, _LAUNCH = 20e-6, 40e-6, 20e-6

# H100 SXM5 data sheet: 989.4 TFLOP/s dense bf16, 80 GB at 3.35 TB/s, NVLink 900 GB/s in both directions together. DGX
# H100: eight GPUs behind NVSwitch, a 400 Gb/s ConnectX-7 for each. Attention: FlexAttention is a Triton kernel, and
# FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608) measures Triton's at 378 TFLOP/s in bf16 (head dim 128,
# causal, 16k tokens). The paper has no Triton backward; this assumes its figure of FlashAttention-2, 322 TFLOP/s.
# Tiles of 128 tokens: on a causal diagonal half a tile a query is masked.
H100 = Hardware(
    "H100 SXM, nominal",
    attention_flops=378e12,
    attention_backward_flops=322e12,
    matmul_flops=_MATMUL_SHARE * 989.4e12,
    memory_bandwidth=3.35e12,
    memory=80_000_000_000,
    links=(Link(_LINK_SHARE * 450e9, _HOST_LATENCY, ranks=8), Link(_LINK_SHARE * 50e9, _NETWORK_LATENCY)),
    kernel_seconds=_LAUNCH,
    edge_pairs=64,
    source="data sheets of H100 SXM5 and DGX H100; attention from arXiv:2407.08608; efficiencies and latencies assumed",
)

# Where the caller names no hardware, in every function and command. Plans depend on compute over bandwidth, and hosts.
DEFAULT = H100

# H200 SXM data sheet: the H100's compute, NVLink and network, with 141 GB at 4.8 TB/s.
H200 = dataclasses.replace(
    H100,
    name="H200 SXM, nominal",
    memory_bandwidth=4.8e12,
    memory=141_000_000_000,
    source="data sheets of H200 SXM and DGX H200; attention from arXiv:2407.08608; efficiencies and latencies assumed",
)

# HGX and DGX B200: 2.25 PFLOP/s dense bf16, 180 GB at 8 TB/s, NVLink 1.8 TB/s in both directions together, and by the
# DGX B200 user guide a 400 Gb/s ConnectX-7 for each of eight GPUs. Attention: FlashAttention-4's 1605 TFLOP/s in bf16
# is up to 2.7 times Triton's forward (together.ai/blog/flashattention-4), so 594. Assumed: the ratio of backward to
# forward of the H100.
B200 = Hardware(
    "B200, nominal",
    attention_flops=1605e12 / 2.7,
    attention_backward_flops=1605e12 / 2.7 * 322 / 378,
    matmul_flops=_MATMUL_SHARE * 2250e12,
    memory_bandwidth=8e12,
    memory=180_000_000_000,
    links=(Link(_LINK_SHARE * 900e9, _HOST_LATENCY, ranks=8), Link(_LINK_SHARE * 50e9, _NETWORK_LATENCY)),
    kernel_seconds=_LAUNCH,
    edge_pairs=64,
    source="HGX B200 data sheet, DGX B200 user guide, together.ai/blog/flashattention-4; the rest assumed as for H100",
)

# A host of two EPYC 9654 (96 cores, 2.4 GHz base, 12 channels of DDR5-4800: 460.8 GB/s a socket), 8 cores a rank, so
# 24 ranks that share a 100 Gb/s network card, float32. Peak of a core: two 256-bit fused multiply-adds a cycle, 32
# FLOP. Assumed: 768 GB a socket; attention at 65 % of the peak and 100 pairs at each query's edge, as the kernel
# "sdpa" reaches on one Zen 4 core; gloo at 1 GB/s a rank inside the host and 0.2 ms before the first byte. Its
# reduce-scatter is an all-reduce, which moves everything twice.
_CPU_PEAK = 8 * 32 * 2.4e9
CPU_HOST = Hardware(
    "CPU host, 8 cores a rank, nominal",
    attention_flops=0.65 * _CPU_PEAK,
    attention_backward_flops=0.65 * _CPU_PEAK,
    matmul_flops=_MATMUL_SHARE * _CPU_PEAK,
    memory_bandwidth=460.8e9 / 12,
    memory=64_000_000_000,
    links=(Link(1e9, 2e-4, ranks=24), Link(_LINK_SHARE * 12.5e9 / 24, 2e-4)),
    kernel_seconds=1e-3,
    edge_pairs=100,
    wire=(("reduce_scatter", 2.0),),
    source="EPYC 9654 data sheet; host, network and efficiencies assumed",
)


def attention_flops(area: float, num_q_heads: int, head_dim: int, v_head_dim: int, *, backward: bool) -> float:
    """FLOPs of exact attention over ``area`` (query, key) pairs.

    Forward: two matrix products, ``QKᵀ`` and ``PV``, a multiply and an add each. Backward: five products (scores
    again, dV, dP, dQ, dK), as in FlashAttention-2 (Dao, 2023, section 4.1).

    Args:
        area: visible (query, key) pairs, summed over batch rows.
        backward: count the backward pass instead of the forward.

    >>> attention_flops(100, num_q_heads=2, head_dim=8, v_head_dim=8, backward=False)
    6400.0
    """
    qk, pv = 2.0 * area * num_q_heads * head_dim, 2.0 * area * num_q_heads * v_head_dim
    return 3 * qk + 2 * pv if backward else qk + pv
