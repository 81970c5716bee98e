"""RecurrenceRoute: how states and halos of a sharded sequence travel, made once a batch from a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.rank_plan import RankPlan
from spanwise.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class RecurrenceRoute:
    """One rank's part of a plan for layers that carry a state along the sequence; a pytree of tensors.

    Attributes:
        tokens: ``[T, 0]``, as many rows as the rank has tokens in a batch row; carries a size in its shape.
        starts: int64 ``[n]``, documents whose first token this rank holds, ascending; documents are counted over the
            batch rows of the route, one row after the other.
        ends: int64 ``[m]``, documents whose last token this rank holds, ascending.
        rows: batch rows with a layout or documents of their own; 1 where one row serves all.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    ids: torch.Tensor
    local: RankPlan
    rows: int
    conv_width: int


_torch.register_pytree_dataclass(RecurrenceRoute, static=("rows", "conv_width"))


def recurrence_route(
    plan: Plan,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    *,
    cu_seqlens: Any = None,
    conv_width: int = 4,
) -> RecurrenceRoute:
    """What `causal_conv`, `gated_linear` and `gated_delta` need of a plan: make it once a batch, for all layers.

    A collective call over `mesh`, which compares the plans of all ranks; outside of compiled code. Compiled code takes
    the routes of any number of plans without compiling again.

    Args:
        plan: of a square mask; its mask and exchange do not matter, its layout and documents do.
        mesh: 1-D mesh of all ranks of the plan; None on one rank.
        device: where the tensors live; default: the mesh's device type.
        cu_seqlens: document offsets ``[num_docs + 1]``, or one array per batch row; default: those of the plan, or one
            document where the plan's mask cannot hold several. Padding of a packing belongs to no document.
        conv_width: largest width of a convolution; the halo of a run has one row less.

    Raises:
        ValueError: a plan of cross attention, unknown or bad document offsets, a mesh that does not fit, or plans that
            differ between the ranks.
    """
    from spanwise.batch.sharding import _ids, _packings

    local = plan.local(mesh, device)
    ids = torch.from_numpy(_ids(_packings(plan, cu_seqlens)))
    none = torch.zeros(0, dtype=torch.int64)
    return RecurrenceRoute(
        local.tokens.T[:, :0], none, none, ids, local, max(len(ids), plan.layout.batch_size), conv_width
    )
