"""Data sets of global batches, for a loader: of documents of known lengths, or of a stream.

    GlobalBatches -> GlobalBatchDataset -> DataLoader -> step
    documents, one after the other -> as many as fit a batch -> GlobalBatchStream -> DataLoader -> step

A data set of known lengths reads a rank's own tokens only. Of a stream every rank reads all documents, and keeps those
of one batch in memory.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from spanwise.batch.global_batches import DocumentSource, GlobalBatches
from spanwise.masks.checks import check_below, check_index


class GlobalBatchDataset(IterableDataset[dict[str, Any]]):
    """One rank's batches, for a `torch.utils.data.DataLoader` with ``batch_size=None``.

    Each batch is a dict: ``"input_ids"``, ``"labels"``, ``"position_ids"`` as `GlobalBatch.load` makes them;
    ``"plan"``, of all ranks; ``"num_valid"``, the number of labels on all ranks; ``"state"``, from which
    `load_state_dict` goes on with the next batch.

    Workers make the next batches, plans included, while a step runs. With n workers, each makes every n-th batch, and
    the loader brings them in order. To resume, save the ``"state"`` of the last batch that was trained on.
    `state_dict` is for loaders that call it in the workers, such as torchdata's ``StatefulDataLoader``: with workers, a
    call in the training process knows nothing of them.

    Args:
        batches: the same on every rank.
        source: ``source[document][start:stop]`` are tokens; picklable if workers read it.
        rank: the rank whose tokens are read: its place in the cp mesh of the plans.

    An iteration begins at the state that was loaded last; without one, at the first batch. Workers copy the data set
    when they start: under ``persistent_workers=True`` load a state before the loader's first iteration.

    >>> import numpy as np, spanwise
    >>> from torch.utils.data import DataLoader
    >>> lengths = [6, 3, 5, 9, 2]
    >>> source = [np.arange(n) for n in lengths]
    >>> batches = spanwise.GlobalBatches(lengths, num_ranks=1, tokens_per_rank=10)
    >>> loader = DataLoader(spanwise.GlobalBatchDataset(batches, source, rank=0), batch_size=None)
    >>> [(batch["input_ids"].numel(), batch["num_valid"], batch["state"]["position"]) for batch in loader]
    [(9, 7, 9), (5, 4, 14), (9, 8, 23), (2, 1, 25)]
    """

    def __init__(self, batches: GlobalBatches, source: DocumentSource, rank: int) -> None:
        self.batches, self.source = batches, source
        self.rank = check_below(rank, batches.size, "rank", ", the ranks of the batches")
        self.config, self.end = batches.config, batches.end
        self._start = self._position = 0

    def _turns(self, position: int, workers: int) -> Iterator[tuple[GlobalBatches, DocumentSource, int, int]]:
        """The batches and documents from `position` on, where each batch begins in them, and the position behind it."""
        while (after := self.batches.next_position(position)) is not None:
            yield self.batches, self.source, position, after
            position = after

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        turns = self._turns(self._start, workers)
        self._position = self._start
        # A round holds a batch for each worker. The state of a worker is where its next round begins.
        while turn := list(itertools.islice(turns, workers)):
            self._position = turn[-1][3]
            if worker >= len(turn):
                return
            batches, source, begin, after = turn[worker]
            batch = batches.at(begin)
            batch.plan.compute()  # in the worker: what the plan has computed travels with it
            _ = batch.plan.fingerprint
            state = {"position": after, "config": self.config}
            yield batch.load(source, self.rank) | {"plan": batch.plan, "num_valid": batch.num_valid, "state": state}

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that this object has yielded end, and a digest of what decides the batches."""
        return {"position": self._position, "config": self.config}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin where `state` says.

        Raises:
            ValueError: `state` is of other batches, or lies behind the last epoch.
        """
        if not isinstance(state, Mapping) or state.get("config") != self.config or "position" not in state:
            raise ValueError(f"the state is of other batches, and not of these arguments: {state!r}")
        position = check_index(state["position"], "position")
        if position < 0 or (self.end is not None and position > self.end):
            raise ValueError(f"the position of the state is token {position}; the documents end at {self.end}")
        self._start = self._position = position


class GlobalBatchStream(GlobalBatchDataset):
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
            raise ValueError(f"a stream has whole documents in their order: leave {', '.join(wrong)} out")
        # Of a made-up document: they check the options and give the sizes.
        super().__init__(GlobalBatches([1], num_ranks, tokens_per_rank, drop_last=True, **options), [], rank)
        self.documents, self.drop_last = documents, drop_last
        self._arguments, self._options = (num_ranks, tokens_per_rank), options
        # The documents are not part of the digest, and have no known end.
        self.config = hashlib.blake2b(f"stream {self.batches.batch_tokens}".encode(), digest_size=16).hexdigest()
        self.end = None

    def _turns(self, position: int, workers: int) -> Iterator[tuple[GlobalBatches, DocumentSource, int, int]]:
        """Positions count documents of the stream; each batch has its own `GlobalBatches`."""
        if workers > 1 and isinstance(self.documents, IterableDataset):
            name = type(self.documents).__name__
            raise ValueError(f"{name} is a torch IterableDataset, which {workers} workers may share: use num_workers=1")
        stream: Any = self.documents
        skips = position and hasattr(stream, "skip")
        documents = stream.skip(position) if skips else itertools.islice(stream, position, None)
        group: list[Any] = []
        lengths: list[int] = []
        most = self.batches.batch_tokens
        for number, given in enumerate(documents, position):
            document = given["input_ids"] if isinstance(given, Mapping) else given
            if len(document) > most:
                raise ValueError(f"document {number} has {len(document):,} tokens, a batch at most {most:,}")
            if sum(lengths) + len(document) > most:
                yield GlobalBatches(lengths, *self._arguments, **self._options), group, 0, number
                group, lengths = [], []
            group.append(document)
            lengths.append(len(document))
            position = number + 1
        if any(lengths) and not (self.drop_last and sum(lengths) < most):
            yield GlobalBatches(lengths, *self._arguments, **self._options), group, 0, position
