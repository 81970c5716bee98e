"""K/V in several pieces: what travels in each, in which order things happen, and pieces that are fetched again."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

import spanwise
from spanwise import SpanMask, _torch
from spanwise.attention import rank_plan
from spanwise.attention.executor import RankStep
from spanwise.attention.kernels.sdpa import Sdpa
from tests.oracle import chunk_of, make_problem, relative_error
from tests.ranks.harness import run_ranks
from tests.simulated import all_ranks

LENGTH = 230
MASK = SpanMask.documents([0, 1, 70, 70, 180, LENGTH])


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 5])
def test_pieces_partition_each_pair(num_pieces: int) -> None:
    """Each list of tokens in parts of whole blocks, the first of which rotates from pair to pair."""
    plan = spanwise.make_plan(MASK, 6, balancer="lpt", exchange="needed", stages=num_pieces, block_size=2)
    traffic = plan.needed_traffic()
    tokens = chunk_tokens(traffic, num_pieces, 2)
    assert plan.num_chunks() == num_pieces and (tokens.sum(axis=0) == traffic).all()
    assert plan.route().tokens.tolist() == tokens.tolist()
    for receiver, sender in np.argwhere(traffic >= 2 * num_pieces):
        assert tokens[:, receiver, sender].max() - tokens[:, receiver, sender].min() <= 2 * 2


def chunk_tokens(traffic: np.ndarray, num_chunks: int, block_size: int) -> np.ndarray:
    """Tokens of each chunk and pair, token by token."""
    found = np.zeros((num_chunks, *traffic.shape), int)
    for receiver, sender in np.argwhere(traffic):
        count = int(traffic[receiver, sender])
        of_token = chunk_of(np.arange(count), count, num_chunks, block_size, receiver - sender)
        found[:, receiver, sender] = np.bincount(of_token, minlength=num_chunks)
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("batched", [False, True])
def test_routes_carry_what_the_plan_says(stages: int, batched: bool) -> None:
    mask = SpanMask.stack([MASK, SpanMask.sliding_window(LENGTH, 50)]) if batched else MASK
    plan = spanwise.make_plan(mask, 4, balancer="lpt", exchange="needed", stages=stages, block_size=8)
    locals_ = [rank_plan.build(plan, rank) for rank in range(4)]
    pieces = plan.num_chunks()
    assert pieces == (stages if stages < 40 else 1)  # some pair has seven blocks, none has forty
    expected = chunk_tokens(plan.traffic(), pieces, 8)
    for rank, local in enumerate(locals_):
        assert len(local.chunks["default"]) == 1 + pieces
        for i, chunk in enumerate(local.chunks["default"][1:]):
            assert chunk.route.sizes[4:] == expected[i, rank].tolist()  # received
            assert chunk.route.sizes[:4] == expected[i, :, rank].tolist()  # sent
    assert (plan.traffic().sum(axis=1) == plan.recv_tokens()).all()
    assert (plan.recv_tokens() == plan.needed_tokens()).all()


def test_a_piece_is_a_block_at_least() -> None:
    plan = spanwise.make_plan(MASK, 4, balancer="contiguous", exchange="needed", stages=64, block_size=64)
    assert plan.num_chunks() == 1 and plan.recv_tokens().any()
    nothing = spanwise.make_plan(
        SpanMask.documents([0, 64, 128]), 2, balancer="contiguous", exchange="needed", stages=4
    )
    assert nothing.num_chunks() == 0 and not nothing.traffic().any()


def step(plan: spanwise.Plan, before_backward: Any = None) -> None:
    problem = make_problem(MASK.dense(), heads=(2, 1), dims=(8, 8), dtype=torch.float32)

    def on_rank(rank: int, mesh: Any) -> None:
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel="sdpa")
        if before_backward is not None:
            before_backward(rank)
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))

    run_ranks(plan.num_ranks, on_rank)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_every_piece_travels_beside_attention(monkeypatch: pytest.MonkeyPatch, keep_kv: bool) -> None:
    """The order of starts, waits and kernels on rank 0, forward and backward."""
    plan = spanwise.make_plan(MASK, 2, balancer="lpt", exchange="needed", stages=3, block_size=8, keep_kv=keep_kv)
    assert plan.num_chunks() == 3
    events: list[str] = []
    is_rank_0 = lambda: torch.distributed.get_rank() == 0  # noqa: E731
    start, wait = _torch.start_all_to_all, _torch.wait
    started: dict[int, str] = {}

    def recorded_start(x: torch.Tensor, recv: list[int], send: list[int], name: str) -> torch.Tensor:
        result = start(x, recv, send, name)
        if is_rank_0():
            label = f"{sum(e.startswith('start') for e in events)}"
            started[result.data_ptr()] = label
            events.append(f"start {label}")
        return result

    def recorded_wait(x: torch.Tensor) -> torch.Tensor:
        if is_rank_0() and x.data_ptr() in started:
            events.append(f"wait {started[x.data_ptr()]}")
        return wait(x)

    monkeypatch.setattr(_torch, "start_all_to_all", recorded_start)
    monkeypatch.setattr(_torch, "wait", recorded_wait)
    step(plan, lambda rank: events.append("backward") if rank == 0 else None)
    forward, back = events[: events.index("backward")], events[events.index("backward") + 1 :]
    assert forward == ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]
    if keep_kv:  # gradients leave piece by piece, last first, and are waited for at the end
        assert back == ["start 3", "start 4", "start 5", "wait 3", "wait 4", "wait 5"]
    else:  # the next piece is on its way before this one is waited for
        assert back == [
            "start 3", "start 4", "wait 3", "start 5",  # pieces 3 and 2 again; gradients of piece 3
            "start 6", "wait 4", "start 7", "wait 6", "start 8",
            "wait 5", "wait 7", "wait 8",
        ]  # fmt: skip


@pytest.mark.parametrize("exchange", ["needed", "all_gather"])
@pytest.mark.parametrize("keep_kv", [True, False])
def test_what_is_fetched_again_is_not_kept(monkeypatch: pytest.MonkeyPatch, exchange: str, keep_kv: bool) -> None:
    """Bytes that live between forward and backward, for a kernel that makes its keys contiguous as flex does."""
    plan = spanwise.make_plan(MASK, 2, balancer="lpt", exchange=exchange, block_size=8, keep_kv=keep_kv)
    received = plan.recv_tokens()
    attend_part, saved = Sdpa.attend_part, {0: [], 1: []}

    def attend(kernel: Sdpa, queries: Any, k: torch.Tensor, v: torch.Tensor, *args: Any) -> Any:
        mine = saved[torch.distributed.get_rank()]
        k, v = k.contiguous(), v.contiguous()
        mine.append([weakref.ref(x.untyped_storage()) for x in (k, v)])
        return attend_part(kernel, queries, k, v, *args)

    monkeypatch.setattr(Sdpa, "attend_part", attend)
    alive: dict[int, list[bool]] = {}

    def look(rank: int) -> None:
        alive[rank] = [ref() is not None for refs in saved[rank][1:] for ref in refs]

    step(plan, look)
    for rank in range(2):
        assert received[rank] and alive[rank] == [keep_kv] * 2


@pytest.mark.compiles
def test_fetching_again_needs_eager_code() -> None:
    plan = spanwise.make_plan(MASK, 2, balancer="lpt", exchange="needed", block_size=8, keep_kv=False)

    def on_rank(rank: int, mesh: Any) -> None:
        local = plan.local(mesh, "cpu")
        q = torch.randn(1, 1, local.tokens.shape[1], 8)
        attend = torch.compile(spanwise.context_parallel_attention, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="keep_kv=False is for eager code"):
            attend(q, q, q, local, mesh)

    run_ranks(2, on_rank)


def test_stages_are_checked() -> None:
    for stages in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="stages must be a positive integer"):
            spanwise.make_plan(MASK, 2, stages=stages)
    with pytest.raises(ValueError, match="exchange 'all_gather' chooses its number of chunks itself, got stages=2"):
        spanwise.make_plan(MASK, 2, exchange="all_gather", stages=2)


def test_route_is_a_pytree_without_numbers() -> None:
    plan = spanwise.make_plan(MASK, 3, balancer="lpt", exchange="needed", stages=2, block_size=8)
    route = rank_plan.build(plan, 1).chunks["default"][1].route
    assert isinstance(route, RankStep) and all(isinstance(x, int) for x in route.sizes)
    assert _torch.tree_map(lambda x: x, route).sizes == route.sizes


@pytest.mark.parametrize("exchange", [{"exchange": "all_gather"}, {"exchange": "needed", "stages": 3}])
def test_rank_plans_in_one_process(exchange: dict[str, Any]) -> None:
    """The same picking of rows with which `tests/gpu` feeds the ranks of a plan on one device."""
    plan = spanwise.make_plan(MASK, 3, balancer="lpt", block_size=8, **exchange)
    problem = make_problem(MASK.dense(), heads=(4, 2), dims=(8, 8))
    leaves = [x.requires_grad_() for x in problem[:3]]
    out = all_ranks(plan, *leaves, kernel="sdpa")
    out.backward(problem.grad_out)
    for got, want in zip((out, *(x.grad for x in leaves)), (problem.out, *problem[6:9]), strict=True):
        assert relative_error(got.detach(), want) <= 1e-10


def test_second_derivatives_are_refused() -> None:
    for exchange in ("all_gather", "needed"):
        plan = spanwise.make_plan(MASK, 2, balancer="lpt", exchange=exchange, block_size=8)

        def on_rank(rank: int, mesh: Any, plan: spanwise.Plan = plan) -> None:
            x = torch.randn(1, 1, plan.layout.num_tokens(rank), 8, dtype=torch.float64).requires_grad_()
            out = spanwise.context_parallel_attention(x, x, x, plan, mesh, kernel="reference")
            with pytest.raises(NotImplementedError, match="without create_graph=True"):
                torch.autograd.grad(out.sum(), x, create_graph=True)

        run_ranks(2, on_rank)


def test_a_change_in_place_is_noticed_where_pieces_are_fetched_again() -> None:
    plan = spanwise.make_plan(MASK, 2, balancer="lpt", exchange="needed", block_size=8, keep_kv=False)

    def on_rank(rank: int, mesh: Any) -> None:
        q, k, v = (torch.randn(1, 1, plan.layout.num_tokens(rank), 8).requires_grad_() for _ in range(3))
        changed = q * 1
        out = spanwise.context_parallel_attention(changed, k, v, plan, mesh)
        changed.detach().add_(1)
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
            out.sum().backward()

    run_ranks(2, on_rank)


def test_an_unbatched_mask_beside_a_batched_one_is_cut_as_planned() -> None:
    rows = SpanMask.stack([MASK, SpanMask.sliding_window(LENGTH, 50)])
    masks = {"rows": rows, "one": SpanMask.sliding_window(LENGTH, 90)}
    shape = dict(num_q_heads=4, num_kv_heads=2, head_dim=8)
    plan = spanwise.make_plan(masks, 4, balancer="contiguous", exchange="needed", stages=4, block_size=8, **shape)
    for name in masks:
        alike = plan.batch_size // plan.mask(name).batch_size  # batch rows that take the same tokens
        tokens = chunk_tokens(plan.traffic(name) // alike, plan.num_chunks(name), 8)
        assert (alike * tokens.sum(axis=0) == plan.traffic(name)).all()
        for rank in range(4):
            for i, chunk in enumerate(rank_plan.build(plan, rank).chunks[name][1:]):
                assert chunk.route.sizes[4:] == tokens[i, rank].tolist()
