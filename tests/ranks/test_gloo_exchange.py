"""Eager all-to-alls on gloo post their own receives and sends: values, lifetimes, and attention on top of them.

Threaded ranks take torch's operator instead, so that all of this runs on real processes. Every test makes one call of
the pool with many cases in it: a call makes a new process group, which takes longer than most cases.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import spanwise
from spanwise import SpanMask, _torch
from tests.oracle import Problem, make_problem
from tests.ranks.gloo import GlooPool

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


def exchange_one_by_one(rank: int, mesh: DeviceMesh) -> list[str]:
    name, wrong = mesh.get_group().group_name, []
    for label, sizes in SIZES.items():
        for row in ROWS:
            for dtype in DTYPES:
                pending, expected = begin(rank, name, sizes, row, dtype, 0)
                if not same(_torch.wait(pending), expected):
                    wrong.append(f"{label} {row} {dtype}")
    return wrong


def test_values(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, exchange_one_by_one) == [[], [], []]


def exchange_many(rank: int, mesh: DeviceMesh) -> list[Any]:
    """Waits from the first to the last, from the last to the first, and mixed."""
    name, wrong = mesh.get_group().group_name, []
    kinds = [(label, row, dtype) for label in SIZES for row in ROWS[:2] for dtype in DTYPES]
    numbers = np.arange(len(kinds))
    for order in (numbers, numbers[::-1], np.random.default_rng(0).permutation(numbers)):
        under_way = [begin(rank, name, SIZES[kind[0]], *kind[1:], i) for i, kind in enumerate(kinds)]
        for i in order.tolist():
            pending, expected = under_way[i]
            if not same(_torch.wait(pending), expected):
                wrong.append((order[0], i, *kinds[i]))
        again = [same(_torch.wait(pending), expected) for pending, expected in under_way]  # waited for: no harm
        wrong += [] if all(again) else [(order[0], "second wait")]
    return wrong


def test_many_under_way(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, exchange_many) == [[], [], []]


def wait_in_different_orders(rank: int, mesh: DeviceMesh) -> list[int]:
    """Each rank in an order of its own, and late by its own time."""
    name, sizes = mesh.get_group().group_name, SIZES["large"]
    under_way = [begin(rank, name, sizes, (3,), torch.float32, i) for i in range(6)]
    order = np.random.default_rng(rank).permutation(6).tolist()
    return [i for i in order if not same(_torch.wait(under_way[i][0]), under_way[i][1])]


def test_ranks_wait_in_orders_of_their_own(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(3, wait_in_different_orders) == [[], [], []]


def strided(rank: int, mesh: DeviceMesh) -> bool:
    name = mesh.get_group().group_name
    whole = [(torch.arange(24.0).view(4, 6) + 100 * peer).t() for peer in (0, 1)]  # 6 rows that lie across each other
    received = _torch.wait(_torch.start_all_to_all(whole[rank], [3, 3], [3, 3], name))
    return torch.equal(received, torch.cat([x[3 * rank : 3 * rank + 3] for x in whole]))


def test_rows_that_are_not_contiguous(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, strided) == [True, True]


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
    name, messages = mesh.get_group().group_name, []
    for recv, send in WRONG_SIZES:
        try:
            _torch.start_all_to_all(torch.zeros(3, 2), recv, send, name)
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
        pending, expected = begin(rank, name, [[1, 2], [3, 4]], (2,), torch.float32, 0)  # nothing was left under way
        assert same(_torch.wait(pending), expected)
    return messages


def test_wrong_sizes(gloo_pool: GlooPool) -> None:
    for messages in gloo_pool.run(2, refused):
        for (recv, send), message in zip(WRONG_SIZES, messages, strict=True):
            assert "an all-to-all of 2 ranks needs" in message and str(recv) in message and str(send) in message


def accepted_own(rank: int, mesh: DeviceMesh) -> list[str]:
    """Sizes of own rows to receive and to send that are not refused by a ValueError."""
    found = []
    for own_recv, own_send in ((3, 1), (3, 2), (0, 1), (1, 0), (-1, -1)):
        recv, send = [1, 1], [1, 1]
        recv[rank], send[rank] = own_recv, own_send
        try:
            _torch.start_all_to_all(torch.zeros(sum(send), 2), recv, send, mesh.get_group().group_name)
            found.append(f"{own_recv}, {own_send}: accepted")
        except ValueError:
            pass
        except Exception as error:
            found.append(f"{own_recv}, {own_send}: {error!r}")
    return found


def test_wrong_sizes_of_own_rows(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, accepted_own) == [[], []]


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


LENGTH, BLOCK = 150, 4


def documents_with_empty_rows() -> SpanMask:
    mask = SpanMask.documents([0, 1, 30, 30, 110, LENGTH])
    end = mask.end.copy()
    for rows in (slice(5, 8), slice(60, 64), slice(LENGTH - 2, LENGTH)):
        end[..., rows] = mask.start[..., rows]
    return SpanMask(mask.start[0], end[0], LENGTH)


MASK = documents_with_empty_rows()
FLOAT64, FLOAT32 = ("reference", torch.float64, 1e-10), ("sdpa", torch.float32, 1e-5)


def needed_plan(num_ranks: int, stages: int, keep_kv: bool, balancer: str = "lpt", mask: SpanMask = MASK) -> Any:
    return spanwise.make_plan(
        mask, num_ranks, balancer=balancer, exchange="needed", stages=stages, keep_kv=keep_kv, block_size=BLOCK
    )


def plan_of(num_ranks: int | tuple[int, int], balancer: str = "lpt", mask: SpanMask = MASK, **way: Any) -> Any:
    return spanwise.make_plan(mask, num_ranks, balancer=balancer, block_size=BLOCK, **way)


# Six query heads go with three ranks that trade heads, and two K/V heads do not.
@functools.cache
def problem_of(dtype: torch.dtype, seed: int = 0, mask: SpanMask = MASK, heads: tuple[int, int] = (6, 2)) -> Problem:
    return make_problem(mask.dense(), heads=heads, dims=(8, 6), dtype=dtype, seed=seed)


def leaves_of(plan: Any, mesh: DeviceMesh, problem: Problem) -> tuple[list[torch.Tensor], torch.Tensor]:
    q, k, v, grad = (spanwise.shard(plan, mesh, x, dim=2) for x in problem[:4])
    return [x.requires_grad_() for x in (q, k, v)], grad


def errors(plan: Any, rank: int, problem: Problem, *got: torch.Tensor | None) -> list[float]:
    """Errors of this rank's out, dq, dk, dv (those given) relative to the largest number of the whole sequence."""
    found = []
    for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=False):
        if x is not None:
            reference = plan.shard(whole, rank, dim=2)
            assert x.shape == reference.shape
            found.append(
                float((x.detach().double() - reference).abs().amax() / whole.abs().amax()) if x.numel() else 0.0
            )
    return found


