"""SpanMask: an attention mask as a few key intervals for each query row. Everything in spanwise is planned from it.

Stands at the head of the data flow (mask -> balancers -> layout -> plan). Needs numpy alone; what speaks
FlexAttention's language is in ``_flex_masks`` and imported when asked for. The work is done by array functions:
``_span_patterns`` (named masks), ``_spans`` (canonical form, set operations, unions), ``_span_blocks`` (block tables).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from spanwise.masks import blocks as _span_blocks
from spanwise.masks import patterns as _span_patterns
from spanwise.masks import spans as _spans
from spanwise.masks.patterns import check_length, check_offsets, check_positive, check_window, int_array

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SpanMask:
    """Which keys each query row reads, as intervals ``[start, end)``. Immutable; equal masks compare and hash equal.

    Args:
        start, end: integers ``[num_spans, q_len]`` or ``[batch, num_spans, q_len]``. The spans of a row ascend and do
            not overlap; touching ones are merged; empty ones (``start == end``) may stand anywhere.
        kv_len: number of keys; ``0 <= start <= end <= kv_len``.

    Attributes:
        start, end: read-only C-contiguous int32 ``[batch, num_spans, q_len]`` in canonical form: the spans of a row
            ascend and do not touch, empty slots come last as ``(0, 0)``, ``num_spans`` is what the fullest row needs
            (at least 1).

    Raises:
        ValueError: shapes differ, values outside ``[0, kv_len]``, ``start > end``, spans overlapping or out of order.
    """

    __slots__ = ("end", "kv_len", "start")

    start: Int32
    end: Int32
    kv_len: int

    def __init__(self, start: Any, end: Any, kv_len: SupportsIndex) -> None:
        length = check_length(kv_len, "kv_len")
        given_start, given_end = int_array(start, "start"), int_array(end, "end")
        if given_start.shape != given_end.shape or given_start.ndim not in (2, 3):
            raise ValueError(
                "start and end must both be [num_spans, q_len] or [batch, num_spans, q_len], got "
                f"{list(given_start.shape)} and {list(given_end.shape)}"
            )
        if given_start.ndim == 2:
            given_start, given_end = given_start[None], given_end[None]
        if given_start.shape[0] == 0:
            raise ValueError(f"a mask needs at least one batch row, got shape {list(given_start.shape)}")
        if given_start.shape[1] == 0:  # no slot at all: rows that read nothing
            given_start = given_end = np.zeros((given_start.shape[0], 1, given_start.shape[2]), np.int32)
        if given_start.size and (
            int(given_start.min()) < 0 or int(given_end.max()) > length or bool((given_start > given_end).any())
        ):
            wrong = (given_start < 0) | (given_end > length) | (given_start > given_end)
            b, j, i = (int(index[0]) for index in np.nonzero(wrong))
            raise ValueError(
                f"spans must satisfy 0 <= start <= end <= kv_len = {length}, but span {j} of row {i} (batch row {b}) "
                f"is [{given_start[b, j, i]}, {given_end[b, j, i]})"
            )
        own_start, own_end = _spans.canonicalise(given_start, given_end)
        # The caller may still write to its arrays; ours must not change under us.
        own_start = own_start.copy() if np.may_share_memory(own_start, given_start) else own_start
        own_end = own_end.copy() if np.may_share_memory(own_end, given_end) else own_end
        self._set(own_start, own_end, length)

    def _set(self, start: Int32, end: Int32, kv_len: int) -> None:
        start.setflags(write=False)
        end.setflags(write=False)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "kv_len", kv_len)

    @classmethod
    def _trusted(cls, start: Int32, end: Int32, kv_len: int) -> SpanMask:
        """A mask from int32 arrays ``[batch, num_spans, q_len]`` that are canonical and that nobody writes to again."""
        mask = object.__new__(cls)
        mask._set(start, end, kv_len)
        return mask

    @classmethod
    def _pattern(cls, spans: tuple[Int32, Int32], kv_len: int) -> SpanMask:
        return cls._trusted(spans[0][None], spans[1][None], kv_len)

    # ------------------------------------------------------------ constructors

    @classmethod
    def full(cls, q_len: SupportsIndex, kv_len: SupportsIndex | None = None) -> SpanMask:
        """Every row reads every key. ``kv_len`` defaults to ``q_len``."""
        rows = check_length(q_len, "q_len")
        keys = rows if kv_len is None else check_length(kv_len, "kv_len")
        return cls._pattern(_span_patterns.full(rows, keys), keys)

    @classmethod
    def causal(cls, seq_len: SupportsIndex) -> SpanMask:
        """Row ``i`` reads the keys ``0 … i``."""
        length = check_length(seq_len, "seq_len")
        return cls._pattern(_span_patterns.documents(np.array([0, length]), True, None), length)

    @classmethod
    def sliding_window(cls, seq_len: SupportsIndex, left: SupportsIndex, right: SupportsIndex = 0) -> SpanMask:
        """Row ``i`` reads the keys ``i - left … i + right`` that exist; both in tokens, -1 is no limit on that side."""
        length = check_length(seq_len, "seq_len")
        return cls._pattern(_span_patterns.sliding_window(length, *check_window((left, right), length)), length)

    @classmethod
    def documents(
        cls, cu_seqlens: Any, *, causal: bool = True, window: tuple[SupportsIndex, SupportsIndex] | None = None
    ) -> SpanMask:
        """Packed documents: a row reads keys of its own document only.

        Args:
            cu_seqlens: integers ``[num_docs + 1]``, ``0 = cu[0] <= cu[1] <= …``: list, numpy array or torch tensor.
                Document ``d`` holds the tokens ``cu[d] … cu[d + 1] - 1``; documents may be empty.
            causal: read no key after the row itself.
            window: ``(left, right)`` in tokens, -1 for no limit: read only the keys ``i - left … i + right``. Where
                ``causal`` is set too, a key must satisfy both, so ``right`` changes nothing. ``(-1, 0)`` without
                ``causal`` is refused: it is causal to FlashAttention, no limit to TransformerEngine.
        """
        cu = check_offsets(cu_seqlens)
        length = int(cu[-1])
        near = None if window is None else check_window(window, length, causal=causal)
        return cls._pattern(_span_patterns.documents(cu, causal, near), length)

    @classmethod
    def prefix_lm(cls, cu_seqlens: Any, prefix_lens: Any) -> SpanMask:
        """Packed documents, causal but for a prefix: every row of a document also reads all of the document's prefix.

        Args:
            cu_seqlens: as in :meth:`documents`.
            prefix_lens: integers ``[num_docs]``, tokens; each between 0 and its document's length.
        """
        cu, prefixes = check_offsets(cu_seqlens), _span_patterns.check_lengths(prefix_lens, "prefix_lens")
        if len(prefixes) != len(cu) - 1:
            raise ValueError(f"prefix_lens needs an entry for each of {len(cu) - 1} documents, got {len(prefixes)}")
        long = prefixes > np.diff(cu)
        if bool(long.any()):
            at = int(np.argmax(long))
            raise ValueError(f"prefix_lens[{at}] = {prefixes[at]}, but document {at} has {cu[at + 1] - cu[at]} tokens")
        return cls._pattern(_span_patterns.prefix_lm(cu, prefixes), int(cu[-1]))

    @classmethod
    def shared_prefix(cls, prefix_len: SupportsIndex, suffix_lens: Any) -> SpanMask:
        """One causal prompt, then several causal answers that each read the prompt and themselves.

        Args:
            prefix_len: tokens of the prompt.
            suffix_lens: integers ``[num_answers]``, tokens of each answer; they follow the prompt in this order.
        """
        prefix = check_length(prefix_len, "prefix_len")
        suffixes = _span_patterns.check_lengths(suffix_lens, "suffix_lens")
        length = check_length(prefix + int(suffixes.sum()), "prefix_len + sum(suffix_lens)")
        return cls._pattern(_span_patterns.shared_prefix(prefix, suffixes), length)

    @classmethod
    def block_causal(
        cls,
        seq_len: SupportsIndex,
        block_len: SupportsIndex,
        num_previous: SupportsIndex | None = None,
        global_tokens: SupportsIndex = 0,
    ) -> SpanMask:
        """Blocks of tokens (the frames of a video): a row reads its own whole block and earlier whole blocks.

        Args:
            block_len: tokens of a block; the last one may be short.
            num_previous: how many earlier blocks a row reads; None: all of them.
            global_tokens: the first so many tokens are read by every row. Reading is one-way: their own rows follow
                the rule of their block like all others (and so never read the future through a later block).
        """
        length = check_length(seq_len, "seq_len")
        previous, shared = (operator.index(x) if x is not None else None for x in (num_previous, global_tokens))
        if previous is not None and previous < 0:
            raise ValueError(f"num_previous must be at least 0, or None for all earlier blocks, got {previous}")
        if shared is None or not 0 <= shared <= length:
            raise ValueError(f"global_tokens must be between 0 and seq_len = {length}, got {shared}")
        spans = _span_patterns.block_causal(length, check_positive(block_len, "block_len"), previous, shared)
        return cls._pattern(spans, length)

    @classmethod
    def stack(cls, masks: Sequence[SpanMask]) -> SpanMask:
        """A batched mask from masks of equal ``q_len`` and ``kv_len``; the batch rows of each, one after the other."""
        if not masks:
            raise ValueError("stack needs at least one mask, got none")
        shapes = {(m.q_len, m.kv_len) for m in masks}
        if len(shapes) > 1:
            raise ValueError(f"masks to stack must agree in (q_len, kv_len), got {sorted(shapes)}")
        q_len, kv_len = shapes.pop()
        arrays = np.zeros((2, sum(m.batch_size for m in masks), max(m.num_spans for m in masks), q_len), np.int32)
        b = 0
        for m in masks:
            arrays[0, b : b + m.batch_size, : m.num_spans] = m.start
            arrays[1, b : b + m.batch_size, : m.num_spans] = m.end
            b += m.batch_size
        return cls._trusted(arrays[0], arrays[1], kv_len)

    @classmethod
    def from_block_mask(cls, block_mask: BlockMask) -> SpanMask:
        """The mask of a FlexAttention ``BlockMask``, exactly: full blocks whole, mask_mod inside partial blocks only.

        Any lengths, any pair of block sizes. A mask_mod that reads the batch index is taken at batch rows
        ``0 … B - 1`` of the BlockMask; with B = 1 the result, like the BlockMask, serves every batch row.

        Raises:
            ValueError: heads differ (in their blocks, or because mask_mod depends on the head), a block is listed
                twice or does not exist, mask_mod cannot be evaluated.
        """
        from spanwise.masks import flex as _flex_masks

        return _flex_masks.from_block_mask(block_mask)

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
        """The mask of a FlexAttention mask_mod, exactly.

        Evaluates all ``batch_size * q_len * kv_len`` cells, some millions at a time (memory is bounded, time is not: a
        named constructor is faster by orders of magnitude).

        Args:
            mask_mod: function of scalar tensors ``(b, h, q_idx, kv_idx)`` that returns a boolean one.
            max_spans: the most spans that a row may need.
            batch_size: batch rows to evaluate; a mask of batch size 1 serves every row of a batch.
            device: where the tensors that mask_mod reads live.

        Raises:
            ValueError: a row needs more spans, mask_mod depends on the head, or cannot be evaluated under vmap.
        """
        from spanwise.masks import flex as _flex_masks

        shape = check_length(q_len, "q_len"), check_length(kv_len, "kv_len")
        most, batch = check_positive(max_spans, "max_spans"), check_positive(batch_size, "batch_size")
        return _flex_masks.from_mask_mod(mask_mod, *shape, most, batch, device)

    # ------------------------------------------------------------ set operations

    def __and__(self, other: SpanMask) -> SpanMask:
        """Keys that both masks read. Lengths agree; a batch of 1 goes with any."""
        return self._combine(other, _spans.intersect)

    def __or__(self, other: SpanMask) -> SpanMask:
        """Keys that either mask reads. Lengths agree; a batch of 1 goes with any."""
        return self._combine(other, _spans.unite)

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
        return SpanMask._trusted(*operation((self.start, self.end), (other.start, other.end)), self.kv_len)

    # ------------------------------------------------------------ facts

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return self.start.shape[2]

    @property
    def batch_size(self) -> int:
        """Number of batch rows; a mask of batch size 1 serves every row of a batch."""
        return self.start.shape[0]

    @property
    def num_spans(self) -> int:
        """Spans of the row that has most, at least 1."""
        return self.start.shape[1]

    def area(self) -> Int64:
        """Number of keys read by each row, int64 ``[batch, q_len]``; exact."""
        area = self.end[:, 0] - self.start[:, 0]
        for j in range(1, self.num_spans):
            area += self.end[:, j] - self.start[:, j]
        return area.astype(np.int64)

    def dense(self) -> npt.NDArray[np.bool_]:
        """The mask as bool ``[batch, q_len, kv_len]``, for tests and small problems."""
        key = np.arange(self.kv_len, dtype=np.int32)
        dense = np.zeros((self.batch_size, self.q_len, self.kv_len), np.bool_)
        for j in range(self.num_spans):
            dense |= (self.start[:, j, :, None] <= key) & (key < self.end[:, j, :, None])
        return dense

    def block_counts(self, block_size: SupportsIndex = 128) -> Int64:
        """Number of non-empty key blocks of each query block, int64 ``[batch, num_q_blocks]``; exact.

        Both lengths are cut into blocks of ``block_size`` tokens; the last may be short.
        """
        size = check_positive(block_size, "block_size")
        return _span_blocks.block_counts(self.start, self.end, self.kv_len, size)

    def block_table(self, block_size: SupportsIndex = 128) -> npt.NDArray[np.int8]:
        """0 empty, 1 partial, 2 full for each pair of blocks, int8 ``[batch, num_q_blocks, num_kv_blocks]``; exact.

        Of a short last block only the cells that exist count: it is full if they are all read.
        """
        size = check_positive(block_size, "block_size")
        return _span_blocks.block_table(self.start, self.end, self.kv_len, size)

    def keys_read(self, q_runs: Any) -> Int64:
        """Keys that the given rows read: the union of their spans, as ascending disjoint runs, int64 ``[n, 2]``.

        Args:
            q_runs: integers ``[num_runs, 2]``, ascending disjoint runs of rows.

        Raises:
            ValueError: the mask is batched (take ``mask.row(b)``), or the runs are not ascending runs of its rows.
        """
        self._need_unbatched("keys_read")
        runs = _spans.check_runs(q_runs, self.q_len, "q_runs")
        return _spans.keys_read(_spans.take_runs(self.start[0], runs), _spans.take_runs(self.end[0], runs))

    def keys_read_many(self, q_runs: Sequence[Any]) -> list[Int64]:
        """``[self.keys_read(runs) for runs in q_runs]``, in one vectorised pass over the mask."""
        self._need_unbatched("keys_read_many")
        runs = [_spans.check_runs(r, self.q_len, f"q_runs[{k}]") for k, r in enumerate(q_runs)]
        return _spans.keys_read_many(self.start[0], self.end[0], runs)

    # ------------------------------------------------------------ parts

    def row(self, b: SupportsIndex) -> SpanMask:
        """The mask of batch row ``b``, ``0 <= b < batch_size``, as an unbatched mask."""
        index = operator.index(b)
        if not 0 <= index < self.batch_size:
            raise ValueError(f"batch row must be between 0 and {self.batch_size - 1}, got {index}")
        if self.batch_size == 1:
            return self
        return SpanMask._trusted(*_spans.trim(self.start[index : index + 1], self.end[index : index + 1]), self.kv_len)

    def select(self, q_runs: Any, kv_runs: Any) -> SpanMask:
        """The local problem: only the rows of ``q_runs`` and the keys of ``kv_runs``, both renumbered from 0.

        Args:
            q_runs, kv_runs: integers ``[num_runs, 2]``: ascending, disjoint runs of global tokens, the same in each
                batch row.

        Returns:
            SpanMask whose ``dense()`` is this mask's ``dense()[:, rows][:, :, keys]``. Keys that a row reads and that
            are not in ``kv_runs`` are left out.
        """
        rows = _spans.check_runs(q_runs, self.q_len, "q_runs")
        keys = _spans.check_runs(kv_runs, self.kv_len, "kv_runs")
        start, end = _spans.take_runs(self.start, rows), _spans.take_runs(self.end, rows)
        kv_len = int(_spans.run_lengths(keys).sum())
        if kv_len < self.kv_len:
            start, end = _spans.positions_in_runs(start, keys), _spans.positions_in_runs(end, keys)
        return SpanMask._trusted(*_spans.canonicalise(start, end), kv_len)

    def _need_unbatched(self, what: str) -> None:
        if self.batch_size > 1:
            raise ValueError(f"{what} needs an unbatched mask, got batch_size {self.batch_size}; take mask.row(b)")

    # ------------------------------------------------------------ FlexAttention

    def mask_mod(self, device: torch.device | str = "cpu") -> Callable[..., torch.Tensor]:
        """A FlexAttention mask_mod that reads this mask's spans as int32 tensors on ``device``."""
        from spanwise.masks import flex as _flex_masks

        return _flex_masks.span_mask_mod(*_flex_masks.span_tensors(self, device))

    def block_mask(self, device: torch.device | str = "cpu", block_size: SupportsIndex = 128) -> BlockMask:
        """A FlexAttention ``BlockMask`` with batch ``batch_size`` and one head, straight from the spans."""
        from spanwise.masks import flex as _flex_masks

        return _flex_masks.to_block_mask(self, device, check_positive(block_size, "block_size"))

    # ------------------------------------------------------------ identity

    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal masks (up to hash collisions), on any machine."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([*self.start.shape, self.kv_len], "<i8").tobytes())
        for array in (self.start, self.end):
            digest.update(np.ascontiguousarray(array, "<i4").data)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanMask):
            return NotImplemented
        same = self.kv_len == other.kv_len and np.array_equal(self.start, other.start)
        return same and np.array_equal(self.end, other.end)

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanMask._trusted, (self.start, self.end, self.kv_len)

    def __repr__(self) -> str:
        cells = self.batch_size * self.q_len * self.kv_len
        filled = f"{100 * int(self.area().sum()) / cells:.3g}% filled" if cells else "no cells"
        batch = f"batch {self.batch_size}, " if self.batch_size > 1 else ""
        spans = "1 span" if self.num_spans == 1 else f"{self.num_spans} spans"
        return f"SpanMask({batch}{self.q_len} queries x {self.kv_len} keys, up to {spans} a row, {filled})"
