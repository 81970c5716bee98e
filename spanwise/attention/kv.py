"""K/V of each chunk, in order: the rank's own at once, others as they arrive.

`attention` iterates over them; the exchange moves them.
"""

# B batch, H heads, T tokens of this rank, K keys of a chunk, D head dim

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.compare import Compared
from spanwise.attention.executor import Link, RankStep, bring, kv_form, with_spare
from spanwise.attention.kernels.base import Chunk
from spanwise.attention.kernels.merge import Part
from spanwise.attention.rank_plan import RankPlan, outer_link
from spanwise.attention.refetch import Fetched, Refetch


@dataclasses.dataclass(frozen=True)
class ChunkKV:
    """Keys and values of one chunk.

    Attributes:
        k, v: ``[B, Hkv, K, D]``.
        index: of the chunk among those that arrive; -1 for the rank's own.
        refetch: fetches the chunks again in the backward; None if they are kept.
    """

    k: torch.Tensor
    v: torch.Tensor
    index: int = -1
    refetch: Refetch | None = None

    def attended(self, attend: Callable[[torch.Tensor, torch.Tensor], Part]) -> Part:
        """The kernel's part ``attend(k, v)``; autograd does not save a chunk that is refetched."""
        if self.refetch is None:
            return attend(self.k, self.v)
        hooks: AbstractContextManager[Any] = contextlib.nullcontext()
        if self.index >= 0:
            hooks = self.refetch.not_saving(self.index, self.k, self.v)
        with hooks:
            part = attend(self.k, self.v)
        return self.refetch.in_backward(self.index, *part)


def kv_chunks(
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: tuple[Chunk, ...],
    local: RankPlan,
    mesh: DeviceMesh | None,
    mask: str,
    call: Compared | None = None,
) -> Iterator[ChunkKV]:
    """K/V of each chunk, in order. A generator: work between two items runs while later chunks travel.

    Args:
        k, v: ``[B, Hkv, T, D]``, the rank's own.
        mask: name of the mask, for errors.
        call: the attention call, if it is compared.

    Raises:
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
        ValueError: the plan refetches chunks, and this is compiled code.
    """
    if len(chunks) == 1:
        yield ChunkKV(k, v)
        return
    assert mesh is not None
    if not local.keep_kv and torch.compiler.is_compiling():
        raise ValueError(
            "a plan with keep_kv=False is for eager code: in a compiled graph, selective activation checkpointing "
            "decides what is kept; make the plan with keep_kv=True"
        )
    remote, link, refetch = chunks[1:], outer_link(local, mesh, f"K/V, mask {mask!r}", call), None
    if not local.keep_kv:
        label = f"K/V refetched for the backward, mask {mask!r}"
        refetch = Refetch(_fetches(k.detach(), v.detach(), remote, link._replace(label=label)))
    steps = [chunk.route for chunk in remote]
    arriving = bring((k, v), steps, link, kv_form(k, v, steps))
    yield ChunkKV(k, v, refetch=refetch)
    for i, chunk in enumerate(remote):
        pair = with_spare(chunk.route, next(arriving), chunk.kv_pos)
        if refetch is not None:
            pair = (pair[0].contiguous(), pair[1].contiguous())  # otherwise a kernel may save contiguous copies
        yield ChunkKV(pair[0], pair[1], i, refetch)
        del pair  # otherwise this chunk lives until the next one has arrived


def _fetches(k: torch.Tensor, v: torch.Tensor, chunks: tuple[Chunk, ...], link: Link) -> list[Callable[[], Fetched]]:
    """For each chunk a function that starts to bring it again, straight from the owners of its keys."""
    steps: list[RankStep] = [chunk.route.direct or chunk.route for chunk in chunks]
    form, own = kv_form(k, v, steps), list[torch.Tensor]()

    def start(i: int) -> Fetched:
        if link.call is not None:
            link.call.backward(link.label)
        if not own:
            own.append(form.leaving((k, v)))  # once for all chunks; the first chunk comes last
        arriving = bring((own[0] if i else own.pop(),), [steps[i]], link)

        def arrived() -> tuple[torch.Tensor, ...]:
            pair = with_spare(steps[i], form.arrived(*next(arriving)), chunks[i].kv_pos)
            return tuple([x.contiguous() for x in pair])

        return arrived

    return [functools.partial(start, i) for i in range(len(chunks))]
