"""RankPlan: one rank's part of a plan as tensors on its device. The torch room above `plan`.

A `RankPlan` is a frozen dataclass registered as a pytree, so that it passes through `torch.compile`, checkpointing
and FSDP2 as an argument. Everything that changes from batch to batch is tensor contents or a tensor's shape (sizes are
carried by empty tensors); nothing else may differ between the plans of one rank, or a compiled graph would be
specialised to one plan.
"""

# B layout rows (1, or the batch), T tokens of this rank, R tokens of the other ranks, n spans of a row

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _compat
from spanwise.mask import SpanMask
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
    """

    start: torch.Tensor
    end: torch.Tensor
    kv_pos: torch.Tensor
    tables: FlexTables | None


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """This rank's part of a plan.

    Attributes:
        tokens: int64 ``[B, T]``, global positions of the rank's tokens, ascending.
        restore: int64 ``[B, seq_len]``, where each token lies in the gathered, padded shards.
        remote: int64 ``[B, R]``, where the other ranks' tokens lie in the gathered, padded shards, by global position.
            The gathered shards are ordered ``[rank, row, token]`` and flattened.
        padded: ``[padded shard length, 0]``; only its shape means something.
        stages: for each mask the local stage, then the remote one (absent on a single rank).
        rank, num_ranks: plain numbers.
        batched: whether every batch row has a layout of its own.
        causal: names of the masks that are the plain causal mask.
    """

    tokens: torch.Tensor
    restore: torch.Tensor
    remote: torch.Tensor
    padded: torch.Tensor
    stages: dict[str, tuple[Stage, ...]]
    rank: int
    num_ranks: int
    batched: bool
    causal: tuple[str, ...]

    @property
    def seq_len(self) -> int:
        return self.restore.shape[1]


_compat.register_pytree_dataclass(Stage)
_compat.register_pytree_dataclass(RankPlan, static=("rank", "num_ranks", "batched", "causal"))


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
    layout, num_ranks, seq_len = plan.layout, plan.num_ranks, plan.seq_len
    rows = layout.batch_size
    padded = int(layout.tokens_per_rank.max())
    tokens = np.stack([layout.indices(rank, row) for row in range(rows)])
    # Slot of every token in the gathered shards: rank-major, then the batch row, then the token within the shard.
    slots = np.empty((rows, seq_len), dtype=np.int64)
    for row in range(rows):
        for other in range(num_ranks):
            mine = layout.indices(other, row)
            slots[row, mine] = (other * rows + row) * padded + np.arange(len(mine))
    is_remote = np.ones((rows, seq_len), dtype=bool)
    np.put_along_axis(is_remote, tokens, False, axis=1)
    num_remote = seq_len - tokens.shape[1]
    remote_tokens = np.nonzero(is_remote)[1].reshape(rows, num_remote)
    remote = np.take_along_axis(slots, remote_tokens, axis=1)
    if flex_tables and num_ranks > 1:
        # Spare keys let one compiled flex kernel serve plans whose K/V lengths differ; no span reads them. They repeat
        # a real slot, so that they hold numbers.
        from spanwise.kernels.flex import kv_capacity

        spare = kv_capacity(num_remote, FLEX_BLOCK_SIZE) - num_remote
        remote = np.concatenate([remote, np.repeat(slots[:, :1], spare, axis=1)], axis=1)
        remote_tokens = np.concatenate([remote_tokens, np.zeros((rows, spare), np.int64)], axis=1)

    def stage(mask: SpanMask, key_tokens: np.ndarray, key_runs: list[np.ndarray]) -> Stage:
        if rows == 1:
            return _stage(mask.select(own_runs[0], key_runs[0]), mask.num_spans, key_tokens, device, flex_tables)
        local = [
            mask.row(row if mask.batch_size > 1 else 0).select(own_runs[row], key_runs[row]) for row in range(rows)
        ]
        return _stage(SpanMask.stack(local), mask.num_spans, key_tokens, device, flex_tables)

    own_runs = [layout.runs(rank, row) for row in range(rows)]
    other_runs = [_complement(runs, seq_len) for runs in own_runs]
    stages: dict[str, tuple[Stage, ...]] = {}
    for name, mask in plan.masks.items():
        local_stage = stage(mask, tokens, own_runs)
        stages[name] = (local_stage,) if num_ranks == 1 else (local_stage, stage(mask, remote_tokens, other_runs))
    return RankPlan(
        tokens=_on_device(tokens, device) if flex_tables else _compat.mark_dynamic(_on_device(tokens, device), 1),
        restore=_on_device(slots, device),
        remote=_compat.mark_dynamic(_on_device(remote, device), 1),
        padded=torch.empty(padded, 0, device=device),
        stages=stages,
        rank=rank,
        num_ranks=num_ranks,
        batched=rows > 1,
        causal=plan.causal,
    )


def _stage(mask: SpanMask, num_spans: int, key_tokens: np.ndarray, device: torch.device, flex_tables: bool) -> Stage:
    tables = None
    # Both stages get the same number of spans, and never one that alone would be a constant to torch.compile.
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
    return Stage(
        start=start,
        end=end,
        kv_pos=_compat.mark_dynamic(_on_device(key_tokens.astype(np.int32), device), 1),
        tables=tables,
    )


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; to an accelerator through pinned memory, so that the host need not wait."""
    x = torch.from_numpy(array)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _complement(runs: np.ndarray, seq_len: int) -> np.ndarray:
    edges = np.concatenate([[0], runs.ravel(), [seq_len]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]].astype(np.int64)


