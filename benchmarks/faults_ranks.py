"""Faults of ranks that attend together, or run a compiled step; `faults.py` runs them.

Each rank is a process on this machine, over gloo. A fault is a function that all ranks run. It calls `start` where the
seconds begin, and raises on the ranks that notice.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import overlap
from spanwise.overlap.costs.roofline import node_flops
from spanwise.overlap.fx import operators

RANKS = 3
LAST = RANKS - 1
LENGTH = 96
PATIENCE = 200.0  # seconds for an answer; a rank without one did not notice
HALF_AN_HOUR = 1800.0  # torch's timeout of a group

Fault = Callable[[int, DeviceMesh, Callable[[], None]], None]


def causal_plan(length: int = LENGTH, window: int | None = None) -> spanwise.Plan:
    mask = spanwise.SpanMask.sliding_window(length, window) if window else spanwise.SpanMask.causal(length)
    return spanwise.make_plan(mask, RANKS, exchange="needed", block_size=8, balancer="contiguous")


def attend(local: spanwise.RankPlan, mesh: DeviceMesh, dtype: torch.dtype, compiled: bool = False) -> torch.Tensor:
    q, k, v = (torch.ones(1, 2, local.tokens.shape[1], 8, dtype=dtype).requires_grad_() for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, local, mesh)

    return (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(q, k, v)


def gone(
    rank: int,
    mesh: DeviceMesh,
    start: Callable[[], None],
    *,
    who: int = LAST,
    how: int = signal.SIGKILL,
    in_backward: bool = False,
    compiled: bool = False,
) -> None:
    """Rank `who` gets a signal in its second step."""
    local = causal_plan().local(mesh)
    attend(local, mesh, torch.float32, compiled).sum().backward()
    start()
    if rank == who and not in_backward:
        os.kill(os.getpid(), how)
    out = attend(local, mesh, torch.float32, compiled)
    if rank == who:
        os.kill(os.getpid(), how)
    out.sum().backward()


def without_backward(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """The loss of the last rank does not depend on its output."""
    out = attend(causal_plan().local(mesh), mesh, torch.float32)
    start()
    if rank == LAST:
        time.sleep(PATIENCE)
    out.sum().backward()


def other_plans(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    start()
    causal_plan(LENGTH + 8 * rank).local(mesh)


def other_dtype(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """The first call of the last rank has another dtype."""
    local = causal_plan().local(mesh)
    start()
    attend(local, mesh, torch.float64 if rank == LAST else torch.float32).sum().backward()


def other_call(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """After eight equal calls the last rank takes another plan, whose tensors have the same shapes."""
    usual, other = causal_plan().local(mesh), causal_plan(window=40).local(mesh)
    for _ in range(8):
        attend(usual, mesh, torch.float32).sum().backward()
    start()
    attend(other if rank == LAST else usual, mesh, torch.float32).sum().backward()


def refused_call(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """The last rank's second call is refused, because its tensors are too short; it goes on with something else."""
    local = causal_plan().local(mesh)
    attend(local, mesh, torch.float32).sum().backward()
    start()
    if rank == LAST:
        with contextlib.suppress(ValueError):
            spanwise.context_parallel_attention(*torch.ones(3, 1, 2, 1, 8).unbind(), local, mesh)
        time.sleep(PATIENCE)
    attend(local, mesh, torch.float32).sum().backward()


def failed_backward(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """The backward of the last rank raises before its attention; it goes on to the next step."""
    local = causal_plan().local(mesh)
    start()
    out = attend(local, mesh, torch.float32)
    if rank == LAST:

        def fail(grad: torch.Tensor) -> None:
            raise MemoryError

        out.register_hook(fail)
        with contextlib.suppress(MemoryError):
            out.sum().backward()
        out = attend(local, mesh, torch.float32)
    out.sum().backward()


class Cost:
    """Of two branches, the one whose products have `slow` columns is the longer."""

    def __init__(self, slow: int) -> None:
        self.slow = slow

    def uuid(self) -> str:
        return f"slow {self.slow}"

    def __call__(self, node: fx.Node) -> float:
        if node.target in operators.STARTS:
            return 5.0
        if not node_flops(node):
            return 0.01
        return 10.0 if operators.tensors_of(node)[0].shape[-1] == self.slow else 1.0


def branches(x: torch.Tensor, shards: Sequence[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Two branches of products with gathered parameters."""
    up, down, wide_up, wide_down = (all_gather_tensor(shard, 0, mesh.get_group()) for shard in shards)
    return (x @ up.t() @ down.t()) * (x @ wide_up.t() @ wide_down.t())


def compiled_step(mesh: DeviceMesh, compiler: Any) -> None:
    shards = [torch.ones(rows // RANKS, columns) for width in (48, 96) for rows, columns in ((width, 24), (24, width))]
    torch.compile(branches, backend=compiler)(torch.ones(8, 24), shards, mesh)


def other_order(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    """The last rank has other costs, which lead to another order of the collectives."""
    start()
    compiled_step(mesh, overlap.backend("aot_eager", cost=Cost(48 if rank == LAST else 96), bucket=False))


def result_raises(rank: int, mesh: DeviceMesh, start: Callable[[], None]) -> None:
    def report(result: overlap.Result) -> None:
        if rank == LAST:
            raise OSError("no space left")

    start()
    compiled_step(mesh, overlap.backend("aot_eager", cost=Cost(48), bucket=False, on_result=report))


def _rank_main(rank: int, port: int, hosts: bool, timeout: float, fault: Fault, answer: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=hosts, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    began = time.monotonic()

    def start() -> None:
        nonlocal began
        dist.barrier()
        began = time.monotonic()

    try:
        fault(rank, mesh, start)
        answer.send((0.0, "", ""))
    except Exception as error:  # whatever a user would see
        answer.send((time.monotonic() - began, type(error).__name__, str(error)))


def _run_once(fault: Fault, quiet: Sequence[int], timeout: float, own_store: bool) -> list[tuple[float, str, str]]:
    """Seconds, name and text of the error of each rank that is not in `quiet`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spanwise.overlap", "torch._dynamo"])
    if own_store:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    ranks = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, port, own_store and rank == 0, timeout, fault, theirs))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    answers = []
    for rank, (_, ours) in enumerate(ranks):
        if rank not in quiet:
            try:
                answers.append(ours.recv() if ours.poll(PATIENCE) else (PATIENCE, "", "no error"))
            except EOFError:
                answers.append((0.0, "", "the process ended without an error"))
    for process, _ in ranks:
        process.kill()
        process.join()
    return answers


def observed(
    fault: Fault, runs: int = 3, quiet: Sequence[int] = (), timeout: float = HALF_AN_HOUR, own_store: bool = False
) -> dict[str, Any]:
    """Run a fault several times: seconds until the last rank has its error, the errors, and the text of the first.

    Args:
        quiet: ranks that give no answer, because they are lost or stuck.
        timeout: seconds of the process group.
        own_store: rank 0 hosts the group's store. Default: this process does, like the agent of torchrun.
    """
    answers = [_run_once(fault, quiet, timeout, own_store) for _ in range(runs)]
    errors = Counter(name for run in answers for _, name, _ in run)
    first = answers[0][0][2]
    return {
        "seconds": statistics.median(max(seconds for seconds, _, _ in run) for run in answers),
        "runs": runs,
        "errors": [name for name, _ in errors.most_common()],
        "ranks": len(answers[0]),
        "said": first if all(name for run in answers for _, name, _ in run) else None,
    }
