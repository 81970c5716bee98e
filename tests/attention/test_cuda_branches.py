"""Code that only CUDA tensors reach, on a machine without CUDA: with fake tensors where torch allows it, or stand-ins.

Fake CUDA tensors go through most operators of a torch without CUDA. Not through Python's indexing, autograd and
Dynamo's FlexAttention: "PyTorch is not linked with support for cuda devices".
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spanwise
from spanwise import SpanMask
from spanwise._torch import storage_id, tree_leaves
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.merge import not_saving
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from tests.pairs import covering, named

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("kernel", "options", "dtype"),
    covering(
        ["reference", "flex", "varlen"],
        [{"exchange": "needed", "stages": 2}, {"exchange": "ring"}, {"exchange": "all_gather"}],
        [torch.bfloat16, torch.float16],
    ),
    ids=named,
)
def test_a_rank_of_pretended_cuda_tensors(kernel: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Its rank plan is that of the CPU; and the operators of varlen take its chunks."""
    plan = spanwise.make_plan(SpanMask.causal(67), num_ranks=3, block_size=8, **options)
    chosen, attends = KERNELS[kernel], kernel == "varlen"
    real = build(plan, 1, "cpu", kernel=chosen)
    with FakeTensorMode():
        local = build(plan, 1, CUDA, kernel=chosen)
        made, wanted = ([x for x in tree_leaves(of) if x is not None] for of in (local, real))
        assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in wanted]
        assert local.tokens.device == local.chunks["default"][1].start.device == CUDA
        tokens = local.tokens.shape[1]
        for chunk in local.chunks["default"] if attends else ():
            q = torch.empty(2, 4, tokens, 64, device=CUDA, dtype=dtype)
            k, v = (torch.empty(2, 2, chunk.kv_pos.shape[1], dim, device=CUDA, dtype=dtype) for dim in (64, 32))
            chosen.check_device(CUDA, None)
            chosen.check(q, k, v, chunk, AttentionOptions())
            out, lse = chosen.attend(q, k, v, chunk, local.tokens, AttentionOptions(0.1))
            of_tables = [getattr(chunk.tables, f.name) for f in dataclasses.fields(chunk.tables)]
            grads = torch.ops.spanwise.varlen_backward(out, lse, q, k, v, out, lse, *of_tables, 0.1)
            assert (out.shape, out.dtype, out.device) == ((2, 4, tokens, 32), dtype, CUDA)
            assert (lse.shape, lse.dtype) == ((2, 4, tokens), torch.float32)
            assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]


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
        k, v, *fetched = (torch.ones(1, 2, 5, 4, requires_grad=i < 2) for i in range(4))
        seen = list[torch.Tensor]()
        with not_saving() as forget:
            out = _Saves.apply(k, v, seen)
            forget((k, v), lambda: tuple(fetched))
        out.backward()
        assert [storage_id(x) for x in seen] == [storage_id(x) for x in fetched]


def test_rank_plans_are_built_on_the_current_device() -> None:
    plan = spanwise.make_plan(SpanMask.causal(70), 1)
    local = build(plan, 0)
    with (
        mock.patch.object(torch.cuda, "current_device", lambda: 3),
        FakeTensorMode(),
        mock.patch("spanwise.attention.rank_plan.build", return_value=local) as built,
    ):
        plan.local(None, "cuda")
    assert built.call_args.args[2] == torch.device("cuda", 3) and built.call_args.kwargs["kernel"].name == "flex"
