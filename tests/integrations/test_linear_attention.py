"""The arguments that kernels of other libraries get; the libraries are stand-ins, because they need CUDA."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import spanwise
from spanwise.integrations import linear_attention
from tests.ranks.harness import run_ranks


def _plan(balancer: str, length: int = 24, ranks: int = 2) -> spanwise.Plan:
    mask = spanwise.SpanMask.documents([0, 5, length])
    return spanwise.make_plan(mask, ranks, balancer=balancer, exchange="needed", block_size=2)


def test_fragments_tile_the_sequence() -> None:
    for balancer in ("contiguous", "head_tail", "lpt"):
        plan = _plan(balancer, 25, 3)
        offsets, runs = linear_attention.fragments(plan)
        assert offsets == [0, 5, 25]
        assert [sum(stop - start for start, stop in owned) for owned in runs] == plan.layout.tokens_per_rank.tolist()
        edges = sorted(run for owned in runs for run in owned)
        assert [0, *(stop for _, stop in edges)] == [*(start for start, _ in edges), 25]


def test_padding_is_a_document_of_its_own() -> None:
    packing = spanwise.Packing([0, 5, 5, 11], cu_seqlens_q_padded=[0, 8, 8, 16])
    plan = spanwise.make_plan(packing.mask(), 1, packing=packing)
    assert linear_attention.fragments(plan).cu_seqlens == [0, 5, 8, 14, 16]


def test_what_the_kernels_do_not_take() -> None:
    masks = spanwise.SpanMask.stack([spanwise.SpanMask.documents([0, n, 16]) for n in (3, 9)])
    with pytest.raises(ValueError, match="one packed sequence, got 2 batch rows"):
        linear_attention.fragments(spanwise.make_plan(masks, 2, balancer="lpt", block_size=2), cu_seqlens=[0, 16])
    with pytest.raises(ValueError, match=r"tokens on every rank, got \[1, 1, 0\]"):
        linear_attention.fragments(spanwise.make_plan(spanwise.SpanMask.causal(2), 3, balancer="contiguous"))


def test_attention_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    class Routing:
        @classmethod
        def from_fragments(cls, **given: Any) -> dict[str, Any]:
            return given

    module = ModuleType("attn_gym.linear.context_parallel")
    module.ContextParallelRouting = Routing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plan = _plan("head_tail")

    def on_rank(rank: int, mesh: Any) -> Any:
        return linear_attention.attention_gym_routing(plan, mesh, "cpu")

    wanted = {"cu_seqlens_global": [0, 5, 24], "fragments": [[(0, 6), (18, 24)], [(6, 18)]], "device": "cpu"}
    for rank, given in enumerate(run_ranks(2, on_rank)):
        assert given == wanted | {"cp_rank": rank, "conv_history": 3}
    del Routing.from_fragments
    with pytest.raises(NotImplementedError, match="install a newer one"):
        run_ranks(2, on_rank)


@pytest.mark.parametrize("name", ["conv1d_kernel_size", "kernel_size"])
def test_flash_linear_attention(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def build(cu_seqlens, group, {name}=None, cu_seqlens_cpu=None): return locals()", namespace)
    module = ModuleType("fla.ops.cp")
    module.build_cp_context = namespace["build"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def on_rank(rank: int, mesh: Any, plan: spanwise.Plan) -> Any:
        given = linear_attention.flash_linear_attention_context(plan, mesh, "cpu")
        return given["cu_seqlens"], given["cu_seqlens_cpu"], given["group"].size(), given[name]

    for offsets, on_host, size, width in run_ranks(2, on_rank, _plan("contiguous")):
        assert torch.equal(offsets, torch.tensor([0, 5, 24], dtype=torch.int32)) and torch.equal(offsets, on_host)
        assert (size, width) == (2, 4)
    for plan in (_plan("head_tail"), _plan("contiguous", 23)):
        with pytest.raises(ValueError, match="contiguous shards of equal length"):
            run_ranks(2, on_rank, plan)
