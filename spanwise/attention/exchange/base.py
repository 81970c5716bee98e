"""Exchange: base class of the ways in which K/V travel between groups of ranks. `table` lists them.

An exchange has two halves. For planning it computes tokens moved, tokens held and seconds: numpy on a plan, for all
ranks at once. For running it builds one rank's chunks and starts the collectives. "Add an exchange" in docs/ shows a
complete one.

Groups are single ranks, or the ranks that trade heads for tokens (Ulysses) and so read K/V as one.
"""

# G groups, P ranks, n chunks; B batch, H heads of K/V, K keys of a chunk, D head dim

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.chunks import Chunk, ChunkBuilder
from spanwise.attention.exchange.refetch import Fetched, Refetch
from spanwise.masks.arrays import Float64, Int64
from spanwise.planning.plan_data import PlanData
from spanwise.planning.predict import over_ranks

KV = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


def route(*, static: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Class decorator for the route of a chunk, a frozen dataclass: registers it as a pytree.

    Args:
        static: fields that are not tensors. `torch.compile` makes one graph for each of their values.
    """
    return lambda cls: _torch.register_pytree_dataclass(cls, static=static)


class Peers(NamedTuple):
    """The process group of an exchange.

    Attributes:
        name: of the process group.
        rank: this rank's group of ranks, its number in the process group.
        size: number of groups.
    """

    name: str
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Base of all exchanges. Subclasses define `name`, `moved`, `chunks` and `start`; the rest has defaults.

    Tokens are K/V tokens between groups, summed over batch rows. ``mask`` is the name of one of the plan's masks.

    Attributes:
        name: in plans, reports and errors.
        receives: the K/V tokens that a rank receives, in words; "{}" stands for the mean of those that it reads.
        arrival: the way K/V arrive, in words, where `stages` cannot be chosen.
        baseline: moves all K/V, whatever the mask, so that locality of a layout gains nothing.
        exact: moves only the K/V that are read.
        chained: ranks pass a chunk on; its collective starts when the ranks have the previous chunk.
        passes: copies of a chunk's K/V as it arrives, and of its gradients as they leave.
        keeps_kv: default of ``keep_kv``.
        saves_memory: considered by "auto" under a memory budget only.
        by_host: a token enters a host once; for hardware that has hosts.
    """

    name: ClassVar[str] = ""
    receives: ClassVar[str] = "those that the exchange brings; {} of them are read, mean"
    arrival: ClassVar[str] = "in a number of chunks that it chooses"
    baseline: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    chained: ClassVar[bool] = False
    passes: ClassVar[tuple[float, float]] = (2.0, 2.0)
    keeps_kv: ClassVar[bool] = True
    saves_memory: ClassVar[bool] = False
    by_host: ClassVar[bool] = False

    # ---------------------------------------------------------------- planning

    def levels(self, num_ranks: int) -> tuple[int, int]:
        """``(groups, ranks of a group)`` for so many ranks on a 1-D mesh."""
        return num_ranks, 1

    def chunk_counts(self, stages: int | None) -> tuple[int, ...]:
        """Numbers of chunks that `make_plan` may choose from, simplest first; empty if `stages` is impossible."""
        return (1,) if stages in (None, 1) else ()

    def moved(self, plan: PlanData, mask: str) -> Int64:
        """Tokens that travel in each chunk of a forward, padding included: int64 ``[n, G receivers, G senders]``."""
        raise NotImplementedError

    def num_chunks(self, plan: PlanData, mask: str) -> int:
        """Chunks that arrive from elsewhere; every group has the same number."""
        return len(plan.moved(mask))

    def traffic(self, plan: PlanData, mask: str) -> Int64:
        """Tokens that each group gets from each other group, without padding: int64 ``[G receivers, G senders]``."""
        return plan.moved(mask).sum(axis=0)

    def most_held(self, plan: PlanData, mask: str) -> Int64:
        """Most tokens that each group holds while K/V arrive, in addition to its shard: int64 ``[G]``.

        Counts all buffers: packed to leave, as received, and in order. Called where at least one chunk travels.
        """
        return 2 * plan.kv_held + 2 * plan.moved(mask).sum(axis=(0, 2))

    def packed(self, plan: PlanData, mask: str) -> Int64:
        """Tokens that each group copies once more before they leave: int64 ``[G]``."""
        return plan.moved(mask).sum(axis=(0, 1))

    def seconds(self, plan: PlanData, mask: str, token_bytes: Float64, *, gradients: bool) -> Float64:
        """Seconds of each chunk's collective, ``[n]``.

        Args:
            token_bytes: ``[P]``, bytes of a token on each rank.
            gradients: of the collective that brings the chunk's gradients home, instead.
        """
        tables = (table.T if gradients else table for table in over_ranks(plan, plan.moved(mask)))
        return np.array([plan.hardware.all_to_all_seconds(table * token_bytes[:, None]) for table in tables])

    def joined(self, plan: PlanData, mask: str) -> Int64 | None:
        """Which ranks wait for one another in each chunk's collective: those with equal numbers, int64 ``[n, P]``.

        A rank with a negative number takes no part. None: all wait for all.
        """
        return None

    def chunk_work(self, plan: PlanData, mask: str) -> Float64:
        """(query, key) pairs of each chunk, ``[P, n]``; here in proportion to its tokens."""
        received = over_ranks(plan, plan.moved(mask)).sum(axis=2).T
        remote = plan.inner * (plan.work(mask) - plan.local_work(mask)).astype(np.float64)
        return remote[:, None] * received / np.maximum(received.sum(axis=1, keepdims=True), 1.0)

    # ---------------------------------------------------------------- running

    def chunks(self, builder: ChunkBuilder, mask: str) -> tuple[Chunk, ...]:
        """One rank's chunks: its own keys first, then those that arrive, in order, each with a route.

        A route is a pytree of tensors for `start`. Its sizes are shapes of empty tensors (`chunks.size`), because
        numbers that differ between plans would make `torch.compile` compile again.
        """
        raise NotImplementedError

    def start(
        self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str
    ) -> Iterator[KV]:
        """Start bringing `chunks`; iterate to wait for each and get its keys and values. Differentiable.

        The backward sends the gradients of these home. Collectives are in flight when this returns; between two items
        the caller computes.

        Args:
            k, v: ``[B, H, T, D]`` and ``[B, H, T, Dv]``, the rank's own.
            chunks: those with a route.
            label: names the transfer in errors.

        Returns:
            Iterator over ``[B, H, K, D]`` and ``[B, H, K, Dv]``; under ``chunk.flat`` B is 1 and batch rows are
            concatenated.

        Raises:
            spanwise.ExchangeError: a rank is gone or too late, here, at an item or in the backward.
        """
        raise NotImplementedError

    def refetch(self, k: torch.Tensor, v: torch.Tensor, chunks: Sequence[Chunk], peers: Peers, label: str) -> Refetch:
        """Fetches chunks again in the backward, for ``keep_kv=False``; here one `start` for each chunk."""
        k, v = k.detach(), v.detach()

        def fetch(chunk: Chunk) -> Callable[[], Fetched]:
            def started() -> Fetched:
                arriving = self.start(k, v, (chunk,), peers, label)
                return lambda: tuple(x.contiguous() for x in next(arriving))

            return started

        return Refetch([fetch(chunk) for chunk in chunks])
