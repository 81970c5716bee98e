"""Faults, made on purpose: what the user sees, after how many seconds, and what is lost.

    python benchmarks/faults.py --out benchmarks/results/faults-cpu.json

Ranks are processes on this machine, over gloo. Seconds count from the fault, or from the start of the command where the
fault is there before it, to the end of the command or the error of the other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import spanwise

RANKS = 3
TRAIN = ["--seq-len", "96", "--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--hidden-dim", "24"]


class Folder:
    """Data and a run of two checkpoints; each fault gets its own copy of the run."""

    def __init__(self, path: Path):
        self.path, self.data, self.clean = path, path / "data", path / "clean"
        self.data.mkdir()
        for i in range(6):
            (self.data / f"{i}.txt").write_text(f"document {i} " * 20)
        done = self.train(self.clean, "--steps", "2", "--save-every", "1").wait()
        assert done == 0, "the run without a fault failed"

    def train(self, out: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spanwise", "train", "--data", str(self.data), "--out", str(out)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*command, *TRAIN, *options], **streams, **more)  # type: ignore[call-overload]

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.clean, self.path / name))


def resumed(run: subprocess.Popen[str], text: str) -> dict[str, Any]:
    """Exit status, the line with `text`, and the seconds of a command."""
    began = time.monotonic()
    said = " ".join(run.communicate(timeout=600)[0].split())
    found = re.search(rf".{{0,80}}{text}.{{0,200}}", said)
    return {
        "seconds": time.monotonic() - began,
        "status": run.returncode,
        "said": found[0] if found else None,
    }


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[:-50])


def damaged(folder: Folder, how: str) -> dict[str, Any]:
    out = folder.copy(how)
    spoil(out / "checkpoints" / "step-00000002" / "__0_0.distcp", how)
    return resumed(folder.train(out, "--steps", "3", "--resume"), "passed over")


def flipped_bit(folder: Folder) -> dict[str, Any]:
    return damaged(folder, "flip")


def truncated(folder: Folder) -> dict[str, Any]:
    return damaged(folder, "cut")


def changed_data(folder: Folder) -> dict[str, Any]:
    out, file = folder.copy("changed"), folder.data / "0.txt"
    before = file.read_text()
    file.write_text(before.replace("0", "1"))
    try:
        return resumed(folder.train(out, "--steps", "3", "--resume"), "other contents")
    finally:
        file.write_text(before)


def full_disk(folder: Folder) -> dict[str, Any]:
    """No file may grow past half a shard: the error number differs from that of a full disk, the path does not."""
    out = folder.copy("full")
    most = (out / "checkpoints" / "step-00000002" / "__0_0.distcp").stat().st_size // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    row = resumed(folder.train(out, "--steps", "3", "--resume", preexec_fn=limit), "cannot be saved")
    return row | {"left": sorted(path.name for path in (out / "checkpoints").iterdir())}


def started(folder: Folder, name: str, *options: str) -> tuple[subprocess.Popen[str], Path]:
    """A long run that has saved at least once."""
    out = folder.path / name
    run = folder.train(out, "--steps", "100000", "--save-every", "1", *options)
    while not (out / "checkpoints" / "latest").exists():
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    return run, out


def two_jobs(folder: Folder) -> dict[str, Any]:
    run, out = started(folder, "shared")
    try:
        return resumed(folder.train(out, "--steps", "3"), "writes into")
    finally:
        run.kill()
        run.communicate()


def interrupted(folder: Folder) -> dict[str, Any]:
    run, _ = started(folder, "interrupted")
    run.send_signal(signal.SIGINT)
    return resumed(run, "stopped after step")


def children(process: int) -> list[int]:
    """Ranks below a launcher, by their number in it."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    spawned = [int(p) for p in found if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]
    return sorted(spawned)


def killed_in_training(folder: Folder) -> dict[str, Any]:
    run, _ = started(folder, "killed", "--ranks", "2")
    os.kill(children(run.pid)[1], signal.SIGKILL)
    return resumed(run, "was ended by")


