"""The problem that a balancer solves, and the interface of balancers.

A balancer is any object with ``assign(problem, num_ranks)``. It returns an owner for each block, or a `Layout` where it
does not assign whole blocks. `balancers.assign_layout` runs one and checks its answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spanwise.layouts.layout import Layout
from spanwise.layouts.runs import ragged_arange
from spanwise.masks import even_runs
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.checks import check_finite, check_offset_rows, check_positive
from spanwise.masks.span_mask import SpanMask


@dataclass(frozen=True, eq=False)
class LayoutProblem:
    """Everything that a balancer reads: masks, their weights, block size, documents.

    Args:
        masks: name -> mask; all self-attention masks of one model over the same tokens. A mask of batch 1 serves every
            batch row.
        weights: name -> positive number, usually the number of layers that use the mask; default 1. `area`,
            `block_area` and `block_counts` are sums over the masks, each times its weight.
        block_size: tokens of a block.
        cu_seqlens: document offsets, int ``[num_docs + 1]`` from 0 to ``seq_len``; or one such array for each batch
            row, as a list or an int array ``[batch, num_docs + 1]``; or None if unknown. Documents may be empty.
        square: whether the masks must be those of self-attention, ``q_len == kv_len``.

    Raises:
        ValueError: masks that are not square or differ in length or batch, weights for unknown masks or not positive,
            offsets that do not ascend from 0 to ``seq_len``.

    >>> from spanwise import LayoutProblem, SpanMask
    >>> problem = LayoutProblem({"default": SpanMask.causal(10)}, block_size=4)
    >>> problem.num_blocks, problem.block_area, problem.block_counts
    (3, array([[10, 26, 19]]), array([[1, 2, 3]]))
    """

    masks: Mapping[str, SpanMask]
    weights: Mapping[str, float] | None = None
    block_size: int = 128
    cu_seqlens: ArrayLike | Sequence[ArrayLike] | None = None
    square: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", dict(self.masks))
        weights = dict(self.weights or {})
        if not self.masks:
            raise ValueError("a layout problem needs at least one mask, got none")
        check_positive(self.block_size, "block_size")
        if self.seq_len < 1:
            raise ValueError("a layout needs at least one token, the masks have none")
        kv_len = next(iter(self.masks.values())).kv_len
        for name, mask in self.masks.items():
            wanted = (self.seq_len, self.seq_len if self.square else kv_len)
            if (mask.q_len, mask.kv_len) != wanted:
                raise ValueError(f"masks must be of {wanted} queries and keys, {name!r} is {mask.q_len, mask.kv_len}")
            if mask.batch_size not in (1, self.batch_size):
                raise ValueError(f"mask {name!r} has batch {mask.batch_size}, must be 1 or {self.batch_size}")
        for name, weight in weights.items():
            if name not in self.masks:
                raise ValueError(f"got a weight for mask {name!r}, but the masks are {sorted(self.masks)}")
            check_finite(weight, f"the weight of mask {name!r}", positive=True)
        object.__setattr__(self, "weights", {name: weights.get(name, 1) for name in self.masks})
        _ = self.cu_seqlens_rows  # bad offsets are an error here, where they are given

    @cached_property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return next(iter(self.masks.values())).q_len

    @cached_property
    def batch_size(self) -> int:
        """Batch rows of the masks; 1 if every mask serves all rows."""
        return max(mask.batch_size for mask in self.masks.values())

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence, the last one possibly short."""
        return -(-self.seq_len // self.block_size)

    @cached_property
    def area(self) -> NDArray[Any]:
        """Keys that each row reads: ``[batch, seq_len]``, int64 if the weights are ints, else float64."""
        return self._weighted({name: mask.area() for name, mask in self.masks.items()})

    @cached_property
    def block_area(self) -> NDArray[Any]:
        """`area` of each block: ``[batch, num_blocks]``, same dtype."""
        return np.add.reduceat(self.area, np.arange(0, self.seq_len, self.block_size), axis=1)

    @cached_property
    def block_counts(self) -> NDArray[Any]:
        """Non-empty kv blocks of each q block: ``[batch, num_blocks]``, int64 if the weights are ints, else float64."""
        return self._weighted({name: mask.block_counts(self.block_size) for name, mask in self.masks.items()})

    @cached_property
    def documents(self) -> tuple[Int64, ...]:
        """Offsets of the runs of each batch row that no span of any mask crosses, from 0 to the length.

        A run can be laid out anywhere without reading more, whether or not it is a document of the caller.
        """
        found = (cuts(list(self.masks.values()), [row]) for row in range(self.batch_size))
        return tuple(np.concatenate([[0], each, [self.seq_len]]) for each in found)

    @cached_property
    def work_before(self) -> Float64:
        """`area` before each token, ``[batch, seq_len + 1]``."""
        before = np.zeros((self.batch_size, self.seq_len + 1))
        np.cumsum(self.area, axis=1, out=before[:, 1:])
        return before

    @cached_property
    def cu_seqlens_rows(self) -> tuple[Int64, ...] | None:
        """`cu_seqlens` as int64 arrays, one for each batch row or a single one for all; None if unknown."""
        given: Any = self.cu_seqlens
        if given is None:
            return None
        rows = check_offset_rows(given, self.seq_len)
        if len(rows) not in (1, self.batch_size):
            raise ValueError(f"cu_seqlens has {len(rows)} rows, must have 1 or {self.batch_size}, as many as the masks")
        return rows

    def _weighted(self, figures: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        weights = cast(Mapping[str, float], self.weights)
        # Sorted by name, not in the caller's order: float sums must be the same on every rank.
        total: NDArray[Any] = np.zeros(1, np.int64)
        for name in sorted(figures):
            total = total + (figures[name] if weights[name] == 1 else weights[name] * figures[name])
        return total


def cuts(masks: Sequence[SpanMask], rows: Iterable[int]) -> Int64:
    """Positions inside the sequence that no span of any mask crosses in these batch rows, ascending."""
    of = (slot.crossed for row in rows for mask in masks for slot in mask.even_runs(row))
    return ragged_arange(even_runs.outside(of, masks[0].q_len))


@runtime_checkable
class LoadBalancer(Protocol):
    """Assigns the blocks of a sequence to ranks. The same problem must give the same answer on every host.

    >>> import numpy as np
    >>> from spanwise import LoadBalancer, SpanMask, make_plan
    >>> class RoundRobin:
    ...     def assign(self, problem, num_ranks):
    ...         return np.arange(problem.num_blocks) % num_ranks
    >>> isinstance(RoundRobin(), LoadBalancer)
    True
    >>> plan = make_plan(SpanMask.causal(8), 2, balancer=RoundRobin(), block_size=2, exchange="needed")
    >>> plan.layout.runs(1)
    array([[2, 4],
           [6, 8]])
    """

    def assign(self, problem: LayoutProblem, num_ranks: int) -> ArrayLike | Layout:
        """Owner of each block, int ``[num_blocks]`` or ``[batch, num_blocks]``, or a `Layout`."""
