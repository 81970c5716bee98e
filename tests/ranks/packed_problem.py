"""Packed attention problems, what dense float64 attention makes of them sequence by sequence, and runs on ranks.

The reference knows lengths and offsets, and no masks, layouts or plans of spanwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import spanwise
from spanwise import AuxRequest
from spanwise.layouts.packing import Packing
from tests.pairs import covering, named
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import HOSTS, mesh_of

ONE_LEVEL = [
    {"exchange": "all_gather"},
    {"exchange": "needed", "stages": 1},
    {"exchange": "needed", "stages": 3},
    {"exchange": "hierarchical", "hardware": HOSTS},
    {"exchange": "ring"},
    {"exchange": "ulysses"},
]
TWO_LEVELS = ONE_LEVEL[:-1]  # the exchange of the outer axis
HEADS = (12, 2)  # trade with 2, 3 and 4 ranks, where K/V heads are split, shared, and shared unevenly

# [Hq, Tq, Tk] scores, storage rows of the queries [Tq] and of the keys [Tk] -> scores
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ways(*ranks: int) -> list[Any]:
    """Parameters ``num_ranks, exchange``: every exchange on so many ranks, and on 2 x 2 of them."""
    cases = [(p, way) for p in ranks for way in ONE_LEVEL] + [((2, 2), way) for way in TWO_LEVELS]
    return [pytest.param(p, way, id=f"{p}-{named(way)}") for p, way in cases]


def covering_ways(ranks: tuple[int, ...], *axes: Any) -> list[tuple[Any, ...]]:
    """Parameters ``num_ranks, exchange`` of `ways` and a value of each axis: cells that hold all pairs of settings."""
    return covering([*ranks, (2, 2)], ONE_LEVEL, *axes, possible=lambda p, way, *_: p != (2, 2) or way in TWO_LEVELS)


class Packed(NamedTuple):
    """Storage tensors ``[tokens, heads, dim]`` (lse ``[heads, tokens]``); zeros (lse −inf) in padding of the results.

    `sinks` is None or ``[Hq]``; `grad_lse` the cotangent of lse.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    grad_lse: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None
    max_logit: torch.Tensor


