"""Outputs of one rank's tokens that know their layout.

Two models that plan one batch for themselves may give a rank other tokens, in tensors of one shape. So `logits` and
`last_hidden_state` are a subclass of Tensor: an operation on two layouts raises, and so does an index that names a
place in the sequence, such as ``[:, -1]``. Results of other shapes are plain tensors.
"""

# T tokens of this rank

from __future__ import annotations

import itertools
from typing import Any

import torch

from spanwise.layouts.layout import Layout

_FIELDS = ("logits", "last_hidden_state")


class LocalTokens(torch.Tensor):
    """``[1, T, …]`` of this rank's tokens in a layout. ``x.as_subclass(torch.Tensor)`` is the plain tensor."""

    token_layout: Layout

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            lists = [x if isinstance(x, (list, tuple)) else [x] for x in (*args, *(kwargs or {}).values())]
            own = [x for x in itertools.chain(*lists) if isinstance(x, cls) and hasattr(x, "token_layout")]
            if any(x.token_layout != own[0].token_layout for x in own[1:]):
                raise ValueError(
                    "outputs of models that cut the batch differently hold other tokens on each rank; prepare it for "
                    "all of them at once: student_batch, teacher_batch = hf.prepare(batch, [student, teacher])"
                )
            if func is torch.Tensor.__getitem__ and isinstance(args[0], cls):
                _check_index(args[1], args[0].dim())
            result = func(*args, **(kwargs or {}))
            if own and type(result) is torch.Tensor and result.shape[:2] == own[0].shape[:2]:
                result = of_layout(result, own[0].token_layout)
        return result


def of_layout(x: torch.Tensor, layout: Layout) -> LocalTokens:
    """`x` ``[1, T, …]`` itself, which then knows the layout of its tokens. A view of it would make FSDP2 warn."""
    x.__class__ = LocalTokens
    assert isinstance(x, LocalTokens)
    x.token_layout = layout
    return x


def mark_outputs(output: Any, layout: Layout) -> None:
    """Let the outputs of a model know the layout of the batch; DTensors and tuples are left as they are."""
    for name in _FIELDS:
        if type(x := getattr(output, name, None)) is torch.Tensor:
            of_layout(x, layout)


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
        raise ValueError(
            f"[{rows}, {tokens}] names places in the sequence, and a rank holds tokens from several places of it; "
            f"restore the whole with spanwise.unshard(plan, mesh, x) first, or index x.as_subclass(torch.Tensor)"
        )
