"""Every kernel × exchange × dtype × mask on the device against dense float64 attention: outputs and gradients.

Several ranks are processes that share the device, over gloo, which moves CUDA tensors through host memory. NCCL takes
one rank a device, so its world has one rank: the exchanges' collectives and autograd functions run in it directly.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import Any

import numpy as np
import torch

import spanwise
from benchmarks.gpu.campaign import Row
from benchmarks.gpu.steps import Context
from benchmarks.gpu.worlds import Here, NotPossible, World
from spanwise import SpanMask, _torch
from spanwise.attention.exchange import all_gather, needed, ring
from spanwise.calibrate.links import measure_links
from spanwise.calibrate.ranks import Ranks

MODULE = __name__
# The tolerances of DESIGN and of `spanwise.verify`: largest error relative to the largest number.
TOLERANCES = {"float32": 2e-5, "bfloat16": 3.5e-2, "float16": 1e-2}
EXCHANGES: dict[str, dict[str, Any]] = {
    "needed, 1 chunk": {"exchange": "needed", "stages": 1},
    "needed, 2 chunks": {"exchange": "needed", "stages": 2},
    "needed, refetched": {"exchange": "needed", "stages": 2, "keep_kv": False},
    "all_gather": {"exchange": "all_gather"},
    "ring": {"exchange": "ring"},
    "ulysses": {"exchange": "ulysses"},
    "two levels": {"exchange": "needed", "stages": 1},
}
MASKS = ("documents", "causal", "window", "prefix", "empty rows")
HEADS, KV_HEADS, DIM = 8, 4, 64


def run(context: Context) -> None:
    until = time.monotonic() + context.seconds - 6
    cuda, size = context.device == "cuda", 4
    kernels = {"reference": tuple(TOLERANCES)}
    if cuda:
        kernels |= {"flex": tuple(TOLERANCES), "varlen": ("bfloat16", "float16")}
    else:
        kernels |= {"sdpa": tuple(TOLERANCES)}
    alone = World(1, "nccl" if cuda else "gloo", context.device, MODULE, "cell")
    several = World(size, "gloo", context.device, MODULE, "cell", 90.0 if cuda else 30.0)
    tried = [(kernel, dtype) for kernel, dtypes in kernels.items() for dtype in dtypes]
    masks = MASKS[::4] if context.dry else MASKS
    names = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    collectives = [{"what": "collective", "name": name, "dtype": dtype} for name in names for dtype in TOLERANCES]
    one = [{"what": "exchange function", "name": name} for name in ("all_gather", "needed", "ring")]
    one += [_attention(mask, "none", *pair) for mask in masks for pair in tried]
    alone.run([{**cell, "world": f"1 rank, {alone.backend}"} for cell in [*collectives, *one]], context.rows, until)
    cells = [*collectives, {"what": "links"}, {"what": "tokens"}]
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
    return {**known, "links": links, "tokens": tokens}[cell["what"]](cell, here)


# ---------------------------------------------------------------- attention


def mask_of(name: str, length: int) -> SpanMask:
    cuts = [0, 1, length // 3, length // 3, length // 2 + 1, length]
    if name == "empty rows":
        rows = np.arange(length)
        end = np.where(rows % 7 == 3, 0, rows + 1)
        start = np.where(rows % 7 == 3, 0, np.maximum(rows - length // 4, 0))
        return SpanMask(start[None], end[None], length)
    made = {
        "documents": lambda: SpanMask.documents(cuts),
        "causal": lambda: SpanMask.causal(length),
        "window": lambda: SpanMask.sliding_window(length, length // 5, 3),
        "prefix": lambda: SpanMask.prefix_lm(cuts, [1, 5, 0, length // 9, length // 8]),
    }
    return made[name]()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """float64 attention under a bool mask ``[Q, K]``; rows without a key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~visible, -math.inf)
    some = visible.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(~some, 0.0), -1).masked_fill(~some, 0.0) @ v


