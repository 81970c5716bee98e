"""Document runs: the runs of one document's tokens that a rank holds. Pure numpy, for all ranks at once.

A run begins at its document's first token, or *continues* one that another rank holds; and it ends with its
document, or another rank continues it. Tables of chunks, halos and the maps to exchange follow from the runs.
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
    """All runs, by batch row and position; arrays ``[n]``.

    Attributes:
        rank: that holds the run.
        row: batch row.
        start, stop: positions in the sequence.
        document: its document, numbered over all batch rows.
        opens, closes: whether it has the document's first token, its last token.
        at: index of its first token among the rank's tokens, ``row * T + token``.
    """

    rank: Int64
    row: Int64
    start: Int64
    stop: Int64
    document: Int64
    opens: Bool
    closes: Bool
    at: Int64

    def of(self, which: Bool | Int64) -> DocumentRuns:
        """The chosen runs."""
        return DocumentRuns(**{name: values[which] for name, values in self._asdict().items()})


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
    return DocumentRuns(
        rank=rank[piece],
        row=np.full(len(left), row, dtype=np.int64),
        start=left,
        stop=right,
        document=filled[document] + before,
        opens=left == first[document],
        closes=right == last[document],
        at=held[piece] + left - start[piece] + row * layout.tokens_per_rank[rank[piece]],
    )


def cut(mine: DocumentRuns, num_tokens: int, size: int) -> tuple[Int64, Int64, Int64]:
    """Chunks of `size` tokens of the runs of one rank; `num_tokens` fills the last chunk of each.

    Returns:
        `tokens`, `order` and `counts` of a `recurrence.route.ChunkTable`.
    """
    length = mine.stop - mine.start
    order, counts, place, step = _stepwise(-(-length // size))
    of, inside = order[place], step[:, None] * size + np.arange(size)
    tokens = np.where(inside < length[of][:, None], mine.at[of][:, None] + inside, num_tokens)
    return tokens, order, counts


def _stepwise(lengths: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Chains of these lengths, walked side by side, the longest first.

    Returns:
        The chains by length; chains that go on at each step; for each link, step by step, the place of its chain in
        that order, and its step.
    """
    order = np.argsort(-lengths, kind="stable")
    counts = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(lengths.max(initial=0)), side="right")
    step = np.repeat(np.arange(len(counts)), counts)
    place = ragged_arange(np.stack([np.zeros_like(counts), counts], axis=1))
    return order, counts, place, step


class Maps(NamedTuple):
    """Maps of runs that one rank sends and receives; runs are numbers in the list given to `exchanged`.

    Attributes:
        send: own runs, those for rank 0 first.
        recv: runs of other ranks, rank 0's first.
        send_counts, recv_counts: ``[num_ranks]``.
        chain: runs whose maps the rank composes, document beside document, step by step.
        counts: documents that go on at each step.
        reads: own runs whose entry states the rank needs, in the order in which they are reached.
        read_from: the place of its document in the steps.
        read_counts: runs reached by each step.
    """

    send: Int64
    recv: Int64
    send_counts: Int64
    recv_counts: Int64
    chain: Int64
    counts: Int64
    reads: Int64
    read_from: Int64
    read_counts: Int64


def exchanged(everyone: DocumentRuns, rank: int, num_ranks: int) -> Maps:
    """The maps that `rank` exchanges and composes; a map goes to all ranks with a later run of its document."""
    carried, document, reader, last = _readers(everyone, num_ranks)
    sent, to = _sent(everyone, everyone.rank == rank, document, reader, last)
    # The documents that this rank continues, up to its last run there.
    last, document = last[reader == rank], document[reader == rank]
    first = np.searchsorted(everyone.document, document, side="left")
    before = ragged_arange(np.stack([first, last], axis=1))
    recv = before[everyone.rank[before] != rank]
    recv = recv[np.argsort(everyone.rank[recv], kind="stable")]
    order, counts, at, step = _stepwise(last - first)
    reads = carried[everyone.rank[carried] == rank]
    read_at = np.argsort(order)[np.searchsorted(document, everyone.document[reads])]
    read_step = reads - first[order][read_at] - 1
    by_step = np.lexsort((read_at, read_step))
    return Maps(
        send=sent[np.lexsort((sent, to))],
        recv=recv,
        send_counts=np.bincount(to, minlength=num_ranks),
        recv_counts=np.bincount(everyone.rank[recv], minlength=num_ranks),
        chain=first[order][at] + step,
        counts=counts,
        reads=reads[by_step],
        read_from=read_at[by_step],
        read_counts=np.bincount(read_step, minlength=len(counts)),
    )


