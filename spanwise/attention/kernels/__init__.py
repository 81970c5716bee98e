"""Local attention kernels. They know nothing of ranks: q, k, v and spans in, (out, lse) out.

`attend` is the door to one problem; `queries`, `attend_part` and `merge` to one whose keys come piece by piece. An
explicit kernel name never falls back to another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from spanwise.attention.kernels._checks import check_problem
from spanwise.attention.kernels.merge import Part

if TYPE_CHECKING:
    from spanwise.attention.chunks import Chunk
    from spanwise.attention.kernels.sdpa import Queries

KERNELS = ("reference", "sdpa", "flex", "varlen")


def resolve(kernel: str, device: torch.device, score_mod: Callable[..., Any] | None = None) -> str:
    """The kernel that `kernel` names on `device`.

    "auto" is "flex" on CUDA; on the CPU it is "sdpa", or "reference" (dense) where a `score_mod` is given, which
    "sdpa" cannot apply.

    Raises:
        ValueError: unknown name, or a kernel that does not run on the device or cannot apply a `score_mod`.
    """
    if kernel == "auto":
        if device.type == "cuda":
            return "flex"
        if device.type == "cpu":
            return "sdpa" if score_mod is None else "reference"
        raise ValueError(f"no kernel was tested on device {device}; name one: kernel='reference' runs anywhere")
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {['auto', *KERNELS]}")
    if kernel == "varlen" and device.type != "cuda":
        raise ValueError(f"kernel 'varlen' runs on CUDA, the tensors are on {device}; use kernel='sdpa' on the CPU")
    if kernel == "varlen" and score_mod is not None:
        raise ValueError("kernel 'varlen' cannot apply a score_mod; use kernel='flex'")
    if kernel == "sdpa" and device.type != "cpu":
        raise ValueError(f"kernel 'sdpa' runs on the CPU, the tensors are on {device}; use kernel='flex'")
    if kernel == "sdpa" and score_mod is not None:
        raise ValueError("kernel 'sdpa' cannot apply a score_mod; use kernel='reference' on the CPU or 'flex' on CUDA")
    return kernel


def check(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stage: Chunk,
    *,
    score_mod: Callable[..., Any] | None,
    softcap: float | None,
    max_logit: bool,
) -> None:
    """Raise what `attend` and `max_logit` would raise, before anything has been sent.

    Args:
        kernel: a name that `resolve` returned.
        stage: the local stage; k and v are the rank's own.
    """
    if max_logit and not (kernel == "flex" and q.device.type == "cuda") and (score_mod or q.device.type != "cpu"):
        raise ValueError(
            f"AuxRequest(max_logit=True) needs kernel='flex' on CUDA, or the CPU without a score_mod; got "
            f"kernel={kernel!r} on {q.device} and score_mod={score_mod}"
        )
    if kernel not in ("flex", "varlen"):
        check_problem(q, k, v, stage.start, stage.end)
        return
    from spanwise.attention.kernels import flex, varlen

    if kernel == "varlen":
        if not isinstance(stage.tables, varlen.VarlenTables):
            raise ValueError(
                "kernel 'varlen' needs rounds: build the rank plan with plan.local(mesh, device, kernel='varlen')"
            )
        varlen.check(q, k, v, stage.start, stage.end, stage.tables, softcap=softcap, score_mod=score_mod)
        return

    if not isinstance(stage.tables, flex.FlexTables):
        raise ValueError(
            "kernel 'flex' needs block tables: build the rank plan with plan.local(mesh, device, kernel='flex')"
        )
    flex.check(q, k, v, stage.start, stage.end, stage.tables)


def attend(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stage: Chunk,
    q_pos: torch.Tensor,
    *,
    scale: float,
    score_mod: Callable[..., Any] | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of local queries over one piece of K/V.

    Args:
        kernel: a name that `resolve` returned.
        q: ``[B, Hq, T, Dk]``; k ``[B, Hkv, keys, Dk]``; v ``[B, Hkv, keys, Dv]``.
        stage: spans over the piece, key positions, block tables.
        q_pos: int ``[B or 1, T]``, global positions of the queries, for `score_mod`.

    Returns:
        out ``[B, Hq, T, Dv]`` and natural-log lse ``[B, Hq, T]`` (float32, or float64 for float64), both
        differentiable; a row without a key has out 0, lse −inf and no gradient.
    """
    if kernel == "sdpa":
        from spanwise.attention.kernels.sdpa import sdpa

        return sdpa(q, k, v, stage.start, stage.end, scale=scale, softcap=softcap)
    if kernel == "reference":
        from spanwise.attention.kernels.reference import reference

        return reference(
            q, k, v, stage.start, stage.end,
            scale=scale, score_mod=score_mod, softcap=softcap, q_pos=q_pos, kv_pos=stage.kv_pos,
        )  # fmt: skip
    if kernel == "varlen":
        from spanwise.attention.kernels import varlen

        assert isinstance(stage.tables, varlen.VarlenTables)  # as `check` made sure
        return varlen.attend_rounds(q, k, v, stage.tables, scale=scale)
    from spanwise.attention.kernels.flex import FlexTables, flex

    assert isinstance(stage.tables, FlexTables)  # as `check` made sure
    return flex(
        q, k, v, stage.start, stage.end, stage.tables,
        scale=scale, score_mod=score_mod, softcap=softcap, q_pos=q_pos, kv_pos=stage.kv_pos,
    )  # fmt: skip


def queries(kernel: str, q: torch.Tensor) -> torch.Tensor | Queries:
    """``q`` ``[B, Hq, T, Dk]`` in the form that `attend_part` takes, made once for all parts.

    Under "sdpa" the gradients of the parts are then summed in float32, whatever q's dtype.
    """
    if kernel != "sdpa":
        return q
    from spanwise.attention.kernels import sdpa

    return sdpa.queries(q)


def attend_part(
    kernel: str,
    q: torch.Tensor | Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    stage: Chunk,
    q_pos: torch.Tensor,
    *,
    scale: float,
    score_mod: Callable[..., Any] | None = None,
    softcap: float | None = None,
) -> Part:
    """`attend` over one piece of several, for nothing but `merge.Merging` or `merge.merge`.

    Args:
        q: from `queries`. All else as of `attend`.

    Returns:
        What the merge takes: tensors of which the first two are out and lse. Only their values are the caller's; what
        flows back through them is the merge's affair.
    """
    if isinstance(q, torch.Tensor):
        return attend(kernel, q, k, v, stage, q_pos, scale=scale, score_mod=score_mod, softcap=softcap)
    from spanwise.attention.kernels.sdpa import sdpa_part

    return sdpa_part(q, k, v, stage.start, stage.end, scale=scale, softcap=softcap)


def max_logit(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    stage: Chunk,
    q_pos: torch.Tensor,
    *,
    scale: float,
    score_mod: Callable[..., Any] | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Largest visible score of each query head, ``[Hq]``, −inf if there is none. Not differentiable.

    Kernel "flex" on CUDA, and on the CPU any kernel without a `score_mod`; see `check`.
    """
    if kernel == "flex" and q.device.type == "cuda":
        from spanwise.attention.kernels import flex

        assert isinstance(stage.tables, flex.FlexTables)  # as `check` made sure
        return flex.max_logit(
            q, k, stage.start, stage.end, stage.tables,
            scale=scale, score_mod=score_mod, softcap=softcap, q_pos=q_pos, kv_pos=stage.kv_pos,
        )  # fmt: skip
    from spanwise.attention.kernels import sdpa

    return sdpa.max_logit(q, k, stage.start, stage.end, scale=scale, softcap=softcap)
