"""The pool of gloo processes itself: results, errors, dead ranks and hanging ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks.gloo import GlooPool, RemoteTraceback

ops = torch.ops._c10d_functional


def swap(rank: int, mesh: DeviceMesh, sizes: list[list[int]]) -> torch.Tensor:
    """Rank s sends sizes[s][t] rows of its own number to rank t."""
    x = torch.full((sum(sizes[rank]), 2), float(rank))
    received = ops.all_to_all_single(x, [row[rank] for row in sizes], sizes[rank], mesh.get_group("cp").group_name)
    return ops.wait_tensor(received)


def test_uneven_all_to_all(gloo_pool: GlooPool) -> None:
    sizes = [[1, 0, 2], [0, 3, 1], [2, 2, 0]]
    for rank, received in enumerate(gloo_pool.run(3, swap, sizes)):
        assert received[:, 0].tolist() == [float(s) for s in range(3) for _ in range(sizes[s][rank])]


def sum_over_axes(rank: int, mesh: DeviceMesh) -> list[float]:
    return [
        ops.wait_tensor(ops.all_reduce(torch.tensor([float(rank)]), "sum", mesh.get_group(axis).group_name)).item()
        for axis in ("dp", "cp")
    ]


def test_two_axes(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(4, sum_over_axes, mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    assert results == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def process_id(rank: int, mesh: DeviceMesh) -> int:
    return os.getpid()


def test_processes_are_reused(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(2, process_id) == gloo_pool.run(4, process_id)[:2]


def refuse(rank: int, mesh: DeviceMesh, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"heads do not divide on {rank}")
    dist.barrier()


@pytest.mark.parametrize("culprit", [0, 2])
def test_first_exception_surfaces(gloo_pool: GlooPool, culprit: int) -> None:
    with pytest.raises(ValueError, match=f"heads do not divide on {culprit}") as raised:
        gloo_pool.run(3, refuse, culprit)
    assert raised.value.rank == culprit
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert f"rank {culprit} of 3" in str(raised.value.__cause__)
    assert "in refuse" in str(raised.value.__cause__)
    assert len(gloo_pool.run(3, process_id)) == 3


def die(rank: int, mesh: DeviceMesh) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def hang(rank: int, mesh: DeviceMesh) -> None:
    if rank == 0:
        dist.barrier()


@pytest.mark.slow
def test_dead_and_hanging_ranks() -> None:
    with GlooPool(num_ranks=2) as pool:
        with pytest.raises(RuntimeError, match=r"rank 1 died with exit code -11: (?s:.*)in die"):
            pool.run(2, die)
        pool.run(2, process_id)
        with pytest.raises(TimeoutError, match=r"ranks \[0\] did not answer in time(?s:.*)in hang"):
            pool.run(2, hang, timeout=10.0)
        assert len(pool.run(2, process_id)) == 2
        with pytest.raises(ValueError, match="3 ranks asked of a pool of 2"):
            pool.run(3, process_id)
