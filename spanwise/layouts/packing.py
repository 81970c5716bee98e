"""Packing: positions of packed sequences in storage, for queries and for keys.

At the head of the data flow, with the mask: `Packing.mask` makes the SpanMask of a plan, `Packing.dual_chunk_layout` a
layout. The plan keeps the packing for positions, labels and zeros in padding.

The convention is TransformerEngine's THD layout (NVIDIA/TransformerEngine #2829): ``cu_seqlens`` counts valid tokens,
``cu_seqlens_padded`` gives the first storage row of each sequence, and padding follows the tokens of its sequence.
Without padding the two are equal.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex

import numpy as np

from spanwise.layouts.layout import Layout, head_tail_pieces
from spanwise.layouts.runs import ragged_arange
from spanwise.masks.arrays import Bool, Int64
from spanwise.masks.checks import check_length, check_offsets, check_positive, check_window
from spanwise.masks.span_mask import SpanMask

Side = Literal["q", "kv"]
Align = Literal["top_left", "bottom_right"]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Packing:
    """Packed sequences in storage, for queries and keys. Immutable; equal packings compare and hash equal.

    Sequence ``s`` has the valid query tokens ``q_offsets[s] … q_offsets[s] + q_lens[s] - 1``; all other
    rows up to ``q_offsets[s + 1]``, and all rows before the first sequence and after the last, are padding.

    Args:
        cu_seqlens_q: cumulative valid lengths, integers ``[num_sequences + 1]``, ``0 = cu[0] <= cu[1] <= …``: list,
            numpy array or torch tensor. Sequences may be empty.
        cu_seqlens_q_padded: storage offsets ``[num_sequences + 1]``; they may begin after 0. Default: `cu_seqlens_q`,
            no padding.
        cu_seqlens_kv, cu_seqlens_kv_padded: the same for keys. Default, when neither is given: those of the queries.
            Keys of the queries' lengths need both where the queries are padded.
        q_len: rows of query storage; default: the last storage offset.
        kv_len: rows of key storage; default: the last storage offset, or `q_len` where keys default to the queries.

    Attributes:
        q_lens, kv_lens: valid tokens of each sequence, read-only int64 ``[num_sequences]``.
        q_offsets, kv_offsets: storage offsets, read-only int64 ``[num_sequences + 1]``.
        q_len, kv_len: rows of storage.

    Raises:
        ValueError: not integers, offsets that decrease, a sequence longer than its slot, different numbers of sequences
            for keys and queries, keys as long as padded queries without ``cu_seqlens_kv_padded``, or storage that ends
            before its last slot.

    >>> from spanwise import Packing
    >>> packing = Packing([0, 3, 5], cu_seqlens_q_padded=[0, 4, 8])
    >>> packing.sequence_ids(), packing.positions()
    (array([ 0,  0,  0, -1,  1,  1, -1, -1]), array([0, 1, 2, 0, 0, 1, 0, 0]))
    >>> packing.mask().area()
    array([[1, 2, 3, 0, 1, 2, 0, 0]])
    """

    q_lens: Int64
    q_offsets: Int64
    kv_lens: Int64
    kv_offsets: Int64
    q_len: int
    kv_len: int

    def __init__(
        self,
        cu_seqlens_q: Any,
        *,
        cu_seqlens_q_padded: Any = None,
        cu_seqlens_kv: Any = None,
        cu_seqlens_kv_padded: Any = None,
        q_len: SupportsIndex | None = None,
        kv_len: SupportsIndex | None = None,
    ) -> None:
        lens, offsets, length = _side("q", cu_seqlens_q, cu_seqlens_q_padded, q_len)
        if cu_seqlens_kv is None and cu_seqlens_kv_padded is not None:
            raise ValueError("cu_seqlens_kv_padded needs cu_seqlens_kv: offsets alone do not tell valid lengths")
        if cu_seqlens_kv is None:
            kv_lens, kv_offsets = lens, offsets
            kv_length = length if kv_len is None else check_storage("kv_len", offsets, kv_len)
        else:
            kv_lens, kv_offsets, kv_length = _side("kv", cu_seqlens_kv, cu_seqlens_kv_padded, kv_len)
        if len(kv_lens) != len(lens):
            raise ValueError(f"queries and keys must have as many sequences, got {len(lens)} and {len(kv_lens)}")
        alike = cu_seqlens_kv is not None and cu_seqlens_kv_padded is None and np.array_equal(lens, kv_lens)
        if alike and not np.array_equal(offsets, kv_offsets):
            raise ValueError("cu_seqlens_q_padded pads the queries alone: give cu_seqlens_kv_padded too, or no kv")
        values = {"q_lens": lens, "q_offsets": offsets, "kv_lens": kv_lens, "kv_offsets": kv_offsets}
        for name, value in {**values, "q_len": length, "kv_len": kv_length}.items():
            object.__setattr__(self, name, value)

    @property
    def num_sequences(self) -> int:
        """Number of packed sequences, empty ones included."""
        return len(self.q_lens)

    @property
    def valid_q(self) -> Bool:
        """Whether each row of query storage holds a token, bool ``[q_len]``."""
        return self.sequence_ids("q") >= 0

    @property
    def valid_kv(self) -> Bool:
        """Whether each row of key storage holds a token, bool ``[kv_len]``."""
        return self.sequence_ids("kv") >= 0

    @property
    def padded(self) -> bool:
        """Whether query or key storage has any padding."""
        return int(self.q_lens.sum()) < self.q_len or int(self.kv_lens.sum()) < self.kv_len

    @property
    def square(self) -> bool:
        """Whether queries and keys lie alike: the same lengths, offsets and storage (self attention)."""
        return (
            self.q_len == self.kv_len
            and np.array_equal(self.q_lens, self.kv_lens)
            and np.array_equal(self.q_offsets, self.kv_offsets)
        )

    def sequence_ids(self, side: Side = "q") -> Int64:
        """Sequence of each storage row, -1 in padding: int64 ``[q_len]`` or ``[kv_len]``.

        >>> Packing([0, 3, 5]).sequence_ids()
        array([0, 0, 0, 1, 1])
        """
        lens, offsets, length = self._of(side)
        ids = np.full(length, -1, np.int64)
        ids[_rows(lens, offsets)] = np.repeat(np.arange(len(lens)), lens)
        return ids

    def positions(self, side: Side = "q") -> Int64:
        """Position of each storage row within its sequence, 0 in padding: int64 ``[q_len]`` or ``[kv_len]``.

        >>> Packing([0, 3, 5]).positions()
        array([0, 1, 2, 0, 1])
        """
        lens, offsets, length = self._of(side)
        rows = _rows(lens, offsets)
        positions = np.zeros(length, np.int64)
        positions[rows] = rows - np.repeat(offsets[:-1], lens)
        return positions

    def mask(
        self,
        *,
        causal: bool = True,
        window: tuple[SupportsIndex, SupportsIndex] | None = None,
        align: Align | None = None,
    ) -> SpanMask:
        """The mask over storage rows: a query reads keys of its own sequence only, and padding is never read or reads.

        Query ``i`` of a sequence stands at key ``d = i + shift`` of it: ``shift`` is 0 with ``align="top_left"`` and
        the sequence's number of keys less its number of queries with ``"bottom_right"``.

        Args:
            causal: read no key after ``d``.
            window: ``(left, right)`` in tokens, -1 for no limit: read only the keys ``d - left … d + right`` that
                exist. Where `causal` is set too, a key must satisfy both, so ``right`` changes nothing. ``(-1, 0)``
                without `causal` is refused: it is causal to FlashAttention, no limit to TransformerEngine.
            align: where the diagonal lies in sequences with different numbers of queries and keys; of no effect
                elsewhere, and without `causal` and `window`.

        Raises:
            ValueError: `align` is None although it decides what some sequence reads, or neither of the two; or a bad
                window.
        """
        if align not in (None, "top_left", "bottom_right"):
            raise ValueError(f'align must be "top_left" or "bottom_right", got {align!r}')
        longest = max(self.q_len, self.kv_len)
        near = None if window is None else check_window(window, longest, causal=causal)
        if near is not None and min(near) == longest:
            near = None  # it limits nothing, wherever the diagonal lies
        shift = np.zeros_like(self.q_lens) if align == "top_left" else self.kv_lens - self.q_lens
        if align is None and (causal or near is not None):
            uneven = (self.q_lens != self.kv_lens) & (self.q_lens > 0) & (self.kv_lens > 0)
            for s in np.flatnonzero(uneven)[:1]:
                raise ValueError(
                    f"sequence {s} has {self.q_lens[s]} queries and {self.kv_lens[s]} keys, so a causal mask or a "
                    f'window needs align="top_left" or align="bottom_right"'
                )
        rows = _rows(self.q_lens, self.q_offsets)
        diagonal = rows + np.repeat(shift - self.q_offsets[:-1], self.q_lens)
        keys, first = np.repeat(self.kv_lens, self.q_lens), np.repeat(self.kv_offsets[:-1], self.q_lens)
        low = np.zeros_like(rows) if near is None else np.maximum(diagonal - near[0], 0)
        high = keys
        if near is not None:
            high = np.minimum(high, diagonal + near[1] + 1)
        if causal:
            high = np.minimum(high, diagonal + 1)
        reads = low < high
        spans = np.zeros((2, 1, self.q_len), np.int32)
        spans[0, 0, rows] = np.where(reads, first + low, 0)
        spans[1, 0, rows] = np.where(reads, first + high, 0)
        return SpanMask(spans[0], spans[1], self.kv_len)

    def check_mask(self, mask: SpanMask) -> None:
        """Checks a mask against this packing before it is planned.

        Spans may cross sequences, because several sequences may read a prefix that is itself a sequence. For a mask
        that does not cross them take the packing's, or ``mask & packing.mask(causal=False)``.

        Raises:
            ValueError: storage without a row, the mask has batch rows or other lengths than storage, a padding row has
                a span, or a span covers a padding key.
        """
        if 0 in (self.q_len, self.kv_len):
            raise ValueError(
                f"the packing has {self.q_len} query and {self.kv_len} key rows: skip this batch, on every rank"
            )
        given, wanted = (mask.batch_size, mask.q_len, mask.kv_len), (1, self.q_len, self.kv_len)
        if given != wanted:
            raise ValueError(f"the mask is {given} (batch size, queries, keys), the packing's storage {wanted}")
        start, end = mask.start[0], mask.end[0]
        padding_before = np.append(0, np.cumsum(~self.valid_kv))
        wrong = (start < end) & (~self.valid_q | (padding_before[start] < padding_before[end]))
        for slot, row in np.argwhere(wrong)[:1]:
            keys = f"[{start[slot, row]}, {end[slot, row]})"
            raise ValueError(f"query row {row} reads the keys {keys}, and the row or one of the keys is padding")

    def dual_chunk_layout(self, num_ranks: int, side: Side = "q") -> Layout:
        """Each slot in ``2 * num_ranks`` chunks; rank ``r`` holds the chunks ``r`` and ``2 * num_ranks - 1 - r``.

        The order of TransformerEngine's and Megatron's THD context parallelism. Storage before the first slot and after
        the last is cut alike.

        Raises:
            ValueError: no storage; or a slot, or storage before or after the slots, is not a multiple of
                ``2 * num_ranks`` tokens.

        >>> Packing([0, 4, 12]).dual_chunk_layout(2).runs(0).tolist()
        [[0, 1], [3, 6], [10, 12]]
        """
        check_positive(num_ranks, "num_ranks")
        _, offsets, length = self._of(side)
        if length == 0:
            raise ValueError(f"the packing has no rows on side {side!r} to lay out; skip this batch, on every rank")
        edges = np.concatenate([[0], offsets, [length]])
        check_chunks(edges, num_ranks)
        return Layout([head_tail_pieces(edges, num_ranks)], num_ranks, length)

    def to_arrays(self) -> dict[str, Any]:
        """The constructor's arguments, for plan files: ``Packing(**arrays)`` is the same packing."""
        return {
            "cu_seqlens_q": np.append(0, np.cumsum(self.q_lens)), "cu_seqlens_q_padded": self.q_offsets,
            "cu_seqlens_kv": np.append(0, np.cumsum(self.kv_lens)), "cu_seqlens_kv_padded": self.kv_offsets,
            "q_len": self.q_len, "kv_len": self.kv_len,
        }  # fmt: skip

    def digest(self) -> bytes:
        """16 bytes that are equal exactly for equal packings (up to hash collisions), on any machine."""
        arrays = [np.ravel(array).astype("<i8") for array in self.to_arrays().values()]
        return hashlib.blake2b(np.concatenate(arrays).tobytes(), digest_size=16).digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packing):
            return NotImplemented
        theirs = other.to_arrays()
        return all(np.array_equal(mine, theirs[name]) for name, mine in self.to_arrays().items())

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Packing, **self.to_arrays()), ()

    def __repr__(self) -> str:
        sides = [f"{self.q_lens.sum()} of {self.q_len} rows"]
        if not self.square:
            sides = [f"queries {sides[0]}", f"keys {self.kv_lens.sum()} of {self.kv_len} rows"]
        return f"Packing({self.num_sequences} sequences, {', '.join(sides)})"

    def _of(self, side: Side) -> tuple[Int64, Int64, int]:
        if side not in ("q", "kv"):
            raise ValueError(f'side must be "q" or "kv", got {side!r}')
        return getattr(self, f"{side}_lens"), getattr(self, f"{side}_offsets"), getattr(self, f"{side}_len")


