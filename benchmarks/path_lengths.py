"""How many files one call runs through: what a reader has to open to follow it.

    python -m benchmarks.path_lengths --out benchmarks/results/path-lengths.json

`sys.setprofile` records each call of a function of spanwise. Counted are the files, the changes from one file to
another, and the classes of spanwise whose methods ran. Attention runs on two real gloo processes with exchange
"needed"; its third call is counted, when what is made once exists. torch's backward has a thread of its own for a
device; on the CPU it runs in the caller's, so it is recorded too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import spanwise
from benchmarks.publish import Result, main

ROOT = str(Path(spanwise.__file__).parent)
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def path_of(act: Callable[[], Any]) -> Result:
    """Files, changes of file and classes of a call; only functions of spanwise count."""
    files: list[str] = []
    classes: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename[len(ROOT) + 1 :])
            owner = getattr(frame.f_code, "co_qualname", "").split(".")[0]  # Python 3.11
            if owner.lstrip("_")[:1].isupper():
                classes.add(owner)

    sys.setprofile(record)
    try:
        act()
    finally:
        sys.setprofile(None)
    changes, path = sum(a != b for a, b in itertools.pairwise(files)), list(dict.fromkeys(files))
    return {"files": len(path), "changes": changes, "classes": sorted(classes), "calls": len(files), "path": path}


def attention(rank: int, store: str) -> Result:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = spanwise.make_plan(spanwise.SpanMask.causal(512), 2, exchange="needed", stages=1, **SHAPE)
    local, paths, out = plan.local(mesh), {}, []
    q, k, v = (torch.randn(1, n, local.tokens.shape[1], 16, requires_grad=True) for n in (4, 2, 2))
    for _ in range(3):
        paths["forward"] = path_of(lambda: out.append(spanwise.context_parallel_attention(q, k, v, local)))
        paths["backward"] = path_of(out[-1].sum().backward)
    dist.destroy_process_group()
    return paths


def paths(quick: bool = False) -> Result:
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(2) as pool:
        found, _ = pool.starmap(attention, [(rank, f"{folder}/store") for rank in range(2)], 1)
    mask = spanwise.SpanMask.documents([0, 3000, 3100, 9000, 16384])
    spanwise.make_plan(mask, 8, **SHAPE)  # compiles and caches
    return found | {"make_plan": path_of(lambda: spanwise.make_plan(mask, 8, **SHAPE))}


if __name__ == "__main__":
    main({"paths": paths}, __doc__ or "")
