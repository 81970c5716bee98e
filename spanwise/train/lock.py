"""One run at a time in a folder: a file with the host and the process that writes there.

The file outlives a process that is killed. On the same host the next run sees that the process is gone and takes the
file over; from another host nobody can see that, so the user removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "lock.json"


@contextlib.contextmanager
def lock(out: Path) -> Iterator[None]:
    """Hold the folder `out` for this process; ``ValueError`` names host and process of another run that holds it."""
    path, mine = out / NAME, _describe(os.getpid())
    while True:
        try:
            with open(path, "x") as file:
                file.write(json.dumps(mine) + "\n")
            break
        except FileExistsError:
            _take_over(path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody else wrote there
            if _read(path) == mine:
                path.unlink()


def _take_over(path: Path) -> None:
    """Remove the lock of a process of this host; ``ValueError`` if it may still run."""
    holder = _read(path)
    if holder is None:
        return
    host, process = holder.get("host"), holder["pid"]
    if host != socket.gethostname():
        raise ValueError(
            f"process {process} on host {host} writes into {path.parent}; give another --out, or remove {path} if that "
            "process has ended"
        )
    if _describe(process) == holder:
        raise ValueError(f"process {process} on this host writes into {path.parent}; wait for it or give another --out")
    stale = path.with_name(f".{path.name}.stale.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        path.rename(stale)
        if _read(stale) == holder:
            stale.unlink()
        else:  # it was faster in between: give its lock back
            stale.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    """The holder in a lock file; None without a file."""
    holder = None
    for _ in range(10):
        with contextlib.suppress(ValueError):
            try:
                holder = json.loads(path.read_text())
            except FileNotFoundError:
                return None
        if isinstance(holder, dict) and isinstance(holder.get("pid"), int):
            return holder
        time.sleep(0.1)  # another run may be writing it
    raise ValueError(f"{path} is no lock of a run; remove it if no run writes into {path.parent}")


def _describe(process: int) -> dict[str, Any] | None:
    """Host, number and start of a process of this host; None if it has ended."""
    started = ""
    try:
        os.kill(process, 0)
        with contextlib.suppress(OSError):  # Linux: tells a process from a later one with its number
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] == "Z":  # ended, and its parent has not asked how
                return None
            started = fields[19]
    except ProcessLookupError:
        return None
    except PermissionError:  # of another user
        pass
    return {"host": socket.gethostname(), "pid": process, "started": started}
