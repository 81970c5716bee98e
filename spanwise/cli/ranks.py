"""Starts the local ranks of a command, or takes part in those that torchrun started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class RankFailure(RuntimeError):
    """A rank failed; the text holds its number and its traceback, or the signal that ended it."""


def torchrun_size() -> int | None:
    """Number of ranks that torchrun started, or None without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def join_torchrun(device: str) -> None:
    """Join the process group of the ranks that torchrun started: gloo, and NCCL for "cuda"."""
    _join(device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))


def run_ranks(target: Callable[[Any], int], options: Any, num_ranks: int, device: str = "cpu") -> int:
    """Run ``target(options)`` on `num_ranks` spawned processes of one group; return the largest exit status.

    Raises:
        RankFailure: a rank raised or died; the others were ended.
    """
    with tempfile.TemporaryDirectory(prefix="spanwise-") as folder:
        statuses = mp.get_context("spawn").SimpleQueue()
        arguments = (target, options, num_ranks, device, f"{folder}/rendezvous", statuses)
        try:
            mp.start_processes(_rank, arguments, nprocs=num_ranks, start_method="spawn")
        except mp.ProcessRaisedException as error:
            raise RankFailure(f"rank {error.error_index} failed:\n{error.msg}") from None
        except mp.ProcessExitedException as error:
            reason = error.signal_name or f"exit status {error.exit_code}"
            hint = "; the system may have run out of memory" if reason == "SIGKILL" else ""
            raise RankFailure(f"rank {error.error_index} was ended by {reason}{hint}") from None
        return max(statuses.get() for _ in range(num_ranks))


def _rank(
    rank: int, target: Callable[[Any], int], options: Any, num_ranks: int, device: str, file: str, statuses: Any
) -> None:
    _join(device, rank, num_ranks, init_method=f"file://{file}", rank=rank, world_size=num_ranks)
    statuses.put(target(options))
    dist.destroy_process_group()


def _join(device: str, local_rank: int, num_local: int, **options: Any) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // num_local))  # local ranks share the cores
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **options)
