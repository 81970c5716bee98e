"""Token shards traded for head shards: where heads land, what travels, gradients, and one graph for many sizes."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import _torch
from spanwise.attention import ulysses
from spanwise.attention.ulysses import Trade
from spanwise.planning.heads import check_heads, kv_heads_of, kv_heads_read
from tests.kernel_calls import reference
from tests.oracle import dense_attention, make_problem
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

# Query heads, K/V heads, ranks.
HEADS = [
    (4, 4, 2),
    (6, 6, 3),
    (32, 4, 4),
    (32, 4, 8),
    (12, 2, 4),
    (12, 4, 6),
    (12, 4, 3),
    (6, 3, 2),
    (10, 2, 5),
    (8, 1, 4),
    (6, 2, 1),
]


def deal(sizes: list[int], rows: int, seed: int) -> list[np.ndarray]:
    """Tokens of each rank, ``[rows, size]``, at random and ascending; rows differ, sizes do not."""
    rng = np.random.default_rng(seed)
    cuts = np.cumsum(sizes)[:-1]
    shuffled = [np.split(rng.permutation(sum(sizes)), cuts) for _ in range(rows)]
    return [np.stack([np.sort(row[rank]) for row in shuffled]) for rank in range(len(sizes))]


def trade_of(tokens: list[np.ndarray], rank: int) -> Trade:
    return ulysses.trade_of(tokens, rank, torch.device("cpu"))


def cut(x: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    """The rank's shard of ``[B, H, S, ...]``."""
    rows = torch.from_numpy(tokens).expand(x.shape[0], -1)
    return torch.stack([each[:, at] for each, at in zip(x, rows, strict=True)])


def sizes_of(num_ranks: int, seed: int) -> list[int]:
    """Uneven numbers of tokens; some are 0 or 1."""
    return [(0, 7, 1, 12, 5, 3, 0, 9)[(rank + seed) % 8] for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), HEADS)
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 1), (2, 2)])
def test_heads_land_where_they_should_and_come_back(
    num_heads: int, kv_heads: int, num_ranks: int, batch: int, rows: int
) -> None:
    tokens = deal(sizes_of(num_ranks, 1), rows, seed=num_heads)
    kv_tokens = deal(sizes_of(num_ranks, 3), rows, seed=num_heads + 1)
    length, kv_length = (sum(x.shape[1] for x in each) for each in (tokens, kv_tokens))
    q = torch.randn(batch, num_heads, length, 5)
    k, v = torch.randn(batch, kv_heads, kv_length, 5), torch.randn(batch, kv_heads, kv_length, 3)
    own, group = num_heads // num_ranks, num_heads // kv_heads

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        name = _torch.group_name(mesh.get_group())
        trade, kv_trade = trade_of(tokens, rank), trade_of(kv_tokens, rank)
        shards = cut(q, tokens[rank]), cut(k, kv_tokens[rank]), cut(v, kv_tokens[rank])
        got = ulysses.to_heads(*shards, trade, name, "test", kv_trade=kv_trade)
        mine = slice(rank * own, (rank + 1) * own)
        assert torch.equal(got[0], q[:, mine])
        for x, whole in zip(got[1:], (k, v), strict=True):
            assert own % x.shape[1] == 0
            spread = x.repeat_interleave(own // x.shape[1], 1)
            assert torch.equal(spread, whole.repeat_interleave(group, 1)[:, mine])
        assert torch.equal(ulysses.to_tokens(got[0], trade, name, "test"), shards[0])
        assert torch.equal(ulysses.to_tokens(got[0][..., 0], trade, name, "test"), shards[0][..., 0])

    run_ranks(num_ranks, on_rank)


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), HEADS)
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_through_the_trade(num_heads: int, kv_heads: int, num_ranks: int, rows: int) -> None:
    tokens = deal(sizes_of(num_ranks, 1), rows, seed=num_ranks)
    length = sum(x.shape[1] for x in tokens)
    visible = np.tril(np.ones((1, length, length), dtype=bool))
    problem = make_problem(visible, batch=2, heads=(num_heads, kv_heads), dims=(6, 4), seed=kv_heads)
    grad_lse = torch.randn(2, num_heads, length, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    out, lse = dense_attention(*leaves, torch.from_numpy(visible))
    torch.autograd.backward([out, lse], [problem.grad_out, grad_lse])
    start, end = torch.zeros(1, 1, length, dtype=torch.int64), torch.arange(1, length + 1).view(1, 1, -1)
    wholes = [out.detach(), lse.detach(), *(x.grad for x in leaves)]

    def on_rank(rank: int, mesh: DeviceMesh) -> list[torch.Tensor]:
        name, trade = _torch.group_name(mesh.get_group()), trade_of(tokens, rank)
        shards = [cut(x, tokens[rank]).requires_grad_() for x in problem[:3]]
        q, k, v = ulysses.to_heads(*shards, trade, name, "test")
        out, lse = reference(q, k, v, start, end, scale=1 / math.sqrt(6))
        out, lse = (ulysses.to_tokens(x, trade, name, "test") for x in (out, lse))
        torch.autograd.backward([out, lse], [cut(x, tokens[rank]) for x in (problem.grad_out, grad_lse)])
        return [out.detach(), lse.detach(), *(x.grad for x in shards)]

    for rank, got in enumerate(run_ranks(num_ranks, on_rank)):
        for x, whole in zip(got, wholes, strict=True):
            expected = cut(whole, tokens[rank])
            assert x.shape == expected.shape
            assert torch.allclose(x, expected, rtol=0, atol=1e-12 * float(whole.abs().max()))


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), HEADS)
def test_windows_hold_the_heads_that_are_read(num_heads: int, kv_heads: int, num_ranks: int) -> None:
    count, firsts = kv_heads_of(num_heads, kv_heads, num_ranks)
    widths = []
    for rank, first in enumerate(firsts):
        read = kv_heads_read(num_heads, kv_heads, num_ranks, rank)
        assert 0 <= first <= read[0] and read[-1] < first + count <= kv_heads
        widths.append(read[-1] + 1 - read[0])
    assert count == max(widths)


