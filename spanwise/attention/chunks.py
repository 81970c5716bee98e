"""ChunkBuilder: cuts the K/V that a rank reads into chunks, each with the mask of its queries over it.

For each mask `rank_plan` calls ``exchange.chunks(builder, mask)``: the rank's own keys first, then those that arrive.
Everything follows from the plan. Index tensors hold the rows that travel; shapes of empty tensors carry sizes.
"""

# B layout rows (1, or the batch), T tokens of this rank (its group under Ulysses), n spans of a row

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spanwise import _torch
from spanwise.attention.kernels.base import Chunk, Kernel
from spanwise.layouts.runs import ragged_arange
from spanwise.layouts.traffic import num_rows, row_of
from spanwise.masks.arrays import Int64
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan_data import PlanData


class ChunkBuilder:
    """Builds the chunks of one group of a plan, for an exchange to combine.

    Args:
        kernel: the kernel that will attend; decides tables and rounded sizes of the chunks.
    """

    def __init__(self, plan: PlanData, group: int, device: torch.device, kernel: Kernel) -> None:
        self.plan, self.group, self.device, self.kernel = plan, group, device, kernel

    def rows(self, mask: str) -> int:
        """Batch rows that differ in mask or layout."""
        return num_rows(self.plan.mask(mask), self.plan.layout)

    def held(self, group: int, rows: int) -> list[Int64]:
        """Runs of the keys that a group holds, for each of `rows` batch rows."""
        layout = self.plan.kv_groups
        return [layout.runs(group, row_of(layout, row)) for row in range(rows)]

    def own(self, mask: str) -> Chunk:
        """The chunk of the keys that the group holds, batch rows concatenated."""
        return self.chunk(mask, self.held(self.group, self.rows(mask)))

    def chunk(self, mask: str, keys: Sequence[Int64], route: Any = None, *, spare: int = 0) -> Chunk:
        """The chunk of the key runs of each batch row, the rows concatenated along one dim.

        Rows receive different numbers of keys, so stacked rows would not be rectangular.

        Args:
            keys: for each of `rows(mask)` batch rows, runs int64 ``[n, 2]``.
            route: how they arrive; None for own keys.
            spare: keys to add that no span reads, see `spare`.
        """
        of, queries, rows = self.plan.mask(mask), self.plan.groups, len(keys)
        local = _one_after_another(
            [
                of.row(row_of(of, row)).select(queries.runs(self.group, row_of(queries, row)), keys[row])
                for row in range(rows)
            ]
        )
        tensors = self._tensors(local, of.num_spans, [np.concatenate(keys)], spare)
        return Chunk(**tensors, route=route, rows=rows, flat=rows > 1)

    def chunk_side_by_side(self, mask: str, keys: Sequence[Int64], route: Any = None, *, spare: int = 0) -> Chunk:
        """The chunk of equally many keys of each layout row, batch rows stacked.

        Spare keys repeat a real token, so that they are finite.
        """
        of, rows = self.plan.mask(mask), len(keys)
        queries = [self.plan.groups.runs(self.group, row) for row in range(rows)]
        if rows == 1:
            local = of.select(queries[0], keys[0])
        else:
            each = [of.row(row_of(of, row)) for row in range(rows)]
            local = SpanMask.stack([m.select(queries[row], keys[row]) for row, m in enumerate(each)])
        tensors = self._tensors(local, of.num_spans, keys, spare)
        return Chunk(**tensors, route=route, rows=max(rows, of.batch_size), flat=False)

    def spare(self, num_keys: int) -> int:
        """Keys to add so that one compiled kernel serves plans whose K/V lengths differ; no span reads them."""
        return self.kernel.capacity(num_keys) - num_keys

    @property
    def has_spare(self) -> bool:
        """Whether chunks have spare keys."""
        return self.kernel.pads_keys

    def _tensors(self, mask: SpanMask, num_spans: int, keys: Sequence[Int64], spare: int) -> dict[str, Any]:
        key_tokens = index_rows(keys, spare, dtype=np.int32)
        # All chunks get the same number of spans, never 1: see `Kernel.num_spans`.
        width, num_keys = self.kernel.num_spans(num_spans), key_tokens.shape[1]
        if mask.kv_len != num_keys:
            # Over the spare keys too: the last block of the shorter mask may be full where spare keys must not be read.
            mask = SpanMask(mask.start, mask.end, num_keys)
        built = self.kernel.tables(mask, self.device)
        added = width - mask.num_spans
        start, end = (on_device(np.pad(x, ((0, 0), (0, added), (0, 0))), self.device) for x in (mask.start, mask.end))
        if self.kernel.dynamic_queries:
            for x in (start, end):
                _torch.mark_dynamic(_torch.mark_dynamic(x, 1), 2)
        kv_pos = _torch.mark_dynamic(on_device(key_tokens, self.device), 1)
        return {"start": start, "end": end, "kv_pos": kv_pos, "tables": built}


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
