"""What is known of a batch: its documents, from what describes them, and what a plan adds."""

# B rows, S tokens a row, N tokens of the batch that are kept, T of them this rank's

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

import spanwise
from spanwise.layouts.layout import Layout
from spanwise.recurrence import RecurrenceRoute

ARGUMENT = "spanwise_plan"  # the keyword of a model's forward: a `PlannedBatch`
Batch = Mapping[str, Any]  # by the names of a model's arguments
# Describe the documents of the whole batch; wrong for a shard.
DESCRIPTIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")


@dataclasses.dataclass(frozen=True)
class Documents:
    """The documents of a batch."""

    rows: int
    length: int
    keep: torch.Tensor | None  # int64, indices of the kept tokens in the flattened batch, ascending; None for all
    cu_seqlens: np.ndarray  # int64 [num_docs + 1], among the N tokens
    tree: spanwise.TokenTree | None = None  # of the N tokens; cu_seqlens then says nothing of them

    @property
    def packed(self) -> bool:
        """Whether a row holds several documents."""
        return self.tree is not None or len(self.cu_seqlens) - 1 > self.rows

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[1, N]``: the position of each token in its document, or on its path in the tree."""
        if self.tree is not None:
            return torch.from_numpy(self.tree.positions())[None]
        starts = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return torch.from_numpy(np.arange(self.cu_seqlens[-1]) - starts)[None]

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, S, …]`` from ``[N, …]``; 0 at padding. Differentiable."""
        if self.keep is not None:
            x = x.new_zeros(self.rows * self.length, *x.shape[1:]).index_copy(0, self.keep.to(x.device), x)
        return x.unflatten(0, (self.rows, self.length))

    def flat(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """`x` ``[…, B, S, …]``, whose rows are dim `dim`, as ``[…, 1, N, …]``."""
        if x.shape[dim] == 1 and self.rows > 1:  # positions that are the same in every row
            x = x.expand(*x.shape[:dim], self.rows, *x.shape[dim + 1 :])
        x = x.flatten(dim, dim + 1).unsqueeze(dim)
        return x if self.keep is None else x.index_select(dim + 1, self.keep.to(x.device))


def is_packed(batch: Batch) -> bool:
    """Whether a row of `batch` holds several documents, or is described in ways that contradict."""
    try:
        return find_documents(batch).packed
    except ValueError:
        described = any(batch.get(name) is not None for name in (*DESCRIPTIONS[:2], "seq_idx", "tree"))
        rest = {**batch, "attention_mask": None}  # a mask of four dims may tell documents itself
        return described or (getattr(batch.get("attention_mask"), "ndim", 0) == 2 and is_packed(rest))


def find_documents(batch: Batch) -> Documents:
    """The documents of `batch`; pure.

    Args:
        batch: ``input_ids`` ``[B, S]`` or ``inputs_embeds`` ``[B, S, D]``, and what describes its documents:
            ``attention_mask`` ``[B, S]``, 1 for tokens and 0 for padding, on the left or right of each row; of ones, it
            says nothing; ``cu_seq_lens_q``, offsets in the flattened batch; ``position_ids`` ``[B, S]`` or ``[1, S]``,
            where a document starts wherever they do not grow (with four rows in front, ``[4, B, S]``, the first counts;
            with three, ``[3, B, S]``, a document starts where none of them grows); ``seq_idx`` ``[B, S]``, the number
            of each token's document. Position ids that skip numbers need one of the other descriptions. Or ``tree``, a
            `spanwise.TokenTree` of the S tokens of one row.

    Raises:
        ValueError: no tokens, shapes that do not match, padding inside a row, or descriptions that contradict.

    >>> batch = {"input_ids": torch.zeros(1, 5), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> find_documents(batch).cu_seqlens
    array([0, 3, 5])
    """
    rows, length = shape_of(batch)
    valid = _valid(batch.get("attention_mask"), rows, length)
    padded = valid is not None and not bool(valid.all())
    kept = torch.ones(rows, length, dtype=torch.bool) if valid is None else valid
    if batch.get("tree") is not None:
        return _of_tree(batch, rows, length, padded)
    given = _offsets(batch, rows, length)
    if batch.get("position_ids") is not None:
        given["position_ids"], skips = _steps(batch["position_ids"], rows, length)
    if batch.get("seq_idx") is not None:
        index = of_tokens("seq_idx", batch["seq_idx"], (rows, length))
        given["seq_idx"] = pad(index.diff(dim=-1) != 0, (1, 0))
    first = "attention_mask" if padded else next(iter(given), "")
    starts = kept & ~pad(kept, (1, -1))
    if first in given:
        starts |= given[first]
    for name, x in given.items():
        # Positions may go on where seq_idx changes, but not where offsets say that a document starts.
        other = x ^ starts if (first, name) == ("cu_seq_lens_q", "position_ids") else x & ~starts
        other = pad(other[:, 1:], (1, 0))
        _refuse_at(other & kept, f"{first} and {name} tell different documents; leave one of them out")
    if valid is None and first == "position_ids":
        text = "position_ids skip numbers, where a document may start or go on; pass an attention_mask of ones if each "
        _refuse_at(skips, text + "row is one document, or cu_seq_lens_q")
    begins, keep = starts[kept], kept.flatten().nonzero().flatten() if padded else None
    return Documents(rows, length, keep, np.append(np.flatnonzero(begins), len(begins)))


def _of_tree(batch: Batch, rows: int, length: int, padded: bool) -> Documents:
    """The documents of a batch with a tree."""
    tree, others = batch["tree"], [name for name in (*DESCRIPTIONS, "position_ids") if batch.get(name) is not None]
    if not isinstance(tree, spanwise.TokenTree) or rows != 1 or tree.num_tokens != length:
        got = f"one of {tree.num_tokens} tokens" if isinstance(tree, spanwise.TokenTree) else f"a {type(tree).__name__}"
        raise ValueError(f"tree must be a spanwise.TokenTree of one row of {length} tokens, got {got} for {rows} rows")
    if others or padded:
        raise ValueError(f"the batch has a tree and {others or 'padding'}; the tree alone tells positions and masks")
    return Documents(1, length, None, np.array([0, length]), tree)


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
        if (x := batch.get(name)) is not None:
            if x.dim() != dims or 0 in x.shape[:2]:
                raise ValueError(f"{name} must be [B, S{', dim' * (dims - 2)}], not empty; got {tuple(x.shape)}")
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
    begins = valid & ~pad(valid, (1, -1))
    _refuse_at(begins & (begins.cumsum(1) > 1), "attention_mask has padding between tokens of a row, not at its ends")
    return valid


def _offsets(batch: Batch, rows: int, length: int) -> dict[str, torch.Tensor]:
    """bool ``[B, S]``, where documents start by ``cu_seq_lens_q``, under this name; empty without it."""
    given = [batch.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    offsets, keys = (None if x is None else torch.as_tensor(x).detach().flatten().long().cpu() for x in given)
    if keys is not None and (offsets is None or not torch.equal(offsets, keys)):
        raise ValueError("cu_seq_lens_k is not cu_seq_lens_q, and documents read themselves; pass cu_seq_lens_q alone")
    if offsets is None:
        return {}
    held, total = offsets.tolist(), rows * length
    if not {*range(0, total, length)} <= {*held} or held != sorted(held) or (held[0], held[-1]) != (0, total):
        raise ValueError(f"cu_seq_lens_q must ascend from 0 to all {total} tokens by each row's start, got {held[:16]}")
    return {"cu_seq_lens_q": torch.zeros(total + 1).bool().index_fill_(0, offsets, True)[:-1].view(rows, length)}


def _steps(positions: torch.Tensor, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool ``[B, S]`` each: where positions start anew, and where they skip numbers."""
    shapes = [(*front, many, length) for front in ((), (3,), (4,)) for many in (rows, 1)]
    positions = of_tokens("position_ids", positions, *shapes, meaning=", [3, B, S] or [4, B, S]").long()
    # The tokens of an image have positions along time, height and width, of which one grows from each to the next. The
    # first of three never falls in a document. Frames of a video may share a time: only a 0 in all three starts anew.
    along = positions[None] if positions.dim() == 2 else positions[: 3 if len(positions) == 3 else 1]
    steps = pad(along.diff(dim=-1), (1, 0), value=1)
    restarts = (steps < 1).all(0)
    if len(along) == 3:
        restarts &= (steps[0] < 0) | (along == 0).all(0)
    return restarts.expand(rows, -1), (steps[0] > 1).expand(rows, -1) & (len(along) == 1)


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """This rank's part of a batch. No pytree, and no dataclass to others: FSDP2 copies and casts these in arguments."""

    plan: spanwise.RankPlan
    layout: Layout
    documents: Documents  # of the whole batch
    positions: torch.Tensor  # int64 [1, T], of this rank's tokens in their documents
    last: torch.Tensor  # int64 [1], the largest position of all ranks
    blocks: bool  # whether masks may hold tokens that read each other in both directions
    edges: spanwise.TreeEdges | None = None  # of a tree, the labels that this rank's tokens predict
    weights: torch.Tensor | None = None  # of these labels
    route: RecurrenceRoute | None = None  # how layers that carry a state pass it on; None where the model has none
    there: spanwise.RelayoutRoute | None = None  # from the layout of attention to that of these layers, if it differs
    back: spanwise.RelayoutRoute | None = None
    # Losses over all ranks, and how often each was changed in place when it was returned.
    losses: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list, compare=False)
    reached: list[bool] = dataclasses.field(default_factory=list, compare=False)  # not empty once a decoder was called

    def __deepcopy__(self, memo: Any) -> PlannedBatch:
        return self


del PlannedBatch.__dataclass_fields__  # what FSDP2 knows dataclasses by


def shard(planned: PlannedBatch, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's tokens of `x` ``[…, B, S, …]`` of the whole batch, whose rows are dim `dim`: ``[…, 1, T, …]``."""
    return spanwise.shard(planned.plan, x=planned.documents.flat(x, dim), dim=dim + 1)


# Attention of a planned batch gets an empty mask of four dims, which transformers hands through as it is. Of an unmade
# one, of two dims, the registered mask function makes one that names the kind that the model asked for.
UNMADE, UNKNOWN, OTHER = "no kind yet", "an unknown kind", "another kind"  # …; not looked at; none of `masks.KINDS`


def empty_mask(device: torch.device, planned: PlannedBatch | None = None, kind: str = UNMADE) -> torch.Tensor:
    """A mask that stands for the plan's, and names a kind in eager code. No other mask is empty."""
    mask = torch.ones((1, 0) if kind == UNMADE else (1, 1, 0, 0), dtype=torch.bool, device=device)
    return marked(mask, planned, kind)


def marked(x: torch.Tensor, planned: PlannedBatch | None, kind: str = "") -> torch.Tensor:
    """`x`, an input of a model, from which `planned_of` gets the batch also where the model drops keywords."""
    if not torch.compiler.is_compiling():
        x._spanwise_planned, x._spanwise_kind = planned, kind  # type: ignore[attr-defined]
    return x


def kind_of(mask: Any) -> str | None:
    """The kind that an `empty_mask` names, unknown in compiled code and for views; None for other masks."""
    return getattr(mask, "_spanwise_kind", UNKNOWN) if isinstance(mask, torch.Tensor) and mask.numel() == 0 else None


def planned_of(mask: Any) -> PlannedBatch | None:
    """The batch of a `marked` tensor; None for others, in compiled code, and where the model made a view."""
    return getattr(mask, "_spanwise_planned", None)
