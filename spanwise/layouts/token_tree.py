"""TokenTree: runs of tokens that share prefixes, such as rollouts of one prompt or the turns of an agent.

At the head of the data flow, like `Packing`: `TokenTree.mask` makes the SpanMask of a plan; `batch.trees` cuts labels
and log-probabilities, which follow the edges of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from spanwise.masks import trees
from spanwise.masks.arrays import Int64
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

    def mask(self, *, window: SupportsIndex | None = None, max_spans: SupportsIndex = 64) -> SpanMask:
        """The mask over storage, see `SpanMask.tree`; a window of n reads n tokens before a row and the row itself.

        >>> TokenTree([-1, 0, 0], [3, 2, 1]).mask(window=1).area()
        array([[1, 2, 2, 2, 2, 2]])
        """
        return SpanMask.tree(self.parents, self.lengths, window=window, max_spans=max_spans)

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
            raise ValueError(
                f"a token of a tree has one token {-steps} before it on its path, and may have several after it; got "
                f"steps={steps}. Labels and other values of next tokens follow the edges: see spanwise.shard_edges"
            )
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

    def explain(self) -> str:
        """Tokens and pairs of attention, against the paths to all leaves as separate sequences; text for a person.

        >>> print(TokenTree([-1, 0, 0], [1000, 100, 200]).explain())
        1,300 tokens in 3 nodes, up to 2 spans a row
        2 paths as separate sequences: 2,300 tokens, 1.77 times as many
        pairs of attention: 825,650; 1,326,150 as separate sequences, 1.61 times as many
        """
        lengths = self.path_lengths()
        tokens, pairs = self.num_tokens, int((self.positions() + 1).sum())
        apart, pairs_apart = int(lengths.sum()), int((lengths * (lengths + 1) // 2).sum())
        spans = int(trees.chains(self.parents, self.lengths).depth.max(initial=0)) + 1
        times = [apart / max(tokens, 1), pairs_apart / max(pairs, 1)]
        return "\n".join(
            [
                f"{tokens:,} tokens in {self.num_nodes:,} nodes, up to {spans} span{'s' if spans > 1 else ''} a row",
                f"{len(lengths):,} paths as separate sequences: {apart:,} tokens, {times[0]:.2f} times as many",
                f"pairs of attention: {pairs:,}; {pairs_apart:,} as separate sequences, {times[1]:.2f} times as many",
            ]
        )

    def path_lengths(self) -> Int64:
        """Tokens of the path to each of the `leaves`, int64 ``[num_leaves]``.

        >>> TokenTree([-1, 0, 0], [3, 2, 1]).path_lengths()
        array([5, 4])
        """
        return trees.path_lengths(self.parents, self.lengths)[self.leaves]

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
