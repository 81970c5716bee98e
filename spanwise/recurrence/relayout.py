"""relayout: move a sharded sequence from the layout of one plan to that of another.

Attention wants the tokens of a long document spread over ranks; a layer that carries a state along the sequence wants
runs that are long. A model that has both keeps two plans. Each token travels at most once, from the rank that holds it
under one plan to the rank that holds it under the other.
"""

# B batch rows (1 where one layout serves all), T tokens of this rank before, U after, F features of a token

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.chunks import size
from spanwise.attention.compare import compare_backward, compare_call, eager, tells_refusals
from spanwise.attention.executor import Link, RankStep, bring
from spanwise.attention.rank_plan import compare_fingerprints, device_of, rank_on
from spanwise.layouts.layout import Layout
from spanwise.layouts.thd_order import check_batch_dim, check_dim
from spanwise.masks.arrays import Int64
from spanwise.planning.plan import Plan
from spanwise.recurrence.route import step_of


@dataclasses.dataclass(frozen=True)
class RelayoutRoute:
    """How this rank's tokens travel between two layouts; a pytree of tensors, for compiled code.

    Attributes:
        step: rows that this rank sends and receives.
        before, after: ``[T, 0]`` and ``[U, 0]``; carry sizes in their shapes.
        digest: uint8 ``[16]`` in host memory, of both plans; compared across the ranks in each call.
        rows: batch rows with layouts of their own; 1 where one layout serves all.
        mesh: of all ranks, 1-D; None for one rank.
    """

    step: RankStep
    before: torch.Tensor
    after: torch.Tensor
    digest: torch.Tensor
    rows: int
    mesh: DeviceMesh | None


_torch.register_pytree_dataclass(RelayoutRoute, static=("rows", "mesh"))


@tells_refusals
def relayout(
    x: torch.Tensor,
    from_plan: Plan | RelayoutRoute,
    to_plan: Plan | None = None,
    mesh: DeviceMesh | None = None,
    *,
    dim: int = 1,
    batch_dim: int | None = 0,
) -> torch.Tensor:
    """This rank's shard of `x` under `to_plan`, from its shard under `from_plan`. Differentiable.

    One all-to-all of the tokens that change their rank; the backward is one in the other direction. Collective: every
    rank of `mesh` calls it.

    Args:
        x: ``T`` tokens along `dim`, this rank's shard under `from_plan`.
        from_plan: what `relayout_route` made of both plans; then the next two are left out. Or a plan: each call then
            makes the route, and compares the plans across the ranks.
        to_plan: another plan of as many tokens and ranks.
        mesh: 1-D mesh of all ranks of the plans; None on one rank.
        dim: the sequence dim.
        batch_dim: the batch dim; read only when batch rows have different layouts.

    Returns:
        `x` with ``U`` tokens along `dim`, ascending as in `spanwise.shard`.

    Raises:
        ValueError: plans that do not go together, a shape that is not this rank's shard, or another mesh.

    >>> import torch, spanwise
    >>> mask = spanwise.SpanMask.causal(4)
    >>> plans = [spanwise.make_plan(mask, 1, balancer=name) for name in ("head_tail", "contiguous")]
    >>> spanwise.relayout(torch.tensor([[5, 6, 7, 8]]), *plans)
    tensor([[5, 6, 7, 8]])
    """
    if isinstance(from_plan, RelayoutRoute):
        if to_plan is not None or mesh is not None:
            raise ValueError("a RelayoutRoute holds both plans and the mesh; leave to_plan and mesh out")
        route = from_plan
    else:
        if to_plan is None:
            raise ValueError("relayout needs to_plan, the plan whose shard it returns")
        route = relayout_route(from_plan, to_plan, mesh, x.device)
    dim = check_dim(x, dim)
    if x.shape[dim] != route.before.shape[0]:
        raise ValueError(f"dim {dim} must have this rank's {route.before.shape[0]} tokens, got shape {tuple(x.shape)}")
    if route.mesh is None:
        return x
    dims: tuple[int, ...] = (dim,)  # the batch is part of a token's features, unless its rows have layouts of their own
    if route.rows > 1:
        why = f"the plans lay out {route.rows} batch rows differently"
        dims = (check_batch_dim(x, dim, batch_dim, route.rows, why), dim)
    front = tuple(range(len(dims)))
    rows_Rx = x.movedim(dims, front).flatten(0, front[-1])
    rows_RF = rows_Rx.flatten(1) if rows_Rx.dim() > 1 else rows_Rx.unsqueeze(-1)
    sizes = "features of a token", rows_RF.shape[1:]
    call = compare_call("relayout", {"dtype": x.dtype}, route.mesh, [x], sizes=sizes, plan=route.digest)
    link = Link(_torch.group_name(route.mesh.get_group()), route.mesh.size(), "tokens (relayout)", eager(call))
    (arrived_NF,) = bring(rows_RF, [route.step], link)
    (arrived_NF,) = compare_backward((arrived_NF,), call, travels=True)
    leading = (route.after.shape[0],) if route.rows == 1 else (route.rows, route.after.shape[0])
    return arrived_NF.reshape(*leading, *rows_Rx.shape[1:]).movedim(front, dims)


