"""Route: who sends which tokens to whom, in which steps; and what follows from that for every group of ranks.

A step is one collective. Its `moves` say in which batch row a group receives which run of tokens from whom. Its
`source` says what the senders send: -1 is what they own, another number the rows that came to them in that step. An
exchange is a function that makes steps (`exchanges`). Traffic, memory and predicted seconds of a plan, the index
tensors of a rank, and what runs are readings of the steps.

    needs, layout -> exchange(problem) -> steps -> Route -> planning (traffic, memory, seconds)
                                                         -> attention (one rank's tensors, execution)
"""

# G groups: single ranks, or ranks that trade heads for tokens (Ulysses) and so read K/V as one; n steps; m moves

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.layouts.traffic import Needs, add_pairs
from spanwise.masks.arrays import Int64

# Columns of moves, int64 `[m, 5]`.
ROW, RECEIVER, SENDER, START, STOP = range(5)
EVERYONE = -1  # as a receiver: all groups but the sender get all that it owns, by an all-gather
OWN = -1  # as a source: what the senders own

Tables = list[tuple[int, Int64]]  # of each step its source, and its tokens by pair: [G receivers, G senders]


class Step(NamedTuple):
    """One collective of a route.

    Attributes:
        source: the earlier step whose arrived rows are sent; `OWN`: what the senders own.
        moves: int64 ``[m, 5]``: batch row, receiver, sender, start, stop; in any order.
    """

    source: int
    moves: Int64


