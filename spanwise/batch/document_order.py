"""The order in which batches take documents: end to end, epoch after epoch.

`GlobalBatches` uses it. A position in it is one number, the tokens before it, which
does not depend on ranks or batch sizes. So a run resumes from that number alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_index, check_lengths, check_positive


class DocumentOrder:
    """Documents end to end, epoch after epoch, each epoch in another order.

    Empty documents are left out. Epochs follow one another without a gap, so that only the very end is incomplete.

    Args:
        lengths: tokens of each document, int ``[num_documents]``.
        seed: 0 … 2**64 - 1, of the random order of each epoch; None keeps the order of `lengths`.
        max_document: tokens; a longer document becomes several of nearly equal lengths, which are shuffled separately.

    Attributes:
        epoch_tokens: tokens of all documents.
        longest: tokens of the longest document, after long ones were cut.
        digest: hex digest of the arguments: equal orders have equal ones.

    Raises:
        ValueError: no document with a token, a limit below 1, or a seed that does not fit 64 bits.

    >>> import spanwise
    >>> order = spanwise.DocumentOrder([5, 0, 3])
    >>> order.epoch_tokens, order.pieces(position=3, length=7).tolist()  # document, start, stop
    (8, [[0, 3, 5], [2, 0, 3], [0, 0, 2]])
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
        """The last place up to `position` at which a document ends, or the first one of an epoch begins.

        >>> import spanwise
        >>> order = spanwise.DocumentOrder([5, 3])
        >>> [order.last_end(position) for position in (4, 5, 7, 15)]
        [0, 5, 5, 13]
        """
        epoch, inside = divmod(position, self.epoch_tokens)
        offsets = self._order(epoch)[1]
        return epoch * self.epoch_tokens + int(offsets[np.searchsorted(offsets, inside, side="right") - 1])
