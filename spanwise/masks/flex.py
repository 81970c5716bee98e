"""FlexAttention's masks: mask_mod and BlockMask from span arrays, and span arrays from a mask_mod or a BlockMask.

The only module of this folder that needs torch; `SpanMask`'s methods import it when called. Span arrays are canonical
(see `spans`). Shapes in names: B batch, H heads, T tiles, Q query rows, K keys, N listed blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def span_mask_mod(mask: SpanArrays, device: torch.device | str) -> MaskMod:
    """A FlexAttention mask_mod that reads copies of the spans on the device; of batch 1 it ignores the batch index.

    It captures tensors, not their values, so that all masks of the same shapes share one compiled kernel.
    """
    start, end = torch.tensor(mask.start, device=device), torch.tensor(mask.end, device=device)
    batched = start.shape[0] > 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b if batched else 0
        inside = (start[row, 0, q_idx] <= kv_idx) & (kv_idx < end[row, 0, q_idx])
        for j in range(1, start.shape[1]):
            inside = inside | ((start[row, j, q_idx] <= kv_idx) & (kv_idx < end[row, j, q_idx]))
        return inside

    return mask_mod


def to_block_mask(mask: SpanArrays, device: torch.device | str, block_size: int) -> BlockMask:
    """A ``BlockMask`` with one head and its transposed lists, without evaluating a cell."""
    tables = block_tables(mask, block_size)
    lists: dict[str, Any] = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}
    # Not BlockMask.from_kv_blocks: it recomputes the transposed lists from a dense table.
    return BlockMask(
        seq_lengths=(mask.q_len, mask.kv_len),
        **lists,
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=span_mask_mod(mask, device),
    )


# ---------------------------------------------------------------- FlexAttention -> spans


def _evaluate(
    mask_mod: MaskMod, b: Int64, q: Int64, k: Int64, shape: tuple[int, int], lengths: tuple[int, int], device: Any
) -> Bool:
    """Cells of T tiles of ``shape``, bool ``[T, Q, K]``; tile t has its corner at (q[t], k[t]) of batch row ``b[t]``.

    Cells beyond ``lengths`` are False. There mask_mod is evaluated at the last existing cell instead, so that it never
    indexes out of its tables. Torch's ``create_mask`` evaluates; the tiles stand in for its batch.
    """
    (rows, columns), (q_len, kv_len) = shape, lengths
    b_T, q_T, k_T = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (b, q, k))

    def tile_mod(tile: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q_idx, kv_idx = q_T[tile] + i, k_T[tile] + j
        found = mask_mod(b_T[tile], h, q_idx.clamp(max=q_len - 1), kv_idx.clamp(max=kv_len - 1))
        return found & (q_idx < q_len) & (kv_idx < kv_len)

    return np.asarray(create_mask(tile_mod, len(b), 1, rows, columns, device)[:, 0].cpu().numpy())


def _spans_of_tiles(
    mask_mod: MaskMod, b: Int64, q: Int64, k: Int64, size: tuple[int, int], lengths: tuple[int, int], device: Any
) -> Iterator[tuple[Int64, Int64, Int64]]:
    """Spans (row ``b * q_len + i``, start, end) inside tiles, by rows; about `_CELLS_AT_ONCE` cells at a time."""
    if not len(b) or 0 in lengths:
        return
    _check_mask_mod(mask_mod, device)
    q_len, height, columns = lengths[0], min(size[0], lengths[0]), min(size[1], lengths[1])
    rows = max(1, min(height, _CELLS_AT_ONCE // columns))
    tiles = max(1, _CELLS_AT_ONCE // (rows * columns))
    for shift in range(0, height, rows):  # strips of rows, where a tile is too large
        inside = np.flatnonzero(q + shift < q_len)
        strip = min(rows, size[0] - shift)
        for low in range(0, len(inside), tiles):
            of = inside[low : low + tiles]
            cells = _evaluate(mask_mod, b[of], q[of] + shift, k[of], (strip, columns), lengths, device)
            line, start, end = spans.true_runs(cells.reshape(-1, columns))
            tile, i = np.divmod(line, strip)
            yield (b * q_len + q + shift)[of][tile] + i, start + k[of][tile], end + k[of][tile]


def _check_mask_mod(mask_mod: Any, device: Any) -> None:
    """Refuses a mask_mod that vmap cannot evaluate, and one that depends on the head: a span mask has no heads."""

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
            raise ValueError("mask_mod depends on the head index; a SpanMask is one mask for all heads") from error
        return out

    try:
        create_mask(probe, 1, 1, 1, 1, device)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"mask_mod cannot be evaluated as FlexAttention does, under vmap: {error}") from error


def _canonical(
    found: list[tuple[Int64, Int64, Int64]], batch: int, q_len: int, kv_len: int
) -> tuple[Int32, Int32, int]:
    """Canonical arrays of single spans (row ``b * q_len + i``, start, end) in any order, and `kv_len`."""
    nothing = np.zeros(0, np.int64)
    row, start, end = (np.concatenate(column) for column in zip((nothing, nothing, nothing), *found, strict=True))
    order = np.argsort(row * (kv_len + 1) + start, kind="stable")
    return *spans.from_single_spans(row[order], start[order], end[order], batch, q_len), kv_len


def from_mask_mod(
    mask_mod: MaskMod,
    q_length: SupportsIndex,
    kv_length: SupportsIndex,
    most_spans: SupportsIndex,
    batch: SupportsIndex,
    device: torch.device | str,
) -> tuple[Int32, Int32, int]:
    """``start``, ``end`` and ``kv_len`` of the mask; see :meth:`SpanMask.from_mask_mod`."""
    q_len, kv_len = lengths = check_length(q_length, "q_len"), check_length(kv_length, "kv_len")
    max_spans, batch_size = check_positive(most_spans, "max_spans"), check_positive(batch, "batch_size")
    rows, corner, found = np.arange(batch_size), np.zeros(batch_size, np.int64), []
    # A tile for each batch row.
    for row, start, end in _spans_of_tiles(mask_mod, rows, corner, corner, lengths, lengths, device):
        of, most = np.unique(row, return_counts=True)
        for at in np.flatnonzero(most > max_spans)[:1]:
            raise ValueError(
                f"row {of[at] % q_len} of mask_mod needs {most[at]} spans of keys, more than max_spans = {max_spans}"
            )
        found.append((row, start, end))
    return _canonical(found, batch_size, q_len, kv_len)


def from_block_mask(block_mask: Any) -> tuple[Int32, Int32, int]:
    """``start``, ``end`` and ``kv_len`` of the mask; see :meth:`SpanMask.from_block_mask`."""
    if not isinstance(block_mask, BlockMask):
        raise ValueError(f"from_block_mask takes a FlexAttention BlockMask, got {type(block_mask).__name__}")
    (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    partial, full = _tiles(block_mask)

    # Full blocks: adjacent ones become one span, then each span is repeated for the rows of its block.
    batch, q_blocks, kv_blocks = full.shape
    line, first_block, stop_block = spans.true_runs(full.reshape(batch * q_blocks, kv_blocks))
    b, q_block = np.divmod(line, max(q_blocks, 1))
    first_row = q_block * q_size
    height = np.minimum(first_row + q_size, q_len) - first_row
    nth = np.arange(int(height.sum())) - np.repeat(np.cumsum(height) - height, height)
    row = np.repeat(b * q_len + first_row, height) + nth
    start, end = first_block * kv_size, np.minimum(stop_block * kv_size, kv_len)

    # Partial blocks: mask_mod is evaluated inside them only.
    b, q_block, kv_block = np.nonzero(partial)
    corners, device = (b, q_block * q_size, kv_block * kv_size), block_mask.kv_num_blocks.device
    inside = _spans_of_tiles(block_mask.mask_mod, *corners, (q_size, kv_size), (q_len, kv_len), device)
    return _canonical([(row, np.repeat(start, height), np.repeat(end, height)), *inside], batch, q_len, kv_len)


def _tiles(block_mask: BlockMask) -> tuple[Bool, Bool]:
    """Partial and full tiles, bool ``[B, num_q_blocks, num_kv_blocks]`` each; refuses heads that differ."""
    (q_len, kv_len), (q_size, kv_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    q_blocks, kv_blocks = num_blocks(q_len, q_size), num_blocks(kv_len, kv_size)
    times = np.zeros((2, *block_mask.kv_indices.shape[:-1], kv_blocks), np.int8)
    for table, kind in zip(times, ("kv", "full_kv"), strict=True):
        count, index = (getattr(block_mask, f"{kind}_{name}") for name in ("num_blocks", "indices"))
        if count is None or index is None:
            continue
        listed = index.detach().cpu().numpy()
        at = np.nonzero(np.arange(listed.shape[-1]) < count.detach().cpu().numpy()[..., None])
        block = listed[at]
        if listed.shape[-2] != q_blocks or block.min(initial=0) < 0 or block.max(initial=0) >= max(kv_blocks, 1):
            raise ValueError(
                f"the BlockMask must list key blocks of [0, {kv_blocks}) for {q_blocks} query blocks, got "
                f"{listed.shape[-2]} query blocks, key blocks {block.min(initial=0)} to {block.max(initial=0)}"
            )
        np.add.at(table, (*at[:-1], block), 1)
    while times.ndim < 5:  # without dims of batch or heads
        times = times[:, None]
    for b, h, i, j in np.argwhere(times.sum(axis=0) > 1)[:1].tolist():
        raise ValueError(f"the BlockMask lists key block {j} of query block {i} (row {b}, head {h}) more than once")
    for part, b, h, i, j in np.argwhere(times != times[:, :, :1])[:1].tolist():
        raise ValueError(
            f"a SpanMask is one mask for all heads, but in the BlockMask head {h} differs from head 0 in "
            f"{('partial', 'full')[part]} block {(i, j)} of batch row {b}; convert each group of equal heads separately"
        )
    return times[0, :, 0] > 0, times[1, :, 0] > 0
