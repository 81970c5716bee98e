"""Guard of a memory budget while an order is made node by node.

The state that is kept safe: if all nodes that are left ran in the graph's own order from here, the budget would hold.
The own order holds it from the start, or the budget is refused; the next node of that order can always run and leaves
the state safe; so whatever else is run in between, the order that results never exceeds the budget. (E. W. Dijkstra's
banker's algorithm, with the graph's own order as the way out.) Pure.
"""

from __future__ import annotations

import copy

import numpy as np

from spanwise.overlap.dag import Dag


class Guard:
    """Memory of a partly issued `dag`, and whether a node may be issued next.

    Args:
        budget: bytes of `dag`'s storages at most.

    Attributes:
        alive: bytes of the storages that are alive.

    Raises:
        ValueError: the graph's own order needs more.
    """

    def __init__(self, dag: Dag, budget: int) -> None:
        self._dag, self.budget, self.alive = dag, budget, 0
        count = len(dag)
        self._made: list[list[int]] = [[] for _ in range(count)]
        self._used: list[list[int]] = [[] for _ in range(count)]
        self._left: list[list[int]] = []  # users that have not run, ascending; the maker is one, too
        change = np.zeros(count + 1, np.int64)
        for s, storage in enumerate(dag.storages):
            users = sorted({storage.maker, *storage.users})
            self._made[storage.maker].append(s)
            for user in users:
                self._used[user].append(s)
            self._left.append(users)
            change[storage.maker] += storage.num_bytes
            if not storage.kept:
                change[users[-1] + 1] -= storage.num_bytes
        # Memory at each node that is left, were these to run next in their own order.
        self._profile = change[:-1].cumsum()
        self._has_run = bytearray(count)
        self._next = 0
        peak = int(self._profile.max(initial=0))
        if peak > budget:
            raise ValueError(
                f"the graph's own order needs {peak:,} bytes at its peak, more than the budget of {budget:,}: allow as "
                f"many"
            )

    def copy(self) -> Guard:
        """A guard in the same state; what is issued to one is nothing to the other."""
        other = copy.copy(self)
        other._left, other._profile = [list(users) for users in self._left], self._profile.copy()
        other._has_run = self._has_run.copy()
        return other

    @property
    def next_in_order(self) -> int:
        """The first node that is left, which is always safe."""
        return self._next

    def allocated(self, node: int) -> int:
        """Bytes that a node allocates."""
        return sum(self._dag.storages[s].num_bytes for s in self._made[node])

    def is_safe(self, node: int) -> bool:
        """Whether `node`, all of whose dependencies have run, may be issued now."""
        if node == self._next:
            return True
        new = self.allocated(node)
        if new == 0:
            return True
        if self.alive + new > self.budget:
            return False
        # What it frees by running early is not counted in its favour.
        return int(self._profile[self._next : node].max()) + new <= self.budget

    def run(self, node: int) -> None:
        """Issue `node`."""
        storages, first = self._dag.storages, self._next
        for s in self._made[node]:
            self.alive += storages[s].num_bytes
            self._profile[first:node] += storages[s].num_bytes
        self._has_run[node] = True
        for s in self._used[node]:
            left = self._left[s]
            if left[-1] != node:
                continue
            while left and self._has_run[left[-1]]:
                left.pop()
            if storages[s].kept:
                continue
            after = max(left[-1] + 1, first) if left else first
            self._profile[after : node + 1] -= storages[s].num_bytes
            if not left:
                self.alive -= storages[s].num_bytes
        self._profile[node] = np.iinfo(np.int64).min // 2
        while self._next < len(self._dag) and self._has_run[self._next]:
            self._next += 1
