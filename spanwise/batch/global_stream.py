"""GlobalBatchStream: global batches of a stream of documents whose lengths are not known before.

    documents, one after the other -> as many as fit a batch -> GlobalBatch -> this rank's tensors

Every rank reads the whole stream and keeps the documents of one batch in memory. If you know all lengths and can read
any document by its number, use `GlobalBatchDataset`, which reads a rank's own tokens only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from spanwise.batch.global_batches import GlobalBatches, check_state, loaded
from spanwise.masks.checks import check_index


class GlobalBatchStream(IterableDataset[dict[str, Any]]):
    """One rank's batches of a stream of documents, for a `torch.utils.data.DataLoader` with ``batch_size=None``.

    A batch takes documents in their order and ends before the first one that does not fit. The batches are dicts as
    those of `GlobalBatchDataset`, and workers take turns alike. The state counts documents of the stream.

    Args:
        documents: an iterable of arrays or tensors of tokens, ``[tokens]``, or of mappings that hold them as
            ``"input_ids"``, such as a stream of Hugging Face's datasets. Iterated anew for each iteration, with the
            same documents on every rank and in every worker. To resume, ``documents.skip(n)`` is called if there is
            such a method; otherwise n documents are read and dropped.
        num_ranks, tokens_per_rank: as `GlobalBatches` takes them.
        rank: the rank whose tensors are made.
        drop_last: leave out the batch in which the documents end, unless it is full.
        options: other arguments of `GlobalBatches` that concern one batch (``pad``, ``mask``, …) and of `make_plan`.

    Raises:
        ValueError: an option that needs all lengths, a `rank` that is none of the ranks; while iterating, a document
            longer than a batch, or several workers that a torch `IterableDataset` would share its documents among.

    >>> import numpy as np, spanwise
    >>> documents = [np.arange(n) for n in (6, 3, 5, 9, 2)]
    >>> stream = spanwise.GlobalBatchStream(documents, num_ranks=1, tokens_per_rank=10, rank=0)
    >>> [(batch["input_ids"].numel(), batch["state"]["position"]) for batch in stream]
    [(9, 2), (5, 3), (9, 4), (2, 5)]
    """

    def __init__(
        self,
        documents: Iterable[Any],
        num_ranks: int | tuple[int, int],
        tokens_per_rank: int,
        rank: int,
        *,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if wrong := sorted({"seed", "max_document", "cut", "epochs"} & set(options)):
            raise ValueError(
                f"a stream is taken in its order, its documents whole: leave {', '.join(wrong)} out, shuffle and cut "
                f"the documents before"
            )
        checked = GlobalBatches([1], num_ranks, tokens_per_rank, drop_last=True, **options)
        self.batch_tokens = checked.batch_tokens
        self.documents, self.rank, self.drop_last = documents, check_index(rank, "rank"), drop_last
        if not 0 <= self.rank < checked.size:
            raise ValueError(f"rank must be in [0, {checked.size}), the ranks of the batches, got {rank}")
        self._arguments = (num_ranks, tokens_per_rank)
        self._options = options
        self._start = self._position = 0

    @property
    def config(self) -> str:
        """Hex digest of the tokens of a batch; the documents are not part of it."""
        return hashlib.blake2b(f"stream {self.batch_tokens}".encode(), digest_size=16).hexdigest()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if workers > 1 and isinstance(self.documents, IterableDataset):
            raise ValueError(
                f"{type(self.documents).__name__} is a torch IterableDataset, which may give each of {workers} workers "
                f"other documents, and some would be lost: use num_workers=1, or give an iterable that does not share"
            )
        self._position = self._start
        groups = self._groups(self._start)
        while turn := list(itertools.islice(groups, workers)):
            self._position = turn[-1][1]
            if worker >= len(turn):
                return
            documents, after = turn[worker]
            (batch,) = GlobalBatches([len(tokens) for tokens in documents], *self._arguments, **self._options)
            yield loaded(batch, documents, self.rank, after, self.config)

    def _groups(self, skip: int) -> Iterator[tuple[list[Any], int]]:
        """The documents of each batch, and the number of documents of the stream up to its end."""
        group: list[Any] = []
        tokens, number = 0, skip
        for given in self._from(skip):
            document = given["input_ids"] if isinstance(given, Mapping) else given
            length = len(document)
            if length > self.batch_tokens:
                raise ValueError(
                    f"document {number} of the stream has {length:,} tokens, and a global batch at most "
                    f"{self.batch_tokens:,}: raise tokens_per_rank, or cut the document before"
                )
            if tokens + length > self.batch_tokens:
                yield group, number
                group, tokens = [], 0
            group.append(document)
            tokens, number = tokens + length, number + 1
        if tokens and not (self.drop_last and tokens < self.batch_tokens):
            yield group, number

    def _from(self, skip: int) -> Iterator[Any]:
        if skip and hasattr(self.documents, "skip"):
            return iter(self.documents.skip(skip))
        return itertools.islice(self.documents, skip, None)

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that this object has yielded end, in documents, and a digest of the size of a batch."""
        return {"position": self._position, "config": self.config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin where `state` says; ``ValueError`` for a state of batches of another size."""
        self._start = self._position = check_state(state, self.config, "num_ranks * tokens_per_rank")
