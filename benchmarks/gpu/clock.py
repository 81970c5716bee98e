"""Times of calls on a device, and the problems that the timed steps share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from spanwise import SpanMask

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 8, 128, 4096


def device_of(name: str) -> torch.device:
    """The CPU, or the first GPU."""
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", 0)


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


def host_seconds(step: Callable[[], Any], device: torch.device) -> float:
    """Until one call returns, on a device that has nothing else to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def medians(
    cases: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int, clock: Callable[..., float] = seconds
) -> dict[str, float]:
    """Median seconds of each case, timed in turns after two calls that compile and warm up."""
    for step in cases.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, step in cases.items():
            times[name].append(clock(step, device))
    return {name: statistics.median(found) for name, found in times.items()}


def documents(tokens: int, seed: int = 0, median: int = 4096) -> np.ndarray:
    """Offsets of lognormal documents that fill the sequence."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(int(min(max(64, rng.lognormal(np.log(median), 1.0)), left)))
    return np.concatenate([[0], np.cumsum(lengths)])


def masks(tokens: int) -> dict[str, SpanMask]:
    return {
        "causal": SpanMask.causal(tokens),
        "documents": SpanMask.documents(documents(tokens)),
        "window": SpanMask.sliding_window(tokens, min(WINDOW, tokens // 4)),
    }


def draw(heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``[1, heads, tokens, HEAD_DIM]``, which requires a gradient."""
    return torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype).requires_grad_()


def one_device(name: str, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Any], Any]:
    """torch's own attention over the whole sequence, and its leaves: flash for causal, `varlen_attn` for the others.

    On a CPU, where `varlen_attn` does not run, causal attention stands for all.
    """
    q, k, v = (draw(heads, tokens, device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    if name == "causal" or device.type == "cpu":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def causal() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return causal, (q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    offsets = documents(tokens) if name == "documents" else np.array([0, tokens])
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = int(np.diff(offsets).max())
    # One K/V head for each query head: older releases know no grouped heads here.
    packed = [x.detach()[0].repeat_interleave(HEADS // x.shape[1], 0).transpose(0, 1).contiguous() for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in packed]
    window = (WINDOW, 0) if name == "window" else (-1, 0)
    return lambda: varlen_attn(*leaves, cu, cu, longest, longest, window_size=window), leaves
