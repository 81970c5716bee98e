"""packed_attention: context parallel attention on packed tensors, ``[tokens, heads, dim]``.

TransformerEngine calls this layout THD. It calls `attention` with the packed tokens as one batch row. The plan's
`Packing` knows where sequences lie and which rows are padding.
"""

# T tokens of this rank, H heads, D head dim

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spanwise.attention.attention import Aux, AuxRequest, context_parallel_attention
from spanwise.attention.compare import tells_refusals
from spanwise.attention.rank_plan import RankPlan
from spanwise.planning.plan import Plan


@tells_refusals
def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan | RankPlan,
    mesh: DeviceMesh | None = None,
    *,
    return_aux: AuxRequest | None = None,
    **options: Any,
) -> Any:
    """`context_parallel_attention` on packed shards.

    Args:
        q: ``[T, Hq, Dk]``, this rank's tokens, as ``spanwise.shard(plan, mesh, x, dim=0)`` cuts them.
        k: ``[T_kv, Hkv, Dk]``, ``Hq % Hkv == 0``; T_kv is T, except in cross attention (``side="kv"`` when sharding).
        v: ``[T_kv, Hkv, Dv]``.
        plan: of one batch row. If it was made with a `Packing` that has padding, rows of q, k, v in padding may hold
            anything, NaN included.
        mesh, return_aux: as in `context_parallel_attention`.
        options: mask_name, scale, kernel, score_mod, softcap, sinks and expand, as there; `expand` gets and gives
            ``[1, heads, tokens, dim]``.

    Returns:
        out ``[T, Hq, Dv]``, or ``(out, Aux)`` with lse ``[Hq, T]`` and max_logit ``[Hq]``. A row in padding, or without
        a key, gives out 0 and lse −inf; in padding the gradients of q, k and v are exactly 0, and no cotangent enters.

    Raises:
        ValueError: tensors that are not ``[tokens, heads, head_dim]``, a plan of several batch rows, and the cases of
            `context_parallel_attention`.

    >>> import torch, spanwise
    >>> plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 4, 10]), num_ranks=1)
    >>> q, k, v = torch.randn(3, 10, 2, 8).unbind()
    >>> spanwise.packed_attention(q, k, v, plan.local(mesh=None)).shape
    torch.Size([10, 2, 8])
    """
    for x in (q, k, v):
        if isinstance(x, DTensor) or x.dim() != 3:
            raise ValueError(
                f"packed_attention takes plain tensors [tokens, heads, head_dim], got a {type(x).__name__} of shape "
                f"{tuple(x.shape)}; DTensors have to_local(), and context_parallel_attention takes [batch, heads, "
                f"tokens, head_dim]"
            )
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, aux = context_parallel_attention(
        q, k, v, plan, mesh, return_aux=AuxRequest() if return_aux is None else return_aux, **options
    )
    out = out.squeeze(0).transpose(0, 1)
    if return_aux is None:
        return out
    return out, Aux(lse=None if aux.lse is None else aux.lse.squeeze(0), max_logit=aux.max_logit)
