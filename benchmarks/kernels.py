"""Attention on the CPU, forward and backward.

    python -m benchmarks.kernels masks --out benchmarks/results/kernels-cpu.json
    python -m benchmarks.kernels packed --out benchmarks/results/packed-cpu.json

masks: against torch's own kernel. Every figure is a ratio taken in one process: the repeats of both sides alternate,
and the smallest time of each counts. Next to it stands the least work of the mask: its non-empty 128-blocks and the
FLOPs of its area (4 x head dim a pair and head forward, 10 x backward). Memory is the peak of a separate process.

packed: packed documents as they are against documents padded for the dual-chunk order. TransformerEngine's context
parallelism pads every document to a multiple of twice the number of ranks. The same documents are planned three ways:
padded in its order (balancer "dual_chunk"), unpadded in the same order ("per_document_head_tail"), and unpadded with
the least traffic ("local"). The kernels of every rank's share run in one process, one rank after the other, with the
K/V of other ranks already present; the ways take turns. Reported is the busiest rank, for which a step waits. Padding
costs only its rows here, because no span holds them. A kernel that computes padding also pays for its share, as do all
other layers of a model.
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

from benchmarks.plan import document_offsets
from benchmarks.publish import Result, main, resident, take_turns
from spanwise.attention.attention import merged, zero_in_padding
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV
from spanwise.attention.rank_plan import build
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

BLOCK_SIZE = 128
# tokens, heads, head dim, repeats
SIZES = ((8192, 8, 64, 5), (8192, 4, 128, 5), (32_768, 4, 64, 2), (32_768, 2, 128, 2))
QUICK_SIZES = ((2048, 4, 64, 5),)
HEADS, HEAD_DIM = 2, 64  # of packed documents
# Median and least tokens of a document, by name; lengths are log-normal with sigma 1. Those of `plan layouts` first,
# then corpora of short documents.
CORPORA = {"median 4,096": (4096, 64), "median 1,024": (1024, 1), "median 256": (256, 1), "median 64": (64, 1)}


def short_documents(seq_len: int) -> np.ndarray:
    """Offsets of documents of about 2,048 tokens, shorter than those that planning is measured on."""
    return document_offsets(seq_len, 0, median=2048, sigma=0.7, least=16)


def masks(seq_len: int) -> dict[str, SpanMask]:
    """The masks by name; the causal mask and the documents each have a baseline in torch."""
    left = min(1024, seq_len // 4)
    rows = np.arange(seq_len)
    global_keys = SpanMask(np.zeros((1, seq_len)).astype(int), np.minimum(rows + 1, 256)[None], seq_len)
    named = {
        "causal": SpanMask.causal(seq_len),
        "documents": SpanMask.documents(short_documents(seq_len)),
        f"window {left}": SpanMask.sliding_window(seq_len, left - 1),
        f"window {4 * left}": SpanMask.sliding_window(seq_len, 4 * left - 1),
        f"window {left} + 256 global": SpanMask.sliding_window(seq_len, left - 1) | global_keys,
        "shared prefix": SpanMask.shared_prefix(seq_len // 4, np.diff(short_documents(seq_len - seq_len // 4))),
    }
    if 4 * left >= seq_len:
        del named[f"window {4 * left}"]
    return named


def of_masks(quick: bool = False) -> Result:
    """Times in seconds, memory in bytes."""
    sizes = QUICK_SIZES if quick else SIZES
    rows = [row for size in sizes for row in measure(*size)]
    tokens, heads, dim, _ = max(sizes, key=lambda size: (size[0], -size[2]))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        ours, torchs = pool.starmap(_peak_bytes, [(which, tokens, heads, dim) for which in ("spanwise", "torch")], 1)
    memory = {"tokens": tokens, "heads": heads, "dim": dim, "input_bytes": 4 * tokens * heads * dim * 4}
    memory |= {"peak_bytes": ours, "torch_peak_bytes": torchs, "ratio": ours / torchs}
    return {"num_threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows, "memory": memory}


def measure(tokens: int, heads: int, dim: int, repeats: int) -> list[dict[str, Any]]:
    """Times of every mask at one size, and their ratios to the baselines; float32, batch 1."""
    q, k, v, grad = _inputs(tokens, heads, dim)
    offsets = short_documents(tokens).tolist()

    def torch_causal(first: int = 0, stop: int = tokens) -> torch.Tensor:
        part = slice(first, stop)
        return F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True)

    named = masks(tokens)
    forwards = {name: _spanwise(mask, q, k, v) for name, mask in named.items()}
    forwards["torch causal"] = torch_causal
    forwards["torch, loop over documents"] = lambda: torch.cat([torch_causal(*run) for run in pairwise(offsets)], dim=2)
    steps = {name: _with_backward(forward, (q, k, v), grad) for name, forward in forwards.items()}
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
        rows.append(
            {
                "tokens": tokens, "heads": heads, "dim": dim, "mask": name, "blocks": blocks[name], "flops": flops,
                "seconds": seconds[name], "gflops_per_second": flops / seconds[name] / 1e9, "baseline": baseline,
                "baseline_seconds": baseline_seconds, "ratio": seconds[name] / baseline_seconds,
            }
        )  # fmt: skip
    return rows


def _peak_bytes(which: str, tokens: int, heads: int, dim: int) -> int:
    """Growth of the resident set over one causal forward and backward, inputs included."""
    before = 0
    for size in (256, tokens):  # the small one loads libraries and code
        before = resident("VmRSS")
        q, k, v, grad = _inputs(size, heads, dim)
        forward = _spanwise(SpanMask.causal(size), q, k, v)
        if which == "torch":
            forward = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        _with_backward(forward, (q, k, v), grad)()
    return resident("VmHWM") - before


def _inputs(tokens: int, heads: int, dim: int) -> list[torch.Tensor]:
    """q, k, v and the cotangent of the output."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(4)]
    return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]


