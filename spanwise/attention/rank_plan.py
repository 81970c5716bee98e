"""RankPlan: one rank's part of a plan as tensors on its device.

A `RankPlan` is a frozen dataclass registered as a pytree, so that it passes through `torch.compile`, checkpointing
and FSDP2 as an argument. Everything that changes from batch to batch is the contents or the shape of a tensor; empty
tensors carry sizes. Other fields rarely change between batches; each change is another graph.
"""

# B layout rows (1, or the batch), T tokens of this rank, S tokens of its group

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention import ulysses
from spanwise.attention.call_log import Call
from spanwise.attention.chunks import chunks_of, on_device
from spanwise.attention.compare import mesh_ranks, record
from spanwise.attention.kernels.base import Chunk, Kernel
from spanwise.attention.kernels.table import find
from spanwise.layouts.layout import Layout
from spanwise.planning import documents
from spanwise.planning.plan_data import PlanData


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """This rank's part of a plan.

    Attributes:
        tokens: int64 ``[B, T]``, global positions of the rank's tokens, ascending.
        kv_tokens: int64 ``[B, T of K/V]``, positions of the rank's keys; None where they equal `tokens`.
        group_tokens: int64 ``[B, S]``, positions of the tokens of the rank's group; None without Ulysses.
        all_runs: int64 ``[2, runs of all ranks and rows]``, ascending: tokens of each run, and how far its tokens move
            in `restore`.
        extent: ``[seq_len, 0]``; carries a size in its shape.
        padded: ``[padded shard length, 0]``.
        kv_extent: ``[kv_len, 0]``, as many rows as there are keys.
        valid, kv_valid: bool ``[T]``, ``[T of K/V]``, False in padding; None where there is no padding.
        trade, kv_trade: how the group trades heads for tokens; None without Ulysses. `kv_trade` is also None where it
            equals `trade`.
        chunks: for each mask the rank's own chunk, then the chunks that arrive from other ranks.
        rank, num_ranks, inner: plain numbers; see `PlanData`.
        batched: whether batch rows have different layouts.
        keep_kv: whether received K/V are kept for the backward; otherwise they are refetched.
        causal: names of the masks that are the plain causal mask.
        packed: whether the plan has a packing.
        attention_shape: num_q_heads, num_kv_heads, head_dim, v_head_dim; None where `make_plan` was called without it.
        positions: int64 ``[B or batch, T]``, position of each token in its document, 0 in padding; a row for each
            batch row if documents differ by row, though `tokens` may have one. None where the plan does not know its
            documents: give `make_plan` its ``cu_seqlens``.
        mesh: the cp mesh that ``plan.local`` was given; calls that name none use it.
        digest: uint8 ``[16]`` in host memory, the plan's fingerprint; compared across the ranks in each call.

    >>> import spanwise
    >>> local = spanwise.make_plan(spanwise.SpanMask.causal(8), num_ranks=1).local(mesh=None, device="cpu")
    >>> local.tokens.shape, len(local.chunks["default"])
    (torch.Size([1, 8]), 1)
    """

    tokens: torch.Tensor
    kv_tokens: torch.Tensor | None
    group_tokens: torch.Tensor | None
    all_runs: torch.Tensor
    extent: torch.Tensor
    padded: torch.Tensor
    kv_extent: torch.Tensor
    valid: torch.Tensor | None
    kv_valid: torch.Tensor | None
    trade: ulysses.Trade | None
    kv_trade: ulysses.Trade | None
    chunks: dict[str, tuple[Chunk, ...]]
    rank: int
    num_ranks: int
    inner: int
    batched: bool
    keep_kv: bool
    causal: tuple[str, ...]
    packed: bool
    attention_shape: tuple[int | None, ...]
    digest: torch.Tensor
    positions: torch.Tensor | None
    mesh: DeviceMesh | None

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.extent.shape[0]

    @property
    def restore(self) -> torch.Tensor:
        """Where each token lies in the gathered, padded shards of all ranks, ordered ``[rank, row, token]``, flattened.

        int64 ``[B, seq_len]``, as long as the whole sequence: made when first needed.
        """
        if torch.compiler.is_compiling():
            return self._restored()
        if "restored" not in self.__dict__:  # serves training too, whatever mode the first call is made in
            with _torch.plain_tensors():
                self.__dict__["restored"] = self._restored()
        return self.__dict__["restored"]

    def _restored(self) -> torch.Tensor:
        rows = self.tokens.shape[0]
        length, shift = self.all_runs
        tokens = torch.arange(rows * self.seq_len, device=length.device)
        return tokens.add_(shift.repeat_interleave(length, output_size=rows * self.seq_len)).view(rows, self.seq_len)

    @property
    def kv_len(self) -> int:
        """Keys of the whole sequence; `seq_len`, except in cross attention."""
        return self.kv_extent.shape[0]

    @property
    def query_tokens(self) -> torch.Tensor:
        """Positions of the queries that this rank computes: `group_tokens` under Ulysses, else `tokens`."""
        return self.tokens if self.group_tokens is None else self.group_tokens

    @property
    def key_tokens(self) -> torch.Tensor:
        """Positions of the rank's keys: `kv_tokens`, or `tokens` where they are the same."""
        return self.tokens if self.kv_tokens is None else self.kv_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> RankPlan:
        # A copy of a model that holds a plan talks over the same mesh.
        return _torch.tree_map(lambda x: copy.deepcopy(x, memo), self)


