"""Context parallelism for torchtitan 0.3: the two calls of its `distributed.context_parallel`, for any span mask.

    from spanwise.integrations import torchtitan as titan

    titan.apply_cp_to_forward(attention_modules, parallel_dims.get_mesh("cp"))       # where the model is parallelized
    inputs, labels, extra_kwargs = titan.prepare_context_parallel_input(             # where a batch is cut
        inputs, labels, extra_kwargs, parallel_dims.get_mesh("cp")
    )

The plan travels in place of `attention_masks`, as an argument of every layer, so that activation checkpointing
recomputes with the right one. torchtitan is imported when modules are wrapped; cutting a batch does not need it.
"""

# B batch, S tokens of a row, T tokens of this rank, N heads, H head dim: tensors of torchtitan are [B, T, N, H]

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise.attention.kernels.base import Kernel

# torchtitan's names of load balancers, where they differ from `make_plan`'s.
_BALANCERS = {"headtail": "head_tail", None: "contiguous"}
_CAUSAL = (-1, 0)  # the window_size of VarlenAttention that limits nothing but the future


@dataclasses.dataclass(frozen=True)
class PlannedMask:
    """What attention gets in place of a mask: the rank's plan, and which of its masks to use.

    Not a pytree: frameworks that cast or move tensors in arguments leave it alone.
    """

    plan: spanwise.RankPlan
    name: str = "default"


def apply_cp_to_forward(
    attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh, *, kernel: str | Kernel = "auto"
) -> None:
    """Let torchtitan's inner attention modules attend over all ranks of `cp_mesh`.

    Replaces the forward of each module. Call it where torchtitan calls its own function of this name: before
    ``Module.parallelize()``, compile and FSDP.

    Args:
        attention_modules: ``block.attention.inner_attention`` of every layer: `FlexAttention`, `VarlenAttention` or
            `ScaledDotProductAttention`. Their own kernel is not used.
        cp_mesh: the cp mesh, 1-D.
        kernel: as in `spanwise.context_parallel_attention`.

    Raises:
        ValueError: no module, a module with a forward of its own, or a `VarlenAttention` with a window, which belongs
            into the mask.
    """
    attention = importlib.import_module("torchtitan.models.common.attention")
    known = [attention.FlexAttention, attention.VarlenAttention, attention.ScaledDotProductAttention]
    if not attention_modules:
        raise ValueError("apply_cp_to_forward got no attention module")
    for module in attention_modules:
        if all(type(module).forward is not cls.forward for cls in known) or "forward" in vars(module):
            names = ", ".join(cls.__name__ for cls in known)
            raise ValueError(f"apply_cp_to_forward takes {names} with their own forward, got {type(module).__name__}")
        window = tuple(getattr(module, "window_size", _CAUSAL))
        if window != _CAUSAL:
            raise ValueError(f"window_size={window} belongs into the mask: SpanMask.documents(…, window={window})")

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attention_masks: Any = None, scale: float | None = None,
        score_mod: Callable[..., Any] | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        enable_gqa: bool = False, is_causal: bool = True, **unknown: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(attention_masks, PlannedMask):
            got = type(attention_masks).__name__
            raise ValueError(f"attention_masks must come from spanwise's prepare_context_parallel_input, got {got}")
        if unknown or not is_causal:
            given = unknown if is_causal else {"is_causal": False, **unknown}
            raise ValueError(f"attention under context parallelism does not take {given}; the plan's mask decides")
        options: Any = {"mask_name": attention_masks.name, "scale": scale, "score_mod": score_mod, "kernel": kernel}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        aux = spanwise.AuxRequest(lse=out_transform is not None)
        out, aux = spanwise.context_parallel_attention(
            q, k, v, attention_masks.plan, cp_mesh, return_aux=aux, **options
        )
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, aux.lse.transpose(1, 2))

    for module in attention_modules:
        module.forward = forward


def prepare_context_parallel_input(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    extra_kwargs: Mapping[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device | str | None = None,
    load_balancer_type: str | spanwise.LoadBalancer | None = "auto",
    *,
    mask: Any = None,
    plan: spanwise.Plan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Plan a batch and cut it to this rank's tokens. A collective call over `cp_mesh`.

    The mask is the first of: `plan`, `mask`, ``extra_kwargs["attention_masks"]`` (a `BlockMask` or a dict of them),
    causal documents of ``extra_kwargs["positions"]``.

    Args:
        inputs: ``[B, S]``, or embeddings ``[B, S, D]``; whole, the same on all ranks of `cp_mesh`.
        labels: ``[B, S]``, shifted before, as torchtitan's loaders do.
        extra_kwargs: arguments of the model. ``positions`` ``[B, S]`` are 0 at the start of each document; missing
            ones count from the start of the row.
        cp_mesh: the cp mesh, 1-D.
        device: of the results; default: that of `inputs`.
        load_balancer_type: "headtail", "ptrr" or None as in torchtitan, or a balancer of `spanwise.make_plan`.
        mask: a `SpanMask`, a `BlockMask`, or masks by the keys that the model looks up.
        plan: made before, for example in the loader.
        options: arguments of `spanwise.make_plan`. Several masks share one layout, which ``weights`` balances; so there
            is no ``ptrr_mask_key``.

    Returns:
        inputs ``[B, T, …]``, labels ``[B, T]`` and the arguments of the model, in which ``positions`` ``[B, T]`` are
        cut and ``attention_masks`` holds the plan. Other arguments are as given.

    Raises:
        ValueError: shapes that differ, or a plan of another batch; on all ranks alike.
    """
    shape = tuple(inputs.shape[:2])
    positions = extra_kwargs.get("positions")
    if positions is None:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand(shape)
    if tuple(labels.shape) != shape or tuple(positions.shape) != shape:
        got = f"{tuple(labels.shape)} and {tuple(positions.shape)}"
        raise ValueError(f"labels and positions must be [B, S] = {shape}, as inputs, got {got}")
    if plan is None:
        index = torch.arange(shape[1], device=positions.device).expand(shape)
        starts = torch.where(positions == 0, index, 0).cummax(dim=1).values  # positions may skip numbers
        documents = spanwise.SpanMask.from_position_ids(index - starts)
        masks = next(m for m in (mask, extra_kwargs.get("attention_masks"), documents) if m is not None)
        if isinstance(masks, Mapping):
            masks = {name: mask for name, mask in masks.items() if mask is not None}  # None marks an unused mask
        balancer: Any = load_balancer_type
        balancer = _BALANCERS.get(balancer, balancer) if balancer is None or isinstance(balancer, str) else balancer
        plan = spanwise.make_plan(masks, cp_mesh.size(), balancer=balancer, **options)
    elif mask is not None or options:
        raise ValueError("a plan has its masks and options; leave mask and the options of make_plan out")
    given, wanted = (plan.seq_len, plan.num_ranks), (shape[1], cp_mesh.size())
    if given != wanted:
        raise ValueError(f"the plan is for {given} tokens of a row and ranks, the batch and the mesh are of {wanted}")
    device = inputs.device if device is None else torch.device(device)
    local = plan.local(cp_mesh, device)
    inputs, labels, positions = spanwise.shard(local, x=tuple(x.to(device) for x in (inputs, labels, positions)))
    planned: Any = {name: PlannedMask(local, name) for name in plan.masks}
    planned = planned["default"] if set(planned) == {"default"} else planned
    return inputs, labels, {**extra_kwargs, "positions": positions, "attention_masks": planned}


__all__ = ["PlannedMask", "apply_cp_to_forward", "prepare_context_parallel_input"]
