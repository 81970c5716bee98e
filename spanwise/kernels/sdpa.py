"""Block-sparse span-masked attention for the CPU, forward and backward, as two custom ops.

`spanwise::sdpa` and `spanwise::sdpa_backward` are opaque to torch.compile (their loop over tiles depends on the
contents of the spans) and visible to selective activation checkpointing. Letters of shapes: see `_checks`.
"""

from __future__ import annotations

from typing import Any

import torch

from spanwise.kernels._checks import check_problem


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    score_mod: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one local problem on the CPU; out `[B, H, Q, V]` and lse `[B, H, Q]`, both differentiable."""
    if score_mod is not None:
        raise ValueError('kernel="sdpa" does not support score_mod; use kernel="reference" or kernel="flex"')
    for tensor in (q, k, v, start, end):
        if tensor.device.type != "cpu":
            raise ValueError(f'kernel="sdpa" runs on the CPU, got tensors on {tensor.device}; use kernel="flex"')
    check_problem(q, k, v, start, end)
    return torch.ops.spanwise.sdpa(q, k, v, start, end, scale, softcap)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _tile_mask(start: torch.Tensor, end: torch.Tensor, kv_len: int) -> torch.Tensor:
    keys = torch.arange(kv_len)
    return ((keys >= start[..., None]) & (keys < end[..., None])).any(0)


@torch.library.custom_op("spanwise::sdpa", mutates_args=())
def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = _lse_dtype(q)
    group = q.shape[1] // k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full(q.shape[:3], float("-inf"), dtype=dtype)
    for b in range(q.shape[0]):
        ms, me = start[b % start.shape[0]], end[b % start.shape[0]]
        for q0 in range(0, q.shape[2], 128):
            rows = slice(q0, q0 + 128)
            mask = _tile_mask(ms[:, rows], me[:, rows], k.shape[2])
            cols = mask.any(0).nonzero()[:, 0]
            if cols.numel() == 0:
                continue
            kt = k[b, :, cols].to(dtype).repeat_interleave(group, 0)
            vt = v[b, :, cols].to(dtype).repeat_interleave(group, 0)
            s = q[b, :, rows].to(dtype) @ kt.mT * scale
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            s = s.masked_fill(~mask[:, cols], float("-inf"))
            part = torch.logsumexp(s, -1)
            lse[b, :, rows] = part
            p = torch.exp(s - torch.where(part == float("-inf"), 0, part)[..., None])
            out[b, :, rows] = (p @ vt).to(q.dtype)
    return out, lse


@_sdpa.register_fake
def _(q, k, v, start, end, scale, softcap=None):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.custom_op("spanwise::sdpa_backward", mutates_args=())
def _sdpa_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = _lse_dtype(q)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for b in range(q.shape[0]):
        ms, me = start[b % start.shape[0]], end[b % start.shape[0]]
        for q0 in range(0, q.shape[2], 128):
            rows = slice(q0, q0 + 128)
            mask = _tile_mask(ms[:, rows], me[:, rows], k.shape[2])
            cols = mask.any(0).nonzero()[:, 0]
            if cols.numel() == 0:
                continue
            kt = k[b, :, cols].to(dtype).repeat_interleave(group, 0)
            vt = v[b, :, cols].to(dtype).repeat_interleave(group, 0)
            qt, dot = q[b, :, rows].to(dtype), grad_out[b, :, rows].to(dtype)
            s = qt @ kt.mT * scale
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
                slope = 1 - (s / softcap) ** 2
            part = lse[b, :, rows]
            has_key = part != float("-inf")
            s = s.masked_fill(~mask[:, cols], float("-inf"))
            p = torch.exp(s - torch.where(has_key, part, 0)[..., None])
            delta = (dot * out[b, :, rows].to(dtype)).sum(-1) - torch.where(has_key, grad_lse[b, :, rows], 0)
            ds = p * (dot @ vt.mT - delta[..., None]) * scale
            if softcap is not None:
                ds = ds * slope
            dq[b, :, rows] = ds @ kt
            dk[b, :, cols] += (ds.mT @ qt).unflatten(0, (-1, group)).sum(1)
            dv[b, :, cols] += (p.mT @ dot).unflatten(0, (-1, group)).sum(1)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@_sdpa_backward.register_fake
def _(grad_out, grad_lse, q, k, v, out, lse, start, end, scale, softcap=None):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, start, end, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, start, end)


def _backward(ctx, grad_out, grad_lse):
    grads = torch.ops.spanwise.sdpa_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.softcap)
    return *grads, None, None, None, None


_sdpa.register_autograd(_backward, setup_context=_save)
