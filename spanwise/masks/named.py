"""Constructors of named masks; `SpanMask` inherits them. Each makes canonical arrays, which nobody sorts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from spanwise.masks import checks, spans, trees
from spanwise.masks.arrays import Int32
from spanwise.masks.checks import check_length, check_lengths, check_offsets, check_positive, check_window
from spanwise.masks.span_arrays import SpanArrays, common

if TYPE_CHECKING:
    from typing_extensions import Self

    Window = tuple[SupportsIndex, SupportsIndex]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class NamedMasks(SpanArrays):
    """Masks by name; see `SpanMask`."""

    __slots__ = ()

    @classmethod
    def full(cls, q_len: SupportsIndex, kv_len: SupportsIndex | None = None) -> Self:
        """Every row reads every key. ``kv_len`` defaults to ``q_len``.

        >>> from spanwise import SpanMask
        >>> SpanMask.full(2, 5).area()
        array([[5, 5]])
        """
        rows = check_length(q_len, "q_len")
        keys = rows if kv_len is None else check_length(kv_len, "kv_len")
        return cls._trusted(np.zeros((1, 1, rows), np.int32), np.full((1, 1, rows), keys, np.int32), keys)

    @classmethod
    def causal(cls, seq_len: SupportsIndex) -> Self:
        """Row ``i`` reads the keys ``0 … i``.

        >>> from spanwise import SpanMask
        >>> SpanMask.causal(4).area()
        array([[1, 2, 3, 4]])
        """
        rows = check_length(seq_len, "seq_len")
        return cls._trusted(np.zeros((1, 1, rows), np.int32), np.arange(1, rows + 1, dtype=np.int32)[None, None])

    @classmethod
    def sliding_window(cls, seq_len: SupportsIndex, left: SupportsIndex, right: SupportsIndex = 0) -> Self:
        """Row ``i`` reads the keys ``i - left … i + right`` that exist, in tokens; -1 means no limit on that side.

        >>> from spanwise import SpanMask
        >>> SpanMask.sliding_window(6, left=2).area()
        array([[1, 2, 3, 3, 3, 3]])
        """
        length = check_length(seq_len, "seq_len")
        start, end = _window(length, *check_window((left, right), length))
        return cls._trusted(start[None, None], end[None, None])

    @classmethod
    def documents(
        cls,
        cu_seqlens: Any,
        *,
        causal: bool = True,
        window: Window | None = None,
        chunk: SupportsIndex | None = None,
    ) -> Self:
        """Packed documents: a row reads keys of its own document only. The mask keeps the offsets.

        Args:
            cu_seqlens: integers ``[num_docs + 1]``, ``0 = cu[0] <= cu[1] <= …``: list, numpy array or torch tensor.
                Document ``d`` holds the tokens ``cu[d] … cu[d + 1] - 1``; documents may be empty.
            causal: read no key after the row itself.
            window: ``(left, right)`` in tokens, -1 for no limit: read only the keys ``i - left … i + right``. With
                ``causal`` a key must satisfy both, so ``right`` changes nothing. ``(-1, 0)`` without ``causal`` is
                refused: FlashAttention reads it as causal, TransformerEngine as no limit.
            chunk: read only keys of the row's own chunk of this many tokens, counted from the start of each document
                (Llama 4's chunked attention). With a window a key must satisfy both.

        Raises:
            ValueError: offsets that do not ascend from 0, a bad window, or a chunk below 1.

        >>> from spanwise import SpanMask
        >>> SpanMask.documents([0, 2, 5]).area()
        array([[1, 2, 1, 2, 3]])
        >>> SpanMask.documents([0, 2, 7], chunk=3).area()
        array([[1, 2, 1, 2, 3, 1, 2]])
        """
        offsets = cu = check_offsets(cu_seqlens)
        if chunk is not None:  # chunks are documents of their own
            size = min(check_positive(chunk, "chunk"), max(int(cu[-1]), 1))
            counts = -(-np.diff(cu) // size)
            nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            cu = np.append(np.repeat(cu[:-1], counts) + nth * size, cu[-1])
        seq_len, lengths = int(cu[-1]), np.diff(cu)
        start = np.repeat(cu[:-1].astype(np.int32), lengths)
        end = np.arange(1, seq_len + 1, dtype=np.int32) if causal else np.repeat(cu[1:].astype(np.int32), lengths)
        if window is not None:
            window_start, window_end = _window(seq_len, *check_window(window, seq_len, causal=causal))
            np.maximum(start, window_start, out=start)
            np.minimum(end, window_end, out=end)
        return cls._trusted(start[None, None], end[None, None], cu_seqlens=(offsets,))

    @classmethod
    def from_position_ids(
        cls,
        position_ids: Any,
        *,
        causal: bool = True,
        window: Window | None = None,
        chunk: SupportsIndex | None = None,
    ) -> Self:
        """:meth:`documents` of packed batches that mark them by positions, as ``DataCollatorWithFlattening`` makes.

        A document starts at the first token of a row, and wherever a position is not the one before plus 1.

        Args:
            position_ids: integers ``[tokens]`` or ``[batch, tokens]``, in host memory. Batch rows with different
                documents make a batched mask.
            causal, window, chunk: as in :meth:`documents`.

        Raises:
            ValueError: another shape, not integers, a bad window or chunk.

        >>> from spanwise import SpanMask
        >>> SpanMask.from_position_ids([[0, 1, 0, 1, 2]]) == SpanMask.documents([0, 2, 5])
        True
        """
        rows = _batch_rows(position_ids, "position_ids")
        starts = [[0, *(np.flatnonzero(np.diff(row) != 1) + 1), len(row)] for row in rows]
        return cls._stacked([cls.documents(cu, causal=causal, window=window, chunk=chunk) for cu in starts])

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: Any,
        *,
        causal: bool = True,
        window: Window | None = None,
        chunk: SupportsIndex | None = None,
    ) -> Self:
        """Batches with padding on the left or right, as tokenizers make: a row reads tokens of its own sequence only.

        Padding is never read and reads nothing. Each row's tokens and its padding are documents apart.

        Args:
            attention_mask: 1 or True for tokens, 0 or False for padding, ``[tokens]`` or ``[batch, tokens]``, in host
                memory. Batch rows with different lengths make a batched mask.
            causal, window, chunk: as in :meth:`documents`.

        Raises:
            ValueError: another shape (a mask of four dims says which keys are read, not what is padding), other values,
                padding between tokens, a bad window or chunk.

        >>> from spanwise import SpanMask
        >>> SpanMask.from_attention_mask([[0, 1, 1, 1], [1, 1, 0, 0]]).area()
        array([[0, 1, 2, 3],
               [1, 2, 0, 0]])
        """
        rows = []
        for number, valid in enumerate(_batch_rows(attention_mask, "attention_mask")):
            held = np.flatnonzero(valid)
            if not np.isin(valid, (0, 1)).all() or (len(held) and held[-1] - held[0] >= len(held)):
                raise ValueError(
                    f"attention_mask must be 1 for tokens and 0 for padding on the left or right, but row {number} has "
                    f"padding between tokens, or {valid.max()}; for documents give cu_seqlens or position_ids"
                )
            low, high = (int(held[0]), int(held[-1]) + 1) if len(held) else (0, 0)
            edges = np.unique([0, low, high, len(valid)])
            documents = cls.documents(edges, causal=causal, window=window, chunk=chunk)
            start, end = (np.where(valid == 1, x, np.int32(0)) for x in (documents.start, documents.end))
            rows.append(cls._trusted(start, end, cu_seqlens=documents.cu_seqlens))
        return cls._stacked(rows)

    @classmethod
    def prefix_lm(cls, cu_seqlens: Any, prefix_lens: Any) -> Self:
        """Packed causal documents in which every row also reads the whole prefix of its document.

        Args:
            cu_seqlens: as in :meth:`documents`.
            prefix_lens: integers ``[num_docs]``, tokens; each between 0 and its document's length.

        >>> from spanwise import SpanMask
        >>> SpanMask.prefix_lm([0, 5], [3]).area()
        array([[3, 3, 3, 4, 5]])
        """
        cu, prefixes = check_offsets(cu_seqlens), check_lengths(prefix_lens, "prefix_lens")
        if len(prefixes) != len(cu) - 1:
            raise ValueError(f"prefix_lens needs an entry for each of {len(cu) - 1} documents, got {len(prefixes)}")
        for at in np.flatnonzero(prefixes > np.diff(cu))[:1]:
            raise ValueError(f"prefix_lens[{at}] = {prefixes[at]}, but document {at} has {cu[at + 1] - cu[at]} tokens")
        causal = cls.documents(cu)
        prefix_end = np.repeat((cu[:-1] + prefixes).astype(np.int32), np.diff(cu))
        return cls._trusted(causal.start, np.maximum(causal.end, prefix_end), cu_seqlens=causal.cu_seqlens)

    @classmethod
    def shared_prefix(cls, prefix_len: SupportsIndex, suffix_lens: Any) -> Self:
        """One causal prompt, then several causal answers; each reads the prompt and itself.

        Args:
            prefix_len: tokens of the prompt.
            suffix_lens: integers ``[num_answers]``, tokens of each answer; they follow the prompt in this order.

        >>> from spanwise import SpanMask
        >>> SpanMask.shared_prefix(2, [1, 2]).area()
        array([[1, 2, 3, 3, 4]])
        """
        prefix, suffixes = check_length(prefix_len, "prefix_len"), check_lengths(suffix_lens, "suffix_lens")
        check_length(prefix + int(suffixes.sum()), "prefix_len + sum(suffix_lens)")
        return cls.tree([-1] + [0] * len(suffixes), np.append(prefix, suffixes))

    @classmethod
    def tree(
        cls,
        parents: Any,
        lengths: Any,
        *,
        window: SupportsIndex | None = None,
    ) -> Self:
        """A tree of token runs, or several: each node reads its ancestors and, causally, itself.

        Rollouts that share prefixes are such a tree. `TokenTree` adds positions and labels along the paths.

        Args:
            parents: integers ``[num_nodes]``: the parent of each node, -1 for a root. Parents stand before children.
            lengths: integers ``[num_nodes]``: tokens of each node; they lie in storage in this order. Nodes may be
                empty.
            window: read only so many tokens before the row on its path, and the row itself, as the `left` of
                :meth:`sliding_window`; transformers' ``sliding_window=n`` is ``window=n - 1``. None for no limit.

        A row needs one span, and one more for each ancestor on its path that the next one does not follow in storage;
        depth-first order needs few. The mask takes 8 bytes a token and span of the fullest row.

        Raises:
            ValueError: shapes that differ, negative lengths, a parent that does not exist or comes after its child.

        >>> from spanwise import SpanMask
        >>> SpanMask.tree([-1, 0, 1, 0], lengths=[2, 1, 2, 1]).area()  # the last node reads the first
        array([[1, 2, 3, 4, 5, 3]])
        """
        return cls._trusted(*trees.spans(parents, lengths, window))

    @classmethod
    def block_causal(
        cls,
        seq_len: SupportsIndex,
        block_len: SupportsIndex,
        num_previous: SupportsIndex | None = None,
        global_tokens: SupportsIndex = 0,
    ) -> Self:
        """Blocks of tokens, such as frames of a video: a row reads its whole block and whole earlier blocks.

        Args:
            block_len: tokens of a block; the last one may be short.
            num_previous: number of earlier blocks that a row reads; None means all of them.
            global_tokens: every row reads the first ``global_tokens`` keys. The rows of these tokens follow the rule
                of their own block, and so never read the future through a later block.

        >>> from spanwise import SpanMask
        >>> SpanMask.block_causal(6, 2, num_previous=1).area()
        array([[2, 2, 4, 4, 4, 4]])
        """
        length, size = check_length(seq_len, "seq_len"), check_positive(block_len, "block_len")
        previous = length if num_previous is None else min(checks.check_index(num_previous, "num_previous"), length)
        shared = checks.check_below(global_tokens, length + 1, "global_tokens")
        if previous < 0:
            raise ValueError(f"num_previous must be at least 0, or None for all earlier blocks, got {previous}")
        width = np.int32(min(size, max(length, 1)))
        block = np.arange(length, dtype=np.int32) // width
        end = np.minimum((block + np.int32(1)) * width, np.int32(length))
        start = np.maximum(block - np.int32(previous), np.int32(0)) * width
        own = start[None, None], end[None, None]
        if not shared:
            return cls._trusted(*own)
        return cls._trusted(*spans.unite(own, (np.zeros_like(own[0]), np.full_like(own[1], shared))))

    @classmethod
    def block_diffusion(cls, cu_seqlens: Any, block_len: SupportsIndex) -> Self:
        """Training of block diffusion: a noisy copy of packed documents, then their clean copy.

        A noisy row reads its whole noisy block and all clean blocks before it; a clean row reads all clean blocks up to
        its own. Blocks count from the start of each document. This is `block_diff_mask` of Arriola et al., 2025 (arXiv
        2503.09573), for packed documents. The mask keeps offsets of each copy, so that both have the same positions.

        Args:
            cu_seqlens: as in :meth:`documents`, of one copy; the mask has twice its tokens.
            block_len: tokens of a block; the last one of a document may be short.

        >>> from spanwise import SpanMask
        >>> SpanMask.block_diffusion([0, 4, 6], block_len=2).area()
        array([[2, 2, 4, 4, 2, 2, 2, 2, 4, 4, 2, 2]])
        """
        cu = check_offsets(cu_seqlens)
        tokens, lengths = int(cu[-1]), np.diff(cu)
        size = min(check_positive(block_len, "block_len"), max(tokens, 1))
        check_length(2 * tokens, "twice the last of cu_seqlens")
        first, stop = (np.repeat(x, lengths) for x in (cu[:-1], cu[1:]))
        begin = np.arange(tokens) - (np.arange(tokens) - first) % size
        end = np.minimum(begin + size, stop)
        noisy = np.stack([begin, first + tokens]), np.stack([end, begin + tokens])
        clean = np.stack([first + tokens, end + tokens]), np.stack([end + tokens, end + tokens])
        start, end = (np.concatenate([a, b], axis=1)[None] for a, b in zip(noisy, clean, strict=True))
        own = spans.canonicalise(start.astype(np.int32), end.astype(np.int32))
        return cls._trusted(*own, 2 * tokens, cu_seqlens=(np.append(cu, cu[1:] + tokens),))

    @classmethod
    def stack(cls, masks: Sequence[Self]) -> Self:
        """A batched mask from masks of equal ``q_len`` and ``kv_len``: the batch rows of each mask in turn.

        >>> from spanwise import SpanMask
        >>> SpanMask.stack([SpanMask.causal(3), SpanMask.full(3)]).area()
        array([[1, 2, 3],
               [3, 3, 3]])
        """
        shapes = {(mask.q_len, mask.kv_len) for mask in masks}
        if len(shapes) != 1:
            raise ValueError(f"masks to stack must agree in (q_len, kv_len), got {sorted(shapes)}")
        ((q_len, kv_len),), most = shapes, max(mask.num_spans for mask in masks)
        arrays, b = np.zeros((2, sum(mask.batch_size for mask in masks), most, q_len), np.int32), 0
        for mask in masks:
            arrays[:, b : b + mask.batch_size, : mask.num_spans] = mask.start, mask.end
            b += mask.batch_size
        every = [(mask.cu_seqlens, mask.batch_size) for mask in masks]
        found = [cu[row % len(cu)] for cu, batch in every if cu is not None for row in range(batch)]
        cu_seqlens = None if any(cu is None for cu, _ in every) else tuple(found)
        return cls._trusted(arrays[0], arrays[1], kv_len, cu_seqlens)

    @classmethod
    def _stacked(cls, rows: Sequence[Self]) -> Self:
        """One mask of these rows; of batch size 1 where all are alike."""
        alike = all(row == rows[0] for row in rows) and common([row.cu_seqlens for row in rows]) is not None
        return rows[0] if alike else cls.stack(rows)


def _batch_rows(values: Any, name: str) -> np.ndarray:
    """``[batch, tokens]`` of integers or booleans ``[tokens]`` or ``[batch, tokens]``."""
    array = np.asarray(values)
    array = array.astype(np.int64) if array.dtype == np.bool_ else checks.int_array(values, name)
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(f"{name} must be [tokens] or [batch, tokens], not empty, got shape {list(array.shape)}")
    return np.atleast_2d(array)


def _window(seq_len: int, left: np.int32, right: np.int32) -> tuple[Int32, Int32]:
    """One span for each row, int32 ``[q_len]`` each: the keys ``i - left … i + right`` that exist."""
    row = np.arange(seq_len, dtype=np.int32)
    return np.maximum(row - left, np.int32(0)), np.minimum(row + (right + np.int32(1)), np.int32(seq_len))
