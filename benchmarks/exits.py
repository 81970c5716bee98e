"""Count processes that abort while they end, right after a collective on gloo.

    python benchmarks/exits.py --exits 300 --out benchmarks/results/exits-cpu.json

A worker thread of gloo drops its references to a collective's tensors only after it has announced the result. If it is
the last to drop a tensor that Python knows while Python finalizes, the process aborts. Each job is three forked ranks
that end right after one collective: with torch's operators alone, and with spanwise. The worker threads have
the lower priority on a shared core, so that they are late as on a busy machine. Ctrl-C ends the count early.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from spanwise import _torch

RANKS = 3
SECONDS = 120  # of one job, before it counts as stuck

PLAN = spanwise.make_plan(spanwise.SpanMask.causal(67), num_ranks=RANKS, exchange="needed", block_size=8)
IGNORED = torch.full((1, 23), -100)
KEPT: list[DeviceMesh] = []


def gather_by_operator(mesh: DeviceMesh) -> None:
    ops, name = torch.ops._c10d_functional, _torch.group_name(mesh.get_group())
    ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(23, 4), RANKS, name)).sum()


def unshard(mesh: DeviceMesh) -> None:
    spanwise.unshard(PLAN, mesh, spanwise.shard(PLAN, mesh, torch.ones(1, 67, 4))).sum()


def reduce_by_operator(mesh: DeviceMesh) -> None:
    ops, name = torch.ops._c10d_functional, _torch.group_name(mesh.get_group())
    ops.wait_tensor(ops.all_reduce(torch.ones(1), "sum", name)).sum()


def loss(mesh: DeviceMesh) -> None:
    spanwise.cross_entropy(torch.zeros(1, 23, 5), IGNORED, mesh)


JOBS: dict[str, tuple[str, Callable[[DeviceMesh], None]]] = {
    "all-gather": ("torch's operator", gather_by_operator),
    "unshard": ("spanwise", unshard),
    "all-reduce": ("torch's operator", reduce_by_operator),
    "cross_entropy": ("spanwise", loss),
}


def late_workers(core: int) -> None:
    """Bind all threads to `core`, where gloo's workers yield to this thread."""
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
        if os.geteuid() and Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    if not os.geteuid():  # a user can only slow the workers down, which takes long on a busy machine
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def end_as_rank(rank: int, rendezvous: str, log: int, collective: Callable[[DeviceMesh], None]) -> None:
    """Be one rank of a job, and end as a script does."""
    os.dup2(log, 2)
    signal.alarm(SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    KEPT.append(mesh)  # as a script's variable, so that the group is still there when Python finalizes
    cores = sorted(os.sched_getaffinity(0))
    late_workers(cores[rank % len(cores)])
    collective(mesh)
    sys.exit()


def run_job(rendezvous: str, log: int, collective: Callable[[DeviceMesh], None]) -> list[int]:
    """Exit codes of the ranks of one job."""
    started = []
    for rank in range(RANKS):
        process = os.fork()
        if process == 0:
            end_as_rank(rank, rendezvous, log, collective)
        started.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]


def main() -> None:
    parser = argparse.ArgumentParser(description="Count processes that abort while they end.")
    parser.add_argument("--exits", type=int, default=300, help="processes for each collective")
    parser.add_argument("--only", choices=JOBS, nargs="+", help="some of the collectives")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder, log = tempfile.mkdtemp(), os.open(os.devnull, os.O_WRONLY)
    torch.set_num_threads(1)
    gc.freeze()  # ranks share the parent's memory
    counts: dict[str, collections.Counter[int]] = {name: collections.Counter() for name in JOBS}
    with contextlib.suppress(KeyboardInterrupt):
        for job in range(-(-given.exits // RANKS)):  # in turns, so that all see the same load
            for name in given.only or JOBS:
                counts[name].update(run_job(f"{folder}/{name}-{job}", log, JOBS[name][1]))
    shutil.rmtree(folder)
    rows = [
        {
            "collective": name,
            "by": JOBS[name][0],
            "exits": sum(found.values()),
            "aborted": found[-signal.SIGABRT],
            "otherwise failed": sum(n for code, n in found.items() if code not in (0, -signal.SIGABRT)),
        }
        for name, found in counts.items()
        if found
    ]
    for row in rows:
        print(*row.values(), sep="\t")
    if given.out:
        facts = {"torch": torch.__version__, "ranks": RANKS, "rows": rows}
        given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
