"""The storage that packed sequences lie in: offsets and lengths, checked."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks.arrays import Int64
from spanwise.masks.checks import check_length, check_offsets


def side_of(side: str, cu_seqlens: Any, padded: Any, length: SupportsIndex | None) -> tuple[Int64, Int64, int]:
    """Valid lengths, storage offsets and storage length of one side."""
    name = f"cu_seqlens_{side}"
    cu = check_offsets(cu_seqlens, name, start_at_zero=False)
    if cu[0] != 0:
        raise ValueError(
            f"{name} counts valid tokens and must begin with 0, got {cu[0]}; storage offsets are {name}_padded"
        )
    offsets = cu if padded is None else check_offsets(padded, f"{name}_padded", start_at_zero=False)
    if len(offsets) != len(cu):
        raise ValueError(f"{name} and {name}_padded must be equally long, got {len(cu)} and {len(offsets)} entries")
    lens, slots = np.diff(cu), np.diff(offsets)
    for s in np.flatnonzero(lens > slots)[:1]:
        raise ValueError(
            f"sequence {s} has {lens[s]} tokens in {name}, but {name}_padded gives it storage for {slots[s]} only"
        )
    lens.setflags(write=False)
    return lens, offsets, check_storage(f"{side}_len", offsets, length)


def check_storage(name: str, offsets: Int64, length: SupportsIndex | None) -> int:
    """Rows of storage: `length`, called `name`, which the slots must fit; the last offset if None."""
    if length is None:
        return int(offsets[-1])
    rows = check_length(length, name)
    if rows < offsets[-1]:
        raise ValueError(f"{name} = {rows} rows of storage are too few: the last sequence ends at {offsets[-1]}")
    return rows


def check_chunks(edges: Int64, num_ranks: int, kind: str = "") -> None:
    """Check that slots with these edges, 0 to the storage length, can be cut into dual chunks; `kind` is for errors."""
    for s in np.flatnonzero(np.diff(edges) % (2 * num_ranks))[:1]:
        last = len(edges) - 2
        what = "storage before sequence 0" if s == 0 else "storage after the last sequence"
        what = what if s in (0, last) else f"sequence {s - 1}"
        raise ValueError(
            f"{what} has a padded length of {edges[s + 1] - edges[s]} {kind}tokens, and the dual-chunk order needs a "
            f"multiple of 2 * num_ranks = {2 * num_ranks}; any other balancer needs no padding"
        )
