"""Layers of a model beside torch's or transformers' code, float32, forward and backward, on one device.

    python -m benchmarks.layers loss --out benchmarks/results/linear-loss-cpu.json
    python -m benchmarks.layers recurrence --out benchmarks/results/recurrence-cpu.json

Variants take turns. Seconds are the least of the rounds, ratios the median of the ratios within rounds.

loss: `linear_cross_entropy` beside torch's cross-entropy with all logits, 4,096 tokens. The floor is the three products
that any way needs, at the rate of one such product in the same run. Memory is the growth of the resident set in a
process of its own.

recurrence: layers with a state, 4,096 tokens of one document, in CPU seconds of one thread. The floor of a scan is its
products token by token, three times for the backward, at the rate of a large product of matrices in the same run; that
of the convolution is the bytes that it must read and write, at the rate of a copy.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import spanwise
from benchmarks.publish import Result, main, resident, take_turns
from spanwise import recurrence as ours

HEADS, DIM, WIDTH = 8, 64, 4
CHANNELS, STATES = 1024, 16  # of Mamba, with 1 / 16 of the tokens: transformers' backward takes their square
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "all logits": lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels),
    "chunks": functools.partial(spanwise.linear_cross_entropy, loss_mesh=None),
}


def loss(quick: bool = False) -> Result:
    """Seconds and peak bytes of a step."""
    torch.set_num_threads(2)
    shape = tokens, vocab, dim = (512, 4096, 128) if quick else (4096, 32_768, 512)
    rounds = 1 if quick else 5
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = dict(zip(LOSSES, pool.starmap(_peak_bytes, [(name, shape) for name in LOSSES], 1), strict=True))
    given = _loss_inputs(*shape)
    hidden, weight = (x.detach() for x in given[:2])
    steps: dict[str, Callable[[], Any]] = {name: functools.partial(_loss_step, name, given) for name in LOSSES}
    times = take_turns({"product": lambda: hidden @ weight.t()} | steps, rounds)
    product = min(times.pop("product"))
    rows = [
        {
            "name": name, "seconds": round(min(found), 3), "ratio": round(_ratio(found, times["all logits"]), 3),
            "peak_bytes": peaks[name], "memory_ratio": round(peaks[name] / peaks["all logits"], 3),
        }
        for name, found in times.items()
    ]  # fmt: skip
    about = {"torch": torch.__version__, "threads": 2, "tokens": tokens, "vocab": vocab, "dim": dim, "rounds": rounds}
    floor = {"product_seconds": round(product, 3), "floor_flops": 3 * 2 * tokens * vocab * dim}
    return about | floor | {"rows": rows}


def _ratio(found: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(found, base, strict=True))


def _loss_inputs(tokens: int, vocab: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=rng)
    weight = torch.randn(vocab, dim, generator=rng) * dim**-0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=rng)


def _loss_step(name: str, given: tuple[torch.Tensor, ...]) -> None:
    given[0].grad = given[1].grad = None
    LOSSES[name](*given).backward()


def _peak_bytes(name: str, shape: tuple[int, int, int]) -> int:
    torch.set_num_threads(2)
    given = _loss_inputs(*shape)
    _loss_step(name, _loss_inputs(8, 16, 8))  # what torch allocates once
    before = resident("VmRSS")
    _loss_step(name, given)
    return resident("VmHWM") - before


class Layer(NamedTuple):
    """Two ways to compute one layer, of the same leaves, and what any way must do."""

    ours: Callable[..., torch.Tensor]
    theirs: Callable[..., torch.Tensor]
    leaves: list[torch.Tensor]
    flops: int
    bytes: int


def recurrence(quick: bool = False) -> Result:
    """CPU seconds of each layer, beside transformers' code and beside the floor."""
    torch.set_num_threads(1)
    tokens, rounds = (512, 1) if quick else (4096, 5)
    rows = [_timed(name, layer, rounds) for name, layer in _layers(tokens).items()]
    about = {"torch": torch.__version__, "threads": 1, "tokens": tokens, "heads": HEADS, "dim": DIM, "width": WIDTH}
    return about | {"channels": CHANNELS, "states": STATES, "rounds": rounds, "rows": rows}