def _readers(everyone: DocumentRuns, num_ranks: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Runs that continue a document; each document and rank that continues it once, and its last run there."""
    carried = np.flatnonzero(~everyone.opens)
    pairs, place = np.unique((everyone.document * num_ranks + everyone.rank)[carried][::-1], return_index=True)
    return carried, pairs // num_ranks, pairs % num_ranks, carried[::-1][place]


def _sent(everyone: DocumentRuns, which: Bool, document: Int64, reader: Int64, last: Int64) -> tuple[Int64, Int64]:
    """Each of `which` runs that goes on elsewhere, once for each rank that reads its map."""
    own = np.flatnonzero(which & ~everyone.closes)
    low, high = (np.searchsorted(document, everyone.document[own], side=side) for side in ("left", "right"))
    sent, pair = np.repeat(own, high - low), ragged_arange(np.stack([low, high], axis=1))
    wanted = (reader[pair] != everyone.rank[sent]) & (last[pair] > sent)
    return sent[wanted], reader[pair[wanted]]


def map_traffic(everyone: DocumentRuns, num_ranks: int) -> Int64:
    """Maps that travel, int64 ``[receivers, senders]``."""
    _, document, reader, last = _readers(everyone, num_ranks)
    sent, to = _sent(everyone, np.ones(len(everyone.rank), dtype=bool), document, reader, last)
    return np.bincount(to * num_ranks + everyone.rank[sent], minlength=num_ranks**2).reshape(num_ranks, num_ranks)


def _begin(everyone: DocumentRuns) -> Int64:
    """Where each run begins in all batch rows, one after the other."""
    return everyone.row * int(everyone.stop.max(initial=0)) + everyone.start


def _floor(everyone: DocumentRuns, begin: Int64) -> Int64:
    """Where the document of each run begins."""
    return begin[np.searchsorted(everyone.document, everyone.document, side="left")]


def _halo_rows(everyone: DocumentRuns, begin: Int64, width: int) -> tuple[Int64, Int64, Int64]:
    """Each reader and token that it reads of another rank, once, ascending; and the run that holds the token."""
    runs, beyond = (
        np.stack([np.maximum(begin - width, _floor(everyone, begin)), begin], axis=1),
        begin.max(initial=0) + 1,
    )
    pairs = np.unique(np.repeat(everyone.rank, runs[:, 1] - runs[:, 0]) * beyond + ragged_arange(runs))
    reader, token = pairs // beyond, pairs % beyond
    holder = np.searchsorted(begin, token, side="right") - 1
    away = everyone.rank[holder] != reader
    return reader[away], token[away], holder[away]


class Halo(NamedTuple):
    """Rows before the runs of one rank; see `recurrence.route`."""

    send: Int64
    send_counts: Int64
    recv_counts: Int64
    stream: Int64
    outputs: Int64


def halo(everyone: DocumentRuns, rank: int, num_ranks: int, num_tokens: int, width: int) -> Halo:
    """What `rank` sends, receives and computes for a convolution that reads `width` tokens back."""
    begin = _begin(everyone)
    floor = _floor(everyone, begin)
    reader, token, holder = _halo_rows(everyone, begin, width)
    owner = everyone.rank[holder]
    gives, takes = np.flatnonzero(owner == rank), np.flatnonzero(reader == rank)
    takes = takes[np.argsort(owner[takes], kind="stable")]
    # Before each run its halo, or zeros before its document.
    mine = np.flatnonzero(everyone.rank == rank)
    size = everyone.stop[mine] - everyone.start[mine]
    place = ragged_arange(np.stack([begin[mine] - width, begin[mine] + size], axis=1))
    lowest, zero = np.repeat(floor[mine], size + width), num_tokens + len(takes)
    holder_of = np.searchsorted(begin, np.maximum(place, lowest), side="right") - 1
    own = everyone.at[holder_of] + place - begin[holder_of]
    by_token = np.argsort(token[takes])
    arrived = np.append(by_token, 0)[np.searchsorted(token[takes], place, sorter=by_token)]
    stream = np.where(everyone.rank[holder_of] == rank, own, num_tokens + arrived)
    stream = np.append(np.where(place < lowest, zero, stream), np.full(width, zero))
    before = np.cumsum(size + width) - size - width
    outputs = np.full(num_tokens, len(stream) - width)
    outputs[ragged_arange(np.stack([everyone.at[mine], everyone.at[mine] + size], axis=1))] = ragged_arange(
        np.stack([before, before + size], axis=1)
    )
    return Halo(
        send=(everyone.at[holder] + token - begin[holder])[gives],
        send_counts=np.bincount(reader[gives], minlength=num_ranks),
        recv_counts=np.bincount(owner[takes], minlength=num_ranks),
        stream=stream,
        outputs=outputs,
    )