_torch.register_pytree_dataclass(
    RankPlan,
    static=("rank", "num_ranks", "inner", "batched", "keep_kv", "causal", "packed", "attention_shape", "mesh"),
)


def build(plan: PlanData, rank: int, device: torch.device | str = "cpu", *, kernel: Kernel | None = None) -> RankPlan:
    """The tensors of ``rank`` on ``device``, for `kernel`, or for any that needs no tables. Pure: no process group."""
    device, kernel = torch.device(device), kernel or Kernel()
    if kernel.needs_tokens and 0 in (plan.layout.tokens_per_rank.min(), plan.kv_layout.tokens_per_rank.min()):
        # Checked for all ranks, so that every rank raises; the kernel would raise on the empty rank alone.
        raise ValueError(
            f"kernel {kernel.name!r} needs at least one token on every rank, and one key, got "
            f"{plan.layout.tokens_per_rank.tolist()} and {plan.kv_layout.tokens_per_rank.tolist()}; use fewer ranks, "
            f"smaller blocks or another balancer"
        )
    layout, same = plan.layout, plan.kv_layout == plan.layout
    group = rank // plan.inner

    def placed(numbers: np.ndarray) -> torch.Tensor:
        tokens = on_device(numbers, device)
        return _torch.mark_dynamic(tokens, 1) if kernel.dynamic_queries else tokens

    valid = kv_valid = None
    if plan.packing is not None and plan.packing.padded:
        valid = _torch.mark_dynamic(on_device(plan.packing.valid_q[layout.indices(rank)], device), 0)
        kv_valid = _torch.mark_dynamic(on_device(plan.packing.valid_kv[plan.kv_layout.indices(rank)], device), 0)
    trade = kv_trade = None
    if plan.inner > 1:
        members = range(group * plan.inner, (group + 1) * plan.inner)
        trade, kv_trade = (
            ulysses.trade_of([_tokens_of(each, r) for r in members], rank % plan.inner, device)
            for each in (layout, plan.kv_layout)
        )
        kv_trade = None if same else kv_trade
    positions = documents.positions(plan, rank)
    return RankPlan(
        tokens=placed(_tokens_of(layout, rank)),
        kv_tokens=None if same else placed(_tokens_of(plan.kv_layout, rank)),
        group_tokens=None if trade is None else placed(_tokens_of(plan.groups, group)),
        all_runs=_torch.mark_unbacked(on_device(layout.shifts(), device), 1),
        extent=torch.empty(layout.seq_len, 0, device=device),
        padded=torch.empty(int(layout.tokens_per_rank.max()), 0, device=device),
        kv_extent=torch.empty(plan.kv_len, 0, device=device),
        valid=valid,
        kv_valid=kv_valid,
        trade=trade,
        kv_trade=kv_trade,
        chunks={name: chunks_of(plan, name, group, device, kernel) for name in plan.masks},
        rank=rank,
        num_ranks=plan.num_ranks,
        inner=plan.inner,
        batched=layout.batch_size > 1,
        keep_kv=plan.keep_kv,
        causal=plan.causal,
        packed=plan.packing is not None,
        attention_shape=(plan.num_q_heads, plan.num_kv_heads, plan.head_dim, plan.v_head_dim),
        digest=torch.tensor(list(bytes.fromhex(plan.fingerprint)), dtype=torch.uint8),
        positions=None if positions is None else placed(positions),
        mesh=None,
    )


def _tokens_of(layout: Layout, rank: int) -> np.ndarray:
    """Tokens of a rank, ``[rows, T]``."""
    return np.stack([layout.indices(rank, row) for row in range(layout.batch_size)])


