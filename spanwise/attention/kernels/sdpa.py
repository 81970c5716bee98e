"""Block-sparse span-masked attention for the CPU, forward and backward: kernel "sdpa", as two custom ops.

`spanwise::sdpa` and `spanwise::sdpa_backward` are opaque to torch.compile (their loop over tiles depends on the
contents of the spans) and visible to selective activation checkpointing. `_tiles` cuts the rows into tiles and says
which keys each reads; torch's flash kernel computes a tile with a run of keys, and the runs are merged. The backward
needs the lse of the whole row alone, as in ring attention. Letters of shapes: see `base`; R rows of a tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels._flops import count_flops
from spanwise.attention.kernels._tiles import Piece, alike, folded, tiles, unfolded, whole
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import OperatorPart, Part, lse_dtype, merge, union, with_lse_gradient

_aten = torch.ops.aten


class Sdpa(Kernel):
    """Attention on the CPU that skips what the mask hides.

    float64 is computed in float64, every other dtype in float32. Temporary memory is a few tiles, and copies of q, k
    and v where their dtypes or head dims differ.
    """

    name = "sdpa"

    def check_device(self, device: torch.device, score_mod: ScoreMod | None) -> None:
        if device.type != "cpu":
            raise ValueError(f"kernel 'sdpa' runs on the CPU, the tensors are on {device}; use kernel='flex'")
        if score_mod is not None:
            raise ValueError(
                "kernel 'sdpa' cannot apply a score_mod; use kernel='reference' on the CPU or 'flex' on CUDA"
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> tuple[Tensor, Tensor]:
        return merge([self.attend_part(self.queries(q), k, v, chunk, q_pos, options)], q.dtype)

    def queries(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """`q` without gradient, and a tensor in float32 at least, without memory, where its gradients are summed."""
        return q.detach(), q if q.dtype == lse_dtype(q) else _Anchor.apply(q)

    def attend_part(
        self, queries: Any, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """It keeps only q, k, v and the spans. Its out is float32 at least, to be rounded after the merge."""
        spans = chunk.start, chunk.end
        return OperatorPart.apply(_OPERATORS, *queries, k, v, *spans, options.scale_for(k), options.softcap)


# --- operators ------------------------------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, end: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Out and lse, in float32 (float64 for float64)."""
    q_wide, k_wide, v_wide = alike(q, k, v)
    options, dim = (scale, softcap), v.shape[3]
    piece = whole(q, k, start, end)
    if piece is not None:
        out, lse = _attend(folded(q_wide, k.shape[1]), k_wide, v_wide, piece, *options)
        return unfolded(out, q.shape[1])[..., :dim], unfolded(lse, q.shape[1])
    out = q_wide.new_zeros(q.shape[0], q.shape[2], q.shape[1], dim).transpose(1, 2)
    lse = q_wide.new_full(q.shape[:3], -math.inf)
    for b, rows, pieces in tiles(q, k, start, end):
        q_tile, total = folded(q_wide[b, :, rows], k.shape[1]), None
        for piece in pieces:
            keys = b, slice(None), slice(piece.first, piece.stop)
            part = _attend(q_tile, k_wide[keys], v_wide[keys], piece, *options)
            total = part if total is None else union(*total, *part)
        assert total is not None
        out[b, :, rows] = unfolded(total[0], q.shape[1])[..., :dim]
        lse[b, :, rows] = unfolded(total[1], q.shape[1])
    return out, lse


def _backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    start: Tensor, end: Tensor, scale: float, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq in float32 (float64 for float64); dk, dv in the dtype of k, v.

    The gradients belong to the attention whose results `out` and `lse` are: over these keys, or over more.
    """
    is_empty, only_lse = lse == -math.inf, grad_out is None
    lse = lse.masked_fill(is_empty, 0)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    if grad_lse is not None:
        grad_out, out = (x.to(lse.dtype) for x in (grad_out, out))
        grad_out, out = with_lse_gradient(grad_out, out, grad_lse.masked_fill(is_empty, 0))
    *wide, k_wide, v_wide = alike(grad_out, q, out, k, v)
    rows_of, kv_heads, options = [*wide, lse], k.shape[1], (scale, softcap)
    piece = whole(q, k, start, end)
    if piece is not None:
        do, q_rows, out, lse = (folded(x, kv_heads) for x in rows_of)
        dq, dk, dv = _gradients(do, q_rows, k_wide, v_wide, out, lse, piece, *options)
        dq = unfolded(dq, q.shape[1])
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (wide[1], k_wide, v_wide))
        for b, rows, pieces in tiles(q, k, start, end):
            do, q_rows, out, lse = (folded(x[b, :, rows], kv_heads) for x in rows_of)
            for piece in pieces:
                keys = b, slice(None), slice(piece.first, piece.stop)
                grads = _gradients(do, q_rows, k_wide[keys], v_wide[keys], out, lse, piece, *options)
                dq[b, :, rows].add_(unfolded(grads[0], q.shape[1]))
                dk[keys].add_(grads[1])
                dv[keys].add_(grads[2])
    dq, dk, dv = (x[..., : like.shape[3]] for x, like in zip((dq, dk, dv), (q, k, v), strict=True))
    # with_lse_gradient changed grad_out: where only the lse has a gradient, none of it belongs to v.
    return dq, dk.to(k.dtype), dv.zero_().to(v.dtype) if only_lse else dv.to(v.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Out and lse of one tile over one piece of keys."""
    if softcap is None:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=piece.bias, scale=scale
        )
        return out, lse if piece.is_empty is None else lse.masked_fill_(piece.is_empty, -math.inf)
    scores = torch.tanh(q @ k.mT * (scale / softcap)) * softcap
    scores = scores if piece.bias is None else scores + piece.bias
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)) @ v, lse


def _gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of one tile over one piece of keys; out and lse are those over all keys."""
    if softcap is None:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, False, attn_mask=piece.bias, scale=scale
        )
    capped = torch.tanh(q @ k.mT * (scale / softcap))
    scores = capped * softcap if piece.bias is None else capped * softcap + piece.bias
    weights = torch.exp(scores - lse.unsqueeze(-1))
    slope = (1 - capped * capped) * scale
    ds = weights * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * slope
    return ds @ k, ds.mT @ q, weights.mT @ grad_out


def _contiguous(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`function` with contiguous results, as compiled code is told; eager code takes them as they are."""

    @functools.wraps(function)
    def copied(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in function(*args, **kwargs))

    return copied


_OP = torch.library.custom_op("spanwise::sdpa", mutates_args=())(_contiguous(_forward))
_BACKWARD_OP = torch.library.custom_op("spanwise::sdpa_backward", mutates_args=())(_contiguous(_backward))


@_OP.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = lse_dtype(q)
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)


@_BACKWARD_OP.register_fake
def _(grad_out: Any, grad_lse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=lse_dtype(q)), k.new_empty(k.shape), v.new_empty(v.shape)


count_flops(torch.ops.spanwise.sdpa, torch.ops.spanwise.sdpa_backward)


# Where nothing traces or counts operators, the functions themselves: 60 us less, and 30 in the backward.
def _run(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (_forward if _torch.is_readable(q) else torch.ops.spanwise.sdpa)(q, *rest)


def _run_backward(grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return (_backward if _torch.is_readable(q) else torch.ops.spanwise.sdpa_backward)(grad_out, grad_lse, q, *rest)


_OPERATORS = _run, _run_backward


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        ctx.dtype = q.dtype
        return q.new_empty((), dtype=lse_dtype(q)).expand(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)
