"""K/V that are not kept for the backward: fetched again.

A kernel saves the chunks it read for its backward. `Refetch.not_saving` puts saved-tensor hooks around a kernel call;
they keep a note in place of a chunk, and the backward fetches the chunk that the note names. Every rank fetches at the
same places of its backward, in the same order, whether its kernel reads the chunk or not: an autograd function behind
each kernel call starts the fetch. It also starts that of the chunk which comes next, so that it travels while the
attention of this one is computed. A chained fetch (`ring`) takes a chunk from the one after it, which it awaits first.

Eager code only: in a compiled graph, selective activation checkpointing decides what is kept.
"""

# B batch, H heads, K keys of a chunk, D head dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from spanwise.attention.exchange._gradients import check_first_order

# Waits for a chunk and gives its keys and values, [B, H, K, D] each, contiguous; or what `saved` makes them of.
Fetched = Callable[[], tuple[torch.Tensor, ...]]


class Refetch:
    """The chunks of one attention call, to be fetched in its backward.

    Args:
        fetches: for each chunk, in forward order, a function that starts its collective.
        chained: whether a chunk is fetched from the one after it, which all but the last take as an argument.
        saved: K and V of the ``i``-th chunk as the kernel saved them, ``saved(i, *arrived)``; default: as they arrive.
    """

    def __init__(
        self,
        fetches: Sequence[Callable[..., Fetched]],
        *,
        chained: bool = False,
        saved: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    ) -> None:
        self._fetches = fetches
        self._chained = chained
        self._saved = saved
        self._under_way: dict[int, Fetched] = {}
        self._arrived: dict[int, tuple[torch.Tensor, ...]] = {}

    def not_saving(self, i: int, k: torch.Tensor, v: torch.Tensor) -> AbstractContextManager[Any]:
        """Within it, autograd keeps no tensor that lies in ``k`` or ``v``, which are contiguous: the ``i``-th chunk.

        Other hooks for saved tensors (offloading, checkpointing) do not see tensors that are saved within it.
        """
        held = [(x.untyped_storage().data_ptr(), x.storage_offset(), x.numel()) for x in (k, v)]

        def pack(x: torch.Tensor) -> Any:
            storage, offset = x.untyped_storage().data_ptr(), x.storage_offset()
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
                chunk = self._take(i) if self._saved is None else self._saved(i, *self._take(i))
            # Chunks that arrived together may lie in one storage; a chunk that is fetched alone begins elsewhere.
            return chunk[which].as_strided(shape, stride, chunk[which].storage_offset() + offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def in_backward(self, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kernel's results; their backward, which runs before the kernel's, fetches chunk ``i``; -1 is no chunk."""
        return _RefetchInBackward.apply(self, i, *tensors)

    def start(self, i: int) -> None:
        """Start fetching chunk ``i`` and the one that the backward needs next."""
        self._arrived.clear()  # earlier ones have been computed
        with torch.no_grad():
            for j in (i, i - 1):
                if j >= 0 and j not in self._under_way:
                    later = (self._take(j + 1),) if self._chained and j + 1 < len(self._fetches) else ()
                    self._under_way[j] = self._fetches[j](*later)

    def _take(self, i: int) -> tuple[torch.Tensor, ...]:
        if i not in self._arrived:
            with torch.no_grad():
                self._arrived[i] = self._under_way.pop(i)()
        return self._arrived[i]

    def finish(self, i: int) -> None:
        """Wait for chunk ``i`` where no kernel did, for example on a rank without queries."""
        if i in self._under_way:
            with torch.no_grad():
                self._under_way.pop(i)()


class _RefetchInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, refetch: Refetch, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.refetch, ctx.i = refetch, i
        results = tuple(x.detach() for x in tensors)  # no view: selective checkpoints count those
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, results, strict=True) if not x.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        ctx.refetch.finish(ctx.i + 1)
        ctx.refetch.start(ctx.i)
        return None, None, *grads
