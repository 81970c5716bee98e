"""trainer: `transformers.Trainer`, or a trainer of trl, that cuts each batch over a cp mesh.

To the trainer each cp group is one process: its ranks load the same batches (`CpAccelerator`), and the model returns
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
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply, send_to_device  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.loss.loss_utils import ForCausalLMLoss

from spanwise.integrations.transformers.batches import find_documents
from spanwise.integrations.transformers.inputs import SITE, site_of
from spanwise.integrations.transformers.model import context_parallel
from spanwise.integrations.transformers.whole import Step, restore_outputs

_OF_TRL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer")
_GENERATION = "leave it False: each cp group generates with the model, or by a rollout_func that asks a server of yours"
_ARGUMENTS = {  # refused where they are set, and what to do
    "parallelism_config": "leave it out: accelerate's context parallelism drops masks; hf.trainer has its own mesh",
    "eval_use_gather_object": "leave it False; ranks gather tensors",
    "auto_find_batch_size": "set per_device_train_batch_size: one rank alone would take a smaller one",
    "torch_compile": "compile the layers of the model before, with layer.compile()",
    "use_liger_kernel": "leave it False: its loss would be that of one rank's tokens",
    "neftune_noise_alpha": "leave it None: its noise depends on the length of a rank's input",
    "use_vllm": _GENERATION,
    "use_transformers_continuous_batching": _GENERATION,
    "log_completions": "leave it False: completions would be logged once for each rank",
}


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
    _check_base(base)
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
        _check_settings(self)
        super().create_accelerator_and_postprocess()
        _check_settings(self, self.accelerator)
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
            if inner.loss_function is not ForCausalLMLoss:
                kind = getattr(inner, "loss_type", None)
                raise ValueError(f"hf.trainer takes causal language models; {type(inner).__name__} has {kind} as loss")
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
                text = "labels are of first tokens of documents, which only the model's own loss leaves out"
                raise ValueError(f"{int(given - count)} {text}; set them to -100, as DataCollatorWithFlattening does")
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
            raise ValueError("hf.trainer takes GRPOTrainer with a tokenizer, for prompts of text, and without images")
        self.args: Any = copy.copy(self.args)  # the user's may serve another trainer
        size, generations = self.cp_mesh["cp"].size(), self.num_generations  # type: ignore[attr-defined]
        samples, rest = divmod(self.args.generation_batch_size, size)  # trl multiplied by the number of all ranks
        if rest or samples % generations:
            raise ValueError(
                f"generation_batch_size is {samples} for all cp groups, no multiple of num_generations={generations}; "
                f"raise per_device_train_batch_size"
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


class CpAccelerator(Accelerator):
    """An accelerator for which each cp group is one process: what it loads, gathers and divides by.

    Files, barriers and the process that logs stay those of all ranks; gradients are averaged over all ranks.
    """

    cp_groups: torch.Tensor  # int64 [groups, cp]: the global ranks of each group

    @property
    def num_processes(self) -> int:
        return self.cp_groups.shape[0]

    @property
    def process_index(self) -> int:
        return int((self.cp_groups == self.state.process_index).any(dim=1).nonzero())

    def gather(self, tensor: Any) -> Any:
        """What `Accelerator.gather` returns, from the first rank of each cp group."""
        return self.first_of_groups(super().gather(tensor))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What `Accelerator.reduce` returns, where each cp group counts once."""
        reduced, size = super().reduce(tensor, reduction, scale), self.cp_groups.shape[1]
        if reduction != "sum":
            return reduced
        return recursively_apply(lambda total: total / size if total.is_floating_point() else total // size, reduced)

    def first_of_groups(self, gathered: Any) -> Any:
        """Rows of the first rank of each cp group, of tensors ``[all ranks * rows, …]``."""
        world, first = self.cp_groups.numel(), self.cp_groups[:, 0]
        if world == 1:
            return gathered
        return recursively_apply(lambda x: x.unflatten(0, (world, -1))[first].flatten(0, 1), gathered)


def group_processes(accelerator: Accelerator, mesh: DeviceMesh) -> None:
    """Make `accelerator` a `CpAccelerator`; raise ValueError for a mesh that is not of "cp" and data-parallel axes."""
    names, ranks, processes = mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist(), accelerator.state.num_processes
    if "cp" not in names or any(name != "cp" and not name.startswith("dp") for name in names):
        raise ValueError(f"hf.trainer takes a mesh of 'cp' and data-parallel axes such as 'dp_shard', got axes {names}")
    if sorted(ranks) != list(range(processes)):
        raise ValueError(f"the mesh has the ranks {ranks}, and must have all of accelerate's {processes} processes")
    accelerator.__class__ = CpAccelerator
    accelerator.cp_groups = mesh.mesh.movedim(names.index("cp"), -1).reshape(-1, mesh["cp"].size()).cpu()


def _check_base(base: type[Any]) -> None:
    """Raise ValueError for a base class that is not known to be right."""
    if not (isinstance(base, type) and issubclass(base, transformers.Trainer)):
        raise ValueError(f"hf.trainer takes transformers.Trainer or a subclass, got {base!r}")
    if issubclass(base, (_ContextParallel, transformers.Seq2SeqTrainer)):
        raise ValueError(f"hf.trainer takes trainers of causal language models without a mesh, got {base.__name__}")
    of_trl = [cls for cls in base.__mro__ if cls.__module__.startswith("trl.")]
    # trl derives trainers with other losses and models from these.
    if of_trl and (of_trl[0].__name__ not in _OF_TRL or of_trl[0].__module__.startswith("trl.experimental.")):
        name, module = of_trl[0].__name__, of_trl[0].__module__
        raise ValueError(f"hf.trainer takes {', '.join(_OF_TRL)} and your subclasses, got {name} of {module}")


def _check_settings(trainer: Any, accelerator: Any = None) -> None:
    """Raise ValueError for arguments that are not exact here, and what accelerate was set to, also by its own file."""
    args, fsdp = trainer.args, getattr(getattr(accelerator, "state", None), "fsdp_plugin", None)
    wrong = {name: remedy for name, remedy in _ARGUMENTS.items() if getattr(args, name, None)}
    if args.accelerator_config.dispatch_batches:
        wrong["dispatch_batches=True"] = "leave it None or False"
    if args.train_sampling_strategy == "batch_rebalance":
        wrong["train_sampling_strategy='batch_rebalance'"] = "use another; the plan of a batch balances the ranks"
    if getattr(accelerator, "parallelism_config", None) is not None:
        wrong["parallelism_config"] = _ARGUMENTS["parallelism_config"]
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        wrong["a model loaded with distributed_config"] = "load it without, and use fsdp_config={'version': 2}"
    if accelerator is not None and (trainer.is_deepspeed_enabled or (fsdp is not None and fsdp.fsdp_version != 2)):
        wrong["deepspeed" if trainer.is_deepspeed_enabled else "fsdp version 1"] = "use fsdp_config={'version': 2}"
    for name, remedy in wrong.items():
        raise ValueError(f"{name} does not go with hf.trainer; {remedy}")
