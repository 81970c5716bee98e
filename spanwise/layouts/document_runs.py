"""Document runs: the runs of one document's tokens that a rank holds. Pure numpy, for all ranks at once.

A run begins at its document's first token, or *continues* one that another rank holds; and it ends with its
document, or another rank continues it. What layers with a state exchange follows from the runs: maps and halos.
"""

# R batch rows (1 where one row serves all), T tokens of a rank in a row

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spanwise.layouts.layout import Layout
from spanwise.layouts.packing import Packing
from spanwise.layouts.runs import ragged_arange
from spanwise.masks.arrays import Bool, Int64


class DocumentRuns(NamedTuple):
    """All runs, ascending; arrays ``[n]``. Batch rows count as one sequence, one after the other.

    Attributes:
        rank: that holds the run.
        start, stop: positions in the sequence.
        document: its document, numbered over all batch rows.
        floor: where its document begins.
        closes: whether it has its document's last token.
        at: index of its first token among the rank's tokens, ``row * T + token``.
    """

    rank: Int64
    start: Int64
    stop: Int64
    document: Int64
    floor: Int64
    closes: Bool
    at: Int64

    @property
    def opens(self) -> Bool:
        """Whether each run has its document's first token."""
        return self.start == self.floor

    def holder(self, token: Int64) -> Int64:
        """The run that holds each token."""
        return np.searchsorted(self.start, token, side="right") - 1


def find(layout: Layout, documents: list[Packing]) -> DocumentRuns:
    """The runs of all ranks. One entry of `documents`, like one row of the layout, serves every batch row."""
    rows = range(max(layout.batch_size, len(documents)))
    found, before = [], 0
    for row in rows:
        of = documents[row % len(documents)]
        found.append(_of_row(layout, row, of, before))
        before += of.num_sequences
    return DocumentRuns(*(np.concatenate(values) for values in zip(*found, strict=True)))


def _of_row(layout: Layout, row: int, documents: Packing, before: int) -> DocumentRuns:
    pieces = layout.pieces(row if layout.batch_size > 1 else 0)
    held = np.concatenate([[0], np.cumsum(pieces[:, 2] - pieces[:, 1])])[:-1]  # tokens of all ranks before each piece
    held -= np.concatenate([[0], np.cumsum(layout.tokens_per_rank)])[pieces[:, 0]]
    by_start = np.argsort(pieces[:, 1], kind="stable")
    (rank, start, _), held = pieces[by_start].T, held[by_start]
    filled = np.flatnonzero(documents.q_lens > 0)
    first = documents.q_offsets[filled]
    last = first + documents.q_lens[filled]
    edges = np.unique(np.concatenate([start, first, last, [layout.seq_len]]))
    left, right = edges[:-1], edges[1:]
    document = np.searchsorted(first, left, side="right") - 1
    inside = (document >= 0) & (left < last[document]) if len(filled) else np.zeros(len(left), dtype=bool)
    left, right, document = left[inside], right[inside], document[inside]
    piece = np.searchsorted(start, left, side="right") - 1
    begin = row * layout.seq_len  # of the batch row
    return DocumentRuns(
        rank=rank[piece],
        start=begin + left,
        stop=begin + right,
        document=filled[document] + before,
        floor=begin + first[document],
        closes=right == last[document],
        at=held[piece] + left - start[piece] + row * layout.tokens_per_rank[rank[piece]],
    )


def maps(everyone: DocumentRuns, num_ranks: int) -> tuple[Int64, Int64]:
    """The runs whose maps a rank composes: all before its last run of each document that it continues.

    Returns:
        Ranks and runs, int64 ``[m]``; by document, rank, run. A map travels unless the rank holds the run itself.
    """
    carried = np.flatnonzero(~everyone.opens)[::-1]
    pair, place = np.unique((everyone.document * num_ranks + everyone.rank)[carried], return_index=True)
    first, last = np.searchsorted(everyone.document, pair // num_ranks), carried[place]
    return np.repeat(pair % num_ranks, last - first), ragged_arange(np.stack([first, last], axis=1))


def map_traffic(everyone: DocumentRuns, num_ranks: int) -> Int64:
    """Maps that travel, int64 ``[receivers, senders]``."""
    reader, run = maps(everyone, num_ranks)
    found = np.bincount(reader * num_ranks + everyone.rank[run], minlength=num_ranks**2)
    found = found.reshape(num_ranks, num_ranks)
    np.fill_diagonal(found, 0)
    return found


def halos(everyone: DocumentRuns, width: int) -> tuple[Int64, Int64]:
    """The tokens of other ranks that a rank reads, up to `width` before each of its runs, in the run's document.

    Returns:
        Ranks and tokens, int64 ``[m]``; ascending, each pair once.
    """
    runs = np.stack([np.maximum(everyone.start - width, everyone.floor), everyone.start], axis=1)
    beyond = everyone.stop.max(initial=0)
    pairs = np.unique(np.repeat(everyone.rank, runs[:, 1] - runs[:, 0]) * beyond + ragged_arange(runs))
    reader, token = pairs // beyond, pairs % beyond
    away = everyone.rank[everyone.holder(token)] != reader
    return reader[away], token[away]
