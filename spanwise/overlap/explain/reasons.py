"""Why a collective is exposed: the milliseconds of each that compute waits for, told apart by what would spare them.

    dag ─► schedule ─► timeline ─► reasons ─► report

Of one collective at a time, all others where they are. Pure.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from spanwise.overlap.ir.dag import Dag, Kind
from spanwise.overlap.ir.simulate import Timeline

_BLOCK = 512  # collectives whose bits are unpacked at once


class Why(enum.Enum):
    """What keeps exposed milliseconds from being hidden.

    STREAM: others on the stream of its group went first; with a stream of its own it would have ended earlier.
    NO_COMPUTE: all compute that neither leads to its start nor depends on its wait takes less time than it does.
    MEMORY: it could have been issued earlier, or compute from behind its wait could have run before, but then the order
        would hold more memory than the budget.
    ORDER: the same, and the budget has room: another order would hide it, though perhaps not all others.
    DEPENDENCY: when its wait is reached it could not have been issued earlier, and nothing is left that could run: what
        is independent has run before what it depends on was there, or depends on what is not there yet.
    """

    STREAM = "order of the group's stream"
    NO_COMPUTE = "no independent compute"
    MEMORY = "memory budget"
    ORDER = "order of compute"
    DEPENDENCY = "dependency"


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why one collective is exposed.

    Attributes:
        exposed: milliseconds that compute waits for it.
        parts: how many of them for which reason, in the order of `Why`; positive, and together `exposed`.
        independent: milliseconds of compute that neither lead to its start nor depend on its wait.
    """

    exposed: float
    parts: dict[Why, float]
    independent: float

    @property
    def main(self) -> Why:
        """The reason for most of it."""
        return max(self.parts, key=lambda why: self.parts[why])

    def __str__(self) -> str:
        ranked = sorted(self.parts.items(), key=lambda part: -part[1])
        ranked = [(why, ms) for why, ms in ranked if ms >= 0.01 * self.exposed]  # the others are not worth a word
        if len(ranked) == 1:
            return self.main.value
        return ", ".join(f"{why.value} ({duration(ms)})" for why, ms in ranked)


def duration(ms: float) -> str:
    """Milliseconds as people read them: three significant digits, in the unit that suits; "168 µs"."""
    if ms >= 999.5:
        return f"{ms / 1e3:.3g} s" if ms < 999.5e3 else f"{ms / 1e3:,.0f} s"
    if ms >= 0.9995:
        return f"{ms:.3g} ms"
    return f"{1e3 * ms:.3g} µs" if ms else "0"


