"""Eager all-to-alls on gloo post their own receives and sends: values, lifetimes, and attention on top of them.

Threaded ranks take torch's operator instead, so that all of this runs on real processes. Every test makes one call of
the pool with many cases in it: a call makes a new process group, which takes longer than most cases.
"""

from __future__ import annotations

import itertools
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
from tests.oracle import Problem, make_problem
from tests.pairs import named
from tests.ranks.calls import HOSTS, errors, leaves_of, step
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


def exchange_many(rank: int, mesh: DeviceMesh) -> list[Any]:
    """Waits at once, from the first to the last, from the last to the first, mixed, and in an order of each rank."""
    name, wrong = mesh.get_group().group_name, []
    kinds = [(label, row, dtype) for label in SIZES for row in ROWS for dtype in DTYPES]
    for kind in kinds:
        pending, expected = begin(rank, name, SIZES[kind[0]], *kind[1:], 0)
        wrong += [] if same(_torch.wait(pending), expected) else [kind]
    numbers = np.arange(len(kinds))
    orders = {"forwards": numbers, "backwards": numbers[::-1]}
    orders |= {"mixed": np.random.default_rng(9).permutation(numbers)}
    orders |= {"its own": np.random.default_rng(rank).permutation(numbers)}
    for which, order in orders.items():
        under_way = [begin(rank, name, SIZES[kind[0]], *kind[1:], i) for i, kind in enumerate(kinds)]
        for i in order.tolist():
            pending, expected = under_way[i]
            wrong += [] if same(_torch.wait(pending), expected) else [(which, i, *kinds[i])]
        again = [same(_torch.wait(pending), expected) for pending, expected in under_way]  # waited for: no harm
        wrong += [] if all(again) else [(which, "second wait")]
    whole = [(torch.arange(24.0).view(4, 6) + 100 * peer).t() for peer in range(3)]  # 6 rows that lie across each other
    received = _torch.wait(_torch.start_all_to_all(whole[rank], [2, 2, 2], [2, 2, 2], name))
    strided = torch.equal(received, torch.cat([x[2 * rank : 2 * rank + 2] for x in whole]))
    return wrong + ([] if strided else ["strided"])


def test_values_of_many_under_way(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, exchange_many) == [[], [], []]


class Calls(TorchDispatchMode):
    """Operators by name, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def operators(rank: int, mesh: DeviceMesh) -> list[bool]:
    used = []
    for group in (mesh.get_group("dp"), mesh.get_group("cp"), dist.group.WORLD):
        assert group is not None
        sizes = [[1 + s + t for t in range(group.size())] for s in range(group.size())]
        with Calls() as calls:
            pending, expected = begin(group.rank(), group.group_name, sizes, (2,), torch.float32, 0)
            assert same(_torch.wait(pending), expected)
        used.append("_c10d_functional::all_to_all_single" in calls.names)
    return used


def test_torchs_operator_is_not_used(gloo_pool: GlooPool) -> None:
    """Or nothing here would test what it is about; on groups that are a part of the world too."""
    results = gloo_pool.run(4, operators, mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    assert results == [[False] * 3] * 4


WRONG_SIZES = [([1, 1], [1, 1]), ([1], [1, 2]), ([1, 2], [3]), ([1, 2, 0], [1, 2]), ([1, 2], [1, 2, 0])]


def refused(rank: int, mesh: DeviceMesh) -> list[str]:
    """Also where the rank's own rows to receive and to send differ."""
    name, messages = mesh.get_group().group_name, []
    cases = list(WRONG_SIZES)
    for own in ((3, 1), (3, 2), (0, 1), (1, 0), (-1, -1)):
        cases.append(tuple([n if peer == rank else 1 for peer in range(2)] for n in own))
    for recv, send in cases:
        with pytest.raises(ValueError, match="an all-to-all of 2 ranks needs") as error:
            _torch.start_all_to_all(torch.zeros(3 if len(messages) < 5 else sum(send), 2), recv, send, name)
        messages.append(str(error.value))
        pending, expected = begin(rank, name, [[1, 2], [3, 4]], (2,), torch.float32, 0)  # nothing was left under way
        assert same(_torch.wait(pending), expected)
    return messages


