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
from spanwise.masks.even_runs import merge_runs
from spanwise.routes import relays
from spanwise.routes.route import EVERYONE, OWN, RECEIVER, ROW, SENDER, START, STOP, Route, RouteProblem, Step, Tables

Steps = list[Step]


def all_gather(problem: RouteProblem) -> Steps:
    """All keys to all groups, in one step."""
    moves = np.insert(problem.owned(), RECEIVER, EVERYONE, axis=1)
    return [Step(OWN, moves)] if problem.num_groups > 1 else []


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
        return [Step(OWN, moves)]
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
    return [Step(OWN, cut[chunk == i]) for i in range(count)]


def count_needed(problem: RouteProblem) -> Tables:
    """The tables of `needed`.

    A plan of 16M tokens on 1,024 ranks tries several layouts and numbers of chunks, each with millions of moves: 20
    seconds with moves, 1 without.
    """
    table, count, block = problem.pairs, problem.num_chunks, problem.block_size
    if count == 1 or -(-int(table.max()) // block) < count:
        return [(OWN, table)]
    pair, size = np.flatnonzero(table), table.size
    total, distance = table.ravel()[pair], np.subtract(*np.divmod(pair, len(table)))
    found, before = np.zeros(count * size, np.int64), np.zeros_like(total)
    for i, end in enumerate(_part_ends(total, count, block)):
        found[(distance + i) % count * size + pair] = end - before
        before = end
    return [(OWN, each) for each in found.reshape(count, *table.shape)]


def _part_ends(total: Int64, count: int, block: int) -> list[Int64]:
    """Where each of `count` parts of lists of `total` tokens ends, in whole blocks, alike; ``[n]`` each."""
    blocks = -(-total // block)
    return [np.minimum(-(-i * blocks // count) * block, total) for i in range(1, count + 1)]


def hierarchical(problem: RouteProblem) -> Steps:
    """Only the keys that queries read, from their owners to one reader on each host, which passes them on there."""
    direct, passed = relays.moves(problem)
    return [Step(OWN, direct), Step(0, passed)]


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
        chunk_counts: numbers of chunks that "auto" tries, simplest first; (1,) if the exchange chooses them.
        everything: moves all K/V, whatever the mask, so that locality of a layout gains nothing.
        exact: moves only K/V that are read.
        keeps_kv: default of ``keep_kv``; "auto" considers others under a memory budget only.
        by_host: a token enters a host once; for hardware that has hosts.
        heads: trades heads for tokens (Ulysses): all ranks are one group, to which no K/V come.
        token_tables: the source of each step, and its tokens by pair of groups, where prices need no moves.
    """

    name: str
    steps: Callable[[RouteProblem], Steps]
    chunk_counts: tuple[int, ...] = (1,)
    everything: bool = False
    exact: bool = False
    keeps_kv: bool = True
    by_host: bool = False
    heads: bool = False
    token_tables: Callable[[RouteProblem], Tables] | None = None

    def levels(self, num_ranks: int) -> tuple[int, int]:
        """``(groups, ranks of a group)`` for so many ranks on a 1-D mesh."""
        return (1, num_ranks) if self.heads else (num_ranks, 1)

    def chunk_choices(self, chunks: int | None) -> tuple[int, ...]:
        """Numbers of chunks that may be chosen where the caller asks for `chunks`; empty if that is impossible."""
        if chunks is None:
            return self.chunk_counts
        return (chunks,) if chunks == 1 or len(self.chunk_counts) > 1 else ()


EXCHANGES = {
    each.name: each
    for each in (
        Exchange("all_gather", all_gather, everything=True),
        Exchange("needed", needed, chunk_counts=(1, 2, 4), exact=True, token_tables=count_needed),
        Exchange("hierarchical", hierarchical, exact=True, by_host=True),
        Exchange("ring", ring, keeps_kv=False),
        Exchange("ulysses", ulysses, heads=True),
    )
}


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
    is_callers = EXCHANGES.get(exchange.name) != exchange

    def make() -> tuple[Step, ...]:
        found = exchange.steps(problem)
        if is_callers:
            _check(exchange.name, problem, found)
        number = {OWN: OWN}
        for i, (_, moves) in enumerate(found):
            if len(moves):
                number[i] = len(number) - 1
        return tuple(Step(number[source], moves) for source, moves in found if len(moves))

    counted = None
    if exchange.token_tables is not None:
        counted = [(source, table) for source, table in exchange.token_tables(problem) if table.any()]
    route = Route(make, problem.layout, len(problem.needs), batch_size, exchange.exact, counted)
    if is_callers:
        _ = route.steps  # now, so that make_plan raises
    return route


def _check(name: str, problem: RouteProblem, steps: Steps) -> None:
    """``ValueError`` unless senders have what they send, and each group gets what it reads, everything once."""
    size, rows, length = problem.num_groups, len(problem.needs), problem.layout.seq_len

    def must(holds: Any, promise: str) -> None:
        if not holds:
            raise ValueError(f"exchange {name!r}: {promise}")

    def must_hold(runs: Int64, has: Int64, promise: str) -> None:
        missing = subtract_runs(merge_runs(*runs.T), merge_runs(*has.T))
        for key in missing[:1, 0].tolist():
            must(False, f"group {key // length % size} {promise}")

    listed = isinstance(steps, list | tuple) and all(isinstance(step, tuple) and len(step) == 2 for step in steps)
    must(listed, f"its function must return a list of Step, got {steps!r}")
    # Runs of all groups and batch rows lie one after the other on one line.
    row, group, start, stop = problem.owned().T
    has = [np.column_stack([start, stop]) + ((row * size + group) * length)[:, None]]  # then what each step brings
    for i, (source, moves) in enumerate(steps):
        table = isinstance(moves, np.ndarray) and moves.dtype == np.int64 and moves.ndim == 2 and moves.shape[1] == 5
        must(table, f"moves must be int64 [m, 5] of row, receiver, sender, start, stop, got {moves!r} in step {i}")
        earlier = isinstance(source, int | np.integer) and -1 <= source < i
        must(earlier, f"source must be -1 or an earlier step, got {source!r}")
        must(source < 0 or len(steps[source][1]), f"step {i} sends rows of step {source}, which brings none")
        low, high = (0, EVERYONE, 0, 0, 0), (rows, size, size, length, length + 1)
        for column, of in enumerate(("row", "receiver", "sender", "start", "stop")):
            inside = (moves[:, column] >= low[column]) & (moves[:, column] < high[column])
            must(inside.all(), f"the {of} of a move must be in [{low[column]}, {high[column]}), in step {i}")
        moved = (moves[:, START] < moves[:, STOP]) & (moves[:, RECEIVER] != moves[:, SENDER])
        must(moved.all(), "a move is of a token at least, and to another group")
        if EVERYONE in moves[:, RECEIVER]:
            every_token = (moves[:, STOP] - moves[:, START]).sum() == rows * length
            only = source == OWN and (moves[:, RECEIVER] == EVERYONE).all() and every_token
            must(only, "a step to everyone sends all that the groups own, and nothing else")
            to, moves = np.tile(np.arange(size), len(moves)), np.repeat(moves, size, axis=0)
            moves[:, RECEIVER] = to
            moves = moves[to != moves[:, SENDER]]
        sent, brought = (
            moves[:, START:] + ((moves[:, ROW] * size + moves[:, of]) * length)[:, None] for of in (SENDER, RECEIVER)
        )
        must_hold(sent, has[source + 1], "sends keys that it does not have by then")
        has.append(brought)
    everything = np.sort(np.concatenate(has), axis=0)
    must((everything[1:, 0] >= everything[:-1, 1]).all(), "a group gets a key twice, or one that it owns")
    needs = [runs + (row * size + i) * length for row, of in enumerate(problem.needs) for i, runs in enumerate(of)]
    must_hold(np.concatenate(needs), everything, "does not get all keys that it reads")
