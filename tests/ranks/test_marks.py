"""Numbers of keys that change from plan to plan are marked in a rank plan's tensors, so that one graph serves all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import spanwise
from spanwise import SpanMask, _torch
from tests.ranks.harness import run_ranks

MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices")


def marked(x: torch.Tensor, dim: int) -> bool:
    return any(dim in getattr(x, name, ()) for name in MARKS)


@pytest.mark.parametrize("exchange", ["needed", "hierarchical"])  # others bring as many keys under each mask
def test_sizes_that_change_are_marked(exchange: str) -> None:
    hardware = spanwise.H100.with_host_size(2) if exchange == "hierarchical" else None
    plans = [
        spanwise.make_plan(
            SpanMask.sliding_window(72, reads), 4, balancer="contiguous", block_size=1,
            exchange=exchange, hardware=hardware,
        )
        for reads in (10, 13)
    ]  # fmt: skip

    def on_rank(rank: int, mesh: DeviceMesh) -> list[Any]:
        leaves = [_torch.tree_leaves(plan.local(mesh, kernel="sdpa").chunks["default"]) for plan in plans]
        return [[x for x in each if isinstance(x, torch.Tensor)] for each in leaves]

    changed = 0
    for first, second in run_ranks(4, on_rank):
        assert len(first) == len(second)
        for a, b in zip(first, second, strict=True):
            for dim in range(a.dim()):
                if a.shape[dim] != b.shape[dim]:
                    changed += 1
                    assert marked(a, dim) and marked(b, dim), (a.shape, b.shape, dim)
    assert changed