def relayout_route(
    from_plan: Plan, to_plan: Plan, mesh: DeviceMesh | None = None, device: torch.device | str | None = None
) -> RelayoutRoute:
    """What `relayout` needs of two plans: make it once a batch, for all layers, and for compiled code.

    A collective call over `mesh`, which compares the plans of all ranks; outside of compiled code.

    Args:
        from_plan, to_plan, mesh: as in `relayout`.
        device: where the tensors live; default: the mesh's device type.

    Raises:
        ValueError: plans of different sequences or numbers of ranks, or that differ between the ranks.

    >>> import spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.causal(8), num_ranks=1)
    >>> spanwise.relayout_route(plan, plan).before.shape
    torch.Size([8, 0])
    """
    if torch.compiler.is_compiling():
        raise ValueError("call relayout_route outside of compiled code, and pass the result")
    sizes = [(plan.seq_len, plan.num_ranks) for plan in (from_plan, to_plan)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"plans differ: from_plan has (seq_len, num_ranks) = {sizes[0]}, to_plan {sizes[1]}")
    rank = rank_on(mesh, from_plan.num_ranks)
    device = device_of(device, mesh)
    prints = f"{from_plan.fingerprint} to {to_plan.fingerprint}"
    digest = hashlib.blake2b(prints.encode(), digest_size=16).digest()
    if mesh is not None and from_plan.num_ranks > 1:
        compare_fingerprints("relayout_route", digest.hex(), mesh)
    before, after = from_plan.layout, to_plan.layout
    rows = max(before.batch_size, after.batch_size)
    goes_to, from_rank = _others(before, after, rank, rows), _others(after, before, rank, rows)
    order = np.empty(len(from_rank), dtype=np.int64)
    order[np.argsort(from_rank, kind="stable")] = np.arange(len(order))
    counts = np.bincount(goes_to, minlength=from_plan.num_ranks), np.bincount(from_rank, minlength=from_plan.num_ranks)
    with _torch.plain_tensors() as to_active_mode:
        step = step_of(np.argsort(goes_to, kind="stable"), counts, device, order)
        tokens_before = _torch.mark_dynamic(torch.empty(before.num_tokens(rank), 0, device=device), 0)
        tokens_after, host_digest = size(after.num_tokens(rank), device), torch.tensor(list(digest), dtype=torch.uint8)
        several = mesh if from_plan.num_ranks > 1 else None
        route = RelayoutRoute(step, tokens_before, tokens_after, host_digest, rows, several)
        return to_active_mode(route)


def _others(held: Layout, other: Layout, rank: int, rows: int) -> Int64:
    """The rank that holds each token of `rank` in the `other` layout, batch row by batch row; int64 ``[R]``."""
    found = []
    for row in range(rows):
        _, owner, both = other.owners_of(held.runs(rank, row), row)
        found.append(np.repeat(owner, both[:, 1] - both[:, 0]))
    return np.concatenate(found)
