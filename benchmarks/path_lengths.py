"""How many files one call runs through: what a reader has to open to follow it.

    python -m benchmarks.path_lengths --out path-lengths.json

Files, changes from one to another, classes whose methods run. Attention: the third call on two gloo processes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import spanwise
from benchmarks.publish import Result, main

SHAPE = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def path_of(act: Callable[[], Any]) -> Result:
    codes: list[Any] = []
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
    act()
    sys.setprofile(None)
    codes = [code for code in codes if code.co_filename.startswith(spanwise.__file__.removesuffix("__init__.py"))]
    files = [code.co_filename for code in codes]
    owners = sorted({getattr(code, "co_qualname", "").split(".")[0] for code in codes})  # Python 3.11
    classes = [owner for owner in owners if owner.lstrip("_")[:1].isupper()]
    return {"files": len(set(files)), "changes": sum(a != b for a, b in itertools.pairwise(files)), "classes": classes}


def attention(rank: int, store: str) -> Result:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    plan = spanwise.make_plan(spanwise.SpanMask.causal(512), 2, exchange="needed", stages=1, **SHAPE)
    local, paths, out = plan.local(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))), {}, []
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
