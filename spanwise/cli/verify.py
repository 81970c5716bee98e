"""``spanwise verify``: attention under a plan, compared with one device, on local ranks."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

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


def verify(options: VerifyOptions, command: str = "spanwise verify") -> int:
    """Compare attention with one device on local ranks."""
    check_sizes(options, ranks=1024, seq_len=LIMIT, heads=1024, kv_heads=1024, head_dim=1024, inner=options.ranks)
    if options.ranks % options.inner:
        raise ValueError(f"--inner must divide --ranks, got {options.inner} and {options.ranks}")
    print(make_plan(options).explain(), flush=True)
    return run_ranks(verify_rank, options, options.ranks)


def verify_rank(options: VerifyOptions) -> int:
    """A rank's part. Returns 0 if it passes, else 1."""
    mesh = init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("cp",))
    if options.inner > 1:
        axes = (options.ranks // options.inner, options.inner)
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp_outer", "cp_inner"))
    plan = make_plan(options)
    report = spanwise.verify(spanwise.context_parallel_attention, plan, mesh, dtype=getattr(torch, options.dtype))
    if dist.get_rank() == 0:
        print(f"attention: {report}")
    return 0 if report else 1
