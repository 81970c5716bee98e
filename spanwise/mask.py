"""SpanMask: an attention mask as a few key intervals for each query row. Everything in spanwise is planned from it.

Stands at the head of the data flow (mask -> balancers -> layout -> plan). Needs numpy alone; what speaks
FlexAttention's language is in ``_flex_masks`` and imported when asked for.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from spanwise import _spans

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SpanMask:
    """Which keys each query row reads, as intervals ``[start, end)``. Immutable.

    Args:
        start, end: integers ``[num_spans, q_len]`` or ``[batch, num_spans, q_len]``. The spans of a row ascend and do
            not overlap; touching ones are merged; empty ones (``start == end``) may stand anywhere.
        kv_len: number of keys; ``0 <= start <= end <= kv_len``.

    The arrays are kept in one canonical form (see ``spanwise._spans``), so that equal masks compare and hash equal:
    read-only, C-contiguous int32 ``[batch, num_spans, q_len]``.

    Raises:
        ValueError: shapes differ, values outside ``[0, kv_len]``, ``start > end``, spans overlapping or out of order.
    """

    __slots__ = ("end", "kv_len", "start")

    start: Int32
    end: Int32
    kv_len: int

    def __init__(self, start: Any, end: Any, kv_len: SupportsIndex) -> None:
        start_array, end_array = _int_array(start, "start"), _int_array(end, "end")
        length = _length(kv_len, "kv_len")
        if start_array.shape != end_array.shape or start_array.ndim not in (2, 3):
            raise ValueError(
                "start and end must both be [num_spans, q_len] or [batch, num_spans, q_len], got "
                f"{list(start_array.shape)} and {list(end_array.shape)}"
            )
        if start_array.ndim == 2:
            start_array, end_array = start_array[None], end_array[None]
        if start_array.shape[0] == 0:
            raise ValueError("a batched mask needs at least one batch row, got shape " f"{list(start_array.shape)}")
        if start_array.shape[1] == 0:
            start_array = end_array = np.zeros((start_array.shape[0], 1, start_array.shape[2]), np.int32)
        if start_array.size and (
            int(start_array.min()) < 0 or int(end_array.max()) > length or bool((start_array > end_array).any())
        ):
            b, j, i = (int(x[0]) for x in np.nonzero((start_array < 0) | (end_array > length) | (start_array > end_array)))
            raise ValueError(
                f"spans must satisfy 0 <= start <= end <= kv_len = {length}, but span {j} of row {i} (batch row {b}) is "
                f"[{start_array[b, j, i]}, {end_array[b, j, i]})"
            )
        canonical_start, canonical_end = _spans.canonicalise(start_array, end_array, allow_overlap=False)
        # The caller keeps its arrays; ours must not change under us.
        if np.shares_memory(canonical_start, start_array):
            canonical_start = canonical_start.copy()
        if np.shares_memory(canonical_end, end_array):
            canonical_end = canonical_end.copy()
        self._set(canonical_start, canonical_end, length)

    def _set(self, start: Int32, end: Int32, kv_len: int) -> None:
        start.setflags(write=False)
        end.setflags(write=False)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "kv_len", kv_len)

    @classmethod
    def _trusted(cls, start: Int32, end: Int32, kv_len: int) -> SpanMask:
        """A mask from arrays ``[batch, num_spans, q_len]`` that are int32, canonical and owned by nobody else."""
        mask = object.__new__(cls)
        mask._set(start, end, kv_len)
        return mask

    # ------------------------------------------------------------ constructors

    @classmethod
    def full(cls, q_len: SupportsIndex, kv_len: SupportsIndex | None = None) -> SpanMask:
        """Every row reads every key. ``kv_len`` defaults to ``q_len``."""
        rows = _length(q_len, "q_len")
        keys = rows if kv_len is None else _length(kv_len, "kv_len")
        return cls._trusted(np.zeros((1, 1, rows), np.int32), np.full((1, 1, rows), keys, np.int32), keys)

    @classmethod
    def causal(cls, seq_len: SupportsIndex) -> SpanMask:
        """Row ``i`` reads the keys ``0 … i``."""
        length = _length(seq_len, "seq_len")
        return cls._single(np.zeros(length, np.int32), np.arange(1, length + 1, dtype=np.int32), length)

    @classmethod
    def sliding_window(cls, seq_len: SupportsIndex, left: SupportsIndex, right: SupportsIndex = 0) -> SpanMask:
        """Row ``i`` reads the keys ``i - left … i + right`` that exist; ``left`` and ``right`` in tokens, >= 0."""
        length = _length(seq_len, "seq_len")
        before, after = _window((left, right), length)
        row = np.arange(length, dtype=np.int32)
        return cls._single(np.maximum(row - before, 0), np.minimum(row + (after + 1), np.int32(length)), length)

    @classmethod
    def documents(
        cls, cu_seqlens: Any, *, causal: bool = True, window: tuple[SupportsIndex, SupportsIndex] | None = None
    ) -> SpanMask:
        """Packed documents: a row reads keys of its own document only.

        Args:
            cu_seqlens: integers ``[num_docs + 1]``, ``0 = cu[0] <= cu[1] <= …``: list, numpy array or torch tensor.
                Document ``d`` holds the tokens ``cu[d] … cu[d + 1] - 1``; documents may be empty.
            causal: read no key after the row itself.
            window: ``(left, right)`` in tokens: read only the keys ``i - left … i + right``. With ``causal`` too, a
                key must satisfy both.
        """
        cu = _offsets(cu_seqlens)
        length = int(cu[-1])
        lengths = np.diff(cu)
        row = np.arange(length, dtype=np.int32) if window is not None else None
        start = np.repeat(cu[:-1].astype(np.int32), lengths)
        if causal:
            end = np.arange(1, length + 1, dtype=np.int32)
        else:
            end = np.repeat(cu[1:].astype(np.int32), lengths)
        if row is not None and window is not None:
            left, right = _window(window, length)
            np.maximum(start, row - left, out=start)
            np.minimum(end, row + (right + 1), out=end)
        return cls._single(start, end, length)

    @classmethod
    def _single(cls, start: Int32, end: Int32, kv_len: int) -> SpanMask:
        return cls._trusted(start[None, None], end[None, None], kv_len)

    # ------------------------------------------------------------ facts

    @property
    def q_len(self) -> int:
        return self.start.shape[2]

    @property
    def batch_size(self) -> int:
        return self.start.shape[0]

    @property
    def num_spans(self) -> int:
        return self.start.shape[1]

    def area(self) -> Int64:
        """Number of keys read by each row, int64 ``[batch, q_len]``; exact."""
        area: Int64 = np.subtract(self.end[:, 0], self.start[:, 0], dtype=np.int64)
        for j in range(1, self.num_spans):
            area += self.end[:, j] - self.start[:, j]
        return area

    def dense(self) -> npt.NDArray[np.bool_]:
        """The mask as bool ``[batch, q_len, kv_len]``, for tests and small problems."""
        key = np.arange(self.kv_len, dtype=np.int32)
        dense = np.zeros((self.batch_size, self.q_len, self.kv_len), np.bool_)
        for j in range(self.num_spans):
            dense |= (self.start[:, j, :, None] <= key) & (key < self.end[:, j, :, None])
        return dense

    def block_counts(self, block_size: SupportsIndex = 128) -> Int64:
        """Number of non-empty key blocks of each query block, int64 ``[batch, num_q_blocks]``; exact."""
        size = _block_size(block_size)
        num_blocks = -(-self.q_len // size)
        counts = np.zeros((self.batch_size, num_blocks), np.int64)
        for b in range(self.batch_size):
            for i in range(num_blocks):
                rows = slice(i * size, (i + 1) * size)
                s, e = self.start[b, :, rows], self.end[b, :, rows]
                touched = _spans.keys_read(s // size, np.where(s < e, -(-e // size), s // size))
                counts[b, i] = int((touched[:, 1] - touched[:, 0]).sum())
        return counts

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
        runs = [_spans.check_runs(r, self.q_len, "q_runs") for r in q_runs]
        return _spans.keys_read_many(self.start[0], self.end[0], runs)

    # ------------------------------------------------------------ parts

    def row(self, b: SupportsIndex) -> SpanMask:
        """The mask of batch row ``b``, unbatched. A mask of batch size 1 serves every row."""
        index = operator.index(b)
        if self.batch_size == 1:
            return self
        if not 0 <= index < self.batch_size:
            raise ValueError(f"batch row {index} of a mask with batch_size {self.batch_size}")
        start, end = _spans.trim(self.start[index : index + 1], self.end[index : index + 1])
        return SpanMask._trusted(start, end, self.kv_len)

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
        start, end = _spans.canonicalise(start, end, allow_overlap=False)
        return SpanMask._trusted(start, end, kv_len)

    def _need_unbatched(self, what: str) -> None:
        if self.batch_size > 1:
            raise ValueError(f"{what} needs an unbatched mask, got batch_size {self.batch_size}; take mask.row(b)")

    # ------------------------------------------------------------ identity

    def digest(self) -> bytes:
        """16 bytes that agree exactly when two masks are equal (up to hash collisions), on any machine."""
        h = hashlib.blake2b(digest_size=16)
        h.update(np.array([*self.start.shape, self.kv_len], "<i8").tobytes())
        h.update(np.ascontiguousarray(self.start, "<i4").data)
        h.update(np.ascontiguousarray(self.end, "<i4").data)
        return h.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanMask):
            return NotImplemented
        return (
            self.kv_len == other.kv_len
            and np.array_equal(self.start, other.start)
            and np.array_equal(self.end, other.end)
        )

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanMask._trusted, (self.start, self.end, self.kv_len)

    def __repr__(self) -> str:
        cells = self.batch_size * self.q_len * self.kv_len
        filled = f"{100 * int(self.area().sum()) / cells:.3g}% filled" if cells else "empty"
        batch = f"batch {self.batch_size}, " if self.batch_size > 1 else ""
        return f"SpanMask({batch}{self.q_len} x {self.kv_len}, num_spans {self.num_spans}, {filled})"


def _int_array(values: Any, name: str) -> npt.NDArray[np.integer]:
    """A list, numpy array or torch tensor as an integer numpy array."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {array.dtype} of shape {list(array.shape)}")
    return array


