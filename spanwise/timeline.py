"""When each rank computes and when K/V travel, in one attention layer's forward and backward: a simulation.

Each rank has one compute stream, in order. All ranks share one exchange stream, in order, on which a collective begins
when every rank has started it and the one before is through. Numbers only; `predict` fills them in from a plan.

    forward    pack · local · piece 1 (waits for its arrival) · … · piece n
    backward   piece n · (its gradients depart) · … · piece 1 · local · unpack (waits for the last gradients)
"""

# P ranks, n remote pieces

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """What one stream of a rank does from ``start`` to ``end``, in seconds from the beginning of the forward."""

    rank: int
    stream: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward.

    Attributes:
        names: of what a rank computes, in order.
        start, end: ``[P, len(names)]``, seconds from the beginning of the pass.
        exchange_names: of the collectives, in order.
        exchange_start, exchange_end: ``[len(exchange_names)]``.
    """

    names: tuple[str, ...]
    start: Float64
    end: Float64
    exchange_names: tuple[str, ...]
    exchange_start: Float64
    exchange_end: Float64

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return float(self.end[:, -1].max())

    @property
    def compute(self) -> float:
        """Compute of the busiest rank."""
        return float((self.end - self.start).sum(axis=1).max())

    @property
    def exchange(self) -> float:
        """What the collectives take."""
        return float((self.exchange_end - self.exchange_start).sum())

    @property
    def exposed(self) -> float:
        """What the pass takes longer than the busiest rank computes."""
        return max(0.0, self.seconds - self.compute)


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Forward and backward of one attention layer; the backward begins when every rank has finished the forward."""

    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Everything that takes time, rank by rank; streams are "compute" and "exchange"."""
        found = []
        for one, offset in ((self.forward, 0.0), (self.backward, self.forward.seconds)):
            for rank in range(len(one.start)):
                for stream, names, start, end in (
                    ("compute", one.names, one.start[rank], one.end[rank]),
                    ("exchange", one.exchange_names, one.exchange_start, one.exchange_end),
                ):
                    found += [
                        Interval(rank, stream, name, offset + float(a), offset + float(b))
                        for name, a, b in zip(names, start, end, strict=True)
                        if b > a
                    ]
        return tuple(found)


def forward(pack: Float64, attention: Float64, exchange: Float64) -> Pass:
    """Simulates a forward.

    Args:
        pack: ``[P]`` seconds before a rank can start its collectives.
        attention: ``[P, n + 1]`` seconds of the local part and of each piece.
        exchange: ``[n]`` seconds of each piece's collective.
    """
    through = pack.max(initial=0.0) + np.cumsum(exchange)
    compute = np.concatenate([pack[:, None], attention], axis=1)
    arrival = np.concatenate([np.zeros(2), through])
    start, end = _in_order(compute, np.broadcast_to(arrival, compute.shape))
    pieces = range(1, len(exchange) + 1)
    names = ("pack", "local attention", *(f"attention, piece {i}" for i in pieces))
    return Pass(names, start, end, tuple(f"K/V, piece {i}" for i in pieces), through - exchange, through)


def backward(attention: Float64, exchange: Float64, unpack: Float64, refetch: Float64) -> Pass:
    """Simulates a backward.

    Args:
        attention: ``[P, n + 1]`` seconds of the backward of the local part and of each piece, in forward order.
        exchange: ``[n]`` seconds of the collective that brings each piece's gradients home.
        unpack: ``[P]`` seconds to sum them.
        refetch: ``[n]`` seconds of each piece's K/V collective if it is fetched again, else zeros.
    """
    num_pieces = len(exchange)
    fetched = float(refetch.sum())  # before anything else: the recomputation has nothing to hide behind
    compute = np.concatenate([attention[:, :0:-1], attention[:, :1], unpack[:, None]], axis=1)
    start, end = _in_order(compute, np.full(compute.shape, fetched))
    depart, through = np.empty(num_pieces), np.empty(num_pieces)
    done = fetched
    for i in range(num_pieces):
        depart[i] = max(done, end[:, i].max())
        done = through[i] = depart[i] + exchange[num_pieces - 1 - i]
    last = np.maximum(start[:, -1], done)
    start[:, -1], end[:, -1] = last, last + unpack
    pieces = range(num_pieces, 0, -1)
    names = (*(f"attention backward, piece {i}" for i in pieces), "local attention backward", "sum gradients")
    exchanges = [f"dK/dV, piece {i}" for i in pieces]
    if fetched:
        exchanges = [f"K/V again, piece {i}" for i in reversed(pieces)] + exchanges
        again = np.cumsum(refetch)
        depart, through = np.concatenate([again - refetch, depart]), np.concatenate([again, through])
    return Pass(names, start, end, tuple(exchanges), depart, through)


def _in_order(compute: Float64, earliest: Float64) -> tuple[Float64, Float64]:
    """Start and end of what each rank computes one after the other, none before its ``earliest``."""
    end = np.empty(compute.shape)
    now = np.zeros(len(compute))
    start = np.empty(compute.shape)
    for i in range(compute.shape[1]):
        start[:, i] = np.maximum(now, earliest[:, i])
        now = end[:, i] = start[:, i] + compute[:, i]
    return start, end
