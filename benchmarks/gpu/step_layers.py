"""Four layers whose weights are gathered on the stream of copies, as eager calls and as one captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.calls import call_of_a_rank
from benchmarks.gpu.clock import HEAD_DIM, HEADS, device_of, host_seconds, masks, medians
from benchmarks.gpu.rows import Context, attempt
from spanwise import _torch

LAYERS, RANKS = 4, 8


def run(context: Context) -> None:
    device = device_of(context.device)
    dtype = torch.float32 if context.dry else torch.bfloat16
    mask = masks(512 if context.dry else 65_536)["documents"]
    width = HEADS * HEAD_DIM
    for kernel in ("sdpa",) if context.dry else ("varlen", "flex"):
        with call_of_a_rank(mask, RANKS, kernel, device, dtype, exchange="needed", stages=2) as call:
            name = _torch.group_name(call.group)
            shards = [torch.randn(width // RANKS, width, device=device, dtype=dtype) / width for _ in range(LAYERS)]

            def forward(call: Any = call, shards: Any = shards, name: str = name) -> torch.Tensor:
                out = call.leaves[0]
                under_way = _torch.start_all_gather(shards[0], RANKS, name)
                for layer in range(LAYERS):
                    weight = _torch.wait(under_way)
                    if layer + 1 < LAYERS:
                        under_way = _torch.start_all_gather(shards[layer + 1], RANKS, name)
                    rows = (out + call.attend()).transpose(1, 2).flatten(2)
                    out = (rows @ weight).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
                return out

            def step(call: Any = call, forward: Any = forward) -> list[torch.Tensor]:
                out = forward()
                return [out, *torch.autograd.grad(out, call.leaves, call.cotangent)]

            _measure(context, device, kernel, step)


def _measure(context: Context, device: torch.device, kernel: str, step: Callable[[], list[torch.Tensor]]) -> None:
    repeats = 1 if context.dry else 7
    row = {"what": "four layers", "kernel": kernel}
    with attempt(context.rows, **row, case="eager") as found:
        found["ms"] = 1e3 * medians({"": step}, device, repeats)[""]
        found["host ms"] = 1e3 * medians({"": step}, device, repeats, host_seconds)[""]
    if device.type == "cpu":
        return
    with attempt(context.rows, **row, case="captured") as found:
        wanted = [x.clone() for x in step()]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = step()
        graph.replay()
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        found["ms"] = 1e3 * medians({"": graph.replay}, device, repeats)[""]
