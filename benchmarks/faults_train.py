"""Faults of `spanwise train`: its ranks, its checkpoints, its folder, its data; `faults.py` runs them.

Seconds count from the fault to the line that names it; from the start of the command where the fault is there before.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL = ["--seq-len", "96", "--dim", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--hidden-dim", "24"]


class Folder:
    """Data and a run of two checkpoints; each fault gets its own copy of the run."""

    def __init__(self, path: Path):
        self.path, self.data, self.clean = path, path / "data", path / "clean"
        self.data.mkdir()
        for i in range(6):
            (self.data / f"{i}.txt").write_text(f"document {i} " * 20)
        run = self.train(self.clean, "--steps", "2", "--save-every", "1")
        text = run.communicate()[0]
        if run.returncode:
            raise RuntimeError(f"the run without a fault failed: {text}")

    def train(self, out: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spanwise", "train", "--data", str(self.data), "--out", str(out)]
        return subprocess.Popen(
            [*command, *MODEL, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            **more,
        )

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.clean, self.path / name))

    def resume(self, out: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
        """One step more than the newest checkpoint has."""
        step = int((out / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
        return self.train(out, "--steps", str(step + 1), "--resume", *options, **more)


def ended(run: subprocess.Popen[str], text: str) -> dict[str, Any]:
    """Seconds until a command prints the words `text`, what follows them, and its exit status."""
    began, said, seconds = time.monotonic(), "", None
    assert run.stdout is not None
    for line in run.stdout:
        said = " ".join(f"{said} {line}".split())
        if seconds is None and re.search(text, said):
            seconds = time.monotonic() - began
    run.wait(timeout=60)
    found = re.search(rf"{text}.*", said)
    return {"seconds": seconds, "runs": 1, "status": run.returncode, "said": found[0] if found else None}


def then_resumed(folder: Folder, out: Path, row: dict[str, Any], *options: str) -> dict[str, Any]:
    """The row, with the exit status of a command that goes on after the fault."""
    run = folder.resume(out, *options)
    run.communicate(timeout=600)
    return row | {"resumed": run.returncode}


def spoil(path: Path, how: str) -> None:
    """Flip a bit of a file, or cut its end off."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else path.read_bytes()[:-50])


def damaged(folder: Folder, how: str) -> dict[str, Any]:
    out = folder.copy(how)
    spoil(out / "checkpoints" / "step-00000002" / "__0_0.distcp", how)
    return ended(folder.resume(out), "damaged checkpoints were")


def all_damaged(folder: Folder) -> dict[str, Any]:
    out = folder.copy("all damaged")
    for path in (out / "checkpoints").glob("step-*/__0_0.distcp"):
        spoil(path, "flip")
    return ended(folder.resume(out), "no checkpoint in")


def changed_data(folder: Folder) -> dict[str, Any]:
    """Other contents of the same length."""
    out, file = folder.copy("changed"), folder.data / "0.txt"
    before = file.read_text()
    file.write_text(before.replace("0", "1"))
    try:
        return ended(folder.resume(out), "the data are")
    finally:
        file.write_text(before)


def full_disk(folder: Folder) -> dict[str, Any]:
    """No file may grow past half a shard: the error number differs from that of a full disk, the path does not."""
    out = folder.copy("full")
    most = (out / "checkpoints" / "step-00000002" / "__0_0.distcp").stat().st_size // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # noqa: E731
    return then_resumed(folder, out, ended(folder.resume(out, preexec_fn=limit), "step 3 cannot be saved"))


def started(folder: Folder, name: str, *options: str) -> tuple[subprocess.Popen[str], Path]:
    """A long run that has saved at least once."""
    out = folder.path / name
    run = folder.train(out, "--steps", "100000", "--save-every", "1", *options)
    while not (out / "checkpoints" / "latest").exists():
        if run.poll() is not None:
            raise RuntimeError(f"the run ended before the fault: {run.communicate()[0]}")
        time.sleep(0.05)
    return run, out


def two_jobs(folder: Folder) -> dict[str, Any]:
    run, out = started(folder, "shared")
    try:
        row = ended(folder.train(out, "--steps", "3"), r"process \d+ on")
        return row | {"first goes on": run.poll() is None}
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def interrupted(folder: Folder) -> dict[str, Any]:
    run, out = started(folder, "interrupted")
    run.send_signal(signal.SIGINT)
    return then_resumed(folder, out, ended(run, "stopped after step"))


def local_ranks(launcher: int) -> list[int]:
    """Processes of the ranks below a launcher, in the order of their start."""
    found = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(p) for p in found if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text())


def killed(folder: Folder) -> dict[str, Any]:
    run, out = started(folder, "killed", "--ranks", "2")
    os.kill(local_ranks(run.pid)[1], signal.SIGKILL)
    return then_resumed(folder, out, ended(run, "rank 1 was ended by"), "--ranks", "2")


def stuck(folder: Folder) -> dict[str, Any]:
    run, out = started(folder, "stuck", "--ranks", "2", "--timeout", "30")
    os.kill(local_ranks(run.pid)[1], signal.SIGSTOP)
    return then_resumed(folder, out, ended(run, r"no step has ended for \d+ s \(--timeout"), "--ranks", "2")
