"""A model's loss for planned batches: the mean over the tokens of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForTokenClassification

import spanwise
from spanwise.integrations.transformers.planned import ARGUMENT, PlannedBatch, planned_of

_SHIFTED = {
    ForCausalLMLoss: True,
    ForTokenClassification: False,
}  # losses, and whether they take the next token's label


def is_known(loss_function: Any) -> bool:
    """Whether a loss is a mean of cross-entropies over tokens, which `GlobalLoss` computes over all ranks."""
    return loss_function in _SHIFTED


def predicts_next(model: Any) -> bool:
    """Whether labels are those of next tokens; by the class of `model`, whose loss function may be the user's own."""
    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is not ForTokenClassification


@dataclasses.dataclass(frozen=True)
class GlobalLoss:
    """A `loss_function` that is `spanwise.cross_entropy` over `mesh` for planned batches, and `before` for others."""

    mesh: DeviceMesh
    before: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits, labels = [*args, *(kwargs[name] for name in ("logits", "labels")[len(args) :])][:2]
        planned: PlannedBatch | None = kwargs.get(ARGUMENT) or planned_of(labels)
        if planned is None:
            if torch.compiler.is_compiling() and not _SHIFTED[self.before]:
                raise ValueError(
                    "the loss of token classification does not compile under context parallelism; call "
                    "the model without labels, and compute the loss from the logits"
                )
            return self.before(*args, **{name: x for name, x in kwargs.items() if name != ARGUMENT})
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if planned.edges is not None:
            logits = logits[:, planned.edges.sources]
        labels = kwargs.get("shift_labels", labels)
        loss = spanwise.cross_entropy(
            logits, labels, self.mesh, num_valid=kwargs.get("num_items_in_batch"), weights=planned.weights
        )
        planned.losses.append((loss, version_of(loss)))
        return loss

    def __deepcopy__(self, memo: Any) -> GlobalLoss:  # meshes cannot be copied
        return self


def version_of(x: torch.Tensor) -> int:
    """How often `x` was changed in place; 0 in inference mode, where that is not counted."""
    if torch.compiler.is_compiling():  # it cannot ask for the mode
        return x._version
    return 0 if x.is_inference() else x._version
