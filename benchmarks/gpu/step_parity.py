"""Every kernel × exchange × dtype × mask on the device against dense float64 attention: outputs and gradients.

Several ranks are processes that share the device, over gloo, which moves CUDA tensors through host memory. NCCL takes
one rank a device, so its world has one rank: the exchanges' collectives and autograd functions run in it directly.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

import spanwise
from benchmarks.gpu.problem import DIM, HEADS, KV_HEADS, MASKS, TOLERANCES, differences, mask_of, problem
from benchmarks.gpu.rows import Context, Row
from benchmarks.gpu.worlds import Here, NotPossible, World

MODULE = __name__
EXCHANGES: dict[str, dict[str, Any]] = {
    "needed, 1 chunk": {"exchange": "needed", "stages": 1},
    "needed, 2 chunks": {"exchange": "needed", "stages": 2},
    "needed, refetched": {"exchange": "needed", "stages": 2, "keep_kv": False},
    "all_gather": {"exchange": "all_gather"},
    "ring": {"exchange": "ring"},
    "ulysses": {"exchange": "ulysses"},
    "two levels": {"exchange": "needed", "stages": 1},
}


def run(context: Context) -> None:
    until = time.monotonic() + context.seconds - 6
    cuda, size = context.device == "cuda", 4
    # Most important first, for flex compiles each dtype for a while.
    tried = [("flex", "bfloat16"), ("varlen", "bfloat16"), ("reference", "float32"), ("flex", "float32")]
    tried += [("varlen", "float16"), ("reference", "bfloat16"), ("reference", "float16"), ("flex", "float16")]
    if not cuda:
        tried = list(itertools.product(("reference", "sdpa"), TOLERANCES))
    alone = World(1, "nccl" if cuda else "gloo", context.device, MODULE, "cell")
    several = World(size, "gloo", context.device, MODULE, "cell", 90.0 if cuda else 30.0)
    masks = MASKS[::4] if context.dry else MASKS
    one = [_attention(mask, "none", *pair) for mask in masks for pair in tried]
    alone.run([{**cell, "world": f"1 rank, {alone.backend}"} for cell in one], context.rows, until)
    every = itertools.product(masks, tried, EXCHANGES)
    cells = [
        _attention(mask, exchange, *pair) for mask, pair, exchange in every if not context.dry or _is_short(mask, pair)
    ]
    cells += [_attention("documents", "needed, 1 chunk", kernel, dtype) for kernel, dtype in NOT_HERE if cuda]
    several.run([{**cell, "world": f"{size} ranks, gloo"} for cell in cells], context.rows, until)


NOT_HERE = (("sdpa", "float32"), ("varlen", "float32"))  # refused in words, not computed


def _is_short(mask: str, pair: tuple[str, str]) -> bool:
    """Whether a dry run has time for the cell: each dtype with one mask."""
    return mask == MASKS[0] or pair[1] == "float32"


def _attention(mask: str, exchange: str, kernel: str, dtype: str) -> Row:
    return {"what": "attention", "mask": mask, "exchange": exchange, "kernel": kernel, "dtype": dtype}


def cell(cell: Row, here: Here) -> Row:
    """One cell on one rank."""
    length, block = (1000, 128) if here.device.type == "cuda" else (90, 16)
    shape: Any = here.world.size
    mesh = here.mesh
    if cell["exchange"] == "two levels":
        assert here.levels is not None
        shape, mesh = (here.world.size // 2, 2), here.levels
    options = EXCHANGES.get(cell["exchange"], {})
    plan = spanwise.make_plan(
        mask_of(cell["mask"], length), shape, balancer="head_tail", block_size=block, num_q_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, dtype=cell["dtype"], **options,
    )  # fmt: skip
    given, wanted = problem(cell["mask"], length, cell["dtype"], here.device)
    local = [plan.shard(x, here.rank, dim=2).clone() for x in given]
    leaves = [x.requires_grad_() for x in local[:3]]
    try:
        rank_plan = plan.local(mesh, here.world.device, kernel=cell["kernel"])
        out = spanwise.context_parallel_attention(*leaves, rank_plan, mesh, kernel=cell["kernel"])
    except ValueError as refused:
        if (cell["kernel"], cell["dtype"]) in NOT_HERE:
            raise NotPossible(str(refused)) from refused
        raise
    got = [out.detach(), *torch.autograd.grad(out, leaves, local[3])]
    if any(x.dtype != given[0].dtype for x in got):
        raise AssertionError(f"results are {[x.dtype for x in got]}, the inputs are {cell['dtype']}")
    pairs = zip(got, (plan.shard(x, here.rank, dim=2) for x in wanted), strict=True)
    return differences(dict(zip(("out", "dq", "dk", "dv"), pairs, strict=True)), TOLERANCES[cell["dtype"]])
