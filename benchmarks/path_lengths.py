"""How many files one call runs through: what a reader has to open to follow it.

    python benchmarks/path_lengths.py --out benchmarks/results/path-lengths.json

`sys.setprofile` records each call of a function of spanwise. Counted are the files, the changes from one file to
another between calls and returns, and the classes of spanwise whose methods ran. Attention runs on two real gloo
processes with exchange "needed"; its third call is counted, when what is made once exists. torch's backward has a
thread of its own for a device; on the CPU it runs in the caller's, so it is recorded too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import spanwise

ROOT = str(Path(spanwise.__file__).parent)
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def path_of(act: Callable[[], Any]) -> dict[str, Any]:
    """Files, changes of file and classes of a call; only functions of spanwise count."""
    files: list[str] = []
    classes: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        files.append(frame.f_code.co_filename[len(ROOT) + 1 :])
        owner = frame.f_code.co_qualname.split(".")[0] if sys.version_info >= (3, 11) else ""
        if owner[:1].isupper() or owner[:2].lstrip("_")[:1].isupper():
            classes.add(owner)

    sys.setprofile(record)
    try:
        act()
    finally:
        sys.setprofile(None)
    changes = sum(a != b for a, b in itertools.pairwise(files))
    order = list(dict.fromkeys(files))
    return {"files": len(order), "changes": changes, "classes": sorted(classes), "calls": len(files), "path": order}


def attention(rank: int, found: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(found["store"], 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    plan = spanwise.make_plan(spanwise.SpanMask.causal(512), 2, exchange="needed", stages=1, **SHAPE)
    local = plan.local(mesh)
    tokens = local.tokens.shape[1]
    q = torch.randn(1, 4, tokens, 16, requires_grad=True)
    k, v = (torch.randn(1, 2, tokens, 16, requires_grad=True) for _ in range(2))
    paths: dict[str, Any] = {}
    for _ in range(3):
        kept: list[torch.Tensor] = []
        paths["forward"] = path_of(lambda kept=kept: kept.append(spanwise.context_parallel_attention(q, k, v, local)))
        loss = kept[0].sum()
        paths["backward"] = path_of(loss.backward)
    if rank == 0:
        Path(found["out"]).write_text(json.dumps(paths))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = {"store": f"{folder}/store", "out": f"{folder}/paths.json"}
        mp.spawn(attention, (found,), nprocs=2)
        paths = json.loads(Path(found["out"]).read_text())
    mask = spanwise.SpanMask.documents([0, 3000, 3100, 9000, 16384])
    spanwise.make_plan(mask, 8, **SHAPE)  # compiles and caches
    paths["make_plan"] = path_of(lambda: spanwise.make_plan(mask, 8, **SHAPE))
    for name, path in paths.items():
        print(f"{name}: {path['files']} files, {path['changes']} changes of file, {len(path['classes'])} classes")
    if args.out:
        args.out.write_text(json.dumps(paths, indent=1) + "\n")


if __name__ == "__main__":
    main()