class Result(NamedTuple):
    """What one rank got."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None
    max_logit: torch.Tensor | None


def visible(
    num_q: int, num_k: int, causal: bool, window: tuple[int, int] | None = None, align: str | None = None
) -> torch.Tensor:
    """Which keys the queries of one sequence read, bool ``[num_q, num_k]``."""
    shift = num_k - num_q if align == "bottom_right" else 0
    distance = torch.arange(num_k)[None] - (torch.arange(num_q)[:, None] + shift)
    reads = torch.ones(num_q, num_k, dtype=torch.bool)
    if causal:
        reads &= distance <= 0
    if window is not None:
        reads &= (distance >= -window[0]) & (distance <= window[1])
    return reads


def make_packed(
    packing: Packing,
    *,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    align: str | None = None,
    heads: tuple[int, int] = HEADS,
    dims: tuple[int, int] = (8, 6),
    dtype: torch.dtype = torch.float64,
    poison: float = math.nan,
    scale: float | None = None,
    change: Change | None = None,
    with_sinks: bool = False,
    with_grad_lse: bool = False,
    largest: float = math.inf,
    seed: int = 0,
) -> Packed:
    """Random tensors in `dtype` with `poison` in all padding, and float64 results of exactly those numbers.

    Normal numbers, cut to ``[-largest, largest]``.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).clamp(-largest, largest).to(dtype)

    q, k = draw(packing.q_len, heads[0], dims[0]), draw(packing.kv_len, heads[1], dims[0])
    v, grad_out = draw(packing.kv_len, heads[1], dims[1]), draw(packing.q_len, heads[0], dims[1])
    grad_lse = draw(heads[0], packing.q_len) * with_grad_lse
    sinks = draw(heads[0]) if with_sinks else None
    wide = [x.double() for x in (q, k, v)]
    grads = [torch.zeros_like(x) for x in wide]
    sink_leaf = None if sinks is None else sinks.double().clone().requires_grad_()
    scale = 1 / math.sqrt(dims[0]) if scale is None else scale
    out = torch.zeros(*grad_out.shape, dtype=torch.float64)
    lse = torch.full(grad_lse.shape, -math.inf, dtype=torch.float64)
    max_logit = torch.full((heads[0],), -math.inf, dtype=torch.float64)
    q_valid, kv_valid = torch.zeros(packing.q_len, dtype=torch.bool), torch.zeros(packing.kv_len, dtype=torch.bool)
    sequences = zip(packing.q_offsets[:-1], packing.q_lens, packing.kv_offsets[:-1], packing.kv_lens, strict=True)
    for q_start, num_q, kv_start, num_k in (map(int, sequence) for sequence in sequences):
        q_valid[q_start : q_start + num_q], kv_valid[kv_start : kv_start + num_k] = True, True
        reads = visible(num_q, num_k, causal, window, align)
        for first in range(0, num_q, 256):  # in blocks, or a long sequence would need gigabytes
            reads_TK = reads[first : first + 256]
            keys = reads_TK.any(0).nonzero().flatten()
            if len(keys) == 0 and sink_leaf is None:
                continue
            low, high = (int(keys[0]), int(keys[-1]) + 1) if len(keys) else (0, 0)
            at = slice(q_start + first, q_start + first + len(reads_TK))
            kv_at = slice(kv_start + low, kv_start + high)
            leaves = [x[rows].clone().requires_grad_() for x, rows in zip(wide, (at, kv_at, kv_at), strict=True)]
            q_HTD, k_HKD, v_HKD = (x.transpose(0, 1) for x in leaves)
            k_HKD, v_HKD = (x.repeat_interleave(heads[0] // heads[1], 0) for x in (k_HKD, v_HKD))
            scores = q_HTD @ k_HKD.transpose(1, 2) * scale
            if change is not None:
                scores = change(scores, torch.arange(at.start, at.stop), torch.arange(kv_at.start, kv_at.stop))
            scores = scores.masked_fill(~reads_TK[:, low:high], -math.inf)
            columns = scores
            if sink_leaf is not None:
                columns = torch.cat([scores, sink_leaf.view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
            lse_HT = torch.logsumexp(columns, -1)
            some = (scores > -math.inf).any(-1)
            weights = torch.exp(scores - torch.where(some, lse_HT, 0.0).unsqueeze(-1))
            out_HTD = weights @ v_HKD
            torch.autograd.backward(
                [out_HTD, torch.where(lse_HT > -math.inf, lse_HT, 0.0)],
                [grad_out[at].transpose(0, 1).double(), grad_lse[:, at].double()],
            )
            for grad, leaf, rows in zip(grads, leaves, (at, kv_at, kv_at), strict=True):
                grad[rows] += leaf.grad
            out[at], lse[:, at] = out_HTD.detach().transpose(0, 1), lse_HT.detach()
            if len(keys):
                max_logit = torch.maximum(max_logit, scores.detach().flatten(1).amax(1))
    for x in (q, grad_out):
        x[~q_valid] = poison
    grad_lse[:, ~q_valid] = poison
    for x in (k, v):
        x[~kv_valid] = poison
    dsinks = None if sink_leaf is None else sink_leaf.grad
    return Packed(q, k, v, grad_out, grad_lse, sinks, out, lse, *grads, dsinks, max_logit)


def run(problem: Packed, plan: spanwise.Plan, *, max_logit: bool = False, **options: Any) -> list[Result]:
    """Forward and backward of `packed_attention` on every rank, with cotangents of out and lse."""
    request = AuxRequest(lse=True, max_logit=max_logit)

    def on_rank(rank: int, mesh: object) -> Result:
        q = spanwise.shard(plan, mesh, problem.q, dim=0).requires_grad_()
        k, v = (spanwise.shard(plan, mesh, x, dim=0, side="kv").requires_grad_() for x in problem[1:3])
        sinks = None if problem.sinks is None else problem.sinks.clone().requires_grad_()
        out, aux = spanwise.packed_attention(q, k, v, plan, mesh, sinks=sinks, return_aux=request, **options)
        grad_lse = spanwise.shard(plan, mesh, problem.grad_lse, dim=1).to(aux.lse.dtype)
        torch.autograd.backward([out, aux.lse], [spanwise.shard(plan, mesh, problem.grad_out, dim=0), grad_lse])
        dsinks = None if sinks is None else sinks.grad
        return Result(out.detach(), aux.lse.detach(), q.grad, k.grad, v.grad, dsinks, aux.max_logit)

    return run_ranks(plan.num_ranks, on_rank, **mesh_of(plan))


def check(problem: Packed, plan: spanwise.Plan, results: list[Result], tolerance: float) -> None:
    """Every rank's results against the reference, relative to the largest entry; exact zeros in padding."""
    packing = plan.packing
    padding = {"q": torch.zeros(plan.seq_len, dtype=torch.bool), "kv": torch.zeros(plan.kv_len, dtype=torch.bool)}
    if packing is not None:
        padding = {"q": torch.from_numpy(~packing.valid_q), "kv": torch.from_numpy(~packing.valid_kv)}
    assert len(results) == plan.num_ranks
    for rank, result in enumerate(results):
        for name, side in (("out", "q"), ("dq", "q"), ("dk", "kv"), ("dv", "kv")):
            whole, got = getattr(problem, name), getattr(result, name)
            close(f"rank {rank} {name}", got, plan.shard(whole, rank, dim=0, side=side), whole, tolerance)
            in_padding = got[plan.shard(padding[side], rank, dim=0, side=side)]
            assert torch.equal(in_padding, torch.zeros_like(in_padding)), f"rank {rank} {name}: padding"
        reference = plan.shard(problem.lse, rank, dim=1)
        assert torch.equal(result.lse.isneginf(), reference.isneginf()), f"rank {rank} lse: rows without a key"
        finite = [x.masked_fill(x.isneginf(), 0) for x in (result.lse, reference, problem.lse)]
        close(f"rank {rank} lse", *finite, tolerance)
        if result.max_logit is not None:
            close(f"rank {rank} max_logit", result.max_logit, problem.max_logit, problem.max_logit, tolerance)
    if problem.dsinks is not None:
        total = torch.stack([result.dsinks.double() for result in results]).sum(0)
        close("sum of dsinks", total, problem.dsinks, problem.dsinks, tolerance)


def close(name: str, got: torch.Tensor, reference: torch.Tensor, whole: torch.Tensor, tolerance: float) -> None:
    assert got.shape == reference.shape, f"{name}: {tuple(got.shape)}, not {tuple(reference.shape)}"
    if got.numel():
        error = (got.double() - reference).abs().amax() / whole.abs().amax().clamp(min=1e-3)
        assert error <= tolerance, f"{name}: relative error {float(error):.2e}"  # NaN is not


def cumulative(lens: Any, first: int = 0) -> np.ndarray:
    return np.cumsum([first, *lens])


def slots_for(lens: list[int], multiple: int) -> list[int]:
    """Slots of a multiple of `multiple` rows; a sequence without a token gets an empty one or one of padding alone."""
    return [-(-n // multiple) * multiple + (multiple if n == 0 and s % 2 else 0) for s, n in enumerate(lens)]
