"""Arrays of token runs: int64 ``[n, 2]`` of (start, stop), ascending and disjoint unless a function says otherwise."""

from __future__ import annotations

import numpy as np

from spanwise.masks.arrays import Int64


def ragged_arange(runs: Int64) -> Int64:
    """Concatenates ``arange(start, stop)`` over runs ``[num_runs, 2]`` without a loop: int64 ``[sum of lengths]``."""
    length = runs[:, 1] - runs[:, 0]
    position = np.cumsum(length) - length
    return np.arange(length.sum(), dtype=np.int64) + np.repeat(runs[:, 0] - position, length)


def positions_in(tokens: Int64, runs: Int64) -> Int64:
    """Index of each token among the tokens of ascending runs ``[n, 2]`` that contain it."""
    before = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
    run = np.searchsorted(runs[:, 0], tokens, side="right") - 1
    return before[run] + tokens - runs[run, 0]


def subtract_runs(runs: Int64, minus: Int64) -> Int64:
    """Tokens of ``runs`` that are not in ``minus``; both int64 ``[n, 2]``, ascending and disjoint."""
    if len(runs) == 0 or len(minus) == 0:
        return runs
    edges = np.unique(np.concatenate([runs.ravel(), minus.ravel()]))
    left, right = edges[:-1], edges[1:]
    # A position lies inside ascending disjoint runs when an odd number of their edges are at or before it. Where two
    # runs touch, the position appears as two edges, so they need no merging.
    in_runs, in_minus = (np.searchsorted(x.ravel(), left, side="right") % 2 == 1 for x in (runs, minus))
    keep = in_runs & ~in_minus
    first = keep & ~np.concatenate([[False], keep[:-1]])
    last = keep & ~np.concatenate([keep[1:], [False]])
    return np.stack([left[first], right[last]], axis=1)


def overlaps(runs: Int64, other: Int64) -> tuple[Int64, Int64]:
    """Overlaps of runs ``[n, 2]`` in any order with ascending, disjoint ones.

    Returns:
        For each overlap the index of the run, int64 ``[m]``, and the tokens in both, ``[m, 2]``; by run, ascending.

    >>> overlaps(np.array([[4, 9], [0, 2]]), np.array([[1, 5], [7, 8]]))
    (array([0, 0, 1]), array([[4, 5],
           [7, 8],
           [1, 2]]))
    """
    first = np.searchsorted(other[:, 1], runs[:, 0], side="right")
    last = np.searchsorted(other[:, 0], runs[:, 1], side="left")
    count = np.maximum(last - first, 0)
    run = np.repeat(np.arange(len(runs)), count)
    met = other[ragged_arange(np.column_stack([first, first + count]))]
    both = np.column_stack([np.maximum(met[:, 0], runs[run, 0]), np.minimum(met[:, 1], runs[run, 1])])
    return run, both


def merge_tokens(tokens: Int64) -> Int64:
    """The runs, int64 ``[n, 2]``, of ascending tokens: the inverse of `ragged_arange`."""
    if len(tokens) == 0:
        return np.empty((0, 2), dtype=np.int64)
    first = np.flatnonzero(np.diff(tokens, prepend=tokens[0] - 2) != 1)
    last = np.append(first[1:], len(tokens)) - 1
    return np.stack([tokens[first], tokens[last] + 1], axis=1)


def count_tokens(runs: Int64) -> int:
    """Number of tokens of runs ``[n, 2]``."""
    return int((runs[:, 1] - runs[:, 0]).sum())
