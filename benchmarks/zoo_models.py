"""The sixteen families of `overlap_zoo`: models, and a table of their sizes and parallelism.

Transformers are those of Hugging Face, with the shapes of published models and few layers.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_graphs import Family, Traced, all_gather, exchanged, gathered, reduce_scatter, trace
from spanwise.cli.overlap import plan_attention
from spanwise.hardware import H100
from spanwise.overlap.fx.capture import CaptureConfig, capture, relabel
from spanwise.overlap.fx.decoder import Axis, Moved

BF16, INT = torch.bfloat16, torch.int64


class _LM(nn.Module):
    """A causal language model of transformers, by the prefix of its classes."""

    def __init__(self, groups: dict[str, Axis], kind: str, **sizes: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=False, use_cache=False)
        config._attn_implementation = "eager" if kind == "Gemma2" else "sdpa"
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        self.lm = getattr(transformers, name)(config).train()
        self.units = list(self.lm.model.layers) if "dp" in groups else []
        if "ep" in groups:
            for layer in self.units:
                layer.mlp = _Experts(2048, 768, 128, 8, groups["ep"])

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm(input_ids=tokens).logits.flatten(0, 1).float(), labels.flatten())


class _Experts(nn.Module):
    """Mixture of experts over the ranks of `ep`: tokens of fixed capacity travel to their experts and back."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int, ep: Axis) -> None:
        super().__init__()
        self.ep, self.num_experts, self.top_k = ep, num_experts, top_k
        self.router = nn.Parameter(torch.empty(num_experts, dim))
        here = num_experts // ep.size
        self.expert_in = nn.Parameter(torch.empty(here, dim, 2 * hidden))
        self.expert_out = nn.Parameter(torch.empty(here, hidden, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape, x = x.shape, x.flatten(0, -2)
        capacity = x.shape[0] * self.top_k // self.num_experts
        weights, experts = F.linear(x, self.router).float().softmax(-1).topk(self.top_k)
        slots = experts.flatten().argsort()
        sent = exchanged(x[slots // self.top_k], self.ep)
        sent = sent.view(self.ep.size, -1, capacity, x.shape[1]).transpose(0, 1).flatten(1, 2)
        gate, up = (sent @ self.expert_in).chunk(2, -1)
        out = (F.silu(gate) * up) @ self.expert_out
        out = out.view(-1, self.ep.size, capacity, x.shape[1]).transpose(0, 1).flatten(0, 2)
        back = exchanged(out, self.ep) * weights.flatten()[slots].unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, slots // self.top_k, back).view(shape)


class _Block(nn.Module):
    """A block of a transformer; `modulated` as in DiT, `group` for attention by Ulysses."""

    def __init__(self, dim: int, heads: int, modulated: bool = False, group: Axis | None = None) -> None:
        super().__init__()
        self.heads, self.group = heads, group
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=not modulated) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.modulate = nn.Linear(dim, 6 * dim) if modulated else None

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = [0.0, 0.0, 1.0] * 2
        if self.modulate is not None and condition is not None:
            parts = self.modulate(F.silu(condition)).unsqueeze(1).chunk(6, -1)
            shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self._attend(self.norm1(x) * (1.0 + scale1) + shift1)
        h = self.norm2(x) * (1.0 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.group is None:
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        size = self.group.size

        def to_heads(t: torch.Tensor) -> torch.Tensor:  # [B, N, S/P, H] to [B, N/P, S, H]
            t = exchanged(t.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1), self.group)
            return t.unflatten(0, (size, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

        def to_tokens(t: torch.Tensor) -> torch.Tensor:
            t = t.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).flatten(0, 1)
            return exchanged(t, self.group).unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)

        out = to_tokens(F.scaled_dot_product_attention(*map(to_heads, (q, k, v)), is_causal=True))
        return self.out(out.transpose(1, 2).flatten(2))


class _Stack(nn.Module):
    """Blocks between two layers; with units, a block's parameters are gathered together."""

    def __init__(self, blocks: list[nn.Module], first: nn.Module, last: nn.Module, units: bool = False) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.units = blocks if units else []

    def forward(self, x: torch.Tensor, *condition: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *condition)
        return self.last(x).float().square().mean()


def _transformer(count: int, dim: int, channels: int, heads: int, **options: Any) -> nn.Module:
    blocks: list[nn.Module] = [_Block(dim, heads, **options) for _ in range(count)]
    return _Stack(blocks, nn.Linear(channels, dim), nn.Linear(dim, channels), units=True)


class _Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        widths = [(before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in widths)
        self.norms = nn.ModuleList(nn.GroupNorm(32, o) for _, o, _, _ in widths)
        self.skip = nn.Conv2d(before, 4 * width, 1, stride, bias=False) if before != 4 * width else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(h))
            h = F.relu(h) if number < 2 else h
        return F.relu(h + self.skip(x))


def _resnet50(_: dict[str, Axis]) -> nn.Module:
    """Every convolution gathers its own weights: many collectives that are mostly latency."""
    blocks: list[nn.Module] = []
    before = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            blocks.append(_Bottleneck(before, 64 << stage, 2 if stage and not number else 1))
            before = 256 << stage
    first = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.MaxPool2d(3, 2, 1))
    return _Stack(blocks, first, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)))


