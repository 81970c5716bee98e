"""Every kernel × exchange × dtype × mask on the device against dense float64 attention: outputs and gradients.

Several ranks are processes that share the device, over gloo, which moves CUDA tensors through host memory. NCCL takes
one rank a device, so its world has one rank: the exchanges' collectives and autograd functions run in it directly.

A bad cell costs that cell alone. The ranks share how a cell ended; if all ended alike the world goes on, otherwise a
rank may be stuck in a collective, so the processes end and a new world begins at the next cell. A cell that takes too
long, or that ends a process, counts as failed in the same way.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import spanwise
from benchmarks.gpu.device import Context, Row, read_rows
from spanwise import SpanMask

# The tolerances of `spanwise.verify`: largest error relative to the largest number.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3.5e-2, "float16": 1e-2}
MASKS = ("documents", "causal", "window", "prefix", "empty rows")
HEADS, KV_HEADS, DIM = 8, 4, 64
EXCHANGES: dict[str, dict[str, Any]] = {
    "needed, 1 chunk": {"exchange": "needed", "stages": 1},
    "needed, 2 chunks": {"exchange": "needed", "stages": 2},
    "needed, refetched": {"exchange": "needed", "stages": 2, "keep_kv": False},
    "all_gather": {"exchange": "all_gather"},
    "ring": {"exchange": "ring"},
    "ulysses": {"exchange": "ulysses"},
    "two levels": {"exchange": "needed", "stages": 1},
}
NOT_HERE = (("sdpa", "float32"), ("varlen", "float32"))  # refused by the kernel on CUDA, not computed
_GRACE = 8.0  # seconds for the other ranks, once one has ended or is late
_PERIOD = 0.05


def run(context: Context) -> None:
    until, size = time.monotonic() + context.seconds - 6, 4
    # Most important first, for flex compiles each dtype for a while.
    tried = [("flex", "bfloat16"), ("varlen", "bfloat16"), ("reference", "float32"), ("flex", "float32")]
    tried += [("varlen", "float16"), ("reference", "bfloat16"), ("reference", "float16"), ("flex", "float16")]
    if context.dry:
        tried = list(itertools.product(("reference", "sdpa"), TOLERANCES))
    masks = MASKS[::4] if context.dry else MASKS
    one = [_attention(mask, "none", *pair) for mask in masks for pair in tried]
    alone = World(1, "gloo" if context.dry else "nccl", context.device.type, cell)
    alone.run([{**each, "world": f"1 rank, {alone.backend}"} for each in one], context, until)
    several = World(size, "gloo", context.device.type, cell, 30.0 if context.dry else 90.0)
    every = itertools.product(masks, tried, EXCHANGES)
    # A dry run has time for each dtype with one mask.
    short = context.dry
    cells = [
        _attention(mask, exchange, *pair)
        for mask, pair, exchange in every
        if not short or mask == MASKS[0] or pair[1] == "float32"
    ]
    cells += [_attention("documents", "needed, 1 chunk", *pair) for pair in NOT_HERE if not short]
    several.run([{**each, "world": f"{size} ranks, gloo"} for each in cells], context, until)


def _attention(mask: str, exchange: str, kernel: str, dtype: str) -> Row:
    return {"what": "attention", "mask": mask, "exchange": exchange, "kernel": kernel, "dtype": dtype}


def cell(row: Row, here: Here) -> Row:
    """One cell on one rank."""
    cuda, size = here.device.type == "cuda", here.mesh.size()
    length, block = (1000, 128) if cuda else (90, 16)
    shape, mesh = (size, here.mesh) if row["exchange"] != "two levels" else ((size // 2, 2), here.levels)
    plan = spanwise.make_plan(
        _mask(row["mask"], length), shape, balancer="head_tail", block_size=block, num_q_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, dtype=row["dtype"], **EXCHANGES.get(row["exchange"], {}),
    )  # fmt: skip
    given, wanted = _problem(row["mask"], length, row["dtype"], here.device)
    local = [plan.shard(x, here.rank, dim=2).clone() for x in given]
    leaves = [x.requires_grad_() for x in local[:3]]
    try:
        rank_plan = plan.local(mesh, here.device, kernel=row["kernel"])
        out = spanwise.context_parallel_attention(*leaves, rank_plan, mesh, kernel=row["kernel"])
    except ValueError as refused:
        if (row["kernel"], row["dtype"]) in NOT_HERE:
            raise NotPossible(str(refused)) from refused
        raise
    errors = {}
    got = [out.detach(), *torch.autograd.grad(out, leaves, local[3])]
    for name, x, whole in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        exact = plan.shard(whole, here.rank, dim=2)
        assert x.dtype == given[0].dtype, f"{name} is {x.dtype}, the inputs are {row['dtype']}"
        errors[name] = float((x.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))
        assert errors[name] <= TOLERANCES[row["dtype"]], f"{name} differs by {errors[name]:.2e}"
    return errors


def _mask(name: str, length: int) -> SpanMask:
    cuts = [0, 1, length // 3, length // 3, length // 2 + 1, length]
    rows = np.arange(length)
    empty = rows % 7 == 3
    start, end = np.where(empty, 0, np.maximum(rows - length // 4, 0)), np.where(empty, 0, rows + 1)
    return {
        "documents": lambda: SpanMask.documents(cuts),
        "causal": lambda: SpanMask.causal(length),
        "window": lambda: SpanMask.sliding_window(length, length // 5, 3),
        "prefix": lambda: SpanMask.prefix_lm(cuts, [1, 5, 0, length // 9, length // 8]),
        "empty rows": lambda: SpanMask(start[None], end[None], length),
    }[name]()


@functools.lru_cache(maxsize=8)
def _problem(mask: str, length: int, dtype: str, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and the output's gradient in `dtype`, alike on all ranks; dense float64 out, dq, dk and dv of these."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((n, length, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    given = [torch.randn(1, *shape, generator=draw).to(getattr(torch, dtype)).to(device) for shape in shapes]
    leaves = [x.double().requires_grad_() for x in given[:3]]
    visible = torch.from_numpy(_mask(mask, length).dense()[0]).to(device)
    some = visible.any(-1, keepdim=True)  # rows without a key give 0
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in leaves[1:])
    scores = (leaves[0] @ k.mT / math.sqrt(DIM)).masked_fill(~visible, -math.inf).masked_fill(~some, 0.0)
    out = torch.softmax(scores, -1).masked_fill(~some, 0.0) @ v
    return given, [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


class NotPossible(Exception):
    """A cell that the device, the backend or torch cannot do; the text says why."""


class Here(NamedTuple):
    """A rank of a world: `mesh` over all ranks, and `levels` of ``(size // 2, 2)``, None for an odd size."""

    rank: int
    device: torch.device
    mesh: DeviceMesh
    levels: DeviceMesh | None


class World(NamedTuple):
    """Ranks that share one device.

    Attributes:
        function: ``function(cell, here)`` returns figures; the row of a cell has the largest of all ranks.
        cell_seconds: limit of a cell; the first ones may compile.
    """

    size: int
    backend: str
    device: str
    function: Callable[[Row, Here], Row]
    cell_seconds: float = 60.0

    def run(self, cells: Sequence[Row], context: Context, until: float) -> None:
        """Run all cells and write a row for each; those for which no time is left (`time.monotonic`) are skipped."""
        first, spawn = 0, multiprocessing.get_context("spawn")
        while first < len(cells) and time.monotonic() + 2 < until:
            before, begin = len(read_rows(context.rows)), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="spanwise-world-") as folder:
                ranks = [
                    spawn.Process(target=_rank, args=(self, rank, list(cells[first:]), context, folder), daemon=True)
                    for rank in range(self.size)
                ]
                for rank in ranks:
                    rank.start()
                try:
                    self._watch(ranks, context, until)
                finally:
                    for rank in ranks:
                        rank.kill()
                        rank.join()
            first += len(read_rows(context.rows)) - before
            codes = [rank.exitcode for rank in ranks]
            if any(codes) and first < len(cells) and time.monotonic() < until:
                why = f"the ranks ended with {codes} after {time.monotonic() - begin:.0f} s"
                context.write(**cells[first], status="failed", error=why)
                first += 1
        for row in cells[first:]:
            context.write(**row, status="skipped", error="no time was left")

    def _watch(self, ranks: Sequence[Any], context: Context, until: float) -> None:
        """Wait for the processes, until a cell takes too long or one of them has ended before the others."""
        begin, done, late = time.monotonic(), -1, math.inf
        while any(rank.is_alive() for rank in ranks):
            time.sleep(_PERIOD)
            now, count = time.monotonic(), len(read_rows(context.rows))
            if count != done:
                begin, done = now, count
            if not all(rank.is_alive() for rank in ranks):
                late = min(late, now + _GRACE)
            if now > min(until, begin + self.cell_seconds, late):
                return