def _rows(lens: Int64, offsets: Int64) -> Int64:
    """Storage rows of all valid tokens, ascending."""
    return ragged_arange(np.stack([offsets[:-1], offsets[:-1] + lens], axis=1))


def _side(side: str, cu_seqlens: Any, padded: Any, length: SupportsIndex | None) -> tuple[Int64, Int64, int]:
    """Valid lengths, storage offsets and storage length of one side."""
    name = f"cu_seqlens_{side}"
    cu = check_offsets(cu_seqlens, name, start_at_zero=False)
    if cu[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {cu[0]}; storage offsets are {name}_padded")
    offsets = cu if padded is None else check_offsets(padded, f"{name}_padded", start_at_zero=False)
    if len(offsets) != len(cu):
        raise ValueError(f"{name} and {name}_padded must be equally long, got {len(cu)} and {len(offsets)} entries")
    lens, slots = np.diff(cu), np.diff(offsets)
    for s in np.flatnonzero(lens > slots)[:1]:
        raise ValueError(f"sequence {s} has {lens[s]} tokens in {name}, and storage for {slots[s]} only")
    lens.setflags(write=False)
    return lens, offsets, check_storage(f"{side}_len", offsets, length)


def check_storage(name: str, offsets: Int64, length: SupportsIndex | None) -> int:
    """Rows of storage: `length`, called `name`, which the slots must fit; the last offset if None."""
    if length is None:
        return int(offsets[-1])
    if (rows := check_length(length, name)) < offsets[-1]:
        raise ValueError(f"{name} = {rows} rows of storage are too few: the last sequence ends at {offsets[-1]}")
    return rows


def check_chunks(edges: Int64, num_ranks: int) -> None:
    """Check that slots with these edges, 0 to the storage length, can be cut into dual chunks."""
    for s in np.flatnonzero(np.diff(edges) % (2 * num_ranks))[:1]:
        raise ValueError(
            f"the slot [{edges[s]}, {edges[s + 1]}) must be a multiple of 2 * num_ranks = {2 * num_ranks} tokens for "
            f"the dual-chunk order; any other balancer needs no padding"
        )
