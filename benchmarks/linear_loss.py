"""Time and memory of `linear_cross_entropy` beside torch's cross-entropy with all logits: float32, with the backward.

    python -m benchmarks.linear_loss --out benchmarks/results/linear-loss-cpu.json

Variants take turns. Seconds are the least of the rounds; ratios are to all logits in the same round, the median of the
rounds. The floor is the three products that any way needs, at the rate of one such product in the same run.
Memory is the growth of the resident set in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import spanwise
from benchmarks.publish import publish, resident, take_turns

ALL, PRODUCT = "all logits", "product"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, vocab: int, dim: int) -> Inputs:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, dim, generator=rng)
    weight = torch.randn(vocab, dim, generator=rng) * dim**-0.5
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=rng)


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {
    ALL: lambda hidden, weight, labels: F.cross_entropy(F.linear(hidden, weight), labels),
    "chunks": partial(spanwise.linear_cross_entropy, loss_mesh=None),
}


def step(loss: Callable[..., torch.Tensor], given: Inputs) -> None:
    given[0].grad = given[1].grad = None
    loss(*given).backward()


def peak_bytes(name: str, shape: tuple[int, int, int]) -> int:
    given = inputs(*shape)
    step(VARIANTS[ALL], inputs(8, 16, 8))  # what torch allocates once
    before = resident("VmRSS")
    step(VARIANTS[name], given)
    return resident("VmHWM") - before


def in_a_process(name: str, shape: tuple[int, int, int]) -> int:
    """`peak_bytes` in a fork, whose ``VmHWM`` begins anew; this process has computed nothing yet."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(peak_bytes(name, shape)))
    process.start()
    process.join()
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 2048), ("vocab", 32768), ("dim", 256), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape = (given.tokens, given.vocab, given.dim)
    peaks = {name: in_a_process(name, shape) for name in VARIANTS}
    tensors = inputs(*shape)
    hidden, weight = (x.detach() for x in tensors[:2])
    steps = {PRODUCT: lambda: hidden @ weight.t()} | {x: partial(step, f, tensors) for x, f in VARIANTS.items()}
    times = take_turns(steps, given.rounds)
    product = min(times.pop(PRODUCT))
    rows = [
        {"name": name, "seconds": round(min(found), 3),
         "ratio": round(statistics.median(a / b for a, b in zip(found, times[ALL], strict=True)), 3),
         "peak_bytes": peaks[name], "memory_ratio": round(peaks[name] / peaks[ALL], 3)}
        for name, found in times.items()
    ]  # fmt: skip
    about = {
        "command": f"python {' '.join(sys.argv)}", "torch": torch.__version__, "threads": given.threads,
        "tokens": given.tokens, "vocab": given.vocab, "dim": given.dim, "rounds": given.rounds, "dtype": "float32",
        "product_seconds": round(product, 3), "floor_flops": 3 * 2 * given.tokens * given.vocab * given.dim,
    }  # fmt: skip
    publish(about | {"rows": rows}, given.out)


if __name__ == "__main__":
    main()
