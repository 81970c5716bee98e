"""Steps of the campaign that capture or compile: four layers as a CUDA graph, and a scheduled step with collectives."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import spanwise
from benchmarks.gpu.device import (
    HEAD_DIM,
    HEADS,
    RANKS,
    Context,
    Row,
    call_of_a_rank,
    host_seconds,
    masks,
    milliseconds,
)
from spanwise import SpanMask, _torch, overlap

LAYERS = 4


def layers(context: Context) -> None:
    """Four layers whose weights are gathered on the stream of copies, as eager calls and as one captured CUDA graph."""
    device, dtype, width = context.device, context.dtype, HEADS * HEAD_DIM
    repeats, mask = 1 if context.dry else 7, masks(512 if context.dry else 65_536)["documents"]
    for kernel in context.kernels:
        row = {"what": "four layers", "kernel": kernel}
        with call_of_a_rank(mask, RANKS, kernel, device, dtype, exchange="needed", stages=2) as call:
            name = _torch.group_name(call.group)
            shards = [torch.randn(width // RANKS, width, device=device, dtype=dtype) / width for _ in range(LAYERS)]

            def step(call: Any = call, shards: Any = shards, name: str = name) -> list[torch.Tensor]:
                out, under_way = call.leaves[0], _torch.start_all_gather(shards[0], RANKS, name)
                for following in (*shards[1:], None):
                    weight = _torch.wait(under_way)
                    if following is not None:
                        under_way = _torch.start_all_gather(following, RANKS, name)
                    rows = (out + call.attend()).transpose(1, 2).flatten(2)
                    out = (rows @ weight).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
                return [out, *torch.autograd.grad(out, call.leaves, call.cotangent)]

            with context.attempt(**row, case="eager") as found:
                found |= milliseconds({"ms": step}, device, repeats)
                found |= milliseconds({"host ms": step}, device, repeats, host_seconds)
            if context.dry:
                continue
            with context.attempt(**row, case="captured") as found:
                wanted = [x.clone() for x in step()]
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    got = step()
                graph.replay()
                for x, y in zip(got, wanted, strict=True):
                    torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
                found |= milliseconds({"ms": graph.replay}, device, repeats)


def step(context: Context) -> None:
    """A compiled step with collectives on one device: numbers equal to eager code, and its time by CUDA events.

    The group has one rank, so NCCL copies on a stream of its own instead of sending: what is shown is that the schedule
    compiles, runs and is exact, and what it costs. How much of a real link it hides needs several devices.
    """
    if not _torch.COMPILES:  # the functions below would not refuse, as the package's do
        reason = f"torch {torch.__version__} compiles autograd functions with collectives to wrong gradients"
        context.write(what="compiled step", status="not possible", error=reason)
        return
    if not context.dry:
        torch.cuda.set_device(context.device)
    with tempfile.TemporaryDirectory(prefix="spanwise-overlap-") as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo" if context.dry else "nccl", store=store, rank=0, world_size=1)
        name = _torch.group_name(dist.group.WORLD)
        with context.attempt(what="compiled step", case="all"):
            _compiled_step(context, name)
        with context.attempt(what="compiled attention", case="all"):
            _compiled_attention(context)
        dist.destroy_process_group()


class _Gathered(torch.autograd.Function):
    """A parameter gathered from its one shard; the gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return _torch.wait(_torch.start_all_gather(shard, 1, name))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _torch.wait(_torch.start_reduce_scatter(grad, 1, ctx.name)), None


def _compiled_step(context: Context, name: str) -> None:
    """Forward and backward of layers whose parameters are gathered when they are used."""
    (width, tokens), generator = (64, 32) if context.dry else (4096, 8192), torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(context.device, context.dtype)

    shards = [(draw(width, width) * width**-0.5).requires_grad_() for _ in range(2 * LAYERS)]
    x, cotangent = draw(tokens, width), draw(tokens, width)

    def forward(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for up, down in zip(shards[::2], shards[1::2], strict=True):
            x = x + F.silu(x @ _Gathered.apply(up, name)) @ _Gathered.apply(down, name)
        return x

    def gradients(run: Any) -> list[torch.Tensor]:
        out = run(x, *shards)
        return [out.detach(), *torch.autograd.grad(out, shards, cotangent)]

    results: list[overlap.Result] = []
    backends: dict[str, Any] = {"eager": "eager", "inductor": "inductor"}
    for each in ("aot_eager", "inductor"):
        backends[f"spanwise, {each}"] = overlap.backend(each, cost=spanwise.H100, on_result=results.append)
    calls = {}
    for case, backend in backends.items():
        if not (context.dry and "inductor" in case):
            calls[case] = functools.partial(gradients, torch.compile(forward, backend=backend))
    outcomes = {case: call() for case, call in calls.items()}
    launches = [len(result.timeline.dag.starts) for result in results]
    for case, ms in milliseconds(calls, context.device, 2 if context.dry else 10).items():
        row = {"what": "compiled step", "case": case, "ms": ms, "launches": launches}
        context.write(**row, **_difference(outcomes[case], outcomes["eager"], context))


def _compiled_attention(context: Context) -> None:
    """Attention with a rank plan of one rank as an input of the graph."""
    tokens = 128 if context.dry else 4096
    plan = spanwise.make_plan(SpanMask.documents([0, 50, tokens]), 1)
    qkv = [torch.randn(1, n, tokens, 64).to(context.device, context.dtype).requires_grad_() for n in (8, 2, 2)]
    for kernel in context.kernels:
        local = plan.local(None, context.device, kernel=kernel)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: Any, kernel: str = kernel) -> Any:
            return spanwise.context_parallel_attention(q, k, v, local, None, kernel=kernel)

        compiled = torch.compile(attend, backend="aot_eager" if context.dry else "inductor", fullgraph=True)
        wanted, got = ([x, *torch.autograd.grad(x.sum(), qkv)] for x in (f(*qkv, local) for f in (attend, compiled)))
        context.write(what="compiled attention", kernel=kernel, **_difference(got, wanted, context))


def _difference(got: list[torch.Tensor], wanted: list[torch.Tensor], context: Context) -> Row:
    """The largest error relative to the largest number, and whether it is small enough; NaN is not."""
    pairs = zip(got, wanted, strict=True)
    errors = [float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs]
    good = all(error <= (1e-4 if context.dry else 3.5e-2) for error in errors)
    return {"differs": max(errors), "status": "ok" if good else "failed"}