def test_heads_that_do_not_divide_are_named_before_any_collective() -> None:
    x = torch.randn(1, 6, 3, 2)
    trade = trade_of(deal([3, 3, 0, 0], 1, 0), 0)
    with pytest.raises(ValueError, match=r"6 query heads \(2 key/value heads\) evenly over 4 ranks.* 1, 2, 3, 6 ranks"):
        ulysses.to_heads(x, x[:, :2], x[:, :2], trade, "no such group", "test")
    with pytest.raises(ValueError, match="7 query heads are not a multiple of 2"):
        check_heads(7, 2, 1)


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), [(8, 1, 8), (8, 8, 4), (12, 4, 6)])
def test_what_travels(num_heads: int, kv_heads: int, num_ranks: int) -> None:
    """Bytes that each rank receives from others, and in which dtype; both transfers start before one is waited for."""
    batch, k_dim, v_dim, item = 2, 6, 4, 2
    tokens = deal(sizes_of(num_ranks, 1), 1, seed=0)
    length = sum(x.shape[1] for x in tokens)
    q = torch.randn(batch, num_heads, length, k_dim).bfloat16()
    k, v = (torch.randn(batch, kv_heads, length, dim).bfloat16() for dim in (k_dim, v_dim))
    grad_out = torch.randn(batch, num_heads, length, v_dim).bfloat16()

    def on_rank(rank: int, mesh: DeviceMesh, events: list[list[tuple[str, int]]]) -> None:
        name, trade = _torch.group_name(mesh.get_group()), trade_of(tokens, rank)
        leaves = [cut(x, tokens[rank]).requires_grad_() for x in (q, k, v)]
        heads = ulysses.to_heads(*leaves, trade, name, "test")
        width = heads[1].shape[1]
        out = heads[2].repeat_interleave(heads[0].shape[1] // width, 1) + heads[0][..., :v_dim] + heads[1].sum()
        ulysses.to_tokens(out, trade, name, "test").backward(cut(grad_out, tokens[rank]))
        assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in leaves)

    events: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]
    start, wait = _torch.start_all_to_all, _torch.wait

    def rank_here() -> int:
        return torch.distributed.get_rank()

    def start_logged(x: torch.Tensor, recv_rows: list[int], send_rows: list[int], name: str) -> torch.Tensor:
        rows = sum(recv_rows) - recv_rows[rank_here()]
        events[rank_here()].append(("start", rows * x.shape[1] * x.element_size()))
        return start(x, recv_rows, send_rows, name)

    def wait_logged(x: torch.Tensor) -> torch.Tensor:
        events[rank_here()].append(("wait", 0))
        return wait(x)

    with (
        mock.patch.object(_torch, "start_all_to_all", start_logged),
        mock.patch.object(_torch, "wait", wait_logged),
    ):
        run_ranks(num_ranks, on_rank, events)

    own, (count, _) = num_heads // num_ranks, kv_heads_of(num_heads, kv_heads, num_ranks)
    grad_item = 4 if count * num_ranks > kv_heads else 2
    for rank, got in enumerate(events):
        mine = tokens[rank].shape[1]
        others = batch * (length - mine)
        elsewhere = batch * mine * (num_ranks - 1)
        assert got == [
            ("start", others * own * k_dim * item), ("start", others * count * (k_dim + v_dim) * item),
            ("wait", 0), ("wait", 0),
            ("start", elsewhere * own * v_dim * item), ("wait", 0),
            ("start", others * own * v_dim * item), ("wait", 0),
            ("start", elsewhere * count * (k_dim + v_dim) * grad_item), ("start", elsewhere * own * k_dim * item),
            ("wait", 0), ("wait", 0),
        ]  # fmt: skip


