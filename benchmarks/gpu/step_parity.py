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
from spanwise.attention.executor import GATHERED, SHARD, Link, RankStep, bring, kv_form

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
    names = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    collectives = [{"what": "collective", "name": name, "dtype": dtype} for name in names for dtype in TOLERANCES]
    one = [{"what": "exchange function", "name": name} for name in ("all_gather", "needed", "ring")]
    one += [_attention(mask, "none", *pair) for mask in masks for pair in tried]
    alone.run([{**cell, "world": f"1 rank, {alone.backend}"} for cell in [*collectives, *one]], context.rows, until)
    cells = [*collectives, *api_cells.cells(cuda)]
    every = itertools.product(masks, tried, EXCHANGES)
    cells += [
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
    known = {"collective": collective, "exchange function": exchange_function, "attention": attention}
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


def exchange_function(cell: Row, here: Here) -> Row:
    """The autograd functions of an exchange in a group of one rank, where the rank sends to itself."""
    name, draw = _torch.group_name(here.mesh.get_group()), torch.Generator().manual_seed(0)
    k, v, grad_k, grad_v = (torch.randn(1, 2, 6, 4, generator=draw).to(here.device) for _ in range(4))
    k, v = k.requires_grad_(), v.requires_grad_()
    rows = k.transpose(1, 2).flatten(2)[0]
    at = torch.tensor([4, 1, 1, 0], device=here.device)
    carries = torch.empty(4, 0, device=here.device)
    if cell["name"] == "all_gather":
        sizes = (torch.empty(6, 0, device=here.device),)
        ((got,),) = bring((rows,), [RankStep(None, None, sizes, sizes, kind=GATHERED)], Link(name, 1, "rows"))
        wanted, grad = rows, grad_k.transpose(1, 2).flatten(2)[0]
    elif cell["name"] == "needed":
        step = RankStep(at, torch.arange(4, device=here.device).flip(0), (carries,), (carries,))
        ((got,),) = bring((rows,), [step], Link(name, 1, "rows"))
        wanted, grad = rows[at].flip(0), grad_v.transpose(1, 2).flatten(2)[0][:4]
    else:
        steps = [RankStep(None, None, (), (torch.empty(6, 0, device=here.device),), kind=SHARD, peers=(0, 0))]
        ((of_k, of_v),) = bring((k, v), steps, Link(name, 1, "shard"), kv_form(k, v, steps))
        got, wanted, grad = torch.cat([of_k, of_v], 3), torch.cat([k, v], 3), torch.cat([grad_k, grad_v], 3)
    leaves = [k, v] if cell["name"] == "ring" else [k]
    pairs = [(got, wanted)]
    pairs += zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    return {}
