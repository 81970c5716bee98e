"""The exchanges: functions that make the steps of a route, and what planning has to know of each.

A function of the caller serves as well: ``make_plan(mask, num_ranks, exchange=steps_of)``; see "Add an exchange" in
docs/. Whatever steps it makes, the result is exact, if every key that a group reads comes to it once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from spanwise.layouts.runs import subtract_runs
from spanwise.masks.arrays import Int64
from spanwise.masks.spans import merge_runs
from spanwise.routes import relays
from spanwise.routes.route import EVERYONE, RECEIVER, ROW, SENDER, START, STOP, Route, RouteProblem, Step, Tables

Steps = list[Step]


def all_gather(problem: RouteProblem) -> Steps:
    """All keys to all groups, in one step."""
    moves = np.insert(problem.owned(), RECEIVER, EVERYONE, axis=1)
    return [Step(-1, moves)] if problem.num_groups > 1 else []


def needed(problem: RouteProblem) -> Steps:
    """Only the keys that queries read, in chunks that all leave at once.

    The list of tokens of each pair of groups is cut into parts of whole blocks, as equal as possible. A chunk holds one
    part of every list; the first part rotates from pair to pair, so that short lists fill all chunks alike. There are
    as many chunks as asked for if some list has that many blocks, else one: torch.compile makes a graph for each
    number.
    """
    moves, size, block = problem.reads, problem.num_groups, problem.block_size
    pair = moves[:, RECEIVER] * size + moves[:, SENDER]
    length = moves[:, STOP] - moves[:, START]
    longest = int(np.bincount(pair, length).max(initial=0))
    count = problem.num_chunks
    if count == 1 or -(-longest // block) < count:
        return [Step(-1, moves)]
    # The lists of all pairs, one after the other, are positions of one line. Part p of a list ends at `ends[:, p]`.
    order = np.argsort(pair, kind="stable")
    moves, pair, length = moves[order], pair[order], length[order]
    pairs, first = np.unique(pair, return_index=True)
    begin, total = np.cumsum(length) - length, np.add.reduceat(length, first)
    ends = (begin[first][:, None] + np.stack(_part_ends(total, count, block), axis=1)).ravel()
    # Both ascend, so that a stable sort merges them: a tenth of np.unique's time for 1,024 ranks.
    edges = np.sort(np.concatenate([begin, ends]), kind="stable")
    edges = edges[np.append(True, np.diff(edges) > 0)]
    left = edges[:-1]
    move = np.searchsorted(begin, left, side="right") - 1
    which, part = np.divmod(np.searchsorted(ends, left, side="right"), count)
    cut = moves[move]
    cut[:, START] += left - begin[move]
    cut[:, STOP] = cut[:, START] + np.diff(edges)
    chunk = (part + pairs[which] // size - pairs[which] % size) % count
    return [Step(-1, cut[chunk == i]) for i in range(count)]


def count_needed(problem: RouteProblem) -> Tables:
    """The tables of `needed`.

    A plan of 16M tokens on 1,024 ranks tries several layouts and numbers of chunks, each with millions of moves: 20
    seconds with moves, 1 without.
    """
    table, count, block = problem.pairs, problem.num_chunks, problem.block_size
    if count == 1 or -(-int(table.max()) // block) < count:
        return [(-1, table)]
    pair, size = np.flatnonzero(table), table.size
    total, distance = table.ravel()[pair], np.subtract(*np.divmod(pair, len(table)))
    found, before = np.zeros(count * size, np.int64), np.zeros_like(total)
    for i, end in enumerate(_part_ends(total, count, block)):
        found[(distance + i) % count * size + pair] = end - before
        before = end
    return [(-1, each) for each in found.reshape(count, *table.shape)]


def _part_ends(total: Int64, count: int, block: int) -> list[Int64]:
    """Where each of `count` parts of lists of `total` tokens ends, in whole blocks, alike; ``[n]`` each."""
    blocks = -(-total // block)
    return [np.minimum(-(-i * blocks // count) * block, total) for i in range(1, count + 1)]


def hierarchical(problem: RouteProblem) -> Steps:
    """Only the keys that queries read, from their owners to one reader on each host, which passes them on there."""
    direct, passed = relays.moves(problem)
    return [Step(-1, direct), Step(0, passed)]


def ring(problem: RouteProblem) -> Steps:
    """Whole shards, each from the group that got it in the step before; hops that no group reads are left out.

    Ring attention: Liu, Zaharia and Abbeel, 2023 (arXiv 2310.01889).
    """
    size, before = problem.num_groups, 0
    row, owner, start, stop = problem.owned().T
    steps: Steps = []
    hops = np.unique((problem.reads[:, RECEIVER] - problem.reads[:, SENDER]) % size)
    for hop in hops.tolist():
        receiver = (owner + hop) % size
        sender = (receiver - (hop - before)) % size
        steps.append(Step(len(steps) - 1, np.column_stack([row, receiver, sender, start, stop])))
        before = hop
    return steps


def ulysses(problem: RouteProblem) -> Steps:
    """No keys: the ranks that trade heads for tokens are one group."""
    return []


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange by name.

    Attributes:
        name: in plans, reports and errors.
        steps: makes the steps of a route.
        receives: the K/V tokens that a rank receives, in words; "{}" stands for the mean of those that it reads.
        chunk_counts: numbers of chunks that "auto" tries, simplest first; (1,) if the exchange chooses them.
        everything: moves all K/V, whatever the mask, so that locality of a layout gains nothing.
        exact: moves only K/V that are read.
        keeps_kv: default of ``keep_kv``; "auto" considers others under a memory budget only.
        by_host: a token enters a host once; for hardware that has hosts.
        heads: trades heads for tokens (Ulysses): all ranks are one group, to which no K/V come.
        count: the source of each step, and its tokens by pair of groups, where prices need no moves.
    """

    name: str
    steps: Callable[[RouteProblem], Steps]
    receives: str = "those that the exchange brings; {} of them are read, mean"
    chunk_counts: tuple[int, ...] = (1,)
    everything: bool = False
    exact: bool = False
    keeps_kv: bool = True
    by_host: bool = False
    heads: bool = False
    count: Callable[[RouteProblem], Tables] | None = None

    def levels(self, num_ranks: int) -> tuple[int, int]:
        """``(groups, ranks of a group)`` for so many ranks on a 1-D mesh."""
        return (1, num_ranks) if self.heads else (num_ranks, 1)

    def counts(self, chunks: int | None) -> tuple[int, ...]:
        """Numbers of chunks that may be chosen where the caller asks for `chunks`; empty if that is impossible."""
        if chunks is None:
            return self.chunk_counts
        return (chunks,) if chunks == 1 or len(self.chunk_counts) > 1 else ()