class _DLRM(nn.Module):
    """Tables over ranks by an all-to-all, the multilayer perceptrons on every rank."""

    def __init__(self, tables: int, dim: int, group: Axis) -> None:
        super().__init__()
        self.group = group
        features = 1 + tables * group.size
        self.bottom, self.top = (
            nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
            for sizes in ((13, 512, 256, dim), (dim + features * features, 4096, 4096, 2048, 1))
        )

    def forward(self, dense: torch.Tensor, rows: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        found = [
            exchanged(F.embedding(rows[number], table).to(BF16), self.group).unflatten(0, (self.group.size, -1))
            for number, table in enumerate(tables)
        ]
        x = dense
        for layer in self.bottom:
            x = F.relu(layer(x))
        features = torch.cat([x.unsqueeze(0), *found], 0).transpose(0, 1)
        x = torch.cat([x, (features @ features.transpose(1, 2)).flatten(1)], 1)
        for layer in self.top:
            x = F.relu(layer(x))
        return x.float().mean()


class _Normed(nn.Module):
    """A residual block with a reduction of statistics, beside gathers: little to hide behind."""

    def __init__(self, group: Axis) -> None:
        super().__init__()
        self.group, (self.first, self.second) = group, (nn.Linear(2048, 2048) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        total = gathered(h.float().mean(0, keepdim=True), self.group).mean(0)
        return x + self.second(F.relu(h - total.to(h.dtype)))


class _Random(nn.Module):
    """Branches of matrix products of random sizes, joined at times, with collectives of three groups between them."""

    def __init__(self, groups: dict[str, Axis], seed: int, branches: int) -> None:
        super().__init__()
        self.groups, self.seed, self.branches = groups, seed, branches

    def forward(self, x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        choose, heads = random.Random(self.seed), [x * scale for scale in range(1, self.branches + 1)]
        for shard in shards:
            at, group = choose.randrange(self.branches), self.groups[choose.choice("abc")]
            h = heads[at]
            if choose.random() < 0.4:
                h = Moved.apply(gathered(h, group), group, reduce_scatter, all_gather)
            if choose.random() < 0.3:
                h = h + heads[choose.randrange(self.branches)]
            w = gathered(shard, self.groups["c"]).view(h.shape[1], -1)
            heads[at] = F.relu(h @ w) @ w.t()
        return functools.reduce(torch.add, heads).float().square().mean()


def _decoder(exchange: str = "", **sizes: Any) -> Traced:
    """The decoder of `spanwise overlap`, with context parallelism by a plan."""
    config = CaptureConfig(**({"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192} | sizes))
    graphs = capture(config, plan_attention(config, H100, exchange) if exchange else None)
    for gm in (graphs.forward, graphs.backward):
        relabel(gm, torch.device("cpu"))
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    return Traced({"forward": graphs.forward, "backward": graphs.backward}, ranks)


def _lm(kind: str, groups: dict[str, Sequence[int]], batch: int, seq_len: int, sizes: Any, **options: Any) -> Family:
    inputs = [(INT, (batch, seq_len), False)] * 2
    return Family(groups, functools.partial(_LM, kind=kind, **sizes), inputs, **options)


def _random(seed: int, branches: int, depth: int) -> Family:
    draw = random.Random(seed)
    widths = [draw.choice([512, 2048, 8192]) for _ in range(depth)]
    inputs = [(BF16, (4096, 2048), True), *((BF16, (2048 * wide // 64,), True) for wide in widths)]
    members = {"a": range(8), "b": range(0, 64, 8), "c": range(64)}
    return Family(members, functools.partial(_Random, seed=seed, branches=branches), inputs, recomputed="c")


def _llama(layers: int, vocab: int) -> dict[str, int]:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return {"num_hidden_layers": layers, "vocab_size": vocab, **sizes}


_GEMMA = {"num_hidden_layers": 6, "vocab_size": 256_000, "hidden_size": 3584, "intermediate_size": 14336,
          "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}  # fmt: skip
_GPT2 = {"n_layer": 12, "n_embd": 1024, "n_head": 16, "vocab_size": 50_304, "n_positions": 1024, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
_QWEN = {"num_hidden_layers": 4, "vocab_size": 151_936, "num_experts": 8, "hidden_size": 2048,
         "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
_HOSTS = range(0, 64, 8)
_TABLE: dict[str, Family] = {
    "llama-fsdp": _lm("Llama", {"dp": range(64)}, 1, 8192, _llama(6, 128_256)),
    "llama-zero2": _lm("Llama", {"dp": range(16)}, 1, 4096, _llama(6, 32_000), recomputed=""),
    "gemma2-fsdp": _lm("Gemma2", {"dp": range(32)}, 1, 2048, _GEMMA),
    "llama-hsdp": _lm("Llama", {"dp": range(8), "replicas": _HOSTS}, 1, 4096, _llama(6, 32_000)),
    "gpt2-ddp": _lm("GPT2", {"replicas": range(16)}, 8, 1024, _GPT2),
    "qwen3-moe-ep": _lm("Qwen3Moe", {"dp": range(32), "ep": range(8), "edp": range(0, 32, 8)}, 1, 4096, _QWEN),
    "llama-step": _lm("Llama", {"dp": range(32)}, 1, 4096, _llama(3, 32_000), whole=True),
    "ulysses": Family(
        {"cp": range(8), "dp": range(32)}, lambda groups: _transformer(4, 4096, 64, 32, group=groups["cp"]),
        [(BF16, (1, 8192, 64), False)],
    ),
    "dit": Family(
        {"dp": range(16)}, lambda groups: _transformer(8, 1152, 32, 16, modulated=True),
        [(BF16, (16, 1024, 32), False), (BF16, (16, 1152), False)],
    ),
    "resnet50": Family({"dp": range(16)}, _resnet50, [(BF16, (64, 3, 224, 224), False)]),
    "dlrm": Family(
        {"replicas": range(16)}, lambda groups: _DLRM(8, 128, groups["replicas"]),
        [(BF16, (4096, 13), False), (INT, (8, 4096 * 16), False), *[(torch.float32, (100_000, 128), True)] * 8],
    ),
    "sync-norm": Family(
        {"norm": range(8), "dp": range(64)},
        lambda groups: _Stack([_Normed(groups["norm"]) for _ in range(24)], nn.Identity(), nn.Identity()),
        [(BF16, (8192, 2048), False)],
    ),
    "random-0": _random(0, 4, 24),
    "random-1": _random(1, 8, 40),
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Traced]] = {
    **{name: functools.partial(trace, family) for name, family in _TABLE.items()},
    "llama-tp": functools.partial(_decoder, layers=4, dp=8, tp=8, vocab=128_256),
    "llama-cp": functools.partial(_decoder, layers=3, dp=2, cp=8, seq_len=32_768, exchange="needed"),
}