@pytest.mark.parametrize(("num_heads", "kv_heads", "num_ranks"), [(64, 1, 16), (10, 2, 5), (12, 4, 3), (12, 3, 4)])
def test_gradients_of_shared_heads_are_summed_in_float32(num_heads: int, kv_heads: int, num_ranks: int) -> None:
    """A K/V head gets 256 from whoever computes its first query head and 1 from others."""
    tokens = deal([2] * num_ranks, 1, seed=0)
    group, own = num_heads // kv_heads, num_heads // num_ranks
    x = torch.zeros(1, kv_heads, 2 * num_ranks, 1).bfloat16()
    q = torch.zeros(1, num_heads, 2 * num_ranks, 1).bfloat16()

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[list[tuple[int, float]], torch.Tensor, torch.Tensor]:
        name, trade = _torch.group_name(mesh.get_group()), trade_of(tokens, rank)
        k, v = (cut(x, tokens[rank]).requires_grad_() for _ in range(2))
        _, k_heads, v_heads = ulysses.to_heads(cut(q, tokens[rank]), k, v, trade, name, "test")
        given = []
        for first in range(rank * own, (rank + 1) * own, own // k_heads.shape[1]):
            given.append((first // group, 256.0 if first % group == 0 else 1.0))
        grad = torch.tensor([value for _, value in given]).bfloat16().view(1, -1, 1, 1).expand_as(k_heads)
        torch.autograd.backward([k_heads, v_heads], [grad, 2 * grad])
        return given, k.grad, v.grad

    results = run_ranks(num_ranks, on_rank)
    totals = torch.zeros(kv_heads)
    for given, _, _ in results:
        for head, value in given:
            totals[head] += value
    assert totals.max() >= 258  # which one by one in bfloat16 would be 256
    expected = totals.bfloat16().view(1, -1, 1, 1)
    for _, dk, dv in results:
        assert torch.equal(dk, expected.expand_as(dk)) and torch.equal(dv, 2 * expected.expand_as(dv))


def test_second_derivatives_are_refused() -> None:
    tokens = deal([3, 2], 1, seed=0)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        name, trade = _torch.group_name(mesh.get_group()), trade_of(tokens, rank)
        x = torch.randn(1, 2, tokens[rank].shape[1], 4, requires_grad=True)
        for out in (
            ulysses.to_heads(x, x, x, trade, name, "test")[0].sum(),
            ulysses.to_tokens(torch.randn(1, 1, 5, 4, requires_grad=True), trade, name, "test").sum(),
        ):
            with pytest.raises(NotImplementedError, match="second derivatives"):
                out.backward(create_graph=True)

    run_ranks(2, on_rank)


def compiled_trades(rank: int, mesh: DeviceMesh, heads: tuple[int, int]) -> list[list[str]]:
    """Trades of many sizes through one compiled function against eager code; the operators of each graph."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    graphs: list[list[str]] = []

    def record(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target.name() for node in gm.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        return make_boxed_func(gm.forward)

    name = _torch.group_name(mesh.get_group())

    def there_and_back(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, trade: Trade) -> torch.Tensor:
        q, k, v = ulysses.to_heads(q, k, v, trade, name, "test")
        mixed = q * (k.mean(2, keepdim=True) + v.cumsum(2))  # one K/V head a query head: the groups here are uneven
        return ulysses.to_tokens(mixed, trade, name, "test")

    compiled = torch.compile(
        there_and_back, backend=aot_autograd(fw_compiler=record, bw_compiler=record), fullgraph=True
    )
    for i, sizes in enumerate([(5, 4), (3, 9), (7, 0)]):
        tokens = deal(list(sizes), 1, seed=i)
        generator = torch.Generator().manual_seed(i)
        length = sum(sizes)
        whole = [torch.randn(1, n, length, 4, generator=generator) for n in (heads[0], heads[1], heads[1], heads[0])]
        results = []
        for function in (there_and_back, compiled):
            leaves = [cut(x, tokens[rank]).requires_grad_() for x in whole[:3]]
            for x in leaves:  # else the first length has a graph of its own
                _torch.mark_dynamic(x, 2)
            out = function(*leaves, trade_of(tokens, rank))
            out.backward(cut(whole[3], tokens[rank]))
            results.append([out.detach(), *(x.grad for x in leaves)])
        for eager, graph in zip(*results, strict=True):
            assert torch.allclose(eager, graph, atol=1e-6, rtol=1e-5)
    return graphs


@pytest.mark.compiles
def test_one_graph_serves_many_sizes(gloo_pool: GlooPool) -> None:
    there, back = "_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor"
    for rank, graphs in enumerate(gloo_pool.run(2, compiled_trades, (6, 3))):
        orders = [[name for name in graph if name in (there, back)] for graph in graphs]
        forwards = orders.count([there, there, back, back, there, back])
        assert forwards + orders.count([there, back, there, there, back, back]) == len(orders) == 2 * forwards
        # q without rows has a graph of its own on rank 1. To rank 0 it is a size.
        assert forwards == (1, 2)[rank]
