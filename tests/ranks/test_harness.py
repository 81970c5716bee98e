"""The threaded harness itself: collectives are right forward and backward, and errors surface instead of hanging."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks.harness import run_ranks

RANKS = [1, 2, 3, 4, 8]
ops = torch.ops._c10d_functional


def shards(num_ranks: int, rows: int = 2, width: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(num_ranks)]


def group_name(mesh: DeviceMesh, axis: str = "cp") -> str:
    return mesh.get_group(axis).group_name


def all_gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(x, mesh.size(), group_name(mesh)))


def reduce_scatter(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", mesh.size(), group_name(mesh)))


def all_to_all(x: torch.Tensor, recv: list[int], send: list[int], mesh: DeviceMesh) -> torch.Tensor:
    return ops.wait_tensor(ops.all_to_all_single(x, recv, send, group_name(mesh)))


class GatherRows(torch.autograd.Function):
    """All-gather whose backward is the reduce-scatter."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return all_gather(x, mesh)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad.contiguous(), ctx.mesh), None


class SwapRows(torch.autograd.Function):
    """Uneven all-to-all whose backward is the one the other way round."""

    @staticmethod
    def forward(ctx, x, recv, send, mesh):
        ctx.splits, ctx.mesh = (recv, send), mesh
        return all_to_all(x, recv, send, mesh)

    @staticmethod
    def backward(ctx, grad):
        recv, send = ctx.splits
        return all_to_all(grad.contiguous(), send, recv, ctx.mesh), None, None, None


@pytest.mark.parametrize("num_ranks", RANKS)
def test_collectives_forward(num_ranks: int) -> None:
    xs = shards(num_ranks)
    wide = shards(num_ranks, rows=2 * num_ranks)

    def rank_fn(rank: int, mesh: DeviceMesh):
        assert mesh.mesh_dim_names == ("cp",)
        assert (mesh.size(), mesh.get_local_rank("cp")) == (num_ranks, rank)
        reduced = ops.wait_tensor(ops.all_reduce(xs[rank], "sum", group_name(mesh)))
        return all_gather(xs[rank], mesh), reduce_scatter(wide[rank], mesh), reduced

    for rank, (gathered, scattered, reduced) in enumerate(run_ranks(num_ranks, rank_fn)):
        assert torch.equal(gathered, torch.cat(xs))
        torch.testing.assert_close(scattered, sum(wide)[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(reduced, sum(xs))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gather_backward(num_ranks: int) -> None:
    xs, cotangents = shards(num_ranks), shards(num_ranks + 1, rows=2 * num_ranks)[:num_ranks]

    def rank_fn(rank: int, mesh: DeviceMesh):
        x = xs[rank].clone().requires_grad_()
        GatherRows.apply(x, mesh).sin().backward(cotangents[rank])
        return x.grad

    whole = torch.cat(xs).requires_grad_()
    whole.sin().backward(sum(cotangents))
    torch.testing.assert_close(torch.cat(run_ranks(num_ranks, rank_fn)), whole.grad)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_uneven_all_to_all_forward_and_backward(num_ranks: int) -> None:
    # Rank s sends (s + 2t) % 4 rows to rank t: some send nothing to each other, and no two ranks do the same.
    sizes = [[(s + 2 * t) % 4 for t in range(num_ranks)] for s in range(num_ranks)]
    xs = [torch.randn(sum(row), 3, generator=torch.Generator().manual_seed(s)) for s, row in enumerate(sizes)]
    received = [
        torch.cat([xs[s].split(sizes[s])[t] for s in range(num_ranks)]) for t in range(num_ranks)
    ]  # what rank t ends up with
    cotangents = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) for x in received]

    def rank_fn(rank: int, mesh: DeviceMesh):
        x = xs[rank].clone().requires_grad_()
        out = SwapRows.apply(x, [row[rank] for row in sizes], sizes[rank], mesh)
        out.backward(cotangents[rank])
        return out.detach(), x.grad

    results = run_ranks(num_ranks, rank_fn)
    for rank, (out, grad) in enumerate(results):
        assert torch.equal(out, received[rank])
        offsets = [sum(sizes[s][t] for s in range(rank)) for t in range(num_ranks)]
        home = [cotangents[t][offsets[t] : offsets[t] + sizes[rank][t]] for t in range(num_ranks)]
        assert torch.equal(grad, torch.cat(home))


