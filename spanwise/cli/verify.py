"""``spanwise verify``: attention and two layers around it under a plan, compared with one device, on local ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import spanwise
from spanwise import SpanMask
from spanwise.cli.options import VerifyOptions
from spanwise.cli.ranks import run_ranks

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


def make_plan(options: VerifyOptions) -> spanwise.Plan:
    """The plan to verify."""
    return spanwise.make_plan(
        MASKS[options.mask](options.seq_len, options.seed),
        num_ranks=options.ranks if options.inner == 1 else (options.ranks // options.inner, options.inner),
        balancer=options.balancer,
        exchange=options.exchange,
        num_q_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        hardware=spanwise.CPU_HOST,
    )


def _check(options: VerifyOptions) -> None:
    """``ValueError`` for options out of range."""
    for name in ("ranks", "seq_len", "heads", "kv_heads", "head_dim", "inner"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.ranks % options.inner:
        raise ValueError(f"--inner must divide --ranks, got {options.inner} and {options.ranks}")
    if options.heads % options.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, got {options.heads} and {options.kv_heads}")
    if options.seq_len > LIMIT:
        raise ValueError(f"every rank computes a dense reference: --seq-len is at most {LIMIT}, got {options.seq_len}")
    if not 0 <= options.seed < 2**64:
        raise ValueError(f"--seed must be in [0, 2**64), got {options.seed}")


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

    def __init__(self, options: VerifyOptions):
        super().__init__()
        torch.manual_seed(options.seed)
        sizes = options.heads, options.kv_heads, options.head_dim
        self.layers = nn.ModuleList(Layer(*sizes) for _ in range(2)).to(getattr(torch, options.dtype))

    def forward(self, x: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, attn_mask)
        return x


def verify(options: VerifyOptions, command: str = "spanwise verify") -> int:
    """Compare attention and two layers with one device on local ranks."""
    _check(options)
    print(make_plan(options).explain(), flush=True)
    return run_ranks(verify_rank, options, options.ranks)


def verify_rank(options: VerifyOptions) -> int:
    """A rank's part: the attention call, then the layers around it. Returns 0 if both pass, else 1."""
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("cp",))
    if options.inner > 1:
        axes = (options.ranks // options.inner, options.inner)
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_outer", "cp_inner"))
    plan, dtype = make_plan(options), getattr(torch, options.dtype)
    attention = spanwise.verify(spanwise.context_parallel_attention, plan, mesh, dtype=dtype)
    model = Layers(options)
    style = spanwise.ContextParallel(attention_type="sdpa")
    parallelize_module(model, mesh, {"layers.*.inner": style})
    x = torch.randn(1, options.seq_len, options.heads * options.head_dim, dtype=dtype)
    layers = spanwise.verify(model, plan, mesh, inputs=(x,))
    if dist.get_rank() == 0:
        print(f"attention: {attention}\nlayers: {layers}")
    return 0 if attention and layers else 1
