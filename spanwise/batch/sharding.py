"""Batches of a sharded sequence: shard, unshard, roll, and labels shifted before the cut.

A shift after the cut would lose one label a run of tokens, so labels are shifted while the sequence is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.compare import tells_refusals
from spanwise.attention.rank_plan import RankPlan, check_plan, local_of, rank_on
from spanwise.attention.tokens import check_side, gather, shard_for_rank, take, to_device_of
from spanwise.batch.token_scores import IGNORE_INDEX
from spanwise.layouts.packing import Packing, Side
from spanwise.layouts.thd_order import check_batch_dim, check_dim
from spanwise.layouts.token_tree import TokenTree
from spanwise.masks.checks import check_index, check_offset_rows
from spanwise.planning import documents
from spanwise.planning.plan import Plan


def shard(
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    x: Any = None,
    dim: int = 1,
    *,
    batch_dim: int | None = 0,
    side: Side = "q",
) -> Any:
    """This rank's tokens of `x`, in the plan's order. Differentiable; no communication.

    Args:
        plan: the plan, or this rank's `RankPlan`.
        mesh: the cp mesh of a `Plan`; None if it has one rank. A `RankPlan` has its mesh: leave it out and name the
            next, ``shard(rank_plan, x=x)``.
        x: a tensor with the whole sequence along `dim`, or a pytree of such tensors.
        dim: the sequence dim.
        batch_dim: the batch dim; read only when batch rows have different layouts. None: `x` has no batch dim, for
            example a RoPE table; the result then gets one, in front.
        side: "q", or "kv" for tensors of the keys of cross attention.

    Returns:
        `x` with ``T`` tokens along `dim`; same dtype and device.

    Raises:
        ValueError: `x` is not a tensor with the sequence along `dim`, or the mesh does not fit the plan.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(4), num_ranks=1)
    >>> spanwise.shard(plan, None, {"input_ids": torch.tensor([[5, 6, 7, 8]])})
    {'input_ids': tensor([[5, 6, 7, 8]])}
    >>> spanwise.shard(plan.local(mesh=None), x=torch.tensor([5, 6, 7, 8]), dim=0)
    tensor([5, 6, 7, 8])
    """
    check_plan(plan, "shard")
    check_side(side)
    if isinstance(plan, RankPlan):
        if mesh is not None:
            local_of(plan, mesh, None)
        tokens, length = (plan.tokens, plan.seq_len) if side == "q" else (plan.key_tokens, plan.kv_len)
        return _torch.tree_map(lambda t: take(t, tokens, length, dim, batch_dim), x)
    rank = rank_on(mesh, plan.num_ranks, plan.inner)
    return shard_for_rank(plan, rank, x, dim=dim, batch_dim=batch_dim, side=side)


@tells_refusals
def unshard(
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    x: Any = None,
    dim: int = 1,
    *,
    batch_dim: int | None = 0,
    side: Side = "q",
) -> torch.Tensor:
    """The whole sequence from all ranks' shards, on every rank. An all-gather.

    The backward is the exact adjoint: the gradient of a rank's tokens is summed over all ranks, in float32 at least. If
    all ranks compute the same loss from it, scale that loss by ``1 / mesh.size()``.

    Args:
        plan, mesh, dim, batch_dim, side: as in `shard`; `batch_dim` must exist when batch rows have different layouts.
            ``side="kv"`` of cross attention takes the `Plan`: a `RankPlan` knows the keys of its rank only.
        x: this rank's shard, ``T`` tokens along `dim`.

    Returns:
        `x` with all tokens along `dim`, in their original order.

    Raises:
        ValueError: a shape that is not this rank's shard, a complex tensor, or a mesh that does not fit the plan.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(4), num_ranks=1)
    >>> spanwise.unshard(plan, None, torch.tensor([[5, 6, 7, 8]]))
    tensor([[5, 6, 7, 8]])
    """
    check_plan(plan, "unshard")
    check_side(side)
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"unshard takes a tensor, got a {type(x).__name__}")
    return gather(plan, *local_of(plan, mesh, x.device), x, dim, batch_dim, side)


@tells_refusals
def roll(
    x: torch.Tensor,
    shifts: int,
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    cu_seqlens: Any = None,
    *,
    dim: int = 1,
    batch_dim: int | None = 0,
    fill_value: float = 0,
) -> torch.Tensor:
    """Roll a sharded sequence inside its documents: token ``i`` gets token ``i - shifts`` of the same document.

    Unlike `torch.roll` it does not wrap around. Where a document has no token ``i - shifts``, and in the padding of
    packed sequences, the result is `fill_value`. ``shifts=-1`` brings each token its successor, as multi-token
    prediction needs. Differentiable; gathers the sequence.

    Args:
        x: this rank's shard; `plan`, `mesh`, `dim`, `batch_dim` as in `unshard`.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: the plan's, given to
            `make_plan` or the masks' own. ``[0, seq_len]`` is one document. A plan with a packing knows its documents:
            leave it out.

    Raises:
        ValueError: bad offsets, or none given although the mask may hold several documents.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 2, 5]), num_ranks=1)
    >>> spanwise.roll(torch.tensor([[1, 2, 3, 4, 5]]), -1, plan, None, fill_value=-100)
    tensor([[   2, -100,    4,    5, -100]])
    """
    if torch.compiler.is_compiling():
        raise ValueError("call roll outside of compiled code: it reads the documents on the host")
    shifts = check_index(shifts, "shifts")
    check_plan(plan, "roll")
    packings = _packings(plan, cu_seqlens)
    local, mesh = local_of(plan, mesh, x.device)
    full = gather(plan, local, mesh, x, dim, batch_dim, "q")
    return shard(local, mesh, _shifted(full, packings, shifts, dim, batch_dim, fill_value), dim, batch_dim=batch_dim)


def _shifted(
    x: torch.Tensor, packings: list[Packing], shifts: int, dim: int, batch_dim: int | None, fill: float
) -> torch.Tensor:
    """Token ``i - shifts`` of its document for each token ``i`` of the whole sequence `x`; elsewhere `fill`."""
    ids = torch.from_numpy(np.stack([packing.sequence_ids("q") for packing in packings]))  # -1 in padding
    wanted = torch.arange(ids.shape[1]) - shifts
    source = wanted.clamp(0, max(ids.shape[1] - 1, 0))
    inside = (source == wanted) & (ids[:, source] == ids) & (ids >= 0)
    dim = check_dim(x, dim)
    shape = [1] * x.dim()
    shape[dim] = inside.shape[1]
    if len(inside) > 1:
        batch_dim = check_batch_dim(x, dim, batch_dim, len(inside), f"cu_seqlens has {len(inside)} rows")
        shape[batch_dim] = len(inside)
        inside = inside if batch_dim < dim else inside.T
    moved = x.index_select(dim, to_device_of(x, source))
    return torch.where(to_device_of(x, inside).reshape(shape), moved, torch.full_like(moved, fill))


def _packings(plan: Plan | RankPlan, cu_seqlens: Any) -> list[Packing]:
    """The documents of every batch row, as `documents.packings`; a `RankPlan` needs `cu_seqlens`."""
    if isinstance(plan, Plan):
        return documents.packings(plan, cu_seqlens)
    if plan.packed:
        raise ValueError("a RankPlan does not know where its packed sequences lie; pass the Plan")
    if cu_seqlens is None:
        raise ValueError("a RankPlan knows its own tokens' positions only: pass the Plan, or cu_seqlens of the batch")
    return [Packing(row) for row in check_offset_rows(cu_seqlens, plan.seq_len)]


def shard_batch(
    batch: Mapping[str, Any],
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    *,
    cu_seqlens: Any = None,
    tree: TokenTree | None = None,
    shift_labels: bool = True,
    dim: int = 1,
) -> dict[str, Any]:
    """Shift labels inside documents, add position ids, and cut every tensor to this rank's tokens.

    Args:
        batch: tensors ``[B, seq_len, …]``, or ``[seq_len, …]`` with ``dim=0``, whole on every rank. ``"labels"``
            (int64, −100 is ignored) are shifted: the label of a token becomes the next token's, −100 at the end of
            each document. Padding, of the plan's packing or of ``"attention_mask"``, always gets −100; that mask must
            mark the plan's padding. ``"position_ids"`` is added if missing, and cut along its last dim where tokens
            have several, ``[3, B, seq_len]`` (Qwen-VL); one row of them serves all rows. Numbers, strings, None and
            tensors without dims pass through.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: the plan's, given to
            `make_plan` or the masks' own. ``[0, seq_len]`` is one document. A plan with a packing knows its documents.
        tree: in place of documents, the tree of which the plan has the mask; positions count along its paths. Labels
            follow its edges and cannot be shifted: leave them out, see `shard_edges`.
        shift_labels: False if the loader already shifted.
        dim: 1 for tensors with a batch dim in front, 0 for packed ones without.

    Returns:
        The same keys and ``"position_ids"`` int64 ``[B, T]`` (``[T]`` with ``dim=0``), counted from the start of each
        document, 0 in padding.

    Raises:
        ValueError: shapes that do not fit the plan, bad offsets, or none although the mask may hold several documents;
            an attention mask that contradicts the plan, or has four dims; values of other types; a tree that does not
            fit the plan, or labels with it.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 2, 5]), num_ranks=1)
    >>> ids = torch.tensor([[1, 2, 3, 4, 5]])
    >>> batch = spanwise.shard_batch({"input_ids": ids, "labels": ids}, plan, mesh=None)
    >>> batch["labels"].tolist(), batch["position_ids"].tolist()
    ([[2, -100, 4, 5, -100]], [[0, 1, 0, 1, 2]])
    """
    check_plan(plan, "shard_batch")
    if dim not in (0, 1):
        raise ValueError(f"dim must be 1 (tensors [B, seq_len, …]) or 0 (tensors [seq_len, …]), got {dim}")
    tensors = _tensors_of(batch, plan, dim)
    first = next(iter(tensors.values()))
    rows = max(x.shape[_seq_dim(name, x, dim) - 1] for name, x in tensors.items()) if dim else 1
    if dim and "position_ids" in tensors:  # one row may serve all
        positions = tensors["position_ids"]
        tensors["position_ids"] = positions.expand(*positions.shape[:-2], rows, -1)
    if tree is not None:
        if cu_seqlens is not None:
            raise ValueError("a tree has the order of its tokens: give tree or cu_seqlens, not both")
        if isinstance(plan, Plan):
            documents.check_tree(plan, tree)
        else:  # a RankPlan does not know the whole mask
            documents.check_tree_length(plan.seq_len, tree)
        if "labels" in tensors:
            raise ValueError("labels of a tree follow its edges: leave them out, and take those of shard_edges")
    counted = isinstance(plan, RankPlan) and plan.positions is not None and cu_seqlens is None and tree is None
    # Labels to shift and positions to count need the documents; other tensors do not.
    needs_documents = "labels" in tensors or cu_seqlens is not None or not ("position_ids" in tensors or counted)
    needs_documents &= tree is None
    packings = _packings(plan, cu_seqlens) if needs_documents else [Packing([0, plan.seq_len])]
    if len(packings) not in (1, rows):
        raise ValueError(f"cu_seqlens has {len(packings)} rows, the batch has {rows if dim else 'no batch dim'}")
    if "labels" in tensors:
        shifts = -1 if shift_labels else 0
        labels = tensors["labels"]
        if "attention_mask" in tensors:  # a mask without a packing does not tell padding from documents of one token
            labels = labels.masked_fill(to_device_of(labels, tensors["attention_mask"]) == 0, IGNORE_INDEX)
        tensors["labels"] = _shifted(labels, packings, shifts, dim, 0, IGNORE_INDEX)
    if "position_ids" not in tensors and not counted:
        counts = [packing.positions() for packing in packings] if tree is None else [tree.positions()]
        positions = to_device_of(first, torch.from_numpy(np.stack(counts)))
        tensors["position_ids"] = positions.expand(rows, -1) if dim else positions[0]
    cut = {}
    for name, x in tensors.items():
        at = _seq_dim(name, x, dim)
        cut[name] = shard(plan, mesh, x, at, batch_dim=max(at - 1, 0))
    if counted and "position_ids" not in tensors:
        assert isinstance(plan, RankPlan) and plan.positions is not None
        cut["position_ids"] = plan.positions.expand(rows, -1) if dim else plan.positions[0]
    return {name: cut.get(name, x) for name, x in batch.items()} | cut


def _tensors_of(batch: Mapping[str, Any], plan: Plan | RankPlan, dim: int) -> dict[str, Any]:
    """The tensors of the batch that are cut, after all checks; not those without dims."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"shard_batch takes a mapping of names to tensors, got a {type(batch).__name__}")
    tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor) and x.dim() > 0}
    for name, x in batch.items():
        if x is not None and not isinstance(x, (bool, int, float, str, torch.Tensor)):
            raise ValueError(f"batch[{name!r}] is a {type(x).__name__}: make it a tensor, or take it out of the batch")
    if not tensors:
        raise ValueError(f"shard_batch got no tensor, only {sorted(batch)}")
    for name, x in tensors.items():
        if x.dim() <= (at := _seq_dim(name, x, dim)) or x.shape[at] != plan.seq_len:
            hint = '; cut keys of cross attention by shard(…, side="kv")' * (plan.kv_len != plan.seq_len)
            raise ValueError(f"batch[{name!r}] must have size {plan.seq_len} in dim {at}, got {tuple(x.shape)}{hint}")
    sizes = {name: x.shape[_seq_dim(name, x, dim) - 1] for name, x in tensors.items()} if dim else {}
    if sizes.get("position_ids") == 1:  # the same positions in all rows, as models take them
        sizes.pop("position_ids")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the batch's tensors must share their batch size, got {sizes}")
    if "attention_mask" in tensors:
        _check_padding(tensors["attention_mask"], plan, dim)
    return tensors


