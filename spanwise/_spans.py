"""Array functions behind :class:`spanwise.mask.SpanMask`, on plain numpy arrays.

A mask is a pair ``start, end`` of int32 arrays ``[batch, num_spans, q_len]``: row ``i`` of batch row ``b`` reads the
keys ``start[b, j, i] <= k < end[b, j, i]`` of every slot ``j``. *Canonical* means: the non-empty spans of a row come
first, ascending, disjoint and not touching; empty slots are ``(0, 0)``; no trailing slot is empty in every row. Two
masks are equal exactly when their canonical arrays are.

Most unions here rest on *chains*. Neighbouring rows of a mask usually read neighbouring keys, so a maximal stretch of
rows whose starts and ends both never decrease and which leave no gap reads exactly ``[first start, last end)``. A
document mask of a million rows is a few thousand chains at most, found with a few vector operations; only the chains
are sorted. A mask without any such structure has as many chains as rows, and the result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

INT32_MAX = 2**31 - 1


# ---------------------------------------------------------------- canonical form


def is_canonical(start: IntArray, end: IntArray) -> bool:
    """Whether arrays ``[batch, num_spans, q_len]`` with ``0 <= start <= end`` are canonical; no sort."""
    num_spans = start.shape[1]
    filled = start < end
    if bool((~filled & (end != 0)).any()):
        return False
    if num_spans == 1:
        return True
    if not bool(filled[:, -1].any()):
        return False
    later = filled[:, 1:]
    return not bool((later & (~filled[:, :-1] | (start[:, 1:] <= end[:, :-1]))).any())


def canonicalise(start: IntArray, end: IntArray, *, allow_overlap: bool) -> tuple[Int32, Int32]:
    """Canonical form of spans that ascend by start within each row (empty slots may stand anywhere).

    Touching spans are merged; overlapping ones too if ``allow_overlap``, otherwise they, and spans out of order, raise
    ``ValueError`` naming the row. Takes one pass a slot and never sorts.
    """
    batch, num_spans, q_len = start.shape
    if is_canonical(start, end):
        return np.ascontiguousarray(start, np.int32), np.ascontiguousarray(end, np.int32)
    if num_spans == 1:
        filled = start < end
        return (start * filled).astype(np.int32), (end * filled).astype(np.int32)
    out_start = np.zeros((batch, num_spans, q_len), np.int32)
    out_end = np.zeros((batch, num_spans, q_len), np.int32)
    slot = np.full((batch, q_len), -1, np.int64)  # slot of the row's latest span
    reach = np.full((batch, q_len), -1, np.int64)  # its end
    for j in range(num_spans):
        b, i = np.nonzero(start[:, j] < end[:, j])
        s, e, r = start[b, j, i], end[b, j, i], reach[b, i]
        if not allow_overlap and bool((s < r).any()):
            at = int(np.argmax(s < r))
            row = f"row {i[at]}" if batch == 1 else f"row {i[at]} of batch row {b[at]}"
            raise ValueError(
                f"the spans of a row must ascend and not overlap, but in {row} span {j} is [{s[at]}, {e[at]}) after a "
                f"span that ends at {r[at]}; sort and merge the spans of each row, or join masks with `|`"
            )
        fresh = s > r
        slot[b[fresh], i[fresh]] += 1
        target = slot[b, i]
        out_start[b[fresh], target[fresh], i[fresh]] = s[fresh]
        reach[b, i] = np.maximum(r, e)
        out_end[b, target, i] = reach[b, i]
    used = max(int(slot.max(initial=-1)) + 1, 1)
    return np.ascontiguousarray(out_start[:, :used]), np.ascontiguousarray(out_end[:, :used])


def trim(start: Int32, end: Int32) -> tuple[Int32, Int32]:
    """Drop the trailing slots that no row uses (arrays canonical otherwise)."""
    used = start.shape[1]
    while used > 1 and not bool(end[:, used - 1].any()):
        used -= 1
    return np.ascontiguousarray(start[:, :used]), np.ascontiguousarray(end[:, :used])


# ---------------------------------------------------------------- runs


def check_runs(runs: object, length: int, name: str) -> Int64:
    """Token runs as int64 ``[n, 2]``; ``ValueError`` unless ascending, disjoint, and inside ``[0, length)``."""
    array = np.asarray(runs)
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [n, 2], got {array.dtype} of shape {list(array.shape)}")
    array = array.astype(np.int64)
    flat = array.ravel()
    if flat[0] < 0 or flat[-1] > length or bool((flat[1:] < flat[:-1]).any()):
        raise ValueError(
            f"{name} must be ascending, disjoint runs [start, stop) inside [0, {length}), got {array.tolist()[:8]}"
        )
    return array


def run_lengths(runs: Int64) -> Int64:
    return runs[:, 1] - runs[:, 0]


def take_runs(array: npt.NDArray, runs: Int64) -> npt.NDArray:
    """The positions of ``runs`` of the last dim, concatenated (C-contiguous)."""
    pieces = [array[..., start:stop] for start, stop in runs.tolist()]
    if not pieces:
        return array[..., :0].copy()
    return np.concatenate(pieces, axis=-1) if len(pieces) > 1 else np.ascontiguousarray(pieces[0])


def positions_in_runs(positions: Int32, runs: Int64) -> Int32:
    """How many tokens of ``runs`` lie before each global position: the position's index in the buffer of the runs."""
    lengths = run_lengths(runs)
    before = np.cumsum(lengths) - lengths
    if len(runs) == 0:
        return np.zeros_like(positions)
    if len(runs) <= 6:  # a few vector passes beat a binary search for each position
        local = np.zeros_like(positions)
        for start, length in zip(runs[:, 0].tolist(), lengths.tolist(), strict=True):
            local += np.minimum(np.maximum(positions - np.int32(start), np.int32(0)), np.int32(length))
        return local
    starts32, lengths32, before32 = runs[:, 0].astype(np.int32), lengths.astype(np.int32), before.astype(np.int32)
    at = np.searchsorted(starts32, positions, side="right") - 1
    inside = np.minimum(positions - starts32[at], lengths32[at])
    return np.where(at < 0, np.int32(0), before32[at] + inside).astype(np.int32)