def _layers(tokens: int) -> dict[str, Layer]:
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next

    from spanwise.integrations.transformers import mixers

    few = tokens // 16
    route, short = (
        ours.recurrence_route(spanwise.make_plan(spanwise.SpanMask.causal(length), 1)) for length in (tokens, few)
    )
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    q, k = (F.normalize(normal(1, tokens, HEADS, DIM), dim=-1) for _ in range(2))
    v, decay, beta = normal(1, tokens, HEADS, DIM), -0.1 * normal(1, tokens, HEADS).abs(), normal(1, tokens, HEADS)
    product = 2 * 3 * tokens * HEADS * DIM * DIM  # a state times a vector, forward and backward
    x, weight = normal(1, tokens, 3 * HEADS * DIM), normal(3 * HEADS * DIM, WIDTH)
    step, rates = normal(1, tokens, HEADS).abs(), -normal(HEADS).abs()
    mamba = [normal(1, CHANNELS, few), F.softplus(normal(1, CHANNELS, few)), -normal(CHANNELS, STATES).abs()]
    mamba += [normal(1, STATES, few), normal(1, STATES, few)]

    def their_scan(c: torch.Tensor, b: torch.Tensor, x: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        found = modeling_mamba2.mamba2_chunk_scan(x, dt, rates, b, c, chunk_size=256)
        return found[0] if isinstance(found, tuple) else found

    return {
        "gated_delta": Layer(
            lambda *leaves: ours.gated_delta(*leaves, route),
            lambda *leaves: modeling_qwen3_next.torch_chunk_gated_delta_rule(*leaves)[0],
            [q, k, v, decay, beta.sigmoid()], 3 * product, 0,
        ),
        "gated_linear": Layer(
            lambda c, b, x, dt: ours.gated_linear(c, b, x * dt[..., None], rates * dt, route, scale=1.0),
            their_scan, [q, k, v, step], 2 * product, 0,
        ),
        "causal_conv": Layer(
            lambda x, weight: ours.causal_conv(x, weight, None, route, "silu"),
            lambda x, weight: modeling_qwen3_next.causal_conv1d_fn(x.mT, weight, None, "silu").mT,
            [x, weight], 0, 5 * x.nbytes,  # x and out; x, the gradients of out and of x
        ),
        "gated_linear, channels": Layer(
            functools.partial(mixers.mamba_selective_scan, short), modeling_mamba.mamba_selective_scan, mamba,
            12 * few * CHANNELS * STATES, 0,
        ),
    }  # fmt: skip


def _timed(name: str, layer: Layer, rounds: int) -> dict[str, Any]:
    leaves = [x.detach().requires_grad_() for x in layer.leaves]

    def step(call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        out = call(*leaves)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    both = [functools.partial(step, call) for call in (layer.ours, layer.theirs)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(both[0](), both[1](), strict=True)]
    square, wide = torch.randn(1024, 1024), torch.randn(1 << 24)
    floor: Callable[[], Any] = (lambda: square @ square) if layer.flops else wide.clone
    times = take_turns({"ours": both[0], "theirs": both[1], "floor": floor}, rounds, time.process_time)
    mine, theirs, unit = (min(found) for found in times.values())
    share = layer.flops / (2 * 1024**3) if layer.flops else layer.bytes / (2 * wide.nbytes)
    return {
        "name": name, "seconds": round(mine, 4), "transformers_seconds": round(theirs, 4),
        "ratio": round(_ratio(times["ours"], times["theirs"]), 3), "floor_flops": layer.flops,
        "floor_bytes": layer.bytes, "floor_seconds": round(unit * share, 5),
        "of_floor": round(mine / (unit * share), 2), "difference": float(f"{max(errors):.1e}"),
    }  # fmt: skip


if __name__ == "__main__":
    main({"loss": loss, "recurrence": recurrence}, __doc__ or "")
