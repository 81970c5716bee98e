"""Heaps, trees of maxima over ranges, and orders of joined nodes, in compiled code: the tools of `machine`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit  # type: ignore[import-untyped, unused-ignore]
from numba.core import event  # type: ignore[import-untyped, unused-ignore]

from spanwise.overlap.arrays import Ints

GONE = -(2**61)  # bytes of a position that no longer counts: no later sum comes near zero

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The function as machine code, kept on disk where that is possible.

    It counts no references to arrays and so cannot make any: callers pass all. Counting takes 1 us a node in calls, and
    functions compile twice as long with it.
    """
    options: dict[str, Any] = {"_nrt": False}
    try:
        fast = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache: a read-only installation without a home
        fast = njit(**options)(function)
    return cast(_Function, fast)


@functools.cache
def _notice() -> None:
    logging.getLogger("spanwise").warning("spanwise: compiling the scheduler, once; this takes some seconds")


class _Notice(event.Listener):  # type: ignore[misc, unused-ignore]
    def on_start(self, event: Any) -> None:
        _notice()

    def on_end(self, event: Any) -> None:
        pass


def noticed() -> AbstractContextManager[None]:
    """Log a line where the calls inside compile first."""
    return cast("AbstractContextManager[None]", event.install_listener("numba:compile", _Notice()))


@compiled
def push(heaps, sizes, row, item):  # type: ignore[no-untyped-def]
    """Add an item to one of the heaps, which are rows."""
    at = sizes[row]
    while at > 0 and heaps[row, (at - 1) >> 1] > item:
        heaps[row, at] = heaps[row, (at - 1) >> 1]
        at = (at - 1) >> 1
    heaps[row, at] = item
    sizes[row] += 1


@compiled
def pop(heaps, sizes, row):  # type: ignore[no-untyped-def]
    """Remove and return the smallest item of a heap."""
    size = sizes[row] - 1
    top, item, at = heaps[row, 0], heaps[row, size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heaps[row, child + 1] < heaps[row, child]:
            child += 1
        if item <= heaps[row, child]:
            break
        heaps[row, at] = heaps[row, child]
        at = child
    heaps[row, at] = item
    sizes[row] = size
    return top


def new_tree(values: Ints) -> tuple[Ints, Ints]:
    """A tree of maxima over these values, and its marks; empty for no values."""
    size = 1
    while size < len(values) + 2 and len(values):
        size *= 2
    tree = np.full(2 * size, GONE)
    tree[size + 1 : size + 1 + len(values)] = values
    while size > 1:
        tree[size // 2 : size] = np.maximum(tree[size : 2 * size : 2], tree[size + 1 : 2 * size : 2])
        size //= 2
    return tree, np.zeros(len(tree), np.int64)


@compiled
def most(tree, marks, first, end):  # type: ignore[no-untyped-def]
    """Most bytes over the positions from `first` to before `end`; `marks` of a parent are bytes of all below it."""
    size = len(tree) // 2
    left, right = first + size, end + size + 1
    of_left, of_right = GONE, GONE
    while left ^ right ^ 1:
        if not left & 1:
            of_left = max(of_left, tree[left ^ 1])
        if right & 1:
            of_right = max(of_right, tree[right ^ 1])
        left >>= 1
        right >>= 1
        of_left += marks[left]
        of_right += marks[right]
    found = max(of_left, of_right)
    while left > 1:
        left >>= 1
        found += marks[left]
    return found


@compiled
def add(tree, marks, first, end, num_bytes):  # type: ignore[no-untyped-def]
    """Add bytes to the positions from `first` to before `end`."""
    if first >= end:
        return
    size = len(tree) // 2
    left, right = first + size, end + size + 1
    while left ^ right ^ 1:
        if not left & 1:
            tree[left ^ 1] += num_bytes
            marks[left ^ 1] += num_bytes
        if right & 1:
            tree[right ^ 1] += num_bytes
            marks[right ^ 1] += num_bytes
        left >>= 1
        right >>= 1
        tree[left] = max(tree[2 * left], tree[2 * left + 1]) + marks[left]
        tree[right] = max(tree[2 * right], tree[2 * right + 1]) + marks[right]
    while left > 1:
        left >>= 1
        tree[left] = max(tree[2 * left], tree[2 * left + 1]) + marks[left]


@compiled
def order_units(graph, unit, key, node_of_key, members, begins, missing, heaps, sizes, found):  # type: ignore[no-untyped-def]
    """Fill `found` with nodes, whole units at once: of those whose dependencies are there, the one of the smallest key.

    Returns:
        How many were found; fewer than all if units wait for one another.
    """
    count = len(unit)
    for i in range(count):
        missing[unit[i]] += graph.deps_at[i + 1] - graph.deps_at[i]
    for i in range(count):
        if unit[i] == i and missing[i] == 0:
            push(heaps, sizes, 0, key[i])
    num_found = 0
    while sizes[0]:
        now = unit[node_of_key[pop(heaps, sizes, 0)]]
        for at in range(begins[now], begins[now + 1]):
            member = members[at]
            found[num_found] = member
            num_found += 1
            for user in range(graph.users_at[member], graph.users_at[member + 1]):
                other = unit[graph.users[user]]
                if other != now:
                    missing[other] -= 1
                    if missing[other] == 0:
                        push(heaps, sizes, 0, key[other])
    return num_found
