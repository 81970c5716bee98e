"""A compiled step with collectives on one device: numbers equal to eager code, and its time by CUDA events.

The group has one rank, so NCCL copies on a stream of its own instead of sending: what is shown is that the schedule
compiles, runs and is exact, and what it costs. How much of a real link it hides needs several devices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import spanwise
from benchmarks.gpu.clock import device_of, medians
from benchmarks.gpu.rows import Context, attempt, write_row
from spanwise import _torch, overlap

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3.5e-2}
LAYERS = 4


class Gathered(torch.autograd.Function):
    """A parameter gathered from its shards; the gradients are summed on the way back."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, size: int, name: str) -> torch.Tensor:
        ctx.name, ctx.size = name, size
        return _torch.wait(_torch.start_all_gather(shard, size, name))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _torch.wait(_torch.start_reduce_scatter(grad, ctx.size, ctx.name)), None, None


def run(context: Context) -> None:
    device = device_of(context.device)
    if not _torch.COMPILES:  # the functions below would not refuse, as the package's do
        reason = f"torch {torch.__version__} compiles autograd functions with collectives to wrong gradients"
        write_row(context.rows, what="compiled step", status="not possible", error=reason)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(prefix="spanwise-overlap-") as folder:
        backend = "gloo" if context.dry else "nccl"
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp",))
        for part in (compiled_step, compiled_attention):
            with attempt(context.rows, what=part.__name__.replace("_", " "), case="all"):
                part(context, device, mesh)
        dist.destroy_process_group()


def compiled_step(context: Context, device: torch.device, mesh: DeviceMesh) -> None:
    """Forward and backward of layers whose parameters are gathered when they are used."""
    width, tokens, dtype = (64, 32, torch.float32) if context.dry else (4096, 8192, torch.bfloat16)
    size, name = mesh.size(), _torch.group_name(mesh.get_group())
    draw = torch.Generator().manual_seed(0)
    shards = [
        (torch.randn(width, width, generator=draw) * width**-0.5).to(device, dtype).requires_grad_()
        for _ in range(2 * LAYERS)
    ]
    x = torch.randn(tokens, width, generator=draw).to(device, dtype)

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for up, down in zip(shards[::2], shards[1::2], strict=True):
            x = x + F.silu(x @ Gathered.apply(up, size, name)) @ Gathered.apply(down, size, name)
        return x

    results: list[overlap.Result] = []
    schedule = {"cost": spanwise.H100, "on_result": results.append}
    functions: dict[str, Callable[..., Any]] = {"eager": step}
    functions["spanwise, aot_eager"] = torch.compile(step, backend=overlap.backend("aot_eager", **schedule))
    if not context.dry:
        functions["inductor"] = torch.compile(step)
        functions["spanwise, inductor"] = torch.compile(step, backend=overlap.backend("inductor", **schedule))
    cotangent = torch.randn(tokens, width, generator=draw).to(device, dtype)
    outcomes = {}
    for case, function in functions.items():
        out = function(x, *shards)
        outcomes[case] = [out.detach(), *torch.autograd.grad(out, shards, cotangent)]
    cases = {
        case: lambda function=function: torch.autograd.grad(function(x, *shards), shards, cotangent)
        for case, function in functions.items()
    }
    launches = [len(result.timeline.dag.starts) for result in results]
    for case, seconds in medians(cases, device, 2 if context.dry else 10).items():
        error = _error(outcomes[case], outcomes["eager"])
        status = "ok" if error <= _TOLERANCE[dtype] else "failed"
        row = {"what": "compiled step", "case": case, "ms": 1e3 * seconds, "differs": error}
        write_row(context.rows, **row, launches=launches, status=status)
    measured = overlap.measure(
        *(result.graph_module for result in results[:2]), device=context.device, fallback=spanwise.H100
    )
    for graph, result in zip(("forward", "backward"), results[:2], strict=True):
        predicted = overlap.simulate(result.graph_module, measured)
        row = {"what": "predicted from measured operators", "graph": graph, "ms": float(predicted.makespan)}
        write_row(context.rows, **row, operators=measured.timed)


def compiled_attention(context: Context, device: torch.device, mesh: DeviceMesh) -> None:
    """Attention with a rank plan of one rank as an input of the graph."""
    tokens = 128 if context.dry else 4096
    dtype = torch.float32 if context.dry else torch.bfloat16
    plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 50, tokens]), 1)
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, n, tokens, 64, generator=draw).to(device, dtype).requires_grad_() for n in (8, 2, 2)]
    for kernel in ("sdpa",) if context.dry else ("flex", "varlen"):
        local = plan.local(None, device, kernel=kernel)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Any, kernel: str = kernel) -> Any:
            return spanwise.context_parallel_attention(q, k, v, local, None, kernel=kernel)

        compiled = torch.compile(attend, backend="aot_eager" if context.dry else "inductor", fullgraph=True)
        found = []
        for function in (attend, compiled):
            out = function(*qkv, local)
            found.append([out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))])
        error = _error(found[1], found[0])
        row = {"what": "compiled attention", "kernel": kernel, "differs": error}
        write_row(context.rows, **row, status="ok" if error <= _TOLERANCE[dtype] else "failed")


def _error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest error relative to the largest number; infinite for NaN."""
    pairs = zip(got, wanted, strict=True)
    errors = [float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs]
    return max(errors) if all(error == error for error in errors) else float("inf")
