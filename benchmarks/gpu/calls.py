"""Attention calls of one rank of many, replayed on one device; the steps that time and count share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

import spanwise
from benchmarks.gpu.clock import HEAD_DIM, HEADS, KV_HEADS, draw
from benchmarks.gpu.replay import Replay, replayed
from spanwise import SpanMask
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build


class Call(NamedTuple):
    """A call of the busiest rank.

    Attributes:
        attend: the forward.
        leaves: q, k and v of the rank.
        cotangent: a gradient of the output.
        group: which counts what it replays.
    """

    plan: spanwise.Plan
    attend: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    cotangent: torch.Tensor
    group: Replay

    def step(self) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.attend(), self.leaves, self.cotangent)


@contextmanager
def call_of_a_rank(
    mask: SpanMask, ranks: int, kernel: str, device: torch.device, dtype: torch.dtype, **options: Any
) -> Iterator[Call]:
    """The call of the plan's busiest rank; `options` are those of `make_plan`."""
    plan = spanwise.make_plan(
        mask, ranks, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, **options
    )
    rank = int(np.argmax(plan.work()))
    with replayed(rank, ranks, device) as mesh:
        local = build(plan, rank, device, kernel=KERNELS[kernel])
        tokens = local.tokens.shape[1]
        leaves = tuple(draw(heads, tokens, device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        group = mesh.get_group()
        assert isinstance(group, Replay)
        yield Call(
            plan,
            lambda: spanwise.context_parallel_attention(*leaves, local, mesh, kernel=kernel),
            leaves,
            torch.randn_like(leaves[0]),
            group,
        )


def allocated(step: Callable[[], Any], device: torch.device) -> int | None:
    """Peak of the allocator in a call, above what was there before; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
