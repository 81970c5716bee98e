"""Whole batches in, whole outputs out: for losses and metrics that were written for one process.

`context_parallel` alone returns a rank's logits. A trainer's loss pairs them with whole labels and masks, so here a
forward hook restores them to ``[B, S, …]`` on all ranks of the cp mesh. All ranks then compute the same loss. The
adjoint of the all-gather sums what they send back; averaging gradients over the ranks makes that the gradient of one
loss.
"""

# B rows, S tokens a row, N tokens that are kept, T tokens of this rank

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

import spanwise
from spanwise.integrations.transformers.inputs import by_name, prepare
from spanwise.integrations.transformers.planned import ARGUMENT, PlannedBatch

_OF_TOKENS = ("logits", "last_hidden_state", "hidden_states")
# Fields of trl's outputs of a fused head: token t has the value of label t + 1, the last token of a row none.
_OF_LABELS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


@dataclasses.dataclass
class Calls:
    """Which calls of a model its hooks see.

    Attributes:
        whole: whether outputs are restored, and batches cut in evaluation too.
        logits: whether logits and hidden states are among what is restored.
    """

    whole: bool = False
    logits: bool = True

    @contextlib.contextmanager
    def returning_whole(self, logits: bool) -> Iterator[None]:
        """Within it models return whole outputs."""
        before = self.whole, self.logits
        self.whole, self.logits = True, logits
        try:
            yield
        finally:
            self.whole, self.logits = before


def restore_outputs(model: nn.Module, calls: Calls) -> None:
    """Let `model`, after `context_parallel`, return whole outputs while ``calls.whole``."""
    model.register_forward_pre_hook(functools.partial(_cut, calls), with_kwargs=True, prepend=True)
    model.register_forward_hook(functools.partial(_restore, calls), with_kwargs=True, prepend=True)


def whole(planned: PlannedBatch, x: torch.Tensor) -> torch.Tensor:
    """``[B, S, …]`` from the ranks' shards ``[1, T, …]``; 0 at padding. A collective call; its backward is one, too."""
    dtype = x.dtype
    x = spanwise.unshard(planned.plan, x=x.to(torch.uint8) if dtype is torch.bool else x)[0].to(dtype)
    return planned.documents.restored(x)


def _cut(calls: Calls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the model, in evaluation: what the hook of `context_parallel` does while it trains."""
    generates = kwargs.get("past_key_values") is not None or kwargs.get("logits_to_keep")
    if not calls.whole or model.training or generates or kwargs.get(ARGUMENT) is not None:
        return None
    return (), prepare(by_name(model, args) | kwargs, model)


def _restore(calls: Calls, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    planned: PlannedBatch | None = kwargs.get(ARGUMENT)
    if not calls.whole or planned is None:
        return None
    if not isinstance(output, ModelOutput):
        raise ValueError(
            f"{type(model).__name__} returned a {type(output).__name__}; set return_dict=True in its config"
        )
    names = [field.name for field in dataclasses.fields(output)]  # type: ignore[arg-type]  # all are dataclasses
    values = {name: getattr(output, name) for name in names}
    if "log_probs" in values:
        values["loss"] = None  # trl's sum over one rank's tokens; its trainers take log_probs
    for name, x in values.items():
        if x is None:
            continue
        if name in _OF_LABELS:
            values[name] = whole(planned, x)[:, :-1]
        elif name in _OF_TOKENS and calls.logits:
            values[name] = tuple(whole(planned, y) for y in x) if isinstance(x, tuple) else whole(planned, x)
    return type(output)(**values)
