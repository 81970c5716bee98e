"""Trees of token runs as array functions: checked parents, spans of the rows, parent tokens, positions.

A node is a run of tokens. Nodes lie in storage in the order of their numbers, parents before children. A *chain* is a
maximal run of filled nodes in storage of which each is a child of the one before: its tokens and those of its ancestors
in the chain are one span. A row reads one span of its own chain and one of each chain above it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from spanwise.masks.arrays import Int32, Int64
from spanwise.masks.checks import check_length, check_lengths, int_array
from spanwise.masks.even_runs import EvenRuns, span_arrays
from spanwise.masks.spans import canonicalise


class Chains(NamedTuple):
    """The filled nodes of a forest and their chains; int64 ``[filled nodes]`` unless another shape is given.

    Attributes:
        start, stop: tokens of each node.
        above: the nearest filled ancestor, a number among filled nodes; -1 without one.
        chain: chain of each node; chains are numbered in storage order.
        first: first token of each chain, ``[chains]``.
        link: node above the first node of each chain, -1 without one, ``[chains]``.
        depth: chains above each chain, ``[chains]``.
    """

    start: Int64
    stop: Int64
    above: Int64
    chain: Int64
    first: Int64
    link: Int64
    depth: Int64


def checked(parents: Any, lengths: Any) -> tuple[Int64, Int64]:
    """Parents and lengths of the nodes, int64 ``[num_nodes]`` each; ``ValueError`` if they are no forest."""
    own, sizes = int_array(parents, "parents").astype(np.int64), check_lengths(lengths, "lengths")
    if own.ndim != 1 or len(own) != len(sizes):
        raise ValueError(
            f"parents and lengths must have an entry for each node, [num_nodes], got shapes {list(own.shape)} and "
            f"{list(sizes.shape)}"
        )
    check_length(int(sizes.sum()), "the sum of lengths")
    count = len(own)
    for node in np.flatnonzero((own < -1) | (own >= np.arange(count)))[:1]:
        raise ValueError(
            f"parents[{node}] = {own[node]} of {count} nodes: a parent is -1 for a root, or a node before its children"
        )
    return own, sizes


def chains(parents: Int64, lengths: Int64) -> Chains:
    """The chains of checked parents and lengths."""
    count = len(parents)
    # Empty nodes hand their parent on; each time twice as many in a row are skipped.
    above, empty = np.append(parents, -1), np.append(lengths == 0, False)
    while bool((skip := empty[above]).any()):
        above = np.where(skip, above[above], above)
    filled = np.flatnonzero(lengths > 0)
    number = np.full(count + 1, -1)
    number[filled] = np.arange(len(filled))
    stop = np.cumsum(lengths)[filled]
    start, above = stop - lengths[filled], number[above[filled]]
    opens = above != np.arange(len(filled)) - 1
    opens[:1] = True  # the first node follows no other
    chain, link = np.cumsum(opens) - 1, above[opens]
    depth, at = np.zeros(len(link), np.int64), link
    while bool((at >= 0).any()):
        depth += at >= 0
        at = np.where(at >= 0, link[chain[at]], -1)
    return Chains(start, stop, above, chain, start[opens], link, depth)


def spans(parents: Any, lengths: Any, window: SupportsIndex | None) -> tuple[Int32, Int32]:
    """Canonical ``start, end`` ``[1, num_spans, tokens]``; see `SpanMask.tree`."""
    nodes = checked(parents, lengths)
    of, total = chains(*nodes), int(nodes[1].sum())
    found, at = [], np.arange(len(of.start))  # of each node and level the last node on its path in a chain so deep
    for level in reversed(range(int(of.depth.max(initial=0)) + 1)):
        at = np.where(of.depth[of.chain[at]] > level, of.link[of.chain[at]], at)
        node = np.flatnonzero(of.depth[of.chain[at]] == level)
        start, own = of.start[node], (at[node] == node).astype(np.int64)
        end = np.where(own == 1, start + 1, of.stop[at[node]])  # the own chain ends with the row
        found.append(EvenRuns(start, of.stop[node], of.first[of.chain[at[node]]], end, 0 * own, own))
    starts, ends = (x[None] for x in span_arrays(found[::-1], total))
    if window is None:
        return starts, ends
    left = min(check_length(window, "window"), total)
    position = positions(*nodes).astype(np.int32)
    # A span follows the path, so its first token is at a known distance from the row.
    begin = np.where(starts < ends, position[np.minimum(starts, total - 1)], np.int32(0))
    clipped = starts + np.maximum(position - np.int32(left) - begin, np.int32(0))
    return canonicalise(np.minimum(clipped, ends), ends)


def parent_tokens(parents: Int64, lengths: Int64) -> Int64:
    """The token before each token on its path, int64 ``[tokens]``; -1 for the first token of a path."""
    of = chains(parents, lengths)
    before = np.arange(int(lengths.sum()), dtype=np.int64) - 1
    before[of.start] = np.append(of.stop, 0)[of.above] - 1
    return before


def positions(parents: Int64, lengths: Int64) -> Int64:
    """Number of tokens before each token on its path, int64 ``[tokens]``."""
    begin, above = np.append(lengths, 0), np.append(parents, -1)
    while bool((above >= 0).any()):  # tokens of each node and of those above it, each time of twice as many
        begin, above = begin + begin[above], above[above]
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(begin[:-1] - np.cumsum(lengths), lengths)
