"""Layers with a state beside transformers' torch code on one device.

    python -m benchmarks.recurrence --out benchmarks/results/recurrence-cpu.json

Forward and backward in float32 of one document. Variants take turns; CPU seconds are the least of the rounds, ratios
the median of the rounds. The floor of a scan is its products token by token, three times for the backward, at the
rate of a large product of matrices in the same run; that of the convolution is the bytes that it must read and write,
at the rate of a copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

import spanwise
from benchmarks.publish import publish, take_turns
from spanwise import recurrence
from spanwise.integrations.transformers import mixers

HEADS, DIM, WIDTH = 8, 64, 4
CHANNELS, STATES = 1024, 16  # of Mamba, with 1 / 16 of the tokens: transformers' backward takes their square


class Layer(NamedTuple):
    """Two ways to compute one layer, of the same leaves, and what any way must do."""

    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]
    leaves: list[torch.Tensor]
    flops: int
    bytes: int


def layers(tokens: int) -> dict[str, Layer]:
    plan = spanwise.make_plan(spanwise.SpanMask.causal(tokens), 1)
    route = recurrence.recurrence_route(plan)
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    q, k = (functional.normalize(normal(1, tokens, HEADS, DIM), dim=-1) for _ in range(2))
    v, decay, beta = normal(1, tokens, HEADS, DIM), -0.1 * normal(1, tokens, HEADS).abs(), normal(1, tokens, HEADS)
    product = 2 * 3 * tokens * HEADS * DIM * DIM  # a state times a vector, forward and backward
    channels = 3 * HEADS * DIM
    x, weight = normal(1, tokens, channels), normal(channels, WIDTH)
    step, rates = normal(1, tokens, HEADS).abs(), -normal(HEADS).abs()

    def their_delta(*leaves: torch.Tensor) -> torch.Tensor:
        return modeling_qwen3_next.torch_chunk_gated_delta_rule(*leaves)[0]

    def their_scan(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        found = modeling_mamba2.mamba2_chunk_scan(x, dt, rates, b, c, chunk_size=256)
        return found[0] if isinstance(found, tuple) else found

    def their_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return modeling_qwen3_next.causal_conv1d_fn(x.mT, weight, None, "silu").mT

    return {
        "gated_delta": Layer(
            lambda *leaves: recurrence.gated_delta(*leaves, route), their_delta,
            [q, k, v, decay, beta.sigmoid()], 3 * product, 0,
        ),
        "gated_linear": Layer(
            lambda c, b, x, dt: recurrence.gated_linear(c, b, x * dt[..., None], rates * dt, route, scale=1.0),
            their_scan, [q, k, v, step], 2 * product, 0,
        ),
        "causal_conv": Layer(
            lambda x, weight: recurrence.causal_conv(x, weight, None, route, "silu"), their_conv,
            [x, weight], 0, 5 * x.nbytes,  # x and out; x, the gradients of out and of x
        ),
    }  # fmt: skip


def channels(tokens: int) -> Layer:
    """Mamba's scan: a state of a few numbers for each channel, with a decay each."""
    route = recurrence.recurrence_route(spanwise.make_plan(spanwise.SpanMask.causal(tokens), 1))
    rng = torch.Generator().manual_seed(0)
    x, step = (torch.randn(1, CHANNELS, tokens, generator=rng) for _ in range(2))
    rates = -torch.randn(CHANNELS, STATES, generator=rng).abs()
    b, c = (torch.randn(1, STATES, tokens, generator=rng) for _ in range(2))
    return Layer(
        partial(mixers.mamba_selective_scan, route), modeling_mamba.mamba_selective_scan,
        [x, functional.softplus(step), rates, b, c], 12 * tokens * CHANNELS * STATES, 0,
    )  # fmt: skip


def step(call: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    out = call(*leaves)
    return [out, *torch.autograd.grad(out.sum(), leaves)]


def timed(name: str, layer: Layer, rounds: int) -> dict[str, Any]:
    leaves = [x.detach().requires_grad_() for x in layer.leaves]
    both = [partial(step, call, leaves) for call in (layer.ours, layer.theirs)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(both[0](), both[1](), strict=True)]
    square, wide = torch.randn(1024, 1024), torch.randn(1 << 24)
    floor: Callable[[], Any] = (lambda: square @ square) if layer.flops else wide.clone
    steps = dict(zip(("ours", "theirs", "floor"), [*both, floor], strict=True))
    times = take_turns(steps, rounds, time.process_time)  # of one thread: other processes do not count
    ours, theirs, unit = (min(found) for found in times.values())
    share = layer.flops / (2 * 1024**3) if layer.flops else layer.bytes / (2 * wide.nbytes)
    return {
        "name": name, "seconds": round(ours, 4), "transformers_seconds": round(theirs, 4),
        "ratio": round(statistics.median(a / b for a, b in zip(times["ours"], times["theirs"], strict=True)), 3),
        "floor_flops": layer.flops, "floor_bytes": layer.bytes, "floor_seconds": round(unit * share, 5),
        "of_floor": round(ours / (unit * share), 2), "difference": float(f"{max(errors):.1e}"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 4096), ("rounds", 7), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    every = layers(given.tokens) | {"gated_linear, channels": channels(given.tokens // 16)}
    result = {
        "command": f"python {' '.join(sys.argv)}", "torch": torch.__version__, "threads": given.threads,
        "tokens": given.tokens, "heads": HEADS, "dim": DIM, "width": WIDTH, "channels": CHANNELS,
        "states": STATES, "rounds": given.rounds, "dtype": "float32",
        "rows": [timed(name, layer, given.rounds) for name, layer in every.items()],
    }  # fmt: skip
    publish(result, given.out)


if __name__ == "__main__":
    main()
