"""Document offsets: from position ids and attention masks of a batch, and of several masks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.masks.checks import int_array

Offsets = tuple[Int64, ...]  # one array for each batch row, or one for all


def of_positions(position_ids: Any) -> Offsets:
    """Offsets of each row of ``[tokens]`` or ``[batch, tokens]``: a document starts where positions do not go on."""
    rows = _rows(int_array(position_ids, "position_ids"), "position_ids", "take those of the text, position_ids[0]")
    return tuple(
        np.concatenate([[0], np.flatnonzero(np.diff(row) != 1) + 1, [len(row)]]).astype(np.int64) for row in rows
    )


def valid_runs(attention_mask: Any) -> tuple[Int64, Int64, int]:
    """First token and end of each row's tokens ``[batch]``, equal where all is padding, and the rows' length."""
    array = np.asarray(attention_mask)
    given = array if array.dtype == np.bool_ else int_array(attention_mask, "attention_mask")
    rows = _rows(given, "attention_mask", "give the mask of padding, [batch, tokens], from which it was made")
    if not np.isin(rows, (0, 1)).all():
        raise ValueError(
            f"attention_mask must be 1 for tokens and 0 for padding, got {rows.max()}; for documents that it "
            f"numbers, give cu_seqlens or position_ids"
        )
    valid = rows.astype(bool)
    length = valid.shape[1]
    count, first = valid.sum(axis=1), np.where(valid.any(axis=1), valid.argmax(axis=1), 0)
    stop = np.where(count > 0, length - valid[:, ::-1].argmax(axis=1), 0)
    for row in np.flatnonzero(stop - first != count)[:1]:
        raise ValueError(
            f"attention_mask has padding between the tokens of row {row}; padding must be on the left or the right"
        )
    return first.astype(np.int64), stop.astype(np.int64), length


def common(several: Sequence[Offsets | None]) -> Offsets | None:
    """The offsets of masks that are used together: those that all have, else None."""
    known = [one for one in several if one is not None]
    if not known or len(known) < len(several):
        return None
    most = max(known, key=len)
    alike = all(np.array_equal(one[row % len(one)], cu) for one in known for row, cu in enumerate(most))
    return most if alike else None


def stacked(rows: Sequence[tuple[Offsets | None, int]]) -> Offsets | None:
    """Offsets of the batch rows of several masks, from those of each and its batch size; None if one has none."""
    found = [offsets[row % len(offsets)] for offsets, batch in rows if offsets is not None for row in range(batch)]
    return tuple(found) if all(offsets is not None for offsets, _ in rows) else None


def _rows(array: np.ndarray, name: str, remedy: str) -> np.ndarray:
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise ValueError(
            f"{name} must be [tokens] or [batch, tokens], not empty, got shape {list(array.shape)}; {remedy}"
        )
    return np.atleast_2d(array)
