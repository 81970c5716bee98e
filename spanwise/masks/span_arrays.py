"""The value under a mask: canonical span arrays that never change, with sizes, identity and text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from spanwise.masks.arrays import Bool, Int32, Int64, IntArray
from spanwise.masks.even_runs import EvenRuns, even_runs_of, span_arrays

_Mask = TypeVar("_Mask", bound="SpanArrays")


@dataclass(frozen=True, init=False, eq=False, repr=False)
class SpanArrays:
    """Canonical spans ``start, end`` of int32 ``[batch, num_spans, q_len]`` and the number of keys; see `SpanMask`."""

    __slots__ = ("_even_runs", "cu_seqlens", "end", "kv_len", "start")

    start: Int32
    end: Int32
    kv_len: int
    cu_seqlens: tuple[Int64, ...] | None
    _even_runs: dict[int, tuple[EvenRuns, ...]]  # by batch row, found when first asked for

    @classmethod
    def _trusted(
        cls: type[_Mask],
        start: Int32,
        end: Int32,
        kv_len: int | None = None,
        cu_seqlens: tuple[Int64, ...] | None = None,
    ) -> _Mask:
        """A mask from canonical arrays that nobody writes to afterwards; ``kv_len`` defaults to ``q_len``."""
        mask = object.__new__(cls)
        mask._set(start, end, start.shape[2] if kv_len is None else kv_len, cu_seqlens)
        return mask

    def _set(self, start: Int32, end: Int32, kv_len: int, cu_seqlens: tuple[Int64, ...] | None = None) -> None:
        arrays: list[IntArray] = [start, end, *(cu_seqlens or ())]
        for array in arrays:
            array.setflags(write=False)
        values = {"start": start, "end": end, "kv_len": kv_len, "cu_seqlens": cu_seqlens, "_even_runs": {}}
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
        """Spans of the fullest row, at least 1."""
        return self.start.shape[1]

    def area(self) -> Int64:
        """Number of keys that each row reads, int64 ``[batch, q_len]``; exact.

        >>> from spanwise import SpanMask
        >>> SpanMask.documents([0, 1, 3], causal=False).area()
        array([[1, 2, 2]])
        """
        area = self.end[:, 0] - self.start[:, 0]
        for j in range(1, self.num_spans):
            area += self.end[:, j] - self.start[:, j]
        return area.astype(np.int64)

    def even_runs(self, row: int = 0) -> tuple[EvenRuns, ...]:
        """EvenRuns of each slot of a batch row; see `masks.even_runs`. Kept with the mask; one row serves all.

        >>> from spanwise import SpanMask
        >>> SpanMask.documents([0, 300, 900]).even_runs()[0].first
        array([  0, 300])
        """
        row = row if len(self.start) > 1 else 0
        if row not in self._even_runs:
            slots = zip(self.start[row], self.end[row], strict=True)
            self._even_runs[row] = tuple(even_runs_of(start, end) for start, end in slots)
        return self._even_runs[row]

    @property
    def is_causal(self) -> bool:
        """Whether this is the plain causal mask, of one batch row and as many keys as queries.

        >>> from spanwise import SpanMask
        >>> SpanMask.causal(5).is_causal, SpanMask.documents([0, 2, 5]).is_causal
        (True, False)
        """
        if self.batch_size > 1 or self.num_spans > 1 or self.q_len != self.kv_len:
            return False
        plain = [0, self.q_len, 0, 1, 0, int(self.q_len > 1)] if self.q_len else []
        return np.ravel(self.even_runs()[0]).tolist() == plain

    def dense(self) -> Bool:
        """The mask as bool ``[batch, q_len, kv_len]``, for tests and small problems.

        >>> from spanwise import SpanMask
        >>> SpanMask.causal(2).dense()
        array([[[ True, False],
                [ True,  True]]])
        """
        key = np.arange(self.kv_len, dtype=np.int32)
        dense = np.zeros((self.batch_size, self.q_len, self.kv_len), np.bool_)
        for j in range(self.num_spans):
            dense |= (self.start[:, j, :, None] <= key) & (key < self.end[:, j, :, None])
        return dense

    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal masks (up to hash collisions), on any machine.

        >>> from spanwise import SpanMask
        >>> SpanMask.causal(4).digest() == SpanMask.sliding_window(4, left=-1).digest()
        True
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([*self.start.shape, self.kv_len], "<i8").tobytes())
        for array in (self.start, self.end):
            digest.update(np.ascontiguousarray(array, "<i4").data)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanArrays):
            return NotImplemented
        same = self.kv_len == other.kv_len and np.array_equal(self.start, other.start)
        return same and np.array_equal(self.end, other.end)

    def __hash__(self) -> int:
        return hash(self.digest())

    def __bool__(self) -> NoReturn:
        """Raises ``ValueError``: ``and``, ``or`` and ``not`` would silently drop a mask."""
        raise ValueError("a SpanMask has no truth value: join masks with `a & b` or `a | b`, or test `mask is None`")

    def __reduce__(self) -> tuple[Any, ...]:
        # 1M tokens of documents are about 20 kB of even runs, 8 MB of spans.
        slots = [np.array(of, np.int32) for row in range(self.batch_size) for of in self.even_runs(row)]
        return type(self)._unpickled, (slots, self.start.shape, self.kv_len, self.cu_seqlens)

    @classmethod
    def _unpickled(cls: type[_Mask], slots: list[Int32], shape: Any, kv_len: int, cu_seqlens: Any) -> _Mask:
        start, end = span_arrays([EvenRuns(*of.astype(np.int64)) for of in slots], shape[2])
        return cls._trusted(start.reshape(shape), end.reshape(shape), kv_len, cu_seqlens)

    def __repr__(self) -> str:
        cells = self.batch_size * self.q_len * self.kv_len
        filled = f"{100 * int(self.area().sum()) / cells:.3g}% filled" if cells else "no cells"
        batch = f"batch {self.batch_size}, " if self.batch_size > 1 else ""
        slots = "1 span" if self.num_spans == 1 else f"{self.num_spans} spans"
        name = type(self).__name__
        return f"{name}({batch}{self.q_len} queries x {self.kv_len} keys, up to {slots} a row, {filled})"


def common(several: Sequence[tuple[Int64, ...] | None]) -> tuple[Int64, ...] | None:
    """The offsets of masks that are used together: those that all have, else None."""
    known = [one for one in several if one is not None]
    if not known or len(known) < len(several):
        return None
    most = max(known, key=len)
    alike = all(np.array_equal(one[row % len(one)], cu) for one in known for row, cu in enumerate(most))
    return most if alike else None