def merge_runs(start: IntArray, end: IntArray) -> Int64:
    """Union of non-empty intervals as ascending, disjoint, non-touching runs, int64 ``[n, 2]``."""
    if len(start) == 0:
        return np.zeros((0, 2), np.int64)
    order = np.argsort(start, kind="stable")
    start = start[order].astype(np.int64)
    reach = np.maximum.accumulate(end[order].astype(np.int64))
    first = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    last = np.append(first[1:], len(start)) - 1
    return np.stack([start[first], reach[last]], axis=1)


# ---------------------------------------------------------------- chains and unions over rows


def chain_breaks(start: IntArray, end: IntArray) -> Bool:
    """Where a chain of rows begins: bool ``[rows]``; see the module docstring. Spans must not be empty."""
    breaks = np.empty(len(start), np.bool_)
    breaks[:1] = True
    previous_start, previous_end = start[:-1], end[:-1]
    np.greater(start[1:], previous_end, out=breaks[1:])
    breaks[1:] |= start[1:] < previous_start
    breaks[1:] |= end[1:] < previous_end
    return breaks


def keys_read(start: Int32, end: Int32) -> Int64:
    """Union of all spans of ``[num_spans, rows]`` arrays as int64 runs ``[n, 2]``."""
    lows, highs = [], []
    for s, e in zip(start, end, strict=True):
        filled = s < e
        if not filled.all():
            s, e = s[filled], e[filled]
        if len(s) == 0:
            continue
        first = np.flatnonzero(chain_breaks(s, e))
        lows.append(s[first])
        highs.append(e[np.append(first[1:], len(s)) - 1])
    if not lows:
        return np.zeros((0, 2), np.int64)
    return merge_runs(np.concatenate(lows), np.concatenate(highs))


def keys_read_many(start: Int32, end: Int32, runs: Sequence[Int64]) -> list[Int64]:
    """``keys_read`` of several sets of rows at once: chains are found once for the whole mask, then cut at the runs."""
    owner = np.repeat(np.arange(len(runs)), [len(r) for r in runs])
    all_runs = np.concatenate([np.zeros((0, 2), np.int64), *runs])
    lows, highs, owners = [], [], []
    for s, e in zip(start, end, strict=True):
        filled = s < e
        low_row, high_row = all_runs[:, 0], all_runs[:, 1]
        if not filled.all():
            rows = np.flatnonzero(filled)
            s, e = s[rows], e[rows]
            low_row, high_row = np.searchsorted(rows, low_row), np.searchsorted(rows, high_row)
        keep = low_row < high_row
        low_row, high_row = low_row[keep], high_row[keep]
        breaks = np.flatnonzero(chain_breaks(s, e))
        # The chains that begin strictly inside a run, and one more for the run's own first row.
        first, last = np.searchsorted(breaks, low_row, side="right"), np.searchsorted(breaks, high_row, side="left")
        inside = last - first
        run_of = np.repeat(np.arange(len(low_row)), inside + 1)
        offset = np.arange(len(run_of)) - np.repeat(np.cumsum(inside + 1) - (inside + 1), inside + 1)
        begin = low_row[run_of]
        if len(breaks):
            chain = np.minimum(first[run_of] + offset, len(breaks))
            edges = np.append(breaks, len(s))
            begin = np.where(offset == 0, begin, edges[chain - 1])
            stop = np.where(offset == inside[run_of], high_row[run_of], edges[chain])
            lows.append(s[begin])
            highs.append(e[stop - 1])
            owners.append(owner[keep][run_of])
    if not lows:
        return [np.zeros((0, 2), np.int64) for _ in runs]
    low, high = np.concatenate(lows).astype(np.int64), np.concatenate(highs).astype(np.int64)
    who = np.concatenate(owners)
    # One line of keys a row set, far enough apart that they never touch: a single merge serves all of them.
    stride = int(high.max(initial=0)) + 1
    merged = merge_runs(low + who * stride, high + who * stride)
    cuts = np.searchsorted(merged[:, 0], np.arange(1, len(runs)) * stride)
    return [part - k * stride for k, part in enumerate(np.split(merged, cuts))]
