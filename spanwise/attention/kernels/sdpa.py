"""Block-sparse span-masked attention for the CPU, forward and backward, as two custom ops.

`spanwise::sdpa` and `spanwise::sdpa_backward` are opaque to torch.compile (their loop over tiles depends on the
contents of the spans) and visible to selective activation checkpointing. Each executes the plan of `_tiles`: per tile
of query rows and chunk of keys, all heads at once, scores go into buffers small enough for the last-level cache, and
are worked on in place. The algorithm is FlashAttention-2's (Dao, 2023): online softmax forward, scores recomputed
from the saved lse backward. Exponentials are base 2, for torch's exp2 on CPU takes a third of the time of its exp.
Letters of shapes: see `_checks`; R rows of a tile, C columns of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from spanwise.attention.kernels._checks import check_problem
from spanwise.attention.kernels._flops import count_flops
from spanwise.attention.kernels._tiles import Chunk, Tile, plan_tiles

Spans = tuple[np.ndarray, np.ndarray]  # first key and last key + 1, [N, R, 1] each

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
_NO_KEY = float("-inf")

# Rows of a tile; score elements of a buffer, for each thread; what a cut between two tiles must save to pay for the
# calls it adds, as pairs x heads x head dim. Found by measuring; none changes results beyond rounding.
_MAX_ROWS = 128
_BUFFER_ELEMENTS = 1 << 19
_MIN_SAVING = 1_500_000


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one local problem on the CPU.

    float64 is computed in float64, every other dtype in float32. Memory beside inputs and outputs is a few tiles.

    Args:
        q: Queries ``[B, H, Q, D]``.
        k: Keys ``[B, K, T, D]``, ``H % K == 0``.
        v: Values ``[B, K, T, V]``.
        start: First key of each span, integer ``[B or 1, N, Q]``, indices into ``k``; the spans of a row are disjoint.
        end: One past the last key of each span, same shape. Keys that no span reads are not touched.
        scale: Factor on ``q @ k^T``.
        softcap: ``softcap * tanh(score / softcap)`` is applied before the mask.
        score_mod: Not supported.

    Returns:
        ``out`` ``[B, H, Q, V]`` in ``q.dtype`` and ``lse`` ``[B, H, Q]``, float32 (float64 for float64 inputs), both
        differentiable (once). A row without keys has out 0, lse -inf and no gradient.

    Raises:
        ValueError: If a tensor is not on the CPU, the shapes do not fit together, or ``score_mod`` is given.
    """
    if score_mod is not None:
        raise ValueError('kernel="sdpa" does not support score_mod; use kernel="reference" or kernel="flex"')
    _check(q, k, v, start, end, softcap)
    out, lse = torch.ops.spanwise.sdpa(q, k, v, start, end, scale, softcap)
    return out, lse