def attend(rank: int, mesh: DeviceMesh, cases: list[tuple[Any, Problem, str]]) -> list[list[float]]:
    found = []
    for plan, problem, kernel in cases:
        leaves, grad = leaves_of(plan, mesh, problem)
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel=kernel)
        out.backward(grad)
        found.append(errors(plan, rank, problem, out, *(x.grad for x in leaves)))
    return found


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_attention(gloo_pool: GlooPool, num_ranks: int) -> None:
    cases, bounds, idle = [], [], 0
    for balancer in ("contiguous", "lpt"):
        for stages in (1, 3):
            for keep_kv in (True, False):
                plan = needed_plan(num_ranks, stages, keep_kv, balancer)
                assert plan.num_chunks() == stages
                received = plan.route().tokens.sum(axis=2)  # piece, receiver
                idle += int((received == 0).sum())
                for kernel, dtype, bound in (FLOAT64, FLOAT32):
                    cases.append((plan, problem_of(dtype), kernel))
                    bounds.append(bound)
    assert idle  # ranks that receive nothing in some piece
    for found in gloo_pool.run(num_ranks, attend, cases):
        assert all(max(each) <= bound for each, bound in zip(found, bounds, strict=True)), found


@pytest.mark.parametrize("keep_kv", [True, False])
def test_a_rank_that_is_idle_in_one_piece_only(gloo_pool: GlooPool, keep_kv: bool) -> None:
    """Rank 2 reads few keys elsewhere: they fit in one of three pieces, in which others receive too."""
    start = np.arange(LENGTH)[None].copy()
    start[0, :100], start[0, 100:103] = 0, 97
    mask = SpanMask(start, np.arange(1, LENGTH + 1)[None], LENGTH)
    plan = needed_plan(3, 3, keep_kv, "contiguous", mask)
    received = plan.route().tokens.sum(axis=2)
    assert plan.num_chunks() == 3 and received[:, 2].any() and not received[:, 2].all() and received[:, 1].all()
    cases = [(plan, problem_of(dtype, mask=mask), kernel) for kernel, dtype, _ in (FLOAT64, FLOAT32)]
    for found in gloo_pool.run(3, attend, cases):
        assert max(found[0]) <= FLOAT64[2] and max(found[1]) <= FLOAT32[2]


