"""A model's loss for planned batches: the mean over the tokens of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import spanwise
from spanwise.integrations.transformers.planned import ARGUMENT


@dataclasses.dataclass(frozen=True)
class GlobalLoss:
    """A `loss_function` that is `spanwise.cross_entropy` over `mesh` for planned batches, and `before` for others."""

    mesh: DeviceMesh
    before: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        planned = kwargs.pop(ARGUMENT, None)
        if planned is None:
            return self.before(*args, **kwargs)
        logits = args[0] if args else kwargs["logits"]
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        labels = kwargs["shift_labels"]
        loss = spanwise.cross_entropy(logits, labels, self.mesh, num_valid=kwargs.get("num_items_in_batch"))
        planned.losses.append((loss, version_of(loss)))
        return loss

    def __deepcopy__(self, memo: Any) -> GlobalLoss:  # meshes cannot be copied
        return self


def version_of(x: torch.Tensor) -> int:
    """How often `x` was changed in place; 0 in inference mode, where that is not counted."""
    if torch.compiler.is_compiling():  # it cannot ask for the mode
        return x._version
    return 0 if x.is_inference() else x._version