@dataclasses.dataclass(frozen=True, eq=False)
class RouteProblem:
    """What an exchange makes steps from.

    Attributes:
        needs: for each batch row and group, the runs of keys that it reads and does not hold, int64 ``[n, 2]``.
        pairs: tokens of these by pair of groups, int64 ``[receivers, senders]``.
        layout: the keys that each group holds.
        num_chunks: in how many chunks the keys should come; always 1 for a function of the caller.
        block_size: tile in tokens.
        host_groups: groups on a host; all of them where no host holds several.
    """

    needs: Needs
    pairs: Int64
    layout: Layout
    num_chunks: int = 1
    block_size: int = 128
    host_groups: int = 1

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        return self.layout.num_ranks

    @functools.cached_property
    def reads(self) -> Int64:
        """The needs as moves from the groups that hold the keys, int64 ``[m, 5]``; by batch row, receiver, start."""
        found = [np.empty((0, 5), np.int64)]
        for row, runs_of in enumerate(self.needs):
            receiver = np.repeat(np.arange(len(runs_of)), [len(runs) for runs in runs_of])
            found.append(_cut_by_owner(self.layout, row, receiver, np.concatenate(runs_of)))
        return np.concatenate(found)

    def owned(self) -> Int64:
        """What the groups hold, int64 ``[n, 4]``: batch row, group, start, stop; ascending by row, group, start."""
        return np.concatenate([np.insert(self.layout.pieces(row), 0, row, axis=1) for row in range(len(self.needs))])


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The steps of an exchange, none of them empty, and what follows from them.

    Tokens are summed over batch rows.

    Attributes:
        make: makes the `steps`, when they are first needed.
        layout: the keys that each group holds.
        rows: batch rows of the moves.
        batch_size: of the plan, a multiple of `rows`.
        exact: whether the exchange moves only what is read; its `RankStep`s always have index tensors.
        counted: of each step its source and its tokens, where they were counted without moves.
    """

    make: Callable[[], tuple[Step, ...]]
    layout: Layout
    rows: int
    batch_size: int
    exact: bool = False
    counted: Tables | None = None

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """In the order in which they run and attention reads what they bring."""
        return self.make()

    @functools.cached_property
    def sources(self) -> list[int]:
        """The source of each step."""
        return [source for source, _ in (self.steps if self.counted is None else self.counted)]

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        return self.layout.num_ranks

    @functools.cached_property
    def tokens(self) -> Int64:
        """Tokens of each step and pair of groups, int64 ``[n, G receivers, G senders]``."""
        found = np.zeros((len(self.sources), self.num_groups, self.num_groups), np.int64)
        if self.counted is not None:
            for table, (_, counted) in zip(found, self.counted, strict=True):
                np.multiply(counted, self.batch_size // self.rows, out=table)
            return found
        for table, step in zip(found, self.steps, strict=True):
            if gathers(step):
                length = step.moves[:, STOP] - step.moves[:, START]
                table += np.bincount(step.moves[:, SENDER], length, self.num_groups).astype(np.int64)
                np.fill_diagonal(table, 0)
            else:
                _, receiver, sender, start, stop = step.moves.T
                add_pairs(table, receiver, sender, stop - start)
        return found * (self.batch_size // self.rows)

    @functools.cached_property
    def received(self) -> Int64:
        """Tokens that each group receives in each step, padding included; int64 ``[n, G]``."""
        return self.wire_tokens.sum(axis=2)

    @functools.cached_property
    def wire_tokens(self) -> Int64:
        """`tokens` with the padding that travels: an all-gather takes shards of one size."""
        if not self.gathered:
            return self.tokens
        return self.tokens.max() * (1 - np.eye(self.num_groups, dtype=np.int64))[None]

    @functools.cached_property
    def chained(self) -> bool:
        """Whether some group passes rows on, so that a step waits for the one before."""
        return any(source >= 0 for source in self.sources)

    @functools.cached_property
    def gathered(self) -> bool:
        """Whether a step is an all-gather; then it is the only one."""
        return self.counted is None and any(gathers(step) for step in self.steps)

    @functools.cached_property
    def of_shards(self) -> bool:
        """Whether each step brings every group one whole shard, and takes one away: such rows need no index."""
        if self.exact or not self.steps or self.gathered:
            return False
        one_to_one = all((np.count_nonzero(table, axis=axis) <= 1).all() for table in self.tokens for axis in (0, 1))
        from_owners = self.direct.tokens
        return one_to_one and bool(((from_owners == 0) | (from_owners == self.own_tokens)).all())

    @functools.cached_property
    def direct(self) -> Route:
        """The same rows, each from their owners, so that one step can be refetched without those before it."""
        if not self.chained:
            return self
        steps = []
        for step in self.steps:
            rows = [step.moves[step.moves[:, ROW] == row] for row in np.unique(step.moves[:, ROW])]
            cut = [_cut_by_owner(self.layout, int(each[0, ROW]), each[:, RECEIVER], each[:, START:]) for each in rows]
            steps.append(Step(OWN, step.moves if step.source < 0 else np.concatenate(cut)))
        return Route(lambda: tuple(steps), self.layout, self.rows, self.batch_size)

    @functools.cached_property
    def joined(self) -> Int64:
        """Which groups wait for one another in each step: those with equal numbers, int64 ``[n, G]``.

        A group that neither sends nor receives has -1.
        """
        labels = [components(table) for table in self.tokens]
        return np.array(labels, np.int64).reshape(len(labels), self.num_groups)

    def most_held(self, *, keep: bool) -> Int64:
        """Most tokens that each group holds while rows come, in addition to its shard: int64 ``[G]``.

        Follows the executor. Times are 0 for the first start, then 3 i + 1 where rows of step i are put in order,
        3 i + 2 where those that are passed on leave, and 3 i + 3 where attention has read them.

        Args:
            keep: whether chunks are kept for the backward.
        """
        count, came, left = len(self.sources), self.received, self.copied
        change = np.zeros((3 * count + 2, self.num_groups), np.int64)

        def lives(tokens: Int64, first: int, until: int) -> None:
            change[first] += tokens
            change[until] -= tokens

        end = 3 * count + 1
        waits = [3 * i + 1 for i, source in enumerate(self.sources) if source < 0]
        if not self.gathered:  # there they are padded before anything arrives
            lives(self.own_tokens, 0, max(waits, default=1) if self.of_shards else 1)  # own rows, packed
        for i, source in enumerate(self.sources):
            begin, used = 3 * source + 2 if source >= 0 else 0, end if keep else 3 * i + 3
            lives(left[i], begin, 3 * i + 1)
            if self.of_shards:  # a shard stays where it came until it has been passed on
                passed = [3 * j + 1 for j, later in enumerate(self.sources) if later == i]
                lives(came[i], begin, max(used, *passed, 0))
                continue
            lives(came[i] + (left[i] if self.gathered else 0), begin, 3 * i + 3)
            lives(self.tokens[i].sum(axis=1) if self.gathered else came[i], 3 * i + 1, used)
        return np.asarray(change[:end].cumsum(axis=0).max(axis=0))

    @functools.cached_property
    def own_tokens(self) -> Int64:
        """Tokens that each group owns; int64 ``[G]``."""
        return self.batch_size * self.layout.tokens_per_rank

    @functools.cached_property
    def copied(self) -> Int64:
        """Tokens that each group copies for each step before they leave; int64 ``[n, G]``."""
        if self.of_shards:
            return np.zeros((len(self.sources), self.num_groups), np.int64)
        found = self.wire_tokens.sum(axis=1)
        if self.gathered:
            found[:] = self.wire_tokens.max()
        return found


def _cut_by_owner(layout: Layout, row: int, receiver: Int64, runs: Int64) -> Int64:
    """Moves of runs ``[n, 2]`` to their receivers ``[n]``, each from the group that holds the keys."""
    run, owner, both = layout.owners_of(runs, row)
    return np.column_stack([np.full(len(run), row), receiver[run], owner, both])


def gathers(step: Step) -> bool:
    """Whether all groups get all that the others own, by an all-gather."""
    return bool(len(step.moves)) and int(step.moves[0, RECEIVER]) == EVERYONE


def components(tokens: Int64) -> Int64:
    """Groups that a table ``[G, G]`` joins get the same number, the lowest of them; -1 without traffic; ``[G]``."""
    talks = tokens > 0
    talks |= talks.T.copy()
    label = np.full(len(tokens), -1)
    for first in np.flatnonzero(talks.any(axis=1)).tolist():
        if label[first] < 0:
            label[first], reached = first, np.array([first])
            while len(reached):
                reached = np.flatnonzero(talks[reached].any(axis=0) & (label < 0))
                label[reached] = first
    return label
