"""Documents of a Hugging Face batch: which of its ``B * S`` tokens are kept, and where documents start among them.

A batch is padded (`attention_mask`), packed (`cu_seq_lens_q`, or `position_ids` that start anew), or neither: then each
row is a document.
"""

# B rows, S tokens a row, N tokens that are kept

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import spanwise

# Describe the documents of the whole batch; wrong for a shard.
DESCRIPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch.

    Attributes:
        rows, length: B and S.
        keep: int64 ``[N]`` in host memory, kept tokens of the flattened batch, ascending; None for all.
        cu_seqlens: int64 ``[num_docs + 1]``, offsets among the kept tokens.
    """

    rows: int
    length: int
    keep: torch.Tensor | None
    cu_seqlens: np.ndarray

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[1, N]``: the position of each kept token in its document."""
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return torch.from_numpy(np.arange(self.cu_seqlens[-1]) - starts)[None]

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, S, …]`` from kept tokens ``[N, …]``; 0 at padding. Differentiable."""
        if self.keep is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.keep.to(x.device), x)
        return x.unflatten(0, (self.rows, self.length))

    def flat(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Kept tokens of `x` ``[…, B, S, …]``, whose rows are dim `dim`, as ``[…, 1, N, …]``."""
        if x.shape[dim] == 1 and self.rows > 1:  # positions that are the same in every row
            x = x.expand(*x.shape[:dim], self.rows, *x.shape[dim + 1 :])
        x = x.flatten(dim, dim + 1).unsqueeze(dim)
        return x if self.keep is None else x.index_select(dim + 1, self.keep.to(x.device))


def find_documents(batch: Mapping[str, Any]) -> Documents:
    """The documents of `batch`; pure.

    Args:
        batch: ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, D]``, and at most one description of documents:
            ``attention_mask`` ``[B, S]``, 1 for tokens and 0 for padding, on the left or right of each row;
            ``cu_seq_lens_q``, offsets in the flattened batch; ``position_ids`` ``[B, S]`` or ``[1, S]`` (with four
            rows in front, ``[4, B, S]``, the first counts), where a document starts wherever a number does not follow
            its predecessor.

    Raises:
        ValueError: no tokens, shapes that do not match, padding inside a row, or descriptions that contradict.

    >>> batch = {"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> find_documents(batch).cu_seqlens
    array([0, 3, 5])
    """
    rows, length = shape_of(batch)
    offsets, positions = batch.get("cu_seq_lens_q"), text_positions(batch.get("position_ids"))
    restarts = None if positions is None else _restarts(positions, rows, length)
    if batch.get("attention_mask") is not None:
        if offsets is not None:
            raise ValueError(
                "the batch has both attention_mask and cu_seq_lens_q; leave attention_mask out where it is packed"
            )
        return _padded(batch["attention_mask"], restarts, rows, length)
    starts = np.arange(rows + 1) * length
    if offsets is not None:
        starts = np.union1d(starts, _checked_offsets(offsets, rows * length))
    return Documents(rows, length, None, starts if restarts is None or offsets is not None else restarts)


def _padded(mask: torch.Tensor, restarts: np.ndarray | None, rows: int, length: int) -> Documents:
    """The documents of a padded batch, one a row.

    Args:
        restarts: where positions start anew in the flattened batch, with its end.
    """
    if tuple(mask.shape) != (rows, length):
        raise ValueError(
            f"attention_mask must be [B, S] = {(rows, length)}, 1 for tokens and 0 for padding, got shape "
            f"{tuple(mask.shape)}; for other masks make a plan with spanwise.make_plan and pass it to prepare"
        )
    mask = mask.detach().cpu()
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"attention_mask must hold 0 and 1, got {mask.unique().tolist()[:8]}")
    packing = spanwise.Packing.from_attention_mask(mask.bool())
    valid = packing.valid_q
    if not valid.any():
        raise ValueError("attention_mask is 0 everywhere: the batch has no token")
    for token in () if restarts is None else restarts[:-1]:
        if token % length and valid[token] and valid[token - 1]:
            raise ValueError(
                f"position_ids start anew at token {token % length} of row {token // length}, and attention_mask says "
                f"that the row is one document; leave attention_mask out if the batch is packed"
            )
    keep = None if valid.all() else torch.from_numpy(np.flatnonzero(valid))
    return Documents(rows, length, keep, np.unique(np.append(0, np.cumsum(packing.q_lens))))


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """B and S of a batch."""
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        x = batch.get(name)
        if x is not None:
            if x.dim() != dims or 0 in x.shape[:2]:
                raise ValueError(
                    f"{name} must be [batch, tokens{', dim' * (dims - 2)}], not empty; got {tuple(x.shape)}"
                )
            return x.shape[0], x.shape[1]
    raise ValueError(f"the batch needs input_ids or inputs_embeds; it has {sorted(batch)}")


def text_positions(positions: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, S]`` positions along the text, or None where `positions` does not hold them."""
    if positions is None or positions.dim() == 2:
        return positions
    if positions.dim() != 3 or positions.shape[0] not in (3, 4):
        raise ValueError(f"position_ids must be [B, S], [3, B, S] or [4, B, S], got shape {tuple(positions.shape)}")
    return positions[0] if positions.shape[0] == 4 else None  # time, height and width do not count tokens


def _checked_offsets(offsets: Any, total: int) -> np.ndarray:
    """Offsets of documents in the flattened batch."""
    offsets = torch.as_tensor(offsets).detach().flatten().long().cpu()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or (offsets.diff() < 0).any():
        raise ValueError(f"cu_seq_lens_q must ascend from 0 to the batch's {total} tokens, got {offsets.tolist()[:16]}")
    return offsets.numpy()


def _restarts(positions: torch.Tensor, rows: int, length: int) -> np.ndarray:
    """Offsets in the flattened batch: a document starts where a position does not follow its predecessor in the row."""
    if positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise ValueError(f"position_ids must be [B, S] = {(rows, length)}, got shape {tuple(positions.shape)}")
    return spanwise.Packing.from_position_ids(positions.expand(rows, -1)).q_offsets
