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
from benchmarks.gpu import api_cells
from benchmarks.gpu.campaign import Row
from benchmarks.gpu.problem import DIM, HEADS, KV_HEADS, MASKS, TOLERANCES, differences, mask_of, problem
from benchmarks.gpu.steps import Context
from benchmarks.gpu.worlds import Here, NotPossible, World
from spanwise import _torch

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
    start = "spawn" if cuda else "forkserver"
    alone = World(1, "nccl" if cuda else "gloo", context.device, MODULE, "cell", 60.0, start)
    several = World(size, "gloo", context.device, MODULE, "cell", 90.0 if cuda else 30.0, start)
    masks = MASKS[::4] if context.dry else MASKS
    names = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
    collectives = [{"what": "collective", "name": name, "dtype": dtype} for name in names for dtype in TOLERANCES]
    one = [*collectives, *(_attention(mask, "none", *pair) for mask in masks for pair in tried)]
    alone.run([{**cell, "world": f"1 rank, {alone.backend}"} for cell in one], context.rows, until)
    cells = api_cells.cells(cuda)
    every = itertools.product(masks, tried, EXCHANGES)
    cells += [
        _attention(mask, exchange, *pair) for mask, pair, exchange in every if not context.dry or _is_short(mask, pair)
    ]
    cells += [_attention("documents", "needed, 1 chunk", kernel, dtype) for kernel, dtype in NOT_HERE if cuda]
    cells += collectives  # last: those that gloo has not for CUDA tensors may end the process
    several.run([{**cell, "world": f"{size} ranks, gloo"} for cell in cells], context.rows, until)


NOT_HERE = (("sdpa", "float32"), ("varlen", "float32"))  # refused in words, not computed


def _is_short(mask: str, pair: tuple[str, str]) -> bool:
    """Whether a dry run has time for the cell: each dtype with one mask."""
    return mask == MASKS[0] or pair[1] == "float32"


def _attention(mask: str, exchange: str, kernel: str, dtype: str) -> Row:
    return {"what": "attention", "mask": mask, "exchange": exchange, "kernel": kernel, "dtype": dtype}


def cell(cell: Row, here: Here) -> Row:
    """One cell on one rank."""
    known = {"collective": collective, "attention": attention}
    return {**known, **api_cells.FUNCTIONS}[cell["what"]](cell, here)


# ---------------------------------------------------------------- attention


def attention(cell: Row, here: Here) -> Row:
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


# ---------------------------------------------------------------- below attention


def collective(cell: Row, here: Here) -> Row:
    """A functional collective on tensors of the device, with the numbers that it must give."""
    size, rank, name = here.world.size, here.rank, _torch.group_name(here.mesh.get_group())
    dtype = getattr(torch, cell["dtype"])

    def of(rank: int, rows: int) -> torch.Tensor:
        return (torch.arange(rows * 3, device=here.device).view(rows, 3) % 5 + rank).to(dtype)

    begin = {
        "all_gather": lambda: _torch.start_all_gather(of(rank, 4), size, name),
        "reduce_scatter": lambda: _torch.start_reduce_scatter(of(rank, 2 * size), size, name),
        "all_reduce": lambda: _torch.start_all_reduce(of(rank, 4), "max", name),
        # Uneven: r + 1 rows to each rank from rank r, none from the last.
        "all_to_all": lambda: _torch.start_all_to_all(
            torch.cat([of(rank, rows[rank])] * size), rows, [rows[rank]] * size, name
        ),
    }
    rows = [r + 1 for r in range(size)]
    rows[-1] = 0 if size > 1 else 1
    wanted = {
        "all_gather": lambda: torch.cat([of(r, 4) for r in range(size)]),
        "reduce_scatter": lambda: sum(of(r, 2 * size).double() for r in range(size)).to(dtype).chunk(size)[rank],
        "all_reduce": lambda: of(size - 1, 4),
        "all_to_all": lambda: torch.cat([of(r, rows[r]) for r in range(size)]),
    }
    try:
        got = _torch.wait(begin[cell["name"]]())
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).lower()
        if any(words in text for words in ("not supported", "does not support", "unsupported", "not implemented")):
            raise NotPossible(f"{here.world.backend}: {str(error).strip().splitlines()[0]}") from error
        raise
    torch.testing.assert_close(got, wanted[cell["name"]](), rtol=0, atol=0)
    return {"device": str(got.device)}
