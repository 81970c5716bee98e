"""Eager all-to-alls on gloo post their own receives and sends: values, lifetimes, and attention on top of them.

Threaded ranks take torch's operator instead, so that all of this runs on real processes. Every test makes one call of
the pool with many cases in it: a call makes a new process group, which takes longer than most cases.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise import SpanMask, _torch
from spanwise.attention.kernels.reference import Reference
from tests.limits import HANG
from tests.oracle import Problem, make_problem
from tests.ranks.calls import errors, step
from tests.ranks.gloo import GlooPool, hear, tell

# Rows that rank s (first index) sends to rank t.
SIZES = {
    "uneven": [[1, 0, 2], [0, 3, 1], [2, 2, 0]],
    "one way": [[0, 5, 0], [0, 0, 7], [0, 0, 0]],  # rank 2 sends nothing, rank 0 receives nothing
    "own rows alone": [[4, 0, 0], [0, 0, 0], [0, 0, 2]],
    "nothing": [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    "large": [[3, 4000, 0], [9000, 0, 1], [70, 800, 9]],  # more than a socket holds at once
}
ROWS = ((), (3,), (0,), (40,))  # shapes of one row
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def rows_between(
    sender: int, receiver: int, count: int, row: tuple[int, ...], dtype: torch.dtype, key: int
) -> torch.Tensor:
    """Rows that no other pair of ranks and no other exchange (`key`) sends; bfloat16 holds every number below 256."""
    first = 67 * sender + 31 * receiver + 13 * key
    return (torch.arange(count * int(np.prod(row))).view(count, *row) + first).remainder(251).to(dtype)


def begin(rank: int, name: str, sizes: list[list[int]], row: tuple[int, ...], dtype: torch.dtype, key: int) -> Any:
    """One exchange under way, and what is to arrive."""
    ranks = range(len(sizes))
    sent = torch.cat([rows_between(rank, peer, sizes[rank][peer], row, dtype, key) for peer in ranks])
    recv_sizes = [sizes[peer][rank] for peer in ranks]
    pending = _torch.start_all_to_all(sent, recv_sizes, sizes[rank], name)
    shape = sent.shape
    del sent  # what takes its place in memory must not travel
    _noise = [torch.full(shape, 255, dtype=dtype) for _ in range(3)]
    expected = torch.cat([rows_between(peer, rank, sizes[peer][rank], row, dtype, key) for peer in ranks])
    return pending, expected


def same(received: torch.Tensor, expected: torch.Tensor) -> bool:
    return received.dtype == expected.dtype and received.shape == expected.shape and torch.equal(received, expected)


class Operators(TorchDispatchMode):
    """Fails if torch's own all-to-all is called, or nothing here would test what it is about."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "all_to_all" not in func.name()
        return func(*args, **(kwargs or {}))


def exchange_many(rank: int, mesh: DeviceMesh) -> list[Any]:
    """Waits at once, then of all under way, in an order of each rank; a second wait does no harm."""
    name, wrong = mesh.get_group("cp").group_name, []
    kinds = [(label, row, dtype) for label in SIZES for row in ROWS for dtype in DTYPES]
    for kind in kinds:
        with Operators():
            pending, expected = begin(rank, name, SIZES[kind[0]], *kind[1:], 0)
            wrong += [] if same(_torch.wait(pending), expected) else [kind]
    under_way = [begin(rank, name, SIZES[kind[0]], *kind[1:], i) for i, kind in enumerate(kinds)]
    for i in [*np.random.default_rng(rank).permutation(len(kinds)).tolist(), *range(len(kinds))]:
        pending, expected = under_way[i]
        wrong += [] if same(_torch.wait(pending), expected) else [(i, *kinds[i])]
    whole = [(torch.arange(24.0).view(4, 6) + 100 * peer).t() for peer in range(3)]  # 6 rows that lie across each other
    received = _torch.wait(_torch.start_all_to_all(whole[rank], [2, 2, 2], [2, 2, 2], name))
    strided = torch.equal(received, torch.cat([x[2 * rank : 2 * rank + 2] for x in whole]))
    return wrong + ([] if strided else ["strided"])


def test_values_of_many_under_way(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, exchange_many) == [[], [], []]


