"""What a batch holds: tensors to cut and where, and values that pass through. Refuses what contradicts the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from spanwise.attention.rank_plan import RankPlan
from spanwise.planning.plan import Plan


def tensors_of(batch: Mapping[str, Any], plan: Plan | RankPlan, dim: int, kv: Collection[str]) -> dict[str, Any]:
    """The tensors of the batch that are cut; numbers, strings, None and tensors without dims are not.

    Raises:
        ValueError: other values, shapes that do not fit the plan, different batch sizes, names in `kv` that the batch
            lacks or that belong to the queries, an attention mask that contradicts the plan.
    """
    tensors = {}
    for name, x in batch.items():
        if isinstance(x, torch.Tensor) and x.dim() > 0:
            tensors[name] = x
        elif x is not None and not isinstance(x, (bool, int, float, str, torch.Tensor)):
            raise ValueError(f"batch[{name!r}] is a {type(x).__name__}: make it a tensor, or take it out of the batch")
    if isinstance(kv, str) or not set(kv) <= set(tensors) - {"labels", "position_ids"}:
        raise ValueError(f"kv must name tensors of {sorted(tensors)} that belong to the keys; got {kv!r}")
    if not set(tensors) - set(kv):
        raise ValueError(f'shard_batch got no tensor of queries, only {sorted(batch)}; cut keys by shard(…, side="kv")')
    if "attention_mask" in tensors and "attention_mask" not in kv:
        _check_attention_mask(tensors["attention_mask"], plan, dim)
    for name, x in tensors.items():
        length, at = plan.kv_len if name in kv else plan.seq_len, seq_dim(name, x, dim)
        if x.dim() <= at or x.shape[at] != length:
            of_keys = name not in kv and x.shape[dim : dim + 1] == (plan.kv_len,)
            hint = f"; if it belongs to the keys, give kv=[{name!r}]" if of_keys else ""
            raise ValueError(f"batch[{name!r}] must have size {length} in dim {at}, got {tuple(x.shape)}{hint}")
    sizes = {name: x.shape[seq_dim(name, x, dim) - 1] for name, x in tensors.items()} if dim else {}
    if sizes.get("position_ids") == 1:  # the same positions in all rows, as models take them
        sizes.pop("position_ids")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the batch's tensors must share their batch size, got {sizes}")
    return tensors


def seq_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """The sequence dim of a tensor of the batch: `dim`, but the last one of position ids with several rows.

    Qwen-VL has three positions of each token, ``[3, B, S]``.
    """
    return x.dim() - 1 if name == "position_ids" and x.dim() == dim + 2 else dim


def _check_attention_mask(mask: torch.Tensor, plan: Plan | RankPlan, dim: int) -> None:
    """``ValueError`` unless the padding that a batch marks is the plan's; copied from an accelerator for this."""
    if mask.dim() > dim + 1:
        raise ValueError(
            f"batch['attention_mask'] of shape {tuple(mask.shape)} is a mask of queries and keys, as the plan: leave "
            f"it out, or make the plan from it with SpanMask.from_mask_mod"
        )
    if isinstance(plan, RankPlan):
        raise ValueError("a RankPlan does not know the batch's padding; pass the Plan, or leave attention_mask out")
    if mask.shape[dim:] != (plan.seq_len,):
        return  # the shape is refused with the others
    given = np.atleast_2d(mask.cpu().numpy() != 0)
    if plan.packing is not None:
        holds = plan.packing.valid_q[None]
    else:
        holds = np.any(np.broadcast_arrays(*[one.area() > 0 for one in plan.masks.values()]), axis=0)
    if len(holds) not in (1, len(given)):
        raise ValueError(f"batch['attention_mask'] has {len(given)} rows, the plan masks for {len(holds)} batch rows")
    # Without a packing, rows that read nothing need not be padding.
    wrong = given != holds if plan.packing is not None else ~given & holds
    for row, token in np.argwhere(wrong)[:1]:
        raise ValueError(
            f"batch['attention_mask'] is {given[row, token]} at row {row}, token {token}, and the plan's padding says "
            f"otherwise: make the plan from SpanMask.from_attention_mask, or Packing.from_attention_mask"
        )
