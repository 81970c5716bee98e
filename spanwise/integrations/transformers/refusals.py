"""What `trainer` refuses before training starts, because the result would differ from that of one process."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

_OF_TRL = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer")
_REWARD = "load the model by AutoModel, restore its hidden states by spanwise.unshard, and compute rewards from them"
_PARALLELISM = "leave it out: accelerate's context parallelism drops masks, and the mesh of hf.trainer takes its place"
_GENERATION = "leave it False: each cp group generates with the model, or by a rollout_func that asks a server of yours"
_ARGUMENTS = {  # refused where they are set, and what to do
    "parallelism_config": _PARALLELISM,
    "eval_use_gather_object": "leave it False; ranks gather tensors",
    "auto_find_batch_size": "set per_device_train_batch_size: one rank alone would take a smaller one",
    "torch_compile": "compile the layers of the model before, with layer.compile()",
    "use_liger_kernel": "leave it False: its loss would be that of one rank's tokens",
    "neftune_noise_alpha": "leave it None: its noise depends on the length of a rank's input",
    "use_vllm": _GENERATION,
    "use_transformers_continuous_batching": _GENERATION,
    "log_completions": "leave it False: completions would be logged once for each rank",
}


def check_trainer(base: type[Any]) -> None:
    """Raise ValueError for a base class that is not known to be right."""
    if not (isinstance(base, type) and issubclass(base, transformers.Trainer)):
        raise ValueError(f"hf.trainer takes transformers.Trainer or a subclass, got {base!r}")
    if base.__name__.startswith("ContextParallel"):
        raise ValueError(f"{base.__name__} is a trainer for context parallelism already")
    of_trl = [cls for cls in base.__mro__ if cls.__module__.startswith("trl.")]
    # trl derives trainers with other losses and models from these.
    if of_trl and (of_trl[0].__name__ not in _OF_TRL or of_trl[0].__module__.startswith("trl.experimental.")):
        name = of_trl[0].__name__
        remedy = _REWARD if name == "RewardTrainer" else "compute its loss"
        raise ValueError(
            f"hf.trainer takes {', '.join(_OF_TRL)} of trl itself and your own subclasses of them, got {name} of "
            f"{of_trl[0].__module__}; call hf.context_parallel and write the loop: {remedy}"
        )
    if issubclass(base, transformers.Seq2SeqTrainer):
        raise ValueError("hf.trainer takes trainers of causal language models, got Seq2SeqTrainer")


def check_model(model: Any) -> None:
    """Raise ValueError for a model that does not train as a causal language model."""
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"hf.trainer takes causal language models, whose loss is that of ForCausalLM; the loss_type of "
            f"{type(model).__name__} is {getattr(model, 'loss_type', None)!r}"
        )


def check_arguments(args: Any) -> None:
    """Raise ValueError for training arguments that are not exact under context parallelism; with a remedy."""
    given = {name: remedy for name, remedy in _ARGUMENTS.items() if getattr(args, name, None)}
    if args.accelerator_config.dispatch_batches:
        given["dispatch_batches=True"] = "leave it None or False"
    if args.train_sampling_strategy == "batch_rebalance":
        given["train_sampling_strategy='batch_rebalance'"] = "use another; the plan of a batch balances the cp ranks"
    _refuse(given)


def check_accelerator(trainer: Any) -> None:
    """Raise ValueError for what accelerate was set to, also by its own config file."""
    accelerator, given = trainer.accelerator, {}
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.parallelism_config is not None:
        given["parallelism_config"] = _PARALLELISM
    if getattr(trainer.model, "is_distributed_loading_by_transformers", False):
        given["a model loaded with distributed_config"] = "load it without, and shard it by fsdp_config={'version': 2}"
    if trainer.is_deepspeed_enabled:
        given["deepspeed"] = "use FSDP2 (fsdp_config={'version': 2}) or DDP"
    if fsdp is not None and fsdp.fsdp_version != 2:
        given["fsdp version 1"] = "use fsdp_config={'version': 2}"
    _refuse(given)


def _refuse(given: dict[str, str]) -> None:
    for name, remedy in given.items():
        raise ValueError(f"{name} does not go with hf.trainer; {remedy}")
