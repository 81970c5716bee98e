"""Hosts for benchmarks over a slow network: network namespaces with one or several processes each (Linux, root).

`run` starts a process for each rank and returns what a module's `answer(job)` gives there, in a gloo group of all.

Two hosts share one veth pair, more of them a bridge in a namespace of its own. A token bucket (``tc tbf``, tc-tbf(8))
at both ends of each veth limits what a host sends and what it receives to the same rate. Processes of one host reach
one another over its loopback, which nothing limits.

The namespaces have no names: each is held by its host's processes (the bridge's by a ``cat``), and the kernel removes
it, with all interfaces in it, when they end. The processes end with this one (`prctl(PR_SET_PDEATHSIG)`), so that
nothing is left behind whatever happens, SIGKILL included.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
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

INTERFACE = "eth0"
# tbf lets this much through at once after a pause. A packet before segmentation is up to 64 KiB; more than that would
# make short messages look faster than the link.
_BURST_KIB = 68
# How long a packet may wait in the bucket's queue before it is dropped; TCP then slows down.
_QUEUE_MS = 400


def check() -> None:
    """End this process with one line if the machine cannot make hosts."""
    absent = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if absent or sys.platform != "linux":
        sys.exit(f"needs Linux with {', '.join(absent) or 'network namespaces'} (packages iproute2 and util-linux)")
    if os.geteuid() != 0:
        sys.exit("needs root to make network namespaces, veth pairs and tc queues: run it with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception: the hosts are ended, folders removed


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0], "torch": torch.__version__,
        "python": platform.python_version(), "kernel": platform.release(),
    }  # fmt: skip


def run(
    module: str, job: dict[str, Any], num_hosts: int, rate: float, *, per_host: int = 1, timeout: float = 1800.0
) -> list[Any]:
    """What `answer` of a module returns on every rank, in the order of ranks, host by host.

    Args:
        job: what `answer` gets, as JSON, with "rank" and "per_host".
        num_hosts: 2 or more.
        rate: bits/s that each host sends, and receives.
        per_host: processes of a host.

    Raises:
        RuntimeError: a process failed.
        TimeoutError: they did not end in time.
    """
    size = num_hosts * per_host
    path = os.pathsep.join(filter(None, sys.path))  # so that the hosts import the same spanwise
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": path}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        (folder / "job").write_text(json.dumps(job | {"per_host": per_host}))
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            command = [sys.executable, "-m", "benchmarks.hosts", module, str(folder), str(rank), str(size)]
            beside = ranks[rank - rank % per_host].pid if rank % per_host else None
            log = stack.enter_context((folder / f"log-{rank}").open("wb"))
            ranks.append(_start(stack, command, environment, log, beside))
        _wire(stack, [rank.pid for rank in ranks[::per_host]], environment, rate)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the hosts did not end within {timeout:.0f} s")
            time.sleep(0.02)
        if any(rank.returncode for rank in ranks):
            time.sleep(1.0)  # the first to fail is not always the first to end
            logs = [(folder / f"log-{rank}").read_text()[-4000:] for rank in range(size)]
            codes = [rank.poll() for rank in ranks]
            raise RuntimeError(
                "\n".join(f"rank ended with {code}:\n{log}" for code, log in zip(codes, logs, strict=True))
            )
        return [torch.load(folder / f"answer-{rank}", weights_only=True) for rank in range(size)]


def _start(
    stack: contextlib.ExitStack, command: Sequence[str], environment: dict[str, str], log: Any, beside: int | None
) -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own, or in that of the process with the id `beside`."""
    enter = ["unshare", "--net"] if beside is None else ["nsenter", f"--net=/proc/{beside}/ns/net"]
    process = subprocess.Popen(
        [*enter, *command], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # PR_SET_PDEATHSIG; survives exec
    )  # fmt: skip
    stack.callback(_end, process)
    own, deadline = os.stat("/proc/self/ns/net").st_ino, time.monotonic() + 10
    while os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:  # both keep their process id
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(enter)} did not give the process a network namespace")
        time.sleep(0.005)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wire(stack: contextlib.ExitStack, pids: Sequence[int], environment: dict[str, str], rate: float) -> None:
    """Join the hosts of these processes, and limit what each sends and receives."""
    ends = [(pid, INTERFACE) for pid in pids]
    if len(pids) == 2:
        _in(pids[0], f"ip link add {INTERFACE} type veth peer name {INTERFACE} netns {pids[1]}")
    else:
        bridge = _start(stack, ["cat"], environment, subprocess.DEVNULL, None).pid
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


def main(module: str, folder: str, rank: str, size: str) -> None:
    """A rank: its answer to the job."""
    answer = importlib.import_module(module).answer
    sys.stdin.read()  # until the hosts are joined
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(size)))
    store = dist.FileStore(f"{folder}/store", int(size))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    found = answer(json.loads(Path(folder, "job").read_text()) | {"rank": int(rank)})
    torch.save(found, f"{folder}/answer-{rank}")
    dist.destroy_process_group()


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Begin and end of every call, `repeats` rounds over all of them, from a common start.

    Times are readings of the monotonic clock, which all processes of one machine share.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()
    for repeat in range(repeats):
        turn = repeat % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin = time.monotonic()
            calls[name]()
            times[name].append((begin, time.monotonic()))
        gc.collect()
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


if __name__ == "__main__":
    main(*sys.argv[1:])