def independent_compute(dag: Dag, among: Iterable[int] | None = None) -> dict[int, float]:
    """Of each start, the compute that neither leads to it nor depends on its wait; milliseconds.

    By sets of bits, one for each collective: of a node, the starts that it leads to, and the waits that it depends on.

    Args:
        among: nodes of compute that count; default: all.
    """
    starts, nodes = dag.starts, dag.nodes
    number = {start: k for k, start in enumerate(starts)}
    leads_to, reached_by = [0] * len(dag), [0] * len(dag)
    for i, node in enumerate(nodes):
        bits = 1 << number[node.start] if node.kind == Kind.WAIT else 0
        for dep in node.deps:
            bits |= reached_by[dep]
        reached_by[i] = bits
    for i in range(len(dag) - 1, -1, -1):
        if nodes[i].kind == Kind.START:
            leads_to[i] |= 1 << number[i]
        bits = leads_to[i]
        if bits:
            for dep in nodes[i].deps:
                leads_to[dep] |= bits
    # A node cannot both lead to a start and depend on its wait. Those between two collectives have the same bits.
    bound: dict[int, float] = {}
    for i in range(len(dag)) if among is None else sorted(among):
        if nodes[i].kind == Kind.COMPUTE and nodes[i].ms:
            bits = leads_to[i] | reached_by[i]
            bound[bits] = bound.get(bits, 0.0) + nodes[i].ms
    ms = np.array(list(bound.values()))
    width = -(-len(starts) // 8)
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in bound), np.uint8)
    packed = packed.reshape(len(bound), width)
    bound_up = np.zeros(len(starts))
    for first in range(0, width, _BLOCK // 8):
        unpacked = np.unpackbits(packed[:, first : first + _BLOCK // 8], axis=1, bitorder="little")
        of_block = ms @ unpacked
        bound_up[8 * first : 8 * first + len(of_block)] = of_block[: len(starts) - 8 * first]
    total, tiny = float(ms.sum()), _tiny(float(ms.sum()))
    free = total - bound_up
    return {start: float(free[k]) if free[k] > tiny else 0.0 for k, start in enumerate(starts)}


def hideable(dag: Dag, among: Iterable[int] | None = None) -> set[int]:
    """Starts of the collectives for which there is independent compute at all.

    While any of the others is under way nothing is computed, whatever the order, if it is waited for.

    Args:
        among: nodes of compute that count; default: all. PyTorch's pass counts matrix products, convolutions and
            attention (pytorch/pytorch#163215).
    """
    return {start for start, ms in independent_compute(dag, among).items() if ms > 0}


def reasons(timeline: Timeline, *, budget: int | None = None) -> dict[int, Reason]:
    """Why each exposed collective of `timeline` is exposed, by its start.

    The exposed milliseconds of a collective are accounted for in this order, each as far as they are left:

    1. STREAM: from when it is issued until it begins.
    2. NO_COMPUTE: what it takes longer than all independent compute.
    3. How much earlier it would be issued if what leads to it went before all else, collectives staying as they are:
       STREAM as far as its stream is taken then, else MEMORY or ORDER.
    4. MEMORY or ORDER: compute from behind its wait for which all is there when the wait is reached.
    5. DEPENDENCY: the rest.

    MEMORY or ORDER is decided by trying: the peak of the order with the nodes of 3 or 4 moved. Compute that could hide
    several collectives counts for the first of them in the order, so that their sum is what could be hidden in all.

    Args:
        timeline: simulated without contention.
        budget: bytes that the order may hold at most; None: any.
    """
    dag = timeline.dag
    exposed = {start: ms for start, ms in timeline.exposed.items() if ms > _tiny(timeline.makespan)}
    if not exposed:
        return {}
    looked = _Looked(timeline, budget)
    independent = independent_compute(dag)
    found = {
        start: looked.reason(start, exposed[start], independent[start])
        for start in timeline.order.tolist()
        if start in exposed
    }
    return dict(sorted(found.items()))


def _tiny(ms: float) -> float:
    """As in `Timeline.counts`: less is rounding."""
    return 1e-9 * max(1.0, ms)


class _Looked:
    """What is looked up for every collective of a timeline.

    Attributes:
        place: of each node in the order.
        ready: when each node could be issued, collectives staying as they are: a wait when its collective has ended,
            all else after the longest path of compute that leads to it. Never later than it was issued.
        idle_since: of each start, when the collective before it on its stream has ended.
        spare: milliseconds of each node of compute that hide no collective in a reason that was given.
    """

    def __init__(self, timeline: Timeline, budget: int | None) -> None:
        self.timeline, self.dag, self.budget = timeline, timeline.dag, budget
        dag, order = self.dag, timeline.order.tolist()
        self.order, self.place = timeline.order, np.empty(len(dag), np.int64)
        self.place[order] = np.arange(len(dag))
        self.begin, self.end, self.issued = (x.tolist() for x in (timeline.begin, timeline.end, timeline.issued))
        self.tiny = _tiny(timeline.makespan)
        self.spare = np.where(dag.kinds == Kind.COMPUTE, timeline.end - timeline.begin, 0.0)
        self.wait = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
        ready = [0.0] * len(dag)
        for i, node in enumerate(dag.nodes):
            if node.kind == Kind.WAIT:
                ready[i] = self.end[node.start]
            for dep in node.deps:
                ms = dag.nodes[dep].ms if dag.nodes[dep].kind == Kind.COMPUTE else 0.0
                ready[i] = max(ready[i], ready[dep] + ms)
        self.ready = np.array(ready)
        self.idle_since: dict[int, float] = {}
        last = dict.fromkeys(dag.groups, 0.0)
        for i in order:
            if dag.nodes[i].kind == Kind.START:
                self.idle_since[i] = last[dag.nodes[i].group]
                last[dag.nodes[i].group] = self.end[i]
        self.peak = _Peak(dag)
        self.made = np.zeros(len(dag), np.int64)
        np.add.at(self.made, self.peak.maker, self.peak.num_bytes)
        self.own_peak = self.peak(self.place)

    def reason(self, start: int, exposed: float, independent: float) -> Reason:
        parts = dict.fromkeys(Why, 0.0)
        left = exposed

        def account(why: Why, ms: float) -> None:
            nonlocal left
            ms = min(left, max(0.0, ms))
            parts[why] += ms
            left = left - ms if left - ms > self.tiny else 0.0

        account(Why.STREAM, self.begin[start] - self.issued[start])
        account(Why.NO_COMPUTE, self.dag.nodes[start].ms - independent)
        if left:
            earlier, moved, first = self.earlier(start, left)
            if earlier > self.tiny:
                idle = max(0.0, min(earlier, self.issued[start] - self.idle_since[start]))
                if idle > self.tiny:
                    account(self.fits(moved, first), idle)
                    passed = self.order[first : self.place[start]][::-1]
                    self.use(passed[~np.isin(passed, moved)], idle)
                account(Why.STREAM, earlier - idle)
        if left:
            wait = self.wait[start]
            behind, moved = self.behind(wait, left)
            if behind > self.tiny:
                account(self.fits(moved, int(self.place[wait])), behind)
                self.use(np.array(moved), behind)
        parts[Why.DEPENDENCY] += left
        return Reason(exposed, {why: ms for why, ms in parts.items() if ms > self.tiny}, independent)

    def earlier(self, start: int, most: float) -> tuple[float, list[int], int]:
        """How much earlier it could be issued, up to `most`; what has to move for that; before which place.

        What leads to the start goes first, all else that stands before it afterwards. A wait among what leads to it
        must not come before its collective has ended.
        """
        dag, place = self.dag, int(self.place[start])
        leads, gained, limit, first = {start, *dag.nodes[start].deps}, 0.0, most, place
        found = [start]
        for at in range(place - 1, -1, -1):
            if gained >= limit - self.tiny:
                break
            i = int(self.order[at])
            node = dag.nodes[i]
            if i not in leads:
                spent = self.end[i] - self.begin[i] if node.kind == Kind.WAIT else float(self.spare[i])
                if spent > 0:
                    gained, first = gained + spent, at
                continue
            if node.kind == Kind.WAIT:
                limit = min(limit, gained + max(0.0, self.begin[i] - self.end[node.start]))
            leads.update(node.deps)
            found.append(i)
        moved = [i for i in reversed(found) if self.place[i] > first]
        return min(gained, limit), moved, first

    def behind(self, wait: int, most: float) -> tuple[float, list[int]]:
        """Compute after `wait` that could run when it is reached, up to `most`, and what has to move for that."""
        after = self.order[int(self.place[wait]) + 1 :]
        can = after[self.ready[after] <= self.begin[wait] + self.tiny]
        ms = self.spare[can].cumsum()
        count = int(np.searchsorted(ms, most - self.tiny)) + 1
        return (float(min(most, ms[-1])), can[:count].tolist()) if len(ms) else (0.0, [])

    def use(self, nodes: NDArray[np.int64], ms: float) -> None:
        """Take so many milliseconds of the nodes' spare ones, the first nodes' first."""
        spare = self.spare[nodes]
        before = spare.cumsum() - spare
        self.spare[nodes] = spare - np.clip(ms - before, 0.0, spare)

    def fits(self, moved: Iterable[int], first: int) -> Why:
        """Whether the budget keeps `moved`, in this order, from standing before what is at place `first`."""
        nodes = np.fromiter(moved, np.int64)
        # Whatever else is alive at any time was alive before.
        if self.budget is None or int(self.made[nodes].sum()) <= self.budget - self.own_peak:
            return Why.ORDER
        place = np.empty(len(self.order), np.int64)
        place[self.with_moved(nodes, first)] = np.arange(len(place))
        return Why.MEMORY if self.peak(place) > self.budget else Why.ORDER

    def with_moved(self, nodes: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """The order with `nodes`, all of which come later, before what is at place `first`."""
        rest = np.delete(self.order, self.place[nodes])
        return np.concatenate([rest[:first], nodes, rest[first:]])


class _Peak:
    """`Dag.peak_bytes` of many orders, in arrays."""

    def __init__(self, dag: Dag) -> None:
        users = [(storage.maker, *storage.users) for storage in dag.storages]
        self.count = len(dag)
        self.maker = np.array([storage.maker for storage in dag.storages], np.int64)
        self.num_bytes = np.array([storage.num_bytes for storage in dag.storages], np.int64)
        self.freed = np.array([not storage.kept for storage in dag.storages], bool)
        self.users = np.array([user for of_storage in users for user in of_storage], np.int64)
        self.first = np.concatenate([[0], np.cumsum([len(of_storage) for of_storage in users])]).astype(np.int64)[:-1]

    def __call__(self, place: NDArray[np.int64]) -> int:
        if not len(self.maker):
            return 0
        change = np.zeros(self.count + 1, np.int64)
        np.add.at(change, place[self.maker], self.num_bytes)
        last = np.maximum.reduceat(place[self.users], self.first)
        np.subtract.at(change, last[self.freed] + 1, self.num_bytes[self.freed])
        return int(change.cumsum().max())


def hidden_counts(
    timeline: Timeline, among: Iterable[int] | None = None, members: Sequence[Sequence[int]] | None = None
) -> dict[str, int]:
    """Collectives that are "hidden" wholly, "partly", or "exposed" for all of their time, as `Timeline.counts` has it.

    Args:
        among: starts to count, those that take no time left out; default: `hideable`.
        members: of each node, the nodes of another dag that it stands for; `among` are starts of that dag then, and
            each is what the one that it became part of is.
    """
    chosen = hideable(timeline.dag) if among is None else among
    if members is not None:
        became = {i: start for start in timeline.dag.starts for i in members[start]}
        chosen = [became[i] for i in chosen]
    found, tiny = {"hidden": 0, "partly": 0, "exposed": 0}, _tiny(timeline.makespan)
    for start in chosen:
        ms = timeline.exposed[start]
        cost = timeline.dag.nodes[start].ms
        if cost:
            found["hidden" if ms <= tiny else "partly" if ms < cost - tiny else "exposed"] += 1
    return found
