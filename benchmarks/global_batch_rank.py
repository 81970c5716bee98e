"""One rank of `global_batch.py`: steps of a small decoder on its share of a global batch, on its host.

Reads jobs as JSON, one a line, from standard input and writes what it measured to the file that the job names. Times
are readings of the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from global_batch_ways import MODEL, SHAPE, Way, share
from slow_link_rank import say, say_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import spanwise
from spanwise.calibrate.measure import measure as calibrate
from spanwise.hardware import Hardware

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from decoder import Decoder


def main() -> None:
    say("ready")
    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {sorted(job["cores"])[job["rank"] % len(job["cores"])]})
        if not dist.is_initialized():
            store = dist.FileStore(job["store"], job["num_ranks"])
            dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["num_ranks"])
        torch.save(answer(job), job["out"])
        say("done")
    dist.destroy_process_group()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    ranks, rank = job["num_ranks"], job["rank"]
    if "calibrate" in job:
        if not job["calibrate"]:
            return {"token_seconds": token_seconds()}
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        hardware = calibrate(mesh, **{name: SHAPE[name] for name in SHAPE if name != "dtype"}, host_size=1).hardware
        return {"hardware": hardware.to_dict(), "token_seconds": token_seconds()}
    hardware = Hardware.from_dict(job["hardware"])
    steps = {}
    for fields in job["ways"]:
        way = Way(**fields)
        mesh = init_device_mesh("cpu", (way.dp, ranks // way.dp), mesh_dim_names=("dp", "cp"))
        mine = share(way, np.array(job["lengths"]), ranks, hardware, job["linear_flops"])[rank // mesh["cp"].size()]
        steps[way.name] = step_of(mine, mesh["cp"])
    return timed(steps, job["repeats"], rank)


def step_of(mine: tuple[np.ndarray, spanwise.Plan] | None, mesh: DeviceMesh) -> Callable[[], float]:
    """Forward and backward of this rank's documents; the sum of its losses. No gradients are summed over ranks."""
    model = Decoder(**MODEL)
    style = spanwise.ContextParallel(attention_type="sdpa")
    parallelize_module(model, mesh, {"layers.*.inner": style})
    if mine is None:
        return lambda: 0.0
    lengths, plan = mine
    pieces = np.column_stack([np.arange(len(lengths)), np.zeros(len(lengths), dtype=int), lengths])
    batch = spanwise.GlobalBatch(pieces, plan, 0).load([np.arange(n) * 7 % 251 for n in lengths], mesh.get_local_rank())
    local = plan.local(mesh)

    def step() -> float:
        model.zero_grad()
        logits = model(batch["input_ids"], batch["position_ids"], local)
        loss = F.cross_entropy(logits[0], batch["labels"][0], ignore_index=-100, reduction="sum")
        loss.backward()
        return loss.item()

    return step


def token_seconds() -> float:
    """Seconds of a token in a step whose documents are so short that attention is next to nothing."""
    lengths = np.full(128, 16)
    mask = spanwise.SpanMask.documents(np.append(0, np.cumsum(lengths)))
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))["cp"]
    step = step_of((lengths, spanwise.make_plan(mask, 1)), alone)
    step()
    times = []
    for _ in range(5):
        begin = time.process_time()
        step()
        times.append(time.process_time() - begin)
    return float(np.median(times) / lengths.sum())


def timed(steps: dict[str, Callable[[], float]], repeats: int, rank: int) -> dict[str, Any]:
    """Begin, end and CPU seconds of each step, in turns; and its loss."""
    found: dict[str, Any] = {name: {"times": [], "cpu": [], "loss": step()} for name, step in steps.items()}
    gc.collect()
    gc.disable()
    names = list(steps)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            dist.barrier()
            begin, cpu = time.monotonic(), time.process_time()
            steps[name]()
            found[name]["times"].append((begin, time.monotonic()))
            found[name]["cpu"].append(time.process_time() - cpu)
        say_once(rank, f"round {repeat + 1} of {repeats}")
    gc.enable()
    return found


if __name__ == "__main__":
    main()
