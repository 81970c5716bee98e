"""Ranks in threads and in processes: errors are raised instead of hanging."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.limits import HANG
from tests.ranks.gloo import RemoteTraceback
from tests.ranks.harness import run_ranks

ops = torch.ops._c10d_functional


def all_gather(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return ops.wait_tensor(ops.all_gather_into_tensor(x, mesh.size(), mesh.get_group().group_name))


def refuse(rank: int, mesh: DeviceMesh, culprit: int) -> None:
    all_gather(torch.ones(2), mesh)
    if rank == culprit:
        raise ValueError(f"heads do not divide on {rank}")
    all_gather(torch.ones(2), mesh)


@pytest.mark.parametrize("launcher", ["threads", "processes"])
def test_the_first_exception_is_raised_and_the_others_are_released(
    launcher: str, request: pytest.FixtureRequest
) -> None:
    run = run_ranks if launcher == "threads" else request.getfixturevalue("gloo_pool").run
    with pytest.raises(ValueError, match="heads do not divide on 2") as raised:
        run(3, refuse, 2)
    assert raised.value.rank == 2 and not any(thread.name.startswith("rank ") for thread in threading.enumerate())
    assert run is run_ranks or isinstance(raised.value.__cause__, RemoteTraceback)
    assert run(3, refuse, -1) == [None] * 3


def changes_what_it_sent(rank: int, mesh: DeviceMesh) -> None:
    x = torch.full((2,), float("nan"))  # equal to itself here
    started = ops.all_gather_into_tensor(x, 2, mesh.get_group().group_name)
    if rank == 1:
        x[1] = 0
    ops.wait_tensor(started)


def sends(mesh: DeviceMesh, rows: list[int], expected: list[int]) -> None:
    name = mesh.get_group().group_name
    ops.wait_tensor(ops.all_to_all_single(torch.ones(sum(rows)), expected, rows, name))


WRONG: dict[str, tuple[Callable[[int, DeviceMesh], Any], type[Exception]]] = {
    "sent changed": (changes_what_it_sent, RuntimeError),
    "rank 1: has returned": (lambda rank, mesh: None if rank else all_gather(torch.ones(2), mesh), TimeoutError),
    "do not match": (lambda rank, mesh: sends(mesh, [1, 1], [1, 1]) if rank else all_gather(torch.ones(2), mesh),
                     RuntimeError),
    "AllGather.*: shapes": (lambda rank, mesh: all_gather(torch.ones(1 + (rank == 0), 2), mesh), RuntimeError),
    "AllToAllBase.*: shapes": (lambda rank, mesh: sends(mesh, [1, 2], [1 + rank, 1]), RuntimeError),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_would_hang_on_real_ranks_is_an_error(message: str) -> None:
    fn, error = WRONG[message]
    with pytest.raises(error, match=message):
        run_ranks(2, fn, timeout=1.0 if error is TimeoutError else HANG)
