"""The kernels as functions of tensors alone, for tests of one local problem."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.merge import Merging
from spanwise.attention.kernels.table import KERNELS


def chunk_of(start: torch.Tensor, end: torch.Tensor, num_keys: int, tables: Any = None, kv_pos: Any = None) -> Chunk:
    """The chunk of these spans; its keys have positions 0, 1, … unless given."""
    return Chunk(start, end, torch.arange(num_keys, device=start.device)[None] if kv_pos is None else kv_pos, tables)


def attend(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    tables: Any = None,
    *,
    scale: float | None,
    score_mod: Any = None,
    softcap: float | None = None,
    q_pos: torch.Tensor | None = None,
    kv_pos: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of a kernel of this name."""
    chunk = chunk_of(start, end, k.shape[2], tables, kv_pos)
    q_pos = torch.arange(q.shape[2], device=q.device)[None] if q_pos is None else q_pos
    return KERNELS[kernel].attend(q, k, v, chunk, q_pos, AttentionOptions(scale, score_mod, softcap))


reference, sdpa, flex = (functools.partial(attend, name) for name in ("reference", "sdpa", "flex"))


def sdpa_part(
    queries: Any, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, end: torch.Tensor, *,
    scale: float, softcap: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Kernel "sdpa" over some of the keys, for `merge`; `queries` are those of the kernel."""
    chunk, options = chunk_of(start, end, k.shape[2]), AttentionOptions(scale, None, softcap)
    return KERNELS["sdpa"].attend_part(queries, k, v, chunk, start, options)


CUTS = (0, 0.35, 0.36, 0.36, 0.7, 1)  # uneven shares of the keys, one of them of no key


def chunks_of(num_keys: int, cuts: tuple[float, ...] = CUTS) -> list[tuple[int, int]]:
    """First key and one past the last of each chunk."""
    return list(itertools.pairwise(round(cut * num_keys) for cut in cuts))


def in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, end: torch.Tensor, *,
    scale: float, softcap: float | None = None, cuts: tuple[float, ...] = CUTS,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Kernel "sdpa" chunk by chunk, merged."""
    merging, shared = Merging(q.dtype), KERNELS["sdpa"].queries(q)
    for i, j in chunks_of(k.shape[2], cuts):
        mask = [x.clamp(i, j) - i for x in (start, end)]
        merging.add(sdpa_part(shared, k[:, :, i:j], v[:, :, i:j], *mask, scale=scale, softcap=softcap))
    return merging.result()
