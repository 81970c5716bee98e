"""The tree of token sequences that share prefixes, from the sequences themselves.

Sorted sequences lie in the order in which a walk through their tree meets them, and two neighbours share the path of
their common prefix. So one pass over the sorted sequences makes the tree, with a few operations for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanwise.layouts.token_tree import TokenTree
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.checks import int_array


@dataclass(frozen=True, eq=False)
class SequenceTree:
    """Sequences as a tree. Made by `tree_from_sequences`.

    Attributes:
        tree: the `TokenTree`.
        ids: token ids in storage, int64 ``[tree.num_tokens]``.
        paths: for each sequence its tokens in storage, int64 ``[length]``: ``ids[paths[s]]`` is sequence ``s``.

    >>> from spanwise import tree_from_sequences
    >>> found = tree_from_sequences([[5, 6, 7], [5, 6, 8]])
    >>> found.ids, found.ids[found.paths[1]]
    (array([5, 6, 7, 8]), array([5, 6, 8]))
    """

    tree: TokenTree
    ids: Int64
    paths: tuple[Int64, ...]

    def weights(self, values: Iterable[Any] | None = None) -> Float64:
        """Sum over the sequences through each token, float64 ``[tree.num_tokens]``: weights of the loss terms.

        A sum of losses over separate sequences is a weighted sum over the tree's tokens, because equal paths have equal
        log-probabilities.

        Args:
            values: for each sequence a number, or an array with one for each of its tokens; default: 1. Such are
                advantages, or 0 for tokens of a prompt.

        Raises:
            ValueError: another number of sequences, or of tokens of one; values that are no numbers, or that need
                gradients, which do not pass through weights.

        >>> import spanwise
        >>> found = spanwise.tree_from_sequences([[5, 6, 7], [5, 6, 8, 9]])
        >>> found.weights(), found.weights([1.0, -0.5])
        (array([2., 2., 1., 1., 1.]), array([ 0.5,  0.5,  1. , -0.5, -0.5]))
        """
        given = [1.0] * len(self.paths) if values is None else list(values)
        if len(given) != len(self.paths):
            raise ValueError(f"values must have an entry for each of {len(self.paths)} sequences, got {len(given)}")
        total = np.zeros(self.tree.num_tokens)
        for s, (path, value) in enumerate(zip(self.paths, given, strict=True)):
            if getattr(value, "requires_grad", False):
                raise ValueError(
                    f"values[{s}] needs a gradient, and weights are constants: multiply log-probabilities by it instead"
                )
            each = np.asarray(value.double().cpu() if hasattr(value, "double") else value)
            if each.shape not in ((), path.shape) or (each.size and each.dtype.kind not in "biuf"):
                raise ValueError(
                    f"values[{s}] must be a number or one for each of the sequence's {len(path)} tokens, got {value!r}"
                )
            total[path] += each  # a path meets a token once
        return total


def tree_from_sequences(sequences: Iterable[Any]) -> SequenceTree:
    """The tree in which sequences share their common prefixes: each prefix is stored, and computed, once.

    Children are ordered so that few spans are needed: at most ``1 + log2(number of leaves)`` a row, and no depth-first
    order needs fewer.

    Args:
        sequences: token ids of each sequence, integers ``[length]``, at least 0: lists, numpy arrays or torch tensors.
            Sequences may be empty, equal, or prefixes of others.

    Raises:
        ValueError: a sequence that is not one-dimensional, or holds negative numbers.

    >>> import spanwise
    >>> found = spanwise.tree_from_sequences([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
    >>> found.tree.parents.tolist(), found.tree.lengths.tolist(), found.ids.tolist()
    ([-1, 0, 0], [2, 1, 2], [5, 6, 7, 8, 9])
    >>> [path.tolist() for path in found.paths]
    [[0, 1, 2], [0, 1, 3, 4], [0, 1]]
    """
    given = [_checked(ids, s) for s, ids in enumerate(sequences)]
    # Big-endian bytes of numbers that are not negative sort as the numbers do.
    order = sorted(range(len(given)), key=lambda s: given[s].astype(">u8").tobytes())
    nodes: list[_Node] = []
    ends = np.full(len(given), -1)
    path: list[int] = []  # from the root to the end of the sequence before
    before = np.zeros(0, np.int64)
    for s in order:
        shared = _common_prefix(before, given[s])
        while path and nodes[path[-1]].begin >= shared:
            path.pop()
        if path and nodes[path[-1]].end > shared:  # its first tokens become its new parent
            lower = nodes[path[-1]]
            nodes.append(_Node(lower.parent, lower.sequence, lower.begin, shared))
            path[-1] = lower.parent = len(nodes) - 1
            lower.begin = shared
        if len(given[s]) > shared:
            nodes.append(_Node(path[-1] if path else -1, s, shared, len(given[s])))
            path.append(len(nodes) - 1)
        ends[s] = path[-1] if path else -1
        before = given[s]
    return _in_storage(given, nodes, ends)


def _checked(ids: Any, s: int) -> Int64:
    array = int_array(ids, f"sequence {s}").astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"sequence {s} must be token ids [length], got shape {list(array.shape)}")
    if len(array) and array.min() < 0:
        raise ValueError(
            f"sequence {s} must hold token ids of at least 0, got {array.min()} at position {array.argmin()}; give "
            f"labels that are ignored a weight of 0 instead"
        )
    return array


def _common_prefix(a: Int64, b: Int64) -> int:
    shared = min(len(a), len(b))
    differ = a[:shared] != b[:shared]
    return int(differ.argmax()) if differ.any() else shared


@dataclass(slots=True)
class _Node:
    """A node as it is found: tokens ``[begin, end)`` of a sequence."""

    parent: int
    sequence: int
    begin: int
    end: int


def _in_storage(given: list[Int64], nodes: list[_Node], ends: Int64) -> SequenceTree:
    """Nodes depth-first, at each the child first whose subtree needs most spans; see `_spans_needed`."""
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]  # the last entry: roots
    for number, node in enumerate(nodes):
        children[node.parent].append(number)

    def walk(roots: list[int], key: Callable[[int], Any]) -> list[int]:
        """Depth-first, of each node's children the one with the largest key first."""
        found, stack = [], sorted(roots, key=key)
        while stack:
            found.append(stack.pop())
            stack += sorted(children[found[-1]], key=key)
        return found

    needed = [1] * len(nodes)
    for n in reversed(walk(children[-1], lambda n: n)):
        needed[n] = _spans_needed([needed[child] for child in children[n]])
    order = walk(children[-1], lambda n: (needed[n], -n))
    place = np.empty(len(order) + 1, np.int64)
    place[order], place[-1] = np.arange(len(order)), -1
    stored = [nodes[n] for n in order]
    tree = TokenTree(place[[node.parent for node in stored]], [node.end - node.begin for node in stored])
    ids = np.concatenate([np.zeros(0, np.int64), *(given[n.sequence][n.begin : n.end] for n in stored)])
    return SequenceTree(tree, ids, tuple(tree.paths(place[ends])))


def _spans_needed(children: list[int]) -> int:
    """Least spans of the fullest row below a node, from those of its children: the Horton-Strahler number.

    One child follows the node in storage and joins its span; rows below the others have one span more.
    """
    most, second = sorted([*children, 0, 0])[-1:-3:-1]
    return max(most, second + 1)
