"""Starts ranks: local processes that this one watches, or takes part in the processes of torchrun.

A failing rank ends all of them; its number and traceback are shown. After Ctrl-C or SIGTERM the ranks finish their step
and save. Local ranks learn of it from a file, because a signal could hit a rank that is still importing; ranks of
torchrun receive the signal.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Seconds within which a second signal is the same request: Ctrl-C in a terminal reaches the ranks of torchrun from the
#: terminal, and again from torchrun.
_ECHO = 1.0

#: Seconds for the other ranks to end by themselves after one failed.
_GRACE = 5.0

#: Seconds without a finished step before the launcher reports where the ranks are, and seconds for their answers.
_REPORT = 60.0
_ANSWER = 3.0


@dataclass(frozen=True)
class Rank:
    """Number of this process, rendezvous with the others, and the file that asks to stop (local ranks only)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str
    stop_file: str | None = None

    def progressed(self) -> None:
        """Tell the launcher, if there is one, that this rank has got on."""
        if self.stop_file is not None:
            Path(self.stop_file).with_name("progress").touch()


class RankFailure(RuntimeError):
    """A rank failed; the text holds its number and its traceback."""


class RunError(RuntimeError):
    """Ends a run; its text says in one line why and what to do, so that no traceback is shown."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def join_ranks(rank: Rank, device: str) -> torch.device:
    """Join the process group of all ranks (gloo; "cuda" adds NCCL); returns the device. Local ranks share the cores."""
    torch.set_num_threads(max(1, cores() // rank.local_size))
    found, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        found, backend = torch.device("cuda", rank.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(found)
    dist.init_process_group(backend, init_method=rank.init_method, rank=rank.rank, world_size=rank.size)
    return found


def torchrun_rank() -> Rank | None:
    """This process as torchrun describes it in the environment, or None."""
    try:
        number, size, local, local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError:
        return None
    return Rank(number, size, local, local_size, "env://")


class StopRequest:
    """A request to finish the step, save and leave."""

    def __init__(self, rank: Rank) -> None:
        self._heard = 0
        self._when = 0.0
        self._file = Path(rank.stop_file) if rank.stop_file else None
        signal.signal(signal.SIGTERM, self._note)
        if self._file is None:  # otherwise the launcher handles Ctrl-C for all
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        if not self._heard:
            self._heard, self._when = number, time.monotonic()
        elif time.monotonic() - self._when > _ECHO:
            os._exit(128 + number)  # asked twice: a rank that waits for another never looks at the first request

    def asked(self) -> int:
        """The signal that asked to stop, or 0."""
        if not self._heard and self._file is not None and self._file.exists():
            self._heard = int(self._file.read_text() or signal.SIGTERM)
        return self._heard


def launch(target: Callable[..., int], *args: Any, ranks: int, timeout: float = math.inf) -> int:
    """Run ``target(rank, *args)`` on `ranks` local processes and return the largest exit status.

    `target` and `args` are pickled; spawned processes share nothing with this one. ``RankFailure`` if a rank raised,
    died, or no rank called `Rank.progressed` for `timeout` seconds; the others have ended.
    """
    with tempfile.TemporaryDirectory(prefix="spanwise-") as folder:
        context = multiprocessing.get_context("spawn")
        # Ranks inherit these ignored signals: Ctrl-C in a terminal hits the whole process group.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        stop_file = Path(folder, "stop")
        processes = []
        try:
            for number in range(ranks):
                rank = Rank(number, ranks, number, ranks, f"file://{folder}/rendezvous", str(stop_file))
                process = context.Process(target=_main, args=(target, rank, folder, args), name=f"rank {number}")
                process.start()
                processes.append(process)
            asked = 0

            def forward(number: int, frame: Any) -> None:
                nonlocal asked
                asked += 1
                if asked == 1:
                    stop_file.write_text(str(int(number)))
                    print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)
                else:
                    for process in processes:
                        process.kill()

            signal.signal(signal.SIGINT, forward)
            signal.signal(signal.SIGTERM, forward)
            _watch(processes, Path(folder), timeout)
            codes = [process.exitcode or 0 for process in processes]
            if asked > 1:
                return 130
            failure = _failure(Path(folder), codes)
            if failure is not None:
                raise RankFailure(failure)
            return max(codes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for number, handler in handlers.items():
                signal.signal(number, handler or signal.SIG_DFL)


def _watch(processes: list[Any], folder: Path, timeout: float) -> None:
    """Return when all have ended, or `_GRACE` seconds after a failure. Report ranks that do not get on.

    ``RankFailure`` if no rank got on for `timeout` seconds.
    """
    deadline, last, since, reported = None, -1, time.monotonic(), False
    while alive := [process for process in processes if process.exitcode is None]:
        if deadline is None and (any((p.exitcode or 0) < 0 for p in processes) or list(folder.glob("rank-*"))):
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() >= deadline:
            return
        progress = folder / "progress"
        if progress.exists() and (now := progress.stat().st_mtime_ns) != last:
            last, since, reported = now, time.monotonic(), False
        quiet = time.monotonic() - since
        if deadline is None and quiet >= min(timeout, _REPORT) and not reported:
            reported = True
            print(f"spanwise: no step has ended for {quiet:.0f} s; {_places(folder, len(processes))}", file=sys.stderr)
        if deadline is None and quiet >= timeout:
            raise RankFailure(
                f"no step has ended for {quiet:.0f} s (--timeout); {_places(folder, len(processes))}. If a "
                "checkpoint was saved, go on from it with --resume"
            )
        wait([process.sentinel for process in alive], timeout=0.5 if deadline is None else 0.1)


def _places(folder: Path, ranks: int) -> str:
    """The line of code at which each rank is, in words."""
    for number in range(ranks):
        (folder / f"at-{number}").unlink(missing_ok=True)
    (folder / "where").touch()
    until = time.monotonic() + _ANSWER
    while time.monotonic() < until and len(list(folder.glob("at-*"))) < ranks:
        time.sleep(0.05)
    (folder / "where").unlink()
    places = []
    for number in range(ranks):
        answer = folder / f"at-{number}"
        silent = f"does not answer within {_ANSWER:.0f} s: it is stopped, or busy outside Python"
        places.append(f"rank {number} {'is in ' + answer.read_text() if answer.exists() else silent}")
    return "; ".join(places)


def _failure(folder: Path, codes: list[int]) -> str | None:
    """The first failure, in words."""
    reports = []
    for number in range(len(codes)):
        report = folder / f"rank-{number}"
        if report.exists():
            when, text = report.read_text().split("\n", 1)
            reports.append((float(when), number, text))
    for number, code in enumerate(codes):
        # No report, and `launch` kills only after it reads the codes: something outside ended the rank.
        if code < 0 and not any(r[1] == number for r in reports):
            name = signal.Signals(-code).name
            hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
            return f"rank {number} was ended by {name}{hint}"
    if reports:
        _, number, text = min(reports)
        return f"rank {number} failed:{text}"
    return None


def _main(target: Callable[..., int], rank: Rank, folder: str, args: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    attend = (parent.sentinel, Path(folder), rank.rank)
    threading.Thread(target=_attend, args=attend, daemon=True).start()
    try:
        code = target(rank, *args)
    except BaseException as error:
        text = f" {error}" if isinstance(error, RunError) else f"\n{traceback.format_exc()}"
        partial = Path(folder, f"partial-{rank.rank}")
        partial.write_text(f"{time.time()}\n{text}")
        partial.rename(Path(folder, f"rank-{rank.rank}"))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown, which may wait for peers that are gone


def _attend(sentinel: Any, folder: Path, number: int) -> None:
    """Tell the process that watches this rank where the rank is, when asked; end with that process."""
    answer = folder / f"at-{number}"
    while not wait([sentinel], timeout=0.5):
        if (folder / "where").exists() and not answer.exists():
            frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
            partial = folder / f"partial-at-{number}"
            partial.write_text(" < ".join(f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames[:-4:-1]))
            partial.rename(answer)
    os._exit(1)
