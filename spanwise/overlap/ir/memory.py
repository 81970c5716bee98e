"""Guard of a limit on memory while an order is made node by node.

The state that is kept safe: if all nodes that are left ran in one order that is known to hold the limit (the graph's
own, as a rule) from here, it would hold. That order holds it from the start, or the limit is refused; its next node can
always run and leaves the state safe; so whatever else is run in between, the order that results never exceeds the
limit. (E. W. Dijkstra's banker's algorithm, with a known order as the way out.) Pure.

What is limited need not be memory: whatever one node takes and the last of some others gives back will do, as
collectives under way.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from spanwise.overlap.ir.dag import Dag, Storage

_GONE = int(np.iinfo(np.int64).min) // 4  # added to what has run: below whatever is added later
_FEW = 32  # changes of a profile that are sooner made one by one


class Guard:
    """Memory of a partly issued `dag`, and whether a node may be issued next.

    Args:
        budget: bytes of the storages at most.
        order: the way out; default: the graph's own order.
        storages: what is limited; default: those of the graph.

    Attributes:
        alive: bytes of the storages that are alive; peak: the most so far.
        takes: of each node, the bytes that it allocates.

    Raises:
        ValueError: the way out needs more than the budget.
    """

    def __init__(
        self, dag: Dag, budget: int, *, order: Sequence[int] | None = None, storages: Sequence[Storage] | None = None
    ) -> None:
        count = len(dag)
        storages = dag.storages if storages is None else storages
        self._dag, self._storages = dag, storages
        self.budget, self.alive, self.peak = budget, 0, 0
        self._order = range(count) if order is None else order
        place = list(self._order)  # of each node in the way out
        for at, node in enumerate(self._order):
            place[node] = at
        self._place = place
        self._bytes = [storage.num_bytes for storage in storages]
        self._kept = [storage.kept for storage in storages]
        self.takes = [0] * count
        self._used: list[list[int]] = [[] for _ in range(count)]
        self._users: list[list[int]] = []  # of each storage, their places, ascending; the maker's, too
        for s, storage in enumerate(storages):
            self.takes[storage.maker] += storage.num_bytes
            users = {storage.maker, *storage.users}
            for user in users:
                self._used[user].append(s)
            self._users.append(sorted(place[user] for user in users))
        self._last = [len(users) - 1 for users in self._users]  # which of them is the last that has not run
        # Memory is at its most where a node allocates: only these places are looked at.
        takes = [self.takes[node] > 0 for node in self._order]
        self._row = np.concatenate([[0], np.cumsum(takes, dtype=np.int64)]).tolist()  # of each place, rows before it
        change = np.zeros(self._row[-1] + 1, np.int64)
        for storage, users_at in zip(storages, self._users, strict=True):
            if storage.num_bytes:
                change[self._row[users_at[0]]] += storage.num_bytes
                if not storage.kept:
                    change[self._row[users_at[-1] + 1]] -= storage.num_bytes
        # Memory at each node that is left, were these to run next in their own order.
        self._profile = change[:-1].cumsum()
        self._pending: list[tuple[int, int, int]] = []  # what is to be added to it: from a row, to another one, bytes
        self._highest = int(self._profile.max(initial=0))  # at least what any node that is left needs
        self._has_run = bytearray(count)  # by place
        self._next = 0
        if self._highest > budget:
            raise ValueError(
                f"the order that is there needs {self._highest:,} bytes at its peak, more than the budget of "
                f"{budget:,}: allow as many"
            )

    def copy(self, budget: int | None = None) -> Guard:
        """A guard in the same state; what is issued to one is nothing to the other.

        Args:
            budget: another one, at least what the way out needs.
        """
        other = copy.copy(self)
        other.budget = self.budget if budget is None else budget
        other._last, other._profile, other._pending = self._last.copy(), self._profile.copy(), self._pending.copy()
        other._has_run = self._has_run.copy()
        return other

    def along(self, order: Sequence[int], budget: int) -> Guard:
        """A guard of the same from the beginning, with another way out and budget.

        Raises:
            ValueError: the way out needs more than the budget.
        """
        return Guard(self._dag, budget, order=order, storages=self._storages)

    @property
    def next_in_order(self) -> int:
        """The first node of the way out that is left, which is always safe."""
        return self._order[self._next]

    def is_safe(self, node: int) -> bool:
        """Whether `node`, all of whose dependencies have run, may be issued now."""
        new = self.takes[node]
        if new == 0:
            return True
        place = self._place[node]
        if place == self._next:
            return True
        if self.alive + new > self.budget:
            return False
        if self._highest + new <= self.budget:
            return True
        first = self._row[self._next]
        self._settle()
        self._highest = int(self._profile[first:].max(initial=0))
        # What it frees by running early is not counted in its favour.
        return int(self._profile[first : self._row[place]].max(initial=0)) + new <= self.budget

    def run(self, node: int) -> None:
        """Issue `node`."""
        place, first, row, has_run = self._place[node], self._next, self._row, self._has_run
        has_run[place] = True
        at = row[place]
        new = self.takes[node]
        if new:
            self.alive += new
            if self.alive > self.peak:
                self.peak = self.alive
            if row[first] < at:
                self._pending.append((row[first], at, new))
                self._highest += new
            self._pending.append((at, at + 1, _GONE))
        for s in self._used[node]:
            users, last = self._users[s], self._last[s]
            if users[last] != place:
                continue
            while last >= 0 and has_run[users[last]]:
                last -= 1
            self._last[s] = last
            if self._kept[s]:
                continue
            if last < 0:
                self.alive -= self._bytes[s]
                after = row[first]
            else:
                after = row[max(users[last] + 1, first)]
            if after < at:
                self._pending.append((after, at, -self._bytes[s]))
        while first < len(has_run) and has_run[first]:
            first += 1
        self._next = first

    def _settle(self) -> None:
        """Add what is pending to the profile."""
        if len(self._pending) < _FEW:
            for first, end, num_bytes in self._pending:
                self._profile[first:end] += num_bytes
        else:
            firsts, ends, added = np.array(self._pending, np.int64).T
            change = np.zeros(len(self._profile) + 1, np.int64)
            np.add.at(change, firsts, added)
            np.subtract.at(change, ends, added)
            self._profile += change[:-1].cumsum()
        self._pending.clear()


class AllOf:
    """Several guards with the same way out, as one."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = tuple(guards)

    def is_safe(self, node: int) -> bool:
        """Whether all of them let `node` be issued now."""
        return all(guard.is_safe(node) for guard in self._guards)

    def run(self, node: int) -> None:
        """Issue `node` to all."""
        for guard in self._guards:
            guard.run(node)
