"""``spanwise verify``: attention and two layers around it under a plan, compared with one device, on local ranks."""

from __future__ import annotations

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
from spanwise.cli.output import check_sizes
from spanwise.cli.ranks import run_ranks

#: Most tokens: every rank computes the dense float64 reference, and leaks are followed over a dense mask.
LIMIT = 4096


def documents(seq_len: int) -> SpanMask:
    """Documents of random lengths, eight where they fit, the first of one token."""
    inner = np.random.default_rng(0).choice(np.arange(1, seq_len), size=min(7, seq_len - 1), replace=False)
    return SpanMask.documents(np.unique(np.concatenate(([0, min(1, seq_len)], inner, [seq_len]))))


def make_plan(options: VerifyOptions) -> spanwise.Plan:
    """The plan to verify."""
    return spanwise.make_plan(
        documents(options.seq_len),
        num_ranks=options.ranks if options.inner == 1 else (options.ranks // options.inner, options.inner),
        balancer=options.balancer,
        exchange=options.exchange,
        num_q_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        hardware=spanwise.CPU_HOST,
    )


class Inner(nn.Module):
    """Only the attention call, whose forward `spanwise.ContextParallel` replaces."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)


class Layers(nn.Module):
    """Two layers of projections around attention, with equal weights on all ranks; the residual stream is [1, T, D]."""

    def __init__(self, options: VerifyOptions):
        super().__init__()
        torch.manual_seed(0)
        self.heads, dim = (options.heads, options.kv_heads, options.kv_heads), options.heads * options.head_dim
        width = sum(self.heads) * options.head_dim
        self.inner = nn.ModuleList(Inner() for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(dim, width, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.to(getattr(torch, options.dtype))

    def forward(self, x: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        for inner, qkv, out in zip(self.inner, self.qkv, self.out, strict=True):
            heads = qkv(nn.functional.rms_norm(x, x.shape[-1:])).unflatten(2, (sum(self.heads), -1))
            q, k, v = heads.transpose(1, 2).split(self.heads, 1)
            x = x + out(inner(q, k, v, attn_mask=attn_mask).transpose(1, 2).flatten(2))
        return x


def verify(options: VerifyOptions, command: str = "spanwise verify") -> int:
    """Compare attention and two layers with one device on local ranks."""
    check_sizes(options, ranks=1024, seq_len=LIMIT, heads=1024, kv_heads=1024, head_dim=1024, inner=options.ranks)
    if options.ranks % options.inner:
        raise ValueError(f"--inner must divide --ranks, got {options.inner} and {options.ranks}")
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
    parallelize_module(model, mesh, {"inner.*": style})
    x = torch.randn(1, options.seq_len, options.heads * options.head_dim, dtype=dtype)
    layers = spanwise.verify(model, plan, mesh, inputs=(x,))
    if dist.get_rank() == 0:
        print(f"attention: {attention}\nlayers: {layers}")
    return 0 if attention and layers else 1
