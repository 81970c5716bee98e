"""A model's loss for planned batches: the mean over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import spanwise
from spanwise.integrations.transformers.planned import ARGUMENT


def global_loss(mesh: DeviceMesh, before: Callable[..., Any]) -> Callable[..., Any]:
    """A `loss_function` that is `spanwise.cross_entropy` over `mesh` for planned batches, and `before` for others."""

    def loss_function(*args: Any, **kwargs: Any) -> torch.Tensor:
        planned = kwargs.pop(ARGUMENT, None)
        if planned is None:
            return before(*args, **kwargs)
        planned.losses.append("loss_function")
        logits = args[0] if args else kwargs["logits"]
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        labels = kwargs["shift_labels"]
        return spanwise.cross_entropy(logits, labels, mesh, num_valid=kwargs.get("num_items_in_batch"))

    return loss_function
