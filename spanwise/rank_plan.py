"""RankPlan: one rank's part of a plan as tensors on its device. The torch room above `plan`.

A `RankPlan` is a frozen dataclass registered as a pytree, so that it passes through `torch.compile`, checkpointing
and FSDP2 as an argument. Everything that changes from batch to batch is tensor contents or a tensor's shape (sizes are
carried by empty tensors); nothing else may differ between the plans of one rank, or a compiled graph would be
specialised to one plan.
"""

# B layout rows (1, or the batch), T tokens of this rank, R tokens of the other ranks, n spans of a row

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _compat
from spanwise.exchange import failure
from spanwise.exchange.needed import Route
from spanwise.layout import count_tokens, intersect_runs, merge_tokens, ragged_arange, subtract_runs
from spanwise.mask import SpanMask
from spanwise.pieces import piece_of
from spanwise.plan import Plan

if TYPE_CHECKING:
    from spanwise.kernels.flex import FlexTables

FLEX_BLOCK_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of K/V and the mask of this rank's queries over it.

    Attributes:
        start, end: int32 ``[B or 1, n, T]``, spans as indices into the piece.
        kv_pos: int32 ``[B or 1, keys]``, global position of each key of the piece.
        tables: block tables for the flex kernel, or None.
        take: int64 ``[B, keys]``, where the keys lie in the gathered, padded shards, ordered ``[rank, row, token]`` and
            flattened; None unless an all-gather brings them.
        route: which rows travel, if only the needed ones do; None otherwise. The rank's own stage has neither.
        rows: batch rows that have a mask or layout of their own; 1 serves any batch.
        flat: whether these rows follow one another on one axis, queries and keys alike.
    """

    start: torch.Tensor
    end: torch.Tensor
    kv_pos: torch.Tensor
    tables: FlexTables | None
    take: torch.Tensor | None
    route: Route | None
    rows: int
    flat: bool


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """This rank's part of a plan.

    Attributes:
        tokens: int64 ``[B, T]``, global positions of the rank's tokens, ascending.
        restore: int64 ``[B, seq_len]``, where each token lies in gathered, padded shards, as `Stage.take` counts.
        padded: ``[padded shard length, 0]``; only its shape means something.
        stages: for each mask the local stage, then the remote ones, if anything comes from elsewhere.
        rank, num_ranks: plain numbers.
        batched: whether every batch row has a layout of its own.
        keep_kv: whether received K/V are kept for the backward, or fetched again.
        causal: names of the masks that are the plain causal mask.
    """

    tokens: torch.Tensor
    restore: torch.Tensor
    padded: torch.Tensor
    stages: dict[str, tuple[Stage, ...]]
    rank: int
    num_ranks: int
    batched: bool
    keep_kv: bool
    causal: tuple[str, ...]

    @property
    def seq_len(self) -> int:
        return self.restore.shape[1]


_compat.register_pytree_dataclass(Stage, static=("rows", "flat"))
_compat.register_pytree_dataclass(RankPlan, static=("rank", "num_ranks", "batched", "keep_kv", "causal"))


def build(plan: Plan, rank: int, device: torch.device | str = "cpu", *, flex_tables: bool = False) -> RankPlan:
    """The tensors of ``rank`` on ``device``; pure, no process group.

    Args:
        flex_tables: also build the block tables that the flex kernel needs.
    """
    device = torch.device(device)
    if flex_tables and plan.layout.tokens_per_rank.min() == 0:
        # Every rank knows, so that every rank raises; the kernel would on the empty rank alone.
        raise ValueError(
            f"kernel 'flex' needs at least one token on every rank, got {plan.layout.tokens_per_rank.tolist()}; use "
            f"fewer ranks, smaller blocks or another balancer"
        )
    layout, num_ranks = plan.layout, plan.num_ranks
    rows = layout.batch_size
    padded = int(layout.tokens_per_rank.max())
    tokens = np.stack([layout.indices(rank, row) for row in range(rows)])
    # Slot of every token in the gathered shards: rank-major, then the batch row, then the token within the shard.
    slots = np.empty((rows, plan.seq_len), dtype=np.int64)
    for row in range(rows):
        for other in range(num_ranks):
            mine = layout.indices(other, row)
            slots[row, mine] = (other * rows + row) * padded + np.arange(len(mine))
    stage_of = _needed_stages if plan.exchange == "needed" else _gathered_stages
    return RankPlan(
        tokens=_on_device(tokens, device) if flex_tables else _compat.mark_dynamic(_on_device(tokens, device), 1),
        restore=_on_device(slots, device),
        padded=torch.empty(padded, 0, device=device),
        stages={name: stage_of(plan, name, rank, slots, device, flex_tables) for name in plan.masks},
        rank=rank,
        num_ranks=num_ranks,
        batched=rows > 1,
        keep_kv=plan.keep_kv,
        causal=plan.causal,
    )


def _gathered_stages(
    plan: Plan, name: str, rank: int, slots: np.ndarray, device: torch.device, flex_tables: bool
) -> tuple[Stage, ...]:
    """Own tokens, then everybody else's out of the gathered shards; batch rows side by side."""
    mask, rows = plan.mask(name), plan.layout.batch_size
    own = [plan.layout.runs(rank, row) for row in range(rows)]

    def stage(keys: list[np.ndarray], spare: int, gathered: bool) -> Stage:
        if rows == 1:
            local = mask.select(own[0], keys[0])
        else:
            each = [mask.row(row if mask.batch_size > 1 else 0) for row in range(rows)]
            local = SpanMask.stack([m.select(own[row], keys[row]) for row, m in enumerate(each)])
        # Spare keys repeat a real token, so that they hold numbers.
        key_tokens = np.pad(np.stack([ragged_arange(runs) for runs in keys]), ((0, 0), (0, spare)))
        take = None
        if gathered:
            take = _compat.mark_dynamic(_on_device(np.take_along_axis(slots, key_tokens, axis=1), device), 1)
        tensors = _stage_tensors(local, mask.num_spans, key_tokens, device, flex_tables)
        return Stage(**tensors, take=take, route=None, rows=max(rows, mask.batch_size), flat=False)

    if plan.num_ranks == 1:
        return (stage(own, 0, False),)
    everything = np.array([[0, plan.seq_len]], dtype=np.int64)
    others = [subtract_runs(everything, runs) for runs in own]
    return stage(own, 0, False), stage(others, _spare_keys(count_tokens(others[0]), flex_tables), True)


