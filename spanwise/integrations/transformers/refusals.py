"""What `trainer` refuses before training starts, because the result would differ from that of one process."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

_OF_TRL = ("SFTTrainer", "DPOTrainer", "GRPOTrainer")
_PARALLELISM = "leave it out: accelerate's context parallelism drops masks, and the mesh of hf.trainer takes its place"
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # of attention, in configs


def check_trainer(base: type[Any]) -> None:
    """Raise ValueError for a base class that is not known to be right."""
    if not (isinstance(base, type) and issubclass(base, transformers.Trainer)):
        raise ValueError(f"hf.trainer takes transformers.Trainer or a subclass, got {base!r}")
    if base.__name__.startswith("ContextParallel"):
        raise ValueError(f"{base.__name__} is a trainer for context parallelism already")
    of_trl = [cls for cls in base.__mro__ if cls.__module__.startswith("trl.")]
    # trl derives trainers with other losses and models from these three.
    if of_trl and (of_trl[0].__name__ not in _OF_TRL or of_trl[0].__module__.startswith("trl.experimental.")):
        raise ValueError(
            f"hf.trainer takes {', '.join(_OF_TRL)} of trl and your own subclasses of them, got "
            f"{of_trl[0].__name__} of {of_trl[0].__module__}; for its loss call hf.context_parallel and write the loop"
        )
    seq2seq = getattr(transformers, "Seq2SeqTrainer", None)
    if seq2seq is not None and issubclass(base, seq2seq):
        raise ValueError("hf.trainer takes trainers of causal language models, got Seq2SeqTrainer")


def check_model(model: Any) -> None:
    """Raise ValueError for a model that does not train as a causal language model, or with attention dropout."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"hf.trainer takes causal language models, whose loss is that of ForCausalLM; the loss_type of {name} is "
            f"{getattr(model, 'loss_type', None)!r}"
        )
    dropout = {key: getattr(config, key, None) for key in _DROPOUT}
    given = {key: x for key, x in dropout.items() if isinstance(x, float) and x > 0}
    if given:
        raise ValueError(f"context parallelism has no attention dropout; set {given} in the config of {name} to 0")


def check_arguments(args: Any) -> None:
    """Raise ValueError for training arguments that are not exact under context parallelism; with a remedy."""
    _refuse(
        {
            "parallelism_config": (args.parallelism_config is not None, _PARALLELISM),
            "dispatch_batches=True": (args.accelerator_config.dispatch_batches is True, "leave it None or False"),
            "train_sampling_strategy='batch_rebalance'": (
                args.train_sampling_strategy == "batch_rebalance",
                "use 'random', 'sequential' or 'group_by_length'; each batch's plan balances the cp ranks",
            ),
            "eval_use_gather_object": (args.eval_use_gather_object, "leave it False; ranks gather tensors"),
            "auto_find_batch_size": (
                args.auto_find_batch_size,
                "set per_device_train_batch_size: the rank that is out of memory would take a smaller one alone",
            ),
            "torch_compile": (args.torch_compile, "compile the layers of the model before, with layer.compile()"),
            "use_liger_kernel": (args.use_liger_kernel, "leave it False: its loss would be that of one rank's tokens"),
            "neftune_noise_alpha": (
                args.neftune_noise_alpha is not None,
                "leave it None: its noise depends on the length of a rank's input",
            ),
            "use_vllm": (getattr(args, "use_vllm", False), "leave it False; each cp group generates with the model"),
            "log_completions": (
                getattr(args, "log_completions", False),
                "leave it False: completions would be logged once for each rank",
            ),
        }
    )


def check_accelerator(trainer: Any) -> None:
    """Raise ValueError for what accelerate was set to, also by its own config file."""
    accelerator, model = trainer.accelerator, trainer.model
    sharded = getattr(model, "is_distributed_loading_by_transformers", False)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    _refuse(
        {
            "parallelism_config": (accelerator.parallelism_config is not None, _PARALLELISM),
            "a model loaded with distributed_config": (
                sharded,
                "load it without, and shard it by fsdp_config={'version': 2}",
            ),
            "deepspeed": (trainer.is_deepspeed_enabled, "use FSDP2 (fsdp_config={'version': 2}) or DDP"),
            "fsdp version 1": (fsdp is not None and fsdp.fsdp_version != 2, "use fsdp_config={'version': 2}"),
        }
    )


def _refuse(given: dict[str, tuple[bool, str]]) -> None:
    for name, (refused, remedy) in given.items():
        if refused:
            raise ValueError(f"{name} does not go with hf.trainer; {remedy}")