def _check_padding(mask: torch.Tensor, plan: Plan | RankPlan, dim: int) -> None:
    """``ValueError`` unless the padding that an attention mask marks is the plan's; an accelerator's is copied."""
    if mask.dim() > dim + 1:
        raise ValueError(f"attention_mask of shape {tuple(mask.shape)} is one of queries and keys: the plan has these")
    if isinstance(plan, RankPlan):
        raise ValueError("a RankPlan does not know the batch's padding; pass the Plan, or leave attention_mask out")
    given = np.atleast_2d(mask.cpu().numpy() != 0)
    if plan.packing is not None:
        wrong = given != plan.packing.valid_q[None]
    else:  # rows that read nothing need not be padding
        given, *reads = np.broadcast_arrays(given, *[one.area() > 0 for one in plan.masks.values()])
        wrong = ~given & np.any(reads, axis=0)
    for row, token in np.argwhere(wrong)[:1]:
        raise ValueError(
            f"attention_mask is {given[row, token]} at row {row}, token {token}, and the plan's padding says "
            f"otherwise: make the plan from SpanMask.from_attention_mask"
        )


def _seq_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """The sequence dim: `dim`, but the last one of position ids of several kinds, ``[3, B, S]`` (Qwen-VL)."""
    return x.dim() - 1 if name == "position_ids" and x.dim() == dim + 2 else dim
