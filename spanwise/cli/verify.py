"""``spanwise verify``: attention and two layers around it under a plan, compared with one device, on local ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import spanwise
from spanwise import SpanMask
from spanwise.cli.command import BALANCERS, choices
from spanwise.cli.ranks import run_ranks
from spanwise.routes.exchanges import EXCHANGES

#: Most tokens: every rank computes the dense float64 reference, and leaks are followed over a dense mask.
LIMIT = 4096


def _cuts(seq_len: int, seed: int) -> np.ndarray:
    """Offsets of documents of random lengths, eight where they fit, the first of one token."""
    inner = np.random.default_rng(seed).choice(np.arange(1, seq_len), size=min(7, seq_len - 1), replace=False)
    return np.unique(np.concatenate(([0, min(1, seq_len)], inner, [seq_len]))).astype(np.int32)


def _prefix_lm(seq_len: int, seed: int) -> SpanMask:
    cu_seqlens = _cuts(seq_len, seed)
    return SpanMask.prefix_lm(cu_seqlens, np.diff(cu_seqlens) // 3)


def _shared_prefix(seq_len: int, seed: int) -> SpanMask:
    prefix = seq_len // 3
    return SpanMask.shared_prefix(prefix, np.diff(_cuts(seq_len - prefix, seed)))


#: Masks of ``--mask`` by name, made for a sequence length and a seed.
MASKS: dict[str, Callable[[int, int], SpanMask]] = {
    "documents": lambda n, seed: SpanMask.documents(_cuts(n, seed)),
    "causal": lambda n, seed: SpanMask.causal(n),
    "full": lambda n, seed: SpanMask.full(n),
    "sliding_window": lambda n, seed: SpanMask.sliding_window(n, n // 8),
    "prefix_lm": _prefix_lm,
    "shared_prefix": _shared_prefix,
    "block_causal": lambda n, seed: SpanMask.block_causal(n, max(1, n // 10), num_previous=2, global_tokens=n // 20),
}


@dataclass(frozen=True)
class VerifyConfig:
    """Options of ``spanwise verify``.

    Attributes:
        ranks: local processes to start.
        seq_len: tokens; any number.
        mask: kind of mask; its sizes follow from --seq-len.
        num_heads: query heads.
        num_kv_heads: heads of K and V.
        head_dim: width of a head.
        dtype: of weights and inputs.
        balancer: how blocks are assigned to ranks.
        exchange: how K/V travel.
        inner: ranks that trade heads for tokens (Ulysses); --exchange works between groups of so many.
        seed: of documents, weights and inputs.

    Raises:
        ValueError: an option is out of range.
    """

    ranks: int = 4
    seq_len: int = 1000
    mask: str = field(default="documents", metadata=choices(*MASKS))
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    dtype: str = field(default="float32", metadata=choices("float32", "float64"))
    balancer: str = field(default="auto", metadata=choices("auto", *BALANCERS))
    exchange: str = field(default="auto", metadata=choices("auto", *EXCHANGES))
    inner: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inner < 1 or self.ranks % self.inner:
            raise ValueError(f"inner must divide ranks, got {self.inner} and {self.ranks}")
        if self.ranks < 1 or self.seq_len < 1:
            raise ValueError(f"ranks and seq_len must be at least 1, got {self.ranks} and {self.seq_len}")
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
            raise ValueError(
                f"--head-dim must be at least 1 and --heads a multiple of --kv-heads, got {dim}, {heads} and {kv_heads}"
            )
        if self.seq_len > LIMIT:
            raise ValueError(
                f"every rank computes a dense reference: seq_len must be at most {LIMIT}, got {self.seq_len}"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        if self.mask not in MASKS:
            raise ValueError(f"unknown mask {self.mask!r}; choose one of {sorted(MASKS)}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}")

    @property
    def axes(self) -> tuple[int, ...]:
        """Shape of the mesh."""
        return (self.ranks,) if self.inner == 1 else (self.ranks // self.inner, self.inner)

    def plan(self) -> spanwise.Plan:
        """The plan to verify."""
        return spanwise.make_plan(
            MASKS[self.mask](self.seq_len, self.seed),
            num_ranks=self.ranks if self.inner == 1 else (self.ranks // self.inner, self.inner),
            balancer=self.balancer,
            exchange=self.exchange,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=getattr(torch, self.dtype),
            hardware=spanwise.CPU_HOST,
        )


class Inner(nn.Module):
    """Only the attention call, whose forward `spanwise.ContextParallel` replaces."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)


class Layer(nn.Module):
    """Projections around attention, with a residual stream `x` ``[1, T, D]``."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, dim = (num_heads, num_kv_heads, num_kv_heads), num_heads * head_dim
        self.norm, self.inner, self.out = nn.RMSNorm(dim), Inner(), nn.Linear(dim, dim, bias=False)
        self.qkv = nn.Linear(dim, sum(self.heads) * head_dim, bias=False)

    def forward(self, x: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)
        return x + self.out(self.inner(q, k, v, attn_mask=attn_mask).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Two layers with the heads of the options, and weights that are equal on all ranks."""

    def __init__(self, config: VerifyConfig):
        super().__init__()
        torch.manual_seed(config.seed)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(2)).to(getattr(torch, config.dtype))

    def forward(self, x: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, attn_mask)
        return x


def verify(config: VerifyConfig) -> int:
    """Compare attention and two layers with one device. Probes them for leaks across the mask, too."""
    print(config.plan().explain(), flush=True)
    return run_ranks(verify_rank, config, config.ranks)


def verify_rank(config: VerifyConfig) -> int:
    """A rank's part: the attention call, then the layers around it. Returns 0 if both pass, else 1."""
    names = ("cp",) if config.inner == 1 else ("cp_outer", "cp_inner")
    mesh = init_device_mesh("cpu", config.axes, mesh_dim_names=names)
    plan, dtype = config.plan(), getattr(torch, config.dtype)
    attention = spanwise.verify(spanwise.context_parallel_attention, plan, mesh, dtype=dtype)
    model = Layers(config)
    style = spanwise.ContextParallel(attention_type="sdpa")
    parallelize_module(model, mesh, {"layers.*.inner": style})
    x = torch.randn(1, config.seq_len, config.num_heads * config.head_dim, dtype=dtype)
    layers = spanwise.verify(model, plan, mesh, inputs=(x,))
    if dist.get_rank() == 0:
        print(f"attention: {attention}\nlayers: {layers}")
    return 0 if attention and layers else 1
