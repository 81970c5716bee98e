"""The calls that `verify` makes: a function or a whole model, its inputs by position or by name, its output."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.kernels.base import Chunk
from spanwise.attention.rank_plan import RankPlan

_PLAN_NAMES = ("plan", "block_mask", "attn_mask")


class _Watched(dict[str, tuple[Chunk, ...]]):
    """A rank plan's chunks that remember whether attention asked for them."""

    asked = False

    def __getitem__(self, name: str) -> tuple[Chunk, ...]:
        self.asked = True
        return super().__getitem__(name)


@dataclasses.dataclass(frozen=True)
class Call:
    """A function to verify.

    Attributes:
        fn: takes the inputs and the plan.
        names: of the inputs; None where they are positional.
        others: arguments by name that are the same for every plan.
        plan_name: of the plan's argument; None: found in the signature, or positional.
    """

    fn: Callable[..., Any]
    names: tuple[str, ...] | None
    others: dict[str, Any]
    plan_name: str | None

    def __call__(self, values: Sequence[torch.Tensor], local: RankPlan, mesh: DeviceMesh | None) -> torch.Tensor:
        """The output for these inputs and this plan."""
        forward = self.fn.forward if isinstance(self.fn, torch.nn.Module) else self.fn
        parameters = inspect.signature(forward).parameters
        named = {} if self.names is None else dict(zip(self.names, values, strict=True))
        positional = values if self.names is None else ()
        plan_names = [name for name in _PLAN_NAMES if name in parameters]
        if self.plan_name is not None or self.names is not None:
            plan_names = [self.plan_name or (plan_names or ["plan"])[0]]
        given = named | self.others | dict.fromkeys(plan_names, local)
        if plan_names and "mesh" in parameters:
            given["mesh"] = None if local.num_ranks == 1 else mesh
        return _tensor_of(self.fn(*positional, **given) if plan_names else self.fn(*positional, local, **given))

    def asks(
        self, values: Sequence[torch.Tensor], local: RankPlan, mesh: DeviceMesh | None
    ) -> tuple[torch.Tensor, bool]:
        """The output, and whether attention read the plan; False in compiled code, too."""
        watched = _Watched(local.chunks)
        out = self(values, dataclasses.replace(local, chunks=watched), mesh)
        return out, watched.asked


def _tensor_of(result: Any) -> torch.Tensor:
    """The output tensor: the result, its logits (as Hugging Face's models return them), or its first part."""
    for found in (result, getattr(result, "logits", None), result[0] if isinstance(result, (tuple, list)) else None):
        if isinstance(found, torch.Tensor):
            return found
    raise ValueError(
        f"verify compares one tensor: the function must return it, or an object with logits, or a tuple that begins "
        f"with it; got a {type(result).__name__}. Wrap the model in a function that returns the tensor"
    )
