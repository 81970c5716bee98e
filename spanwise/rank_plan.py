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
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _compat
from spanwise.counting import row_of
from spanwise.exchange import failure
from spanwise.exchange.needed import Route
from spanwise.exchange.ring import Hop
from spanwise.exchange.ulysses import Trade
from spanwise.layout import Layout, count_tokens, intersect_runs, merge_tokens, ragged_arange, subtract_runs
from spanwise.mask import SpanMask
from spanwise.pieces import piece_of
from spanwise.plan import Plan

if TYPE_CHECKING:
    from spanwise.kernels.flex import FlexTables
    from spanwise.kernels.varlen import VarlenTables

FLEX_BLOCK_SIZE = 128


@dataclasses.dataclass(frozen=True)
class Stage:
    """One piece of K/V and the mask of this rank's queries over it.

    Attributes:
        start, end: int32 ``[B or 1, n, T]``, spans as indices into the piece.
        kv_pos: int32 ``[B or 1, keys]``, global position of each key of the piece.
        tables: block tables for the flex kernel, rounds for the varlen kernel, or None.
        take: int64 ``[B, keys]``, where the keys lie in the gathered, padded shards, ordered ``[rank, row, token]`` and
            flattened; None unless an all-gather brings them.
        route: which rows travel, if only the needed ones do; None otherwise.
        hop: how the piece comes round the ring; None otherwise. The rank's own stage has none of the three.
        rows: batch rows that have a mask or layout of their own; 1 serves any batch.
        flat: whether these rows follow one another on one axis, queries and keys alike.
    """

    start: torch.Tensor
    end: torch.Tensor
    kv_pos: torch.Tensor
    tables: FlexTables | VarlenTables | None
    take: torch.Tensor | None
    route: Route | None
    hop: Hop | None
    rows: int
    flat: bool


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """This rank's part of a plan.

    Attributes:
        tokens: int64 ``[B, T]``, global positions of the rank's tokens, ascending.
        kv_tokens: int64 ``[B, T of K/V]``, positions of the rank's keys; None where they are those of `tokens`.
        group_tokens: int64 ``[B, S]``, positions of the tokens of the rank's group; None without Ulysses.
        restore: int64 ``[B, seq_len]``, where each token lies in the gathered, padded shards of all ranks, ordered
            ``[rank, row, token]`` and flattened.
        padded: ``[padded shard length, 0]``; only its shape means something.
        kv_padded: the same of the K/V of a group.
        kv_extent: ``[kv_len, 0]``, as many rows as there are keys.
        valid, kv_valid: bool ``[T]``, ``[T of K/V]``, False in padding; None where there is no padding.
        trade, kv_trade: how the group trades heads for tokens; None without Ulysses, `kv_trade` also where it is
            `trade`.
        stages: for each mask the local stage, then the remote ones, if anything comes from elsewhere.
        rank, num_ranks, inner: plain numbers; see `Plan`.
        batched: whether every batch row has a layout of its own.
        keep_kv: whether received K/V are kept for the backward, or fetched again.
        causal: names of the masks that are the plain causal mask.
        packed: whether the plan has a packing.
    """

    tokens: torch.Tensor
    kv_tokens: torch.Tensor | None
    group_tokens: torch.Tensor | None
    restore: torch.Tensor
    padded: torch.Tensor
    kv_padded: torch.Tensor
    kv_extent: torch.Tensor
    valid: torch.Tensor | None
    kv_valid: torch.Tensor | None
    trade: Trade | None
    kv_trade: Trade | None
    stages: dict[str, tuple[Stage, ...]]
    rank: int
    num_ranks: int
    inner: int
    batched: bool
    keep_kv: bool
    causal: tuple[str, ...]
    packed: bool

    @property
    def seq_len(self) -> int:
        return self.restore.shape[1]

    @property
    def kv_len(self) -> int:
        return self.kv_extent.shape[0]

    @property
    def num_groups(self) -> int:
        return self.num_ranks // self.inner

    @property
    def group(self) -> int:
        """The group of `inner` ranks that this rank is in."""
        return self.rank // self.inner

    @property
    def query_tokens(self) -> torch.Tensor:
        """Positions of the queries that this rank computes: `group_tokens` under Ulysses, else `tokens`."""
        return self.tokens if self.group_tokens is None else self.group_tokens

    @property
    def key_tokens(self) -> torch.Tensor:
        """Positions of the rank's keys: `kv_tokens`, or `tokens` where they are the same."""
        return self.tokens if self.kv_tokens is None else self.kv_tokens


