"""Rollouts of trl's GRPO under context parallelism: those of the first rank of each cp group.

Generation samples, rewards may ask a judge, and slices of a generation are shuffled: the ranks of a group would go
apart. They all generate, because collectives of FSDP demand it, and go on with what the first one has.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch.distributed.device_mesh import DeviceMesh


class Rollouts(transformers.Trainer):
    """What `trainer` puts in front of a trainer that generates."""

    cp_mesh: DeviceMesh

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
                f"for the {self.args.world_size // size} cp groups, which must be a multiple of num_generations="
                f"{generations}; raise per_device_train_batch_size or steps_per_generation"
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
