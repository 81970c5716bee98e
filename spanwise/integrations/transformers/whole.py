"""Whole batches in, whole outputs out: for losses and metrics that were written for one process.

`context_parallel` alone returns a rank's logits. A trainer's loss pairs them with whole labels and masks, so here a
forward hook restores them to ``[B, S, …]`` on all ranks of the cp mesh. All ranks then compute the same loss. The
adjoint of the all-gather sums what they send back; averaging gradients over the ranks makes that the gradient of one
loss.

Padding was dropped before the cut, so outputs there are unknown. They are noise, another on each rank and in each call:
a loss that reads them differs between ranks, or sends a gradient to them.
"""

# B rows, S tokens a row, N tokens that are kept, T tokens of this rank

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import _torch
from spanwise.attention import executor
from spanwise.integrations.transformers.batches import ARGUMENT, PlannedBatch, is_packed
from spanwise.integrations.transformers.inputs import by_name, prepare, site_of

_OF_TOKENS = ("logits", "last_hidden_state", "hidden_states")
# Fields of trl's outputs of a fused head: token t has the value of label t + 1, the last token of a row none. They are
# 0 where there is no label, as at padding.
_OF_LABELS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


@dataclasses.dataclass
class Step:
    """A step of a trainer, in which models return whole outputs, and evaluate on cut batches."""

    mesh: DeviceMesh  # of the cp axis
    logits: bool  # whether logits and hidden states are restored
    predicts: bool = False  # whether they are returned
    # For each output with padding: noise, its indices in [B * S, …], and that where it is returned.
    filled: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = dataclasses.field(default_factory=list)

    def run(self, steps: list[Step], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's loss, or a tuple of it and of predictions, which are NaN at padding."""
        steps.append(self)
        try:
            result = function(*args, **kwargs)
        finally:
            steps.pop()
        loss = result[0] if isinstance(result, tuple) else result
        if self.filled and loss is not None:
            self._check(torch.as_tensor(loss))
        for _, padding, flat in self.filled:
            if flat is not None:
                flat.index_fill_(0, padding, torch.nan)
        return result

    def restored(self, x: torch.Tensor, planned: PlannedBatch) -> torch.Tensor:
        """``[B, S, …]`` from kept tokens ``[N, …]``, with noise at padding."""
        documents, rank = planned.documents, planned.plan.rank
        if documents.keep is None:
            return documents.restored(x)
        flat = x.new_empty(documents.rows * documents.length, *x.shape[1:])
        padding = torch.ones(len(flat)).index_fill(0, documents.keep, 0).nonzero()[:, 0].to(x.device)
        generator = torch.Generator(x.device).manual_seed(len(self.filled))
        noise = x.new_empty(len(padding), *x.shape[1:]).normal_(generator=generator)
        noise *= (-1) ** rank * (1 + rank / planned.plan.num_ranks)  # another sign and another size
        noise.requires_grad_(x.requires_grad)
        flat.index_copy_(0, documents.keep.to(x.device), x).index_copy_(0, padding, noise)
        self.filled.append((noise, padding, flat.detach() if self.predicts else None))
        return flat.unflatten(0, (documents.rows, -1))

    def _check(self, loss: torch.Tensor) -> None:
        """Raise ValueError for a loss that reads outputs at padding; an all-reduce of 24 bytes."""
        value = loss.detach().double().mean().nan_to_num().cpu()
        # Infinite gradients are of a loss that overflowed.
        flows = any(x.grad is not None and x.grad.nan_to_num(0.0, 0.0, 0.0).any() for x, *_ in self.filled)
        extremes = torch.stack([value, -value, torch.tensor(float(flows))])
        extremes = extremes.to(_torch.comparison_device(self.mesh.get_group()))
        largest, smallest, reads = executor.all_reduce(extremes, "max", self.mesh, "a loss").tolist()
        if reads or largest + smallest > 1e-6 * max(abs(largest), abs(smallest)):  # accelerators may round apart
            raise ValueError(
                f"the loss is {-smallest} to {largest} on the cp ranks: it reads outputs at padding, which are noise, "
                f"or random numbers of its own; multiply by the attention mask, or take what has a label"
            )


def restore_outputs(model: nn.Module, steps: list[Step]) -> None:
    """Let `model`, after `context_parallel`, return whole outputs while there is a step."""
    model.register_forward_pre_hook(functools.partial(_cut, steps), with_kwargs=True, prepend=True)
    model.register_forward_hook(functools.partial(_restore, steps), with_kwargs=True, prepend=True)


def _cut(steps: list[Step], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the model, in evaluation: what the hook of `context_parallel` does while it trains."""
    taken = (ARGUMENT, "past_key_values", "cache_params", "logits_to_keep")  # it is cut already, or generates
    if not steps or model.training or any(kwargs.get(name) is not None for name in taken):
        return None
    batch = by_name(model, args) | kwargs
    if site_of(model).mesh.size() == 1 and not is_packed(batch):  # no rank to compare losses with
        return None
    return (), prepare(batch, model)


def _restore(steps: list[Step], model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    planned: PlannedBatch | None = kwargs.get(ARGUMENT)
    if not steps or planned is None:
        return None
    if isinstance(output, tuple):
        raise ValueError(f"{type(model).__name__} returns a tuple; set return_dict=True in its config")

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return spanwise.unshard(planned.plan, x=x.to(torch.uint8) if x.dtype is torch.bool else x)[0].to(x.dtype)

    def restored(x: Any) -> Any:
        return tuple(map(restored, x)) if isinstance(x, tuple) else steps[-1].restored(gathered(x), planned)

    values = dict(output.items())
    if "log_probs" in values:
        values.pop("loss")  # trl's sum over one rank's tokens; its trainers take log_probs
    for name, x in values.items():
        if name in _OF_LABELS:
            values[name] = planned.documents.restored(gathered(x))[:, :-1]
        elif name in _OF_TOKENS and steps[-1].logits:
            values[name] = restored(x)
        elif name == "router_logits" and steps[-1].logits:  # of the tokens of all ranks, [N, experts]
            values[name] = tuple(y if y is None else steps[-1].restored(y, planned).flatten(0, 1) for y in x)
    return type(output)(**values)
