"""The batch contract: shard and unshard, labels shifted before the cut, one loss over all ranks.

What goes wrong elsewhere happens at shard edges: labels shifted after the cut lose one token a shard, and means of
means weight tokens by the rank they are on. So labels are shifted while the sequence is whole, and the loss divides by
the number of valid tokens of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.exchange import all_gather, failure
from spanwise.attention.rank_plan import RankPlan, check_rank, rank_on, spread_slots
from spanwise.batch import documents
from spanwise.layouts.packing import Packing, Side
from spanwise.layouts.thd_order import check_dim
from spanwise.masks.checks import check_offset_rows
from spanwise.planning.plan import Plan

IGNORE_INDEX = -100


def shard(
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None,
    x: Any,
    dim: int = 1,
    *,
    batch_dim: int | None = 0,
    side: Side = "q",
) -> Any:
    """This rank's tokens of `x`, in the plan's order. Differentiable; no communication.

    Args:
        plan: the plan, or this rank's `RankPlan`.
        mesh: the cp mesh; None for a plan of one rank.
        x: a tensor with the whole sequence along `dim`, or a pytree of such tensors.
        dim: the sequence dim.
        batch_dim: where the batch rows are; read only when the plan lays out every batch row differently. None says
            that `x` has no batch dim (a RoPE table, say): the result then gets one, in front.
        side: "q", or "kv" for what belongs to the keys of cross attention.

    Returns:
        `x` with ``T`` tokens along `dim`; same dtype and device.
    """
    _check_side(side)
    if isinstance(plan, RankPlan):
        tokens, length = (plan.tokens, plan.seq_len) if side == "q" else (plan.key_tokens, plan.kv_len)
        return _torch.tree_map(lambda t: _take(t, tokens, length, dim, batch_dim), x)
    rank = rank_on(mesh, plan.num_ranks, plan.inner)
    return shard_for_rank(plan, rank, x, dim=dim, batch_dim=batch_dim, side=side)


def _check_side(side: Side) -> None:
    if side not in ("q", "kv"):
        raise ValueError(f'side must be "q" or "kv", got {side!r}')


def shard_for_rank(plan: Plan, rank: int, x: Any, *, dim: int = 1, batch_dim: int | None = 0, side: Side = "q") -> Any:
    """`rank`'s tokens of `x`; what `shard` does, for any rank and without a mesh."""
    _check_side(side)
    layout = plan.layout if side == "q" else plan.kv_layout
    if not 0 <= rank < plan.num_ranks:
        raise ValueError(f"rank must be in [0, {plan.num_ranks}), got {rank}")
    tokens = torch.from_numpy(np.stack([layout.indices(rank, row) for row in range(layout.batch_size)]))
    return _torch.tree_map(lambda t: _take(t, tokens, layout.seq_len, dim, batch_dim), x)


def _take(x: torch.Tensor, index_BT: torch.Tensor, length: int, dim: int, batch_dim: int | None) -> torch.Tensor:
    """Select tokens `index_BT` along `dim`; one index row serves every batch row."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"only tensors can be sharded, got a {type(x).__name__}; take it out of the batch")
    dim = check_dim(x, dim)
    if x.shape[dim] != length:
        raise ValueError(f"dim {dim} must have {length} tokens, got a tensor of shape {tuple(x.shape)}")
    index_BT = _beside(x, index_BT)
    if index_BT.shape[0] == 1:
        return x.index_select(dim, index_BT[0])
    if batch_dim is None:
        return torch.stack([x.index_select(dim, row) for row in index_BT])
    batch_dim = check_dim(x, batch_dim)
    if batch_dim == dim or x.shape[batch_dim] != index_BT.shape[0]:
        raise ValueError(
            f"the plan lays out {index_BT.shape[0]} batch rows differently, so batch_dim must be a dim of that size "
            f"other than dim={dim}; got batch_dim={batch_dim} of a tensor of shape {tuple(x.shape)}. Pass "
            f"batch_dim=None for a tensor without a batch dim"
        )
    shape = [1] * x.dim()
    shape[batch_dim], shape[dim] = index_BT.shape
    index = (index_BT if batch_dim < dim else index_BT.t()).reshape(shape)
    expanded = list(x.shape)
    expanded[dim] = index_BT.shape[1]
    return x.gather(dim, index.expand(expanded))


def _beside(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`index` on the device of `x`."""
    # On the way to an accelerator the host need not wait; what comes from one may be read at once.
    return index.to(x.device, non_blocking=x.device.type != "cpu")


