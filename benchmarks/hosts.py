"""Hosts for benchmarks over a slow network: processes in network namespaces of their own (Linux, root).

`run` calls a function on each, in a gloo group of all.

Two hosts share one veth pair, more of them a bridge in a namespace of its own. A token bucket (``tc tbf``, tc-tbf(8))
at both ends of each veth limits what a host sends and what it receives to the same rate. The namespaces have no names:
the kernel removes each, with all interfaces in it, when its process ends, and they end with this one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

INTERFACE = "eth0"
# tbf lets this much through at once after a pause. A packet before segmentation is up to 64 KiB; more than that would
# make short messages look faster than the link.
_BURST_KIB = 68
# How long a packet may wait in the bucket's queue before it is dropped; TCP then slows down.
_QUEUE_MS = 400
_CLONE_NEWNET = 0x40000000


def check() -> None:
    """End this process with one line if the machine cannot make hosts."""
    absent = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if absent or sys.platform != "linux" or os.geteuid() != 0:
        sys.exit(f"needs root on Linux, and ip, tc and nsenter; absent: {', '.join(absent) or 'root'}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: the hosts are ended


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0], "torch": torch.__version__,
        "python": platform.python_version(), "kernel": platform.release(),
    }  # fmt: skip


def run(answer: Callable[[dict[str, Any]], Any], job: dict[str, Any], size: int, rate: float) -> list[Any]:
    """What `answer` returns on every rank, in the order of ranks.

    Args:
        answer: a function of a module; it gets the job with "rank".
        size: hosts, 2 or more.
        rate: bits/s that each sends, and receives.

    Raises:
        torch.multiprocessing.ProcessException: a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        arguments = answer, job, size, folder
        # One process more holds the namespace of the bridge.
        hosts = mp.start_processes(_rank, arguments, size + 1, join=False, daemon=True, start_method="spawn")
        try:
            while not all(Path(folder, f"inside-{rank}").exists() for rank in range(size + 1)):
                hosts.join(timeout=0.1)
            pids = hosts.pids()
            _wire(pids[:size], pids[size], rate)
            Path(folder, "wired").touch()
            while not hosts.join():
                pass
            return [torch.load(f"{folder}/answer-{rank}", weights_only=True) for rank in range(size)]
        finally:
            for process in hosts.processes:
                process.kill()
                process.join()


def _rank(rank: int, answer: Callable[[dict[str, Any]], Any], job: dict[str, Any], size: int, folder: str) -> None:
    """A rank in a namespace of its own, and its answer to the job; the last process waits for the others."""
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
    assert libc.unshare(_CLONE_NEWNET) == 0, "no network namespace"
    Path(folder, f"inside-{rank}").touch()
    _wait(folder, "wired")
    if rank < size:
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        torch.save(answer(job | {"rank": rank}), f"{folder}/answer-{rank}")
        dist.destroy_process_group()
    else:
        for other in range(size):
            _wait(folder, f"answer-{other}")


def _wait(folder: str, name: str) -> None:
    while not Path(folder, name).exists():
        time.sleep(0.02)


def _wire(pids: Sequence[int], bridge: int, rate: float) -> None:
    """Join the hosts of these processes, and limit what each sends and receives."""
    ends = [(pid, INTERFACE) for pid in pids]
    if len(pids) == 2:
        _in(pids[0], f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {pids[1]}")
    else:
        _in(bridge, "ip link add bridge0 type bridge")
        _in(bridge, "ip link set bridge0 up")
        for host, pid in enumerate(pids):
            _in(bridge, f"ip link add port{host} type veth peer name {INTERFACE} netns {pid}")
            _in(bridge, f"ip link set port{host} master bridge0 up")
            ends.append((bridge, f"port{host}"))
    for host, pid in enumerate(pids):
        _in(pid, "ip link set lo up")
        _in(pid, f"ip address add 10.77.0.{host + 1}/24 dev {INTERFACE}")
        _in(pid, f"ip link set {INTERFACE} addrgenmode none up")  # no IPv6: nothing travels unasked
    for pid, device in ends:
        bucket = f"tbf rate {rate:.0f}bit burst {_BURST_KIB}kb latency {_QUEUE_MS}ms"
        _in(pid, f"tc qdisc replace dev {device} root {bucket}")


def _in(pid: int, command: str) -> None:
    """Run a command in the network namespace of a process."""
    done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr.strip() or done.returncode}")


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of every call, `repeats` rounds over all of them, from a common start.

    Times are readings of the monotonic clock, which all processes of one machine share.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    gc.disable()
    for repeat in range(repeats):
        gc.collect()
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.monotonic()
            calls[name]()
            times[name].append((begin, time.monotonic()))
    gc.enable()
    return times


def spans(answers: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each repeat of each call in the "times" of all ranks, from the first begin to the last end."""
    return {
        name: [
            max(end for _, end in repeat) - min(begin for begin, _ in repeat)
            for repeat in zip(*(answer["times"][name] for answer in answers), strict=True)
        ]
        for name in answers[0]["times"]
    }
