"""Block-sparse span-masked attention for the CPU, forward and backward: kernel "sdpa", as two custom ops.

`spanwise::sdpa` and `spanwise::sdpa_backward` are opaque to torch.compile (their loop over tiles depends on the
contents of the spans) and visible to selective activation checkpointing. The algorithm is FlashAttention-2's (Dao,
2023): online softmax forward, scores recomputed from the saved lse backward; `_engine` has its steps. Letters of
shapes: see `base`; R rows of a tile, C columns of a strip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanwise import _torch
from spanwise.attention.kernels import _dense
from spanwise.attention.kernels._engine import NO_KEY, Engine
from spanwise.attention.kernels._flops import count_flops
from spanwise.attention.kernels._tiles import Strip
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel, ScoreMod
from spanwise.attention.kernels.merge import Part, lse_dtype, merge, tokens

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)


class Sdpa(Kernel):
    """Attention on the CPU that skips what the mask hides.

    float64 is computed in float64, every other dtype in float32. Temporary memory is a few tiles.
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

    def queries(self, q: Tensor) -> Queries:
        """`q` in a form whose gradient is summed over all chunks in float32, and rounded once, whatever q's dtype."""
        return Queries(q.detach(), q if q.dtype == lse_dtype(q) else _Anchor.apply(q))

    def attend_part(
        self, queries: Queries, k: Tensor, v: Tensor, chunk: Chunk, q_pos: Tensor, options: AttentionOptions
    ) -> Part:
        """It keeps only q, k, v and the spans. Its out is float32, to be rounded after the merge; its lse float64."""
        return _Part.apply(*queries, k, v, chunk.start, chunk.end, options.scale_for(k), options.softcap)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Out in float32 (float64 for float64), and lse in float64.

    A float32 lse of 10,000 is wrong by up to 5e-4, and so would be all weights that the backward recomputes from it.
    """
    if _dense.is_small(q, k, softcap):
        found = _dense.forward(q, k, v, start, end, scale)
        if found is not None:
            return found
    engine = Engine(q, k, v, scale, softcap, base=_LOG2_E)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=engine.dtype)
    lse = torch.full(q.shape[:3], NO_KEY, dtype=torch.float64)
    heads = (engine.kv_heads, engine.group)
    for b, tile, spans in engine.tiles(start, end):
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        acc = engine.buffer("acc", *q_tile.shape[:2], v.shape[3]).zero_()
        top = acc.new_full((*acc.shape[:2], 1), NO_KEY)
        total = torch.zeros_like(top)
        for strip in tile.strips:
            scores, _ = engine.scores(q_tile, engine.load_columns(k[b], strip, "k"), strip, spans)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = new_top.masked_fill(new_top == NO_KEY, 0) if strip.masked else new_top  # -inf - -inf is nan
            weights = scores.sub_(shift).exp2_()
            decay = top.sub_(shift).exp2_()
            total.mul_(decay).add_(weights.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(weights, engine.load_columns(v[b], strip, "v"))
            top = new_top
        acc.div_(total.masked_fill_(top == NO_KEY, 1))
        rows = slice(tile.first, tile.stop)
        out[b].unflatten(0, heads)[:, :, rows] = acc.unflatten(1, (engine.group, -1))
        row_lse = total.double().log_().add_(top, alpha=_LN_2)
        lse[b].unflatten(0, heads)[:, :, rows] = row_lse.view(*heads, -1)
    return out, lse


def _contiguous(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`function` with contiguous results, as compiled code is told; eager code takes them as they are."""

    @functools.wraps(function)
    def copied(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in function(*args, **kwargs))

    return copied


_OP = torch.library.custom_op("spanwise::sdpa", mutates_args=())(_contiguous(_forward))


