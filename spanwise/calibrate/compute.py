"""Rates of one rank's processor and memory, measured while all ranks do the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from spanwise.attention import rank_plan
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.calibrate.fit import AttentionCall
from spanwise.calibrate.ranks import Ranks
from spanwise.hardware import attention_flops
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan


def matmul_rate(ranks: Ranks, dtype: torch.dtype, repeats: int) -> float:
    """FLOP/s of a matrix product on the slowest rank."""
    n = 1024 if ranks.device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=ranks.device).to(dtype) for _ in range(2))
    return 2 * n**3 / ranks.medians([lambda: ranks.timed(lambda: torch.mm(a, b))[:1]], repeats)[0]


def copy_rate(ranks: Ranks, repeats: int) -> float:
    """Bytes/s read and written together on the slowest rank."""
    num_bytes = 1 << (26 if ranks.device.type == "cpu" else 29)  # larger than caches
    source = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / ranks.medians([lambda: ranks.timed(lambda: target.copy_(source))[:1]], repeats)[0]


def time_attention(
    ranks: Ranks, kernel: Kernel, heads: tuple[int, int, int], dtype: torch.dtype,
    problems: Sequence[tuple[int, int]], repeats: int,
) -> tuple[list[AttentionCall], list[float]]:  # fmt: skip
    """Forward and backward of the chunks of every problem: the calls, and seconds on the slowest rank.

    Each problem is the part of rank 0 of two: packed causal documents, cut head-tail, so that a rank reads its own keys
    and keys of the other. Every rank measures the same one.

    Args:
        heads: query heads, key/value heads, head dim.
        problems: ``(tokens, median document)``; lengths are log-normal, like those of texts.
    """
    calls: list[AttentionCall] = []
    steps: list[Callable[[], tuple[float, float]]] = []
    for tokens, median in problems:
        ends = np.cumsum(np.random.default_rng(0).lognormal(math.log(median), 1.0, tokens).astype(np.int64).clip(min=1))
        mask = SpanMask.documents(np.concatenate([[0], ends[ends < tokens], [tokens]]))
        plan = make_plan(mask, 2, balancer="head_tail", exchange="needed", stages=1)
        local = rank_plan.build(plan, 0, ranks.device, kernel=kernel)
        for own, chunk in zip((True, False), local.chunks["default"], strict=False):
            area = int((chunk.end - chunk.start).clamp(min=0).sum())
            if not area:
                continue
            sizes = (heads[0], local.tokens.shape[1]), *[(heads[1], chunk.kv_pos.shape[1])] * 2
            q, k, v = (torch.randn(1, *n, heads[2], device=ranks.device).to(dtype).requires_grad_() for n in sizes)
            kernel.check(q, k, v, chunk, AttentionOptions())
            steps.append(functools.partial(_timed, ranks, kernel, (q, k, v), chunk, local.tokens))
            what = f"{tokens} tokens in documents of {median}, {'own' if own else 'remote'} keys"
            for backward in (False, True):
                pair = attention_flops(1, heads[0], heads[2], heads[2], backward=backward)
                calls.append(AttentionCall(what, backward, area * pair, pair, local.tokens.shape[1] if own else 0))
    return calls, ranks.medians(steps, repeats)


def _timed(
    ranks: Ranks, kernel: Kernel, inputs: tuple[torch.Tensor, ...], chunk: Chunk, q_pos: torch.Tensor
) -> tuple[float, float]:
    """Seconds of one forward and its backward."""
    q, k, v = inputs
    forward, results = ranks.timed(lambda: kernel.attend(q, k, v, chunk, q_pos, AttentionOptions()))
    cotangents = [torch.ones_like(x) for x in results]  # the merge of chunks also sends one to the lse
    return forward, ranks.timed(lambda: torch.autograd.grad(results, inputs, cotangents))[0]
