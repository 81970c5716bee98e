"""Fake tensors, which have neither contents nor addresses: rank plans for CUDA, and K/V told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spanwise
from spanwise._torch import storage_id, tree_leaves
from spanwise.attention.kernels.merge import not_saving
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build


@pytest.mark.parametrize("kernel", ["reference", "flex", "varlen"])
@pytest.mark.parametrize(
    "options", [{"exchange": "needed", "stages": 2}, {"exchange": "ring"}, {"exchange": "all_gather"}], ids=str
)
def test_rank_plan_on_a_pretended_cuda_device(options: dict[str, Any], kernel: str) -> None:
    plan = spanwise.make_plan(spanwise.SpanMask.causal(67), num_ranks=3, block_size=8, **options)
    device = torch.device("cuda", 0)
    with FakeTensorMode():
        local = build(plan, 1, device, kernel=KERNELS[kernel])
    real = build(plan, 1, "cpu", kernel=KERNELS[kernel])
    made, wanted = ([x for x in tree_leaves(of) if x is not None] for of in (local, real))
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in wanted]
    assert local.tokens.device == local.chunks["default"][1].start.device == device


class _Saves(torch.autograd.Function):
    """Saves `k` and `v` as an attention kernel does; `seen` gets what its backward reads."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(k, v)
        ctx.seen = seen
        return k.sum() + v.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.seen += ctx.saved_tensors
        return *(grad.expand_as(x).clone() for x in ctx.saved_tensors), None


@pytest.mark.parametrize("fake", [True, False])
def test_what_is_not_saved_is_told_apart(fake: bool) -> None:
    """Also where every storage is at address 0."""
    with FakeTensorMode() if fake else torch.enable_grad():
        k, v = (torch.ones(1, 2, 5, 4, requires_grad=True) for _ in range(2))
        fetched = tuple(torch.ones(1, 2, 5, 4) for _ in range(2))
        seen = list[torch.Tensor]()
        with not_saving() as forget:
            out = _Saves.apply(k, v, seen)
            forget((k, v), lambda: fetched)
        out.backward()
        assert [storage_id(x) for x in seen] == [storage_id(x) for x in fetched]