def test_wrong_sizes(gloo_pool: GlooPool) -> None:
    for messages in gloo_pool.run(2, refused):
        for (recv, send), message in zip(WRONG_SIZES, messages, strict=False):
            assert str(recv) in message and str(send) in message


def with_other_traffic(rank: int, mesh: DeviceMesh) -> list[bool]:
    """Sends, receives (one from whoever comes) and an all-reduce of the user's on the same group, while two travel."""
    group = mesh.get_group()
    size, name = group.size(), group.group_name
    sizes = [[1 + s + 2 * t for t in range(size)] for s in range(size)]
    after, before = (rank + 1) % size, (rank - 1) % size
    right = []
    for i in range(3):
        early = torch.empty(5)
        receive_early = dist.irecv(early, group=group, group_src=before)
        first, first_expected = begin(rank, name, sizes, (5,), torch.float32, i)
        sends = [dist.isend(torch.full((5,), 10.0 * rank + n), group=group, group_dst=after) for n in range(2)]
        total = torch.full((1000,), float(rank))
        reduce = dist.all_reduce(total, group=group, async_op=True)
        second, second_expected = begin(rank, name, sizes, (5,), torch.float32, i + 1)
        receive_early.wait()
        late = torch.empty(5)
        dist.recv(late, group=group)
        right += [same(_torch.wait(second), second_expected), same(_torch.wait(first), first_expected)]
        reduce.wait()
        for send in sends:
            send.wait()
        right.append(bool((total == sum(range(size))).all()))
        right += [early.tolist() == [10.0 * before] * 5, late.tolist() == [10.0 * before + 1] * 5]
    return right


def test_other_traffic_on_the_group(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, with_other_traffic) == [[True] * 15] * 3


# ---------------------------------------------------------------- attention on top of them

LENGTH = 150
MASK = SpanMask.documents([0, 1, 30, 30, 110, LENGTH])
NEEDED: dict[str, Any] = {"exchange": "needed", "stages": 3}
WAYS: list[dict[str, Any]] = [
    NEEDED, NEEDED | {"keep_kv": False}, {"exchange": "ring", "keep_kv": True}, {"exchange": "ring"},
    {"exchange": "ulysses"}, {"exchange": "hierarchical", "hardware": HOSTS},
]  # fmt: skip


def plan_of(num_ranks: int | tuple[int, int], balancer: str = "lpt", **way: Any) -> spanwise.Plan:
    return spanwise.make_plan(MASK, num_ranks, balancer=balancer, block_size=4, **way)


def problem_of() -> Problem:
    """Six query heads go with three ranks that trade heads, and two K/V heads do not."""
    return make_problem(MASK.dense(), heads=(6, 2), dims=(8, 6), dtype=torch.float32)


def one_rank_is_late(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    """Rank 0 starts when the others have started, in the forward; the last rank in the backward."""
    local, (leaves, grad) = plan.local(mesh, "cpu"), leaves_of(plan, mesh, problem)
    last = mesh.size() - 1

    def in_turn(late: int, moment: str) -> None:
        others = [f"{moment} of {r}" for r in range(mesh.size()) if r != late]
        hear(mesh, *others) if rank == late else tell(mesh, f"{moment} of {rank}")

    in_turn(0, "forward")
    out = spanwise.context_parallel_attention(*leaves, local, mesh)
    in_turn(last, "backward")
    out.backward(grad)
    return errors(plan, rank, problem, [out, *(x.grad for x in leaves)])


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_late_ranks(gloo_pool: GlooPool, way: dict[str, Any]) -> None:
    plan = plan_of(3, **way)
    assert plan.num_chunks() == {"needed": 3, "ring": 2, "hierarchical": 2, "ulysses": 0}[way["exchange"]]
    for found in gloo_pool.run(3, one_rank_is_late, plan, problem_of()):
        assert max(found) <= 1e-5


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
