"""A plan's runs as attention-gym and flash-linear-attention take them, whose CUDA kernels compute recurrent layers.

Both pass states between ranks themselves. `attention_gym_routing` serves GDN and KDA in any layout;
`flash_linear_attention_context` needs a contiguous one. The arguments are built and tested here; the kernels have not
run with them, because nothing of this package has run on CUDA. Both libraries are imported when a function is called.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.rank_plan import rank_on
from spanwise.layouts.packing import Packing
from spanwise.masks.checks import check_offset_rows
from spanwise.planning import documents
from spanwise.planning.plan import Plan


class Fragments(NamedTuple):
    """Token runs of all ranks and documents, as plain numbers.

    Attributes:
        cu_seqlens: document offsets over the whole sequence; padding between documents is a document of its own, so
            that no document reads it.
        fragments: for each rank its runs (start, stop), ascending. Together they tile the sequence.
    """

    cu_seqlens: list[int]
    fragments: list[list[tuple[int, int]]]


def fragments(plan: Plan, *, cu_seqlens: Any = None) -> Fragments:
    """The runs of every rank; pure.

    Args:
        plan: with one layout for all batch rows, and tokens on every rank.
        cu_seqlens: document offsets ``[num_docs + 1]``; default: those of the plan.

    Raises:
        ValueError: layouts or documents that differ by batch row, a rank without tokens, or unknown documents.

    >>> import spanwise
    >>> mask = spanwise.SpanMask.documents([0, 3, 8])
    >>> fragments(spanwise.make_plan(mask, 2, balancer="head_tail", block_size=1))
    Fragments(cu_seqlens=[0, 3, 8], fragments=[[(0, 2), (6, 8)], [(2, 6)]])
    """
    given = () if cu_seqlens is None else check_offset_rows(cu_seqlens, plan.seq_len)
    known = [Packing(row) for row in given] or documents.packings(plan, state=True)
    if len(known) > 1 or plan.layout.batch_size > 1:
        raise ValueError(
            f"these kernels take one packed sequence, got {max(len(known), plan.layout.batch_size)} batch rows with "
            f"layouts or documents of their own; concatenate them, or use spanwise.recurrence.gated_delta"
        )
    if not plan.layout.tokens_per_rank.all():
        raise ValueError(
            f"these kernels need tokens on every rank, got {plan.layout.tokens_per_rank.tolist()}; use fewer ranks"
        )
    of = known[0]
    edges = np.concatenate([of.q_offsets[: of.num_sequences], of.q_offsets[: of.num_sequences] + of.q_lens])
    offsets = np.unique(np.concatenate([edges, [0, plan.seq_len]])).tolist()
    runs = [[(int(a), int(b)) for a, b in plan.layout.runs(rank)] for rank in range(plan.num_ranks)]
    return Fragments(offsets, runs)


def attention_gym_routing(
    plan: Plan, mesh: DeviceMesh, device: torch.device | str, *, cu_seqlens: Any = None, conv_width: int = 4
) -> Any:
    """attention-gym's ``ContextParallelRouting`` of this rank, for its ``context_parallel_gdn`` and ``_kda``.

    Args:
        mesh: 1-D mesh of the plan's ranks.
        device: where its tensors live.
        cu_seqlens: as in `fragments`.
        conv_width: width of the convolution before the layer; 1 for none.

    Raises:
        ModuleNotFoundError: attention-gym is not installed.
        NotImplementedError: a version of attention-gym without ``ContextParallelRouting.from_fragments``.
        ValueError: as `fragments`, or a mesh that does not fit.
    """
    offsets, runs = fragments(plan, cu_seqlens=cu_seqlens)
    rank = rank_on(mesh, plan.num_ranks)
    routing = importlib.import_module("attn_gym.linear.context_parallel").ContextParallelRouting
    if not hasattr(routing, "from_fragments"):
        raise NotImplementedError(
            "this version of attention-gym has no ContextParallelRouting.from_fragments; install a newer one"
        )
    return routing.from_fragments(
        cu_seqlens_global=offsets, fragments=runs, cp_rank=rank, device=device, conv_history=conv_width - 1
    )


def flash_linear_attention_context(
    plan: Plan, mesh: DeviceMesh, device: torch.device | str, *, cu_seqlens: Any = None, conv_width: int = 4
) -> Any:
    """flash-linear-attention's context for the ``cp_context`` argument of its layers and operators.

    Args:
        plan: contiguous, with equally many tokens on every rank; of another plan `Plan.recurrent` may be one.
        mesh, device, cu_seqlens, conv_width: as in `attention_gym_routing`.

    Raises:
        ModuleNotFoundError: flash-linear-attention is not installed, or is too old.
        ValueError: another layout, or as `fragments`.
    """
    offsets, runs = fragments(plan, cu_seqlens=cu_seqlens)
    rank_on(mesh, plan.num_ranks)
    share = plan.seq_len // plan.num_ranks
    if runs != [[(rank * share, (rank + 1) * share)] for rank in range(plan.num_ranks)]:
        raise ValueError(
            f"flash-linear-attention takes contiguous shards of equal length, got runs {runs[:2]} … of "
            f"{plan.seq_len} tokens on {plan.num_ranks} ranks; move tokens there with spanwise.relayout, or use "
            f"attention_gym_routing"
        )
    build = importlib.import_module("fla.ops.cp").build_cp_context
    # Its name for the width of the convolution has changed.
    names = inspect.signature(build).parameters
    width = "conv1d_kernel_size" if "conv1d_kernel_size" in names else "kernel_size"
    on_host = torch.tensor(offsets, dtype=torch.int32)
    return build(on_host.to(device), group=mesh.get_group(), cu_seqlens_cpu=on_host, **{width: conv_width})
