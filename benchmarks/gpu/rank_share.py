"""One rank's share of an 8-rank plan against one device's attention over the whole sequence, divided by 8.

    python benchmarks/gpu/rank_share.py                              # on a GPU; JSON goes to benchmarks/results
    python benchmarks/gpu/rank_share.py --device cpu --tokens 4096   # the same code on a CPU, to see that it runs

What a rank computes is timed with everything it would have received already there: the stages of its `RankPlan` through
the kernel, then the merge, forward and backward. The other side is attention over the whole sequence on the same
device: flash attention on CUDA (`scaled_dot_product_attention` for the causal mask, `varlen_attn` for documents and
windows), the kernel "sdpa" on a CPU. A ratio of 1 means that an eighth of the work takes an eighth of the time; the
busiest rank of the plan is timed, so imbalance is part of it. All cases of a mask are timed in turns; medians are
reported, with every time in the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import spanwise
from spanwise import SpanMask
from spanwise.attention.attention import merged
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV
from spanwise.attention.rank_plan import RankPlan, build

RESULTS = Path(__file__).parents[1] / "results"
RANKS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 32, 8, 128, 4096
Step = Callable[[], None]


def documents(tokens: int, seed: int) -> np.ndarray:
    """Offsets of lognormal documents, median 4,096, that fill the sequence."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(int(min(max(64, rng.lognormal(np.log(4096), 1.0)), left)))
    return np.concatenate([[0], np.cumsum(lengths)])


def share(plan: spanwise.Plan, kernel: str, device: torch.device, dtype: torch.dtype) -> tuple[Step, int]:
    """Forward and backward of the busiest rank, with its K/V pieces at hand; and that rank."""
    rank = int(np.argmax(plan.work()))
    local: RankPlan = build(plan, rank, device, kernel=KERNELS[kernel])
    chunks = local.chunks["default"]

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype).requires_grad_()

    q = draw(HEADS, local.tokens.shape[1])
    kvs = [(draw(KV_HEADS, chunk.kv_pos.shape[1]), draw(KV_HEADS, chunk.kv_pos.shape[1])) for chunk in chunks]
    KERNELS[kernel].check(q, *kvs[0], chunks[0], AttentionOptions())
    cotangent = torch.randn_like(q)
    leaves = [q, *(x for pair in kvs for x in pair)]

    def step() -> None:
        there, options = (ChunkKV(k, v) for k, v in kvs), AttentionOptions(HEAD_DIM**-0.5)
        out, *_ = merged(KERNELS[kernel], q, there, chunks, local.tokens, options, max_logit=False)
        torch.autograd.grad(out, leaves, cotangent)

    return step, rank


def whole(name: str, mask: SpanMask, cu_seqlens: np.ndarray, device: torch.device, dtype: torch.dtype) -> Step:
    """Forward and backward of the whole sequence on one device."""
    tokens = mask.q_len
    q, k, v = (
        torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cotangent = torch.randn_like(q)
    if device.type == "cpu":
        start, end = torch.from_numpy(mask.start.copy()), torch.from_numpy(mask.end.copy())
        from spanwise.attention.kernels.sdpa import sdpa

        return lambda: _discard(
            torch.autograd.grad(sdpa(q, k, v, start, end, scale=HEAD_DIM**-0.5)[0], (q, k, v), cotangent)
        )
    if name == "causal":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def causal() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (q, k, v), cotangent)

        return causal
    from torch.nn.attention.varlen import varlen_attn

    offsets = cu_seqlens if name == "documents" else np.array([0, tokens])
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = int(np.diff(offsets).max())
    window = (WINDOW, 0) if name == "window" else (-1, 0)
    # One K/V head for each query head: older releases know no grouped heads here.
    packed = [x.detach()[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    packed[1:] = [x.repeat_interleave(HEADS // KV_HEADS, 1) for x in packed[1:]]
    leaves = [x.requires_grad_() for x in packed]

    def varlen() -> None:
        out = varlen_attn(*leaves, cu, cu, longest, longest, window_size=window)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return varlen


def _discard(_: Any) -> None:
    pass


def seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Of one call, until the device has finished it: by CUDA events, or the host's clock on a CPU."""
    if device.type == "cpu":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --tokens 4096 shows that the code runs")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    device_name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    cu_seqlens = documents(args.tokens, args.seed)
    every = {
        "documents": SpanMask.documents(cu_seqlens),
        "causal": SpanMask.causal(args.tokens),
        "window": SpanMask.sliding_window(args.tokens, WINDOW),
    }
    print(f"{device_name}, torch {torch.__version__}, {args.tokens:,} tokens, {RANKS} ranks, forward and backward")
    print(f"{'mask':12}{'kernel':10}{'share, ms':>12}{'whole / 8, ms':>16}{'ratio':>8}{'imbalance':>12}")
    rows = []
    for name, mask in every.items():
        plan = spanwise.make_plan(
            mask, RANKS, exchange="needed", stages=1, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        cases: dict[str, Step] = {"whole": whole(name, mask, cu_seqlens, device, dtype)}
        for kernel in ("flex", "varlen") if on_gpu else ("sdpa",):
            cases[kernel], rank = share(plan, kernel, device, dtype)
        times: dict[str, list[float]] = {case: [] for case in cases}
        for step in cases.values():
            for _ in range(2):
                step()  # compiles, warms up
        for _ in range(args.repeats):
            for case, step in cases.items():
                times[case].append(seconds(step, device))
        eighth = float(np.median(times["whole"])) / RANKS
        for kernel in list(cases)[1:]:
            median = float(np.median(times[kernel]))
            ratio, imbalance = median / eighth, plan.imbalance()
            print(f"{name:12}{kernel:10}{median * 1e3:12.2f}{eighth * 1e3:16.2f}{ratio:8.2f}{imbalance:12.3f}")
            rows.append(
                {"mask": name, "kernel": kernel, "rank": rank, "balancer": plan.balancer, "imbalance": imbalance}
                | {"share_seconds": times[kernel], "whole_seconds": times["whole"], "ratio": ratio}
            )
    about = {
        "device": device_name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "spanwise": spanwise.__version__ if hasattr(spanwise, "__version__") else None,
        "date": datetime.date.today().isoformat(),
        "tokens": args.tokens,
        "ranks": RANKS,
        "heads": [HEADS, KV_HEADS],
        "head_dim": HEAD_DIM,
        "dtype": str(dtype).removeprefix("torch."),
    }
    out = args.out or (RESULTS / f"rank-share-{device_name.lower().replace(' ', '-')}.json" if on_gpu else None)
    if out is not None:
        out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