_compat.register_pytree_dataclass(Stage, static=("rows", "flat"))
_compat.register_pytree_dataclass(
    RankPlan, static=("rank", "num_ranks", "inner", "batched", "keep_kv", "causal", "packed")
)


def build(plan: Plan, rank: int, device: torch.device | str = "cpu", *, tables: str | None = None) -> RankPlan:
    """The tensors of ``rank`` on ``device``; pure, no process group.

    Args:
        tables: the kernel whose tables are built too, "flex" or "varlen".
    """
    device = torch.device(device)
    if tables == "flex" and plan.layout.tokens_per_rank.min() == 0:
        # Every rank knows, so that every rank raises; the kernel would on the empty rank alone.
        raise ValueError(
            f"kernel 'flex' needs at least one token on every rank, got {plan.layout.tokens_per_rank.tolist()}; use "
            f"fewer ranks, smaller blocks or another balancer"
        )
    layout, same = plan.layout, plan.kv_layout == plan.layout
    rows = range(layout.batch_size)
    group = rank // plan.inner

    def tokens_of(of: Layout, index: int) -> torch.Tensor:
        tokens = _on_device(np.stack([of.indices(index, row) for row in rows]), device)
        return tokens if tables == "flex" else _compat.mark_dynamic(tokens, 1)

    tokens = tokens_of(layout, rank)
    valid = kv_valid = None
    if plan.packing is not None and plan.packing.padded:
        valid = _on_device(plan.packing.valid_q[layout.indices(rank)], device)
        kv_valid = _on_device(plan.packing.valid_kv[plan.kv_layout.indices(rank)], device)
    trade = kv_trade = group_tokens = None
    if plan.inner > 1:
        group_tokens = tokens_of(plan.groups, group)
        trade = _trade(plan, layout, plan.groups, rank, device)
        kv_trade = None if same else _trade(plan, plan.kv_layout, plan.kv_groups, rank, device)
    stages_of = {"needed": _needed_stages, "ring": _ring_stages}.get(plan.exchange, _gathered_stages)
    return RankPlan(
        tokens=tokens,
        kv_tokens=None if same else tokens_of(plan.kv_layout, rank),
        group_tokens=group_tokens,
        restore=_on_device(_slots(layout), device),
        padded=torch.empty(int(layout.tokens_per_rank.max()), 0, device=device),
        kv_padded=torch.empty(int(plan.kv_groups.tokens_per_rank.max()), 0, device=device),
        kv_extent=torch.empty(plan.kv_len, 0, device=device),
        valid=valid,
        kv_valid=kv_valid,
        trade=trade,
        kv_trade=kv_trade,
        stages={name: stages_of(plan, name, group, device, tables) for name in plan.masks},
        rank=rank,
        num_ranks=plan.num_ranks,
        inner=plan.inner,
        batched=len(rows) > 1,
        keep_kv=plan.keep_kv,
        causal=plan.causal,
        packed=plan.packing is not None,
    )


def _slots(layout: Layout) -> np.ndarray:
    """Where each token lies in gathered, padded shards, ordered ``[rank, row, token]``: int64 ``[rows, seq_len]``."""
    rows, padded = layout.batch_size, int(layout.tokens_per_rank.max())
    slots = np.empty((rows, layout.seq_len), dtype=np.int64)
    for row in range(rows):
        for rank in range(layout.num_ranks):
            mine = layout.indices(rank, row)
            slots[row, mine] = (rank * rows + row) * padded + np.arange(len(mine))
    return slots


