"""K/V that are not kept for the backward but fetched again.

The kernel saves the pieces it read for its backward. `Again.forgetting` puts saved-tensor hooks around a kernel call,
which keep a note instead of a piece; the backward fetches what the note asks for. Every rank fetches at the same places
of its backward, in the same order, whether its kernel reads the piece or not: an autograd function behind each kernel
call starts the fetch, and that of the piece which comes next, so that it travels beside the attention of this one.
Where a piece is fetched from the one after it (`ring`), that one is waited for before the next can start.

Eager code only: in a compiled graph, selective activation checkpointing decides what is kept.
"""

# B batch, H heads, K keys of a piece, D head dim

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from spanwise.attention.exchange._gradients import check_first_order

# Waits for a piece and gives its keys and values, [B, H, K, D] each, contiguous; or one tensor, if in the forward both
# lay in one storage. Only storages count: what lies where in them is as in the forward.
Fetched = Callable[[], tuple[torch.Tensor, ...]]


class Again:
    """The pieces of one attention call, to be fetched in its backward.

    Args:
        fetches: for each piece, in forward order, what starts its collective.
        chained: whether a piece is fetched from the one after it, which all but the last take as an argument.
        saved: K and V of the ``i``-th piece as the kernel saved them, ``saved(i, *arrived)``, where that is not what
            arrives.
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

    def forgetting(self, i: int, k: torch.Tensor, v: torch.Tensor) -> AbstractContextManager[Any]:
        """Within it, autograd keeps no tensor that lies in ``k`` or ``v``, which are contiguous: the ``i``-th piece.

        Other hooks for saved tensors (offloading, checkpointing) see nothing of what is saved within it.
        """
        storages = [x.untyped_storage().data_ptr() for x in (k, v)]

        def pack(x: torch.Tensor) -> Any:
            if x.numel() == 0 or x.untyped_storage().data_ptr() not in storages:
                return x, x._version
            which = storages.index(x.untyped_storage().data_ptr())
            return which, x.size(), x.stride(), x.storage_offset()

        def unpack(note: Any) -> torch.Tensor:
            if isinstance(note[0], torch.Tensor):
                x, version = note
                if x._version != version:  # autograd's own check does not run under hooks
                    raise RuntimeError(
                        f"a tensor of shape {tuple(x.shape)} that attention needs for its backward was changed in "
                        f"place after the forward (version {x._version}, expected {version})"
                    )
                return x
            which, *geometry = note
            with torch.no_grad():
                piece = self._take(i) if self._saved is None else self._saved(i, *self._take(i))
            return piece[which].as_strided(*geometry)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def remind(self, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kernel's results; their backward, which comes before the kernel's, fetches piece ``i``; -1 is none."""
        return _Remind.apply(self, i, *tensors)

    def start(self, i: int) -> None:
        """Start fetching piece ``i`` and the one that the backward needs next."""
        self._arrived.clear()  # the pieces before have been computed
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
        """Wait for piece ``i`` where no kernel did: a rank without queries, say."""
        if i in self._under_way:
            with torch.no_grad():
                self._under_way.pop(i)()


class _Remind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: Again, i: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.again, ctx.i = again, i
        results = tuple(x.detach() for x in tensors)  # no view: selective checkpoints count those
        ctx.mark_non_differentiable(*(y for x, y in zip(tensors, results, strict=True) if not x.requires_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        check_first_order()
        ctx.again.finish(ctx.i + 1)
        ctx.again.start(ctx.i)
        return None, None, *grads