_READ = "exactly those that the rank's rows read and it does not hold"
EXCHANGES = {
    each.name: each
    for each in (
        Exchange("all_gather", all_gather, "all of the other ranks; {} of them are read, mean", everything=True),
        Exchange("needed", needed, _READ, (1, 2, 4), exact=True, count=count_needed),
        Exchange(
            "hierarchical", hierarchical, f"{_READ}; those of other hosts enter its host once", exact=True,
            by_host=True, count=relays.count,
        ),
        Exchange("ring", ring, "whole shards, one after the other; {} tokens of them are read, mean", keeps_kv=False),
        Exchange(
            "ulysses", ulysses,
            "those of the ranks that it trades heads with, for its heads, and from other groups those that the "
            "exchange between groups brings", heads=True,
        ),
    )
}  # fmt: skip


def resolve(exchange: Any) -> Exchange:
    """The exchange of a name, or of a function of the caller; ``ValueError`` for others.

    >>> resolve("needed").exact, resolve(lambda problem: []).name
    (True, '<lambda>')
    """
    if isinstance(exchange, Exchange):
        return exchange
    if isinstance(exchange, str) and exchange in EXCHANGES:
        return EXCHANGES[exchange]
    if not callable(exchange) or isinstance(exchange, type):
        raise ValueError(
            f"unknown exchange {exchange!r}; choose one of {[*EXCHANGES, 'auto']}, or give a function from a "
            f"RouteProblem to steps"
        )
    name = str(getattr(exchange, "__name__", type(exchange).__name__))
    if name in (*EXCHANGES, "auto"):
        raise ValueError(
            f"the function {name!r} needs another name: files and fingerprints know an exchange by its name, and this "
            f"one is spanwise's"
        )
    return Exchange(name, exchange)