def unshard(
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None,
    x: torch.Tensor,
    dim: int = 1,
    *,
    batch_dim: int | None = 0,
    side: Side = "q",
) -> torch.Tensor:
    """The whole sequence from all ranks' shards, on every rank. An all-gather.

    The backward is the exact adjoint: every rank gets the sum over all ranks of their gradients of its tokens (in
    float32 at least). For one loss that all ranks compute alike, scale that loss by ``1 / mesh.size()``.

    Args:
        plan, mesh, dim, batch_dim, side: as in `shard`; `batch_dim` must exist when every batch row has its own layout.
            ``side="kv"`` of cross attention takes the `Plan`: a `RankPlan` knows its own keys alone.
        x: this rank's shard, ``T`` tokens along `dim`.

    Returns:
        `x` with all tokens along `dim`, in their original order.
    """
    _check_side(side)
    local = plan.local(mesh, x.device) if isinstance(plan, Plan) else plan
    return _whole(plan, local, mesh, x, dim, batch_dim, side)


def _whole(
    plan: Plan | RankPlan,
    local: RankPlan,
    mesh: DeviceMesh | None,
    x: torch.Tensor,
    dim: int,
    batch_dim: int | None,
    side: Side,
) -> torch.Tensor:
    """`unshard` with this rank's part of the plan."""
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
    check_rank(local, mesh)
    assert mesh is not None
    restore, padded = local.restore, local.padded.shape[0]
    if side == "kv" and local.kv_tokens is not None:
        if not isinstance(plan, Plan):
            raise ValueError("a RankPlan does not know where other ranks' keys lie; pass the Plan")
        restore = _beside(x, torch.from_numpy(plan.kv_layout.slots()))
        padded = int(plan.kv_layout.tokens_per_rank.max())
    if local.batched:
        if batch_dim is None or check_dim(x, batch_dim) == dim or x.shape[batch_dim] != local.tokens.shape[0]:
            raise ValueError(
                f"the plan lays out {local.tokens.shape[0]} batch rows differently; batch_dim={batch_dim} of a tensor "
                f"of shape {tuple(x.shape)} is not a dim of that size other than dim={dim}"
            )
        x_BTx = x.movedim((batch_dim, dim), (0, 1))
    else:
        x_BTx = x.movedim(dim, 0).unsqueeze(0)
    rest = x_BTx.shape[2:]
    rows_BTF = x_BTx.flatten(2) if rest else x_BTx.unsqueeze(-1)
    full_BSx = _gather_rows(rows_BTF, local, mesh, restore, padded).unflatten(-1, rest or (1,))
    if not rest:
        full_BSx = full_BSx.squeeze(-1)
    if local.batched:
        assert batch_dim is not None
        return full_BSx.movedim((0, 1), (batch_dim, dim))
    return full_BSx.squeeze(0).movedim(0, dim)


