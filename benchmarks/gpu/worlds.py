"""Cells of work on the ranks of a process group, all on one device, where a bad cell costs that cell alone.

A cell is a dict; a function in a module turns it into figures on each rank. After a cell the ranks tell one another how
it went. Alike on all: the world goes on. Otherwise a rank may be stuck in a collective, so the processes end and a new
world begins at the next cell. A cell that takes too long, or that ends a process, counts as failed in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu.campaign import Row, read_rows, write_row

_GRACE = 8.0  # seconds for the other ranks, once one has ended or is late
_PERIOD = 0.05
_APART = 3  # exit code of ranks that ended a cell and cannot go on together


class NotPossible(Exception):
    """A cell that the device, the backend or torch cannot do; the text says why."""


@dataclasses.dataclass(frozen=True)
class World:
    """Ranks that share one device.

    Attributes:
        size: number of ranks.
        backend: of `torch.distributed`.
        device: "cpu" or "cuda".
        module: where the function is; it is imported by each rank.
        function: ``function(cell, rank)`` returns figures; the row of a cell has the largest of all ranks.
        cell_seconds: limit of a cell; the first ones may compile.
        start: "spawn"; or "forkserver", where worlds begin at once, forked from a process that has imported the module.
            An import may ask the driver for devices, after which a fork cannot use CUDA: so not for CUDA.
    """

    size: int
    backend: str
    device: str
    module: str
    function: str
    cell_seconds: float = 60.0
    start: str = "spawn"

    def run(self, cells: Sequence[Row], rows: Path, until: float) -> None:
        """Run all cells and write a row for each; those for which no time is left (`time.monotonic`) are skipped."""
        first = 0
        while first < len(cells):
            if time.monotonic() + 2 > until:
                for cell in cells[first:]:
                    write_row(rows, **cell, status="skipped", error="no time was left")
                return
            first = self._begin(cells, first, rows, until)

    def _begin(self, cells: Sequence[Row], first: int, rows: Path, until: float) -> int:
        """Run cells from `first` in new processes until they end; returns the number of the next cell."""
        with tempfile.TemporaryDirectory(prefix="spanwise-world-") as folder:
            context = multiprocessing.get_context(self.start)
            if self.start == "forkserver":
                context.set_forkserver_preload([self.module, "torch._dynamo"])
            arguments = [(self, rank, list(cells), first, folder) for rank in range(self.size)]
            ranks = [context.Process(target=_rank, args=given, daemon=True) for given in arguments]
            for rank in ranks:
                rank.start()
            files = [Path(folder, f"rank-{rank}") for rank in range(self.size)]
            try:
                error = self._watch(ranks, files, len(cells) - first, until)
            finally:
                for rank in ranks:
                    rank.kill()
                for rank in ranks:
                    rank.join()
            found = [read_rows(file) for file in files]
        done = min(map(len, found))
        for i in range(done):
            write_row(rows, **cells[first + i], **_joined([of_rank[i] for of_rank in found]))
        if first + done == len(cells):
            return first + done
        if time.monotonic() >= until:
            return first + done  # `run` skips the rest
        if error:
            write_row(rows, **cells[first + done], status="failed", error=error)
            return first + done + 1
        return max(first + done, first + 1)

    def _watch(self, ranks: Sequence[BaseProcess], files: Sequence[Path], num_cells: int, until: float) -> str:
        """Wait for the processes; returns why the next cell has no row, "" if every rank wrote as many."""
        begin, seen, late = time.monotonic(), -1, 0.0
        while any(rank.is_alive() for rank in ranks):
            time.sleep(_PERIOD)
            now, counts = time.monotonic(), [len(read_rows(file)) for file in files]
            if min(counts) == max(counts) and any(rank.exitcode == _APART for rank in ranks):
                return ""
            if min(counts) != seen:
                begin, seen = now, min(counts)
            dead = [i for i, rank in enumerate(ranks) if not rank.is_alive()]
            late = (late or now) if dead and seen < num_cells else 0.0
            if now >= until:
                return "no time was left"
            if now > begin + self.cell_seconds or (late and now > late + _GRACE):
                stuck = [i for i, rank in enumerate(ranks) if rank.is_alive()]
                return f"ranks {stuck} did not end the cell within {now - begin:.0f} s" + _codes(ranks)
        counts = [len(read_rows(file)) for file in files]
        return "" if min(counts) == max(counts) and min(counts) > 0 else f"processes ended in the cell{_codes(ranks)}"


def _codes(ranks: Sequence[BaseProcess]) -> str:
    return ", exit codes " + ", ".join(str(rank.exitcode) for rank in ranks)


def _joined(of_ranks: Sequence[Row]) -> Row:
    """One row from those of all ranks: the largest of each figure; the first rank that failed, if one did."""
    for status in ("failed", "not possible"):
        for rank, row in enumerate(of_ranks):
            if row["status"] == status:
                return {
                    "status": status,
                    "error": f"rank {rank}: {row['error']}" if len(of_ranks) > 1 else row["error"],
                }
    joined = dict(of_ranks[0])
    for name, value in joined.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            joined[name] = max(row[name] for row in of_ranks)
    return joined


@dataclasses.dataclass(frozen=True)
class Here:
    """A rank of a world.

    Attributes:
        mesh: 1-D, over all ranks.
        levels: ``(size // 2, 2)``; None in a world of an odd size.
    """

    world: World
    rank: int
    device: torch.device
    mesh: DeviceMesh
    levels: DeviceMesh | None


def _rank(world: World, rank: int, cells: Sequence[Row], first: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", world.size)
    if world.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        world.backend, store=dist.PrefixStore("world", store), rank=rank, world_size=world.size,
        timeout=timedelta(seconds=world.cell_seconds),
    )  # fmt: skip
    mesh = _mesh(world, (world.size,), ("cp",))
    levels = None
    if world.size % 2 == 0:
        levels = _mesh(world, (world.size // 2, 2), ("outer", "inner"))
    here = Here(
        world, rank, torch.device(world.device, 0) if world.device == "cuda" else torch.device("cpu"), mesh, levels
    )
    function = getattr(importlib.import_module(world.module), world.function)
    heard = dist.PrefixStore("cells", store)
    for number, cell in enumerate(cells[first:]):
        result = _result(function, cell, here)
        alike = _compare(heard, number, rank, world.size, result)
        write_row(Path(folder, f"rank-{rank}"), **result)
        if not alike or "CUDA error" in result.get("error", ""):
            os._exit(_APART)  # collectives may be under way, and an orderly exit would wait for them
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _mesh(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    # The backend is named: where there is CUDA, releases of torch add NCCL to the groups of a mesh in a gloo world, and
    # NCCL refuses ranks that share a device.
    override = dict.fromkeys(names, world.backend)
    return init_device_mesh(world.device, shape, mesh_dim_names=names, backend_override=override)


def _result(function: Any, cell: Row, here: Here) -> Row:
    begin = time.monotonic()
    try:
        found = function(cell, here)
        if here.device.type == "cuda":
            torch.cuda.synchronize()
    except NotPossible as reason:
        return {"status": "not possible", "error": str(reason)}
    except Exception as error:
        text = (str(error).strip().split("\n") or [""])[0]
        return {"status": "failed", "error": f"{type(error).__name__}: {text}"[:500]}
    return {"status": "ok", "seconds": round(time.monotonic() - begin, 3), **found}


def _compare(store: dist.Store, number: int, rank: int, size: int, result: Row) -> bool:
    """Whether the cell ended alike on all ranks; False also where one is not heard of in time."""
    store.set(f"{number}/{rank}", result["status"])
    try:
        store.wait([f"{number}/{other}" for other in range(size)], timedelta(seconds=_GRACE))
    except RuntimeError:
        return False
    return len({store.get(f"{number}/{other}") for other in range(size)}) == 1
