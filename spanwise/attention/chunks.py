"""One rank's part of a route: the chunks of K/V that it reads, each with the mask of its queries over it.

The rank's own keys come first, then those that each step brings. Everything follows from the plan. Index tensors hold
the rows that travel; shapes of empty tensors carry sizes.
"""

# n runs

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.executor import GATHERED, RankStep
from spanwise.attention.kernels.base import Chunk, Kernel
from spanwise.layouts.runs import places_in, ragged_arange
from spanwise.layouts.traffic import num_rows
from spanwise.masks.arrays import Int64
from spanwise.masks.even_runs import merge_runs
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan_data import PlanData
from spanwise.routes.route import RECEIVER, ROW, SENDER, START, STOP, Step, gathers


def chunks_of(plan: PlanData, mask: str, group: int, device: torch.device, kernel: Kernel) -> tuple[Chunk, ...]:
    """One group's chunks for `kernel`: its own keys, then those that each step of the plan's route brings."""
    return _Builder(plan, mask, group, device, kernel).chunks()


class _Held(NamedTuple):
    """Keys that a group can send: `runs` int64 ``[n, 2]``, all batch rows on one line, and the `place` of each run.

    `size` carries their number.
    """

    runs: Int64
    place: Int64
    size: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Builder:
    plan: PlanData
    mask: str
    group: int
    device: torch.device
    kernel: Kernel

    @property
    def rows(self) -> int:
        """Batch rows that differ in mask or layout."""
        return num_rows(self.plan.mask(self.mask), self.plan.layout)

    def chunks(self) -> tuple[Chunk, ...]:
        route = self.plan.route(self.mask)
        own = [self.plan.kv_groups.runs(self.group, row) for row in range(self.rows)]
        if not route.steps:
            return (self.chunk(own, None, 0, flat=False),)
        runs = np.concatenate([self.on_line(row, each) for row, each in enumerate(own)])
        length = runs[:, 1] - runs[:, 0]
        # Not unbacked: the number of own keys is a dim of k.
        count = _torch.mark_dynamic(torch.empty(int(length.sum()), 0, device=self.device), 0)
        held = {-1: _Held(runs, np.cumsum(length) - length, count)}
        found = [self.chunk(own, None, 0)]
        for i, step in enumerate(route.steps):
            come = self.coming(step)
            rank_step, held[i] = self.rank_step(step, come, held[step.source], route.of_shards)
            direct = None
            if step.source >= 0 and not self.plan.keep_kv:
                straight = route.direct.steps[i]
                direct, _ = self.rank_step(straight, self.coming(straight), held[-1], route.of_shards)
            passed = any(later.source == i for later in route.steps)
            rank_step = dataclasses.replace(rank_step, source=step.source, passed=passed, direct=direct)
            of_rows = [come[come[:, ROW] == row, START:] for row in range(self.rows)]
            keys = [merge_runs(*each.T) for each in of_rows]
            found.append(self.chunk(keys, rank_step, self.spare(come)))
        return tuple(found)

    def coming(self, step: Step) -> Int64:
        """Moves to the group, by batch row, then start."""
        moves = step.moves
        to_me = moves[:, SENDER] != self.group if gathers(step) else moves[:, RECEIVER] == self.group
        come = moves[to_me]
        return come[np.lexsort((come[:, START], come[:, ROW]))]

    def rank_step(self, step: Step, come: Int64, held: _Held, shards: bool) -> tuple[RankStep, _Held]:
        """What the group sends and receives, and where the keys of `come` lie on arrival.

        Rows arrive by sending group, then batch row, then token; a chunk has them by batch row, then token. Index
        tensors are written once, from runs: a rank of a thousand may receive 16M keys.
        """
        length, place = come[:, STOP] - come[:, START], np.empty(len(come), np.int64)
        by_sender = np.argsort(come[:, SENDER], kind="stable")
        place[by_sender] = np.cumsum(length[by_sender]) - length[by_sender]
        arrived = _Held(self.on_line(come[:, ROW], come[:, START:]), place, size(int(length.sum()), self.device))
        spare, pads = self.spare(come), self.kernel.pads_keys
        if gathers(step):
            groups, padded = self.plan.num_groups, self.rows * int(self.plan.kv_groups.tokens_per_rank.max())
            sent = np.bincount(come[:, SENDER], length, groups).astype(np.int64)
            place += (padded * np.arange(groups) - np.cumsum(sent) + sent)[come[:, SENDER]]  # shards begin apart
            order = self.index([np.column_stack([place, place + length])], spare, groups * padded)
            sizes = (_torch.mark_dynamic(torch.empty(padded, 0, device=self.device), 0),)
            return RankStep(None, order, sizes, sizes, kind=GATHERED, spare=pads), arrived
        leave = step.moves[step.moves[:, SENDER] == self.group]
        leave = leave[np.lexsort((leave[:, START], leave[:, ROW], leave[:, RECEIVER]))]
        places = [np.column_stack([place, place + length])], spare, int(length.sum())
        if shards:  # all that is held leaves, or nothing, and what comes is in order
            peers = int(leave[0, RECEIVER]) if len(leave) else -1, int(come[0, SENDER]) if len(come) else -1
            nothing = torch.empty(0, 0, device=self.device)  # constant, so that the sum of sizes is that of the peer
            to, source = (
                tuple(rows if group == peer else nothing for group in range(self.plan.num_groups))
                for peer, rows in zip(peers, (held.size, arrived.size), strict=True)
            )
            send = None if len(leave) else torch.empty(0, dtype=torch.int64, device=self.device)
            in_order = self.index(*places) if pads else None
            return RankStep(send, in_order, to, source, spare=pads, peers=peers), arrived
        runs = places_in(self.on_line(leave[:, ROW], leave[:, START:]), held.runs, held.place)
        # Unbacked: if torch.compile saw 1 row, autograd would sum the gradient before it has arrived.
        send = _torch.mark_unbacked(on_device(ragged_arange(runs), self.device), 0)
        to_each, from_each = self.sizes(leave, RECEIVER), self.sizes(come, SENDER)
        return RankStep(send, self.index(*places), to_each, from_each, spare=pads), arrived

    def index(self, runs: list[Int64], spare: int, value: int) -> torch.Tensor:
        """Indices of the runs, then `spare` times `value`."""
        # With spare keys the size is never 0 or 1, and kernels must know that it is not 0.
        mark = _torch.mark_dynamic if self.kernel.pads_keys else _torch.mark_unbacked
        return mark(on_device(index_rows(runs, spare, value)[0], self.device), 0)

    def on_line(self, row: Int64 | int, runs: Int64) -> Int64:
        """Runs of batch rows as runs of one line."""
        return runs + (np.broadcast_to(row, len(runs)) * self.plan.kv_len)[:, None]

    def sizes(self, moves: Int64, peer: int) -> tuple[torch.Tensor, ...]:
        """Tokens of the moves from or to each group, as `size` carries them."""
        length = moves[:, STOP] - moves[:, START]
        tokens = np.bincount(moves[:, peer], length, self.plan.num_groups).astype(np.int64)
        return tuple(size(n, self.device) for n in tokens.tolist())

    def spare(self, come: Int64) -> int:
        """Keys to add so that one compiled kernel serves plans whose K/V lengths differ; no span reads them."""
        keys = int((come[:, STOP] - come[:, START]).sum())
        return self.kernel.capacity(keys) - keys

    def chunk(self, keys: Sequence[Int64], step: RankStep | None, spare: int, *, flat: bool = True) -> Chunk:
        """The chunk of the key runs of each batch row.

        Args:
            spare: keys that no span reads, added at the end.
            flat: concatenate the rows along one dim, as they receive different numbers of keys; otherwise stack them.
        """
        of, queries, rows = self.plan.mask(self.mask), self.plan.groups, len(keys)
        masks = [of.row(row).select(queries.runs(self.group, row), runs) for row, runs in enumerate(keys)]
        mask = _one_after_another(masks) if flat else SpanMask.stack(masks)
        key_tokens = index_rows([np.concatenate(keys)] if flat else keys, spare, dtype=np.int32)
        if mask.kv_len != key_tokens.shape[1]:
            # Over the spare keys too: the last block of the shorter mask may be full where spare keys must not be read.
            mask = SpanMask(mask.start, mask.end, key_tokens.shape[1])
        tables = self.kernel.tables(mask, self.device)
        # All chunks get the same number of spans, never 1: see `Kernel.num_spans`.
        added = (0, 0), (0, self.kernel.num_spans(of.num_spans) - mask.num_spans), (0, 0)
        start, end = (on_device(np.pad(x, added), self.device) for x in (mask.start, mask.end))
        if self.kernel.dynamic_queries:
            for x in (start, end):
                _torch.mark_dynamic(_torch.mark_dynamic(x, 1), 2)
        kv_pos = _torch.mark_dynamic(on_device(key_tokens, self.device), 1)
        return Chunk(start, end, kv_pos, tables, step, rows, flat=flat and rows > 1)


