"""Speed of the flex kernel on one GPU: forward + backward on several masks, beside torch's causal flash SDPA.

    python benchmarks/gpu/kernels.py --seq-len 32768 --out kernels.json

Prints a table and writes JSON. TFLOP/s count the cells that the mask allows, 4 · head_dim per head forward and 2.5
times that backward (the convention of the FlashAttention papers), so masks and kernels compare by rate. All cases of
one run are timed in turns, and the median is reported.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spanwise.attention.kernels._flex_tables import FlexTables, pad_spans
from spanwise.attention.kernels.flex import flex
from spanwise.masks.blocks import block_tables
from spanwise.masks.span_mask import SpanMask

BLOCK = 128


def masks(seq_len: int, seed: int) -> dict[str, SpanMask]:
    """Causal, packed documents of two typical sizes, a window, and a window with global tokens (two spans)."""
    rng = np.random.default_rng(seed)

    def documents(mean: int) -> SpanMask:
        cuts = np.cumsum(rng.geometric(1 / mean, size=4 * seq_len // mean + 4))
        return SpanMask.documents([0, *map(int, cuts[cuts < seq_len]), seq_len])

    return {
        "causal": SpanMask.causal(seq_len),
        "documents, mean 512": documents(512),
        "documents, mean 4096": documents(4096),
        "window 1024": SpanMask.sliding_window(seq_len, 1024),
        "window 1024 + 256 global": SpanMask.sliding_window(seq_len, 1024)
        | (SpanMask.causal(seq_len) & SpanMask(np.zeros((1, seq_len), int), np.full((1, seq_len), 256), seq_len)),
    }


def flex_case(mask: SpanMask, scale: float) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    spare = pad_spans(mask.num_spans) - mask.num_spans
    start, end = (torch.from_numpy(np.pad(x, ((0, 0), (0, spare), (0, 0)))).cuda() for x in (mask.start, mask.end))
    tables = FlexTables.from_numpy(block_tables(mask, BLOCK), "cuda")
    return lambda q, k, v: flex(q, k, v, start, end, tables, scale=scale)[0]


def sdpa_case(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def time_step(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], qkv: tuple[torch.Tensor, ...]
) -> float:
    """Seconds of one forward + backward."""
    begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cotangent = torch.ones_like(qkv[0])
    torch.cuda.synchronize()
    begin.record()
    torch.autograd.grad(run(*qkv), qkv, cotangent)
    stop.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(stop) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    qkv = tuple(
        torch.randn(1, heads, args.seq_len, args.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    every = masks(args.seq_len, args.seed)
    cases = {f"flex: {name}": (flex_case(mask, args.head_dim**-0.5), mask) for name, mask in every.items()}
    cases["sdpa flash: causal"] = (sdpa_case, every["causal"])

    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for run, _ in cases.values():
        for _ in range(3):
            time_step(run, qkv)  # compiles, then warms up
    for _ in range(args.repeats):
        for name, (run, _) in cases.items():
            seconds[name].append(time_step(run, qkv))

    rows = []
    for name, (_, mask) in cases.items():
        area = int(mask.area().sum())
        median = float(np.median(seconds[name]))
        tflops = 3.5 * 4 * args.head_dim * args.heads * area / median / 1e12
        rows.append({"case": name, "ms": 1e3 * median, "tflops": tflops, "area": area})
    base = rows[-1]["tflops"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.seq_len} tokens, forward + backward")
    print(f"{'case':34}{'ms':>10}{'TFLOP/s':>10}{'of flash':>10}")
    for row in rows:
        print(f"{row['case']:34}{row['ms']:10.2f}{row['tflops']:10.1f}{row['tflops'] / base:10.2f}")
    if args.out is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.out.write_text(json.dumps({**about, **vars(args), "out": str(args.out), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
