"""What a step costs: attention FLOPs from exact mask areas, and α–β times of collectives over the levels of a network.

The bottom of the house: the planner prices layouts with it, and the overlap half will price collectives with the
same :class:`Hardware`. Numbers only, no torch. `spanwise.calibrate` measures one; the presets are nominal.

The model of a network is Hockney's (1994): a collective in which the busiest rank moves ``n`` bytes takes ``α + n/B``
seconds. What that rank moves is counted exactly for all-to-all, and for all-gather and reduce-scatter it is what the
ring moves (Thakur, Rabenseifner and Gropp, 2005, sections 4.1 and 4.3): every byte of the others, once.

A network has levels, innermost first (NVLink inside a host, InfiniBand between hosts). Ranks are numbered host by host.
The levels work at the same time, so that a collective takes as long as its slowest level.
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
    """

    bandwidth: float
    latency: float
    ranks: int | None = None

    def __post_init__(self) -> None:
        _check_number(self, "bandwidth")
        _check_number(self, "latency", zero=True)
        if self.ranks is not None and (type(self.ranks) is not int or self.ranks < 2):
            raise ValueError(f"Link.ranks must be an integer of 2 or more, or None, got {self.ranks!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one rank, as the planner sees them.

    Attributes:
        name: shown in reports.
        attention_flops: FLOP/s that the attention kernel reaches in the forward, counted by :func:`attention_flops`.
        attention_backward_flops: the same in the backward.
        matmul_flops: FLOP/s of a large matrix product.
        memory_bandwidth: bytes/s of the rank's memory, read and written together.
        memory: bytes of the rank's memory.
        links: levels of the network, innermost first; only the last has ``ranks=None``.
        kernel_seconds: fixed seconds of one call of the attention kernel.
        wire: ``((collective, factor), …)``: bytes that the backend moves over those that are needed; 1 if not listed.
        source: where the figures come from.
    """

    name: str
    attention_flops: float
    attention_backward_flops: float
    matmul_flops: float
    memory_bandwidth: float
    memory: int
    links: tuple[Link, ...]
    kernel_seconds: float = 0.0
    wire: tuple[tuple[str, float], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("attention_flops", "attention_backward_flops", "matmul_flops", "memory_bandwidth", "memory"):
            _check_number(self, field)
        _check_number(self, "kernel_seconds", zero=True)
        object.__setattr__(self, "memory", int(self.memory))
        object.__setattr__(self, "links", tuple(self.links))
        sizes = [link.ranks for link in self.links]
        inner = [1, *(size for size in sizes[:-1] if size is not None)]
        if (
            not sizes
            or sizes[-1] is not None
            or len(inner) != len(sizes)
            or any(outer <= size or outer % size for size, outer in itertools.pairwise(inner))
        ):
            raise ValueError(
                f"Hardware.links must go from the innermost level to the outermost, each level's ranks a multiple of "
                f"the one inside it and None for the last alone, got ranks {sizes}"
            )
        wire: list[tuple[str, float]] = []
        for name, factor in self.wire:
            if name not in COLLECTIVES or name in dict(wire) or not (math.isfinite(factor) and factor >= 1):
                raise ValueError(
                    f"Hardware.wire holds a factor of 1 or more for each of {list(COLLECTIVES)} at most once, got "
                    f"{self.wire!r}"
                )
            wire.append((name, float(factor)))
        object.__setattr__(self, "wire", tuple(wire))

    # Compute.

    def attention_seconds(self, flops: float, *, backward: bool) -> float:
        """Seconds of one call of the attention kernel with ``flops`` operations; no operations, no call."""
        rate = self.attention_backward_flops if backward else self.attention_flops
        return self.kernel_seconds + flops / rate if flops else 0.0

    def copy_seconds(self, num_bytes: float) -> float:
        """Seconds to copy ``num_bytes`` within the rank's memory: each is read and written."""
        return 2 * num_bytes / self.memory_bandwidth

    # Collectives.

    def all_to_all_seconds(self, num_bytes: np.ndarray) -> float:
        """Seconds of an uneven all-to-all.

        On each level the busiest rank counts, by the larger of what it receives and what it sends there. A pair of
        ranks uses the innermost level that joins them.

        Args:
            num_bytes: ``[R, S]``, what each receiver gets from each sender; the diagonal does not travel.
        """
        traffic = np.asarray(num_bytes, dtype=np.float64)
        if traffic.ndim != 2 or traffic.shape[0] != traffic.shape[1] or not (traffic >= 0).all():
            raise ValueError(
                f"num_bytes must be [receivers, senders], square and not negative, got shape {traffic.shape}"
            )
        ranks = np.arange(len(traffic))
        joined = ranks[:, None] == ranks  # by the levels inside
        seconds = 0.0
        for link in self.links:
            group = ranks // (link.ranks or max(1, len(traffic)))
            joins = group[:, None] == group
            moved = np.where(joins & ~joined, traffic, 0.0)
            busiest = max(moved.sum(axis=1).max(initial=0.0), moved.sum(axis=0).max(initial=0.0))
            seconds = max(seconds, self._seconds(link, float(busiest), "all_to_all"))
            joined = joins
        return seconds

    def all_gather_seconds(self, shard_bytes: float, num_ranks: int) -> float:
        """Seconds of an all-gather in which each of ``num_ranks`` ranks contributes ``shard_bytes``.

        A byte enters a host once, through any of its ranks, and is then spread inside: a rank of a host of h takes
        1/h of what comes from outside over the outer level, and everything else over the inner one, as the rings of
        NCCL do that run through all network cards of a host.
        """
        return self._ring_seconds(shard_bytes, num_ranks, "all_gather")

    def reduce_scatter_seconds(self, shard_bytes: float, num_ranks: int) -> float:
        """Seconds of a reduce-scatter that leaves ``shard_bytes`` on each rank: the all-gather's way backwards."""
        return self._ring_seconds(shard_bytes, num_ranks, "reduce_scatter")

    def _ring_seconds(self, shard_bytes: float, num_ranks: int, collective: str) -> float:
        seconds, inside = 0.0, 1
        for link in self.links:
            size = min(link.ranks or num_ranks, num_ranks)
            shards = 0.0  # that the busiest rank gets over this level
            for first in range(0, num_ranks, size):
                group = min(size, num_ranks - first)
                # The smallest subgroup has the fewest ranks to share what comes from outside it.
                part = min(inside, group) if group % inside == 0 else group % inside
                # What came into the group from outside is spread as the group's own shards are.
                shards = max(shards, (group - part) / part * num_ranks / group)
            seconds = max(seconds, self._seconds(link, shards * shard_bytes, collective))
            inside = size
        return seconds

    def _seconds(self, link: Link, num_bytes: float, collective: str) -> float:
        return link.latency + num_bytes * dict(self.wire).get(collective, 1.0) / link.bandwidth if num_bytes else 0.0

    # Files.

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as JSON holds them."""
        wire = [list(pair) for pair in self.wire]
        return dataclasses.asdict(self) | {"links": [dataclasses.asdict(link) for link in self.links], "wire": wire}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Hardware:
        """What :meth:`to_dict` gave; ``ValueError`` if it is something else."""
        try:
            links = tuple(Link(**link) for link in data["links"])
            return Hardware(**{**data, "links": links, "wire": tuple((n, f) for n, f in data.get("wire", ()))})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the fields of a Hardware: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the figures to ``path`` as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2)
            file.write("\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Hardware:
        """Read what :meth:`save` wrote; ``ValueError`` if the file is something else."""
        try:
            with open(path, encoding="utf-8") as file:
                return Hardware.from_dict(json.load(file))
        except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
            raise ValueError(f"{os.fspath(path)} is not a file written by Hardware.save: {error}") from error


def _check_number(owner: Any, field: str, *, zero: bool = False) -> None:
    """Make the field a float, so that equal figures have equal files; ``ValueError`` if it is no positive number."""
    value = getattr(owner, field)
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        kind = "a number of at least 0" if zero else "a positive number"
        raise ValueError(f"{type(owner).__name__}.{field} must be {kind}, got {value!r}")
    object.__setattr__(owner, field, float(value))


# Data sheet of the H100 SXM: 989.4 TFLOP/s dense bf16 and 900 GB/s NVLink in both directions together, so 450 GB/s
# each way. That attention reaches half of the matmul peak and a collective starts in 20 µs are assumptions, not
# measurements; they only decide ties between layouts, and `Hardware(...)` replaces them.
H100 = Hardware(
    "H100 SXM, nominal",
    attention_flops=0.5 * 989.4e12,
    attention_backward_flops=0.5 * 989.4e12,
    matmul_flops=989.4e12,
    memory_bandwidth=3.35e12,
    memory=80_000_000_000,
    links=(Link(450e9, 20e-6, ranks=8), Link(50e9, 20e-6)),
)


def attention_flops(area: float, num_q_heads: int, head_dim: int, v_head_dim: int, *, backward: bool) -> float:
    """FLOPs of exact attention over ``area`` (query, key) pairs.

    Forward: two matrix products, ``QKᵀ`` and ``PV``, a multiply and an add each. Backward: five products (scores
    again, dV, dP, dQ, dK), as in FlashAttention-2 (Dao, 2023, section 4.1).

    Args:
        area: visible (query, key) pairs, summed over batch rows.
        backward: count the backward pass instead of the forward.
    """
    qk, pv = 2.0 * area * num_q_heads * head_dim, 2.0 * area * num_q_heads * v_head_dim
    return 3 * qk + 2 * pv if backward else qk + pv