def _gather_rows(
    x_BTF: torch.Tensor, local: RankPlan, mesh: DeviceMesh, restore: torch.Tensor, padded: int
) -> torch.Tensor:
    """All ranks' rows ``[B, S, F]`` in the order of `restore` ``[B or 1, S]``; shards are padded to `padded` tokens."""
    label, batch = "shards (unshard, roll)", x_BTF.shape[0]
    rows_RF = all_gather.pad_tokens(x_BTF, padded).flatten(0, 1)
    for axis in reversed(range(mesh.ndim)):  # the last axis first: so ranks come in the order of their numbers
        name, size = _torch.group_name(mesh.get_group(axis)), mesh.size(axis)
        if x_BTF.is_floating_point():
            rows_RF = all_gather.wait(all_gather.start(rows_RF, size, name, label), size, name, label)
        else:
            what = f"all-gather of {label}"
            pending = failure.start(what, name, _torch.start_all_gather, rows_RF, size, name)
            rows_RF = failure.wait(pending, what, name)
    at = spread_slots(local, restore, padded, batch).flatten()
    return rows_RF.index_select(0, at).unflatten(0, (batch, -1))


def roll(
    x: torch.Tensor,
    shifts: int,
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None,
    cu_seqlens: Any = None,
    *,
    dim: int = 1,
    batch_dim: int | None = 0,
    fill_value: float = 0,
    side: Side = "q",
) -> torch.Tensor:
    """Roll a sharded sequence inside its documents: token ``i`` gets token ``i - shifts`` of the same document.

    Unlike `torch.roll` nothing wraps around: where a document has no token ``i - shifts``, and in the padding of packed
    sequences, the result is `fill_value`.
    ``shifts=-1`` brings each token its successor, as multi-token prediction needs. Differentiable; gathers
    the sequence.

    Args:
        x: this rank's shard; `plan`, `mesh`, `dim`, `batch_dim`, `side` as in `unshard`.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: those the plan was made
            with. ``[0, seq_len]`` is one document. A plan with a packing knows its documents, and takes no others.
            With ``side="kv"`` they are offsets of keys.

    Raises:
        ValueError: also if neither tells where documents start, unless the mask cannot hold several.
    """
    if not isinstance(shifts, (int, np.integer)):
        raise ValueError(f"shifts must be an integer, got {shifts!r}")
    _check_side(side)
    ids = _ids(_packings(plan, cu_seqlens, side), side)
    local = plan.local(mesh, x.device) if isinstance(plan, Plan) else plan
    full = _whole(plan, local, mesh, x, dim, batch_dim, side)
    rolled = _shift(full, ids, int(shifts), dim, batch_dim, fill_value)
    return shard(local, mesh, rolled, dim, batch_dim=batch_dim, side=side)


def _shift(
    x: torch.Tensor, ids: np.ndarray, shifts: int, dim: int, batch_dim: int | None, fill_value: float
) -> torch.Tensor:
    """Token ``i - shifts`` of its document for each token ``i`` of the whole sequence `x`, or `fill_value`."""
    source, inside = documents.shift(ids, shifts)
    moved = x.index_select(dim, _beside(x, torch.from_numpy(source)))
    return torch.where(_along(inside, x, dim, batch_dim), moved, torch.full_like(moved, fill_value))


def _along(rows: np.ndarray, x: torch.Tensor, dim: int, batch_dim: int | None) -> torch.Tensor:
    """`rows` ``[rows, seq_len]`` as a tensor that broadcasts against `x`; one row serves every batch row."""
    dim = check_dim(x, dim)
    shape = [1] * x.dim()
    shape[dim] = rows.shape[1]
    if len(rows) > 1:
        if batch_dim is None or check_dim(x, batch_dim) == dim or x.shape[batch_dim] != len(rows):
            raise ValueError(
                f"cu_seqlens has {len(rows)} rows, so batch_dim must be a dim of that size other than dim={dim}; got "
                f"batch_dim={batch_dim} of a tensor of shape {tuple(x.shape)}"
            )
        batch_dim = check_dim(x, batch_dim)
        shape[batch_dim] = len(rows)
        rows = rows if batch_dim < dim else rows.T
    return _beside(x, torch.from_numpy(np.ascontiguousarray(rows))).reshape(shape)


