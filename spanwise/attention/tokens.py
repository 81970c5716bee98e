"""A rank's tokens taken from whole tensors, and whole tensors gathered from all ranks' tokens.

`batch` and `verify` build on it; `batch` adds pytrees, labels and losses.
"""

# B batch rows (1 where one layout serves all), T tokens of this rank, S tokens of the sequence, F features, R rows

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.compare import compare_backward, compare_call, eager
from spanwise.attention.executor import GATHERED, Link, RankStep, bring, padded
from spanwise.attention.rank_plan import RankPlan
from spanwise.layouts.packing import Side
from spanwise.layouts.thd_order import check_batch_dim, check_dim
from spanwise.planning.plan_data import PlanData


def check_side(side: Side) -> None:
    """``ValueError`` unless `side` is "q" or "kv"."""
    if side not in ("q", "kv"):
        raise ValueError(f'side must be "q" or "kv", got {side!r}')


def shard_for_rank(
    plan: PlanData, rank: int, x: Any, *, dim: int = 1, batch_dim: int | None = 0, side: Side = "q"
) -> Any:
    """`rank`'s tokens of `x`, for any rank and without a mesh; see `spanwise.shard`."""
    check_side(side)
    layout = plan.layout if side == "q" else plan.kv_layout
    if not 0 <= rank < plan.num_ranks:
        raise ValueError(f"rank must be in [0, {plan.num_ranks}), got {rank}")
    tokens = torch.from_numpy(np.stack([layout.indices(rank, row) for row in range(layout.batch_size)]))
    return _torch.tree_map(lambda t: take(t, tokens, layout.seq_len, dim, batch_dim), x)


def take(x: torch.Tensor, index_BT: torch.Tensor, length: int, dim: int, batch_dim: int | None) -> torch.Tensor:
    """Select tokens `index_BT` along `dim`; one index row serves every batch row."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"only tensors can be sharded, got a {type(x).__name__}; take it out of the batch")
    dim = check_dim(x, dim)
    if x.shape[dim] != length:
        raise ValueError(f"dim {dim} must have {length} tokens, got a tensor of shape {tuple(x.shape)}")
    index_BT = to_device_of(x, index_BT)
    if index_BT.shape[0] == 1:
        return x.index_select(dim, index_BT[0])
    if batch_dim is None:
        return torch.stack([x.index_select(dim, row) for row in index_BT])
    rows = index_BT.shape[0]
    why = f"the plan lays out {rows} batch rows differently (batch_dim=None: a tensor without a batch dim)"
    batch_dim = check_batch_dim(x, dim, batch_dim, rows, why)
    shape = [1] * x.dim()
    shape[batch_dim], shape[dim] = index_BT.shape
    index = (index_BT if batch_dim < dim else index_BT.t()).reshape(shape)
    expanded = list(x.shape)
    expanded[dim] = index_BT.shape[1]
    return x.gather(dim, index.expand(expanded))


def to_device_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`index` on the device of `x`."""
    # To an accelerator the host does not wait; from one it does, because the host may read the copy at once.
    return index.to(x.device, non_blocking=x.device.type != "cpu")


def gather(
    plan: PlanData | RankPlan,
    local: RankPlan,
    mesh: DeviceMesh | None,
    x: torch.Tensor,
    dim: int,
    batch_dim: int | None,
    side: Side,
) -> torch.Tensor:
    """The whole sequence of `x`, this rank's tokens along `dim`; see `spanwise.unshard`."""
    dim = check_dim(x, dim)
    tokens = (local.tokens if side == "q" else local.key_tokens).shape[1]
    if x.shape[dim] != tokens:
        kind = "tokens" if side == "q" else "keys"
        raise ValueError(
            f"dim {dim} must have rank {local.rank}'s {tokens} {kind}, got a tensor of shape {tuple(x.shape)}"
        )
    if x.is_complex():
        raise ValueError(f"unshard takes real tensors, got {x.dtype}; unshard torch.view_as_real(x)")
    if local.num_ranks == 1:
        return x
    assert mesh is not None
    restore, length = local.restore, local.padded.shape[0]
    if side == "kv" and local.kv_tokens is not None:
        if not isinstance(plan, PlanData):
            raise ValueError("a RankPlan does not know where other ranks' keys lie; pass the Plan")
        restore = to_device_of(x, torch.from_numpy(plan.kv_layout.slots()))
        length = int(plan.kv_layout.tokens_per_rank.max())
    if local.batched:
        rows = local.tokens.shape[0]
        batch_dim = check_batch_dim(x, dim, batch_dim, rows, f"the plan lays out {rows} batch rows differently")
        x_BTx = x.movedim((batch_dim, dim), (0, 1))
    else:
        x_BTx = x.movedim(dim, 0).unsqueeze(0)
    rest = x_BTx.shape[2:]
    rows_BTF = x_BTx.reshape(*x_BTx.shape[:2], math.prod(rest))
    facts, sizes = {"side": side, "dtype": x.dtype}, (rows_BTF.shape[0], rows_BTF.shape[2])
    call = compare_call("unshard or roll", facts, mesh, [x], sizes=("rows", sizes), plan=local.digest)
    rows_RF = padded(rows_BTF, length, dim=1).flatten(0, 1)
    for axis in reversed(range(mesh.ndim)):  # the last axis first, so that ranks come in the order of their numbers
        own = (rows_RF[:, :0],)
        link = Link(mesh.get_group(axis).group_name, mesh.size(axis), "shards (unshard, roll)", eager(call))
        (rows_RF,) = bring(rows_RF, [RankStep(None, None, own, own, kind=GATHERED)], link)
    full_BSx = rows_RF.index_select(0, restore.flatten()).view(*restore.shape, *rest)
    (full_BSx,) = compare_backward((full_BSx,), call, travels=True)
    if local.batched:
        assert batch_dim is not None
        return full_BSx.movedim((0, 1), (batch_dim, dim))
    return full_BSx.squeeze(0).movedim(0, dim)