def spread_slots(local: RankPlan, slots: torch.Tensor, batch: int) -> torch.Tensor:
    """Slots among the gathered rows ``[rank, batch row, token]`` of `batch` rows.

    Args:
        slots: `local.remote` or `local.restore`.

    A batched layout has them already; a one-row layout serves any number of rows.
    """
    if local.batched or batch == 1:
        return slots
    padded = local.padded.shape[0]
    rank, token = slots // padded, slots % padded
    row = torch.arange(batch, device=slots.device).unsqueeze(1)
    return (rank * batch + row) * padded + token


# Fingerprints that the ranks of a group have compared and found equal. Only the comparison itself adds to it, so that
# it holds the same on every rank: whether a later call has to compare does not depend on one rank's objects.
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, collections.deque[str]] = weakref.WeakKeyDictionary()
_REMEMBERED = 1024


def local_plan(
    plan: Plan, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str = "auto"
) -> RankPlan:
    """This rank's tensors on ``device``, after the plans of all ranks of ``mesh`` were compared.

    A collective call: every rank of the mesh makes it, outside compiled code. It compares at each call, by one small
    eager collective; the tensors are built once for each plan object.

    Args:
        mesh: 1-D mesh of the cp axis, of ``plan.num_ranks`` ranks; None is allowed for a plan of one rank.
        device: where the tensors live; default: the mesh's device type.
        kernel: the kernel that will use them: "flex" (the default on CUDA) needs block tables.

    Raises:
        ValueError: mesh of another size, or ranks that hold different plans (both fingerprints are in the text).
    """
    _refuse_compiling()
    rank_on(mesh, plan.num_ranks)
    if mesh is not None and plan.num_ranks > 1:
        compare_fingerprints(plan.fingerprint, mesh.get_group())
    return built_plan(plan, mesh, device, kernel=kernel)


def built_plan(
    plan: Plan, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str = "auto"
) -> RankPlan:
    """What `local_plan` returns, for a call that was handed a `Plan`: compares only what the group has not compared."""
    _refuse_compiling()
    rank = rank_on(mesh, plan.num_ranks)
    if mesh is not None and plan.num_ranks > 1:
        group = mesh.get_group()
        if plan.fingerprint not in _compared.get(group, ()):
            compare_fingerprints(plan.fingerprint, group)
    device = torch.device(device if device is not None else "cpu" if mesh is None else mesh.device_type)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    flex_tables = kernel == "flex" or (kernel == "auto" and device.type == "cuda")
    key = (rank, device, flex_tables)
    if key not in plan.built:
        plan.built[key] = build(plan, rank, device, flex_tables=flex_tables)
    return plan.built[key]


def _refuse_compiling() -> None:
    if torch.compiler.is_compiling():
        raise ValueError(
            "a Plan was given inside a compiled region; build plan.local(mesh, device) outside and pass that"
        )


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


def compare_fingerprints(fingerprint: str, group: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` on every rank of ``group`` if their fingerprints differ, naming them all. A collective."""
    device = _compat.comparison_device(group)
    mine = torch.tensor(list(bytes.fromhex(fingerprint)), dtype=torch.uint8, device=device)
    everyone = _compat.wait(_compat.start_all_gather(mine, group.size(), _compat.group_name(group)))
    prints = [bytes(row).hex() for row in everyone.view(group.size(), -1).tolist()]
    if len(set(prints)) > 1:
        held = "; ".join(f"rank {rank} has {value}" for rank, value in enumerate(prints))
        raise ValueError(
            f"ranks made different plans: {held}. Make the plan from the same mask and arguments on every rank"
        )
    _compared.setdefault(group, collections.deque(maxlen=_REMEMBERED)).append(fingerprint)
