"""Buffers and steps that the forward and the backward of the CPU kernel share; the largest score of a mask.

`sdpa` makes operators of them. They execute the plan of `_tiles`. The scores of a tile of query rows and a strip of
keys, all heads at once, go into buffers that fit the last-level cache, and are changed in place. Exponentials are base
2: torch's exp2 on CPU takes a third of the time of its exp. Letters of shapes: see `base`; R rows of a tile, C
columns of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from spanwise.attention.kernels._tiles import Strip, Tile, plan_tiles
from spanwise.attention.kernels.merge import lse_dtype

Spans = tuple[np.ndarray, np.ndarray]  # first key and last key + 1, [N, R, 1] each

NO_KEY = float("-inf")

# Rows of a tile; score elements of a buffer, for each thread; least saving of a cut between two tiles, which adds
# calls, as pairs x heads x head dim. Found by measuring; none changes results beyond rounding.
_MAX_ROWS = 128
_BUFFER_ELEMENTS = 1 << 19
_MIN_SAVING = 1_500_000


class Engine:
    """Buffers and the steps that forward and backward share.

    Query heads of one key/value head are folded into rows: a tile's scores are ``[K, G * R, C]``.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, base: float) -> None:
        self.k, self.v = k, v
        self.dtype = lse_dtype(q)
        self.kv_heads, self.group = k.shape[1], q.shape[1] // k.shape[1]
        self.softcap = softcap
        # q is multiplied with `factor`; the products, or their tanh, with `gain`, which leaves the score times `base`
        # (log2 e where the exponential follows). `unscale` is scale / factor, for a scale of 0 too.
        self.factor, self.gain, self.unscale = scale * base, 1.0, 1 / base
        if softcap is not None:
            self.factor, self.gain, self.unscale = scale / softcap, softcap * base, softcap
        self.zero, self.no_key = torch.zeros((), dtype=self.dtype), torch.tensor(NO_KEY, dtype=self.dtype)
        self.max_columns = max(128, min(4096, torch.get_num_threads() * _BUFFER_ELEMENTS // (q.shape[1] * _MAX_ROWS)))
        self.min_saving = _MIN_SAVING // (q.shape[1] * q.shape[3])
        self._buffers: dict[str, Tensor] = {}

    def tiles(self, start: Tensor, end: Tensor) -> Iterator[tuple[int, Tile, Spans]]:
        """Batch row, tile, and the spans of its rows."""
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

    def buffer(self, name: str, *shape: int) -> Tensor:
        """An uninitialised tensor whose memory is reused by the next call of that name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=self.dtype)
        return self._buffers[name][:size].view(shape)

    def load_rows(self, x: Tensor, tile: Tile, name: str) -> Tensor:
        """Copy of a tile's rows of x ``[H, Q, D]`` as ``[K, G * R, D]``."""
        rows = self.buffer(name, self.kv_heads, self.group, tile.stop - tile.first, x.shape[2])
        rows.copy_(x.unflatten(0, (self.kv_heads, self.group))[:, :, tile.first : tile.stop])
        return rows.flatten(1, 2)

    def load_columns(self, x: Tensor, strip: Strip, name: str) -> Tensor:
        """A strip's rows of x ``[K, T, D]`` as ``[K, C, D]``; a view where possible."""
        if len(strip.runs) == 1 and x.dtype == self.dtype:
            k0, k1 = strip.runs[0]
            return x[:, k0:k1]
        columns = self.buffer(name, x.shape[0], strip.width, x.shape[2])
        column = 0
        for k0, k1 in strip.runs:
            columns[:, column : column + k1 - k0].copy_(x[:, k0:k1])
            column += k1 - k0
        return columns

    def scores(
        self, q_tile: Tensor, keys: Tensor, strip: Strip, spans: Spans, *, slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Scores times base, -inf where masked, ``[K, G * R, C]``; if asked for, the slope of a softcap at each."""
        scores = torch.bmm(q_tile, keys.mT, out=self.buffer("scores", *q_tile.shape[:2], strip.width))
        slopes = None
        if self.softcap is not None:
            scores.tanh_()
            if slope:
                slopes = self.buffer("slope", *scores.shape)
                torch.addcmul(scores.new_ones(()), scores, scores, value=-1, out=slopes)
            scores.mul_(self.gain)
        by_row = scores.unflatten(1, (self.group, -1))
        for column, k0, k1 in strip.masked:
            key = np.arange(k0, k1, dtype=spans[0].dtype)
            is_read = torch.from_numpy(((key >= spans[0]) & (key < spans[1])).any(0))  # numpy's any is the faster one
            # 0 or -inf, added: ten times as fast as masked_fill_ with a mask that broadcasts.
            by_row[..., column : column + k1 - k0] += torch.where(is_read, self.zero, self.no_key)
        return scores, slopes


@torch.no_grad()
def max_logit(
    q: Tensor, k: Tensor, start: Tensor, end: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Largest score that the mask admits, per head: ``[H]``, dtype of the lse, -inf for a head without any.

    Not differentiable.
    """
    engine = Engine(q, k, k, scale, softcap, base=1.0)
    top = torch.full((q.shape[0], k.shape[1], q.shape[1] // k.shape[1]), NO_KEY, dtype=engine.dtype)
    for b, tile, spans in engine.tiles(start, end):
        q_tile = engine.load_rows(q[b], tile, "q").mul_(engine.factor)
        for strip in tile.strips:
            scores, _ = engine.scores(q_tile, engine.load_columns(k[b], strip, "k"), strip, spans)
            torch.maximum(top[b], scores.unflatten(1, (engine.group, -1)).amax((2, 3)), out=top[b])
    return top.amax(0).flatten()
