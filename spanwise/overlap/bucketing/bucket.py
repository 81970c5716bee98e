"""Buckets: several collectives of a `Dag` as one, so that latency is paid once and fewer kernels are launched.

    dag, schedule ─► bucket ─► merged dag, its schedule ─► emit

`merge` makes of a dag and the buckets that were chosen the dag of merged collectives, in a legal order. `bucket`
chooses them, in two ways that take turns. `replay` runs the schedule once more and takes together what has the time to
wait for one another: near-linear, many buckets at once, and nothing comes later than the schedule can bear. What it
cannot find is a bucket that delays its readers and is worth it, since what follows is sooner by more. These are looked
for by trial: `moves` names collectives on the chain that the makespan is made of, which are merged, or buckets that are
cut in two, and all is scheduled again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from spanwise.overlap.bucketing.greedy import checked_price, replay
from spanwise.overlap.bucketing.moves import Move, batched, moves
from spanwise.overlap.ir.dag import Dag, GraphError, Kind, Node, Storage
from spanwise.overlap.ir.simulate import Timeline, simulate
from spanwise.overlap.search.schedule import Schedule, schedule
from spanwise.overlap.search.slack import in_flight, limits_in_flight

# Shares of the time to spare that buckets may use. The first buckets shorten the makespan and leave the schedule that
# is made of them free to move them; those that come then save launches.
_SLACKS = (0.1, 0.5)
_AGAIN = 1  # effort of schedules after the first: of an order that is close to one already
_REPAIRED = 1.01  # a makespan that is so much too long may be right again after a schedule
# Moves are tried until so many trials on end have gained nothing: as many as have so many nodes together, a single one
# of a large graph. A gain that pays, as a share of the makespan, gives all of them back, but not without end.
_TRIALS, _TRIED_NODES = 32, 10_000
_PAYS, _REFILLED = 1e-3, 3
_GAIN = 1e-6  # less is none
_ONE_BY_ONE = 4  # moves for each trial at most that are tried one by one, rather than many together
_HOPELESS = 1.02  # a makespan that is so much too long stays so, as a rule: not scheduled, if trials are few
_MANY_TRIALS = 16  # from then on, moves are tried before anything has been taken together, too
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class Merged:
    """A dag whose nodes stand for nodes of another one.

    Attributes:
        dag: numbered in a legal order.
        members: of each node of `dag`, the nodes of the original that it stands for, ascending: several starts for a
            merged start, their waits for a merged wait, one for any other. Each node of the original is there once.
    """

    dag: Dag
    members: tuple[tuple[int, ...], ...]

    @property
    def launches(self) -> int:
        """How many collectives are started."""
        return len(self.dag.starts)


def unmerged(dag: Dag) -> Merged:
    """`dag` without buckets."""
    return Merged(dag, tuple((i,) for i in range(len(dag))))


def merge(
    dag: Dag,
    buckets: Sequence[Sequence[int]],
    ms: Sequence[float],
    order: Sequence[int] | None = None,
    *,
    late: bool = False,
) -> Merged:
    """The dag in which the collectives of each bucket are one: one start, one wait, the union of their dependencies.

    Args:
        buckets: starts that become one, by number; no start in two of them, those of a bucket in one group.
        ms: of each bucket, milliseconds of the merged collective.
        order: legal order of `dag`'s nodes which that of the merged dag follows; default: its own. A merged collective
            is started where the first of its members was, and what the others depend on is moved in front of it.
        late: start it where the last of its members was instead, unless somebody waits for it before.

    Raises:
        GraphError: two nodes would wait for one another; names a member of the bucket that must not be.
        ValueError: buckets that are no sets of starts of one group, or not as many costs.
    """
    if len(ms) != len(buckets):
        raise ValueError(f"expected milliseconds of {len(buckets)} buckets, got {len(ms)}")
    if order is not None:
        dag.check_order(order)
    members = _members(dag, buckets, range(len(dag)) if order is None else order)
    unit = [0] * len(dag)
    for u, of_unit in enumerate(members):
        for i in of_unit:
            unit[i] = u
    deps = [[unit[dep] for i in of_unit for dep in dag.nodes[i].deps] for of_unit in members]
    for u, of_unit in enumerate(members):
        if len(of_unit) > 1 and u in deps[u]:
            raise GraphError(
                dag.nodes[of_unit[-1]].name, f"it depends on a member of its bucket: {_names(dag, of_unit)}"
            )
    walk: Sequence[int] = range(len(members))
    if late:
        last: dict[int, int] = {}
        for place, i in enumerate(range(len(dag)) if order is None else order):
            if dag.nodes[i].kind == Kind.START or unit[i] not in last:
                last[unit[i]] = place
        walk = sorted(walk, key=last.__getitem__)
    numbering = _legal(dag, members, deps, walk)

    number = [0] * len(dag)
    for new, u in enumerate(numbering):
        for i in members[u]:
            number[i] = new
    merged_ms = {unit[bucket[0]]: cost for bucket, cost in zip(buckets, ms, strict=True)}
    nodes = []
    for u in numbering:
        of_unit = members[u]
        node = dag.nodes[of_unit[0]]
        name = node.name if len(of_unit) == 1 else f"{node.name} and {len(of_unit) - 1} more"
        start = number[node.start] if node.kind == Kind.WAIT else -1
        cost = merged_ms.get(u, node.ms)
        new_deps = tuple(sorted({number[dep] for i in of_unit for dep in dag.nodes[i].deps}))
        nodes.append(Node(name, node.kind, cost, new_deps, node.group, start))
    return Merged(Dag(tuple(nodes), _storages(dag, number)), tuple(members[u] for u in numbering))


def bucket(
    dag: Dag,
    found: Schedule,
    keys: Sequence[Hashable | None],
    merged_ms: Callable[[list[int]], float],
    *,
    multiplier: float = 1.0,
    in_flight: int | None = None,
    in_flight_bytes: int | None = None,
    effort: int | None = None,
) -> tuple[Merged, Schedule]:
    """Merge collectives of equal keys where the makespan gains, or stays as it is with fewer launches.

    Args:
        found: schedule of `dag`; its budget holds for what is returned, and its makespan is not exceeded.
        keys: by node, what the starts of a bucket must have in common; None for those that must not be merged.
        merged_ms: milliseconds of the collective that starts, by number, become.
        multiplier, in_flight, in_flight_bytes, effort: as in `schedule`, of the new schedule. A bucket is one
            collective in flight, with all of its bytes; where `found` has more than the limits, that is the limit.

    Returns:
        The merged dag and a schedule of it; without a bucket, `dag` itself and `found`.

    Raises:
        GraphError: `merged_ms` is negative or not finite; names the first start.
        ValueError: keys of another dag.
    """
    if len(keys) != len(dag):
        raise ValueError(f"expected a key or None for each of {len(dag)} nodes, got {len(keys)}")
    options: dict[str, Any] = {"in_flight": in_flight, "in_flight_bytes": in_flight_bytes, "multiplier": multiplier}
    trials = min(_TRIALS, _TRIED_NODES // max(1, len(dag))) if effort != 0 else 0
    searches = [_Search(dag, found, keys, merged_ms, options, effort)]
    if trials >= _MANY_TRIALS:  # a move may save more where nothing has been taken together yet
        searches.append(_Search(dag, found, keys, merged_ms, options, effort))
        searches[1].improve(trials)
    for search in searches:
        for slack in _SLACKS:
            search.offer_replayed(slack)
    if searches[0].improve(trials):
        searches[0].offer_replayed(_SLACKS[-1])
    best = searches[0]
    for other in searches[1:]:
        shortest, launches = best.best.timeline.makespan, best.merged.launches
        most = 1 + _ROUNDING if other.merged.launches < launches else 1 - _ROUNDING
        if other.best.timeline.makespan <= shortest * most:
            best = other
    return best.merged, best.best


class _Search:
    """The best buckets so far, and the schedule of what is merged.

    Args:
        options, effort: of schedules.

    Attributes:
        allowed: of each group, collectives and bytes in flight at most; None for no limits.
        longest: a makespan that buckets must not exceed.
    """

    def __init__(
        self,
        dag: Dag,
        found: Schedule,
        keys: Sequence[Hashable | None],
        price: Callable[[list[int]], float],
        options: dict[str, Any],
        effort: int | None,
    ) -> None:
        self.dag, self.keys, self.price, self.options, self.effort = dag, keys, price, options, effort
        self.merged, self.best = unmerged(dag), found
        self.longest = found.timeline.makespan * (1 + _ROUNDING)
        self.allowed = limits_in_flight(found.timeline, options["in_flight"], options["in_flight_bytes"])
        self.tried: set[frozenset[tuple[int, ...]]] = set()
        self.saved: dict[Hashable, float] = {}

    def holds(self, timeline: Timeline) -> bool:
        """Whether memory and what is in flight are within their limits."""
        if timeline.peak_bytes > self.best.budget:
            return False
        if self.allowed is None:
            return True
        return all(
            now <= most
            for group, of_group in in_flight(timeline).items()
            for now, most in zip(of_group, self.allowed[group], strict=True)
        )

    def offer_replayed(self, slack: float) -> None:
        """Take what `replay` takes together, if the makespan is kept."""
        joint = self._replayed(slack)
        if joint.launches == self.merged.launches:
            return
        own = simulate(joint.dag)
        limit = min(self.longest, self.best.timeline.makespan * (1 + _ROUNDING))
        if own.makespan > limit * _REPAIRED or not self.holds(own):
            return
        best = self._scheduled(joint, own, self.effort)
        if best.timeline.makespan <= limit:
            self.merged, self.best = joint, best
            self.effort = _AGAIN if self.effort is None else min(self.effort, _AGAIN)

    def _scheduled(self, joint: Merged, own: Timeline, effort: int | None) -> Schedule:
        """The best schedule of the merged dag, or its own order."""
        best = schedule(joint.dag, budget=self.best.budget, effort=effort, **self.options)
        return best if best.timeline.makespan <= own.makespan else dataclasses.replace(best, timeline=own)

    def improve(self, trials: int) -> bool:
        """Make moves that shorten the makespan, until so many on end do not; whether there were any."""
        before, effort = self.best, min(_AGAIN, _AGAIN if self.effort is None else self.effort)
        batches, left, most = self._batches(trials), trials, _REFILLED * trials
        while min(left, most) > 0 and (batch := next(batches, None)):
            known, new = self._moved(batch)
            if (buckets := frozenset((*known, *new))) in self.tried:
                continue
            self.tried.add(buckets)
            left, most = left - 1, most - 1  # whether or not it comes to a schedule
            joint = self._joint(known | {bucket: checked_price(self.dag, bucket, self.price) for bucket in new})
            was = self.best.timeline.makespan
            if joint is None or (trials < _MANY_TRIALS and joint[1].makespan > _HOPELESS * was):
                continue
            best = self._scheduled(*joint, effort)
            gain = was - best.timeline.makespan
            if gain > _GAIN * was:
                self.merged, self.best = joint[0], best
                batches, left = self._batches(trials), trials if gain > _PAYS * was else left
        return self.best is not before

    def _batches(self, trials: int) -> Iterator[list[Move]]:
        """Moves one by one, if there are few; many together."""
        keys = [self.keys[of_node[0]] for of_node in self.merged.members]
        found = moves(self.best.timeline, self.merged.members, keys, self._saves)
        return iter([[move] for move in found]) if len(found) <= _ONE_BY_ONE * trials else batched(found)

    def _saves(self, units: Sequence[int]) -> float:
        """What one collective less of a key saves; the same for all of the key, for prices of fx nodes take time."""
        both = [self.merged.members[unit][0] for unit in units]
        key = self.keys[both[0]]
        if key not in self.saved:
            self.saved[key] = sum(self.dag.nodes[i].ms for i in both) - checked_price(self.dag, both, self.price)
        return self.saved[key]

    def _moved(self, batch: Sequence[Move]) -> tuple[dict[tuple[int, ...], float], list[tuple[int, ...]]]:
        """The buckets there are after some moves: those that stay, with their milliseconds, and the new ones."""
        gone = {unit for move in batch for unit in move.units}
        units = [(i, self.merged.members[i]) for i in self.merged.dag.starts if i not in gone]
        stay = {of_unit: self.merged.dag.nodes[i].ms for i, of_unit in units if len(of_unit) > 1}
        return stay, [bucket for move in batch for bucket in move.buckets if len(bucket) > 1]

    def _joint(self, ms: dict[tuple[int, ...], float]) -> tuple[Merged, Timeline] | None:
        """The dag of these buckets with a timeline of it within the limits; None if there is none at hand."""
        order = [i for unit in self.best.order for i in self.merged.members[unit]]
        for late in (False, True):
            try:
                joint = merge(self.dag, list(ms), list(ms.values()), order, late=late)
            except GraphError:  # they would wait for one another
                return None
            own = simulate(joint.dag)
            if self.holds(own):
                return joint, own
        return None

    def _replayed(self, slack: float) -> Merged:
        """The best with what `replay` takes together of it."""
        dag, multiplier = self.dag, self.options["multiplier"]
        members = [self.merged.members[i] for i in self.best.order]
        in_order = _in_order(self.merged.dag, self.best.order, multiplier)

        def flat(nodes: Iterable[int]) -> list[int]:
            return [of_node for i in nodes for of_node in members[i]]

        replayed = replay(
            in_order,
            simulate(in_order),
            [self.keys[of_node[0]] for of_node in members],
            lambda starts: multiplier * self.price(flat(starts)),
            budget=self.best.budget,
            slack=slack,
            allowed=self.allowed,
        )
        ms = {i: in_order.nodes[i].ms for i in in_order.starts if len(members[i]) > 1}
        for starts, cost in zip(replayed.buckets, replayed.ms, strict=True):
            ms[starts[0]] = cost
            for i in starts[1:]:
                ms.pop(i, None)
        joint = {starts[0]: starts for starts in replayed.buckets}
        buckets = [flat(joint.get(i, [i])) for i in ms]
        return merge(dag, buckets, [cost / multiplier for cost in ms.values()], flat(replayed.order), late=True)


def _in_order(dag: Dag, order: Sequence[int], multiplier: float) -> Dag:
    """`dag` numbered by a legal order of it, its collectives slower."""
    place = [0] * len(dag)
    for at, i in enumerate(order):
        place[i] = at
    nodes = []
    for i in order:
        node = dag.nodes[i]
        deps, start = tuple([place[dep] for dep in node.deps]), place[node.start] if node.start >= 0 else -1
        ms = node.ms * multiplier if node.kind == Kind.START else node.ms
        nodes.append(Node(node.name, node.kind, ms, deps, node.group, start))
    return Dag(tuple(nodes), _storages(dag, place))


def _names(dag: Dag, nodes: Sequence[int]) -> str:
    return ", ".join(repr(dag.nodes[i].name) for i in nodes)


def _members(dag: Dag, buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[tuple[int, ...]]:
    """What becomes one node, by the place of its first member in `order`; members ascending."""
    waits = {node.start: i for i, node in enumerate(dag.nodes) if node.kind == Kind.WAIT}
    together: dict[int, tuple[int, ...]] = {}
    for bucket in buckets:
        starts = tuple(sorted(bucket))
        groups = {dag.nodes[i].group if 0 <= i < len(dag) else "" for i in starts}
        if len(groups) != 1 or "" in groups or len(set(starts)) < len(starts):
            raise ValueError(f"a bucket has starts of one process group, each once, got nodes {list(bucket)}")
        for i in starts:
            if i in together:
                raise GraphError(dag.nodes[i].name, "it is in two buckets")
            together[i] = starts
        ends = tuple(sorted(waits[i] for i in starts if i in waits))
        together.update(dict.fromkeys(ends, ends))
    found: dict[tuple[int, ...], None] = {}
    for i in order:
        found.setdefault(together.get(i, (i,)))
    return list(found)


def _legal(
    dag: Dag, members: Sequence[tuple[int, ...]], deps: Sequence[Sequence[int]], walk: Sequence[int]
) -> list[int]:
    """Merged nodes as in `walk`, each after all that it depends on: what is missing is moved in front of it."""
    found: list[int] = []
    done, under_way = bytearray(len(members)), bytearray(len(members))
    for first in walk:
        path = [first] if not done[first] else []
        while path:
            u = path[-1]
            missing = min((dep for dep in deps[u] if not done[dep]), default=None)
            if missing is None:
                path.pop()
                under_way[u] = False
                done[u] = True
                found.append(u)
                continue
            under_way[u] = True
            if under_way[missing]:
                cycle = path[path.index(missing) :]
                bad = next(u for u in cycle if len(members[u]) > 1)
                text = f"no bucket of {_names(dag, members[bad])}: they would wait for one another"
                through = _names(dag, [members[u][0] for u in cycle if len(members[u]) == 1][:3])
                raise GraphError(dag.nodes[members[bad][0]].name, text + (f" through {through}" if through else ""))
            path.append(missing)
    return found


def _storages(dag: Dag, number: Sequence[int]) -> tuple[Storage, ...]:
    """Storages of a dag whose nodes have other numbers."""
    found = []
    for storage in dag.storages:
        maker, users = number[storage.maker], sorted({number[user] for user in storage.users})
        kept = storage.kept
        if users and users[0] < maker:
            # A user that does not depend on the maker stands for the end of all, which may be another node now.
            kept, users = True, [user for user in users if user >= maker]
        found.append(Storage(storage.num_bytes, maker, tuple(users), kept))
    return tuple(found)
