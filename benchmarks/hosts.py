"""Hosts for benchmarks over a slow network: network namespaces with one or several processes each (Linux, root).

`run` gives a task to all ranks of `Hosts`; `serve` is the other end, in a rank's process.

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
import json
import os
import platform
import selectors
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


def missing() -> str | None:
    """One line that says what this machine lacks to make hosts, or None."""
    absent = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if absent or sys.platform != "linux":
        return f"needs Linux with {', '.join(absent) or 'network namespaces'} (packages iproute2 and util-linux)"
    if os.geteuid() != 0:
        return "needs root to make network namespaces, veth pairs and tc queues: run it with sudo"
    return None


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def run(hosts: Hosts, task: dict[str, Any], timeout: float = 1800.0) -> list[dict[str, Any]]:
    """One task on every rank; the answer of each."""
    num_ranks = hosts.num_hosts * hosts.per_host
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    outs = [str(hosts.folder / f"rank-{rank}.pt") for rank in range(num_ranks)]
    store = str(hosts.folder / "store")
    about = {"num_ranks": num_ranks, "per_host": hosts.per_host, "store": store, "threads": threads}
    hosts.run([{**about, **task, "rank": rank, "out": out} for rank, out in enumerate(outs)], timeout)
    return [torch.load(out, weights_only=True) for out in outs]


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """A rank's process: answer the tasks of `run`, in a gloo group of all ranks."""
    say("ready")
    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        if not dist.is_initialized():
            store = dist.FileStore(job["store"], job["num_ranks"])
            dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["num_ranks"])
        torch.save(answer(job), job["out"])
        say("done")
    if dist.is_initialized():
        dist.destroy_process_group()


def say(event: str, **more: str) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


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


def spans(times: list[dict[str, list[tuple[float, float]]]]) -> dict[str, list[float]]:
    """Seconds of each repeat of each call, from the first rank's begin to the last one's end."""
    return {
        name: [
            max(end for _, end in repeat) - min(begin for begin, _ in repeat)
            for repeat in zip(*(rank[name] for rank in times), strict=True)
        ]
        for name in times[0]
    }


class Hosts:
    """Processes on hosts that are joined by a slow network; a context manager. Their order is host by host.

    Each runs `serve`: it prints ``{"event": "ready"}``, and ``{"event": "done"}`` for each job, a line of JSON.

    Args:
        num_hosts: 2 or more.
        rate: bits/s that each host sends, and receives.
        script: of this folder, which each process runs.
        per_host: processes of a host.

    Attributes:
        folder: for files that the hosts share, such as a store to meet at; removed with them.
    """

    folder: Path

    def __init__(self, num_hosts: int, rate: float, script: str, per_host: int = 1) -> None:
        self.num_hosts = num_hosts
        self.per_host = per_host
        self.rate = rate
        self._command = [sys.executable, str(Path(__file__).with_name(script))]
        path = os.pathsep.join(filter(None, sys.path))  # so that the hosts import the same spanwise
        self._environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": path}
        self._exit = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._buckets: list[tuple[int, str]] = []
        self._logs: list[Path] = []
        self._rest: dict[int, bytes] = {}  # of each process, the beginning of a line

    def __enter__(self) -> Hosts:
        with self._exit as stack:
            folder = self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            for process in range(self.num_hosts * self.per_host):
                self._logs.append(folder / f"process-{process}.log")
                log = stack.enter_context(self._logs[-1].open("w"))
                first = process - process % self.per_host
                beside = None if first == process else self._processes[first].pid
                self._processes.append(self._start(stack, self._command, log, beside))
            self._wire(stack)
            self._collect("ready", 120.0)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def run(self, jobs: Sequence[dict[str, Any]], timeout: float) -> None:
        """Give every process its job, and wait until all have done it; `RuntimeError` if one ended, `TimeoutError`."""
        for process, job in zip(self._processes, jobs, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        self._collect("done", timeout)

    def set_rate(self, rate: float) -> None:
        """Change the rate of all links, bits/s."""
        self.rate = rate
        for pid, device in self._buckets:
            self._limit(pid, device)

    def _start(
        self, stack: contextlib.ExitStack, command: Sequence[str], log: Any, beside: int | None = None
    ) -> subprocess.Popen[str]:
        """A process in a network namespace of its own, or in that of the process with the id `beside`."""
        enter = ["unshare", "--net"] if beside is None else ["nsenter", f"--net=/proc/{beside}/ns/net"]
        process = subprocess.Popen(
            [*enter, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=self._environment, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        stack.callback(_end, process)
        own = os.stat("/proc/self/ns/net").st_ino
        deadline = time.monotonic() + 10
        while os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:  # both keep their process id
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(enter)} did not give the process a network namespace")
            time.sleep(0.005)
        return process

    def _wire(self, stack: contextlib.ExitStack) -> None:
        pids = [process.pid for process in self._processes[:: self.per_host]]
        if self.num_hosts == 2:
            _ip(pids[0], "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(pids[1]))
        else:
            bridge = self._start(stack, ["cat"], subprocess.DEVNULL).pid
            _ip(bridge, "link", "add", "bridge0", "type", "bridge")
            _ip(bridge, "link", "set", "bridge0", "up")
            for host, pid in enumerate(pids):
                port = f"port{host}"
                _ip(bridge, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(pid))
                _ip(bridge, "link", "set", port, "master", "bridge0", "up")
                self._buckets.append((bridge, port))
        for host, pid in enumerate(pids):
            _ip(pid, "link", "set", "lo", "up")
            _ip(pid, "address", "add", f"10.77.0.{host + 1}/24", "dev", INTERFACE)
            _ip(pid, "link", "set", INTERFACE, "addrgenmode", "none", "up")  # no IPv6: nothing travels unasked
            self._buckets.append((pid, INTERFACE))
        self.set_rate(self.rate)

    def _limit(self, pid: int, device: str) -> None:
        _run(
            pid, "tc", "qdisc", "replace", "dev", device, "root", "tbf",
            "rate", f"{self.rate:.0f}bit", "burst", f"{_BURST_KIB}kb", "latency", f"{_QUEUE_MS}ms",
        )  # fmt: skip

    def _collect(self, event: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for i, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout.fileno(), selectors.EVENT_READ, i)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    waiting = sorted(key.data for key in selector.get_map().values())
                    raise TimeoutError(f"processes {waiting} were not {event} within {timeout:.0f} s")
                for key, _ in ready:
                    # Past Python's buffer, of which `select` knows nothing.
                    data = os.read(key.fd, 65536)
                    if not data:
                        raise RuntimeError(self._obituary(key.data))
                    *lines, self._rest[key.data] = (self._rest.get(key.data, b"") + data).split(b"\n")
                    for message in map(json.loads, lines):
                        if message["event"] == event:
                            selector.unregister(key.fd)

    def _obituary(self, lost: int) -> str:
        code = self._processes[lost].wait(10)
        # The first to fail is not always the first to be noticed: its peers fail when its connections close.
        time.sleep(1.0)
        tails = [
            f"process {other} {'still ran' if process.poll() is None else f'ended with code {process.returncode}'}:\n"
            + (self._logs[other].read_text()[-4000:] or "nothing on standard error")
            for other, process in enumerate(self._processes)
        ]
        return f"process {lost} ended with code {code}\n" + "\n".join(tails)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; survives exec


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _ip(pid: int, *arguments: str) -> None:
    _run(pid, "ip", *arguments)


def _run(pid: int, *command: str) -> None:
    """Run a command in the network namespace of process ``pid``."""
    done = subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