def _packings(plan: Plan | RankPlan, cu_seqlens: Any, side: Side = "q") -> list[Packing]:
    """Where the documents of every batch row lie (one serves all): as the plan's packing or `cu_seqlens` say, else the
    plan's offsets, else one document where the mask rules out that there are several."""
    if isinstance(plan, RankPlan) and plan.packed:
        raise ValueError("a RankPlan does not know where its packed sequences and their padding lie; pass the Plan")
    if isinstance(plan, Plan) and plan.packing is not None:
        if cu_seqlens is not None:
            raise ValueError(
                "the plan has a packing, which tells where documents and padding lie; leave cu_seqlens out"
            )
        return [plan.packing]
    length = plan.seq_len if side == "q" else plan.kv_len
    if cu_seqlens is not None:
        return [Packing(row) for row in check_offset_rows(cu_seqlens, length)]
    if isinstance(plan, RankPlan):
        raise ValueError(
            f"a RankPlan does not know where documents start; pass cu_seqlens ([0, {length}] for one document)"
        )
    if plan.cu_seqlens is not None:
        return [Packing(row) for row in plan.cu_seqlens]
    if plan.kv_layout != plan.layout:
        raise ValueError(
            f"a mask of cross attention does not tell where documents start; pass cu_seqlens ([0, {length}] for one "
            f"document)"
        )
    cuts = documents.cuts(plan.masks.values(), plan.seq_len)
    if len(cuts):
        raise ValueError(
            f"no span of the mask crosses token {cuts[0]}, so a document may start there, and spans alone do not tell; "
            f"pass cu_seqlens here or to make_plan ([0, {plan.seq_len}] for one document)"
        )
    return [Packing([0, length])]


def _ids(packings: list[Packing], side: Side = "q") -> np.ndarray:
    """Document of each token, -1 in padding; int64 ``[rows, tokens]``."""
    return np.stack([packing.sequence_ids(side) for packing in packings])


