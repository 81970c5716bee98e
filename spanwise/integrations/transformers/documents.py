"""Documents of a Hugging Face batch: which of its ``B * S`` tokens are kept, and where documents start among them.

A batch is padded (`attention_mask`), packed (`cu_seq_lens_q`, `seq_idx`, `position_ids` that start anew), a tree of
prefixes (`tree`), or none of these: then each row is a document.
"""

# B rows, S tokens a row, N tokens of the plan: those that are kept, and added ones

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
        keep: int64 ``[kept tokens]`` in host memory, indices in the flattened batch, ascending; None for all.
        cu_seqlens: int64 ``[num_docs + 1]``, offsets among the N tokens. Each added token is a document.
        added: number of tokens behind the kept ones, so that no rank is without a token.
        tree: of the N tokens; None without one. Then `cu_seqlens` says nothing of them.
    """

    rows: int
    length: int
    keep: torch.Tensor | None
    cu_seqlens: np.ndarray
    added: int = 0
    tree: spanwise.TokenTree | None = None

    @property
    def kept(self) -> int:
        """Number of tokens of the batch without padding."""
        return int(self.cu_seqlens[-1]) - self.added

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[1, N]``: the position of each token in its document, or on its path in the tree."""
        if self.tree is not None:
            return torch.from_numpy(self.tree.positions())[None]
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return torch.from_numpy(np.arange(self.cu_seqlens[-1]) - starts)[None]

    def paths(self) -> list[np.ndarray]:
        """The tokens of each document, or of the path to each leaf of the tree; int64."""
        if self.tree is not None:
            return self.tree.paths(self.tree.leaves)
        return np.split(np.arange(self.cu_seqlens[-1]), self.cu_seqlens[1:-1])

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, S, …]`` from ``[N, …]``; 0 at padding. Differentiable."""
        x = x[: self.kept]
        if self.keep is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.keep.to(x.device), x)
        return x.unflatten(0, (self.rows, self.length))

    def flat(self, x: torch.Tensor, dim: int = 0, fill: float = 0) -> torch.Tensor:
        """`x` ``[…, B, S, …]``, whose rows are dim `dim`, as ``[…, 1, N, …]``; `fill` at added tokens."""
        if x.shape[dim] == 1 and self.rows > 1:  # positions that are the same in every row
            x = x.expand(*x.shape[:dim], self.rows, *x.shape[dim + 1 :])
        x = x.flatten(dim, dim + 1).unsqueeze(dim)
        if self.keep is not None:
            x = x.index_select(dim + 1, self.keep.to(x.device))
        if self.added:
            more = x.new_full((*x.shape[: dim + 1], self.added, *x.shape[dim + 2 :]), fill)
            x = torch.cat([x, more], dim + 1)
        return x


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a row of `batch` holds several documents; False for a batch that `find_documents` refuses."""
    try:
        documents = find_documents(batch)
    except ValueError:
        return False
    return documents.tree is not None or len(documents.cu_seqlens) - 1 > documents.rows


def find_documents(batch: Mapping[str, Any], num_ranks: int = 1) -> Documents:
    """The documents of `batch`; pure.

    Args:
        batch: ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, D]``, and what describes its documents:
            ``attention_mask`` ``[B, S]``, 1 for tokens and 0 for padding, on the left or right of each row; of ones, it
            says nothing; ``cu_seq_lens_q``, offsets in the flattened batch; ``position_ids`` ``[B, S]`` or ``[1, S]``,
            where a document starts wherever they do not grow (with four rows in front, ``[4, B, S]``, the first counts;
            with three, ``[3, B, S]``, a document starts where none of them grows); ``seq_idx`` ``[B, S]``, the number
            of each token's document. Position ids that skip numbers need one of the other descriptions. Or ``tree``, a
            `spanwise.TokenTree` of the S tokens of one row.
        num_ranks: of the plan.

    Raises:
        ValueError: no tokens, shapes that do not match, padding inside a row, or descriptions that contradict.

    >>> batch = {"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> find_documents(batch).cu_seqlens
    array([0, 3, 5])
    """
    _check_tensors(batch)
    rows, length = shape_of(batch)
    if batch.get("tree") is not None:
        return _of_tree(batch, rows, length, num_ranks)
    valid = _valid(batch.get("attention_mask"), rows, length)
    restarts, skips = _steps(batch.get("position_ids"), rows, length)
    changes = _changes(batch.get("seq_idx"), rows, length)
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 0] = True
    if batch.get("cu_seq_lens_q") is not None or batch.get("cu_seq_lens_k") is not None:
        if valid is not None and not valid.all():
            raise ValueError("the batch has padding in attention_mask, and cu_seq_lens_q; leave one of them out")
        starts.view(-1)[_checked_offsets(batch, rows * length)] = True
        _check_equal_starts(starts, restarts)
        valid = None
    elif valid is not None and not valid.all():
        inside = valid & torch.nn.functional.pad(valid, (1, -1))
        _check_one_document(inside, restarts)
        starts = valid & ~inside
    elif restarts is not None:
        if valid is None:
            _check_no_skip(batch["position_ids"], skips)
        starts |= restarts
    elif changes is not None:
        starts |= changes
    _check_seq_idx(changes, starts if valid is None else starts | ~valid)
    keep = None if valid is None or valid.all() else valid.flatten().nonzero().flatten()
    kept = starts.flatten() if keep is None else starts.flatten()[keep]
    added = max(0, num_ranks - len(kept))
    offsets = _offsets(torch.cat([kept, torch.ones(added, dtype=torch.bool)]))
    return Documents(rows, length, keep, offsets, added)


