"""trainer: `transformers.Trainer`, or a trainer of trl, that cuts each batch over a cp mesh.

To the trainer each cp group is one process: its ranks load the same batches (`accelerator`), and the model returns
whole outputs and the loss of the whole batch on each of them (`whole`). So everything that a trainer computes from
these, its metrics and its counts, is what it is without context parallelism on as many processes as there are cp
groups. Gradients are averaged over all ranks, by DDP or FSDP2, as accelerate does anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spanwise.integrations.transformers.accelerator import CpAccelerator, group_processes
from spanwise.integrations.transformers.documents import find_documents
from spanwise.integrations.transformers.inputs import SITE, site_of
from spanwise.integrations.transformers.model import context_parallel
from spanwise.integrations.transformers.refusals import (
    check_accelerator,
    check_arguments,
    check_model,
    check_trainer,
)
from spanwise.integrations.transformers.rollouts import Rollouts
from spanwise.integrations.transformers.whole import Calls, restore_outputs


def trainer(base: type[Any], mesh: DeviceMesh, **options: Any) -> type[Any]:
    """A subclass of `base` that trains with each batch cut over the axis "cp" of `mesh`.

    Losses, gradients, `grad_norm`, token counts, number of steps and metrics are those of `base` on one process for
    each cp group. Batch sizes in the arguments are per cp group. Give it a model that is not prepared yet, or the name
    of one where `base` loads it.

    Args:
        base: `transformers.Trainer` or a subclass; trl's `SFTTrainer`, `DPOTrainer`, `GRPOTrainer` or a subclass.
        mesh: over all processes, with the axis "cp" and data-parallel axes such as "dp_shard" in any order.
        options: arguments of `spanwise.make_plan`, such as ``balancer`` and ``exchange``.

    Raises:
        ValueError: a base that is not known to be right, here; arguments that are not, when the trainer is made.

    >>> from transformers import Trainer
    >>> from spanwise.integrations import transformers as hf
    >>> hf.trainer(Trainer, mesh=None).__name__
    'ContextParallelTrainer'
    """
    check_trainer(base)
    names = {cls.__name__ for cls in base.__mro__ if cls.__module__.startswith("trl.")}
    parents = (Rollouts,) if "GRPOTrainer" in names else ()
    attributes = {"cp_mesh": mesh, "cp_options": options, "__module__": base.__module__}
    return type(f"ContextParallel{base.__name__}", (*parents, _ContextParallel, base), attributes)


class _ContextParallel(transformers.Trainer):
    """What `trainer` puts in front of its base."""

    cp_mesh: DeviceMesh
    cp_options: Mapping[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cp_calls = Calls()
        super().__init__(*args, **kwargs)
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            self._cut(reference)

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        check_accelerator(self)
        # Otherwise a stream's batches would be divided among all ranks.
        self.accelerator.dataloader_config.dispatch_batches = self.accelerator.dispatch_batches or False
        group_processes(self.accelerator, self.cp_mesh)
        if self.model is not None:
            self._cut(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        return self._cut(super().call_model_init(trial))

    def _cut(self, model: Any) -> Any:
        """`context_parallel` with the loss of one cp group, which the trainer scales for the others."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        mesh = self.cp_mesh["cp"]
        if not hasattr(inner, SITE):
            check_model(inner)
            context_parallel(model, mesh, **self.cp_options)
        elif site_of(inner).mesh != mesh or site_of(inner).loss_mesh != mesh:
            raise ValueError(
                "the model was prepared for another mesh or loss_mesh; give hf.trainer a model as it was loaded"
            )
        restore_outputs(inner, self._cp_calls)
        return model

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.cp_mesh["cp"].size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return super().floating_point_ops(inputs) // self.cp_mesh["cp"].size()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        return super()._get_num_items_in_batch([_without_first_labels(batch) for batch in batch_samples], device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._cp_calls.returning_whole(logits=not self._takes_loss_of_model()):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        with self._cp_calls.returning_whole(logits=not (prediction_loss_only and self._takes_loss_of_model())):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def _takes_loss_of_model(self) -> bool:
        """Whether the loss is the model's and nobody looks at logits."""
        own = type(self).compute_loss is transformers.Trainer.compute_loss
        return own and self.compute_loss_func is None and self.label_smoother is None


def _without_first_labels(batch: Any) -> Any:
    """The batch as it is counted: without labels of documents' first tokens, which nothing in a document predicts."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or batch.get("shift_labels") is not None or labels.dim() != 2:
        return batch
    documents = find_documents(batch)
    first = torch.from_numpy(documents.cu_seqlens[:-1])
    first = first if documents.keep is None else documents.keep[first]
    return {**batch, "labels": labels.flatten().index_fill(0, first.to(labels.device), -100).view_as(labels)}


__all__ = ["CpAccelerator", "trainer"]