def route_of(exchange: Exchange, problem: RouteProblem, batch_size: int) -> Route:
    """The route of an exchange, without empty steps; ``ValueError`` if a function of the caller breaks its promises."""
    own = EXCHANGES.get(exchange.name) != exchange

    def make() -> tuple[Step, ...]:
        steps: Steps = []
        number = {-1: -1}
        for i, (source, moves) in enumerate(exchange.steps(problem)):
            if own:
                _check_step(exchange.name, problem, i, source, moves)
            if len(moves):
                if source not in number:
                    raise ValueError(
                        f"exchange {exchange.name!r}: step {i} sends rows of step {source}, which brings none"
                    )
                number[i] = len(steps)
                steps.append(Step(number[source], moves))
        return tuple(steps)

    counted = None
    if exchange.count is not None:
        counted = [(source, table) for source, table in exchange.count(problem) if table.any()]
    route = Route(make, problem.layout, len(problem.needs), batch_size, exchange.exact, counted)
    if own:
        _check_route(exchange.name, problem, route)
    return route


def _check_step(name: str, problem: RouteProblem, i: int, source: Any, moves: Any) -> None:
    what, size = f"exchange {name!r}, step {i}", problem.num_groups
    if not isinstance(moves, np.ndarray) or moves.dtype != np.int64 or moves.ndim != 2 or moves.shape[1] != 5:
        raise ValueError(f"{what}: moves must be int64 [m, 5] of row, receiver, sender, start, stop, got {moves!r}")
    if not isinstance(source, int) or not -1 <= source < i:
        raise ValueError(f"{what}: source must be -1 or an earlier step, got {source!r}")
    everyone = moves[:, RECEIVER] == EVERYONE
    tokens = (moves[:, STOP] - moves[:, START]).sum()
    if everyone.any() and (source != -1 or not everyone.all() or tokens != len(problem.needs) * problem.layout.seq_len):
        raise ValueError(f"{what}: a step to everyone sends all that the groups own, and nothing else")
    limits = ((ROW, 0, len(problem.needs)), (RECEIVER, -1, size), (SENDER, 0, size), (START, 0, problem.layout.seq_len))
    for column, low, high in limits:
        if ((moves[:, column] < low) | (moves[:, column] >= high)).any():
            raise ValueError(f"{what}: column {column} of moves must be in [{low}, {high})")
    if (moves[:, START] >= moves[:, STOP]).any() or (moves[:, RECEIVER] == moves[:, SENDER]).any():
        raise ValueError(f"{what}: a move is of a token at least, and to another group")


def _check_route(name: str, problem: RouteProblem, route: Route) -> None:
    """``ValueError`` unless senders have what they send, and each group gets what it reads, everything once."""
    size = problem.num_groups
    for row, needs in enumerate(problem.needs):
        held = problem.held(row)
        owned = [held[held[:, 0] == group, 1:] for group in range(size)]
        came: list[list[Int64]] = []
        for step in route.steps:
            moves = step.moves[step.moves[:, ROW] == row]
            has = owned if step.source < 0 else came[step.source]
            everyone = len(moves) > 0 and moves[0, RECEIVER] == EVERYONE
            for group in range(size):
                sent = merge_runs(*moves[moves[:, SENDER] == group, START:].T)
                if len(subtract_runs(sent, has[group])):
                    raise ValueError(f"exchange {name!r}: group {group} sends keys that it does not have by then")
            to = (moves[:, SENDER] != g if everyone else moves[:, RECEIVER] == g for g in range(size))
            came.append([moves[some][np.argsort(moves[some, START]), START:] for some in to])
        for group in range(size):
            all_runs = np.concatenate([owned[group], *(runs[group] for runs in came)])
            union = merge_runs(*all_runs.T)
            if (union[:, 1] - union[:, 0]).sum() < (all_runs[:, 1] - all_runs[:, 0]).sum():
                raise ValueError(f"exchange {name!r}: group {group} gets a key twice, or one that it owns")
            if len(subtract_runs(needs[group], union)):
                raise ValueError(f"exchange {name!r}: group {group} does not get all keys that it reads")