RING, AGAIN = {"exchange": "ring", "keep_kv": True}, {"exchange": "ring", "keep_kv": False}
ULYSSES = {"exchange": "ulysses"}
MESH = {"mesh_dim_names": ("outer", "inner")}


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_attention_by_ring_and_ulysses(gloo_pool: GlooPool, num_ranks: int) -> None:
    cases, bounds = [], []
    for balancer in ("contiguous", "lpt"):
        for way in (RING, AGAIN, ULYSSES):
            plan = plan_of(num_ranks, balancer, **way)
            for kernel, dtype, bound in (FLOAT64, FLOAT32):
                cases.append((plan, problem_of(dtype, heads=(6, 2) if num_ranks == 3 else (4, 2)), kernel))
                bounds.append(bound)
    if num_ranks == 4:
        assert cases[0][0].num_chunks() == 2  # contiguous shards leave a hop out
    for found in gloo_pool.run(num_ranks, attend, cases):
        assert all(max(each) <= bound for each, bound in zip(found, bounds, strict=True)), found


def test_attention_on_two_levels(gloo_pool: GlooPool) -> None:
    cases, bounds = [], []
    for way in ({"exchange": "all_gather"}, {"exchange": "needed", "stages": 3, "keep_kv": False}, RING, AGAIN):
        plan = plan_of((2, 2), **way)
        for kernel, dtype, bound in (FLOAT64, FLOAT32):
            cases.append((plan, problem_of(dtype), kernel))
            bounds.append(bound)
    for found in gloo_pool.run(4, attend, cases, mesh_shape=(2, 2), **MESH):
        assert all(max(each) <= bound for each, bound in zip(found, bounds, strict=True)), found


@pytest.mark.parametrize("axes", [4, (2, 2)])
def test_ranks_without_tokens(gloo_pool: GlooPool, axes: Any) -> None:
    mask = SpanMask.documents([0, 2, 3])
    ways = [RING, AGAIN, {"exchange": "needed", "stages": 1}, *([ULYSSES] if axes == 4 else [])]
    plans = [spanwise.make_plan(mask, axes, balancer="contiguous", block_size=1, **way) for way in ways]
    assert all(plan.layout.tokens_per_rank.min() == 0 for plan in plans)
    problem = problem_of(torch.float64, mask=mask, heads=(4, 2))
    mesh = {} if axes == 4 else {"mesh_shape": axes, **MESH}
    for found in gloo_pool.run(4, attend, [(plan, problem, "sdpa") for plan in plans], **mesh):
        assert max(map(max, found)) <= 1e-10, found


def refuses_heads(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem, heads: tuple[int, int]) -> list[float]:
    """Rank 0 is late: were anything sent before the error, the others would be in it."""
    local = plan.local(mesh, "cpu")
    tokens = local.tokens.shape[1]
    q, k, v = (torch.zeros(1, n, tokens, 8) for n in (heads[0], heads[1], heads[1]))
    if rank == 0:
        dist.barrier()
    with pytest.raises(ValueError, match=f"cannot divide {heads[0]} query heads .* over 2 ranks"):
        spanwise.context_parallel_attention(q, k, v, local, mesh)
    if rank != 0:
        dist.barrier()
    return attend(rank, mesh, [(plan, problem, "sdpa")])[0]


