"""The stages of one rank's attention: its own keys, then those that arrive, each with its mask.

Under `rank_plan`, which asks for them mask by mask. What rows travel in which piece follows from the plan alone, and
becomes index tensors here; sizes become the shapes of empty tensors.
"""

# B layout rows (1, or the batch), T tokens of this rank (its group under Ulysses), n spans of a row

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.exchange.needed import Route
from spanwise.attention.exchange.ring import Hop
from spanwise.layouts.runs import (
    count_tokens,
    intersect_runs,
    merge_tokens,
    positions_in,
    ragged_arange,
    subtract_runs,
)
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.chunking import piece_of
from spanwise.planning.plan import Plan
from spanwise.planning.traffic import row_of

if TYPE_CHECKING:
    from spanwise.attention.kernels.flex import FlexTables
    from spanwise.attention.kernels.varlen import VarlenTables

FLEX_BLOCK_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of K/V and the mask of this rank's queries over it.

    Attributes:
        start, end: int32 ``[B or 1, n, T]``, spans as indices into the piece.
        kv_pos: int32 ``[B or 1, keys]``, global position of each key of the piece.
        tables: block tables for the flex kernel, rounds for the varlen kernel, or None.
        take: int64 ``[B, keys]``, where the keys lie in the gathered, padded shards, ordered ``[rank, row, token]`` and
            flattened; None unless an all-gather brings them.
        route: which rows travel, if only the needed ones do; None otherwise.
        hop: how the piece comes round the ring; None otherwise. The rank's own stage has none of the three.
        rows: batch rows that have a mask or layout of their own; 1 serves any batch.
        flat: whether these rows follow one another on one axis, queries and keys alike.
    """

    start: torch.Tensor
    end: torch.Tensor
    kv_pos: torch.Tensor
    tables: FlexTables | VarlenTables | None
    take: torch.Tensor | None
    route: Route | None
    hop: Hop | None
    rows: int
    flat: bool


_torch.register_pytree_dataclass(Stage, static=("rows", "flat"))


class Stages:
    """Builds the stages of one group of a plan.

    Args:
        tables: the kernel whose tables are built too, "flex" or "varlen".
    """

    def __init__(self, plan: Plan, group: int, device: torch.device, tables: str | None) -> None:
        self.plan, self.group, self.device, self.tables = plan, group, device, tables

    def of(self, name: str) -> tuple[Stage, ...]:
        """Those of the mask called ``name``: the local one, and the others in the order of their arrival."""
        if self.plan.exchange == "needed":
            return self._needed(name)
        return self._ring(name) if self.plan.exchange == "ring" else self._gathered(name)

    @functools.cached_property
    def _kv_slots(self) -> np.ndarray:
        return self.plan.kv_groups.slots()

    def _gathered(self, name: str) -> tuple[Stage, ...]:
        """Own tokens, then everybody else's out of the gathered shards; batch rows side by side."""
        plan, mask, layout = self.plan, self.plan.mask(name), self.plan.kv_groups
        rows = layout.batch_size
        queries = [plan.groups.runs(self.group, row) for row in range(rows)]
        own = [layout.runs(self.group, row) for row in range(rows)]

        def stage(keys: list[np.ndarray], *, spare: int = 0, gathered: bool = False) -> Stage:
            if rows == 1:
                local = mask.select(queries[0], keys[0])
            else:
                each = [mask.row(row_of(mask, row)) for row in range(rows)]
                local = SpanMask.stack([m.select(queries[row], keys[row]) for row, m in enumerate(each)])
            # Spare keys repeat a real token, so that they hold numbers.
            key_tokens = np.pad(np.stack([ragged_arange(runs) for runs in keys]), ((0, 0), (0, spare)))
            take = None
            if gathered:
                at = np.take_along_axis(self._kv_slots, key_tokens, axis=1)
                take = _torch.mark_dynamic(on_device(at, self.device), 1)
            tensors = self._tensors(local, mask.num_spans, key_tokens)
            return Stage(**tensors, take=take, route=None, hop=None, rows=max(rows, mask.batch_size), flat=False)

        if plan.num_groups == 1:
            return (stage(own),)
        everything = np.array([[0, plan.kv_len]], dtype=np.int64)
        others = [subtract_runs(everything, runs) for runs in own]
        return stage(own), stage(others, spare=self._spare(count_tokens(others[0])), gathered=True)

    # From here on batch rows that differ follow one another: what they receive differs, and side by side is not
    # rectangular.

    def _rows(self, name: str) -> int:
        return max(self.plan.mask(name).batch_size, self.plan.layout.batch_size)

    def _held(self, group: int, rows: int) -> list[np.ndarray]:
        """Runs of the keys that a group holds, for each of the batch rows."""
        layout = self.plan.kv_groups
        return [layout.runs(group, row_of(layout, row)) for row in range(rows)]

    def _piece(
        self, name: str, keys: list[np.ndarray], spare: int = 0, *, route: Route | None = None, hop: Hop | None = None
    ) -> Stage:
        """The stage of the key runs of each batch row, with so many keys more that no span reads."""
        mask, queries, rows = self.plan.mask(name), self.plan.groups, len(keys)
        local = _one_after_another(
            [
                mask.row(row_of(mask, row)).select(queries.runs(self.group, row_of(queries, row)), keys[row])
                for row in range(rows)
            ]
        )
        key_tokens = np.pad(np.concatenate([ragged_arange(runs) for runs in keys])[None], ((0, 0), (0, spare)))
        tensors = self._tensors(local, mask.num_spans, key_tokens)
        return Stage(**tensors, take=None, route=route, hop=hop, rows=rows, flat=rows > 1)

    def _ring(self, name: str) -> tuple[Stage, ...]:
        """Own tokens, then the shards of other groups as they come round."""
        rows, layout = self._rows(name), self.plan.kv_groups
        stages, before = [self._piece(name, self._held(self.group, rows))], 0
        for distance in self.plan.hops(name):
            owner = (self.group - distance) % self.plan.num_groups
            tokens = rows * layout.num_tokens(owner)
            hop = Hop(received=size(tokens, self.device), stride=distance - before, spare=self.tables == "flex")
            stages.append(self._piece(name, self._held(owner, rows), self._spare(tokens), hop=hop))
            before = distance
        return tuple(stages)

    def _needed(self, name: str) -> tuple[Stage, ...]:
        """Own tokens, then those that this group reads elsewhere, in pieces."""
        plan, group, device = self.plan, self.group, self.device
        layout, rows, first = plan.kv_groups, self._rows(name), group * plan.inner
        own = self._held(group, rows)
        shard = layout.num_tokens(group)
        stages = [self._piece(name, own)]
        num_pieces = plan.num_pieces(name)
        if num_pieces == 0:
            return tuple(stages)  # nobody reads anything elsewhere, and every rank knows
        needs = [plan.needs(first, name, row) for row in range(rows)]
        wanted = np.concatenate([ragged_arange(runs) for runs in needs])
        row_at = np.repeat(np.arange(rows), [count_tokens(runs) for runs in needs])
        # The slot of a token says who owns it.
        slot = self._kv_slots[row_at % layout.batch_size, wanted]
        sender = slot // (layout.batch_size * int(layout.tokens_per_rank.max()))
        recv_piece = _pieces_received(sender, group, num_pieces, plan.block_size)
        send = []
        for other in range(plan.num_groups):
            read = [intersect_runs(plan.needs(other * plan.inner, name, row), own[row]) for row in range(rows)]
            at = [positions_in(ragged_arange(runs), own[row]) + row * shard for row, runs in enumerate(read)]
            send.append(np.concatenate(at))
        send_piece = [
            piece_of(np.arange(len(at)), len(at), num_pieces, plan.block_size, other - group)
            for other, at in enumerate(send)
        ]
        for i in range(num_pieces):
            mine = recv_piece == i
            keys = [merge_tokens(wanted[mine & (row_at == row)]) for row in range(rows)]
            # Rows arrive by sending group, then batch row, then token; the stage wants them by batch row, then token.
            order = np.empty(np.count_nonzero(mine), dtype=np.int64)
            order[np.argsort(sender[mine], kind="stable")] = np.arange(len(order))
            sent = [at[piece == i] for at, piece in zip(send, send_piece, strict=True)]
            spare = self._spare(len(order))
            places = on_device(np.pad(order, (0, spare), constant_values=len(order)), device)
            # Never 0 or 1 with spare keys; and the flex kernel has to know that there are some.
            mark = _torch.mark_dynamic if self.tables == "flex" else _torch.mark_unbacked
            route = Route(
                # Unbacked: were it 1 row to torch.compile, autograd would sum the gradient that is still on its way.
                send=_torch.mark_unbacked(on_device(np.concatenate(sent), device), 0),
                order=mark(places, 0),
                send_sizes=tuple(size(len(at), device) for at in sent),
                recv_sizes=tuple(
                    size(n, device) for n in np.bincount(sender[mine], minlength=plan.num_groups).tolist()
                ),
                spare=self.tables == "flex",
            )
            stages.append(self._piece(name, keys, spare, route=route))
        return tuple(stages)

    def _spare(self, num_keys: int) -> int:
        """Keys that no span reads, added so that one compiled flex kernel serves plans whose K/V lengths differ."""
        if self.tables != "flex":
            return 0
        from spanwise.attention.kernels.flex import kv_capacity

        return kv_capacity(num_keys, FLEX_BLOCK_SIZE) - num_keys

    def _tensors(self, mask: SpanMask, num_spans: int, key_tokens: np.ndarray) -> dict[str, Any]:
        built: Any = None
        # All stages get the same number of spans, and never one that alone would be a constant to torch.compile.
        width = max(2, num_spans)
        if self.tables == "varlen":
            from spanwise.attention.kernels._segments import cut_rounds
            from spanwise.attention.kernels.varlen import VarlenTables

            built = VarlenTables.from_segments(cut_rounds(mask.start, mask.end, key_tokens.shape[1]), self.device)
        if self.tables == "flex":
            from spanwise.attention.kernels.flex import FlexTables, pad_spans
            from spanwise.masks.blocks import block_tables

            width = pad_spans(num_spans)
            # Over the spare keys too: the last block of the shorter mask may be full where spare keys must not be read.
            built = FlexTables.from_numpy(
                block_tables(mask.start, mask.end, key_tokens.shape[1], FLEX_BLOCK_SIZE), self.device
            )
        spare = width - mask.num_spans
        start, end = (on_device(np.pad(x, ((0, 0), (0, spare), (0, 0))), self.device) for x in (mask.start, mask.end))
        if self.tables != "flex":  # the flex kernel needs a constant number of queries
            for x in (start, end):
                _torch.mark_dynamic(_torch.mark_dynamic(x, 1), 2)
        kv_pos = _torch.mark_dynamic(on_device(key_tokens.astype(np.int32), self.device), 1)
        return {"start": start, "end": end, "kv_pos": kv_pos, "tables": built}


def _pieces_received(sender: np.ndarray, rank: int, num_pieces: int, block_size: int) -> np.ndarray:
    """In which piece each token comes to `rank`; each sender's tokens are in the order in which it counts them."""
    by_sender = np.argsort(sender, kind="stable")
    count = np.bincount(sender)
    position = np.arange(len(sender)) - np.repeat(np.cumsum(count) - count, count)
    each = sender[by_sender]
    piece = np.empty(len(sender), dtype=np.int64)
    piece[by_sender] = piece_of(position, count[each], num_pieces, block_size, rank - each)
    return piece


def _one_after_another(masks: list[SpanMask]) -> SpanMask:
    """One mask whose queries and keys are those of the given ones, concatenated."""
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


def size(rows: int, device: torch.device) -> torch.Tensor:
    """A number as a shape. Unbacked, for a graph that was traced for 0 or 1 row must serve any number."""
    return _torch.mark_unbacked(torch.empty(rows, 0, device=device), 0)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; to an accelerator through pinned memory, so that the host need not wait."""
    x = torch.from_numpy(array)
    if array.size <= 1:  # numpy gives these any stride, and torch.compile would compile again for another one
        x = x.clone(memory_format=torch.contiguous_format)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
