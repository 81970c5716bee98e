"""Memory of exchanges: the allocator's peak in a forward and what is kept after it, beside what the plan says.

The plan counts K/V that an exchange brings. The allocator also counts outputs, merges and scratch of kernels, so the
figures to look at are differences: keep_kv=False against True, and one exchange against another.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import spanwise
from benchmarks.gpu.campaign import Row
from benchmarks.gpu.steps import Context
from benchmarks.gpu.worlds import Here, World
from benchmarks.memory import copied_bytes
from spanwise import SpanMask

HEADS, KV_HEADS, DIM = 8, 8, 64
WAYS: dict[str, dict[str, Any]] = {
    "all_gather": {"exchange": "all_gather"},
    "needed": {"exchange": "needed", "stages": 2},
    "ring": {"exchange": "ring"},
}


def run(context: Context) -> None:
    until = time.monotonic() + context.seconds - 4
    tokens = 512 if context.dry else 65_536
    world = World(2, "gloo", context.device, __name__, "cell", 30.0, "forkserver" if context.dry else "spawn")
    cells = [{"way": way, "keep_kv": keep, "tokens": tokens} for way in WAYS for keep in (True, False)]
    world.run([{"what": "memory of an exchange", **cell} for cell in cells], context.rows, until)


def cell(cell: Row, here: Here) -> Row:
    plan = spanwise.make_plan(
        SpanMask.causal(cell["tokens"]), here.world.size, balancer="head_tail", keep_kv=cell["keep_kv"],
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, **WAYS[cell["way"]],
    )  # fmt: skip
    num = plan.layout.num_tokens(here.rank)
    q, k, v, grad = (
        torch.randn(1, num, n, DIM, device=here.device, dtype=torch.bfloat16).transpose(1, 2)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    planned = {"resident": int(plan.resident_bytes().max()), "saved": int(plan.saved_bytes().max())}
    if here.device.type == "cpu":
        forward, after, backward = copied_bytes(plan, here.mesh, leaves, grad, planned["saved"])
        found = {"forward": forward, "after": after, "backward": backward}
        measured = {name: sizes.get("kv", 0) for name, sizes in found.items()}
    else:
        measured = _allocated(plan, here, leaves, grad)
    return {**planned, **{f"{name}_measured": size for name, size in measured.items()}}


def _allocated(plan: spanwise.Plan, here: Here, leaves: list[torch.Tensor], grad: torch.Tensor) -> dict[str, int]:
    """Bytes above those of the inputs, on the second of two calls: the first compiles and allocates for good."""
    local = plan.local(here.mesh, here.device, kernel="flex")
    found: dict[str, int] = {}
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = spanwise.context_parallel_attention(*leaves, local, here.mesh, kernel="flex")
        torch.cuda.synchronize()
        found["forward"] = torch.cuda.max_memory_allocated() - before
        found["after"] = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, leaves, grad)
        torch.cuda.synchronize()
        found["backward"] = torch.cuda.max_memory_allocated() - before
        del out, grads
    return found
