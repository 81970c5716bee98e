"""A Llama-like decoder as a function of tensors, with visible collectives; `capture` traces it.

Autograd functions pair each collective with the collective of its gradient. Nothing here has state.
"""

# B batch, S tokens of this rank's sequence shard (of all tp ranks), T tokens of its tp rank, N heads of its tp rank,
# D model dim, H head dim; layout [S, B, …]: gathering the sequence gathers dim 0

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from spanwise.overlap import _torch

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""``(q, k, v, tensors) -> out``, all ``[B, N, S, H]``; k and v with this rank's heads of K/V."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """A decoder and its parallelism.

    Attributes:
        layers, dim, heads, kv_heads, ffn: sizes of the decoder; the head dim is ``dim // heads``.
        vocab: size of the embedding before the layers and of the loss after them, both split over tp. None: layers
            alone, from hidden states to hidden states.
        seq_len: tokens of a sequence before cp shards it.
        batch: sequences of a data-parallel rank.
        dp, cp, tp: sizes of the mesh axes, tp innermost: the ranks of a tp group are neighbours.
        dtype: of compute and gathered parameters. Shards and reduced gradients are float32 (float64 if `dtype` is).
        device: "cuda" or "cpu": the graph has that device's operators; the device itself is not needed.
        rank: the rank to trace; ranks differ in their rows of the vocabulary.

    Raises:
        ValueError: a size below 1, a size that its axes do not divide, an unknown device, or a rank out of range.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    seq_len: int
    batch: int = 1
    vocab: int | None = None
    dp: int = 1
    cp: int = 1
    tp: int = 1
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "kv_heads", "ffn", "seq_len", "batch", "dp", "cp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank must be in [0, dp * cp * tp = {self.num_ranks}), got {self.rank}")
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f'device must be "cuda" or "cpu", got {self.device!r}')
        shards = self.dp * self.cp
        rows = self.tp * shards, "tp * dp * cp"
        for name, value, divisor, of in (
            ("dim", self.dim, 2 * self.heads, "2 * heads"), ("heads", self.heads, self.kv_heads, "kv_heads"),
            ("kv_heads", self.kv_heads, self.tp, "tp"), ("ffn", self.ffn, *rows), ("vocab", self.vocab or 0, *rows),
            ("dim", self.dim, shards, "dp * cp"), ("kv_heads * head dim", self.kv_heads * self.head_dim, *rows),
            ("seq_len", self.seq_len, self.cp * self.tp, "cp * tp"),
        ):  # fmt: skip
            if value % divisor:
                raise ValueError(f"{name} must be a multiple of {of} = {divisor}, got {value}")

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