@functools.lru_cache(maxsize=8)
def problem(mask: str, length: int, dtype: str, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and the output's gradient in `dtype`, alike on all ranks; out, dq, dk and dv of exactly these."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((n, length, DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    given = [torch.randn(1, *shape, generator=draw).to(getattr(torch, dtype)).to(device) for shape in shapes]
    leaves = [x.double().requires_grad_() for x in given[:3]]
    out = dense(*leaves, torch.from_numpy(mask_of(mask, length).dense()[0]).to(device))
    return given, [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


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
        rank_plan = plan.local(mesh, here.device, kernel=cell["kernel"])
        out = spanwise.context_parallel_attention(*leaves, rank_plan, mesh, kernel=cell["kernel"])
    except ValueError as refused:
        if (cell["kernel"], cell["dtype"]) in NOT_HERE:
            raise NotPossible(str(refused)) from refused
        raise
    got = [out.detach(), *torch.autograd.grad(out, leaves, local[3])]
    return _errors(dict(zip(("out", "dq", "dk", "dv"), zip(got, wanted, strict=True), strict=True)), plan, cell, here)


def _errors(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], plan: Any, cell: Row, here: Here) -> Row:
    errors = {}
    for name, (got, wanted) in pairs.items():
        if got.dtype != getattr(torch, cell["dtype"]):
            raise AssertionError(f"{name} is {got.dtype}, the inputs are {cell['dtype']}")
        differ = (got.double() - plan.shard(wanted, here.rank, dim=2)).abs()
        errors[name] = float(differ.max() / wanted.abs().max().clamp(min=1e-300)) if differ.numel() else 0.0
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if not errors[worst] <= TOLERANCES[cell["dtype"]]:
        raise AssertionError(f"{worst} differs by {errors[worst]:.2e}, more than {TOLERANCES[cell['dtype']]:.1e}")
    return errors


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
        got = all_gather.wait(all_gather.start(rows, 1, name, "rows"), 1, name, "rows")
        wanted, grad = rows, grad_k.transpose(1, 2).flatten(2)[0]
    elif cell["name"] == "needed":
        route = needed.Route(at, torch.arange(4, device=here.device).flip(0), (carries,), (carries,), spare=False)
        got = needed.wait(needed.start(rows, [route], name, "rows")[0], route, name, "rows")
        wanted, grad = rows[at].flip(0), grad_v.transpose(1, 2).flatten(2)[0][:4]
    else:
        hop = ring.Hop(torch.empty(6, 0, device=here.device), stride=1)
        of_k, of_v = next(ring.start(k, v, [hop], 0, 1, name, "shard"))
        got, wanted, grad = torch.cat([of_k, of_v], 3), torch.cat([k, v], 3), torch.cat([grad_k, grad_v], 3)
    leaves = [k, v] if cell["name"] == "ring" else [k]
    pairs = [(got, wanted)]
    pairs += zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    return {}


def links(cell: Row, here: Here) -> Row:
    """The sweep of `spanwise calibrate` over the ranks of this device: that it runs; not the rate of a real link."""
    ranks = Ranks(here.mesh, here.device)
    found, _, _ = measure_links(ranks, ranks.size, 1 << 16, 2)
    return {"bandwidth": found[0].bandwidth, "latency": found[0].latency}


def tokens(cell: Row, here: Here) -> Row:
    """`shard`, `unshard` and its gradient, and packed attention."""
    length = 90
    mask = mask_of("documents", length)
    plan = spanwise.make_plan(mask, here.world.size, balancer="head_tail", block_size=16, exchange="needed", stages=1)
    whole = torch.randn(1, length, 3, generator=torch.Generator().manual_seed(0)).to(here.device)
    local = spanwise.shard(plan, here.mesh, whole, dim=1).requires_grad_()
    torch.testing.assert_close(spanwise.unshard(plan, here.mesh, local, dim=1), whole, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(spanwise.unshard(plan, here.mesh, local, dim=1), local, whole)
    torch.testing.assert_close(grad, here.world.size * local.detach())
    given, wanted = problem("documents", length, "float32", here.device)
    q, k, v = (plan.shard(x, here.rank, dim=2)[0].transpose(0, 1).contiguous() for x in given[:3])
    out = spanwise.packed_attention(q, k, v, plan, here.mesh, kernel="reference")
    torch.testing.assert_close(
        out.transpose(0, 1)[None].double(), plan.shard(wanted[0], here.rank, dim=2), rtol=1e-5, atol=1e-5
    )
    return {}
