"""The families of `overlap_zoo`: models and their parallelism. Each function returns the graphs of one step.

Transformers are those of Hugging Face, with the shapes of published models and few layers. The rest is written here.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from overlap_zoo_trace import Group, Sharded, Traced, exchanged, fake_groups, gathered, scattered, traced, whole_step
from torch import nn
from torch.nn import functional as F

from spanwise.hardware import H100
from spanwise.overlap import _torch
from spanwise.overlap.fx.capture import CaptureConfig, capture, relabel

BF16 = torch.bfloat16


def causal_lm(kind: str, **sizes: Any) -> nn.Module:
    """A model of transformers for language modelling, by the prefix of its classes."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=False, use_cache=False)
    config._attn_implementation = "eager" if kind == "Gemma2" else "sdpa"
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    return getattr(transformers, name)(config).train()


LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def lm_loss(sharded: Sharded) -> Callable[..., torch.Tensor]:
    def loss(tokens: torch.Tensor, labels: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        logits = sharded(shards, input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loss


def tokens_of(batch: int, seq_len: int) -> list[torch.Tensor]:
    return [torch.empty(batch, seq_len, dtype=torch.int64) for _ in range(2)]


def lm_fsdp(kind: str, batch: int, seq_len: int, ranks: int = 64, keep: bool = False, **sizes: Any) -> Traced:
    with fake_groups(dp=range(ranks)) as groups, _torch.fake_mode():
        model = causal_lm(kind, **sizes)
        sharded = Sharded(model, model.model.layers, shard=groups["dp"])
        inputs = [*tokens_of(batch, seq_len), *sharded.shards]
        return traced(lm_loss(sharded), inputs, groups, "" if keep else "dp")


def llama_fsdp(layers: int = 6) -> Traced:
    return lm_fsdp("Llama", 1, 8192, num_hidden_layers=layers, vocab_size=128_256, **LLAMA)


def llama_zero2(layers: int = 6) -> Traced:
    """Gathered parameters are kept for the backward."""
    return lm_fsdp("Llama", 1, 4096, 16, keep=True, num_hidden_layers=layers, vocab_size=32_000, **LLAMA)


def gemma2_fsdp(layers: int = 6) -> Traced:
    sizes = {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8}
    return lm_fsdp("Gemma2", 1, 2048, 32, num_hidden_layers=layers, vocab_size=256_000, head_dim=256, **sizes)


def hsdp(layers: int = 6) -> Traced:
    """Shards over the 8 ranks of a host, replicas over 8 hosts."""
    with fake_groups(shard=range(8), replicas=range(0, 64, 8)) as groups, _torch.fake_mode():
        model = causal_lm("Llama", num_hidden_layers=layers, vocab_size=32_000, **LLAMA)
        sharded = Sharded(model, model.model.layers, **groups)
        return traced(lm_loss(sharded), [*tokens_of(1, 4096), *sharded.shards], groups, "shard")


def ddp(layers: int = 12) -> Traced:
    with fake_groups(replicas=range(16)) as groups, _torch.fake_mode():
        sizes = {"n_layer": layers, "n_embd": 1024, "n_head": 16, "vocab_size": 50_304, "n_positions": 1024}
        model = causal_lm("GPT2", **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        sharded = Sharded(model, replicas=groups["replicas"])
        return traced(lm_loss(sharded), [*tokens_of(8, 1024), *sharded.shards], groups)


class _Experts(nn.Module):
    """Mixture of experts over the ranks of `ep`: tokens of fixed capacity travel to their experts and back."""

    def __init__(self, dim: int, hidden: int, num_experts: int, top_k: int, ep: Group) -> None:
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


def qwen3_moe_ep(layers: int = 4, shared_stream: bool = False) -> Traced:
    """Experts over 8 ranks, all else sharded over 32."""
    members = {"dp": range(32), "ep": range(8), "edp": range(0, 32, 8)}
    with fake_groups(**members) as groups, _torch.fake_mode():
        sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
        model = causal_lm("Qwen3Moe", num_hidden_layers=layers, vocab_size=151_936, num_experts=8, **sizes)
        for layer in model.model.layers:
            layer.mlp = _Experts(2048, 768, 128, 8, groups["ep"])
        sharded = Sharded(
            model,
            model.model.layers,
            shard=groups["dp"],
            local=lambda name: "expert_" in name,
            local_replicas=groups["edp"],
        )
        return traced(lm_loss(sharded), [*tokens_of(1, 4096), *sharded.shards], groups, "dp")


def joint_llama(layers: int = 3) -> Traced:
    with fake_groups(dp=range(32)) as groups, _torch.fake_mode():
        model = causal_lm("Llama", num_hidden_layers=layers, vocab_size=32_000, **LLAMA)
        sharded = Sharded(model, model.model.layers, shard=groups["dp"])
        return whole_step(lm_loss(sharded), tokens_of(1, 4096), sharded.shards, groups)


def llama_2d(layers: int = 4) -> Traced:
    """Tensor parallelism with sequence parallelism inside a host, FSDP between hosts."""
    return _decoder(layers=layers, dp=8, tp=8, vocab=128_256)


def _decoder(attention: Any = None, **sizes: Any) -> Traced:
    shape = {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "seq_len": 8192}
    graphs = capture(CaptureConfig(**(shape | sizes)), attention)
    for gm in (graphs.forward, graphs.backward):
        relabel(gm, torch.device("cpu"))
    ranks = {axis.name: axis.ranks for axis in graphs.axes.values() if axis.name}
    return Traced({"forward": graphs.forward, "backward": graphs.backward}, ranks)


def llama_cp(layers: int = 3) -> Traced:
    """Context parallelism over 8 ranks: attention gathers keys and values, or what it needs of them."""
    from spanwise.cli.overlap import plan_attention

    config = {"layers": layers, "dp": 2, "cp": 8, "seq_len": 32_768}
    shape = CaptureConfig(dim=4096, heads=32, kv_heads=8, ffn=14336, **config)
    return _decoder(plan_attention(shape, H100, "needed"), **config)


class _Block(nn.Module):
    """A block of a transformer; `modulated` as in DiT, `group` for attention by Ulysses."""

    def __init__(self, dim: int, heads: int, modulated: bool = False, group: Group | None = None) -> None:
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
    def __init__(self, blocks: list[nn.Module], first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: torch.Tensor, *condition: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, *condition)
        return self.last(x)


def _fsdp(model: Any, groups: dict[str, Group], data: list[torch.Tensor], units: Any, label: str = "dp") -> Traced:
    sharded = Sharded(model, units, shard=groups[label])

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return sharded(args[len(data) :], *args[: len(data)]).float().square().mean()

    return traced(loss, [*data, *sharded.shards], groups, label)


def dit(layers: int = 8) -> Traced:
    with fake_groups(dp=range(16)) as groups, _torch.fake_mode():
        blocks: list[nn.Module] = [_Block(1152, 16, modulated=True) for _ in range(layers)]
        model = _Stack(blocks, nn.Linear(32, 1152), nn.Linear(1152, 32))
        data = [torch.empty(16, 1024, 32, dtype=BF16), torch.empty(16, 1152, dtype=BF16)]
        return _fsdp(model, groups, data, model.blocks)


def ulysses(layers: int = 4) -> Traced:
    with fake_groups(cp=range(8), dp=range(32)) as groups, _torch.fake_mode():
        blocks: list[nn.Module] = [_Block(4096, 32, group=groups["cp"]) for _ in range(layers)]
        model = _Stack(blocks, nn.Linear(64, 4096), nn.Linear(4096, 64))
        return _fsdp(model, groups, [torch.empty(1, 8192, 64, dtype=BF16)], model.blocks)


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


def resnet50(batch: int = 64) -> Traced:
    """Every convolution gathers its own weights: many collectives that are mostly latency."""
    with fake_groups(dp=range(16)) as groups, _torch.fake_mode():
        blocks, before = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(_Bottleneck(before, 64 << stage, 2 if stage and not number else 1))
                before = 256 << stage
        first = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64), nn.MaxPool2d(3, 2, 1))
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
        model = _Stack(blocks, first, last)
        return _fsdp(model, groups, [torch.empty(batch, 3, 224, 224, dtype=BF16)], ())


class _DLRM(nn.Module):
    """Tables over ranks by an all-to-all, the multilayer perceptrons on every rank."""

    def __init__(self, tables: int, dim: int, group: Group) -> None:
        super().__init__()
        self.group, self.dim = group, dim
        self.tables = nn.ParameterList([torch.empty(100_000, dim) for _ in range(tables)])
        sizes = (13, 512, 256, dim)
        self.bottom = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        features = 1 + tables * group.size
        sizes = (dim + features * features, 4096, 4096, 2048, 1)
        self.top = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))

    def forward(self, dense: torch.Tensor, rows: torch.Tensor, tables: list[torch.Tensor]) -> torch.Tensor:
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
        return x