def _one_after_another(masks: list[SpanMask]) -> SpanMask:
    """One mask with the queries and keys of the given masks, concatenated."""
    if len(masks) == 1:
        return masks[0]
    width = max(m.num_spans for m in masks)
    offsets = np.cumsum([0, *(m.kv_len for m in masks)])
    edges = []
    for part in ("start", "end"):
        shifted = [
            np.pad(np.where(m.end > m.start, getattr(m, part) + offset, 0)[0], ((0, width - m.num_spans), (0, 0)))
            for m, offset in zip(masks, offsets[:-1], strict=True)
        ]
        edges.append(np.concatenate(shifted, axis=1))
    return SpanMask(edges[0], edges[1], int(offsets[-1]))


def index_rows(rows: Sequence[Int64], spare: int = 0, value: int = 0, dtype: Any = np.int64) -> np.ndarray:
    """The indices of the runs ``[n, 2]`` of each row, then `spare` times `value`; ``[rows, indices]``.

    Written once: a rank of a thousand has 16M of them.
    """
    extra = np.tile(np.array([[value, value + 1]]), (spare, 1))
    return ragged_arange(np.concatenate([runs for row in rows for runs in (row, extra)]), dtype).reshape(len(rows), -1)


def size(rows: int, device: torch.device) -> torch.Tensor:
    """A tensor ``[rows, 0]`` that carries a number. Unbacked: a graph traced for 0 or 1 row must serve any number."""
    return _torch.mark_unbacked(torch.empty(rows, 0, device=device), 0)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; through pinned memory to CUDA, so that the host does not wait."""
    x = torch.from_numpy(array)
    if array.size <= 1:  # numpy gives these any stride, and torch.compile would recompile for another one
        x = x.clone(memory_format=torch.contiguous_format)
    return _torch.to_device(x, device)
