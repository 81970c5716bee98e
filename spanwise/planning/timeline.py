"""Simulated times of compute and collectives in one attention layer's forward and backward.

Each rank has a compute stream and an exchange stream, both in order. A collective begins when all ranks that it joins
have started it and their previous one has ended. Numbers only; `predict` derives them from a plan.

    forward    pack · local · chunk 1 (waits for its arrival) · … · chunk n
    backward   chunk n · (its gradients depart) · … · chunk 1 · local · sum (waits for the last gradients)
"""

# P ranks, n remote chunks

from __future__ import annotations

import dataclasses

import numpy as np

from spanwise.masks.arrays import Float64, Int64


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """One operation on a stream of a rank; ``start`` and ``end`` in seconds from the beginning of the forward."""

    rank: int
    stream: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward.

    Attributes:
        names: of the compute steps of a rank, in order.
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
        """Seconds until the last rank is done."""
        return float(self.end[:, -1].max())

    @property
    def compute(self) -> float:
        """Compute seconds of the busiest rank."""
        return float((self.end - self.start).sum(axis=1).max())

    @property
    def exchange(self) -> float:
        """Seconds of the collectives."""
        return float((self.exchange_end - self.exchange_start).sum())

    @property
    def exposed(self) -> float:
        """Seconds of the pass beyond the compute of the busiest rank."""
        return max(0.0, self.seconds - self.compute)


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Forward and backward of one attention layer; the backward begins when every rank has finished the forward."""

    forward: Pass
    backward: Pass

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
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


def forward(
    pack: Float64, attention: Float64, exchange: Float64, *, chained: bool = False, joined: Int64 | None = None
) -> Pass:
    """Simulate a forward.

    Args:
        pack: ``[P]`` seconds before a rank can start its collectives.
        attention: ``[P, n + 1]`` seconds of the local part and of each chunk.
        exchange: ``[n]`` seconds of each chunk's collective.
        chained: ranks pass a chunk on (ring). Its collective starts when the ranks begin the previous chunk; otherwise
            all collectives start first.
        joined: ``[n, P]``, the ranks with equal numbers wait for one another in a chunk's collective; a rank with a
            negative one takes no part. None: all wait for all.
    """
    compute = np.concatenate([pack[:, None], attention], axis=1)
    start, end = np.empty(compute.shape), np.empty(compute.shape)
    through = np.empty((len(exchange), len(compute)))
    now, free = np.zeros(len(compute)), np.zeros(len(compute))
    for i in range(compute.shape[1]):
        start[:, i] = np.maximum(now, through[i - 2] if i >= 2 else 0.0)
        depart = i - 1  # the first chunk leaves after packing; a ring's next when the previous one's turn begins
        if i >= 1 and depart < len(exchange):
            ready = start[:, i] if chained or depart == 0 else np.zeros(len(compute))
            ranks = None if joined is None else joined[depart]
            through[depart] = free = _arrival(ready, free, float(exchange[depart]), ranks)
        now = end[:, i] = start[:, i] + compute[:, i]
    chunks = range(1, len(exchange) + 1)
    names = ("pack", "local attention", *(f"attention, chunk {i}" for i in chunks))
    last = through.max(axis=1)
    return Pass(names, start, end, tuple(f"K/V, chunk {i}" for i in chunks), last - exchange, last)


def _arrival(ready: Float64, free: Float64, seconds: float, joined: Int64 | None = None) -> Float64:
    """When a collective of so many seconds ends on each rank; ``[P]``.

    `ready` is when each rank has started it, `free` when its stream is free; `joined` as in `forward`.
    """
    begin = np.maximum(ready, free)
    if joined is None:
        return np.full_like(begin, begin.max() + seconds)
    latest = np.zeros(int(joined.max(initial=0)) + 1)
    np.maximum.at(latest, joined[joined >= 0], begin[joined >= 0])
    return np.where(joined < 0, begin, latest[joined] + seconds)


def backward(
    attention: Float64,
    exchange: Float64,
    unpack: Float64,
    refetch: Float64 | None = None,
    *,
    chained: bool = False,
    joined: Int64 | None = None,
) -> Pass:
    """Simulate a backward.

    Args:
        attention: ``[P, n + 1]`` seconds of the backward of the local part and of each chunk, in forward order.
        exchange: ``[n]`` seconds of the collective that brings each chunk's gradients home.
        unpack: ``[P]`` seconds to sum them.
        refetch: ``[n]`` seconds of each chunk's K/V collective if the backward refetches: the next chunk departs when
            this one's turn begins.
        chained: a chunk's gradients are added to those of the chunk after it; a rank waits for these first.
        joined: as in `forward`.
    """
    num_chunks = len(exchange)
    order = [*range(num_chunks - 1, -1, -1), -1]  # of the compute; -1 is the local part
    stream: list[tuple[str, float, float]] = []
    arrived = [np.zeros(len(attention))] * num_chunks
    home = free = np.zeros(len(attention))  # arrival of the gradients sent last, end of the last collective

    def send(name: str, ready: Float64, seconds: float, joined: Int64 | None = None) -> Float64:
        through = _arrival(ready, free, seconds, joined)
        stream.append((name, float(through.max()) - seconds, float(through.max())))
        return through

    start, end = np.empty((len(attention), num_chunks + 2)), np.empty((len(attention), num_chunks + 2))
    now = np.zeros(len(attention))
    for turn, i in enumerate(order):
        if refetch is not None and i >= 0:
            for j in (i, i - 1) if turn == 0 else (i - 1,):
                if j >= 0:
                    arrived[j] = free = send(f"K/V refetched, chunk {j + 1}", now, float(refetch[j]))
        start[:, turn] = np.maximum(now, arrived[i] if i >= 0 else 0.0)
        now = end[:, turn] = start[:, turn] + attention[:, i + 1]
        if i >= 0:
            if chained:
                now = np.maximum(now, home)
            ranks = None if joined is None else joined[i]
            home = free = send(f"dK/dV, chunk {i + 1}", now, float(exchange[i]), ranks)
    start[:, -1] = np.maximum(now, home)
    end[:, -1] = start[:, -1] + unpack
    names = (*(f"attention backward, chunk {i + 1}" for i in order[:-1]), "local attention backward", "sum gradients")
    exchange_names, begin, through = zip(*stream, strict=True) if stream else ((), (), ())
    return Pass(names, start, end, tuple(exchange_names), np.array(begin), np.array(through))


def between_trades(inner: Pass, before: float, after: float) -> Pass:
    """`inner` between two exposed collectives of so many seconds: the trade of heads for tokens, and the trade back."""
    finish = inner.seconds + before + after
    wait = np.full((len(inner.start), 1), finish)
    return Pass(
        (*inner.names, "traded"),
        np.concatenate([inner.start + before, wait], axis=1),
        np.concatenate([inner.end + before, wait], axis=1),
        ("heads for tokens", *inner.exchange_names, "tokens for heads"),
        np.concatenate([[0.0], inner.exchange_start + before, [finish - after]]),
        np.concatenate([[before], inner.exchange_end + before, [finish]]),
    )
