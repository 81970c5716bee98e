"""The attention kernel of the CPU, forward and backward.

    python -m benchmarks.kernels masks --out benchmarks/results/kernels-cpu.json

Against torch's own kernel. Every figure is a ratio taken in one process: the repeats of both sides alternate,
and the smallest time of each counts. Next to it stands the least work of the mask: its non-empty 128-blocks and the
FLOPs of its area (4 x head dim a pair and head forward, 10 x backward). Memory is the peak of a separate process.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import spanwise
from benchmarks.plan import document_offsets
from benchmarks.publish import Result, main, resident, take_turns
from spanwise import SpanMask

BLOCK_SIZE = 128
# tokens, heads, head dim, repeats
SIZES = ((8192, 8, 64, 5), (8192, 4, 128, 5), (32_768, 4, 64, 2), (32_768, 2, 128, 2))


def short_documents(seq_len: int) -> np.ndarray:
    """Offsets of documents of about 2,048 tokens, shorter than those that planning is measured on."""
    return document_offsets(seq_len, 0, median=2048, sigma=0.7, least=16)


def masks(seq_len: int) -> dict[str, SpanMask]:
    """The masks by name; the causal mask and the documents each have a baseline in torch."""
    rows = np.arange(seq_len)
    global_keys = SpanMask(np.zeros((1, seq_len)).astype(int), np.minimum(rows + 1, 256)[None], seq_len)
    return {
        "causal": SpanMask.causal(seq_len),
        "documents": SpanMask.documents(short_documents(seq_len)),
        "window 1024": SpanMask.sliding_window(seq_len, 1023),
        "window 4096": SpanMask.sliding_window(seq_len, 4095),
        "window 1024 + 256 global": SpanMask.sliding_window(seq_len, 1023) | global_keys,
        "shared prefix": SpanMask.shared_prefix(seq_len // 4, np.diff(short_documents(seq_len - seq_len // 4))),
    }


def of_masks(quick: bool = False) -> Result:
    """Times in seconds, memory in bytes."""
    sizes = ((8192, 1, 64, 2),) if quick else SIZES
    rows = [row for size in sizes for row in measure(*size)]
    tokens, heads, dim, _ = max(sizes, key=lambda size: (size[0], -size[2]))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        ours, torchs = pool.starmap(_peak_bytes, [(which, tokens, heads, dim) for which in ("spanwise", "torch")], 1)
    memory = {"tokens": tokens, "heads": heads, "dim": dim, "input_bytes": 4 * tokens * heads * dim * 4}
    memory |= {"peak_bytes": ours, "torch_peak_bytes": torchs, "ratio": ours / torchs}
    return {"num_threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows, "memory": memory}


def measure(tokens: int, heads: int, dim: int, repeats: int) -> list[dict[str, Any]]:
    """Times of every mask at one size, and their ratios to the baselines; float32, batch 1."""
    inputs = q, k, v, _ = _inputs(tokens, heads, dim)
    offsets = short_documents(tokens).tolist()

    def torch_causal(first: int = 0, stop: int = tokens) -> torch.Tensor:
        part = slice(first, stop)
        return F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True)

    named = masks(tokens)
    forwards = {name: _spanwise(mask, q, k, v) for name, mask in named.items()}
    forwards["torch causal"] = torch_causal
    forwards["torch, loop over documents"] = lambda: torch.cat([torch_causal(*run) for run in pairwise(offsets)], dim=2)
    steps = {name: functools.partial(_step, forward, inputs) for name, forward in forwards.items()}
    seconds = {name: min(found) for name, found in take_turns(steps, repeats).items()}

    blocks = {name: int(mask.block_counts(BLOCK_SIZE).sum()) for name, mask in named.items()}
    # The faster of the two causal rates is the harder target.
    seconds_a_block = min(seconds["causal"], seconds["torch causal"]) / blocks["causal"]
    baselines = {"causal": "torch causal", "documents": "torch, loop over documents"}
    rows = []
    for name, mask in named.items():
        baseline = baselines.get(name, "blocks at the causal rate")
        baseline_seconds = seconds.get(baseline, seconds_a_block * blocks[name])
        flops = 14 * dim * heads * int(mask.area().sum())
        rows.append({
            "tokens": tokens, "heads": heads, "dim": dim, "mask": name, "blocks": blocks[name], "flops": flops,
            "seconds": seconds[name], "gflops_per_second": flops / seconds[name] / 1e9, "baseline": baseline,
            "baseline_seconds": baseline_seconds, "ratio": seconds[name] / baseline_seconds,
        })  # fmt: skip
    return rows


def _peak_bytes(which: str, tokens: int, heads: int, dim: int) -> int:
    """Growth of the resident set over one causal forward and backward, inputs included."""
    before = 0
    for size in (256, tokens):  # the small one loads libraries and code
        before = resident("VmRSS")
        inputs = _inputs(size, heads, dim)
        forward = _spanwise(SpanMask.causal(size), *inputs[:3])
        if which == "torch":
            forward = functools.partial(F.scaled_dot_product_attention, *inputs[:3], is_causal=True)
        _step(forward, inputs)
    return resident("VmHWM") - before


def _inputs(tokens: int, heads: int, dim: int) -> list[torch.Tensor]:
    """q, k, v and the cotangent of the output."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(4)]
    return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]


def _spanwise(mask: SpanMask, *qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    local = spanwise.make_plan(mask, 1).local(None)
    return lambda: spanwise.context_parallel_attention(*qkv, local, kernel="sdpa")


def _step(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Forward and backward; the last input is the cotangent."""
    torch.autograd.grad(forward(), inputs[:3], inputs[3])


if __name__ == "__main__":
    main({"masks": of_masks}, __doc__ or "")