def _of_tree(batch: Mapping[str, Any], rows: int, length: int, num_ranks: int) -> Documents:
    """The documents of a batch with a tree.

    Raises:
        ValueError: a tree of other tokens, or another description of documents beside it.
    """
    tree, others = batch["tree"], [name for name in (*DESCRIPTIONS, "position_ids") if batch.get(name) is not None]
    if not isinstance(tree, spanwise.TokenTree):
        raise ValueError(f"tree must be a spanwise.TokenTree, got a {type(tree).__name__}")
    if rows != 1 or tree.num_tokens != length:
        raise ValueError(
            f"the tree has {tree.num_tokens} tokens, the batch {rows} rows of {length}; give the tokens of the tree in "
            f"one row, [1, {tree.num_tokens}]: TokenTree.pack joins several trees"
        )
    mask = _valid(batch.get("attention_mask"), rows, length)
    if others or (mask is not None and not mask.all()):
        raise ValueError(f"the batch has a tree and {others or 'padding'}; the tree alone tells positions and masks")
    added = max(0, num_ranks - length)
    if added:
        tree = spanwise.TokenTree.pack([tree, spanwise.TokenTree([-1] * added, [1] * added)])
    return Documents(1, length, None, np.array([0, length + added]), added, tree)


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


def _checked_offsets(batch: Mapping[str, Any], total: int) -> torch.Tensor:
    """Starts of documents by ``cu_seq_lens_q``, without empty ones."""
    offsets, keys = batch.get("cu_seq_lens_q"), batch.get("cu_seq_lens_k")
    if offsets is None or (keys is not None and torch.as_tensor(keys).tolist() != torch.as_tensor(offsets).tolist()):
        raise ValueError(
            "cu_seq_lens_k is not cu_seq_lens_q: context parallelism takes documents that attend to themselves; pass "
            "the same offsets, or cu_seq_lens_q alone"
        )
    offsets = torch.as_tensor(offsets).detach().flatten().long().cpu()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total or (offsets.diff() < 0).any():
        raise ValueError(f"cu_seq_lens_q must ascend from 0 to the batch's {total} tokens, got {offsets.tolist()[:16]}")
    return offsets[:-1][offsets.diff() > 0]


def _steps(positions: torch.Tensor | None, rows: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """bool ``[B, S]`` each: where positions start anew, and where they skip numbers; None where they do not tell."""
    if positions is None:
        return None, None
    number = positions.shape[0] if positions.dim() == 3 else 1
    shapes = (1, length), (rows, length)
    if positions.dim() not in (2, 3) or number not in (1, 3, 4) or positions.shape[-2:] not in shapes:
        raise ValueError(
            f"position_ids must be [B, S] = {(rows, length)}, [3, B, S] or [4, B, S], got shape "
            f"{tuple(positions.shape)}"
        )
    positions = positions.detach().cpu().view(number, *positions.shape[-2:])
    # The tokens of an image have positions along time, height and width, of which one grows from each to the next. The
    # first of three never falls in a document. Frames of a video may share a time: only a 0 in all three starts anew.
    along = positions if number == 3 else positions[:1]
    steps = torch.nn.functional.pad(along.diff(dim=-1), (1, 0), value=1)
    restarts = (steps < 1).all(0)
    if number == 3:
        restarts &= (steps[0] < 0) | (positions == 0).all(0)
        return restarts.expand(rows, -1), None
    return restarts.expand(rows, -1), (steps[0] > 1).expand(rows, -1)


def _check_equal_starts(starts: torch.Tensor, restarts: torch.Tensor | None) -> None:
    """Raise ValueError where ``position_ids`` and ``cu_seq_lens_q`` tell other documents."""
    if restarts is None:
        return
    wrong = (starts != restarts)[:, 1:].nonzero()
    if len(wrong):
        row, token = int(wrong[0, 0]), int(wrong[0, 1]) + 1
        raise ValueError(
            f"cu_seq_lens_q and position_ids tell different documents at token {token} of row {row}, where "
            f"{'a document starts and positions go on' if starts[row, token] else 'only positions start anew'}; leave "
            f"one of them out"
        )


def _check_one_document(inside: torch.Tensor, restarts: torch.Tensor | None) -> None:
    """Raise ValueError where ``position_ids`` start anew inside a padded row."""
    if restarts is not None and (restarts & inside).any():
        row, token = (restarts & inside).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids start anew at token {token} of row {row}, and attention_mask has padding, so that each row "
            f"is one document; leave attention_mask out if the batch is packed"
        )


def _check_no_skip(positions: torch.Tensor, skips: torch.Tensor | None) -> None:
    """Raise ValueError for positions that skip numbers, as long documents are trained on in some methods."""
    if skips is not None and skips.any():
        row, token = skips.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids skip numbers at token {token} of row {row}, where a document may start or go on; pass an "
            f"attention_mask of ones if each row is one document, or cu_seq_lens_q"
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
