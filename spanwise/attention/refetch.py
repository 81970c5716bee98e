"""Refetch: fetch K/V again in the backward instead of keeping them (``keep_kv=False``).

A kernel saves the chunks it read for its backward. `Refetch.not_saving` puts saved-tensor hooks around a kernel call;
they save a note in place of a chunk, and the backward fetches the chunk that the note names. All ranks must fetch in
the same order, also where a kernel reads nothing. So an autograd function behind each kernel call starts the fetch. It
also starts the next chunk's fetch, which travels while the attention of this chunk is computed. Rows that came by way
of other ranks are fetched straight from their owners.

Eager code only: in a compiled graph, selective activation checkpointing decides what is kept.
"""

# B batch, H heads, K keys of a chunk, D head dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from spanwise import _torch
from spanwise.attention.executor import check_first_order

Fetched = Callable[[], tuple[torch.Tensor, ...]]  # waits for a chunk; its K and V, [B, H, K, D] each, contiguous


class Refetch:
    """The chunks of one attention call, to be fetched in its backward.

    Args:
        fetches: for each chunk, in forward order, a function that starts its collective.
    """

    def __init__(self, fetches: Sequence[Callable[[], Fetched]]) -> None:
        self._fetches = fetches
        self._under_way: dict[int, Fetched] = {}
        self._arrived: dict[int, tuple[torch.Tensor, ...]] = {}

    def not_saving(self, i: int, k: torch.Tensor, v: torch.Tensor) -> AbstractContextManager[Any]:
        """Context in which autograd saves no tensor that lies in ``k`` or ``v``, the contiguous ``i``-th chunk.

        Other hooks for saved tensors (offloading, checkpointing) do not see tensors saved inside it.
        """
        held = [(_torch.storage_id(x), x.storage_offset(), x.numel()) for x in (k, v)]

        def pack(x: torch.Tensor) -> Any:
            storage, offset = _torch.storage_id(x), x.storage_offset()
            for which, (of, first, count) in enumerate(held):
                if x.numel() and storage == of and first <= offset < first + count:
                    return which, x.size(), x.stride(), offset - first
            return x, x._version

        def unpack(note: Any) -> torch.Tensor:
            if isinstance(note[0], torch.Tensor):
                x, version = note
                if x._version != version:  # autograd's own check does not run under hooks
                    raise RuntimeError(
                        f"a tensor of shape {tuple(x.shape)} that attention needs for its backward was changed in "
                        f"place after the forward (version {x._version}, expected {version})"
                    )
                return x
            which, shape, stride, offset = note
            with torch.no_grad():
                chunk = self._take(i)
            return chunk[which].as_strided(shape, stride, chunk[which].storage_offset() + offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def in_backward(self, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kernel's results; their backward runs before the kernel's and fetches chunk ``i`` (-1: no chunk)."""
        return _RefetchInBackward.apply(self, i, *tensors)

    def start(self, i: int) -> None:
        """Start fetching chunk ``i`` and the one that the backward needs next."""
        self._arrived.clear()  # the backward of earlier ones is done
        with torch.no_grad():
            for j in (i, i - 1):
                if j >= 0 and j not in self._under_way:
                    self._under_way[j] = self._fetches[j]()

    def _take(self, i: int) -> tuple[torch.Tensor, ...]:
        if i not in self._arrived:
            with torch.no_grad():
                self._arrived[i] = self._under_way.pop(i)()
        return self._arrived[i]

    def finish(self, i: int) -> None:
        """Wait for chunk ``i`` if no kernel waited, for example on a rank without queries."""
        if i in self._under_way:
            with torch.no_grad():
                self._under_way.pop(i)()


class _RefetchInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, refetch: Refetch, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.refetch, ctx.i = refetch, i
        results = tuple(x.detach() for x in tensors)  # not views: selective checkpoints count those
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, results, strict=True) if not x.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        ctx.refetch.finish(ctx.i + 1)
        ctx.refetch.start(ctx.i)
        return None, None, *grads
