"""Losses and outputs of one rank's tokens: a loss is that of all ranks, and outputs know their layout.

Two models that plan one batch for themselves may give a rank other tokens, in tensors of one shape. So `logits`,
`last_hidden_state` and the last of `hidden_states` are a subclass of Tensor: an operation on two layouts raises, and so
do an index that names a place in the sequence, such as ``[:, -1]``, a mean over tokens and a product with a mask of the
batch. So are results for the same tokens, ``[T, …]`` too; others are plain.
"""

# T tokens of this rank

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.loss.loss_utils import ForCausalLMLoss, ForTokenClassification

import spanwise
from spanwise._torch import tree_leaves, tree_map
from spanwise.integrations.transformers.batches import ARGUMENT, PlannedBatch, planned_of
from spanwise.layouts.layout import Layout

# Losses that `GlobalLoss` computes, means over tokens; and whether they take the next token's label.
LOSSES = {ForCausalLMLoss: True, ForTokenClassification: False}
_REMEDY = (
    "and a rank holds tokens from several places and rows; restore the whole with spanwise.unshard(plan, mesh, x) "
    "first, or take x.as_subclass(torch.Tensor)"
)


class _Plain:
    """The tensor as a plain one. Dynamo takes what it reads from an attribute, not the tensor, as input of a graph."""

    def __get__(self, x: torch.Tensor, owner: Any = None) -> torch.Tensor:
        return x.as_subclass(torch.Tensor)


class LocalTokens(torch.Tensor):
    """``[1, T, …]`` or ``[T, …]`` of this rank's tokens in a layout. ``x.as_subclass(torch.Tensor)`` is plain."""

    token_layout: Layout

    plain = _Plain()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_dynamo_compiling():  # AOTAutograd refuses the subclass at the first run of a graph
                args, kwargs = tree_map(lambda x: x.plain if isinstance(x, cls) else x, (args, kwargs))
                return func(*args, **(kwargs or {}))
            own = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls) and hasattr(x, "token_layout")]
            if any(x.token_layout != own[0].token_layout for x in own[1:]):
                raise ValueError("the outputs hold other tokens on each rank: give hf.prepare one plan for both")
            if func is torch.Tensor.__getitem__ and isinstance(args[0], cls) and args[0].shape[0] == 1:
                _check_index(args[1], args[0].dim())
            result = func(*args, **(kwargs or {}))
            if not own or func is torch.Tensor.as_subclass:  # as_subclass is the way out
                return result
            _check_result(func.__name__, own[0].shape, result)
            for x in result if isinstance(result, tuple) else [result]:
                if type(x) is torch.Tensor and 1 < _tokens(own[0].shape) == _tokens(x.shape):
                    of_layout(x, own[0].token_layout)
        return result

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # a file has no ranks
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _tokens(shape: Sequence[int]) -> int:
    """T of ``[1, T, …]`` or ``[T, …]``; 0 without dims."""
    return next(iter(shape[1:] if shape[:1] == (1,) else shape), 0)


def of_layout(x: torch.Tensor, layout: Layout) -> LocalTokens:
    """`x` ``[1, T, …]`` itself, which then knows the layout of its tokens. A view of it would make FSDP2 warn."""
    x.__class__, x.token_layout = LocalTokens, layout  # type: ignore[attr-defined]
    return x  # type: ignore[return-value]


def mark_outputs(output: Any, planned: PlannedBatch) -> None:
    """Let outputs of one rank's tokens know their layout; DTensors, tuples and whole outputs are left as they are."""
    own, whole = tuple(planned.positions.shape), (planned.documents.rows, planned.documents.length)
    states = getattr(output, "hidden_states", None) or [None]  # checkpoints may keep the others
    for x in (getattr(output, "logits", None), getattr(output, "last_hidden_state", None), states[-1]):
        if type(x) is torch.Tensor and tuple(x.shape[:2]) == own != whole:
            of_layout(x, planned.layout)


def _check_index(index: Any, dims: int) -> None:
    """Raise ValueError for an index that names tokens by their place: a number, a part, or numbers for each row."""
    given = [x for x in (index if isinstance(index, tuple) else (index,)) if x is not None]
    masks = [x.dim() - 1 for x in given if isinstance(x, torch.Tensor) and x.dtype is torch.bool]
    left = dims + 1 - len(given) - sum(masks)  # dims that an Ellipsis stands for
    whole = [y for x in given for y in ([slice(None)] * left if x is Ellipsis else [x])]
    if len(whole) < 2 or (masks and isinstance(whole[0], torch.Tensor)):
        return
    rows, tokens = whole[:2]
    pairs = isinstance(rows, torch.Tensor) and isinstance(tokens, torch.Tensor)
    if pairs or isinstance(tokens, int) or (isinstance(tokens, slice) and tokens != slice(None)):
        raise ValueError(f"[{rows}, {tokens}] names places in the sequence, {_REMEDY}")


def _check_result(name: str, shape: torch.Size, result: Any) -> None:
    """Raise ValueError for a mean over tokens, and for a product with several rows, such as a mask of the batch."""
    averaged = name == "mean" and len(shape) > 2 and result.dim() and _tokens(result.shape) != _tokens(shape)
    if averaged or (name == "mul" and shape[0] == 1 < result.shape[0] and result.shape[1:] == shape[1:]):
        raise ValueError(f"{name} makes {tuple(result.shape)} of a shard {tuple(shape)}, {_REMEDY}")


@dataclasses.dataclass(frozen=True)
class GlobalLoss:
    """A `loss_function` that is `spanwise.cross_entropy` over `mesh` for planned batches, and `before` for others."""

    mesh: DeviceMesh
    before: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits, labels = [*args, *(kwargs[name] for name in ("logits", "labels")[len(args) :])][:2]
        planned: PlannedBatch | None = kwargs.get(ARGUMENT) or planned_of(labels)
        if planned is None:
            if torch.compiler.is_compiling() and not LOSSES[self.before]:
                raise ValueError("the loss of token classification does not compile; compute it from the logits")
            return self.before(*args, **{name: x for name, x in kwargs.items() if name != ARGUMENT})
        if kwargs.get("ignore_index", -100) != -100:
            raise ValueError(f"labels are ignored at -100, got ignore_index={kwargs['ignore_index']}; replace them")
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        if planned.edges is not None:
            logits = logits[:, planned.edges.sources]
        labels = kwargs.get("shift_labels", labels)
        loss = spanwise.cross_entropy(
            logits, labels, self.mesh, num_valid=kwargs.get("num_items_in_batch"), weights=planned.weights
        )
        planned.losses.append((loss, version_of(loss)))
        return loss

    def __deepcopy__(self, memo: Any) -> GlobalLoss:  # meshes cannot be copied
        return self


def version_of(x: torch.Tensor) -> int:
    """How often `x` was changed in place; 0 in inference mode, where that is not counted."""
    return 0 if not torch.compiler.is_compiling() and x.is_inference() else x._version  # compiled code cannot ask
