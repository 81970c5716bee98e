"""FlexAttention's masks: mask_mod and BlockMask from span arrays, and span arrays from a mask_mod or a BlockMask.

The only module of this folder that needs torch; `SpanMask`'s methods import it when called. Span arrays are canonical
(see `spans`). Shapes in names: B batch, H heads, T tiles, Q query rows, K keys, N listed blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from spanwise.masks import spans
from spanwise.masks.arrays import Bool, Int32, Int64
from spanwise.masks.blocks import block_tables, num_blocks
from spanwise.masks.checks import check_length, check_positive
from spanwise.masks.span_arrays import SpanArrays

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_CELLS_AT_ONCE = 2**21
"""Cells of a mask_mod evaluated at a time: its int64 temporaries stay at 16 MiB each."""


# ---------------------------------------------------------------- spans -> FlexAttention


def span_mask_mod(start: Tensor, end: Tensor) -> MaskMod:
    """A FlexAttention mask_mod that reads span tensors.

    It captures the tensors, not their values, so that all masks of the same shapes share one compiled kernel.

    Args:
        start, end: int32 ``[B or 1, num_spans, q_len]``, contiguous. With batch 1 the batch index is ignored.
    """
    batched = start.shape[0] > 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b if batched else 0
        inside = (start[row, 0, q_idx] <= kv_idx) & (kv_idx < end[row, 0, q_idx])
        for j in range(1, start.shape[1]):
            inside = inside | ((start[row, j, q_idx] <= kv_idx) & (kv_idx < end[row, j, q_idx]))
        return inside

    return mask_mod


def span_tensors(start: Int32, end: Int32, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Copies of ``start`` and ``end`` on the device, int32 ``[batch, num_spans, q_len]``."""
    return torch.tensor(start, device=device), torch.tensor(end, device=device)


def to_block_mask(mask: SpanArrays, device: torch.device | str, block_size: int) -> BlockMask:
    """A ``BlockMask`` with one head and its transposed lists, without evaluating a cell."""
    tables = block_tables(mask, block_size)
    names = [field.name for field in dataclasses.fields(tables)]
    lists: dict[str, Any] = {name: torch.from_numpy(getattr(tables, name)).to(device) for name in names}
    # Not BlockMask.from_kv_blocks: it recomputes the transposed lists from a dense table.
    return BlockMask(
        seq_lengths=(mask.q_len, mask.kv_len),
        **lists,
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=span_mask_mod(*span_tensors(mask.start, mask.end, device)),
    )


# ---------------------------------------------------------------- evaluation of a mask_mod


def _evaluate(
    mask_mod: MaskMod, b: Int64, q: Int64, k: Int64, shape: tuple[int, int], lengths: tuple[int, int], device: Any
) -> Bool:
    """Cells of T tiles of ``shape``, bool ``[T, Q, K]``; tile t has its corner at (q[t], k[t]) of batch row ``b[t]``.

    Cells beyond ``lengths`` are False. There mask_mod is evaluated at the last existing cell instead, so that it never
    indexes out of its tables. Torch's ``create_mask`` evaluates; the tiles stand in for its batch.
    """
    rows, columns = shape
    b_T, q_T, k_T = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (b, q, k))
    last_q, last_k = lengths[0] - 1, lengths[1] - 1

    def tile_mod(tile: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask_mod(b_T[tile], h, (q_T[tile] + i).clamp(max=last_q), (k_T[tile] + j).clamp(max=last_k))

    cells_T1QK = create_mask(tile_mod, len(b), 1, rows, columns, device)
    cells = cells_T1QK[:, 0].cpu().numpy()
    if bool((q + rows > lengths[0]).any()):
        cells = cells & (q[:, None] + np.arange(rows) < lengths[0])[:, :, None]
    if bool((k + columns > lengths[1]).any()):
        cells = cells & (k[:, None] + np.arange(columns) < lengths[1])[:, None, :]
    return cells


def _check_mask_mod(mask_mod: Any, device: Any) -> None:
    """Refuses a mask_mod that vmap cannot evaluate, and one that depends on the head: a span mask has no heads."""
    if not callable(mask_mod):
        raise ValueError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}")

    def probe(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        out = mask_mod(b, h, q_idx, kv_idx)
        if not isinstance(out, Tensor) or out.dtype != torch.bool or out.dim() != 0:
            got = f"{out.dtype} of shape {list(out.shape)}" if isinstance(out, Tensor) else repr(out)
            raise ValueError(f"mask_mod must return one boolean for one cell, got {got}")
        cell = torch.zeros((), dtype=torch.int64, device=device)
        heads = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            # Map over the head alone. A result that does not depend on it stays unmapped, as out_dims=None requires.
            torch.vmap(lambda head: mask_mod(cell, head, cell, cell), out_dims=None)(heads)
        except ValueError as error:
            raise ValueError(
                "mask_mod depends on the head index; a SpanMask is one mask for all heads. Give one mask_mod for each "
                "group of heads that share a mask, and convert each to a mask"
            ) from error
        return out

    try:
        create_mask(probe, 1, 1, 1, 1, device)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"mask_mod cannot be evaluated as FlexAttention does, under vmap: {error}") from error


