"""What travels with a planned batch: through ``model(**kwargs)`` to every attention call."""

# N tokens of the batch that are kept, T of them this rank's

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

import spanwise
from spanwise.integrations.transformers.documents import Documents
from spanwise.integrations.transformers.masks import KINDS
from spanwise.layouts.layout import Layout
from spanwise.recurrence import RecurrenceRoute

ARGUMENT = "spanwise_plan"  # the keyword of a model's forward


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """This rank's part of a batch. No pytree, and no dataclass to others: FSDP2 copies and casts these in arguments.

    Attributes:
        plan: this rank's part of the plan.
        layout: of the plan.
        names: the plan's mask for each kind of the model's layers.
        documents: of the whole batch.
        positions: int64 ``[1, T]``, of this rank's tokens in their documents.
        last: int64 ``[1]``, the largest position of all ranks.
        edges, weights: of a tree, the labels that this rank's tokens predict, and the weight of each; else None.
        blocks: whether the plan's masks hold tokens that read each other in both directions.
        route: how layers that carry a state pass it on; None where the model has none.
        there, back: between the layout of attention and that of layers that carry a state; None where it is the same.
        losses: losses of this batch over all ranks, and how often each was changed in place when it was returned.
        reached: not empty once the decoder was called with this batch.
    """

    plan: spanwise.RankPlan
    layout: Layout
    names: Mapping[str, str]
    documents: Documents
    positions: torch.Tensor
    last: torch.Tensor
    edges: spanwise.TreeEdges | None = None
    weights: torch.Tensor | None = None
    blocks: bool = False
    route: RecurrenceRoute | None = None
    there: spanwise.RelayoutRoute | None = None
    back: spanwise.RelayoutRoute | None = None
    losses: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list, compare=False)
    reached: list[bool] = dataclasses.field(default_factory=list, compare=False)

    def __deepcopy__(self, memo: Any) -> PlannedBatch:
        return self


del PlannedBatch.__dataclass_fields__  # what FSDP2 knows dataclasses by


def shard(planned: PlannedBatch, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's tokens of `x` ``[…, B, S, …]`` of the whole batch, whose rows are dim `dim`: ``[…, 1, T, …]``."""
    return spanwise.shard(planned.plan, x=planned.documents.flat(x, dim), dim=dim + 1)


# Attention of a planned batch gets an empty mask, whose second dim is the index of the kind that the model asked for.
# No other mask is empty, and models that slice the last dims leave it as it is. From an unmade one the registered mask
# function makes one of a kind.
UNMADE, UNKNOWN, OTHER = "no kind yet", "an unknown kind", "another kind"  # …; not looked at; none of KINDS
_KINDS = (UNMADE, *KINDS, UNKNOWN, OTHER)
_PLANNED = "_spanwise_planned"  # attribute of such masks, and of labels, for models that drop keyword arguments


def empty_mask(kind: str, device: torch.device, planned: PlannedBatch | None = None) -> torch.Tensor:
    """A mask of four dims, which transformers hands through to attention as it is; of two if `UNMADE`."""
    index = _KINDS.index(kind)
    return marked(torch.ones((1, index, 0, 0) if index else (1, 0), dtype=torch.bool, device=device), planned)


def kind_of(mask: Any) -> str | None:
    """The kind that `empty_mask` made `mask`, or what it is a view of, for; None for other masks."""
    return _KINDS[mask.shape[1]] if isinstance(mask, torch.Tensor) and mask.numel() == 0 else None


def planned_of(mask: Any) -> PlannedBatch | None:
    """The batch of a `marked` tensor; None for others, in compiled code, and where the model made a view."""
    return getattr(mask, _PLANNED, None)


def marked(mask: torch.Tensor, planned: PlannedBatch | None) -> torch.Tensor:
    """`mask`, or other inputs of a model, from which `planned_of` gets the batch."""
    if not torch.compiler.is_compiling():
        setattr(mask, _PLANNED, planned)
    return mask
