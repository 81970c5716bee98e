"""Cells of work on the ranks of a process group, all on one device, where a bad cell costs that cell alone.

A cell is a dict; a function in a module turns it into figures on each rank. Ranks tell one another how a cell ended. If
all ended alike the world goes on; otherwise a rank may be stuck in a collective, so the processes end, and a new world
begins at the next cell. A cell that takes too long, or that ends a process, counts as failed in the same way.
"""

from __future__ import annotations

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

from benchmarks.gpu.rows import Row, read_rows, write_row

_GRACE = 8.0  # seconds for the other ranks, once one has ended or is late
_PERIOD = 0.05


class NotPossible(Exception):
    """A cell that the device, the backend or torch cannot do; the text says why."""


@dataclasses.dataclass(frozen=True)
class World:
    """Ranks that share one device.

    Attributes:
        device: "cpu" or "cuda".
        module, function: ``function(cell, rank)`` returns figures; the row of a cell has the largest of all ranks.
        cell_seconds: limit of a cell; the first ones may compile.
    """

    size: int
    backend: str
    device: str
    module: str
    function: str
    cell_seconds: float = 60.0

    def run(self, cells: Sequence[Row], rows: Path, until: float) -> None:
        """Run all cells and write a row for each; those for which no time is left (`time.monotonic`) are skipped."""
        first = 0
        while first < len(cells):
            if time.monotonic() + 2 > until:
                for cell in cells[first:]:
                    write_row(rows, **cell, status="skipped", error="no time was left")
                return
            found, why = self._begin(cells[first:], until)
            for cell, of_ranks in zip(cells[first:], found, strict=False):
                write_row(rows, **cell, **_joined(of_ranks))
            first += len(found)
            if why and first < len(cells) and time.monotonic() < until:
                write_row(rows, **cells[first], status="failed", error=why)
                first += 1

    def _begin(self, cells: Sequence[Row], until: float) -> tuple[list[tuple[Row, ...]], str]:
        """Rows of all ranks for the cells that new processes end; and why the next cell has none."""
        with tempfile.TemporaryDirectory(prefix="spanwise-world-") as folder:
            context = multiprocessing.get_context("spawn")
            ranks = [
                context.Process(target=_rank, args=(self, rank, list(cells), folder), daemon=True)
                for rank in range(self.size)
            ]
            files = [Path(folder, f"rank-{rank}") for rank in range(self.size)]
            for rank in ranks:
                rank.start()
            try:
                why = self._watch(ranks, files, until)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.join()
            return list(zip(*map(read_rows, files), strict=False)), why

    def _watch(self, ranks: Sequence[BaseProcess], files: Sequence[Path], until: float) -> str:
        """Wait for the processes; returns why they ended before a cell, "" if every rank wrote as many rows."""
        begin, seen, late = time.monotonic(), -1, 0.0
        while any(rank.is_alive() for rank in ranks):
            time.sleep(_PERIOD)
            now, done = time.monotonic(), min(len(read_rows(file)) for file in files)
            if done != seen:
                begin, seen = now, done
            late = (late or now) if not all(rank.is_alive() for rank in ranks) else 0.0
            if now > min(until, begin + self.cell_seconds) or (late and now > late + _GRACE):
                break
        counts = {len(read_rows(file)) for file in files}
        if len(counts) == 1 and counts != {0}:
            return ""
        return f"the ranks ended with {[rank.exitcode for rank in ranks]} after {time.monotonic() - begin:.0f} s"


def _joined(of_ranks: Sequence[Row]) -> Row:
    """One row from those of all ranks: the largest of each figure; the first rank that failed, if one did."""
    for status in ("failed", "not possible"):
        for rank, row in enumerate(of_ranks):
            if row["status"] == status:
                return {"status": status, "error": f"rank {rank}: {row['error']}"}
    joined = dict(of_ranks[0])
    for name, value in joined.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            joined[name] = max(row[name] for row in of_ranks)
    return joined


@dataclasses.dataclass(frozen=True)
class Here:
    """A rank of a world: `mesh` over all ranks, and `levels` of ``(size // 2, 2)``, None for an odd size."""

    world: World
    rank: int
    device: torch.device
    mesh: DeviceMesh
    levels: DeviceMesh | None


def _rank(world: World, rank: int, cells: Sequence[Row], folder: str) -> None:
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
    levels = _mesh(world, (world.size // 2, 2), ("outer", "inner")) if world.size % 2 == 0 else None
    here = Here(world, rank, torch.device(world.device, 0 if world.device == "cuda" else None), mesh, levels)
    function = getattr(importlib.import_module(world.module), world.function)
    heard = dist.PrefixStore("cells", store)
    for number, cell in enumerate(cells):
        result = _result(function, cell, here)
        heard.set(f"{number}/{rank}", result["status"])
        try:
            heard.wait([f"{number}/{other}" for other in range(world.size)], timedelta(seconds=_GRACE))
            alike = len({heard.get(f"{number}/{other}") for other in range(world.size)}) == 1
        except RuntimeError:  # a rank is late
            alike = False
        write_row(Path(folder, f"rank-{rank}"), **result)
        if not alike or "CUDA error" in result.get("error", ""):
            break
    os._exit(0)  # collectives may be under way, and an orderly exit would wait for them


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
