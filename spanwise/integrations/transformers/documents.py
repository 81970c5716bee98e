"""Documents of a Hugging Face batch: which of its ``B * S`` tokens are kept, and where documents start among them.

A batch is padded (`attention_mask`), packed (`cu_seq_lens_q`, `seq_idx`, `position_ids` that start anew), a tree of
prefixes (`tree`), or none of these: then each row is a document.
"""

# B rows, S tokens a row, N tokens of the plan: those that are kept, and added ones

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import spanwise

Batch = Mapping[str, Any]  # by the names of a model's arguments
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


def is_packed(batch: Batch) -> bool:
    """Whether a row of `batch` holds several documents, or is described in ways that contradict."""
    try:
        documents = find_documents(batch)
    except ValueError:
        told = any(batch.get(name) is not None for name in (*DESCRIPTIONS[:2], "seq_idx", "tree"))
        rest = {**batch, "attention_mask": None}  # a mask of four dims may tell documents itself
        return told or (getattr(batch.get("attention_mask"), "ndim", 0) == 2 and is_packed(rest))
    return documents.tree is not None or len(documents.cu_seqlens) - 1 > documents.rows


def find_documents(batch: Batch, num_ranks: int = 1) -> Documents:
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
    rows, length = shape_of(batch)
    if batch.get("tree") is not None:
        return _of_tree(batch, rows, length, num_ranks)
    valid, offsets = _valid(batch.get("attention_mask"), rows, length), _offsets(batch, rows, length)
    padded = None if valid is None or valid.all() else valid
    restarts, skips = _steps(batch.get("position_ids"), rows, length)
    changes, starts = torch.zeros(2, rows, length, dtype=torch.bool)
    if batch.get("seq_idx") is not None:
        changes[:, 1:] = of_tokens("seq_idx", batch["seq_idx"], (rows, length)).diff(dim=-1) != 0
    starts[:, 0] = True
    if offsets is not None:
        if padded is not None:
            raise ValueError("the batch has padding in attention_mask, and cu_seq_lens_q; leave one of them out")
        starts.view(-1)[offsets] = True
        if restarts is not None:
            restarts[:, 0] = True
            _refuse_at(starts != restarts, "cu_seq_lens_q and position_ids tell different documents; leave one out")
    elif padded is not None:
        inside = padded & torch.nn.functional.pad(padded, (1, -1))
        starts = padded & ~inside
        if restarts is not None:
            _refuse_at(restarts & inside, "position_ids start anew in a padded row; a packed batch has no padding")
    elif restarts is not None:
        if valid is None:
            text = "position_ids skip numbers, where a document may start or go on; pass an attention_mask of ones if "
            _refuse_at(skips, text + "each row is one document, or cu_seq_lens_q")
        starts |= restarts
    else:
        starts |= changes
    kept = torch.ones_like(starts) if padded is None else padded
    _refuse_at(changes & ~starts & kept, "seq_idx changes where no document starts by the rest of the batch")
    first, keep = starts[kept], None if padded is None else padded.flatten().nonzero().flatten()
    added = max(0, num_ranks - len(first))
    cu_seqlens = np.append(np.flatnonzero(first), np.arange(len(first), len(first) + added + 1))
    return Documents(rows, length, keep, cu_seqlens, added)


def _of_tree(batch: Batch, rows: int, length: int, num_ranks: int) -> Documents:
    """The documents of a batch with a tree."""
    tree, others = batch["tree"], [name for name in (*DESCRIPTIONS, "position_ids") if batch.get(name) is not None]
    if not isinstance(tree, spanwise.TokenTree):
        raise ValueError(f"tree must be a spanwise.TokenTree, got a {type(tree).__name__}")
    if rows != 1 or tree.num_tokens != length:
        what = f"the tree has {tree.num_tokens} tokens, the batch {rows} rows of {length}"
        raise ValueError(f"{what}; give the tree's tokens in one row: TokenTree.pack joins several trees")
    mask = _valid(batch.get("attention_mask"), rows, length)
    if others or (mask is not None and not mask.all()):
        raise ValueError(f"the batch has a tree and {others or 'padding'}; the tree alone tells positions and masks")
    added = max(0, num_ranks - length)
    if added:
        tree = spanwise.TokenTree.pack([tree, spanwise.TokenTree([-1] * added, [1] * added)])
    return Documents(1, length, None, np.array([0, length + added]), added, tree)


def _refuse_at(where: torch.Tensor, text: str) -> None:
    """Raise ValueError with `text` for the first token for which `where` ``[B, S]`` holds."""
    for row, token in where.nonzero()[:1].tolist():
        raise ValueError(f"{text} (token {token} of row {row})")


def of_tokens(name: str, x: Any, *shapes: tuple[int, ...], meaning: str = "") -> torch.Tensor:
    """`x` in host memory, which must be a tensor of one of these shapes."""
    if not isinstance(x, torch.Tensor) or tuple(x.shape) not in shapes:
        got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{name} must be [B, S] = {shapes[0]}{meaning}, got {got}")
    return x.detach().cpu()