def _spanwise(mask: SpanMask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    start, end = torch.from_numpy(mask.start.copy()), torch.from_numpy(mask.end.copy())
    positions = torch.arange(q.shape[2])[None]
    chunk, options = Chunk(start, end, positions), AttentionOptions()
    return lambda: KERNELS["sdpa"].attend(q, k, v, chunk, positions, options)[0]


def _with_backward(
    forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], grad: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.grad(forward(), inputs, grad)

    return step


def corpora(seq_len: int) -> dict[str, np.ndarray]:
    """Document offsets by name, ``[num_docs + 1]`` each, `seq_len` tokens together."""
    return {name: document_offsets(seq_len, 0, median=median, least=least) for name, (median, least) in CORPORA.items()}


def plans(cu_seqlens: np.ndarray, num_ranks: int) -> dict[str, Plan]:
    """Causal documents each way; K/V travel as needed."""
    slots = -(-np.diff(cu_seqlens) // (2 * num_ranks)) * 2 * num_ranks
    padded = Packing(cu_seqlens, cu_seqlens_q_padded=np.append(0, np.cumsum(slots)))
    unpadded = Packing(cu_seqlens)
    ways = {"padded": (padded, "dual_chunk"), "unpadded": (unpadded, "per_document_head_tail")}
    ways["local"] = (unpadded, "local")
    return {
        way: make_plan(
            packing.mask(), num_ranks, packing=packing, balancer=balancer, exchange="needed", stages=1,
            num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32,
        )
        for way, (packing, balancer) in ways.items()
    }  # fmt: skip


def packed(quick: bool = False) -> Result:
    """For each corpus the share of padding, and of each way imbalance, K/V tokens received, and busiest seconds."""
    seq_len, repeats, ranks = (4_096, 2, (4,)) if quick else (16_384, 7, (4, 8))
    rows = [_row(name, cu, num, repeats) for num in ranks for name, cu in corpora(seq_len).items()]
    about = {"num_threads": torch.get_num_threads(), "torch": torch.__version__}
    return about | {"seq_len": seq_len, "heads": HEADS, "head_dim": HEAD_DIM, "rows": rows}


def _row(name: str, cu_seqlens: np.ndarray, num_ranks: int, repeats: int) -> dict[str, Any]:
    ways = plans(cu_seqlens, num_ranks)
    steps = {f"{way} {rank}": rank_step(plan, rank) for rank in range(num_ranks) for way, plan in ways.items()}
    take_turns(steps, 1)  # warms up
    times = take_turns(steps, repeats)
    row: dict[str, Any] = {"corpus": name, "num_ranks": num_ranks, "documents": len(cu_seqlens) - 1}
    row["padding_share"] = 1 - int(cu_seqlens[-1]) / ways["padded"].seq_len
    for way, plan in ways.items():
        # The least time of each rank, so that a disturbance of one step does not decide which rank is busiest.
        busiest = max(min(times[f"{way} {rank}"]) for rank in range(num_ranks))
        row[way] = {"imbalance": plan.imbalance(), "recv_mean": float(plan.recv_tokens().mean()), "busiest": busiest}
        row[way]["ratio"] = busiest / row["padded"]["busiest"]
    return row


def rank_step(plan: Plan, rank: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward of one rank's attention with all K/V present; returns out, dq, and gradients of K and V.

    Computes the same as `context_parallel_attention` with the kernel "sdpa" between its collectives, with zeros in
    padding.
    """
    local, generator = build(plan, rank), torch.Generator().manual_seed(rank)
    chunks = local.chunks["default"]

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator)

    q, grad = draw(local.tokens.shape[1]), draw(local.tokens.shape[1])
    received = [draw(chunk.kv_pos.shape[1]) for chunk in chunks for _ in range(2)]

    def step() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, *received)]
        # Tokens of other ranks are zero in padding already, or not sent.
        own_k, own_v = (zero_in_padding(x, local.kv_valid) for x in leaves[1:3])
        there = iter([ChunkKV(own_k, own_v), *map(ChunkKV, leaves[3::2], leaves[4::2])])
        rows = zero_in_padding(leaves[0], local.valid)
        result = merged(KERNELS["sdpa"], rows, there, chunks, local.tokens, AttentionOptions(), max_logit=False)[0]
        out = zero_in_padding(result, local.valid)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return step


if __name__ == "__main__":
    main({"masks": of_masks, "packed": packed}, __doc__ or "")