@dataclasses.dataclass(frozen=True)
class Axis:
    """A process group of a captured graph.

    Attributes:
        name: the group's name in the graph's collectives; "" for a group of one rank, which has none.
        ranks: global ranks, ascending.
        index: this rank's place among them.
    """

    name: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def shapes(config: CaptureConfig) -> list[tuple[int, ...]]:
    """Shapes of one layer's parameters, gathered over dp: norm, q, k, v, o, norm, gate, up, down."""
    tp, kv_dim = config.tp, config.kv_heads * config.head_dim
    attention = [(config.dim // tp, config.dim), (kv_dim // tp, config.dim), (kv_dim // tp, config.dim)]
    attention += [(config.dim, config.dim // tp)]
    mlp = [(config.ffn // tp, config.dim)] * 2 + [(config.dim, config.ffn // tp)]
    return [(config.dim,), *attention, (config.dim,), *mlp]


def inputs_of(config: CaptureConfig) -> list[torch.Tensor]:
    """Rotary cosine and sine, input, labels if there is a vocabulary, then the shards of all parameters."""
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
    layers, table = shapes(config) * config.layers, ((config.vocab or 0) // config.tp, config.dim)
    return layers if config.vocab is None else [table, *layers, (config.dim,), table]


def _full_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Decoder:
    """The forward of a step as a function of tensors."""

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
        # Rows of the table that this rank holds, 0 for others: the sum over tp is the embedding.
        table = self._parameter(shards)
        row = tokens - self.tp.index * table.shape[0]
        foreign = (row < 0) | (row >= table.shape[0])
        embedded = F.embedding(row.masked_fill(foreign, 0), table).masked_fill(foreign.unsqueeze(-1), 0)
        x_TBD = scattered(embedded, self.tp)
        x_TBD = self._layers(x_TBD, cos, sin, shards, attend)
        h_SBD = gathered(self._norm(x_TBD, shards), self.tp)
        logits = h_SBD @ self._parameter(shards).t()
        return (_cross_entropy(logits.flatten(0, 1), labels.flatten(), self.tp),)

    def _layers(
        self, x_TBD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shards: Iterator[torch.Tensor], attend: Any
    ) -> torch.Tensor:
        heads = -1, self.config.head_dim
        for _ in range(self.config.layers):
            h_SBD = gathered(self._norm(x_TBD, shards), self.tp)
            q, k, v = ((h_SBD @ self._parameter(shards).t()).unflatten(-1, heads) for _ in range(3))
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            out_BNSH = attend(*(t_SBNH.permute(1, 2, 0, 3) for t_SBNH in (q, k, v)))
            out = out_BNSH.permute(2, 0, 1, 3).flatten(2)
            x_TBD = x_TBD + scattered(out @ self._parameter(shards).t(), self.tp)
            h_SBD = gathered(self._norm(x_TBD, shards), self.tp)
            gate, up = (h_SBD @ self._parameter(shards).t() for _ in range(2))
            x_TBD = x_TBD + scattered((F.silu(gate) * up) @ self._parameter(shards).t(), self.tp)
        return x_TBD

    def _parameter(self, shards: Iterator[torch.Tensor], *, replicated: bool = False) -> torch.Tensor:
        """Gather a parameter over dp; its gradient is averaged over dp, after a sum over tp if it is `replicated`."""
        shard = next(shards)

        def gather(x: torch.Tensor, dp: Axis) -> torch.Tensor:
            return all_gather(x.to(self.config.dtype), dp)

        def reduce(grad: torch.Tensor, dp: Axis) -> torch.Tensor:
            grad = all_reduce(grad, self.tp) if replicated else grad
            return reduce_scatter(grad.to(shard.dtype), dp) / dp.size

        return Moved.apply(shard, self.dp, gather, reduce)

    def _norm(self, x_TBD: torch.Tensor, shards: Iterator[torch.Tensor]) -> torch.Tensor:
        x = x_TBD.to(_full_precision(x_TBD.dtype))
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x_TBD.dtype) * self._parameter(shards, replicated=True)


def _rotate(x_SBNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x_SBNH.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_SBNH.dtype)


def flash(device: str) -> Attention:
    """Causal attention of a rank that holds the whole sequence, by the flash operator of a device."""
    aten = torch.ops.aten
    on_cpu = device == "cpu"
    operator = aten._scaled_dot_product_flash_attention_for_cpu if on_cpu else aten._scaled_dot_product_flash_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
        out: torch.Tensor = operator(q, k, v, 0.0, True)[0]
        return out

    return attend


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_all_gather(x, axis.size, axis.name)) if axis.size > 1 else x


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return _torch.wait(_torch.start_reduce_scatter(x, axis.size, axis.name)) if axis.size > 1 else x


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    return _torch.wait(_torch.start_all_reduce(x, op, axis.name)) if axis.size > 1 else x


_Move = Callable[[torch.Tensor, Axis], torch.Tensor]


class Moved(torch.autograd.Function):
    """Move a tensor over an axis by `there`, and its gradient by `back`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, there: _Move, back: _Move) -> torch.Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.back(grad, ctx.axis), None, None, None


def gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gather dim 0 of all ranks; the gradient is reduce-scattered."""
    return Moved.apply(x, axis, all_gather, reduce_scatter)


def scattered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over all ranks and keep this rank's part of dim 0; the gradient is gathered."""
    return Moved.apply(x, axis, reduce_scatter, all_gather)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, tp: Axis) -> torch.Tensor:
    """Mean cross-entropy of logits ``[tokens, vocab / tp]``; only maxima, sums and targets travel."""

    def summed(x: torch.Tensor) -> torch.Tensor:  # every rank has the loss, and so its gradient
        return Moved.apply(x, tp, all_reduce, lambda grad, axis: grad)

    x = logits.to(_full_precision(logits.dtype))
    top = all_reduce(x.detach().amax(-1), tp, "max")
    total = summed((x - top.unsqueeze(-1)).exp().sum(-1))
    row = labels - tp.index * x.shape[1]
    foreign = (row < 0) | (row >= x.shape[1])
    target = x.gather(-1, row.masked_fill(foreign, 0).unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0)
    return (top + total.log() - summed(target)).mean()
