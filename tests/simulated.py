"""Every rank of a plan in one process: what each would receive is picked out of the whole tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from spanwise import Plan
from spanwise.attention.executor import GATHERED
from spanwise.attention.kernels.base import AttentionOptions, ScoreMod
from spanwise.attention.kernels.merge import merge
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build


def all_ranks(
    plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str, score_mod: ScoreMod | None = None
) -> torch.Tensor:
    """Attention of the whole sequence through the rank plans of all ranks; differentiable.

    Args:
        q, k, v: ``[1, H, seq_len, D]``; a plan of one layout row.
    """
    ranks = range(plan.num_ranks)
    locals_ = [build(plan, rank, q.device, kernel=KERNELS[kernel]) for rank in ranks]
    kv_shards = [[plan.shard(x, rank, dim=2) for rank in ranks] for x in (k, v)]
    outs = []
    for rank, local in enumerate(locals_):
        parts = []
        for i, chunk in enumerate(local.chunks["default"]):
            if i == 0:
                piece = [shards[rank] for shards in kv_shards]
            elif chunk.step.kind == GATHERED:
                padded = local.padded.shape[0]
                gathered = [torch.cat([pad(x, (0, 0, 0, padded - x.shape[2])) for x in xs], 2) for xs in kv_shards]
                piece = [pad(x, (0, 0, 0, 1)).index_select(2, chunk.step.order) for x in gathered]
            else:
                # From each sender the rows that its own route sends here.
                steps = [other.chunks["default"][i].step for other in locals_]
                rows = [step.send.split([x.shape[0] for x in step.send_sizes])[rank] for step in steps]
                arrived = [torch.cat([x[:, :, at] for x, at in zip(xs, rows, strict=True)], 2) for xs in kv_shards]
                piece = [pad(x, (0, 0, 0, 1)).index_select(2, chunk.step.order) for x in arrived]
            parts.append(
                KERNELS[kernel].attend(
                    plan.shard(q, rank, dim=2),
                    *piece,
                    chunk,
                    local.tokens,
                    AttentionOptions(q.shape[-1] ** -0.5, score_mod),
                )
            )
        outs.append(merge(parts)[0])
    return torch.cat(outs, 2).index_select(2, plan.layout.restore_indices()[0].to(q.device))