def refused(rank: int, mesh: DeviceMesh) -> None:
    """Also where the rank's own rows to receive and to send differ."""
    name, cases = mesh.get_group().group_name, [(3, [1, 1], [1, 1]), (3, [1], [1, 2]), (3, [1, 2, 0], [1, 2])]
    for own in ((3, 1), (0, 1), (-1, -1)):
        recv, send = ([n if peer == rank else 1 for peer in range(2)] for n in own)
        cases.append((sum(send), recv, send))
    for rows, recv, send in cases:
        with pytest.raises(ValueError) as error:
            _torch.start_all_to_all(torch.zeros(rows, 2), recv, send, name)
        assert str(recv) in str(error.value) and str(send) in str(error.value)
        pending, expected = begin(rank, name, [[1, 2], [3, 4]], (2,), torch.float32, 0)  # nothing was left under way
        assert same(_torch.wait(pending), expected)


def test_wrong_sizes(gloo_pool: GlooPool) -> None:
    gloo_pool.run(2, refused)


def with_other_traffic(rank: int, mesh: DeviceMesh) -> list[bool]:
    """A send, a receive from whoever comes and an all-reduce of the user's on the same group, while two travel."""
    group, size = mesh.get_group(), mesh.size()
    sizes = [[1 + s + 2 * t for t in range(size)] for s in range(size)]
    first, first_expected = begin(rank, group.group_name, sizes, (5,), torch.float32, 0)
    send = dist.isend(torch.full((5,), 10.0 * rank), group=group, group_dst=(rank + 1) % size)
    total, arrived = torch.full((1000,), float(rank)), torch.empty(5)
    reduce = dist.all_reduce(total, group=group, async_op=True)
    second, second_expected = begin(rank, group.group_name, sizes, (5,), torch.float32, 1)
    dist.recv(arrived, group=group)
    right = [same(_torch.wait(second), second_expected), same(_torch.wait(first), first_expected)]
    for work in (reduce, send):
        work.wait()
    return [*right, bool((total == sum(range(size))).all()), arrived.tolist() == [10.0 * ((rank - 1) % size)] * 5]


def test_other_traffic_on_the_group(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, with_other_traffic) == [[True] * 4] * 3


def slow_rank(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    """Rank 0 stays in its attention to a chunk until the others attend to the next, which they received meanwhile."""
    calls, attend = itertools.count(), Reference.attend

    def watched(*args: Any) -> Any:
        number = next(calls)
        if rank == 0 and number < plan.num_chunks():
            hear(mesh, *(f"{peer} attends to {number + 1}" for peer in range(1, mesh.size())))
        elif rank:
            tell(mesh, f"{rank} attends to {number}")
        return attend(*args)

    with mock.patch.object(Reference, "attend", watched):
        return errors(plan, rank, problem, step(plan, mesh, problem, kernel="reference"))


def test_chunks_arrive_while_a_rank_computes(gloo_pool: GlooPool) -> None:
    mask = SpanMask.full(512)
    problem = make_problem(mask.dense(), heads=(3, 3), dims=(512, 480))  # shards are larger than what a socket holds
    plan = spanwise.make_plan(mask, 4, balancer="contiguous", exchange="ring", keep_kv=True)
    for found in gloo_pool.run(4, slow_rank, plan, problem):
        assert max(found) <= 1e-10


class Holds:
    """A process group whose works, and with them the tensors, live for a while after their end."""

    def __init__(self, group: dist.ProcessGroup, released: list[str]) -> None:
        self.group, self.released = group, released

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> dist.Work:
            works = [getattr(self.group, name)(*args)]

            def release() -> None:
                self.released.append("works")
                works.clear()

            threading.Timer(0.3, release).start()
            return works[0]

        return call


def holds(rank: int, mesh: DeviceMesh) -> list[str]:
    """Nothing waits for a tensor that the caller keeps."""
    real, released, x, name = _torch.find_group, [], torch.arange(6.0).view(2, 3), mesh.get_group().group_name
    with mock.patch.object(_torch, "_LET_GO", HANG):
        with (
            mock.patch.object(_torch, "find_group", lambda name: Holds(real(name), released)),
            mock.patch.object(_torch, "is_gloo", lambda group: True),
        ):
            pending = _torch.start_all_reduce(x, "sum", name)
        assert torch.equal(_torch.wait(pending), 2 * x)
        found, began, kept = [*released], time.monotonic(), [x.view(6), x.detach()]
        assert torch.equal(_torch.wait(_torch.start_all_reduce(x, "sum", name)), 2 * x)
        assert time.monotonic() - began < HANG and kept
    return found


def test_a_wait_is_over_when_gloo_has_let_go(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, holds) == [["works"]] * 2
