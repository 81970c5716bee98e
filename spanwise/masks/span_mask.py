"""SpanMask: an attention mask as a few key intervals for each query row.

The head of the data flow: mask -> balancer -> layout -> plan. The class holds the arrays, `named` the constructors of
named masks; array functions do the work: `spans` (canonical form, set operations, slices), `blocks` (block tables),
and `flex` (FlexAttention, imported when called because it needs torch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from spanwise.masks import blocks, spans
from spanwise.masks.arrays import Int32, Int64
from spanwise.masks.checks import check_length, check_positive, check_row, check_runs, check_spans
from spanwise.masks.named import NamedMasks
from spanwise.masks.span_arrays import common

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SpanMask(NamedMasks):
    """The keys that each query row reads, as intervals ``[start, end)``. Immutable; equal masks compare and hash equal.

    Join masks with ``&`` and ``|``. A mask has no truth value: ``a and b`` and ``not a`` raise.

    Args:
        start, end: integers ``[num_spans, q_len]`` or ``[batch, num_spans, q_len]``. The spans of a row ascend and do
            not overlap. Touching spans are merged; empty ones (``start == end``) may stand anywhere.
        kv_len: number of keys; ``0 <= start <= end <= kv_len``.

    Attributes:
        start, end: read-only C-contiguous int32 ``[batch, num_spans, q_len]`` in canonical form: the spans of a row
            ascend and do not touch; empty slots come last as ``(0, 0)``; ``num_spans`` is the number of spans of the
            fullest row, at least 1.
        cu_seqlens: document offsets, one read-only int64 array ``[num_docs + 1]`` for each batch row or one for all, of
            masks made from documents; None where they are unknown. Plans take them. Not part of equality.

    Raises:
        ValueError: shapes differ, values outside ``[0, kv_len]``, ``start > end``, spans overlapping or out of order.

    >>> from spanwise import SpanMask
    >>> mask = SpanMask.documents([0, 2, 5]) & SpanMask.sliding_window(5, left=1)
    >>> mask == SpanMask(start=[[0, 0, 2, 2, 3]], end=[[1, 2, 3, 4, 5]], kv_len=5)
    True
    >>> (mask | SpanMask.sliding_window(5, left=0, right=1)).area()
    array([[2, 3, 2, 3, 2]])
    """

    __slots__ = ()

    def __init__(self, start: Any, end: Any, kv_len: SupportsIndex) -> None:
        length = check_length(kv_len, "kv_len")
        given = check_spans(start, end, length)
        own = spans.canonicalise(*given)
        # The caller may write to its arrays later, so the mask never shares memory with them.
        first, last = (x.copy() if np.may_share_memory(x, y) else x for x, y in zip(own, given, strict=True))
        self._set(first, last, length)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> SpanMask:
        """The exact mask of a FlexAttention ``BlockMask``. Evaluates its mask_mod inside partial blocks only.

        Takes any lengths and any pair of block sizes. A mask_mod that reads the batch index is evaluated at batch rows
        ``0 … B - 1`` of the BlockMask; with B = 1 the result serves every batch row, as the BlockMask does.

        Raises:
            ValueError: heads differ (in their blocks, or because mask_mod depends on the head), a block is listed
                twice or does not exist, mask_mod cannot be evaluated.

        >>> SpanMask.from_block_mask(SpanMask.causal(300).block_mask()) == SpanMask.causal(300)
        True
        """
        from spanwise.masks import flex

        return cls._trusted(*flex.from_block_mask(block_mask))

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[..., torch.Tensor],
        q_len: SupportsIndex,
        kv_len: SupportsIndex,
        *,
        max_spans: SupportsIndex = 64,
        batch_size: SupportsIndex = 1,
        device: torch.device | str = "cpu",
    ) -> SpanMask:
        """The exact mask of a FlexAttention mask_mod.

        Evaluates all ``batch_size * q_len * kv_len`` cells, a few million at a time. Memory is bounded, time is not: a
        named constructor is faster by orders of magnitude.

        Args:
            mask_mod: function of scalar tensors ``(b, h, q_idx, kv_idx)`` that returns a boolean one.
            max_spans: the most spans that a row may need.
            batch_size: batch rows to evaluate; a mask of batch size 1 serves every row of a batch.
            device: where the tensors that mask_mod reads live.

        Raises:
            ValueError: a row needs more spans, mask_mod depends on the head, or cannot be evaluated under vmap.

        >>> SpanMask.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 8, 8) == SpanMask.causal(8)
        True
        """
        from spanwise.masks import flex

        return cls._trusted(*flex.from_mask_mod(mask_mod, q_len, kv_len, max_spans, batch_size, device))

    @classmethod
    def from_slices(
        cls,
        q_ranges: Any,
        k_ranges: Any,
        types: Any,
        *,
        q_len: SupportsIndex | None = None,
        kv_len: SupportsIndex | None = None,
        max_spans: SupportsIndex = 64,
    ) -> SpanMask:
        """The union of slices: rectangles of queries and keys, whole or cut along diagonals, as in MagiAttention.

        Args:
            q_ranges, k_ranges: integers ``[num_slices, 2]``: the queries and the keys ``[start, stop)`` of each slice.
            types: integers ``[num_slices]``. 0 full; 1 causal: the last query reads all keys, each query before it one
                key less at the end (bottom-right aligned); 2 inverse causal: the first query reads all keys, each query
                after it one key less at the start (top-left aligned); 3 bi-causal: the keys of both 1 and 2.
            q_len, kv_len: default to the largest end of ``q_ranges``, and to ``q_len``.
            max_spans: the most spans that a row may need; slices that touch in a row are one span.

        Raises:
            ValueError: slices overlap, ranges end beyond the lengths, a row needs more spans.

        >>> SpanMask.from_slices([[0, 4], [4, 8]], [[0, 4], [2, 8]], [1, 3]).area()
        array([[1, 2, 3, 4, 3, 3, 3, 3]])
        """
        return cls._trusted(*spans.from_slices(q_ranges, k_ranges, types, q_len, kv_len, max_spans))

    def __and__(self, other: SpanMask) -> SpanMask:
        """Keys that both masks read. Lengths agree; a batch of 1 goes with any. Equal `cu_seqlens` are kept.

        >>> (SpanMask.causal(5) & SpanMask.sliding_window(5, 1, 1)).area()
        array([[1, 2, 2, 2, 2]])
        """
        return self._combine(other, spans.intersect)

    def __or__(self, other: SpanMask) -> SpanMask:
        """Keys that either mask reads. Lengths agree; a batch of 1 goes with any. Equal `cu_seqlens` are kept.

        >>> (SpanMask.causal(5) | SpanMask.sliding_window(5, 1, 1)).area()
        array([[2, 3, 4, 5, 5]])
        """
        return self._combine(other, spans.unite)

    def _combine(self, other: SpanMask, operation: Callable[..., tuple[Int32, Int32]]) -> SpanMask:
        if not isinstance(other, SpanMask):
            return NotImplemented
        mine, theirs = (self.q_len, self.kv_len), (other.q_len, other.kv_len)
        if mine != theirs:
            raise ValueError(f"masks to combine must agree in (q_len, kv_len), got {mine} and {theirs}")
        if self.batch_size != other.batch_size and 1 not in (self.batch_size, other.batch_size):
            raise ValueError(
                f"masks to combine must have equal batch sizes, or one of them 1, got {self.batch_size} and "
                f"{other.batch_size}"
            )
        found = operation((self.start, self.end), (other.start, other.end))
        return SpanMask._trusted(*found, self.kv_len, common([self.cu_seqlens, other.cu_seqlens]))

    def block_counts(self, block_size: SupportsIndex = 128) -> Int64:
        """Number of non-empty key blocks of each query block, int64 ``[batch, num_q_blocks]``; exact.

        Both lengths are cut into blocks of ``block_size`` tokens; the last may be short.

        >>> SpanMask.causal(8).block_counts(block_size=4)
        array([[1, 2]])
        """
        return blocks.block_counts(self, check_positive(block_size, "block_size"))

    def row(self, b: SupportsIndex) -> SpanMask:
        """The mask of batch row ``b``, as an unbatched mask; a mask of batch size 1 serves every row.

        >>> SpanMask.stack([SpanMask.causal(4), SpanMask.full(4)]).row(1) == SpanMask.full(4)
        True
        """
        index = check_row(b, self.batch_size)
        if self.batch_size == 1:
            return self
        row = slice(index, index + 1)
        offsets = self.cu_seqlens if self.cu_seqlens is None or len(self.cu_seqlens) == 1 else self.cu_seqlens[row]
        return SpanMask._trusted(*spans.canonicalise(self.start[row], self.end[row]), self.kv_len, offsets)

    def select(self, q_runs: Any, kv_runs: Any) -> SpanMask:
        """The local problem: the rows of ``q_runs`` and the keys of ``kv_runs``, both renumbered from 0.

        Args:
            q_runs, kv_runs: integers ``[num_runs, 2]``: ascending, disjoint runs of global tokens, the same in each
                batch row.

        Returns:
            SpanMask whose ``dense()`` is this mask's ``dense()[:, rows][:, :, keys]``. Keys outside ``kv_runs`` are
            dropped.

        >>> SpanMask.causal(8).select([[6, 8]], [[0, 2], [6, 8]]).area()
        array([[3, 4]])
        """
        rows, keys = check_runs(q_runs, self.q_len, "q_runs"), check_runs(kv_runs, self.kv_len, "kv_runs")
        slices = [slice(0, 0), *(slice(*run) for run in rows.tolist())]
        start, end = (np.concatenate([x[..., each] for each in slices], axis=-1) for x in (self.start, self.end))
        kv_len = int((keys[:, 1] - keys[:, 0]).sum())
        if kv_len < self.kv_len:
            start, end = spans.positions_in_runs(start, keys), spans.positions_in_runs(end, keys)
        return SpanMask._trusted(*spans.canonicalise(start, end), kv_len)

    def mask_mod(self, device: torch.device | str = "cpu") -> Callable[..., torch.Tensor]:
        """A FlexAttention mask_mod that reads this mask's spans as int32 tensors on ``device``.

        >>> import torch
        >>> zero, one = torch.tensor(0), torch.tensor(1)
        >>> SpanMask.causal(2).mask_mod()(zero, zero, zero, one)
        tensor(False)
        """
        from spanwise.masks import flex

        return flex.span_mask_mod(self, device)

    def block_mask(self, device: torch.device | str = "cpu", block_size: SupportsIndex = 128) -> BlockMask:
        """A FlexAttention ``BlockMask`` with batch ``batch_size`` and one head, without evaluating a cell.

        >>> SpanMask.causal(256).block_mask().kv_num_blocks.tolist()  # the partial blocks: the diagonal
        [[[1, 1]]]
        """
        from spanwise.masks import flex

        return flex.to_block_mask(self, device, check_positive(block_size, "block_size"))