def _needed_stages(
    plan: Plan, name: str, rank: int, slots: np.ndarray, device: torch.device, flex_tables: bool
) -> tuple[Stage, ...]:
    """Own tokens, then those that this rank reads elsewhere, in pieces.

    Batch rows that differ follow one another: what they receive differs too, and side by side is not rectangular.
    """
    mask, layout = plan.mask(name), plan.layout
    rows = max(mask.batch_size, layout.batch_size)
    own = [plan.runs(rank, row) for row in range(rows)]
    shard = layout.num_tokens(rank)

    def stage(keys: list[np.ndarray], spare: int, route: Route | None) -> Stage:
        each = [mask.row(row if mask.batch_size > 1 else 0) for row in range(rows)]
        local = _one_after_another([m.select(own[row], keys[row]) for row, m in enumerate(each)])
        key_tokens = np.pad(np.concatenate([ragged_arange(runs) for runs in keys])[None], ((0, 0), (0, spare)))
        tensors = _stage_tensors(local, mask.num_spans, key_tokens, device, flex_tables)
        return Stage(**tensors, take=None, route=route, rows=rows, flat=rows > 1)

    local_stage = stage(own, 0, None)
    num_pieces = plan.num_pieces(name)
    if num_pieces == 0:
        return (local_stage,)  # nobody reads anything elsewhere, and every rank knows
    needs = [plan.needs(rank, name, row) for row in range(rows)]
    wanted = np.concatenate([ragged_arange(runs) for runs in needs])
    row_of = np.repeat(np.arange(rows), [count_tokens(runs) for runs in needs])
    # The slot of a token says who owns it.
    sender = slots[row_of % layout.batch_size, wanted] // (layout.batch_size * int(layout.tokens_per_rank.max()))
    recv_piece = _pieces_received(sender, rank, num_pieces, plan.block_size)
    send = []
    for other in range(plan.num_ranks):
        read = [intersect_runs(plan.needs(other, name, row), own[row]) for row in range(rows)]
        at = [_positions(ragged_arange(runs), own[row]) + row * shard for row, runs in enumerate(read)]
        send.append(np.concatenate(at))
    send_piece = [
        piece_of(np.arange(len(at)), len(at), num_pieces, plan.block_size, other - rank)
        for other, at in enumerate(send)
    ]
    stages = [local_stage]
    for i in range(num_pieces):
        mine = recv_piece == i
        keys = [merge_tokens(wanted[mine & (row_of == row)]) for row in range(rows)]
        # Rows arrive by sending rank, then batch row, then token; the stage wants them by batch row, then token.
        order = np.empty(np.count_nonzero(mine), dtype=np.int64)
        order[np.argsort(sender[mine], kind="stable")] = np.arange(len(order))
        sent = [at[piece == i] for at, piece in zip(send, send_piece, strict=True)]
        spare = _spare_keys(len(order), flex_tables)
        route = Route(
            # Unbacked: were it 1 row to torch.compile, autograd would sum the gradient that is still on its way.
            send=_compat.mark_unbacked(_on_device(np.concatenate(sent), device), 0),
            order=_compat.mark_dynamic(_on_device(np.pad(order, (0, spare), constant_values=len(order)), device), 0),
            send_sizes=tuple(_size(len(at), device) for at in sent),
            recv_sizes=tuple(_size(n, device) for n in np.bincount(sender[mine], minlength=plan.num_ranks).tolist()),
            spare=flex_tables,
        )
        stages.append(stage(keys, spare, route))
    return tuple(stages)


