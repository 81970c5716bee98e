"""Plan of the varlen kernel: a span mask cut into *rounds*, each of which one variable-length flash call computes.

Pure numpy on the spans of one local problem; `varlen` executes the plan. A call takes sequences: consecutive queries
with consecutive keys, ascending on both sides. One sliding window applies to all, aligned at the bottom right corner.
Consecutive rows whose spans move like such a window form a *band*, which is one sequence:

- full: start and end stay (window −1, −1); causal: the end grows by one a row (−1, 0);
- sliding window: both grow, the start perhaps later than the end (width − 1, 0), and the end may stop first (left,
  right), as it does in the last rows of a two-sided window;
- all other rows become shorter bands, down to one row.

Bands that share keys or rows go into different rounds, as do those of the head and the tail of a document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spanwise.masks.span_mask import SpanMask

Window = tuple[int, int]  # keys to the left and to the right of the diagonal; -1 is no bound

_FULL: Window = (-1, -1)
_MOST_ROUNDS = 256
_MOST_WINDOWS = 16  # windows tried for bands of another shape


class Band(NamedTuple):
    """Rows ``[row, row_stop)`` over keys ``[key, key_stop)`` with a window; every row reads a key."""

    row: int
    row_stop: int
    key: int
    key_stop: int
    window: Window


@dataclasses.dataclass(frozen=True)
class Round:
    """One call. Sequence i has queries ``cu_seq_q[i : i + 2]`` and keys ``cu_seq_k[i : i + 2]``.

    Rows and keys that no band of the round covers are sequences with queries alone or with keys alone.

    Attributes:
        window: for all sequences: query i of a sequence of n queries and m keys reads the keys from i + m − n − left to
            i + m − n + right.
        cu_seq_q, cu_seq_k: int32 ``[sequences + 1]``, from 0 to the number of all rows or keys.
        max_q, max_k: bounds of the lengths of sequences, ``2 <= max_q <= max_k`` (see `_round`).
        rows: bool ``[batch * q_len]``, rows that read a key in this round.
        keys: bool ``[batch * kv_len]``, keys that are read in this round.
    """

    window: Window
    cu_seq_q: np.ndarray
    cu_seq_k: np.ndarray
    max_q: int
    max_k: int
    rows: np.ndarray
    keys: np.ndarray


def cut_rounds(mask: SpanMask) -> list[Round]:
    """Rounds for a mask; batch rows follow one another on one axis, of queries and of keys.

    Every (query, key) pair of the mask is in exactly one round, and no other pair is in any.

    The longest bands need a round for every window that occurs. Where windows are clipped, as at the ends of runs, each
    document has another one. Split further (`_split`), all need three windows. The way with fewer rounds is taken.

    Raises:
        ValueError: more than 256 rounds.
    """
    q_len, kv_len = mask.q_len, mask.kv_len
    bands = []
    for b in range(mask.batch_size):
        for first, last in zip(mask.start[b].astype(np.int64), mask.end[b].astype(np.int64), strict=True):
            for row, row_stop, key, key_stop, window in _bands(first, last):
                bands.append(
                    Band(row + b * q_len, row_stop + b * q_len, key + b * kv_len, key_stop + b * kv_len, window)
                )
    chosen = min(_pack(bands), _pack([part for band in bands for part in _split(band)]), key=len)
    if len(chosen) > _MOST_ROUNDS:
        raise ValueError(
            f"kernel 'varlen' would need more than {_MOST_ROUNDS} calls for this mask of {q_len} queries and {kv_len} "
            f"keys: its rows share keys, and their spans move like no window; use kernel='flex'"
        )
    return [_round(members, window, mask.batch_size * q_len, mask.batch_size * kv_len) for window, members in chosen]


def _bands(start: np.ndarray, end: np.ndarray) -> list[Band]:
    """Maximal bands of one span a row, ``[q_len]`` each."""
    if len(start) == 0:
        return []
    filled = end > start
    start_step, end_step = np.diff(start), np.diff(end)
    # A row that shares no key with the one before it is another document.
    joins = filled[1:] & filled[:-1] & (start[1:] < end[:-1])
    joins &= (start_step >= 0) & (start_step <= 1) & (end_step >= 0) & (end_step <= 1)
    # Within a band the start first stays, then grows; the end first grows, then stays.
    turns = (start_step[1:] < start_step[:-1]) | (end_step[1:] > end_step[:-1])
    joins[1:] &= ~(turns & joins[:-1])
    begins = np.flatnonzero(filled & np.concatenate(([True], ~joins)))
    stops = np.append(np.flatnonzero(~joins) + 1, len(start))
    stops = stops[np.searchsorted(stops, begins, side="right")]
    last = stops - 1
    rows, key, key_stop = stops - begins, start[begins], end[last]
    left = np.where(start[last] == key, -1, key_stop - start[last] - 1)
    grown = key_stop - end[begins]
    right = np.where(grown == 0, -1, rows - 1 - grown)
    table = np.stack([begins, stops, key, key_stop, left, right], axis=1).tolist()
    return [Band(a, b, c, d, (e, f)) for a, b, c, d, e, f in table]


def _split(band: Band) -> list[Band]:
    """The band as bands under the windows full, (−1, 0) and (0, −1), the same for all; long windows stay."""
    row, row_stop, key, key_stop, (left, right) = band
    if left == -1 and right <= 0:
        return [band]
    if right > 0:  # at the row from which on the end stays
        middle = row_stop - right
        width = left + 1 + right  # of a row that neither side clips
        first = key if left == -1 else max(key, key_stop - width)
        upper = Band(row, middle, key, key_stop, (-1 if first == key else key_stop - first - 1, 0))
        first = key if left == -1 else max(key, key_stop - width + 1)
        return [*_split(upper), *_split(Band(middle, row_stop, first, key_stop, (left, -1)))]
    if right == 0 and row_stop - row > left + 1:
        return [band]
    # Divide at the last row's first key: rows read a triangle before it, and a full or causal part from it on.
    corner = key_stop - left - 1
    rest = Band(row, row_stop, corner, key_stop, (-1, right))
    if key == corner:
        return [rest]
    return [Band(row, row_stop - 1, key, corner, _FULL if corner - key == 1 else (0, -1)), rest]


def _choose_windows(bands: Sequence[Band]) -> list[Window]:
    """A window for each band under which it reads the same keys as under its own; few different ones."""
    counts: dict[Window, int] = {}
    for band in bands:
        counts[band.window] = counts.get(band.window, 0) + 1
    common = sorted(counts, key=lambda window: (-counts[window], window))[:_MOST_WINDOWS]

    def fits(band: Band, window: Window) -> bool:
        lengths = band.key_stop - band.key, band.row_stop - band.row
        sides = zip(band.window, window, lengths, strict=True)
        return all(own == other or (own == -1 and other >= length - 1) for own, other, length in sides)

    common.sort(key=lambda window: -sum(fits(band, window) for band in bands))
    return [next((window for window in common if fits(band, window)), band.window) for band in bands]


def _pack(bands: Sequence[Band]) -> list[tuple[Window, list[Band]]]:
    """Put the bands into rounds: ascending and disjoint rows and keys, one window. Stops at one round too many."""
    if not bands:
        return []
    bands = sorted(bands)
    rounds: dict[Window, list[list[Band]]] = {}
    count = 0
    for band, window in zip(bands, _choose_windows(bands), strict=True):
        open_rounds = rounds.setdefault(window, [])
        for members in open_rounds:
            if members[-1].row_stop <= band.row and members[-1].key_stop <= band.key:
                members.append(band)
                break
        else:
            open_rounds.append([band])
            count += 1
            if count > _MOST_ROUNDS:
                break
    return [(window, members) for window in sorted(rounds) for members in rounds[window]]


def _round(bands: Sequence[Band], window: Window, num_rows: int, num_keys: int) -> Round:
    cu_q, cu_k = [0], [0]
    rows, keys = np.zeros(num_rows, dtype=bool), np.zeros(num_keys, dtype=bool)

    def add(row_stop: int, key_stop: int) -> None:
        if row_stop > cu_q[-1] or key_stop > cu_k[-1]:
            cu_q.append(row_stop)
            cu_k.append(key_stop)

    for band in bands:
        add(band.row, cu_k[-1])
        add(cu_q[-1], band.key)
        add(band.row_stop, band.key_stop)
        rows[band.row : band.row_stop] = True
        keys[band.key : band.key_stop] = True
    add(num_rows, cu_k[-1])
    add(cu_q[-1], num_keys)
    # Sequences without keys or queries compute nothing, so the bounds leave them out. Flash takes max_q == 1 for
    # decoding, one query in every sequence. It replaces a window side without a bound, or beyond max_k, by max_k, which
    # reaches the far corner only if max_k >= max_q.
    max_q = max(2, *(band.row_stop - band.row for band in bands))
    max_k = max(max_q, *(band.key_stop - band.key for band in bands))
    return Round(window, np.array(cu_q, np.int32), np.array(cu_k, np.int32), max_q, max_k, rows, keys)