@_OP.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Any, end: Any, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=lse_dtype(q))
    return out, q.new_empty(q.shape[:3], dtype=torch.float64)


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq in float32 (float64 for float64); dk, dv in the dtype of k, v.

    The gradients belong to the attention whose results `out` and `lse` are: over these keys, or over more.
    """
    if grad_lse is None and _dense.is_small(q, k, softcap):
        found = _dense.backward(grad_out, (q, k, v, out, lse), start, end, scale)
        if found is not None:
            return found[0], found[1].to(k.dtype), found[2].to(v.dtype)
    engine = Engine(q, k, v, scale, softcap, base=_LOG2_E)
    heads = (engine.kv_heads, engine.group)
    dq = torch.zeros(q.shape, dtype=engine.dtype)
    dk, dv = torch.zeros(k.shape, dtype=engine.dtype), torch.zeros(v.shape, dtype=engine.dtype)
    for b, tile, spans in engine.tiles(start, end):
        rows = slice(tile.first, tile.stop)
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        do_tile = engine.load_rows(grad_out[b], tile, "grad_out")
        row_lse = lse[b, :, rows].reshape(engine.kv_heads, -1, 1)
        is_empty = row_lse == NO_KEY
        delta = engine.load_rows(out[b], tile, "out").mul_(do_tile).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[b, :, rows].reshape(row_lse.shape).masked_fill(is_empty, 0)
        shift, share = _dense.split_lse(row_lse.masked_fill(is_empty, 0), engine.dtype)
        delta = delta.to(engine.dtype).mul_(share)
        do_tile.mul_(share)
        dq_tile = engine.buffer("dq", *q_tile.shape).zero_()
        for strip in tile.strips:
            keys, values = engine.load_columns(k[b], strip, "k"), engine.load_columns(v[b], strip, "v")
            scores, slope = engine.scores(q_tile, keys, strip, spans, slope=True)
            weights = scores.sub_(shift).exp2_()
            _add_columns(dv[b], strip, weights, do_tile)
            ds = torch.bmm(do_tile, values.mT, out=engine.buffer("ds", *weights.shape))
            ds.sub_(delta).mul_(weights)
            if slope is not None:
                ds.mul_(slope)
            dq_tile.baddbmm_(ds, keys)
            _add_columns(dk[b], strip, ds, q_tile)
        dq[b].unflatten(0, heads)[:, :, rows] = dq_tile.unflatten(1, (engine.group, -1))
    return dq.mul_(scale), dk.mul_(engine.unscale).to(k.dtype), dv.to(v.dtype)


def _add_columns(total: Tensor, strip: Strip, weights: Tensor, rows: Tensor) -> None:
    """Adds transposed weights ``[K, G * R, C]`` times rows ``[K, G * R, D]`` to the strip in total ``[K, T, D]``."""
    column = 0
    for k0, k1 in strip.runs:
        total[:, k0:k1].baddbmm_(weights[:, :, column : column + k1 - k0].mT, rows)
        column += k1 - k0


_BACKWARD_OP = torch.library.custom_op("spanwise::sdpa_backward", mutates_args=())(_contiguous(_backward))


@_BACKWARD_OP.register_fake
def _(
    grad_out: Any,
    grad_lse: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Any,
    lse: Any,
    start: Any,
    end: Any,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=lse_dtype(q)), k.new_empty(k.shape), v.new_empty(v.shape)


count_flops(torch.ops.spanwise.sdpa, torch.ops.spanwise.sdpa_backward)


class Queries(NamedTuple):
    """Queries that all chunks share.

    Attributes:
        values: ``[B, H, Q, D]``, detached from autograd.
        anchor: ``[B, H, Q, D]``, float32 at least: autograd adds up the gradients of all calls here. Its values are
            never read. It has no memory where the queries have fewer bits.
    """

    values: Tensor
    anchor: Tensor


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        ctx.dtype = q.dtype
        return torch.zeros((), dtype=lse_dtype(q), device=q.device).expand(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        anchor: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor,
        end: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Part:
        ctx.save_for_backward(q, k, v, start, end)
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.softcap = scale, softcap
        # Where nothing traces or counts operators, the function itself: 60 us less, and 30 in the backward.
        forward = _forward if _torch.is_readable(q) else torch.ops.spanwise.sdpa
        out, lse = forward(q, k, v, start, end, scale, softcap)
        ctx.mark_non_differentiable(out, lse)
        return out, lse, *tokens(out, lse, q.dtype)

    @staticmethod
    def backward(ctx: Any, _: Any, __: Any, grad_out: Any, out: Tensor, grad_lse: Any, lse: Tensor) -> tuple[Any, ...]:
        q, k, v, start, end = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        backward = _backward if _torch.is_readable(q) else torch.ops.spanwise.sdpa_backward
        grads = backward(grad_out, grad_lse, q, k, v, out, lse, start, end, ctx.scale, ctx.softcap)
        return None, *grads, None, None, None, None