def _length(value: SupportsIndex, name: str) -> int:
    length = operator.index(value)
    if not 0 <= length <= _spans.INT32_MAX:
        raise ValueError(f"{name} must be between 0 and 2**31 - 1, got {length}")
    return length


def _block_size(value: SupportsIndex) -> int:
    size = operator.index(value)
    if size < 1:
        raise ValueError(f"block_size must be at least 1, got {size}")
    return size


def _window(window: tuple[SupportsIndex, SupportsIndex], length: int) -> tuple[np.int32, np.int32]:
    left, right = (operator.index(side) for side in window)
    if left < 0 or right < 0:
        raise ValueError(
            f"a window's left and right must be at least 0, got ({left}, {right}); for no limit on a side give the "
            f"sequence length, {length}"
        )
    return np.int32(min(left, length)), np.int32(min(right, length))


def _offsets(cu_seqlens: Any) -> Int64:
    cu = _int_array(cu_seqlens, "cu_seqlens").astype(np.int64)
    if cu.ndim != 1 or len(cu) == 0:
        raise ValueError(f"cu_seqlens must be [num_docs + 1] offsets beginning with 0, got shape {list(cu.shape)}")
    if cu[0] != 0:
        raise ValueError(f"cu_seqlens must begin with 0, got {cu[0]} at position 0")
    steps = np.diff(cu)
    if bool((steps < 0).any()):
        at = int(np.argmax(steps < 0)) + 1
        raise ValueError(f"cu_seqlens must not decrease, got {cu[at]} after {cu[at - 1]} at position {at}")
    _length(int(cu[-1]), "the last entry of cu_seqlens")
    return cu
