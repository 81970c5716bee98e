"""What travels with a planned batch: through ``model(**kwargs)`` to every attention call."""

# N tokens of the batch that are kept, T of them this rank's

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

import spanwise
from spanwise.integrations.transformers.documents import Documents
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


# Attention of a planned batch gets an empty mask of four dims, which transformers hands through as it is. Of an unmade
# one, of two dims, the registered mask function makes one that names the kind that the model asked for.
UNMADE, UNKNOWN, OTHER = "no kind yet", "an unknown kind", "another kind"  # …; not looked at; none of `masks.KINDS`
_PLANNED, _KIND = "_spanwise_planned", "_spanwise_kind"  # attributes; also of labels, for models that drop keywords


def empty_mask(device: torch.device, planned: PlannedBatch | None = None, kind: str = UNMADE) -> torch.Tensor:
    """A mask that stands for the plan's, and names a kind in eager code. No other mask is empty."""
    mask = torch.ones((1, 0) if kind == UNMADE else (1, 1, 0, 0), dtype=torch.bool, device=device)
    if not torch.compiler.is_compiling():
        setattr(mask, _KIND, kind)
    return marked(mask, planned)


def kind_of(mask: Any) -> str | None:
    """The kind that an `empty_mask` names, unknown in compiled code and for views; None for other masks."""
    return getattr(mask, _KIND, UNKNOWN) if isinstance(mask, torch.Tensor) and mask.numel() == 0 else None


def planned_of(mask: Any) -> PlannedBatch | None:
    """The batch of a `marked` tensor; None for others, in compiled code, and where the model made a view."""
    return getattr(mask, _PLANNED, None)


def marked(x: torch.Tensor, planned: PlannedBatch | None) -> torch.Tensor:
    """`x`, an input of a model, from which `planned_of` gets the batch."""
    if not torch.compiler.is_compiling():
        setattr(x, _PLANNED, planned)
    return x
