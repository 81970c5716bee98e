"""K/V of each chunk, in order: the rank's own at once, others as they arrive, or fetched again in the backward.

`attention` iterates over them; the executor moves them. With ``keep_kv=False`` autograd keeps no chunk that arrived
(*refetch*). All ranks must fetch again in the same order, also where a kernel reads nothing. So an autograd function
behind each kernel call starts the fetch. It also starts the next chunk's fetch, which travels while the attention of
this chunk is computed. Rows that came by way of other ranks are fetched straight from their owners. That is for eager
code: in a compiled graph, selective activation checkpointing decides what is kept.
"""

# B batch, H heads, T tokens of this rank, K keys of a chunk, D head dim of K, E of V

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention.compact import Compact
from spanwise.attention.compare import Compared
from spanwise.attention.executor import Link, Tensors, bring
from spanwise.attention.kernels.base import Chunk
from spanwise.attention.kernels.merge import Part, not_saving
from spanwise.attention.rank_plan import RankPlan


def pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K ``[B, H, T, D]`` and V ``[B, H, T, E]`` as rows ``[T, B * H * (D + E)]``; differentiable."""
    return torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=-1).flatten(1)


def unpack(rows: torch.Tensor, own: Tensors, *, contiguous: bool) -> Tensors:
    """K and V like the rank's `own`, as views of rows, or copies for kernels with spare keys."""
    batch, heads, dims = *own[0].shape[:2], [x.shape[3] for x in own]
    k, v = rows.view(-1, batch, heads, sum(dims)).split(dims, -1)
    pair = k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    return (pair[0].contiguous(), pair[1].contiguous()) if contiguous else pair


@dataclasses.dataclass(frozen=True)
class ChunkKV:
    """Keys and values of one chunk.

    Attributes:
        k, v: ``[B, Hkv, K, D]``.
        index: of the chunk among those that arrive; -1 for the rank's own.
        refetch: fetches the chunks again in the backward; None if they are kept.
        again: gives k and v in the backward, where autograd is not to save them; None if it saves them.
    """

    k: torch.Tensor
    v: torch.Tensor
    index: int = -1
    refetch: Refetch | None = None
    again: Callable[[], Tensors] | None = None

    def attended(self, attend: Callable[[torch.Tensor, torch.Tensor], Part]) -> Part:
        """The kernel's part ``attend(k, v)``; autograd saves neither k nor v if they can be had again."""
        if self.again is None:
            part = attend(self.k, self.v)
        else:
            with not_saving() as forget:
                part = attend(self.k, self.v)
                forget((self.k, self.v), self.again)
        return part if self.refetch is None else _RefetchInBackward.apply(self.refetch, self.index, *part)


def kv_chunks(
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: tuple[Chunk, ...],
    local: RankPlan,
    mesh: DeviceMesh | None,
    mask: str,
    compare: Compared | None = None,
    compact: Compact | None = None,
) -> Iterator[ChunkKV]:
    """K/V of each chunk, in order. A generator: work between two items runs while later chunks travel.

    Args:
        k, v: ``[B, Hkv, T, D]``, the rank's own.
        mask: name of the mask, for errors.
        compare: compares what a backward starts, called with its name; None in compiled code and without comparison.
        compact: what travels in place of K and V, which were expanded from it.

    Raises:
        spanwise.ExchangeError: a rank is gone or too late, here or in the backward.
        ValueError: the plan refetches chunks, and this is compiled code.
    """
    own = ChunkKV(k, v) if compact is None else ChunkKV(k, v, again=compact.again)
    if len(chunks) == 1:
        yield own
        return
    assert mesh is not None
    if not local.keep_kv and torch.compiler.is_compiling():
        raise ValueError(
            "a plan with keep_kv=False is for eager code: in a compiled graph, selective activation checkpointing "
            "decides what is kept; make the plan with keep_kv=True"
        )
    rows = (k, v) if compact is None else compact.rows
    name = mesh.get_group(0).group_name  # K/V travel between groups along the mesh's first axis
    link = Link(name, local.num_ranks // local.inner, f"K/V, mask {mask!r}", compare)
    remote, refetch = chunks[1:], None
    if not local.keep_kv:
        label = f"K/V refetched for the backward, mask {mask!r}"
        refetch = Refetch((rows[0].detach(), rows[1].detach()), remote, link._replace(label=label))
    steps = [chunk.step for chunk in remote if chunk.step is not None]
    arriving = bring(pack(*rows), steps, link)
    yield dataclasses.replace(own, refetch=refetch)
    for i in range(len(remote)):
        pair = unpack(next(arriving), rows, contiguous=refetch is not None and steps[i].spare)
        again: Callable[[], Tensors] | None = None
        if refetch is not None:
            again = functools.partial(refetch.take, i)
        if compact is not None:
            received = Compact(compact.expand, pair, again)
            pair, again = received.expanded(), received.again
            del received
        yield ChunkKV(pair[0], pair[1], i, refetch, again)
        del pair, again  # otherwise this chunk lives until the next one has arrived


class Refetch:
    """The chunks of one attention call, to be fetched in its backward, the last one first.

    Args:
        own: two tensors ``[B, H, T, D]``, the rank's own rows.
        chunks: those that arrive.
    """

    def __init__(self, own: Tensors, chunks: Sequence[Chunk], link: Link) -> None:
        self._own, self._link = own, link
        self._steps = [chunk.step.direct or chunk.step for chunk in chunks if chunk.step is not None]
        self._rows: torch.Tensor | None = None
        self._under_way: dict[int, Iterator[torch.Tensor]] = {}
        self._arrived: dict[int, Tensors] = {}

    @torch.no_grad()
    def start(self, i: int) -> None:
        """Start fetching chunk ``i`` and the one that the backward needs next."""
        self._arrived.clear()  # the backward of earlier ones is done
        for j in (i, i - 1):
            if j >= 0 and j not in self._under_way:
                if self._link.compare is not None:
                    self._link.compare(f"{self._link.label}, chunk {j + 1}")
                if self._rows is None:
                    self._rows = pack(*self._own)  # once for all chunks
                self._under_way[j] = bring(self._rows, [self._steps[j]], self._link)
                if j == 0:
                    self._rows = None

    @torch.no_grad()
    def take(self, i: int) -> Tensors:
        """K and V ``[B, H, K, D]`` of chunk ``i``, in the strides that the forward had."""
        if i not in self._arrived:
            rows = next(self._under_way.pop(i))
            self._arrived[i] = unpack(rows, self._own, contiguous=self._steps[i].spare)
        return self._arrived[i]

    @torch.no_grad()
    def finish(self, i: int) -> None:
        """Wait for chunk ``i`` if no kernel waited, for example on a rank without queries."""
        if i in self._under_way:
            next(self._under_way.pop(i))


class _RefetchInBackward(torch.autograd.Function):
    """A kernel's results; their backward runs before the kernel's and fetches its chunk (-1: no chunk)."""

    @staticmethod
    def forward(ctx: Any, refetch: Refetch, i: int, *tensors: torch.Tensor) -> Tensors:
        ctx.refetch, ctx.i = refetch, i
        results = tuple(x.detach() for x in tensors)  # not views: selective checkpoints count those
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, results, strict=True) if not x.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _torch.check_first_order()
        ctx.refetch.finish(ctx.i + 1)
        ctx.refetch.start(ctx.i)
        return None, None, *grads