def local_plan(
    plan: PlanData, mesh: DeviceMesh | None, device: torch.device | str | None = None, *, kernel: str | Kernel = "auto"
) -> RankPlan:
    """This rank's tensors on ``device``, after the plans of all ranks of ``mesh`` were compared.

    A collective call: every rank of the mesh makes it, outside compiled code. The tensors are built once for each plan
    object. The result carries `mesh`, and calls that take it need none.

    Args:
        mesh: the cp mesh, both cp axes for a plan of two levels; None is allowed for a plan of one rank.
        device: where the tensors live; default: the mesh's device type.
        kernel: the kernel that will use them, as in `context_parallel_attention`; some need tables in the plan.

    Raises:
        ValueError: mesh of another size, an unknown kernel.
        NotImplementedError: inside a transform of `torch.func`.
        spanwise.MismatchError: ranks hold different plans, or a rank makes another call, as after a backward that it
            left out.
        spanwise.ExchangeError: a rank is gone or too late.

    >>> import spanwise
    >>> local_plan(spanwise.make_plan(spanwise.SpanMask.causal(8), num_ranks=1), mesh=None).rank
    0
    """
    if torch.compiler.is_compiling():
        raise ValueError(
            "a Plan was given inside a compiled region; build plan.local(mesh, device) outside and pass that"
        )
    _torch.check_transforms()
    rank = rank_on(mesh, plan.num_ranks, plan.inner)
    device = device_of(device, mesh)
    found = find(kernel, device)
    chosen = None if found.plain else found
    key = (rank, device, chosen)
    # The tensors serve training too, whatever mode the first call is made in.
    with _torch.plain_tensors() as to_active_mode:
        if mesh is not None and plan.num_ranks > 1:
            compare_fingerprints("plan.local", plan.fingerprint, mesh)
        local = plan.built.get(key) or build(plan, rank, device, kernel=chosen)
        if local.mesh is not mesh:  # by identity: an equal mesh may belong to groups that are gone
            local = dataclasses.replace(local, mesh=mesh)
        plan.built[key] = local
    return to_active_mode(local)


def local_of(
    plan: PlanData | RankPlan, mesh: DeviceMesh | None, device: Any, kernel: Any = "auto"
) -> tuple[RankPlan, DeviceMesh | None]:
    """The rank plan that was given, or `local_plan`; and the mesh of a call: the rank plan's, or `mesh` without one.

    ``ValueError`` unless they belong together, and to this rank.
    """
    local = plan if isinstance(plan, RankPlan) else local_plan(plan, mesh, device, kernel=kernel)
    check_mesh(mesh)
    if mesh is None or mesh is local.mesh:
        mesh = local.mesh
    elif local.num_ranks > 1 and local.mesh is not None and mesh != local.mesh:
        raise ValueError(f"the rank plan has the mesh {local.mesh}, the call {mesh}; leave mesh out")
    if local.num_ranks > 1 and (rank := rank_on(mesh, local.num_ranks, local.inner)) != local.rank:
        raise ValueError(f"this is rank {rank}, and the rank plan is rank {local.rank}'s")
    return local, mesh


def device_of(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    """The device, by default the mesh's or the CPU; "cuda" alone gets the index of the current one."""
    device = torch.device(device if device is not None else "cpu" if mesh is None else mesh.device_type)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def rank_on(mesh: DeviceMesh | None, num_ranks: int, inner: int = 1) -> int:
    """This rank's number on the cp ``mesh``; ``ValueError`` if the mesh does not fit the plan.

    Args:
        inner: ranks of a Ulysses group; where there are several groups, the mesh is ``(groups, inner)``.
    """
    if mesh is None:
        if num_ranks == 1:
            return 0
        raise ValueError(f"the plan is for {num_ranks} ranks and needs their mesh; got mesh=None")
    check_mesh(mesh)
    shape = tuple(mesh.shape)
    wanted = (num_ranks // inner, inner) if 1 < inner < num_ranks else (num_ranks,)
    if inner > 1 and shape == (num_ranks // inner, inner):
        return mesh.get_local_rank(0) * inner + mesh.get_local_rank(1)
    if shape != wanted and (len(wanted) > 1 or shape != (num_ranks, 1)):
        raise ValueError(
            f"the plan is for {num_ranks} ranks, a cp mesh of shape {wanted}, got {shape} with axes "
            f"{mesh.mesh_dim_names}; pass the cp axes, as in mesh['cp'] or mesh['cp_outer', 'cp_inner'], or make one "
            f"of several by _flatten('cp'), or make the plan with num_ranks={mesh.size()}"
        )
    return mesh.get_local_rank(0)


def check_mesh(mesh: object) -> None:
    """``ValueError`` for anything but a mesh or None."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh must be a DeviceMesh, got a {type(mesh).__name__}; name other arguments, as in x=x")


def check_plan(plan: object, caller: str) -> None:
    """``ValueError`` for anything but a plan."""
    if not isinstance(plan, (PlanData, RankPlan)):
        raise ValueError(
            f"{caller} needs a Plan or RankPlan, got {type(plan).__name__}: make one with "
            f"spanwise.make_plan(mask, num_ranks); a mask alone does not say which rank holds which tokens"
        )


def compare_fingerprints(call: str, fingerprint: str, mesh: DeviceMesh) -> None:
    """Compare a call that takes the plan of this fingerprint with those of the other ranks of ``mesh``."""
    record(Call(call, fresh=("plan", fingerprint)), *mesh_ranks(mesh))
