"""Chains: dependencies of a node that neither its arguments nor memory show.

- Random operators, and marks for the profiler, keep their order.
- Messages to and from one peer start in the order of the graph, as on that peer; so do those of batches in one group.
  Waits for messages keep their order. Nothing that started before such a wait starts after it, and nothing that was
  waited for after a message's start is waited for before it. So each wait needs no more of the peers than it did, and
  ranks with different graphs cannot come to wait for one another.
- Nothing crosses a barrier. A barrier depends on all nodes since the last barrier that nothing else depends on, and
  later nodes depend on it: the number of edges stays linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanwise.overlap.dag import Kind
from spanwise.overlap.fx.operators import Role, Traits


class Chains:
    """The last links of all chains in the part of a graph that was walked, by numbers of nodes.

    Attributes:
        barriers: all barriers.
    """

    def __init__(self) -> None:
        self.barriers: list[int] = []
        self._ordered = self._guard = self._message_wait = -1
        self._messages: dict[str, int] = {}  # the last start for each peer, and for batches in each group
        self._starts: set[int] = set()  # since the last wait for a message
        self._loose: dict[int, None] = {}  # nodes since the last barrier, and it, without a dependent

    def link(self, i: int, deps: set[int], known: Traits, kind: Kind, peers: Sequence[str], barrier: bool) -> None:
        """Add the dependencies of node `i`; `peers`: of the message that it starts or waits for."""
        if known.ordered:
            deps.add(self._ordered)
            self._ordered = i
        if known.role in (Role.START, Role.GUARD):
            deps.add(self._guard)
        if known.role is Role.GUARD:
            self._guard = i
        if kind == Kind.START:
            deps.update(self._messages.get(peer, -1) for peer in peers)
            self._messages.update(dict.fromkeys(peers, i))
            self._starts.add(i)
        elif kind == Kind.WAIT:
            deps.update(self._messages.values())
            if peers:
                deps |= {self._message_wait, *self._starts}
                self._message_wait = i
                self._starts.clear()
        deps -= {-1, i}
        if barrier:
            deps.update(self._loose)
            self._loose.clear()
            self.barriers.append(i)
        elif self.barriers and max(deps, default=-1) < self.barriers[-1]:
            deps.add(self.barriers[-1])
        for dep in deps:
            self._loose.pop(dep, None)
        self._loose[i] = None