def _rank(world: World, rank: int, cells: Sequence[Row], context: Context, folder: str) -> None:
    if world.device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world.size)
    dist.init_process_group(
        world.backend, store=dist.PrefixStore("world", store), rank=rank, world_size=world.size,
        timeout=timedelta(seconds=world.cell_seconds),
    )  # fmt: skip

    def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        # The backend is named: where there is CUDA, releases of torch add NCCL to the groups of a mesh in a gloo world,
        # and NCCL refuses ranks that share a device.
        override = dict.fromkeys(names, world.backend)
        return init_device_mesh(world.device, shape, mesh_dim_names=names, backend_override=override)

    levels = mesh((world.size // 2, 2), ("outer", "inner")) if world.size % 2 == 0 else None
    here = Here(rank, context.device, mesh((world.size,), ("cp",)), levels)
    shared = dist.PrefixStore("cells", store)
    for number, row in enumerate(cells):
        shared.set(f"{number}/{rank}", json.dumps(_result(world.function, row, here)))
        keys = [f"{number}/{other}" for other in range(world.size)]
        try:
            shared.wait(keys, timedelta(seconds=_GRACE))
        except RuntimeError:  # a rank is late
            os._exit(1)
        found = [json.loads(shared.get(key)) for key in keys]
        if rank == 0:
            context.write(**row, **_joined(found))
        if len({each["status"] for each in found}) > 1 or any("CUDA error" in each.get("error", "") for each in found):
            break
    os._exit(0)  # collectives may be under way, and an orderly exit would wait for them


def _result(function: Callable[[Row, Here], Row], row: Row, here: Here) -> Row:
    begin = time.monotonic()
    try:
        found = function(row, here)
        if here.device.type == "cuda":
            torch.cuda.synchronize()
    except NotPossible as reason:
        return {"status": "not possible", "error": str(reason)}
    except Exception as error:
        return {"status": "failed", "error": f"{type(error).__name__}: {str(error).strip()}".split("\n")[0][:500]}
    return {"status": "ok", "seconds": round(time.monotonic() - begin, 3), **found}


def _joined(of_ranks: Sequence[Row]) -> Row:
    """One row from those of all ranks: the largest of each figure; the first rank that failed, if one did."""
    for status in ("failed", "not possible"):
        for rank, row in enumerate(of_ranks):
            if row["status"] == status:
                return {"status": status, "error": f"rank {rank}: {row['error']}"}
    return {name: max(row[name] for row in of_ranks) for name in of_ranks[0]}