def _pieces_received(sender: np.ndarray, rank: int, num_pieces: int, block_size: int) -> np.ndarray:
    """In which piece each token comes to `rank`; each sender's tokens are in the order in which it counts them."""
    by_sender = np.argsort(sender, kind="stable")
    count = np.bincount(sender)
    position = np.arange(len(sender)) - np.repeat(np.cumsum(count) - count, count)
    each = sender[by_sender]
    piece = np.empty(len(sender), dtype=np.int64)
    piece[by_sender] = piece_of(position, count[each], num_pieces, block_size, rank - each)
    return piece


def _size(rows: int, device: torch.device) -> torch.Tensor:
    """A number as a shape. Unbacked, for a graph that was traced for 0 or 1 row must serve any number."""
    return _compat.mark_unbacked(torch.empty(rows, 0, device=device), 0)


def _positions(tokens: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Where tokens lie among those of ascending runs that hold them."""
    before = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
    run = np.searchsorted(runs[:, 0], tokens, side="right") - 1
    return before[run] + tokens - runs[run, 0]


def _one_after_another(masks: list[SpanMask]) -> SpanMask:
    """One mask whose queries and keys are those of the given ones, concatenated."""
    if len(masks) == 1:
        return masks[0]
    width = max(m.num_spans for m in masks)
    offsets = np.cumsum([0, *(m.kv_len for m in masks)])
    edges = []
    for part in ("start", "end"):
        shifted = [
            np.pad(np.where(m.end > m.start, getattr(m, part) + offset, 0)[0], ((0, width - m.num_spans), (0, 0)))
            for m, offset in zip(masks, offsets[:-1], strict=True)
        ]
        edges.append(np.concatenate(shifted, axis=1))
    return SpanMask(edges[0], edges[1], int(offsets[-1]))


def _spare_keys(num_keys: int, flex_tables: bool) -> int:
    """Keys that no span reads, added so that one compiled flex kernel serves plans whose K/V lengths differ."""
    if not flex_tables:
        return 0
    from spanwise.kernels.flex import kv_capacity

    return kv_capacity(num_keys, FLEX_BLOCK_SIZE) - num_keys


def _stage_tensors(
    mask: SpanMask, num_spans: int, key_tokens: np.ndarray, device: torch.device, flex_tables: bool
) -> dict[str, Any]:
    tables = None
    # All stages get the same number of spans, and never one that alone would be a constant to torch.compile.
    width = max(2, num_spans)
    if flex_tables:
        from spanwise._flex_masks import block_tables
        from spanwise.kernels.flex import FlexTables, pad_spans

        width = pad_spans(num_spans)
        # Over the spare keys too: the last block of the shorter mask may be full where spare keys must not be read.
        tables = FlexTables.from_numpy(
            block_tables(SpanMask(mask.start, mask.end, key_tokens.shape[1]), FLEX_BLOCK_SIZE), device
        )
    spare = width - mask.num_spans
    start, end = (_on_device(np.pad(x, ((0, 0), (0, spare), (0, 0))), device) for x in (mask.start, mask.end))
    if not flex_tables:  # the flex kernel needs a constant number of queries
        for x in (start, end):
            _compat.mark_dynamic(_compat.mark_dynamic(x, 1), 2)
    kv_pos = _compat.mark_dynamic(_on_device(key_tokens.astype(np.int32), device), 1)
    return {"start": start, "end": end, "kv_pos": kv_pos, "tables": tables}


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; to an accelerator through pinned memory, so that the host need not wait."""
    x = torch.from_numpy(array)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def spread_slots(local: RankPlan, slots: torch.Tensor, batch: int) -> torch.Tensor:
    """Slots among the gathered rows ``[rank, batch row, token]`` of `batch` rows.

    Args:
        slots: `local.restore` or a stage's `take`.

    A batched layout has them already; a one-row layout serves any number of rows.
    """
    if local.batched or batch == 1:
        return slots
    padded = local.padded.shape[0]
    rank, token = slots // padded, slots % padded
    row = torch.arange(batch, device=slots.device).unsqueeze(1)
    return (rank * batch + row) * padded + token


def local_plan(
    plan: Plan, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str = "auto"
) -> RankPlan:
    """This rank's tensors on ``device``, after the plans of all ranks of ``mesh`` were compared.

    A collective call: every rank of the mesh makes it, outside compiled code. It compares at each call, by one eager
    gather of 16 bytes; the tensors are built once for each plan object.

    Args:
        mesh: 1-D mesh of the cp axis, of ``plan.num_ranks`` ranks; None is allowed for a plan of one rank.
        device: where the tensors live; default: the mesh's device type.
        kernel: the kernel that will use them: "flex" (the default on CUDA) needs block tables.

    Raises:
        ValueError: mesh of another size, or ranks that hold different plans (all fingerprints are in the text).
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "a Plan was given inside a compiled region; build plan.local(mesh, device) outside and pass that"
        )
    rank = rank_on(mesh, plan.num_ranks)
    if mesh is not None and plan.num_ranks > 1:
        compare_fingerprints(plan.fingerprint, mesh.get_group())
    device = torch.device(device if device is not None else "cpu" if mesh is None else mesh.device_type)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    flex_tables = kernel == "flex" or (kernel == "auto" and device.type == "cuda")
    key = (rank, device, flex_tables)
    if key not in plan.built:
        plan.built[key] = build(plan, rank, device, flex_tables=flex_tables)
    return plan.built[key]


def rank_on(mesh: DeviceMesh | None, num_ranks: int) -> int:
    """This rank's coordinate on the 1-D cp ``mesh``; ``ValueError`` if the mesh is not one of ``num_ranks`` ranks."""
    if mesh is None:
        if num_ranks == 1:
            return 0
        raise ValueError(f"the plan is for {num_ranks} ranks and needs their mesh; got mesh=None")
    if mesh.ndim != 1:
        raise ValueError(
            f"context parallelism needs a 1-D mesh, got axes {mesh.mesh_dim_names}; pass the cp axis, as in mesh['cp']"
        )
    if mesh.size() != num_ranks:
        raise ValueError(
            f"the plan is for {num_ranks} ranks, the mesh has {mesh.size()}; make the plan with num_ranks={mesh.size()}"
        )
    return mesh.get_local_rank()


def check_rank(local: RankPlan, mesh: DeviceMesh | None) -> None:
    """``ValueError`` unless `local` is the part of this very rank of ``mesh``."""
    rank = rank_on(mesh, local.num_ranks)
    if rank != local.rank:
        raise ValueError(f"this is rank {rank}, and the rank plan is rank {local.rank}'s")


def compare_fingerprints(fingerprint: str, group: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` on every rank of ``group`` if their fingerprints differ, naming them all. A collective."""
    device = _compat.comparison_device(group)
    mine = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8, device=device)
    what, name = "all-gather of plan fingerprints", _compat.group_name(group)
    pending = failure.start(what, name, _compat.start_all_gather, mine, group.size(), name)
    everyone = failure.wait(pending, what, name)
    prints = [bytes(row).hex() for row in everyone.view(group.size(), -1).tolist()]
    if len(set(prints)) > 1:
        held = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(prints))
        raise ValueError(
            f"ranks made different plans: {held}. Make the plan from the same mask and arguments on every rank"
        )
