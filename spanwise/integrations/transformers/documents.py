"""Documents of a Hugging Face batch: which of its ``B * S`` tokens are kept, and where documents start among them.

A batch is padded (`attention_mask`), packed (`cu_seq_lens_q`, `seq_idx`, `position_ids` that start anew), or neither:
then each row is a document.
"""

# B rows, S tokens a row, N tokens that are kept

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

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
            rows in front, ``[4, B, S]``, the first counts), where a document starts wherever they do not grow;
            ``seq_idx`` ``[B, S]``, the number of each token's document. Position ids that skip numbers need one of
            the other descriptions, and ``seq_idx`` may stand beside one that agrees with it.

    Raises:
        ValueError: no tokens, shapes that do not match, padding inside a row, or descriptions that contradict.

    >>> batch = {"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> find_documents(batch).cu_seqlens
    array([0, 3, 5])
    """
    _check_tensors(batch)
    rows, length = shape_of(batch)
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 0] = True
    valid = _valid(batch.get("attention_mask"), rows, length)
    offsets, positions = batch.get("cu_seq_lens_q"), text_positions(batch.get("position_ids"))
    keys = batch.get("cu_seq_lens_k")
    if keys is not None and (offsets is None or torch.as_tensor(keys).tolist() != torch.as_tensor(offsets).tolist()):
        raise ValueError(
            "cu_seq_lens_k is not cu_seq_lens_q: context parallelism takes documents that attend to themselves; pass "
            "the same offsets, or cu_seq_lens_q alone"
        )
    if offsets is not None:
        starts.view(-1)[_checked_offsets(offsets, rows * length)] = True
    steps, changes = _steps(positions, rows, length), _changes(batch.get("seq_idx"), rows, length)
    if valid is None:
        if offsets is None and steps is not None:
            _check_no_skip(steps)
            starts |= steps < 1
        elif offsets is None and changes is not None:
            starts |= changes
        _check_seq_idx(changes, starts)
        return Documents(rows, length, None, _offsets(starts.flatten()))
    if offsets is not None:
        raise ValueError(
            "the batch has both attention_mask and cu_seq_lens_q; leave attention_mask out where it is packed"
        )
    _check_seq_idx(changes, ~(valid & torch.nn.functional.pad(valid, (1, -1))))
    if steps is not None:
        inside = (steps < 1) & valid & torch.nn.functional.pad(valid, (1, -1))
        if inside.any():
            row, token = inside.nonzero()[0].tolist()
            raise ValueError(
                f"position_ids start anew at token {token} of row {row}, and attention_mask says that the row is one "
                f"document; leave attention_mask out if the batch is packed"
            )
    starts = valid & ~torch.nn.functional.pad(valid, (1, -1))
    keep = valid.flatten().nonzero().flatten()
    return Documents(rows, length, keep if len(keep) < rows * length else None, _offsets(starts.flatten()[keep]))


def _check_tensors(batch: Mapping[str, Any]) -> None:
    """Raise ValueError for lists and arrays, which only a collator makes a batch of."""
    for name in ("input_ids", "inputs_embeds", "position_ids", "seq_idx", "labels", "shift_labels"):
        if batch.get(name) is not None and not isinstance(batch[name], torch.Tensor):
            raise ValueError(
                f"{name} must be a tensor, got a {type(batch[name]).__name__}; collate the batch before, as with "
                f"tokenizer.pad(…, return_tensors='pt')"
            )


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


def _valid(mask: Any, rows: int, length: int) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise ValueError(
            f"attention_mask must be a tensor [B, S] = {(rows, length)}, 1 for tokens and 0 for padding, got a "
            f"{type(mask).__name__}; masks of the model's kinds of layers follow from its config"
        )
    if tuple(mask.shape) != (rows, length):
        raise ValueError(
            f"attention_mask must be [B, S] = {(rows, length)}, 1 for tokens and 0 for padding, got shape "
            f"{tuple(mask.shape)}; for other masks make a plan with spanwise.make_plan and pass it to prepare"
        )
    mask = mask.detach().cpu()
    valid = mask.bool()
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"attention_mask must hold 0 and 1, got {mask.unique().tolist()[:8]}")
    runs = (valid & ~torch.nn.functional.pad(valid, (1, -1))).sum(dim=1)
    if (runs > 1).any():
        raise ValueError(
            f"attention_mask has padding between tokens of row {int((runs > 1).nonzero()[0])}; padding may be on the "
            f"left and right of a row only"
        )
    if not valid.any():
        raise ValueError("attention_mask is 0 everywhere: the batch has no token")
    return valid


def _checked_offsets(offsets: Any, total: int) -> torch.Tensor:
    """Starts of documents, without empty ones."""
    offsets = torch.as_tensor(offsets).detach().flatten().long().cpu()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or (offsets.diff() < 0).any():
        raise ValueError(f"cu_seq_lens_q must ascend from 0 to the batch's {total} tokens, got {offsets.tolist()[:16]}")
    return offsets[:-1][offsets.diff() > 0]


def _steps(positions: torch.Tensor | None, rows: int, length: int) -> torch.Tensor | None:
    """int64 ``[B, S]``: each position minus its predecessor in the row; 1 at the first token."""
    if positions is None:
        return None
    if positions.shape[1] != length or positions.shape[0] not in (1, rows):
        raise ValueError(f"position_ids must be [B, S] = {(rows, length)}, got shape {tuple(positions.shape)}")
    return torch.nn.functional.pad(positions.detach().cpu().diff(dim=-1), (1, 0), value=1).expand(rows, -1)


def _check_no_skip(steps: torch.Tensor) -> None:
    """Raise ValueError for positions that skip numbers, as long documents are trained on in some methods."""
    if (steps > 1).any():
        row, token = (steps > 1).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids grow by {int(steps[row, token])} at token {token} of row {row}, where a document may start "
            f"or go on; pass an attention_mask of ones if each row is one document, or cu_seq_lens_q"
        )


def _changes(seq_idx: torch.Tensor | None, rows: int, length: int) -> torch.Tensor | None:
    """bool ``[B, S]``: whether a token's document is not that of its predecessor in the row."""
    if seq_idx is None:
        return None
    if tuple(seq_idx.shape) != (rows, length):
        raise ValueError(f"seq_idx must be [B, S] = {(rows, length)}, got shape {tuple(seq_idx.shape)}")
    return torch.nn.functional.pad(seq_idx.detach().cpu().diff(dim=-1) != 0, (1, 0))


def _check_seq_idx(changes: torch.Tensor | None, starts: torch.Tensor) -> None:
    """Raise ValueError where `seq_idx` changes inside a document that another description tells."""
    if changes is not None and (changes & ~starts).any():
        row, token = (changes & ~starts).nonzero()[0].tolist()
        raise ValueError(
            f"seq_idx changes at token {token} of row {row}, where no document starts by the rest of the batch; leave "
            f"out what does not describe its documents"
        )


def _offsets(starts: torch.Tensor) -> np.ndarray:
    return np.concatenate([starts.nonzero().flatten().numpy(), [len(starts)]]).astype(np.int64)
