"""GlobalBatches: documents to steps, one plan for all ranks each.

    lengths -> DocumentOrder -> GlobalBatches.at(position) -> GlobalBatch -> load(source, rank) -> one rank's tensors

Pure arithmetic on lengths, the same on every rank; nothing is sent. A rank then reads its own tokens only, and where
one of its runs ends inside a document the next token: the label of the run's last one. The state is one number, the
tokens before a batch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from spanwise.batch.token_scores import IGNORE_INDEX
from spanwise.layouts.runs import ragged_arange
from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_index, check_lengths, check_positive
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import groups_and_ranks, make_plan
from spanwise.planning.plan import Plan


class DocumentSource(Protocol):
    """Documents with random access: ``source[document][start:stop]`` are tokens, as integers.

    For example a list of arrays or tensors, or an object that reads a file when it is sliced.
    """

    def __getitem__(self, document: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The documents of one step, end to end, with one plan over all ranks. Made by `GlobalBatches`.

    Attributes:
        pieces: int64 ``[n, 3]`` of (document, start, stop), read-only. Each counts as a document: where a document was
            cut, masks, positions and labels do not reach across the cut.
        plan: of all ranks, over the tokens of the pieces and then the padding.
        next_position: where the next batch begins, in tokens of the documents' order.

    >>> import numpy as np, spanwise
    >>> batches = spanwise.GlobalBatches([6, 3, 5], num_ranks=2, tokens_per_rank=5, balancer="head_tail")
    >>> batch = batches.at(0)  # the third document does not fit
    >>> batch.pieces.tolist(), batch.num_valid, batch.plan.runs(0).tolist()
    ([[0, 0, 6], [1, 0, 3]], 7, [[0, 3], [7, 9]])
    >>> batch.reads(0).tolist()  # document, start, stop; token 3 of document 0 is the label of token 2
    [[0, 0, 4], [1, 1, 3]]
    >>> source = [np.arange(10, 16), np.arange(20, 23), np.arange(30, 35)]
    >>> mine = batch.load(source, rank=0)
    >>> mine["input_ids"].tolist(), mine["labels"].tolist(), mine["position_ids"].tolist()
    ([[10, 11, 12, 21, 22]], [[11, 12, 13, 22, -100]], [[0, 1, 2, 1, 2]])
    """

    pieces: Int64
    plan: Plan
    next_position: int

    @functools.cached_property
    def cu_seqlens(self) -> Int64:
        """Offsets of the pieces, int64 ``[n + 1]``; padding follows the last."""
        return np.concatenate(([0], np.cumsum(self.pieces[:, 2] - self.pieces[:, 1])))

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def num_valid(self) -> int:
        """Number of labels on all ranks: one for each token except the last of a piece; for `cross_entropy`."""
        return self.num_tokens - len(self.pieces)

    def reads(self, rank: int) -> Int64:
        """The tokens that a rank reads: int64 ``[m, 3]`` of (document, start, stop), labels behind runs included."""
        document, start, stop, more, _ = self._parts(rank).T
        return np.column_stack([document, start, stop + more])

    def load(self, source: DocumentSource, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors, from the tokens of `reads` and no others.

        Args:
            source: ``source[document][start:stop]`` are tokens: integers, a numpy array or a tensor.

        Returns:
            ``"input_ids"``, ``"labels"`` and ``"position_ids"``, int64 ``[1, T]`` on the CPU, as `shard_batch` makes
            them: the label of a token is the next one of its piece, −100 at the end; positions count from the piece's
            start. Padding has input 0, label −100 and position 0.

        Raises:
            ValueError: the source has fewer tokens of a document than its length, or tokens that are no integers.
        """
        ids, labels, positions = np.zeros((3, self.plan.layout.num_tokens(rank)), dtype=np.int64)
        labels[:] = IGNORE_INDEX
        at = 0
        for document, start, stop, more, first in self._parts(rank).tolist():
            tokens = np.asarray(source[document][start : stop + more])
            if tokens.shape != (stop + more - start,):
                raise ValueError(f"source[{document}][{start}:{stop + more}] has shape {tokens.shape}")
            if tokens.dtype.kind not in "iu":
                raise ValueError(f"tokens must be integers, got {tokens.dtype} from source[{document}]")
            end = at + stop - start
            ids[at:end] = tokens[: stop - start]
            labels[at : at + len(tokens) - 1] = tokens[1:]
            positions[at:end] = np.arange(start - first, stop - first)
            at = end
        tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(x.copy())[None] for name, x in tensors.items()}

    def _parts(self, rank: int) -> Int64:
        """A rank's tokens in shard order, int64 ``[m, 5]``.

        Document, start and stop in it, whether the token behind them is a label, start of the piece in its document.
        """
        runs, ends = self.plan.runs(rank), self.cu_seqlens
        runs = np.minimum(runs, ends[-1])  # padding lies behind the last piece, in the rank's last run
        runs = runs[runs[:, 0] < runs[:, 1]]
        first = np.searchsorted(ends, runs[:, 0], side="right") - 1
        last = np.searchsorted(ends, runs[:, 1], side="left")
        piece = ragged_arange(np.column_stack([first, last]))
        run = np.repeat(np.arange(len(runs)), last - first)
        begin, finish = np.maximum(runs[run, 0], ends[piece]), np.minimum(runs[run, 1], ends[piece + 1])
        document, origin, _ = self.pieces[piece].T
        shift = origin - ends[piece]
        return np.column_stack([document, begin + shift, finish + shift, finish < ends[piece + 1], origin])


class DocumentOrder:
    """The documents of `GlobalBatches` end to end, epoch after epoch, each epoch in another order.

    A position is the number of tokens before it, which does not depend on ranks or batch sizes.

    Attributes:
        epoch_tokens: tokens of all documents.
        longest: tokens of the longest document, after long ones were cut.
        digest: hex digest of the arguments: equal orders have equal ones.
    """

    def __init__(self, lengths: Any, seed: int | None = None, max_document: int | None = None) -> None:
        tokens = check_lengths(lengths, "lengths")
        self.seed = None if seed is None else check_index(seed, "seed")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, or None for the order of lengths, got {seed}")
        self.epoch_tokens = int(tokens.sum())
        if self.epoch_tokens == 0:
            raise ValueError(f"an order needs a document with a token, got {len(tokens)} documents, all empty")
        limit = int(tokens.max()) if max_document is None else check_positive(max_document, "max_document")
        parts = -(-tokens // min(limit, 2**62))
        # Part i of p covers tokens n * i // p … n * (i + 1) // p of its document.
        self._document = np.repeat(np.arange(len(tokens)), parts)
        number = np.arange(len(self._document)) - np.repeat(np.cumsum(parts) - parts, parts)
        whole, parts = tokens[self._document], parts[self._document]
        quotient, remainder = whole // parts, whole % parts  # separate, because n * i may exceed int64
        self._start = quotient * number + remainder * number // parts
        self._length = quotient + remainder * (number + 1) // parts - remainder * number // parts
        self.longest = int(self._length.max())
        self._epoch: tuple[int, Int64, Int64] | None = None  # the last epoch in use
        arguments = f"{seed} {max_document}\n".encode()
        self.digest = hashlib.blake2b(arguments + tokens.astype("<i8").tobytes(), digest_size=16).hexdigest()

    def _order(self, epoch: int) -> tuple[Int64, Int64]:
        """Parts of an epoch in order, and the offsets ``[num_parts + 1]`` at which they lie in it."""
        if self._epoch is None or self._epoch[0] != epoch:
            index = np.arange(len(self._length))
            if self.seed is not None:
                # Not a shuffle: numpy keeps the stream of a bit generator from release to release, and that alone.
                index = np.argsort(np.random.PCG64([self.seed, epoch]).random_raw(len(index)), kind="stable")
            self._epoch = (epoch, index, np.concatenate(([0], np.cumsum(self._length[index]))))
        return self._epoch[1], self._epoch[2]

    def pieces(self, position: int, length: int) -> Int64:
        """Documents in ``[position, position + length)``; those at its ends may be cut.

        Returns:
            int64 ``[n, 3]`` of (document, start, stop), in order; none is empty.
        """
        found = [np.empty((0, 3), np.int64)]
        end = position + length
        while position < end:
            epoch, inside = divmod(position, self.epoch_tokens)
            order, offsets = self._order(epoch)
            stop = min(inside + end - position, self.epoch_tokens)
            first = int(np.searchsorted(offsets, inside, side="right")) - 1
            last = int(np.searchsorted(offsets, stop, side="left"))
            parts, at = order[first:last], offsets[first : last + 1]
            start = self._start[parts] - at[:-1]
            begin, finish = np.maximum(at[:-1], inside), np.minimum(at[1:], stop)
            found.append(np.column_stack([self._document[parts], start + begin, start + finish]))
            position += stop - inside
        return np.concatenate(found)

    def last_end(self, position: int) -> int:
        """The last place up to `position` at which a document ends, or the first one of an epoch begins."""
        epoch, inside = divmod(position, self.epoch_tokens)
        offsets = self._order(epoch)[1]
        return epoch * self.epoch_tokens + int(offsets[np.searchsorted(offsets, inside, side="right") - 1])


class GlobalBatches:
    """Global batches of documents, each with one plan over all dp × cp ranks.

    In a fixed dp × cp grid each replica has other documents, and all wait for the replica with the longest. One plan
    over all ranks keeps short documents whole on a rank, spreads long ones, and gives every rank the same number of
    tokens and the same attention work.

    Args:
        lengths: tokens of each document, int ``[num_documents]``; empty documents are left out.
        num_ranks: all ranks, dp × cp; or the two axes of a cp mesh with Ulysses inside, as `make_plan` takes it.
        tokens_per_rank: a batch has at most ``num_ranks * tokens_per_rank`` tokens. Without `pad`, a rank may hold up
            to one block more.
        seed: of the order of documents, another one each epoch; None keeps the order of `lengths`.
        max_document: tokens; a longer document is cut into several of nearly equal lengths. None: none is cut here.
        cut: False: documents are whole, and a batch ends before the first one that does not fit. True: each batch is
            filled to its last token; the document that lies there is cut, and goes on in the next batch. A part is a
            document of its own: it does not read the part before it, and its last token has no label.
        pad: fill each batch so that all ranks always hold `tokens_per_rank` tokens, as compiled models need. Padding
            reads nothing and has no labels.
        epochs: passes over the documents; None: no end. Epochs follow one another without a gap.
        drop_last: leave out the batch in which the documents end, unless it is full.
        mask: from offsets ``[n + 1]`` to a mask, or to masks by name; default: causal documents. A module's
            function, so that it can be pickled for a worker. Called without padding.
        options: for `make_plan`: ``num_q_heads``, ``hardware``, ``exchange``, ``weights`` and so on.

    Attributes:
        order: of the documents, epoch after epoch; ``order.pieces(position, length)`` are those of some tokens.
        size: number of ranks.
        batch_tokens: tokens of a full batch.

    Raises:
        ValueError: no document has a token; a document is longer than a batch; a batch has fewer tokens than ranks;
            `pad` with tokens of a rank that are no multiple of ``block_size``; options that `make_plan` does not take.

    >>> import spanwise
    >>> batches = spanwise.GlobalBatches([400, 9000, 20, 700, 3000], num_ranks=4, tokens_per_rank=2560)
    >>> for batch in batches:
    ...     print(batch.pieces[:, 0].tolist(), batch.num_tokens, batch.plan.layout.tokens_per_rank.tolist())
    [0, 1, 2, 3] 10120 [2530, 2530, 2530, 2530]
    [4] 3000 [750, 750, 750, 750]
    """

    def __init__(
        self,
        lengths: Any,
        num_ranks: int | tuple[int, int],
        tokens_per_rank: int,
        *,
        seed: int | None = None,
        max_document: int | None = None,
        cut: bool = False,
        pad: bool = False,
        epochs: int | None = 1,
        drop_last: bool = False,
        mask: Callable[[Int64], Any] = SpanMask.documents,
        **options: Any,
    ) -> None:
        self.order = DocumentOrder(lengths, seed, max_document)
        known = inspect.signature(make_plan).parameters.keys() - {"mask", "num_ranks", "cu_seqlens", "packing"}
        if unknown := sorted(options.keys() - known):
            raise ValueError(f"global batches take no {', '.join(unknown)}; options are {', '.join(sorted(known))}")
        self.num_ranks, self.options, self.mask = num_ranks, options, mask
        block_size = check_positive(options.get("block_size", 128), "block_size")
        self.size = math.prod(groups_and_ranks(num_ranks, None))
        self.batch_tokens = self.size * check_positive(tokens_per_rank, "tokens_per_rank")
        self.cut, self.pad, self.drop_last = bool(cut), bool(pad), bool(drop_last)
        self.end = None if epochs is None else check_positive(epochs, "epochs") * self.order.epoch_tokens
        if self.order.longest > self.batch_tokens and not cut:
            longest, most = f"{self.order.longest:,}", f"{self.batch_tokens:,}"
            raise ValueError(f"a document has {longest} tokens, a batch at most {most}: give max_document or cut=True")
        if pad and tokens_per_rank % block_size:
            raise ValueError(f"pad=True needs tokens_per_rank in blocks of {block_size}, got {tokens_per_rank}")
        # A batch of too few tokens raises now, not at the end of an epoch; of many million documents, when it is made.
        if self.end is not None and cut:
            self.next_position((self.end - 1) // self.batch_tokens * self.batch_tokens)
        elif self.end is not None and self.end // self.order.epoch_tokens * len(lengths) <= 2**23:
            len(self)

    @property
    def config(self) -> str:
        """Hex digest of everything that decides which documents a batch holds: equal for runs that may be resumed.

        The number of ranks is part of it only in ``num_ranks * tokens_per_rank``.
        """
        text = f"{self.order.digest} {self.batch_tokens} {self.cut}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def next_position(self, position: int) -> int | None:
        """Where the batch that begins at `position` ends; None if there is none."""
        after = position + self.batch_tokens
        if not self.cut:
            after = self.order.last_end(after)
            if after <= position:
                raise ValueError(f"no document ends in the {self.batch_tokens:,} tokens from {position:,} on")
        if self.end is not None:
            after = min(after, self.end)
            incomplete = after == self.end and after - position < self.batch_tokens
            if position >= self.end or (self.drop_last and incomplete):
                return None
        if after - position < self.size and not self.pad:
            few = f"{after - position} tokens for {self.size} ranks"
            raise ValueError(f"the batch after token {position:,} has {few}: give pad=True, cut=True or drop_last=True")
        return after

    def at(self, position: int = 0) -> GlobalBatch:
        """The batch that begins `position` tokens after the start; pure, and the same on every rank.

        Raises:
            ValueError: there is none, or it would begin inside a document that must stay whole.
        """
        position = check_index(position, "position")
        if position < 0 or (after := self.next_position(position)) is None:
            raise ValueError(f"no batch begins at token {position}; the documents end at {self.end}")
        if not self.cut and (begin := self.order.last_end(position)) != position:
            raise ValueError(f"no batch begins at token {position}, inside a document that begins at {begin}")
        pieces = self.order.pieces(position, after - position)
        pieces.setflags(write=False)
        cu_seqlens = np.concatenate(([0], np.cumsum(pieces[:, 2] - pieces[:, 1])))
        masks, padding = self.mask(cu_seqlens), self.batch_tokens - int(cu_seqlens[-1])
        if self.pad and padding:
            masks, cu_seqlens = _padded(masks, padding), np.append(cu_seqlens, self.batch_tokens)
        plan = make_plan(masks, self.num_ranks, cu_seqlens=cu_seqlens, **self.options)
        return GlobalBatch(pieces, plan, after)

    def __iter__(self) -> Iterator[GlobalBatch]:
        position: int | None = 0
        while position is not None and self.next_position(position) is not None:
            batch = self.at(position)
            yield batch
            position = batch.next_position

    def __len__(self) -> int:
        if self.end is None:
            raise TypeError("batches with epochs=None have no length")
        count, position = 0, 0
        while (after := self.next_position(position)) is not None:
            count, position = count + 1, after
        return count


def _padded(masks: Any, padding: int) -> Any:
    """The masks with rows behind them that read nothing, and that nothing reads."""
    if isinstance(masks, Mapping):
        return {name: _padded(mask, padding) for name, mask in masks.items()}
    if not isinstance(masks, SpanMask):
        raise ValueError(f"pad=True extends a SpanMask, or several by name; mask returned {masks!r}")
    start, end = (np.pad(x, ((0, 0), (0, 0), (0, padding))) for x in (masks.start, masks.end))
    return SpanMask(start, end, masks.kv_len + padding)