def shard_batch(
    batch: dict[str, torch.Tensor],
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None,
    *,
    cu_seqlens: Any = None,
    shift_labels: bool = True,
    dim: int = 1,
    kv: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Shift labels inside documents, add position ids, and cut every tensor to this rank's tokens.

    Args:
        batch: tensors ``[B, seq_len, …]``, or ``[seq_len, …]`` with ``dim=0``, whole on every rank. ``"labels"``
            (int64, −100 is ignored) are shifted: the label of a token becomes the next token's, −100 at the end of
            each document, and −100 in padding in any case. ``"position_ids"`` is added if missing.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: those the plan was made
            with. ``[0, seq_len]`` is one document. A plan with a packing knows its documents, and takes no others.
        shift_labels: False where the loader already shifted.
        dim: 1 for tensors with a batch dim in front, 0 for packed ones without.
        kv: names of the tensors ``[B, kv_len, …]`` (``[kv_len, …]``) that belong to the keys of cross attention, the
            encoder's states say: they are cut as ``shard(…, side="kv")`` does. Positions of packed keys to be cut with
            them: ``torch.from_numpy(packing.positions("kv"))``.

    Returns:
        The same keys and ``"position_ids"`` int64 ``[B, T]`` (``[T]`` with ``dim=0``), counted from the start of each
        document, 0 in padding.

    Raises:
        ValueError: shapes that do not fit the plan, bad offsets, or none although the mask may hold several documents;
            names in `kv` that the batch lacks, or that belong to the queries.
    """
    if not batch:
        raise ValueError("shard_batch got an empty batch")
    if dim not in (0, 1):
        raise ValueError(f"dim must be 1 (tensors [B, seq_len, …]) or 0 (tensors [seq_len, …]), got {dim}")
    if isinstance(kv, str) or not set(kv) <= set(batch) - {"labels", "position_ids"}:
        raise ValueError(
            f"kv must name tensors of the batch, {sorted(batch)}, other than labels and position_ids, which belong to "
            f"the queries; got {kv!r}"
        )
    queries = {name: x for name, x in batch.items() if name not in kv}
    if not queries:
        raise ValueError(f'shard_batch got keys alone, {sorted(batch)}; cut them with shard(…, side="kv")')
    for name, x in batch.items():
        length = plan.seq_len if name in queries else plan.kv_len
        if x.dim() <= dim or x.shape[dim] != length:
            of_keys = name in queries and x.shape[dim : dim + 1] == (plan.kv_len,)
            hint = f"; if it belongs to the keys, give kv=[{name!r}]" if of_keys else ""
            expected = f"[{'batch, ' if dim else ''}{length}, …]"
            raise ValueError(f"batch[{name!r}] must be {expected}, got shape {tuple(x.shape)}{hint}")
    sizes = {name: x.shape[0] for name, x in (batch if dim else queries).items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the batch's tensors must share their batch size, got {sizes}")
    first = next(iter(queries.values()))
    # Without labels to shift and positions to count, nobody asks where documents start.
    asked = "labels" in batch or "position_ids" not in batch or cu_seqlens is not None
    packings = _packings(plan, cu_seqlens) if asked else [Packing([0, plan.seq_len])]
    if len(packings) not in (1, first.shape[0] if dim else 1):
        raise ValueError(
            f"cu_seqlens has {len(packings)} rows, the batch has {first.shape[0] if dim else 'no batch dim'}"
        )
    result = dict(batch)
    if "labels" in batch:
        shifts = -1 if shift_labels else 0
        result["labels"] = _shift(batch["labels"], _ids(packings), shifts, dim, 0, IGNORE_INDEX)
    if "position_ids" not in batch:
        positions = _beside(first, torch.from_numpy(np.stack([packing.positions() for packing in packings])))
        result["position_ids"] = positions.expand(first.shape[0], -1) if dim else positions[0]
    return {name: shard(plan, mesh, x, dim, side="kv" if name in kv else "q") for name, x in result.items()}


class _GlobalMean(torch.autograd.Function):
    """Sum over ranks divided by `count`; the backward scales by the mesh size, which an averaging reducer undoes."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        ctx.scale = (1 if mesh is None else mesh.size()) / count
        return (total.clone() if mesh is None else failure.all_reduce(total, "sum", mesh, "the loss")) / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.scale, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh | None, *, num_valid: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Mean cross-entropy over the valid tokens of all ranks of `mesh`; the same value on every rank.

    Its gradient is scaled so that averaging parameter gradients over `mesh`, as FSDP2 and DDP do, gives the gradient of
    that mean. Call it on every rank.

    Args:
        logits: ``[…, vocab]``, any floating dtype; computed in float32 at least.
        labels: int64 ``[…]``; −100 is ignored.
        mesh: every axis over which parameter gradients are averaged: dp × cp, or cp alone; None on one device.
        num_valid: valid tokens of all ranks and all micro-batches, for gradient accumulation: the sum of the
            micro-batches' losses is then the mean over all of them. Default: counted over `mesh`.

    Returns:
        A scalar; 0 with gradient 0 if no rank has a valid token.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits must be [*labels.shape, vocab], got logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        )
    scores = logits.flatten(0, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    if num_valid is None:
        count = (labels != IGNORE_INDEX).sum()
        count = count if mesh is None else failure.all_reduce(count, "sum", mesh, "the token count")
    elif isinstance(num_valid, torch.Tensor):
        count = num_valid.to(logits.device, non_blocking=logits.device.type != "cpu")
    else:
        if not (math.isfinite(num_valid) and num_valid >= 0):
            raise ValueError(f"num_valid must be a number of tokens, got {num_valid}")
        # Written where it is needed: to copy it there, as `as_tensor` does, would make the host wait.
        count = torch.full((), num_valid, device=logits.device)
    return _GlobalMean.apply(total, count.clamp(min=1).to(total.dtype), mesh)
