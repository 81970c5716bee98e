"""Packed documents as they are against documents padded for the dual-chunk order: ``python -m benchmarks.packed``.

TransformerEngine's context parallelism pads every document to a multiple of twice the number of ranks. The same
documents are planned three ways: padded in its order (balancer "dual_chunk"), unpadded in the same order
("per_document_head_tail"), and unpadded with the least traffic ("local"). The kernels of every rank's share run in one
process, forward and backward, one rank after the other, with the K/V of other ranks already present; the ways take
turns. Reported is the busiest rank, for which a step waits. Padding costs only its rows here, because no span holds
them. A kernel that computes padding also pays for its share, as do all other layers of a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plan import document_offsets
from benchmarks.publish import main, publish, take_turns
from spanwise.attention.attention import merged, zero_in_padding
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.kv import ChunkKV
from spanwise.attention.rank_plan import build
from spanwise.layouts.packing import Packing
from spanwise.planning.make_plan import make_plan
from spanwise.planning.plan import Plan

HEADS, HEAD_DIM = 2, 64
# Median and least tokens of a document, by name; lengths are log-normal with sigma 1. Those of `layout.py` first,
# then corpora of short documents.
CORPORA = {"median 4,096": (4096, 64), "median 1,024": (1024, 1), "median 256": (256, 1), "median 64": (64, 1)}


def corpora(seq_len: int) -> dict[str, np.ndarray]:
    """Document offsets by name, ``[num_docs + 1]`` each, `seq_len` tokens together."""
    return {name: document_offsets(seq_len, 0, median=median, least=least) for name, (median, least) in CORPORA.items()}


def plans(cu_seqlens: np.ndarray, num_ranks: int) -> dict[str, Plan]:
    """Causal documents each way; K/V travel as needed."""
    make = functools.partial(
        make_plan, exchange="needed", stages=1, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
        dtype=torch.float32,
    )  # fmt: skip
    slots = -(-np.diff(cu_seqlens) // (2 * num_ranks)) * 2 * num_ranks
    padded = Packing(cu_seqlens, cu_seqlens_q_padded=np.append(0, np.cumsum(slots)))
    unpadded = Packing(cu_seqlens)
    return {
        "padded": make(padded.mask(), num_ranks, packing=padded, balancer="dual_chunk"),
        "unpadded": make(unpadded.mask(), num_ranks, packing=unpadded, balancer="per_document_head_tail"),
        "local": make(unpadded.mask(), num_ranks, packing=unpadded, balancer="local"),
    }


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Measure, print a table, and write JSON to `out`; `quick`: 4,096 tokens, 4 ranks, two repeats.

    A row has ``corpus``, ``num_ranks``, ``documents``, ``padding_share`` (rows of padded storage without a token), and
    ``padded``, ``unpadded`` and ``local``, each with ``imbalance``, ``recv_mean`` in K/V tokens, ``busiest`` seconds of
    a rank, and their ``ratio`` to those of ``padded``.
    """
    seq_len, repeats, ranks = (4_096, 2, (4,)) if quick else (16_384, 7, (4, 8))
    rows = [measure(name, cu, num, repeats) for num in ranks for name, cu in corpora(seq_len).items()]
    about = {"num_threads": torch.get_num_threads(), "torch": torch.__version__}
    return publish(about | {"seq_len": seq_len, "heads": HEADS, "head_dim": HEAD_DIM, "rows": rows}, out)


def measure(name: str, cu_seqlens: np.ndarray, num_ranks: int, repeats: int) -> dict[str, Any]:
    """One row of `run`'s result."""
    ways = plans(cu_seqlens, num_ranks)
    steps = {f"{way} {rank}": rank_step(plan, rank) for rank in range(num_ranks) for way, plan in ways.items()}
    take_turns(steps, 1)  # warms up
    times = take_turns(steps, repeats)
    padding = 1 - int(cu_seqlens[-1]) / ways["padded"].seq_len
    row: dict[str, Any] = {"corpus": name, "num_ranks": num_ranks, "documents": len(cu_seqlens) - 1}
    row["padding_share"] = padding
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
    assert not chunks[0].flat

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(1, HEADS, tokens, HEAD_DIM, generator=generator)

    q, grad = draw(local.tokens.shape[1]), draw(local.tokens.shape[1])
    received = [(draw(chunk.kv_pos.shape[1]), draw(chunk.kv_pos.shape[1])) for chunk in chunks]

    def step() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, *(x for pair in received for x in pair))]
        # Tokens of other ranks are zero in padding already, or not sent.
        own_k, own_v = (zero_in_padding(x, local.kv_valid) for x in leaves[1:3])
        there = iter([ChunkKV(own_k, own_v), *map(ChunkKV, leaves[3::2], leaves[4::2])])
        rows = zero_in_padding(leaves[0], local.valid)
        result = merged(KERNELS["sdpa"], rows, there, chunks, local.tokens, AttentionOptions(), max_logit=False)[0]
        out = zero_in_padding(result, local.valid)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return step


if __name__ == "__main__":
    main(run, __doc__ or "")
