"""Processes forked from a server that has imported torch, and scripts run in them as torchrun runs them.

A rank of torchrun imports torch and spanwise anew, 3 to 6 s of CPU time, and torchrun itself 2 s. Slow tests use it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.limits import HANG

#: What a rank of a test would import first.
_PRELOAD = [
    "spanwise", "spanwise.overlap.backend", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.distributed.checkpoint", "functorch.compile", "pytest",
    "spanwise.integrations.transformers",
]  # fmt: skip


def forked() -> Any:
    """The context of processes that are forked from a server; one server for each process that asks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def torchrun(
    script: Path, num_ranks: int, folder: Path, seconds: float = HANG, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """What the ranks of a script printed; its `returncode` is that of a rank that failed, or 0.

    Args:
        folder: where the script runs, and where its output is kept.
    """
    context = forked()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = folder / f"{script.stem}.out", folder / f"{script.stem}.err"
    common = (arguments, num_ranks, folder, store.port, logs)
    ranks = [context.Process(target=_rank_main, args=(rank, script, *common), daemon=True) for rank in range(num_ranks)]
    for log in logs:
        log.write_text("")
    for process in ranks:
        process.start()
    until = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    code = next((1 if code is None else code for code in codes if code != 0), 0)
    return subprocess.CompletedProcess(str(script), code, *(log.read_text() for log in logs))


def _rank_main(
    rank: int, script: Path, arguments: Sequence[str], num_ranks: int, folder: Path, port: int, logs: tuple[Path, Path]
) -> None:
    for stream, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
