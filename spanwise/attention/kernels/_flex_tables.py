"""The form in which FlexAttention takes a span mask: its non-empty blocks, and the sizes that few graphs share.

Built with a rank plan; `flex` reads it. Letters of shapes: see `base`; A is the number of query
blocks, C the number of key blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from spanwise import _torch
from spanwise.masks.blocks import BlockTables

Mod = Callable[..., Tensor]

#: Tokens of a block, in both directions.
BLOCK_SIZE = 128


def pad_spans(num_spans: int) -> int:
    """Spans per row after padding with empty ones: 1, 4, 8, 16, …, so that few numbers are compiled.

    The kernel unrolls its loop over spans, so each number needs another graph. One span is by far the most frequent
    case (causal, documents, windows) and stays alone; two to four share a graph. Pad all problems of one compiled
    region (local and remote keys) to the number of the whole mask. Otherwise every combination is a graph.
    """
    if num_spans <= 1:
        return 1
    return max(4, 1 << (num_spans - 1).bit_length())


def kv_capacity(num_keys: int) -> int:
    """Rows of a K/V buffer for ``num_keys`` keys: whole blocks, at least two.

    torch.compile treats sizes 0 and 1 as constants, so a buffer of a single block would need another graph. Whole
    blocks spare the CUDA kernel its bounds checks.
    """
    return max(2, -(-num_keys // BLOCK_SIZE)) * BLOCK_SIZE


@dataclasses.dataclass(frozen=True)
class FlexTables:
    """Non-empty blocks of a span mask, as FlexAttention's ``BlockMask`` lists them; a pytree of int32 tensors.

    A *full* block is read in every cell that exists, so the kernel skips the mask there; *partial* blocks are the
    other non-empty ones. Build them for the length of the K/V buffer (``kv_capacity``), not for a shorter mask:
    the last block of a shorter mask may be full although its spare rows must not be read.

    Attributes:
        kv_num_blocks: ``[B or 1, 1, A]``, partial key blocks of each query block.
        kv_indices: ``[B or 1, 1, A, C]``, which ones; the first ``kv_num_blocks`` entries count.
        full_kv_num_blocks, full_kv_indices: the same for full blocks.
        q_num_blocks: ``[B or 1, 1, C]``, partial query blocks of each key block, for the backward.
        q_indices: ``[B or 1, 1, C, A]``.
        full_q_num_blocks, full_q_indices: the same for full blocks.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor

    @classmethod
    def from_numpy(cls, tables: BlockTables, device: torch.device | str = "cpu") -> FlexTables:
        """Copies of the arrays on ``device``, marked for torch.compile as varying in the number of key blocks."""
        copied = cls(
            **{f.name: torch.tensor(getattr(tables, f.name), dtype=torch.int32) for f in dataclasses.fields(cls)}
        )
        return copied.to(device)

    def to(self, device: torch.device | str) -> FlexTables:
        """Copies on ``device``, marked like those of :meth:`from_numpy`."""
        moved = FlexTables(*(getattr(self, f.name).to(device) for f in dataclasses.fields(self)))
        for x, dim in (
            (moved.kv_indices, 3),
            (moved.full_kv_indices, 3),
            (moved.q_num_blocks, 2),
            (moved.q_indices, 2),
            (moved.full_q_num_blocks, 2),
            (moved.full_q_indices, 2),
        ):
            _torch.mark_dynamic(x, dim)
        return moved


_torch.register_pytree_dataclass(FlexTables)


def block_mask(q_len: int, kv_len: int, tables: FlexTables, mask_mod: Mod) -> BlockMask:
    """``tables`` as torch's BlockMask."""
    # The constructor, not from_kv_blocks, which derives the transposed tables, densely.
    return BlockMask(
        (q_len, kv_len),
        kv_num_blocks=tables.kv_num_blocks,
        kv_indices=tables.kv_indices,
        full_kv_num_blocks=tables.full_kv_num_blocks,
        full_kv_indices=tables.full_kv_indices,
        q_num_blocks=tables.q_num_blocks,
        q_indices=tables.q_indices,
        full_q_num_blocks=tables.full_q_num_blocks,
        full_q_indices=tables.full_q_indices,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=mask_mod,
    )