def test_heads_that_do_not_divide_leave_nobody_waiting(gloo_pool: GlooPool) -> None:
    problem = problem_of(torch.float64, heads=(4, 2))
    results = gloo_pool.run(2, refuses_heads, plan_of(2, **ULYSSES), problem, (3, 1))
    results += gloo_pool.run(4, refuses_heads, plan_of((2, 2), **RING), problem, (5, 5), mesh_shape=(2, 2), **MESH)
    assert all(max(found) <= 1e-10 for found in results)


def plans_that_differ(rank: int, mesh: DeviceMesh, odd: int) -> tuple[str, str]:
    plan = plan_of((2, 2), "head_tail" if rank == odd else "lpt", exchange="ring")
    with pytest.raises(ValueError, match="ranks made different plans") as error:
        plan.local(mesh, "cpu")
    return plan.fingerprint, str(error.value)


@pytest.mark.parametrize("odd", [0, 3])
def test_plans_that_differ_on_two_levels_are_named_on_every_rank(gloo_pool: GlooPool, odd: int) -> None:
    """Those that share no axis with the odd rank learn of it too."""
    results = gloo_pool.run(4, plans_that_differ, odd, mesh_shape=(2, 2), **MESH)
    held = "; ".join(f"rank {rank} has {fingerprint}" for rank, (fingerprint, _) in enumerate(results))
    assert len({fingerprint for fingerprint, _ in results}) == 2
    assert all(held in text for _, text in results)


def attend_on_axis(rank: int, mesh: DeviceMesh, cases: list[tuple[Any, list[Problem], str]]) -> list[list[float]]:
    """Every dp row works on a problem of its own, at the same time."""
    cp, row = mesh["cp"], mesh.get_local_rank("dp")
    found = []
    for plan, problems, kernel in cases:
        leaves, grad = leaves_of(plan, cp, problems[row])
        out = spanwise.context_parallel_attention(*leaves, plan, cp, kernel=kernel)
        out.backward(grad)
        found.append(errors(plan, cp.get_local_rank(), problems[row], out, *(x.grad for x in leaves)))
    return found


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp")])
def test_two_groups_at_once(gloo_pool: GlooPool, names: tuple[str, str]) -> None:
    cases, bounds = [], []
    for keep_kv in (True, False):
        for kernel, dtype, bound in (FLOAT64, FLOAT32):
            cases.append((needed_plan(2, 3, keep_kv), [problem_of(dtype, seed) for seed in (1, 2)], kernel))
            bounds.append(bound)
    results = gloo_pool.run(4, attend_on_axis, cases, mesh_shape=(2, 2), mesh_dim_names=names)
    for found in results:
        assert all(max(each) <= bound for each, bound in zip(found, bounds, strict=True)), found


def plainly(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    """While the user sends, receives and reduces on the group of the mesh."""
    group, size = mesh.get_group(), mesh.size()
    leaves, grad = leaves_of(plan, mesh, problem)
    received, total = torch.empty(5), torch.full((1000,), float(rank))
    works = [
        dist.irecv(received, group=group, group_src=(rank - 1) % size),
        dist.isend(torch.full((5,), float(rank)), group=group, group_dst=(rank + 1) % size),
        dist.all_reduce(total, group=group, async_op=True),
    ]
    out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel="sdpa")
    out.backward(grad)
    for work in works:
        work.wait()
    assert received.tolist() == [float((rank - 1) % size)] * 5 and bool((total == sum(range(size))).all())
    return errors(plan, rank, problem, out, *(x.grad for x in leaves))


