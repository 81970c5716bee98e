"""Runs the rows of a step in processes of their own, so that a row that fails, crashes or hangs costs that row alone.

    rows (data) ─► ranks, processes that share the device ─► fill(here, found, row) ─► a line in a file for each row

Each row is written as soon as it ends. The ranks share how it ended: if all ended alike they go on, otherwise a rank
may be stuck in a collective, so the processes end and new ones begin at the next row. So they do after a row that takes
too long, or that ends a process.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Row = dict[str, Any]
DRY_SECONDS = 120.0  # of a step and of a row: a dry run shares its cores
_GRACE = 8.0  # seconds for the other ranks, once one has ended or is late
_LEAST, _PERIOD = 3.0, 0.1  # seconds below which no row is begun, and between looks at the processes
_TAIL = 2000  # characters kept of what a failed process printed


class NotPossible(Exception):
    """A row that the device, the backend or torch cannot do; the text says why."""


class Here(NamedTuple):
    """What a rank has.

    Attributes:
        dry: on the CPU, at tiny sizes.
        mesh: over all ranks, None for a step without a group.
        write: appends a row of its own to the step's; a crash afterwards cannot lose it.
        kept: what one row of this process leaves for others.
    """

    dry: bool
    rank: int
    mesh: DeviceMesh | None
    write: Callable[[Row], None]
    kept: Row

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16


class Step(NamedTuple):
    """Rows, and what fills them in.

    Attributes:
        rows: ``rows(dry)``, the most important first.
        fill: ``fill(here, found, row)`` puts figures into `found`; written are those of rank 0, or of one that failed.
        seconds: limit of the step; `row_seconds` of a row, which may compile.
        size: ranks that share the device; `backend` of their group, "" for none.
    """

    rows: Callable[[bool], list[Row]]
    fill: Callable[[Here, Row, Row], None]
    seconds: float
    row_seconds: float = 60.0
    size: int = 1
    backend: str = ""

    def run(self, dry: bool, seconds: float, changed: Callable[[list[Row]], None]) -> list[Row]:
        """Run all rows in at most so many seconds; those for which no time is left are skipped."""
        cells, until, spawn = self.rows(dry), time.monotonic() + seconds, multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="spanwise-gpu-") as name:
            folder, ended = Path(name), 0
            while ended < len(cells) and time.monotonic() + _LEAST < until:
                begin, arguments = time.monotonic(), (self._replace(rows=list), cells, ended, dry, folder)
                ranks = [spawn.Process(target=_rank, args=(rank, *arguments)) for rank in range(self.size)]
                for rank in ranks:
                    rank.start()
                try:
                    self._watch(ranks, folder, until, DRY_SECONDS if dry else self.row_seconds, changed)
                    codes = [rank.exitcode for rank in ranks]
                finally:
                    for rank in ranks:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
                        rank.kill()
                        rank.join()
                _, ended = read(folder)
                bad, in_time = any(codes) or None in codes, time.monotonic() < until or not ended
                if bad and in_time and ended < len(cells):
                    log = "\n".join(x.read_text(errors="replace").strip()[-_TAIL:] for x in folder.glob("log-*"))
                    why = f"the ranks ended with {codes} after {time.monotonic() - begin:.0f} s\n{log}"
                    _append(folder, cells[ended] | {"status": "failed", "error": why}, ended)
                    ended += 1
            for number, row in enumerate(cells[ended:], ended):
                _append(folder, row | {"status": "skipped", "error": "no time was left"}, number)
            return read(folder)[0]

    def _watch(
        self, ranks: Sequence[Any], folder: Path, until: float, row_seconds: float, changed: Callable[..., None]
    ) -> None:
        """Wait for the processes, until a row takes too long or one of them has ended before the others."""
        begin, known, late = time.monotonic(), -1, math.inf
        while any(rank.is_alive() for rank in ranks):
            time.sleep(_PERIOD)
            now, (rows, _) = time.monotonic(), read(folder)
            if len(rows) != known:
                begin, known = now, len(rows)
                changed(rows)
            if not all(rank.is_alive() for rank in ranks):
                late = min(late, now + _GRACE)
            if now > min(until, begin + row_seconds, late):
                return


def _append(folder: Path, row: Row, number: int | None = None) -> None:
    """Write a row; `number`: that of the cell which ends with it."""
    with Path(folder, "rows").open("a", encoding="utf-8") as out:
        out.write("\n" + json.dumps([row, number]))  # a line of its own, whatever a killed process left


def read(folder: Path) -> tuple[list[Row], int]:
    """The rows, and how many cells have ended. A line that a killed process left unfinished is left out."""
    rows, ended, file = [], 0, Path(folder, "rows")
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            row, number = json.loads(line)
            rows.append(row)
            ended = ended if number is None else number + 1
    return rows, ended


def _rank(rank: int, step: Step, cells: Sequence[Row], first: int, dry: bool, folder: Path) -> None:
    os.setsid()
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if dry:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    store = dist.FileStore(f"{folder}/store-{first}", step.size)
    mesh = None
    if backend := "gloo" if dry and step.backend else step.backend:
        timeout = timedelta(seconds=DRY_SECONDS if dry else step.row_seconds)
        world = dist.PrefixStore("world", store)
        dist.init_process_group(backend, store=world, rank=rank, world_size=step.size, timeout=timeout)
        # The backend is named: where there is CUDA, releases of torch add NCCL to the groups of a mesh in a gloo world,
        # and NCCL refuses ranks that share a device.
        device, override = "cpu" if dry else "cuda", {"cp": backend}
        mesh = init_device_mesh(device, (step.size,), mesh_dim_names=("cp",), backend_override=override)
    here = Here(dry, rank, mesh, lambda row: _append(folder, row) if rank == 0 else None, {})
    shared = dist.PrefixStore("cells", store)
    for number in range(first, len(cells)):
        shared.set(f"{number}/{rank}", json.dumps(_filled(step, here, cells[number])))
        keys = [f"{number}/{other}" for other in range(step.size)]
        try:
            shared.wait(keys, timedelta(seconds=_GRACE))
        except RuntimeError:  # a rank is late
            os._exit(1)
        found = [json.loads(shared.get(key)) for key in keys]
        bad = next((each for each in found if each["status"] == "failed"), None)
        if rank == 0:
            _append(folder, cells[number] | (bad or found[0]), number)
        if len({each["status"] for each in found}) > 1 or any("CUDA error" in each.get("error", "") for each in found):
            break
    sys.stdout.flush()
    os._exit(0)  # collectives may be under way, and an orderly exit would wait for them


def _filled(step: Step, here: Here, row: Row) -> Row:
    found: Row = {}
    begin = time.monotonic()
    try:
        step.fill(here, found, row)
        if not here.dry:
            torch.cuda.synchronize()
    except NotPossible as reason:
        return found | {"status": "not possible", "error": str(reason)}
    except Exception as error:
        return found | {"status": "failed", "error": f"{type(error).__name__}: {str(error).strip()}"[:500]}
    return {"status": "ok", "seconds": round(time.monotonic() - begin, 3)} | found