def test_results_are_not_there_before_a_wait() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh):
        name = group_name(mesh)
        started = [
            ops.all_gather_into_tensor(torch.ones(2), 2, name),
            ops.reduce_scatter_tensor(torch.ones(2), "sum", 2, name),
            ops.all_reduce(torch.ones(2), "sum", name),
            ops.all_to_all_single(torch.ones(2), [1, 1], [1, 1], name),
        ]
        early = [bool(x.isnan().all()) for x in started]
        counts = ops.all_reduce(torch.ones(1, dtype=torch.int64), "sum", name)
        early.append(counts.item() > 2)
        waited = [ops.wait_tensor(x).mean().item() for x in started]
        return early, waited, ops.wait_tensor(counts).item()

    for early, waited, count in run_ranks(2, rank_fn):
        assert early == [True] * 5
        assert (waited, count) == ([1.0, 2.0, 2.0, 1.0], 2)


def test_changing_what_was_sent_before_a_wait_is_an_error() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        x = torch.full((2,), float("nan"))  # equal to itself here
        started = ops.all_gather_into_tensor(x, 2, group_name(mesh))
        if rank == 1:
            x[1] = 0
        ops.wait_tensor(started)

    with pytest.raises(RuntimeError, match="AllGather: what was sent changed before the wait") as raised:
        run_ranks(2, rank_fn)
    assert raised.value.rank == 1


def test_two_axes() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh):
        x = torch.tensor([float(rank)])
        return [ops.wait_tensor(ops.all_reduce(x, "sum", group_name(mesh, axis))).item() for axis in ("dp", "cp")]

    results = run_ranks(4, rank_fn, mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    assert results == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def test_arguments_reach_the_ranks() -> None:
    assert run_ranks(2, lambda rank, mesh, a, b: (rank, a, b), 5, b=6) == [(0, 5, 6), (1, 5, 6)]
    with pytest.raises(ValueError, match="does not hold 4 ranks"):
        run_ranks(4, lambda rank, mesh: None, mesh_shape=(2, 3), mesh_dim_names=("dp", "cp"))


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_first_exception_surfaces_and_releases_the_others(culprit: int) -> None:
    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        all_gather(torch.ones(2), mesh)
        if rank == culprit:
            time.sleep(0.05)  # the others are inside the next collective by now
            raise ValueError("heads do not divide")
        all_gather(torch.ones(2), mesh)

    with pytest.raises(ValueError, match="heads do not divide") as raised:
        run_ranks(4, rank_fn)
    assert raised.value.rank == culprit
    assert rank_threads() == []
    assert run_ranks(4, lambda rank, mesh: all_gather(torch.tensor([rank]), mesh).tolist()) == [[0, 1, 2, 3]] * 4


def test_exception_in_backward_surfaces() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rank):
            ctx.rank = rank
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.rank == 2:
                raise ValueError("no backward here")
            return grad, None

    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        GatherRows.apply(Fails.apply(x, rank), mesh).sum().backward()
        all_gather(torch.ones(2), mesh)

    with pytest.raises(ValueError, match="no backward here") as raised:
        run_ranks(4, rank_fn)
    assert raised.value.rank == 2
    assert rank_threads() == []


def test_missing_rank_is_a_timeout_with_stacks() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        if rank != 1:
            all_gather(torch.ones(2), mesh)

    with pytest.raises(TimeoutError) as raised:
        run_ranks(3, rank_fn, timeout=0.5)
    assert "rank 1: has returned" in str(raised.value)
    assert "all_gather" in str(raised.value)
    assert rank_threads() == []


def test_different_collectives_are_an_error() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        x = torch.ones(4)
        if rank == 1:
            reduce_scatter(x, mesh)
        else:
            all_gather(x, mesh)

    with pytest.raises(RuntimeError, match="collectives do not match"):
        run_ranks(2, rank_fn)
    assert rank_threads() == []


def test_shapes_that_differ_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="AllGather: rank 0 sends .* rank 1 expects"):
        run_ranks(2, lambda rank, mesh: all_gather(torch.ones(1 + (rank == 0), 2), mesh))
    with pytest.raises(RuntimeError, match="AllToAllBase: rank 1 sends .* rank 1 expects"):
        run_ranks(2, lambda rank, mesh: all_to_all(torch.ones(3), [1 + rank, 1], [1, 2], mesh))


def test_a_call_is_cheap() -> None:
    def rank_fn(rank: int, mesh: DeviceMesh) -> None:
        all_gather(torch.ones(2), mesh)

    run_ranks(4, rank_fn)
    start = time.process_time()
    for _ in range(20):
        run_ranks(4, rank_fn)
    assert (time.process_time() - start) / 20 < 0.1  # about 7 ms