def stuck_in_training(folder: Folder) -> dict[str, Any]:
    run, _ = started(folder, "stuck", "--ranks", "2", "--timeout", "90")
    os.kill(children(run.pid)[1], signal.SIGSTOP)
    return resumed(run, "spanwise: no step has ended")


def damaged_plan(folder: Folder) -> dict[str, Any]:
    path, began = folder.path / "plan.npz", time.monotonic()
    spanwise.make_plan(spanwise.SpanMask.causal(64), num_ranks=2).save(path)
    spoil(path, "flip")
    try:
        spanwise.Plan.load(path)
    except ValueError as error:
        return {"seconds": time.monotonic() - began, "status": 1, "said": str(error).splitlines()[0][:200]}
    return {"seconds": 0.0, "status": 0, "said": None}


def attend(rank: int, store: str, fault: str, answers: Any) -> None:
    """A rank of a job of which the last rank, or the store's host, ends in the middle."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = int(store)
    victim = 0 if fault == "store" else RANKS - 1
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    length = 96 + (8 * rank if fault == "plans" else 0)
    plan = spanwise.make_plan(spanwise.SpanMask.causal(length), num_ranks=RANKS, exchange="needed", block_size=8)
    began = time.monotonic()
    try:
        local = plan.local(mesh)
        q, k, v = (spanwise.shard(local, mesh, torch.randn(1, 2, length, 8), dim=2).requires_grad_() for _ in range(3))
        spanwise.context_parallel_attention(q, k, v, local, mesh).sum().backward()
        dist.barrier()
        began = time.monotonic()
        if rank == victim and fault != "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        out = spanwise.context_parallel_attention(q, k, v, local, mesh)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        out.sum().backward()
    except (ValueError, RuntimeError) as error:
        answers.put((rank, time.monotonic() - began, f"{type(error).__name__}: {str(error)[:220]}"))


def attention(fault: str) -> Callable[[Folder], dict[str, Any]]:
    def run(folder: Folder) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        answers, port = context.Queue(), 20_000 + os.getpid() % 20_000
        ranks = [context.Process(target=attend, args=(r, str(port), fault, answers)) for r in range(RANKS)]
        for rank in ranks:
            rank.start()
        expected = RANKS if fault == "plans" else RANKS - 1
        found = sorted(answers.get(timeout=300) for _ in range(expected))
        for rank in ranks:
            rank.join(30)
        return {"seconds": max(seconds for _, seconds, _ in found), "status": 1, "said": found[-1][2]}

    return run


FAULTS: dict[str, tuple[Callable[[Folder], dict[str, Any]], str]] = {
    "a rank is killed in a forward": (attention("forward"), "the step"),
    "a rank is killed in a backward": (attention("backward"), "the step"),
    "the host of the store is lost": (attention("store"), "the step"),
    "ranks have different plans": (attention("plans"), "nothing"),
    "a plan file is damaged": (damaged_plan, "the plan"),
    "`spanwise train`: a rank is killed": (killed_in_training, "steps since the last save"),
    "`spanwise train`: a rank is stuck, `--timeout 90`": (stuck_in_training, "steps since the last save"),
    "`spanwise train`: a flipped bit in a shard": (flipped_bit, "steps since the checkpoint before"),
    "`spanwise train`: a truncated shard": (truncated, "steps since the checkpoint before"),
    "`spanwise train`: no room for a checkpoint": (full_disk, "steps since the last save"),
    "`spanwise train`: two jobs in one `--out`": (two_jobs, "nothing; the first goes on"),
    "`spanwise train`: data changed, then `--resume`": (changed_data, "nothing"),
    "`spanwise train`: Ctrl-C": (interrupted, "nothing"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make faults and note what happens.")
    parser.add_argument("--only", help="faults whose name has this text")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        for name, (make, lost) in FAULTS.items():
            if given.only and given.only not in name:
                continue
            row = {"fault": name, "lost": lost} | make(folder)
            row["said"] = row["said"] and row["said"].replace(f"{path}/", "")
            print(json.dumps(row), flush=True)
            rows.append(row)
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    if missing := [row["fault"] for row in rows if not row["said"]]:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        sys.exit(f"these faults were not named: {', '.join(missing)}")


if __name__ == "__main__":
    main()
