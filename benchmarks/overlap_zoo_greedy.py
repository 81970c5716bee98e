"""A simple greedy list scheduler, to compare with: it knows nothing of `spanwise.overlap.search`.

Whenever compute is free, it issues the ready node with the longest path after it. Collectives start as soon as they are
ready, those with the longest path first. It waits only if there is nothing else to do, for the collective that ends
first. R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17, 1969.
"""

from __future__ import annotations

import heapq

from spanwise.overlap.dag import Dag, Kind


def longest_tails(dag: Dag) -> list[float]:
    """Milliseconds of the longest path from the begin of each node to the end of the graph."""
    tails = [0.0] * len(dag)
    for i in range(len(dag) - 1, -1, -1):
        node = dag.nodes[i]
        tails[i] += node.ms
        for dep in node.deps:
            # What depends on a start alone need not wait for its end.
            after = tails[i] if dag.nodes[dep].kind != Kind.START or dep == node.start else tails[i] - dag.nodes[dep].ms
            tails[dep] = max(tails[dep], after)
    return tails


def by_longest_tail(dag: Dag) -> list[int]:
    """Greedy order: ready collectives at once, then the compute with the longest path after it."""
    return _greedy(dag, [-tail for tail in longest_tails(dag)])


def _greedy(dag: Dag, priority: list[float]) -> list[int]:
    missing = [len(set(node.deps)) for node in dag.nodes]
    compute: list[tuple[float, int]] = []
    starts: list[tuple[float, int]] = []
    waits: list[tuple[float, int]] = []
    free = dict.fromkeys(dag.groups, 0.0)
    end = [0.0] * len(dag)
    now, order = 0.0, []

    def ready(i: int) -> None:
        kind = dag.nodes[i].kind
        if kind == Kind.WAIT:
            heapq.heappush(waits, (end[dag.nodes[i].start], i))
        else:
            heapq.heappush(starts if kind == Kind.START else compute, (priority[i], i))

    def issue(i: int) -> None:
        nonlocal now
        node = dag.nodes[i]
        order.append(i)
        if node.kind == Kind.START:
            end[i] = free[node.group] = max(now, free[node.group]) + node.ms
        elif node.kind == Kind.WAIT:
            now = max(now, end[node.start])
        else:
            now += node.ms
        for user in dag.users[i]:
            missing[user] -= 1
            if not missing[user]:
                ready(user)

    for i in range(len(dag)):
        if not missing[i]:
            ready(i)
    while len(order) < len(dag):
        if starts:
            issue(heapq.heappop(starts)[1])
        elif waits and waits[0][0] <= now:
            issue(heapq.heappop(waits)[1])
        elif compute:
            issue(heapq.heappop(compute)[1])
        else:
            issue(heapq.heappop(waits)[1])
    return order