def _trade(plan: Plan, layout: Layout, groups: Layout, rank: int, device: torch.device) -> Trade:
    """How this rank's group trades the tokens of `layout` for heads."""
    inner = plan.inner
    group = range(rank // inner * inner, rank // inner * inner + inner)
    places = np.stack(
        [
            np.concatenate([_positions(layout.indices(r, row), groups.runs(rank // inner, row)) for r in group])
            for row in range(layout.batch_size)
        ]
    )
    order = np.argsort(places, axis=1, kind="stable")
    return Trade(
        # The rank's own number of tokens is that of its tensors, which is no unbacked one.
        sizes=tuple(
            _compat.mark_dynamic(torch.empty(layout.num_tokens(r), 0, device=device), 0)
            if r == rank
            else _size(layout.num_tokens(r), device)
            for r in group
        ),
        order=_compat.mark_dynamic(_on_device(order, device), 1),
        places=_compat.mark_dynamic(_on_device(places, device), 1),
        rank=rank - group[0],
        num_ranks=inner,
    )


def _gathered_stages(plan: Plan, name: str, group: int, device: torch.device, tables: str | None) -> tuple[Stage, ...]:
    """Own tokens, then everybody else's out of the gathered shards; batch rows side by side."""
    mask, layout = plan.mask(name), plan.kv_groups
    rows = layout.batch_size
    queries = [plan.groups.runs(group, row) for row in range(rows)]
    own = [layout.runs(group, row) for row in range(rows)]

    def stage(keys: list[np.ndarray], spare: int, slots: np.ndarray | None) -> Stage:
        if rows == 1:
            local = mask.select(queries[0], keys[0])
        else:
            each = [mask.row(row_of(mask, row)) for row in range(rows)]
            local = SpanMask.stack([m.select(queries[row], keys[row]) for row, m in enumerate(each)])
        # Spare keys repeat a real token, so that they hold numbers.
        key_tokens = np.pad(np.stack([ragged_arange(runs) for runs in keys]), ((0, 0), (0, spare)))
        take = None
        if slots is not None:
            take = _compat.mark_dynamic(_on_device(np.take_along_axis(slots, key_tokens, axis=1), device), 1)
        tensors = _stage_tensors(local, mask.num_spans, key_tokens, device, tables)
        return Stage(**tensors, take=take, route=None, hop=None, rows=max(rows, mask.batch_size), flat=False)

    if plan.num_groups == 1:
        return (stage(own, 0, None),)
    everything = np.array([[0, plan.kv_len]], dtype=np.int64)
    others = [subtract_runs(everything, runs) for runs in own]
    return stage(own, 0, None), stage(others, _spare_keys(count_tokens(others[0]), tables), _slots(layout))


class _Pieces:
    """Builds the stages of one mask whose batch rows, where they differ, follow one another on one axis.

    What they receive differs, and side by side is not rectangular.
    """

    def __init__(self, plan: Plan, name: str, group: int, device: torch.device, tables: str | None) -> None:
        self.mask, self.device, self.tables = plan.mask(name), device, tables
        self.rows = max(self.mask.batch_size, plan.layout.batch_size)
        self.queries = [plan.groups.runs(group, row_of(plan.groups, row)) for row in range(self.rows)]

    def stage(
        self, keys: list[np.ndarray], spare: int = 0, *, route: Route | None = None, hop: Hop | None = None
    ) -> Stage:
        """The stage of the key runs of each batch row, with so many keys more that no span reads."""
        each = [self.mask.row(row_of(self.mask, row)) for row in range(self.rows)]
        local = _one_after_another([m.select(self.queries[row], keys[row]) for row, m in enumerate(each)])
        key_tokens = np.pad(np.concatenate([ragged_arange(runs) for runs in keys])[None], ((0, 0), (0, spare)))
        tensors = _stage_tensors(local, self.mask.num_spans, key_tokens, self.device, self.tables)
        return Stage(**tensors, take=None, route=route, hop=hop, rows=self.rows, flat=self.rows > 1)


def _ring_stages(plan: Plan, name: str, group: int, device: torch.device, tables: str | None) -> tuple[Stage, ...]:
    """Own tokens, then the shards of other groups as they come round."""
    pieces = _Pieces(plan, name, group, device, tables)
    layout = plan.kv_groups

    def held(by: int) -> list[np.ndarray]:
        return [layout.runs(by, row_of(layout, row)) for row in range(pieces.rows)]

    stages, before = [pieces.stage(held(group))], 0
    for distance in plan.hops(name):
        owner = (group - distance) % plan.num_groups
        rows = pieces.rows * layout.num_tokens(owner)
        hop = Hop(received=_size(rows, device), stride=distance - before, spare=tables == "flex")
        stages.append(pieces.stage(held(owner), _spare_keys(rows, tables), hop=hop))
        before = distance
    return tuple(stages)


def _needed_stages(plan: Plan, name: str, group: int, device: torch.device, tables: str | None) -> tuple[Stage, ...]:
    """Own tokens, then those that this group reads elsewhere, in pieces."""
    pieces = _Pieces(plan, name, group, device, tables)
    layout, rows, first = plan.kv_groups, pieces.rows, group * plan.inner
    own = [layout.runs(group, row_of(layout, row)) for row in range(rows)]
    shard = layout.num_tokens(group)
    stages = [pieces.stage(own)]
    num_pieces = plan.num_pieces(name)
    if num_pieces == 0:
        return tuple(stages)  # nobody reads anything elsewhere, and every rank knows
    needs = [plan.needs(first, name, row) for row in range(rows)]
    wanted = np.concatenate([ragged_arange(runs) for runs in needs])
    row_at = np.repeat(np.arange(rows), [count_tokens(runs) for runs in needs])
    # The slot of a token says who owns it.
    sender = _slots(layout)[row_at % layout.batch_size, wanted] // (
        layout.batch_size * int(layout.tokens_per_rank.max())
    )
    recv_piece = _pieces_received(sender, group, num_pieces, plan.block_size)
    send = []
    for other in range(plan.num_groups):
        read = [intersect_runs(plan.needs(other * plan.inner, name, row), own[row]) for row in range(rows)]
        at = [_positions(ragged_arange(runs), own[row]) + row * shard for row, runs in enumerate(read)]
        send.append(np.concatenate(at))
    send_piece = [
        piece_of(np.arange(len(at)), len(at), num_pieces, plan.block_size, other - group)
        for other, at in enumerate(send)
    ]
    for i in range(num_pieces):
        mine = recv_piece == i
        keys = [merge_tokens(wanted[mine & (row_at == row)]) for row in range(rows)]
        # Rows arrive by sending group, then batch row, then token; the stage wants them by batch row, then token.
        order = np.empty(np.count_nonzero(mine), dtype=np.int64)
        order[np.argsort(sender[mine], kind="stable")] = np.arange(len(order))
        sent = [at[piece == i] for at, piece in zip(send, send_piece, strict=True)]
        spare = _spare_keys(len(order), tables)
        route = Route(
            # Unbacked: were it 1 row to torch.compile, autograd would sum the gradient that is still on its way.
            send=_compat.mark_unbacked(_on_device(np.concatenate(sent), device), 0),
            order=_compat.mark_dynamic(_on_device(np.pad(order, (0, spare), constant_values=len(order)), device), 0),
            send_sizes=tuple(_size(len(at), device) for at in sent),
            recv_sizes=tuple(_size(n, device) for n in np.bincount(sender[mine], minlength=plan.num_groups).tolist()),
            spare=tables == "flex",
        )
        stages.append(pieces.stage(keys, spare, route=route))
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


def _spare_keys(num_keys: int, tables: str | None) -> int:
    """Keys that no span reads, added so that one compiled flex kernel serves plans whose K/V lengths differ."""
    if tables != "flex":
        return 0
    from spanwise.kernels.flex import kv_capacity

    return kv_capacity(num_keys, FLEX_BLOCK_SIZE) - num_keys


def _stage_tensors(
    mask: SpanMask, num_spans: int, key_tokens: np.ndarray, device: torch.device, tables: str | None
) -> dict[str, Any]:
    built: Any = None
    # All stages get the same number of spans, and never one that alone would be a constant to torch.compile.
    width = max(2, num_spans)
    if tables == "varlen":
        from spanwise.kernels._segments import cut_rounds
        from spanwise.kernels.varlen import VarlenTables

        built = VarlenTables.from_segments(cut_rounds(mask.start, mask.end, key_tokens.shape[1]), device)
    if tables == "flex":
        from spanwise._flex_masks import block_tables
        from spanwise.kernels.flex import FlexTables, pad_spans

        width = pad_spans(num_spans)
        # Over the spare keys too: the last block of the shorter mask may be full where spare keys must not be read.
        built = FlexTables.from_numpy(
            block_tables(SpanMask(mask.start, mask.end, key_tokens.shape[1]), FLEX_BLOCK_SIZE), device
        )
    spare = width - mask.num_spans
    start, end = (_on_device(np.pad(x, ((0, 0), (0, spare), (0, 0))), device) for x in (mask.start, mask.end))
    if tables != "flex":  # the flex kernel needs a constant number of queries
        for x in (start, end):
            _compat.mark_dynamic(_compat.mark_dynamic(x, 1), 2)
    kv_pos = _compat.mark_dynamic(_on_device(key_tokens.astype(np.int32), device), 1)
    return {"start": start, "end": end, "kv_pos": kv_pos, "tables": built}


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; to an accelerator through pinned memory, so that the host need not wait."""
    x = torch.from_numpy(array)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def spread_slots(local: RankPlan, slots: torch.Tensor, padded: int, batch: int) -> torch.Tensor:
    """Slots among the gathered rows ``[rank, batch row, token]`` of `batch` rows.

    Args:
        slots: `local.restore` or a stage's `take`.
        padded: length of the gathered shards.

    A batched layout has them already; a one-row layout serves any number of rows.
    """
    if local.batched or batch == 1:
        return slots
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
    rank = rank_on(mesh, plan.num_ranks, plan.inner)
    if mesh is not None and plan.num_ranks > 1:
        compare_fingerprints(plan.fingerprint, mesh)
    device = torch.device(device if device is not None else "cpu" if mesh is None else mesh.device_type)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    tables = kernel if kernel in ("flex", "varlen") else "flex" if kernel == "auto" and device.type == "cuda" else None
    key = (rank, device, tables)
    if key not in plan.built:
        plan.built[key] = build(plan, rank, device, tables=tables)
    return plan.built[key]


def rank_on(mesh: DeviceMesh | None, num_ranks: int, inner: int = 1) -> int:
    """This rank's number on the cp ``mesh``; ``ValueError`` if the mesh does not fit the plan.

    Args:
        inner: ranks of a Ulysses group; where there are several groups, the mesh is ``(groups, inner)``.
    """
    if mesh is None:
        if num_ranks == 1:
            return 0
        raise ValueError(f"the plan is for {num_ranks} ranks and needs their mesh; got mesh=None")
    shape = tuple(mesh.mesh.shape)
    if inner > 1 and shape == (num_ranks // inner, inner):
        return mesh.get_local_rank(0) * inner + mesh.get_local_rank(1)
    if 1 < inner < num_ranks:
        raise ValueError(
            f"the plan is for a 2-D cp mesh of shape {(num_ranks // inner, inner)}, got {shape} with axes "
            f"{mesh.mesh_dim_names}; pass both axes, as in mesh['cp_outer', 'cp_inner']"
        )
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
    rank = rank_on(mesh, local.num_ranks, local.inner)
    if rank != local.rank:
        raise ValueError(f"this is rank {rank}, and the rank plan is rank {local.rank}'s")


def outer_group(mesh: DeviceMesh) -> str:
    """Name of the process group in which K/V travel between groups: the mesh's first axis."""
    return _compat.group_name(mesh.get_group(0))


def inner_group(mesh: DeviceMesh) -> str:
    """Name of the process group that trades heads for tokens: the mesh's last axis."""
    return _compat.group_name(mesh.get_group(mesh.ndim - 1))


def compare_fingerprints(fingerprint: str, mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` on every rank of ``mesh`` if their fingerprints differ, naming them all. A collective."""
    what = "all-gather of plan fingerprints"
    everyone = None
    for axis in reversed(range(mesh.ndim)):  # the last axis first: so the result is in the order of ranks
        group = mesh.get_group(axis)
        device = _compat.comparison_device(group)
        if everyone is None:
            everyone = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8)
        name = _compat.group_name(group)
        pending = failure.start(what, name, _compat.start_all_gather, everyone.to(device), group.size(), name)
        everyone = failure.wait(pending, what, name)
    assert everyone is not None
    prints = [bytes(row).hex() for row in everyone.view(mesh.size(), -1).tolist()]
    if len(set(prints)) > 1:
        held = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(prints))
        raise ValueError(
            f"ranks made different plans: {held}. Make the plan from the same mask and arguments on every rank"
        )
