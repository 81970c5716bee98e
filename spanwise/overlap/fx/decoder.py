"""A Llama-like decoder as a function of tensors, with the collectives of its parallelism in the open; see `capture`.

Autograd functions pair each collective with what its gradient travels by. Nothing here has state.
"""

# B batch, S tokens of this rank's sequence shard (of all tp ranks), T tokens of its tp rank, N heads of its tp rank,
# D model dim, H head dim; layout [S, B, …], so that gathering the sequence is gathering dim 0

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from spanwise import _torch

if TYPE_CHECKING:
    from spanwise.overlap.fx.capture import CaptureConfig


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""``(q, k, v, tensors) -> out``, all ``[B, N, S, H]``; k and v with this rank's heads of K/V."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A process group as a graph knows it.

    Attributes:
        name: under which the collectives of the graph name it; "" for a group of one rank, which has no collectives.
        ranks: its ranks in the whole world, ascending.
        index: this rank's place among them.
    """

    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def shapes(config: CaptureConfig) -> list[tuple[int, ...]]:
    """Of the parameters of one layer, gathered over dp: norm, q, k, v, o, norm, gate, up, down."""
    tp, kv_dim = config.tp, config.kv_heads * config.head_dim
    attention = [(config.dim // tp, config.dim), (kv_dim // tp, config.dim), (kv_dim // tp, config.dim)]
    attention += [(config.dim, config.dim // tp)]
    mlp = [(config.ffn // tp, config.dim)] * 2 + [(config.dim, config.ffn // tp)]
    return [(config.dim,), *attention, (config.dim,), *mlp]


def inputs_of(config: CaptureConfig) -> list[torch.Tensor]:
    """Rotary cosine and sine, input, then all parameters' shards; with a vocabulary, the labels before the shards."""
    full, shards, length = _full_precision(config.dtype), config.dp * config.cp, config.seq_len // config.cp
    rotary = [torch.empty(length, 1, 1, config.head_dim // 2, dtype=full) for _ in range(2)]
    if config.vocab is None:
        data = [torch.empty(length // config.tp, config.batch, config.dim, dtype=config.dtype, requires_grad=True)]
    else:
        data = [torch.empty(length, config.batch, dtype=torch.int64) for _ in range(2)]
    flat = [torch.empty(n // shards, *rest, dtype=full, requires_grad=True) for n, *rest in _parameters(config)]
    return [*rotary, *data, *flat]


def _parameters(config: CaptureConfig) -> list[tuple[int, ...]]:
    """Shapes of all parameters, gathered over dp."""
    layers = shapes(config) * config.layers
    if config.vocab is None:
        return layers
    table = config.vocab // config.tp, config.dim
    return [table, *layers, (config.dim,), table]


def _full_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Decoder:
    """The step as a function of tensors, without state."""

    def __init__(self, config: CaptureConfig, axes: Mapping[str, Axis], attend: Callable[..., torch.Tensor]) -> None:
        self.config, self.dp, self.tp, self.attend = config, axes["dp"], axes["tp"], attend

    def __call__(self, cos: torch.Tensor, sin: torch.Tensor, *rest: torch.Tensor) -> Any:
        num_data = 1 if self.config.vocab is None else 2
        num_shards = len(_parameters(self.config))
        data, shards = rest[:num_data], iter(rest[num_data : num_data + num_shards])
        attend = functools.partial(self.attend, rest[num_data + num_shards :])
        if self.config.vocab is None:
            return (self._layers(data[0], cos, sin, shards, attend),)
        tokens, labels = data
        x_TBD = _scattered(self._embed(tokens, self._parameter(shards)), self.tp)
        x_TBD = self._layers(x_TBD, cos, sin, shards, attend)
        h_SBD = _gathered(self._norm(x_TBD, shards), self.tp)
        logits = h_SBD @ self._parameter(shards).t()
        return (_Loss.apply(logits.flatten(0, 1), labels.flatten(), self.tp),)

    def _layers(
        self,
        x_TBD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shards: Iterator[torch.Tensor],
        attend: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        for _ in range(self.config.layers):
            h_SBD = _gathered(self._norm(x_TBD, shards), self.tp)
            q, k, v = (self._split(h_SBD @ self._parameter(shards).t()) for _ in range(3))
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            out_BNSH = attend(*(t_SBNH.permute(1, 2, 0, 3) for t_SBNH in (q, k, v)))
            out = out_BNSH.permute(2, 0, 1, 3).flatten(2)
            x_TBD = x_TBD + _scattered(out @ self._parameter(shards).t(), self.tp)
            h_SBD = _gathered(self._norm(x_TBD, shards), self.tp)
            gate, up = (h_SBD @ self._parameter(shards).t() for _ in range(2))
            x_TBD = x_TBD + _scattered((F.silu(gate) * up) @ self._parameter(shards).t(), self.tp)
        return x_TBD

    def _parameter(self, shards: Iterator[torch.Tensor], *, replicated: bool = False) -> torch.Tensor:
        one = Axis("", (self.config.rank,), 0)
        return _Parameter.apply(next(shards), self.config.dtype, self.dp, self.tp if replicated else one)

    def _norm(self, x_TBD: torch.Tensor, shards: Iterator[torch.Tensor]) -> torch.Tensor:
        x = x_TBD.to(_full_precision(x_TBD.dtype))
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x_TBD.dtype) * self._parameter(shards, replicated=True)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    def _embed(self, tokens_SB: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Of the tokens whose rows this rank holds, 0 for the others: the sum over tp is the embedding."""
        row = tokens_SB - self.tp.index * table.shape[0]
        foreign = (row < 0) | (row >= table.shape[0])
        return F.embedding(row.masked_fill(foreign, 0), table).masked_fill(foreign.unsqueeze(-1), 0)


def _rotate(x_SBNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x_SBNH.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_SBNH.dtype)


def flash(device: str) -> Attention:
    """Causal attention of a rank that has the whole sequence."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        return _Flash.apply(q, *(x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v)), device)

    return attend


def _all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x, axis.size, axis.name)) if axis.size > 1 else x


def _reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x, axis.size, axis.name)) if axis.size > 1 else x


def _all_reduce(x: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_reduce(x, op, axis.name)) if axis.size > 1 else x


class _Parameter(torch.autograd.Function):
    """A parameter of its shards over `dp`; its gradient is the mean over them, after the sum over `partial`."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dtype: torch.dtype, dp: Axis, partial: Axis) -> torch.Tensor:
        ctx.dp, ctx.partial, ctx.dtype = dp, partial, shard.dtype
        return _all_gather(shard.to(dtype), dp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = _all_reduce(grad, "sum", ctx.partial).to(ctx.dtype)
        return _reduce_scatter(grad, ctx.dp) / ctx.dp.size, None, None, None


class _Moved(torch.autograd.Function):
    """Dim 0 moved over an axis by `there`; its gradient is moved by `back`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        axis: Axis,
        there: Callable[[torch.Tensor, Axis], torch.Tensor],
        back: Callable[[torch.Tensor, Axis], torch.Tensor],
    ) -> torch.Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad, ctx.axis), None, None, None


def _gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Dim 0 of all ranks; of the gradients, which every rank has for all of it, the sum of this rank's part."""
    return _Moved.apply(x, axis, _all_gather, _reduce_scatter)


def _scattered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of all ranks, this rank's part of dim 0."""
    return _Moved.apply(x, axis, _reduce_scatter, _all_gather)


class _Flash(torch.autograd.Function):
    """Causal attention by the flash operator of a device, on fake tensors that say they are on the CPU."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: str) -> torch.Tensor:
        saved = _torch.sdpa_flash_forward(q, k, v, device)
        ctx.save_for_backward(q, k, v, *saved)
        return saved[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_torch.sdpa_flash_backward(grad, *ctx.saved_tensors), None


class _Loss(torch.autograd.Function):
    """Mean cross-entropy of logits ``[tokens, vocab / tp]``: only maxima, sums and targets travel."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, tp: Axis) -> torch.Tensor:
        x = logits.to(_full_precision(logits.dtype))
        top = _all_reduce(x.amax(-1), "max", tp)
        total = _all_reduce((x - top.unsqueeze(-1)).exp().sum(-1), "sum", tp)
        row = labels - tp.index * x.shape[1]
        foreign = (row < 0) | (row >= x.shape[1])
        row = row.masked_fill(foreign, 0)
        target = x.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0)
        lse = top + total.log()
        ctx.save_for_backward(logits, lse, row, foreign)
        return (lse - _all_reduce(target, "sum", tp)).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, lse, row, foreign = ctx.saved_tensors
        probability = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
        one = torch.ones_like(lse).masked_fill(foreign, 0).unsqueeze(-1)
        x = probability.scatter_add(-1, row.unsqueeze(-1), -one)
        return (x * (grad / x.shape[0])).to(logits.dtype), None, None