def shape_of(batch: Batch) -> tuple[int, int]:
    """B and S of a batch, after a check that it was collated."""
    for name in ("input_ids", "inputs_embeds", "position_ids", "seq_idx", "labels", "shift_labels"):
        if batch.get(name) is not None and not isinstance(batch[name], torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got a {type(batch[name]).__name__}; collate the batch before")
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        x = batch.get(name)
        if x is not None and (x.dim() != dims or 0 in x.shape[:2]):
            raise ValueError(f"{name} must be [B, S{', dim' * (dims - 2)}], not empty; got {tuple(x.shape)}")
        if x is not None:
            return x.shape[0], x.shape[1]
    raise ValueError(f"the batch needs input_ids or inputs_embeds; it has {sorted(batch)}")


def _valid(mask: Any, rows: int, length: int) -> torch.Tensor | None:
    """bool ``[B, S]``, False at padding."""
    if mask is None:
        return None
    meaning = ", 1 for tokens and 0 for padding (for other masks give hf.prepare a plan of spanwise.make_plan)"
    mask = of_tokens("attention_mask", mask, (rows, length), meaning=meaning)
    valid = mask.bool()
    if not (mask == valid).all() or not valid.any():
        raise ValueError(f"attention_mask must hold 0 and 1, and a token, got {mask.unique().tolist()[:8]}")
    begins = valid & ~torch.nn.functional.pad(valid, (1, -1))
    _refuse_at(begins & (begins.cumsum(1) > 1), "attention_mask has padding between tokens of a row, not at its ends")
    return valid


def _offsets(batch: Batch, rows: int, length: int) -> torch.Tensor | None:
    """Starts of documents by ``cu_seq_lens_q``, without empty ones; None without it."""
    given = [batch.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    offsets, keys = (None if x is None else torch.as_tensor(x).detach().flatten().long().cpu() for x in given)
    if keys is not None and (offsets is None or not torch.equal(offsets, keys)):
        raise ValueError("cu_seq_lens_k is not cu_seq_lens_q, and documents read themselves; pass cu_seq_lens_q alone")
    if offsets is None:
        return None
    held, total = offsets.tolist(), rows * length
    if not {*range(0, total, length)} <= {*held} or held != sorted(held) or (held[0], held[-1]) != (0, total):
        raise ValueError(f"cu_seq_lens_q must ascend from 0 to all {total} tokens by each row's start, got {held[:16]}")
    return offsets[:-1][offsets.diff() > 0]


def _steps(positions: torch.Tensor | None, rows: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """bool ``[B, S]`` each: where positions start anew, or None where they do not tell, and where they skip numbers."""
    if positions is None:
        return None, torch.zeros(rows, length, dtype=torch.bool)
    shapes = [(*front, many, length) for front in ((), (3,), (4,)) for many in (rows, 1)]
    positions = of_tokens("position_ids", positions, *shapes, meaning=", [3, B, S] or [4, B, S]").long()
    # The tokens of an image have positions along time, height and width, of which one grows from each to the next. The
    # first of three never falls in a document. Frames of a video may share a time: only a 0 in all three starts anew.
    along = positions[None] if positions.dim() == 2 else positions[: 3 if len(positions) == 3 else 1]
    steps = torch.nn.functional.pad(along.diff(dim=-1), (1, 0), value=1)
    restarts = (steps < 1).all(0)
    if len(along) == 3:
        restarts &= (steps[0] < 0) | (along == 0).all(0)
    return restarts.expand(rows, -1).clone(), (steps[0] > 1).expand(rows, -1) & (len(along) == 1)


def share_prefixes(batch: Batch) -> dict[str, Any]:
    """The sequences of a batch as a tree, in which each common prefix is stored and computed once; pure.

    ``model(**hf.share_prefixes(batch)).loss`` is the loss of the sequences of the batch, each as often as it occurs.
    `spanwise.tree_from_sequences` makes the same tree and knows the path of each sequence in it.

    Args:
        batch: ``input_ids`` ``[B, S]``, padded or packed as `find_documents` takes it, and ``labels`` ``[B, S]``, which
            are token ids or -100. Not ``position_ids`` of one's own, nor other tensors.

    Returns:
        ``input_ids`` ``[1, N]``, the ``tree``, and with labels ``labels`` ``[1, N]`` and ``label_weights`` ``[1, N]``,
        float32: the number of sequences that have a label at a token.

    Raises:
        ValueError: tensors that are not of these, or labels that are not the tokens themselves.

    >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
    >>> batch = share_prefixes({"input_ids": ids, "labels": ids})
    >>> batch["input_ids"].tolist(), batch["label_weights"].tolist()
    ([[5, 6, 7, 8]], [[0.0, 2.0, 1.0, 1.0]])
    """
    documents = find_documents(batch)
    described = {"input_ids", "labels", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
    strange = [name for name, x in batch.items() if isinstance(x, torch.Tensor) and name not in described]
    if documents.tree is not None or strange or "input_ids" not in batch:
        raise ValueError(f"share_prefixes takes input_ids and labels of sequences, got {sorted(batch)}")
    given = documents.flat(batch["input_ids"])[0]
    runs = [slice(*run) for run in pairwise(documents.cu_seqlens.tolist())]
    found = spanwise.tree_from_sequences([given[run] for run in runs])
    ids = torch.from_numpy(found.ids).to(given)[None]
    rest = {name: x for name, x in batch.items() if name not in described and not name.startswith("max_length_")}
    if batch.get("labels") is None:
        return {**rest, "input_ids": ids, "tree": found.tree}
    labels = documents.flat(batch["labels"])[0]
    valid = labels != -100
    if not torch.equal(labels[valid], given[valid].to(labels)):
        raise ValueError("labels must be the tokens of input_ids or -100: sequences that share a token share its label")
    valid[documents.cu_seqlens[:-1]] = False  # nothing predicts a first token
    weights = torch.from_numpy(found.weights([valid[run] for run in runs])).to(ids.device, torch.float32)[None]
    labels = ids.masked_fill(weights == 0, -100)
    return {**rest, "input_ids": ids, "labels": labels, "label_weights": weights, "tree": found.tree}