# ---------------------------------------------------------------- FlexAttention -> spans


class _FoundSpans:
    """Single spans as flat arrays, found in any order; `arrays` sorts them once."""

    def __init__(self, batch: int, q_len: int, kv_len: int) -> None:
        self.batch, self.q_len, self.kv_len = batch, q_len, kv_len
        nothing = np.zeros(0, np.int64)
        self._found: list[tuple[Int64, Int64, Int64]] = [(nothing, nothing, nothing)]

    def add(self, row: Int64, start: Int64, end: Int64) -> None:
        """Adds spans of rows ``b * q_len + i``."""
        self._found.append((row, start, end))

    def arrays(self) -> tuple[Int32, Int32, int]:
        """Canonical ``start, end`` and ``kv_len``."""
        row, start, end = (np.concatenate(column) for column in zip(*self._found, strict=True))
        order = np.argsort(row * (self.kv_len + 1) + start, kind="stable")
        return *spans.from_single_spans(row[order], start[order], end[order], self.batch, self.q_len), self.kv_len


def from_mask_mod(
    mask_mod: MaskMod,
    q_length: SupportsIndex,
    kv_length: SupportsIndex,
    most_spans: SupportsIndex,
    batch: SupportsIndex,
    device: torch.device | str,
) -> tuple[Int32, Int32, int]:
    """``start``, ``end`` and ``kv_len`` of the mask; see :meth:`SpanMask.from_mask_mod`."""
    q_len, kv_len = check_length(q_length, "q_len"), check_length(kv_length, "kv_len")
    max_spans, batch_size = check_positive(most_spans, "max_spans"), check_positive(batch, "batch_size")
    found = _FoundSpans(batch_size, q_len, kv_len)
    if not (q_len and kv_len):
        return found.arrays()
    _check_mask_mod(mask_mod, device)
    rows = max(1, min(q_len, _CELLS_AT_ONCE // kv_len))
    for b in range(batch_size):
        for first in range(0, q_len, rows):
            corner = np.array([b]), np.array([first]), np.array([0])
            cells = _evaluate(mask_mod, *corner, (min(rows, q_len - first), kv_len), (q_len, kv_len), device)[0]
            row, start, end = spans.true_runs(cells)
            most = np.bincount(row, minlength=1)
            if int(most.max()) > max_spans:
                at = int(most.argmax())
                raise ValueError(
                    f"row {first + at} of mask_mod needs {most[at]} spans of keys, more than max_spans = {max_spans}; "
                    f"raise max_spans if the mask really has that many gaps in a row (time and memory grow with it)"
                )
            found.add(row + (b * q_len + first), start, end)
    return found.arrays()


def from_block_mask(block_mask: Any) -> tuple[Int32, Int32, int]:
    """``start``, ``end`` and ``kv_len`` of the mask; see :meth:`SpanMask.from_block_mask`."""
    if not isinstance(block_mask, BlockMask):
        raise ValueError(f"from_block_mask takes a FlexAttention BlockMask, got {type(block_mask).__name__}")
    q_len, kv_len = block_mask.seq_lengths
    q_size, kv_size = block_mask.BLOCK_SIZE
    partial, full = _tiles(block_mask)
    found = _FoundSpans(len(full), q_len, kv_len)

    # Full blocks: adjacent ones become one span, then each span is repeated for the rows of its block.
    batch, q_blocks, kv_blocks = full.shape
    line, first_block, stop_block = spans.true_runs(full.reshape(batch * q_blocks, kv_blocks))
    b, q_block = np.divmod(line, max(q_blocks, 1))
    first_row, stop_row = q_block * q_size, np.minimum((q_block + 1) * q_size, q_len)
    height = stop_row - first_row
    nth = np.arange(int(height.sum())) - np.repeat(np.cumsum(height) - height, height)
    found.add(
        np.repeat(b * q_len + first_row, height) + nth,
        np.repeat(first_block * kv_size, height),
        np.repeat(np.minimum(stop_block * kv_size, kv_len), height),
    )

    # Partial blocks: mask_mod is evaluated inside them only.
    b, q_block, kv_block = np.nonzero(partial)
    device = block_mask.kv_num_blocks.device
    if len(b):
        _check_mask_mod(block_mask.mask_mod, device)
    columns = min(kv_size, kv_len)
    rows = max(1, min(q_size, q_len, _CELLS_AT_ONCE // max(columns, 1)))
    tiles = max(1, _CELLS_AT_ONCE // max(rows * columns, 1))
    for shift in range(0, min(q_size, q_len), rows):  # strips of rows, where a block is too large
        q, k = q_block * q_size + shift, kv_block * kv_size
        inside = np.flatnonzero(q < q_len)
        height_now = min(rows, q_size - shift)
        for some in np.split(inside, range(tiles, len(inside), tiles)) if len(inside) else []:
            corner = b[some], q[some], k[some]
            cells = _evaluate(block_mask.mask_mod, *corner, (height_now, columns), (q_len, kv_len), device)
            strip, start, end = spans.true_runs(cells.reshape(-1, columns))
            tile, i = np.divmod(strip, height_now)
            found.add(b[some][tile] * q_len + q[some][tile] + i, start + k[some][tile], end + k[some][tile])
    return found.arrays()


def _tiles(block_mask: BlockMask) -> tuple[Bool, Bool]:
    """Partial and full tiles, bool ``[B, num_q_blocks, num_kv_blocks]`` each; refuses heads that differ."""
    (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    q_blocks, kv_blocks = num_blocks(q_len, q_size), num_blocks(kv_len, kv_size)
    kinds = {"kv_indices": (block_mask.kv_num_blocks, block_mask.kv_indices)}
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        kinds["full_kv_indices"] = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    listed = []
    for name, (count, index) in kinds.items():
        count_BHQ = count.detach().cpu().numpy()
        index_BHQN = index.detach().cpu().numpy()
        while index_BHQN.ndim < 4:
            count_BHQ, index_BHQN = count_BHQ[None], index_BHQN[None]
        if index_BHQN.shape[2] != q_blocks:
            raise ValueError(
                f"{name} of the BlockMask has {index_BHQN.shape[2]} query blocks, but seq_lengths {(q_len, kv_len)} "
                f"and BLOCK_SIZE {(q_size, kv_size)} make {q_blocks}"
            )
        valid = np.arange(index_BHQN.shape[3]) < count_BHQ[..., None]
        if bool(((index_BHQN < 0) | (index_BHQN >= kv_blocks))[valid].any()):
            worst = int(index_BHQN[valid].max()) if int(index_BHQN[valid].min()) >= 0 else int(index_BHQN[valid].min())
            raise ValueError(f"{name} of the BlockMask names key block {worst}, but there are {kv_blocks}")
        times = np.zeros((*index_BHQN.shape[:3], kv_blocks), np.int8)
        at = np.nonzero(valid)
        np.add.at(times, (*at[:3], index_BHQN[at]), 1)
        listed.append(times)
    partial, full = listed[0], listed[1] if len(listed) == 2 else np.zeros_like(listed[0])
    twice = np.argwhere(partial + full > 1)
    if len(twice):
        b, h, i, j = twice[0].tolist()
        raise ValueError(
            f"the BlockMask lists key block {j} of query block {i} (batch row {b}, head {h}) more than once; list each "
            f"block once, as partial or as full"
        )
    for name, table in (("partial", partial), ("full", full)):
        other = np.argwhere(table != table[:, :1])
        if len(other):
            b, h, i, j = other[0].tolist()
            raise ValueError(
                f"a SpanMask is one mask for all heads, but in the BlockMask (H = {table.shape[1]}) head {h} differs "
                f"from head 0 in {name} block {(i, j)} of batch row {b}; convert each group of equal heads separately"
            )
    return partial[:, 0] > 0, full[:, 0] > 0
