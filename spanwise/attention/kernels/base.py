"""The class of all local attention kernels, and what a call gives them: a chunk of keys, and options.

    table.resolve ─► Kernel ─► tables, capacity, … (rank plan) ─► check ─► attend_part ─► merge

A kernel knows nothing of ranks. It takes q, k, v and a `Chunk`, which holds the mask, and returns the output and its
logsumexp. "Add a kernel" in docs/ shows a complete one.
"""

# Letters of shapes in this folder: B batch, H query heads, K key/value heads, G = H / K, Q query rows, T keys, N spans
# of a row, D query/key head dim, V value head dim

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.executor import RankStep
from spanwise.attention.kernels._tiles import max_logit
from spanwise.attention.kernels.merge import Part, part_of
from spanwise.masks.span_mask import SpanMask

ScoreMod = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some of the keys that a rank reads, and the mask of its queries over them. A pytree.

    Attributes:
        start, end: int32 ``[B or 1, N, Q]``: first key of each span and one past its last, indices into the chunk;
            ``end <= start`` is an empty span.
        kv_pos: int32 ``[B or 1, T]``, global position of each key.
        tables: the result of `Kernel.tables` for this chunk.
        step: brings the keys; None for the rank's own.
        rows: batch rows with different masks or layouts; 1 serves any batch.
        flat: whether these rows are concatenated along one dim, queries and keys alike.
    """

    start: Tensor
    end: Tensor
    kv_pos: Tensor
    tables: Any = None
    step: RankStep | None = None
    rows: int = 1
    flat: bool = False


_torch.register_pytree_dataclass(Chunk, static=("rows", "flat"))


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of an attention call that change the scores.

    A score is ``scale * q @ kᵀ``, then goes through `score_mod` or `softcap`, then is masked. Sinks are no option of a
    kernel: they join after the chunks are merged.

    Attributes:
        scale: factor on ``q @ kᵀ``; None is ``1 / sqrt(D)``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as in FlexAttention, with global positions.
        softcap: scores become ``softcap * tanh(score / softcap)``.
    """

    scale: float | None = None
    score_mod: ScoreMod | None = None
    softcap: float | None = None

    def scale_for(self, x: Tensor) -> float:
        """`scale`, or its default for queries or keys ``[..., D]``.

        >>> AttentionOptions().scale_for(torch.zeros(1, 4, 10, 64))
        0.125
        """
        return 1.0 / math.sqrt(x.shape[-1]) if self.scale is None else self.scale


class Kernel:
    """A local attention kernel. Override `attend`; every other member has a default that suits a plain kernel.

    `tables`, `capacity`, `num_spans`, `dynamic_queries` and `needs_tokens` shape the rank plan. Equal kernels share
    one rank plan, and so do all kernels that override none of the five.

    Attributes:
        name: the kernel's name in errors and reports.
        dynamic_queries: whether torch.compile may treat the number of queries as dynamic.
        needs_tokens: whether the kernel refuses a rank without tokens.
        table_type: class of the tables that `attend` needs in a chunk, or None.

    >>> Kernel().plain, Kernel().capacity(100), Kernel().num_spans(1)
    (True, 100, 2)
    """

    name: str = "custom"
    dynamic_queries: bool = True
    needs_tokens: bool = False
    table_type: type | None = None

    # --- when a rank plan is built ----------------------------------------------------------------------------------

    def tables(self, mask: SpanMask, device: torch.device) -> Any:
        """Tables that the kernel needs besides the spans of ``mask``: a pytree of tensors on ``device``, or None.

        Args:
            mask: mask of one chunk over all its keys, spare ones included.
        """
        return None

    def capacity(self, num_keys: int) -> int:
        """Keys of a chunk from another rank: ``num_keys``, or more. No span reads the spare ones."""
        return num_keys

    def num_spans(self, num_spans: int) -> int:
        """Spans per row that each chunk gets, for a mask with ``num_spans``; the others are empty.

        All chunks get the same number, and never 1, which torch.compile would treat as a constant.
        """
        return max(2, num_spans)

    @property
    def pads_keys(self) -> bool:
        """Whether chunks from other ranks may have spare keys: `capacity` is overridden."""
        return type(self).capacity is not Kernel.capacity

    @property
    def plain(self) -> bool:
        """Whether a rank plan that was made for no kernel serves this one."""
        members = ("tables", "capacity", "num_spans", "dynamic_queries", "needs_tokens")
        return all(getattr(type(self), name) is getattr(Kernel, name) for name in members)

    # --- before an exchange starts ----------------------------------------------------------------------------------

    def check_device(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        """Raise ``ValueError`` unless the kernel runs on ``device``, with ``score_mod`` where one is given."""

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, options: AttentionOptions, *, max_logit: bool = False
    ) -> None:
        """Raise ``ValueError`` where `attend`, or `max_logit` if asked for, would raise. Nothing has been sent yet.

        Args:
            q, k, v: as the call got them: not flattened, and before ranks trade heads.
            chunk: the chunk of the rank's own keys.
        """
        default = type(self).max_logit is Kernel.max_logit
        if max_logit and default and (q.device.type != "cpu" or options.score_mod is not None):
            raise ValueError(
                f"AuxRequest(max_logit=True) needs kernel='flex' on CUDA, or the CPU without a score_mod; got "
                f"kernel={self.name!r} on {q.device} and score_mod={options.score_mod}"
            )
        if self.table_type is not None and not isinstance(chunk.tables, self.table_type):
            raise ValueError(
                f"kernel {self.name!r} needs {self.table_type.__name__} in the rank plan: build it with "
                f"plan.local(mesh, device, kernel={self.name!r})"
            )

    # --- attention --------------------------------------------------------------------------------------------------

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        """Attention of the queries over the keys of one chunk.

        Args:
            q: ``[B, H, Q, D]``; k ``[B, K, T, D]``, ``H % K == 0``; v ``[B, K, T, V]``. Any strides.
            q_pos: int ``[B or 1, Q]``, global positions of the queries.

        Returns:
            out ``[B, H, Q, V]`` in the dtype of q, and the natural-log lse ``[B, H, Q]`` in float32 (float64 for
            float64). Both are differentiable. A row without a key has out 0, lse −inf and no gradient.
        """
        raise NotImplementedError(f"kernel {self.name!r} has no attend")

    def queries(self, q: Tensor) -> Any:
        """``q`` ``[B, H, Q, D]`` in the form that `attend_part` takes, made once for all chunks."""
        return q

    def attend_part(
        self, queries: Any, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """`attend` over one chunk, as a part for `merge.Merging`: see `merge`.

        Args:
            queries: the result of `queries`.
        """
        return part_of(*self.attend(queries, k, v, chunk, q_pos, options))

    def max_logit(self, q: Tensor, k: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions) -> Tensor:
        """Largest visible score of each query head, ``[H]``, −inf where nothing is visible. Not differentiable."""
        return max_logit(q, k, chunk.start, chunk.end, scale=options.scale_for(q), softcap=options.softcap)
