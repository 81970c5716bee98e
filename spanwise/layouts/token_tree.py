"""Trees of tokens that share prefixes, such as rollouts of one prompt: `TokenTree`, and one made from sequences.

At the head of the data flow, like `Packing`: `TokenTree.mask` makes the SpanMask of a plan; `batch.trees` cuts labels
and log-probabilities, which follow the edges of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks import trees
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.checks import check_index, int_array
from spanwise.masks.span_mask import SpanMask


@dataclass(frozen=True, init=False, eq=False, repr=False)
class TokenTree:
    """A tree of token runs, or several (a forest). Immutable; equal trees compare and hash equal.

    A *node* is a run of tokens; its *path* leads from the root to its end. Nodes lie in storage one after the other, in
    the order of their numbers. An *edge* leads from each token to the next one on a path: the last token of a node has
    an edge to the first token of each child. So each token but the first of a root is the target of exactly one edge.

    Args:
        parents: integers ``[num_nodes]``: the parent of each node, -1 for a root. Parents come before children.
        lengths: integers ``[num_nodes]``: tokens of each node, at least 0. A node without tokens changes no path.

    Attributes:
        parents, lengths: as given, read-only int64.

    Raises:
        ValueError: shapes that differ, negative lengths, a parent that does not exist or comes after its child, a
            circle.

    >>> from spanwise import TokenTree
    >>> tree = TokenTree([-1, 0, 0], [3, 2, 1])  # a prompt and two answers
    >>> tree.positions(), tree.parent_tokens()
    (array([0, 1, 2, 3, 4, 3]), array([-1,  0,  1,  2,  3,  2]))
    >>> tree.mask().area()
    array([[1, 2, 3, 4, 5, 4]])
    """

    parents: Int64
    lengths: Int64

    def __init__(self, parents: Any, lengths: Any) -> None:
        for name, given in zip(("parents", "lengths"), trees.checked(parents, lengths), strict=True):
            array = given.copy()  # the caller may write to its own later
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def pack(cls, several: Iterable[TokenTree]) -> TokenTree:
        """One forest of several trees, in storage one after the other.

        >>> TokenTree.pack([TokenTree([-1, 0], [2, 1]), TokenTree([-1], [4])]).parents
        array([-1,  0, -1])
        """
        trees = list(several)
        first = np.cumsum([0, *(len(tree.parents) for tree in trees)])
        parents = [np.where(t.parents >= 0, t.parents + n, -1) for t, n in zip(trees, first, strict=False)]
        none = np.zeros(0, np.int64)
        return cls(np.concatenate([none, *parents]), np.concatenate([none, *(tree.lengths for tree in trees)]))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, empty ones included."""
        return len(self.parents)

    @property
    def num_tokens(self) -> int:
        """Tokens in storage."""
        return int(self.lengths.sum())

    @property
    def leaves(self) -> Int64:
        """Nodes without children, ascending, int64."""
        inner = np.zeros(self.num_nodes, bool)
        inner[self.parents[self.parents >= 0]] = True
        return np.flatnonzero(~inner)

    def mask(self, *, window: SupportsIndex | None = None) -> SpanMask:
        """The mask over storage, see `SpanMask.tree`; a window of n reads n tokens before a row and the row itself.

        >>> TokenTree([-1, 0, 0], [3, 2, 1]).mask(window=1).area()
        array([[1, 2, 2, 2, 2, 2]])
        """
        return SpanMask.tree(self.parents, self.lengths, window=window)

    def positions(self) -> Int64:
        """Position of each token on its path, counted from the root, int64 ``[num_tokens]``."""
        return trees.positions(self.parents, self.lengths)

    def parent_tokens(self, steps: int = 1) -> Int64:
        """The token `steps` before each token on its path, int64 ``[num_tokens]``; -1 where the path has none.

        Raises:
            ValueError: steps that are no integer, or negative: a token may have several successors; see `shard_edges`.

        >>> TokenTree([-1, 0, 0], [1, 2, 2]).parent_tokens(2)
        array([-1, -1,  0, -1,  0])
        """
        steps = check_index(steps, "steps")
        if steps < 0:
            raise ValueError(f"a token of a tree may have several successors, got steps={steps}; see shard_edges")
        before = np.append(trees.parent_tokens(self.parents, self.lengths), -1)
        found = np.append(np.arange(self.num_tokens), -1)
        steps = min(steps, self.num_tokens + 1)
        for bit in range(steps.bit_length()):
            if steps >> bit & 1:
                found = before[found]
            before = before[before]
        return found[:-1]

    def paths(self, nodes: Any) -> list[Int64]:
        """The tokens from the root to the end of each of these nodes, int64 ``[length]`` each; none for node -1.

        Raises:
            ValueError: a node that does not exist.

        >>> tree = TokenTree([-1, 0, 0], [2, 3, 1])
        >>> [path.tolist() for path in tree.paths(tree.leaves)]
        [[0, 1, 2, 3, 4], [0, 1, 5]]
        """
        wanted = int_array(nodes, "nodes")
        for node in wanted[(wanted < -1) | (wanted >= self.num_nodes)][:1]:
            raise ValueError(f"nodes must be from 0 to {self.num_nodes - 1}, or -1 for an empty path, got {node}")
        parents, stop = self.parents.tolist(), np.cumsum(self.lengths).tolist()
        start = [0, *stop]
        found = []
        for node in wanted.tolist():
            runs = []
            while node >= 0:
                runs.append(np.arange(start[node], stop[node]))
                node = parents[node]
            found.append(np.concatenate([np.zeros(0, np.int64), *runs[::-1]]))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return np.array_equal(self.parents, other.parents) and np.array_equal(self.lengths, other.lengths)

    def __hash__(self) -> int:
        return hash((self.parents.tobytes(), self.lengths.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTree, (self.parents, self.lengths)

    def __repr__(self) -> str:
        return f"TokenTree({self.num_nodes} nodes, {self.num_tokens} tokens, {len(self.leaves)} leaves)"


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
                raise ValueError(f"values[{s}] needs a gradient: multiply log-probabilities by it instead")
            each = np.asarray(value.double().cpu() if hasattr(value, "double") else value)
            if each.shape not in ((), path.shape) or (each.size and each.dtype.kind not in "biuf"):
                raise ValueError(f"values[{s}] must be a number or {len(path)} of them, one a token, got {value!r}")
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
    given, root = [_checked(ids, s) for s, ids in enumerate(sequences)], _Node(0, 0, 0)
    # Sorted, the sequences lie in the order in which a walk through their tree meets them, and two neighbours share the
    # path of their common prefix. Big-endian bytes of numbers that are not negative sort as the numbers do.
    order = sorted(range(len(given)), key=lambda s: given[s].astype(">u8").tobytes())
    path, ends, before = [root], [root] * len(given), np.zeros(0, np.int64)  # from the root to the last sequence's end

    def close(begin: int) -> None:
        """Ends the nodes on the path that begin so late: all their children are known."""
        while len(path) > 1 and path[-1].begin >= begin:
            path[-2].children.append(path[-1])
            path.pop().sort()

    for s in order:
        both = min(len(before), len(given[s]))
        differ = np.flatnonzero(before[:both] != given[s][:both])
        shared = int(differ[0]) if len(differ) else both
        close(shared)
        if path[-1].end > shared:  # its first tokens become its new parent
            lower = path[-1]
            path[-1:] = [_Node(lower.sequence, lower.begin, shared), lower]
            lower.begin = shared
            close(shared)
        if len(given[s]) > shared:
            path.append(_Node(s, shared, len(given[s])))
        ends[s], before = path[-1], given[s]
    close(0)
    root.sort()
    nodes, parents, stack = list[_Node](), list[int](), [(root, -1)]
    while stack:
        node, parent = stack.pop()
        node.number = len(nodes) - 1
        nodes.append(node)
        parents.append(parent)
        stack += [(child, node.number) for child in reversed(node.children)]
    tree = TokenTree(parents[1:], [node.end - node.begin for node in nodes[1:]])
    ids = np.concatenate([np.zeros(0, np.int64), *(given[n.sequence][n.begin : n.end] for n in nodes[1:])])
    return SequenceTree(tree, ids, tuple(tree.paths([node.number for node in ends])))


def _checked(ids: Any, s: int) -> Int64:
    array = int_array(ids, f"sequence {s}").astype(np.int64)
    if array.ndim != 1 or array.min(initial=0) < 0:
        raise ValueError(
            f"sequence {s} must be token ids [length] of at least 0, got shape {list(array.shape)} and "
            f"{array.min(initial=0)}; give labels that are ignored a weight of 0 instead"
        )
    return array


@dataclass(slots=True)
class _Node:
    """Tokens ``[begin, end)`` of a sequence; `needed`: spans of the fullest row in it and below."""

    sequence: int
    begin: int
    end: int
    children: list[_Node] = field(default_factory=list)
    needed: int = 1
    number: int = -1

    def sort(self) -> None:
        """Puts the child first that needs most spans: it follows the node in storage and joins its span.

        Rows below the others have one span more. So `needed` is the Horton-Strahler number.
        """
        self.children.sort(key=lambda child: -child.needed)
        first, second = [*(child.needed for child in self.children[:2]), 0, 0][:2]
        self.needed = max(first, second + 1)
