"""Intervals: when each node of a `Dag` runs in an order of it. `engine.simulate` makes them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.dag import Dag, rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Intervals:
    """When the nodes of `dag` run if they are issued in `order`.

    The public class is `engine.Timeline`. This base of it has no method that leads to `explain`, so that the modules
    there can import it.

    Attributes:
        order: nodes as they are issued, int64 ``[n]``.
        begin, end: milliseconds by node, float64 ``[n]``. Compute runs on its stream, a collective (its start) on the
            stream of its group. A wait begins when the compute stream reaches it, and ends when that goes on.
        issued: when the compute stream reaches each node, float64 ``[n]``.
    """

    dag: Dag
    order: NDArray[np.int64]
    begin: NDArray[np.float64]
    end: NDArray[np.float64]
    issued: NDArray[np.float64]

    @functools.cached_property
    def makespan(self) -> float:
        """Milliseconds until the last node has ended, collectives without a wait included."""
        return float(self.end.max(initial=0.0))

    @functools.cached_property
    def exposed(self) -> dict[int, float]:
        """Milliseconds that the compute stream stood still at each collective's wait, by its start."""
        found = dict.fromkeys(self.dag.starts, 0.0)
        found.update((start, float(self.end[wait] - self.begin[wait])) for start, wait in self.dag.wait_of.items())
        return found

    @functools.cached_property
    def exposed_ms(self) -> float:
        """Milliseconds that compute waits for collectives in all."""
        return math.fsum(self.exposed.values())

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return self.dag.peak_bytes(self.order.tolist())

    def counts(self) -> dict[str, int]:
        """Numbers of collectives that are "hidden", "partly" hidden, or "exposed" all the time.

        Collectives that take no time are hidden.
        """
        return self.count(self.dag.starts)

    def count(self, starts: Iterable[int]) -> dict[str, int]:
        """`counts` of these starts."""
        found, tiny = {"hidden": 0, "partly": 0, "exposed": 0}, rounding(self.makespan)
        for start in starts:
            ms = self.exposed[start]
            found["hidden" if ms <= tiny else "partly" if ms < self.dag.nodes[start].ms - tiny else "exposed"] += 1
        return found