def dlrm(tables: int = 8, batch: int = 4096) -> Traced:
    with fake_groups(world=range(16)) as groups, _torch.fake_mode():
        model = _DLRM(tables, 128, groups["world"])
        own = [torch.empty(p.shape, requires_grad=True) for p in model.tables]
        del model.tables
        sharded = Sharded(model, replicas=groups["world"])

        def loss(dense: torch.Tensor, rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return sharded(rest[tables:], dense, rows, rest[:tables]).float().mean()

        rows = torch.empty(tables, batch * 16, dtype=torch.int64)
        return traced(loss, [torch.empty(batch, 13, dtype=BF16), rows, *own, *sharded.shards], groups)


def sync_norm(layers: int = 24) -> Traced:
    """A residual network with a reduction of statistics in each block, beside gathers: little to hide behind."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2048, 2048), nn.Linear(2048, 2048)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            total = gathered(h.float().mean(0, keepdim=True), groups["norm"]).mean(0)
            return x + self.second(F.relu(h - total.to(h.dtype)))

    with fake_groups(norm=range(8), dp=range(64)) as groups, _torch.fake_mode():
        model = _Stack([Block() for _ in range(layers)], nn.Identity(), nn.Identity())
        return _fsdp(model, groups, [torch.empty(8192, 2048, dtype=BF16)], ())


def random_graph(seed: int, branches: int = 4, depth: int = 24) -> Traced:
    """Branches of matrix products of random sizes, joined at times, with collectives of three groups between them."""
    draw = random.Random(seed)
    members = {"a": range(8), "b": range(0, 64, 8), "c": range(64)}
    with fake_groups(**members) as groups, _torch.fake_mode():
        weights: list[torch.Tensor] = []

        def forward(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            left = iter(given)
            choose, heads = random.Random(seed), [x * scale for scale in range(1, branches + 1)]
            for _ in range(depth):
                at, group = choose.randrange(branches), groups[choose.choice("abc")]
                h = heads[at]
                if choose.random() < 0.4:
                    h = scattered(gathered(h, group), group)
                if choose.random() < 0.3:
                    h = h + heads[choose.randrange(branches)]
                w = gathered(next(left), groups["c"]).view(h.shape[1], -1)
                heads[at] = F.relu(h @ w) @ w.t()
            return functools.reduce(torch.add, heads).float().square().mean()

        for _ in range(depth):
            wide = draw.choice([512, 2048, 8192])
            weights.append(torch.empty(2048 * wide // 64, dtype=BF16, requires_grad=True))
        x = torch.empty(4096, 2048, dtype=BF16, requires_grad=True)
        return traced(forward, [x, *weights], groups, "c")


FAMILIES: dict[str, Callable[[], Traced]] = {
    "llama-fsdp": llama_fsdp,
    "llama-zero2": llama_zero2,
    "gemma2-fsdp": gemma2_fsdp,
    "llama-hsdp": hsdp,
    "gpt2-ddp": ddp,
    "qwen3-moe-ep": qwen3_moe_ep,
    "llama-step": joint_llama,
    "llama-tp": llama_2d,
    "llama-cp": llama_cp,
    "ulysses": ulysses,
    "dit": dit,
    "resnet50": resnet50,
    "dlrm": dlrm,
    "sync-norm": sync_norm,
    "random-0": functools.partial(random_graph, 0),
    "random-1": functools.partial(random_graph, 1, branches=8, depth=40),
}
