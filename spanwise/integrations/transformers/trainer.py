"""trainer: `transformers.Trainer`, or a trainer of trl, that cuts each batch over a cp mesh.

To the trainer each cp group is one process: its ranks load the same batches (`accelerator`), and the model returns
whole outputs and the loss of the whole batch on each of them (`whole`). So everything that a trainer computes from
these, its metrics and its counts, is what it is without context parallelism on as many processes as there are cp
groups. Gradients are averaged over all ranks, by DDP or FSDP2, as accelerate does anyway.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spanwise.integrations.transformers.accelerator import group_processes
from spanwise.integrations.transformers.documents import find_documents
from spanwise.integrations.transformers.inputs import SITE, site_of
from spanwise.integrations.transformers.model import context_parallel
from spanwise.integrations.transformers.refusals import check_accelerator, check_arguments, check_model, check_trainer
from spanwise.integrations.transformers.whole import Step, restore_outputs


def trainer(base: type[Any], mesh: DeviceMesh, **options: Any) -> type[Any]:
    """A subclass of `base` that trains with each batch cut over the axis "cp" of `mesh`.

    Losses, gradients, `grad_norm`, token counts, number of steps and metrics are those of `base` on one process for
    each cp group. Batch sizes in the arguments are per cp group. Give it a model that is not prepared yet, or the name
    of one where `base` loads it.

    Args:
        base: `transformers.Trainer`, or trl's `SFTTrainer`, `DPOTrainer`, `KTOTrainer` or `GRPOTrainer`, or a subclass.
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
    front = _Rollouts if "GRPOTrainer" in (cls.__name__ for cls in base.__mro__) else _ContextParallel
    attributes = {"cp_mesh": mesh, "cp_options": options, "__module__": base.__module__}
    return type(f"ContextParallel{base.__name__}", (front, base), attributes)


class _ContextParallel(transformers.Trainer):
    """What `trainer` puts in front of its base."""

    cp_mesh: DeviceMesh
    cp_options: Mapping[str, Any]

    def __init_subclass__(cls) -> None:
        if cls.training_step is not _ContextParallel.training_step:  # models return whole outputs within it alone
            raise ValueError(f"define training_step of {cls.__name__} in the base that hf.trainer gets")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cp_steps: list[Step] = []
        super().__init__(*args, **kwargs)
        if getattr(self, "ref_model", None) is not None:
            self._cut(self.ref_model)  # type: ignore[attr-defined]

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
        site = site_of(inner)
        if (site.mesh, site.loss_mesh, site.reduce_loss) != (mesh, mesh, True):
            raise ValueError("the model is prepared for another mesh or loss; give hf.trainer a model as it was loaded")
        restore_outputs(inner, self._cp_steps)
        return model

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.cp_mesh["cp"].size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return super().floating_point_ops(inputs) // self.cp_mesh["cp"].size()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        count: Any = super()._get_num_items_in_batch([_without_first_labels(batch) for batch in batch_samples], device)
        if not self._takes_loss_of_model():
            given: Any = super()._get_num_items_in_batch(batch_samples, device)
            if given != count:
                raise ValueError(
                    f"{int(given - count)} labels are of first tokens of documents, which only the model's own loss "
                    f"leaves out; set them to -100, as DataCollatorWithFlattening does, or pad on the right"
                )
        return count

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = Step(self.cp_mesh["cp"], logits=not self._takes_loss_of_model())
        return step.run(self._cp_steps, super().training_step, *args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        logits = not (prediction_loss_only and self._takes_loss_of_model())
        step = Step(self.cp_mesh["cp"], logits, predicts=not prediction_loss_only)
        return step.run(self._cp_steps, super().prediction_step, model, inputs, prediction_loss_only, *args, **kwargs)

    def _takes_loss_of_model(self) -> bool:
        """Whether the model alone looks at logits and labels."""
        steps = {"compute_loss", "training_step", "prediction_step"}
        own = {cls for cls in type(self).__mro__ if steps & set(vars(cls))} == {_ContextParallel, transformers.Trainer}
        return own and self.compute_loss_func is None and self.label_smoother is None


class _Rollouts(_ContextParallel):
    """What `trainer` puts in front of trl's GRPO: the rollouts of the first rank of each cp group.

    Generation samples, rewards may ask a judge, and slices of a generation are shuffled: the ranks of a group would go
    apart. They all generate, because collectives of FSDP demand it, and go on with what the first one has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "_is_vlm", False):
            raise ValueError(
                "hf.trainer takes GRPOTrainer with a tokenizer, for prompts of text; rollouts with images are not "
                "known to be right. Call hf.context_parallel on the model and write the loop"
            )
        self.args: Any = copy.copy(self.args)  # the user's may serve another trainer
        size, generations = self.cp_mesh["cp"].size(), self.num_generations  # type: ignore[attr-defined]
        samples, rest = divmod(self.args.generation_batch_size, size)  # trl multiplied by the number of all ranks
        if rest or samples % generations:
            raise ValueError(
                f"generation_batch_size={self.args.generation_batch_size} over all ranks leaves {samples} completions "
                f"for all cp groups, which must be a multiple of num_generations={generations}; raise "
                f"per_device_train_batch_size or steps_per_generation"
            )
        self.args.generation_batch_size = samples

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._same_in_group(super()._generate(*args, **kwargs))  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        return self.accelerator.first_of_groups(rewards)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._same_in_group(super()._prepare_inputs(inputs))

    def _same_in_group(self, inputs: Any) -> Any:
        """`inputs` of the first rank of the cp group."""
        box = [send_to_device(inputs, "cpu")]
        dist.broadcast_object_list(box, group=self.cp_mesh["cp"].get_group(), group_src=0)
        return send_to_device(box[0], self.args.device)


def _without_first_labels(batch: Any) -> Any:
    """The batch as it is counted: without labels of documents' first tokens, which nothing in a document predicts."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or batch.get("shift_labels") is not None or labels.dim() != 2:
        return batch
    documents = find_documents(batch)
    return {**batch, "labels": documents.flat(labels).masked_fill((documents.positions == 0).to(labels.device), -100)}