def late(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    """Each rank begins at a time of its own, forward and backward."""
    local, found = plan.local(mesh, "cpu"), []
    for first in (0, mesh.size() - 1):
        leaves, grad = leaves_of(plan, mesh, problem)
        time.sleep(0.1 * abs(rank - first))
        out = spanwise.context_parallel_attention(*leaves, local, mesh, kernel="sdpa")
        time.sleep(0.1 * (mesh.size() - 1 - abs(rank - first)))
        out.backward(grad)
        found += errors(plan, rank, problem, out, *(x.grad for x in leaves))
    return found


def two_layers(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    """Both under way before either backward; q, k, v of the second are other numbers, with known results."""
    local = plan.local(mesh, "cpu")
    other = problem_of(problem.q.dtype, 5)
    (a, grad_a), (b, grad_b) = leaves_of(plan, mesh, problem), leaves_of(plan, mesh, other)
    out_a = spanwise.context_parallel_attention(*a, local, mesh, kernel="sdpa")
    out_b = spanwise.context_parallel_attention(*b, local, mesh, kernel="sdpa")
    ((out_a * grad_a).sum() + (out_b * grad_b).sum()).backward()
    return errors(plan, rank, problem, out_a, *(x.grad for x in a)) + errors(
        plan, rank, other, out_b, *(x.grad for x in b)
    )


def backward_twice(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    leaves, grad = leaves_of(plan, mesh, problem)
    out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel="sdpa")
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    doubled = torch.autograd.grad(out, leaves, 2 * grad)
    return errors(plan, rank, problem, out, *first) + errors(plan, rank, problem, out, *(x / 2 for x in doubled))


def only_q(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    (q, k, v), grad = leaves_of(plan, mesh, problem)
    out = spanwise.context_parallel_attention(q, k.detach(), v.detach(), plan, mesh, kernel="sdpa")
    out.backward(grad)
    # Of a graph that has all gradients.
    whole = spanwise.context_parallel_attention(q, k, v, plan, mesh, kernel="sdpa")
    (dq,) = torch.autograd.grad(whole, q, grad)
    return errors(plan, rank, problem, out, q.grad) + errors(plan, rank, problem, whole, dq)


def only_kv(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    (q, k, v), grad = leaves_of(plan, mesh, problem)
    out = spanwise.context_parallel_attention(q.detach(), k, v, plan, mesh, kernel="sdpa")
    out.backward(grad)
    return errors(plan, rank, problem, out, None, k.grad, v.grad)


def without_gradients(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        leaves, _ = leaves_of(plan, mesh, problem)
        with mode():
            out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel="sdpa")
            assert not out.requires_grad
            found += errors(plan, rank, problem, out)
    return found


def checkpointed(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    local, found = plan.local(mesh, "cpu"), []
    for early_stop in (True, False):
        leaves, grad = leaves_of(plan, mesh, problem)
        attention = functools.partial(spanwise.context_parallel_attention, plan=local, mesh=mesh, kernel="sdpa")
        with set_checkpoint_early_stop(early_stop):
            out = checkpoint(attention, *leaves, use_reentrant=False)
            out.backward(grad)
        found += errors(plan, rank, problem, out, *(x.grad for x in leaves))
    return found


NEEDED = {"exchange": "needed", "stages": 3}


STEPS = [plainly, late, two_layers, backward_twice, only_q, only_kv, without_gradients, checkpointed]
WAYS = [NEEDED, NEEDED | {"keep_kv": False}, RING, AGAIN, ULYSSES]


def every_step(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> dict[str, list[float]]:
    """Errors of each step. A started exchange that nobody waits for would keep its buffers until the process ends."""
    before, found = torch._C._distributed_c10d._get_work_registry_size(), {}
    for step in STEPS:
        found[step.__name__] = step(rank, mesh, plan, problem)
        assert torch._C._distributed_c10d._get_work_registry_size() == before, step.__name__
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_steps(gloo_pool: GlooPool, way: dict[str, Any]) -> None:
    plan = plan_of(3, **way)
    assert plan.num_chunks() == {"needed": 3, "ring": 2, "ulysses": 0}[way["exchange"]]
    for steps in gloo_pool.run(3, every_step, plan, problem_of(torch.float32)):
        for name, found in steps.items():
            assert found and max(found) <= FLOAT32[2], (name, found)


def selectively_checkpointed(rank: int, mesh: DeviceMesh, plan: Any, problem: Problem) -> list[float]:
    local = plan.local(mesh, "cpu")
    leaves, grad = leaves_of(plan, mesh, problem)
    attention = functools.partial(spanwise.context_parallel_attention, plan=local, mesh=mesh, kernel="sdpa")
    save_all = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    out = checkpoint(attention, *leaves, use_reentrant=False, context_fn=save_all)
    out.backward(grad)
    return errors(plan, rank, problem, out, *(x.grad for x in leaves))


def test_a_selective_checkpoint_that_saves_everything(gloo_pool: GlooPool) -> None:
    for found in gloo_pool.run(3, selectively_checkpointed, needed_plan(3, 3, True), problem_of(torch.float32)):
        assert max(found) <= FLOAT32[2]
