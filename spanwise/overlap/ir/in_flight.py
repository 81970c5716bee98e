"""Collectives in flight, between their start and their wait: how many, and how many bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spanwise.overlap.ir.dag import Dag
from spanwise.overlap.ir.memory import Lifetimes, Storage


def collective_bytes(dag: Dag) -> dict[int, int]:
    """Bytes of the storages that each collective makes, reads or writes, by its start; waited collectives only."""
    found = dict.fromkeys(dag.wait_of, 0)
    for storage, users in zip(dag.storages, dag.lifetimes.users, strict=True):
        for user in users:
            if user in found:
                found[user] += storage.num_bytes
    return found


def flights(dag: Dag, group: str, size: dict[int, int]) -> Lifetimes:
    """The collectives of a group as storages: each is taken by its start and freed by its wait.

    Args:
        size: of each start, its units of the limit; a start without a size is not counted.
    """
    starts = [i for i in dag.starts if i in size and dag.nodes[i].group == group]
    return Lifetimes(len(dag), tuple(Storage(size[i], i, (dag.wait_of[i],)) for i in starts))


def flight_sizes(dag: Dag) -> tuple[dict[int, int], dict[int, int]]:
    """Units that each collective takes of the two limits in flight, by its start: 1, and its bytes."""
    return dict.fromkeys(dag.wait_of, 1), collective_bytes(dag)


def peak_in_flight(dag: Dag, order: Sequence[int] | None = None) -> dict[str, tuple[int, int]]:
    """Most collectives, and most of their bytes, in flight at once in each group, in an order or the dag's own.

    A bucket is one collective, with all of its bytes. A collective without a wait is not counted.
    """
    count, num_bytes = flight_sizes(dag)
    return {g: (flights(dag, g, count).peak(order), flights(dag, g, num_bytes).peak(order)) for g in dag.groups}


def in_flight_limits(
    dag: Dag, order: Sequence[int], most: int | None, most_bytes: int | None
) -> dict[str, tuple[float, float]] | None:
    """Most collectives and bytes in flight in each group: the limits, or the order's own where higher; or None."""
    if most is None and most_bytes is None:
        return None
    limits: Sequence[float] = (math.inf if most is None else most, math.inf if most_bytes is None else most_bytes)
    peaks = peak_in_flight(dag, order).items()
    return {group: (max(limits[0], count), max(limits[1], num_bytes)) for group, (count, num_bytes) in peaks}