@torch.no_grad()
def max_logit(
    q: torch.Tensor,
    k: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Largest score that the mask admits, per head: ``[H]``, dtype of the lse, -inf for a head without any.

    Arguments and errors as in `sdpa`; not differentiable.
    """
    _check(q, k, k, start, end, softcap)
    engine = _Engine(q, k, k, scale, softcap, base=1.0)
    top = torch.full((q.shape[0], k.shape[1], q.shape[1] // k.shape[1]), _NO_KEY, dtype=engine.dtype)
    for b, tile, spans in engine.tiles(start, end):
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        for chunk in tile.chunks:
            scores = engine.scores(q_tile, engine.load_columns(k[b], chunk, "k"), chunk, spans)
            torch.maximum(top[b], scores.unflatten(1, (engine.group, -1)).amax((2, 3)), out=top[b])
    return top.amax(0).flatten()


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, end: torch.Tensor, softcap: float | None
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("start", start), ("end", end)):
        if tensor.device.type != "cpu":
            raise ValueError(f'kernel="sdpa" runs on the CPU, got {name} on {tensor.device}; use kernel="flex"')
    check_problem(q, k, v, start, end, softcap)


class _Engine:
    """Buffers and the steps that forward and backward share.

    Query heads of one key/value head are folded into rows: a tile's scores are ``[K, G * R, C]``.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None, base: float
    ) -> None:
        self.k, self.v = k, v
        self.dtype = _lse_dtype(q)
        self.kv_heads, self.group = k.shape[1], q.shape[1] // k.shape[1]
        self.softcap = softcap
        # q is multiplied with `factor`; the products, or their tanh, with `gain`, which leaves the score times `base`
        # (log2 e where the exponential follows). `unscale` is scale / factor, for a scale of 0 too.
        self.factor, self.gain, self.unscale = scale * base, 1.0, 1 / base
        if softcap is not None:
            self.factor, self.gain, self.unscale = scale / softcap, softcap * base, softcap
        self.zero, self.no_key = torch.zeros((), dtype=self.dtype), torch.tensor(_NO_KEY, dtype=self.dtype)
        self.max_columns = max(128, min(4096, torch.get_num_threads() * _BUFFER_ELEMENTS // (q.shape[1] * _MAX_ROWS)))
        self.min_saving = _MIN_SAVING // (q.shape[1] * q.shape[3])
        self._buffers: dict[str, torch.Tensor] = {}

    def tiles(self, start: torch.Tensor, end: torch.Tensor) -> Iterator[tuple[int, Tile, Spans]]:
        """Batch row, tile, and the spans of the tile's rows, over the whole problem."""
        masks = list(zip(start.numpy(), end.numpy(), strict=True))
        plans = [
            list(plan_tiles(*spans, max_rows=_MAX_ROWS, max_columns=self.max_columns, min_saving=self.min_saving))
            for spans in masks
        ]
        for b in range(self.k.shape[0]):
            first, last = masks[b % len(masks)]
            for tile in plans[b % len(masks)]:
                rows = slice(tile.first, tile.stop)
                yield b, tile, (first[:, rows, None], last[:, rows, None])

    def buffer(self, name: str, *shape: int) -> torch.Tensor:
        """An uninitialised tensor whose memory is reused by the next call of that name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return self._buffers[name][:size].view(shape)

    def load_rows(self, x: torch.Tensor, tile: Tile, name: str) -> torch.Tensor:
        """Copy of a tile's rows of x ``[H, Q, D]`` as ``[K, G * R, D]``."""
        rows = self.buffer(name, self.kv_heads, self.group, tile.stop - tile.first, x.shape[2])
        rows.copy_(x.unflatten(0, (self.kv_heads, self.group))[:, :, tile.first : tile.stop])
        return rows.flatten(1, 2)

    def load_columns(self, x: torch.Tensor, chunk: Chunk, name: str) -> torch.Tensor:
        """A chunk's rows of x ``[K, T, D]`` as ``[K, C, D]``; a view where possible."""
        if len(chunk.runs) == 1 and x.dtype == self.dtype:
            k0, k1 = chunk.runs[0]
            return x[:, k0:k1]
        columns = self.buffer(name, x.shape[0], chunk.width, x.shape[2])
        column = 0
        for k0, k1 in chunk.runs:
            columns[:, column : column + k1 - k0].copy_(x[:, k0:k1])
            column += k1 - k0
        return columns

    def scores(self, q_tile: torch.Tensor, keys: torch.Tensor, chunk: Chunk, spans: Spans) -> torch.Tensor:
        """Scores times base, -inf where masked: ``[K, G * R, C]``."""
        scores = torch.bmm(q_tile, keys.mT, out=self.buffer("scores", *q_tile.shape[:2], chunk.width))
        if self.softcap is not None:
            scores.tanh_().mul_(self.gain)
        self._mask(scores, chunk, spans)
        return scores

    def transposed_scores(
        self, q_tile: torch.Tensor, keys: torch.Tensor, chunk: Chunk, spans: Spans
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same as ``[K, C, G * R]``, and the slope of the softcap at each."""
        scores = torch.bmm(keys, q_tile.mT, out=self.buffer("scores", q_tile.shape[0], chunk.width, q_tile.shape[1]))
        slope = None
        if self.softcap is not None:
            slope = self.buffer("slope", *scores.shape)
            torch.addcmul(scores.new_ones(()), scores.tanh_(), scores, value=-1, out=slope)
            scores.mul_(self.gain)
        self._mask(scores.mT, chunk, spans)
        return scores, slope

    def _mask(self, scores: torch.Tensor, chunk: Chunk, spans: Spans) -> None:
        by_row = scores.unflatten(1, (self.group, -1))
        for column, k0, k1 in chunk.masked:
            key = np.arange(k0, k1, dtype=spans[0].dtype)
            is_read = torch.from_numpy(((key >= spans[0]) & (key < spans[1])).any(0))  # numpy's any is the faster one
            # 0 or -inf, added: ten times as fast as masked_fill_ with a mask that broadcasts.
            by_row[..., column : column + k1 - k0] += torch.where(is_read, self.zero, self.no_key)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


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
    engine = _Engine(q, k, v, scale, softcap, base=_LOG2_E)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    totals, tops = torch.ones(q.shape[:3], dtype=engine.dtype), torch.full(q.shape[:3], _NO_KEY, dtype=engine.dtype)
    heads = (engine.kv_heads, engine.group)
    for b, tile, spans in engine.tiles(start, end):
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        acc = engine.buffer("acc", *q_tile.shape[:2], v.shape[3]).zero_()
        top = acc.new_full((*acc.shape[:2], 1), _NO_KEY)
        total = torch.zeros_like(top)
        for chunk in tile.chunks:
            scores = engine.scores(q_tile, engine.load_columns(k[b], chunk, "k"), chunk, spans)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = new_top.masked_fill(new_top == _NO_KEY, 0) if chunk.masked else new_top  # -inf - -inf is nan
            weights = scores.sub_(shift).exp2_()
            decay = top.sub_(shift).exp2_()
            total.mul_(decay).add_(weights.sum(-1, keepdim=True))
            acc.mul_(decay).baddbmm_(weights, engine.load_columns(v[b], chunk, "v"))
            top = new_top
        total.masked_fill_(top == _NO_KEY, 1)
        rows = slice(tile.first, tile.stop)
        out[b].unflatten(0, heads)[:, :, rows] = acc.div_(total).unflatten(1, (engine.group, -1))
        totals[b].unflatten(0, heads)[:, :, rows] = total.view(*heads, -1)
        tops[b].unflatten(0, heads)[:, :, rows] = top.view(*heads, -1)
    return out, totals.log_().add_(tops, alpha=_LN_2)


@_sdpa.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: Any, end: Any, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.custom_op("spanwise::sdpa_backward", mutates_args=())
def _sdpa_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq in the dtype of lse; dk, dv in that of k, v. ``out`` None: grad_lse is already less rowsum(grad_out * out).

    What `out` and `lse` are results over, these keys or these and others, is what the gradients are those of.
    """
    engine = _Engine(q, k, v, scale, softcap, base=_LOG2_E)
    heads = (engine.kv_heads, engine.group)
    dq = torch.zeros(q.shape, dtype=engine.dtype)
    dk, dv = torch.zeros(k.shape, dtype=engine.dtype), torch.zeros(v.shape, dtype=engine.dtype)
    for b, tile, spans in engine.tiles(start, end):
        rows = slice(tile.first, tile.stop)
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        do_tile = engine.load_rows(grad_out[b], tile, "grad_out")
        shift = lse[b, :, rows].reshape(engine.kv_heads, -1)
        is_empty = shift == _NO_KEY
        delta = grad_lse[b, :, rows].reshape(engine.kv_heads, -1).masked_fill(is_empty, 0).neg_()
        if out is not None:
            delta += engine.load_rows(out[b], tile, "out").mul_(do_tile).sum(-1)
        shift = shift.mul(_LOG2_E).masked_fill_(is_empty, 0).unsqueeze(1)
        delta = delta.unsqueeze(1)
        dq_tile = engine.buffer("dq", q_tile.shape[0], q_tile.shape[2], q_tile.shape[1]).zero_()
        for chunk in tile.chunks:
            keys, values = engine.load_columns(k[b], chunk, "k"), engine.load_columns(v[b], chunk, "v")
            scores, slope = engine.transposed_scores(q_tile, keys, chunk, spans)
            weights = scores.sub_(shift).exp2_()
            _add_columns(dv[b], chunk, weights, do_tile)
            ds = torch.bmm(values, do_tile.mT, out=engine.buffer("ds", *weights.shape))
            ds.sub_(delta).mul_(weights)
            if slope is not None:
                ds.mul_(slope)
            dq_tile.baddbmm_(keys.mT, ds)
            _add_columns(dk[b], chunk, ds, q_tile)
        dq_rows = dq_tile.mul_(scale).unflatten(2, (engine.group, -1)).permute(0, 2, 3, 1)
        dq[b].unflatten(0, heads)[:, :, rows] = dq_rows
    dk.mul_(engine.unscale)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _add_columns(total: torch.Tensor, chunk: Chunk, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """Adds weights ``[K, C, G * R]`` times rows ``[K, G * R, D]`` to the keys of a chunk in total ``[K, T, D]``."""
    column = 0
    for k0, k1 in chunk.runs:
        total[:, k0:k1].baddbmm_(weights[:, column : column + k1 - k0], rows)
        column += k1 - k0


@_sdpa_backward.register_fake
def _(
    grad_out: Any,
    grad_lse: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: Any,
    lse: Any,
    start: Any,
    end: Any,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape, dtype=_lse_dtype(q)), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, start, end, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, start, end)


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dq, dk, dv = torch.ops.spanwise.sdpa_backward(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, ctx.softcap)
    return dq.to(dk.dtype), dk, dv, None, None, None, None


_sdpa.register_autograd(_backward, setup_context=_save)
count_flops(torch.ops.spanwise.sdpa, torch.ops.spanwise.sdpa_backward)


class Queries(NamedTuple):
    """Queries that several calls of `sdpa_part` share.

    Attributes:
        values: ``[B, H, Q, D]``, cut off from autograd.
        anchor: ``[B, H, Q, D]``, float32 at least: what the gradients of all calls are added up for. Never read, and
            without memory where the queries have fewer bits.
    """

    values: torch.Tensor
    anchor: torch.Tensor


def queries(q: torch.Tensor) -> Queries:
    """``q`` ``[B, H, Q, D]`` for `sdpa_part`; its gradient is summed over the parts in float32 and rounded once."""
    return Queries(q.detach(), q if q.dtype == _lse_dtype(q) else _Anchor.apply(q))


def sdpa_part(
    q: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sdpa` over some of the keys, as a part for `merge`, which gives the parts their gradients.

    Arguments and errors as of `sdpa`. Nothing but q, k, v and the spans is kept for the backward.

    Returns:
        out and lse as of `sdpa`, and a token ``[B, H, Q]`` without memory. The three are for the merge alone: what it
        sends back in the place of their gradients is not their gradients; see there.
    """
    _check(q.values, k, v, start, end, softcap)
    return _Part.apply(*q, k, v, start, end, scale, softcap)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        ctx.dtype = q.dtype
        return torch.zeros((), dtype=_lse_dtype(q), device=q.device).expand(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        anchor: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(q, k, v, start, end)
        ctx.scale, ctx.softcap = scale, softcap
        out, lse = torch.ops.spanwise.sdpa(q, k, v, start, end, scale, softcap)
        return out, lse, lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, start, end = ctx.saved_tensors
        grads = torch.ops.spanwise.sdpa_backward(grad_out, rows, q, k, v, None, lse, start, end, ctx.scale, ctx.softcap)
        return None, *grads, None, None, None, None
