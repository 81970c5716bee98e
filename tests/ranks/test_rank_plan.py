"""A rank plan carries its mesh and its positions through everything that a model's arguments go through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_flatten, tree_map

import spanwise
from spanwise import Packing, SpanMask
from spanwise.attention.rank_plan import build
from tests.oracle import make_problem, relative_error
from tests.pairs import named
from tests.ranks.calls import HOSTS, errors, step
from tests.ranks.harness import run_ranks

CU = [0, 11, 12, 40, 67]


def tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def plan_of(num_ranks: int | tuple[int, int], **way: Any) -> spanwise.Plan:
    options: dict[str, Any] = {"balancer": "lpt", "exchange": "needed", "block_size": 4, "cu_seqlens": CU} | way
    return spanwise.make_plan(SpanMask.documents(CU), num_ranks, **options)


@pytest.mark.parametrize(
    ("num_ranks", "exchange"), [(2, "needed"), ((2, 2), "needed"), ((3, 1), "needed"), ((3, 1), "ring")]
)
def test_no_call_needs_the_mesh_again(num_ranks: Any, exchange: str) -> None:
    plan = plan_of(num_ranks, exchange=exchange)
    problem = make_problem(plan.mask().dense())
    whole = torch.arange(CU[-1])[None]

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        if isinstance(num_ranks, tuple):
            mesh = init_device_mesh("cpu", num_ranks, mesh_dim_names=("outer", "inner"))
        local = plan.local(mesh)
        assert local.mesh is mesh and plan.local(mesh) is local
        assert torch.equal(spanwise.shard(local, x=problem.q, dim=2), spanwise.shard(local, None, problem.q, 2))
        got = step(local, None, problem)
        assert max(errors(plan, rank, problem, got)) <= 1e-10
        packed = spanwise.packed_attention(*(spanwise.shard(local, x=x[0].transpose(0, 1), dim=0)
                                             for x in problem[:3]), local)  # fmt: skip
        assert relative_error(packed, got[0][0].transpose(0, 1)) <= 1e-12
        assert torch.equal(spanwise.unshard(local, x=local.tokens), whole)
        assert torch.equal(
            spanwise.roll(local.tokens, -1, local, cu_seqlens=CU), spanwise.roll(local.tokens, -1, plan, mesh)
        )
        batch = spanwise.shard_batch({"input_ids": whole}, local, cu_seqlens=CU)
        assert torch.equal(batch["position_ids"], local.positions)
        assert torch.equal(local.positions[0], torch.from_numpy(Packing(CU).positions())[local.tokens[0]])

    run_ranks(plan.num_ranks, on_rank)


def test_another_mesh_is_an_error_and_copies_share_the_own() -> None:
    plan = plan_of(2)
    shards = [torch.randn(1, 2, plan.layout.num_tokens(rank), 8) for rank in range(2)]

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        local, q = plan.local(mesh["cp"]), shards[rank]
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        for call, names in (
            (lambda: spanwise.context_parallel_attention(q, q, q, local, other), "cp.*other"),
            (lambda: spanwise.unshard(local, other, local.tokens), "cp.*other"),
            *((lambda given=given: spanwise.shard(given, local.tokens), "got a Tensor") for given in (local, plan)),
            (lambda: spanwise.context_parallel_attention(q, q, q, build(plan, rank)), "2 ranks .*mesh=None"),
            (lambda: spanwise.context_parallel_attention(q, q, q, plan), "2 ranks .*mesh=None"),
        ):
            with pytest.raises(ValueError, match=names):
                call()
        out = spanwise.context_parallel_attention(q, q, q, local)
        for given in (mesh["cp"], mesh):  # equal ones, positionally as before
            assert torch.equal(out, spanwise.context_parallel_attention(q, q, q, local, given))
        assert torch.equal(out, spanwise.context_parallel_attention(q, q, q, build(plan, rank), mesh))
        assert plan.local(other).mesh is other  # not the one built before
        holder = nn.Linear(2, 2)
        holder.plan = local
        for copied in (copy.copy(local), copy.deepcopy(holder).plan, tree_map(lambda x: x, local)):
            assert copied is not local and copied.mesh is local.mesh
            assert torch.equal(copied.positions, local.positions)
        assert copy.deepcopy(local).tokens is not local.tokens
        assert tree_flatten(local)[1] == tree_flatten(copy.deepcopy(local))[1]
        with FakeTensorMode():
            fake = plan.local(mesh)
            assert isinstance(fake.positions, FakeTensor) and fake.mesh is mesh
            assert spanwise.shard(fake, x=torch.zeros(1, CU[-1])).shape == fake.positions.shape
        assert not isinstance(plan.local(mesh).positions, FakeTensor)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("length", [1, 67])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "flex", "varlen"])
@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_tensors_are_plain_after_a_first_use_in_another_mode(mode: Any, kernel: str, length: int) -> None:
    """Inside the mode they are of its kind."""
    plan = spanwise.make_plan({"a": SpanMask.causal(length), "b": SpanMask.full(length)}, 1, block_size=8)
    for _ in range(2):  # fake tensors of one mode are refused by the next
        with mode():
            given = plan.local(None, "cpu", kernel=kernel)
            if kernel == "sdpa":
                spanwise.context_parallel_attention(*[torch.zeros(1, 2, length, 8)] * 3, given, mask_name="a")
    kept, inside = (tensors(tree) for tree in (plan.local(None, "cpu", kernel=kernel), given))
    assert len(kept) >= 6 and not any(x.is_inference() or isinstance(x, FakeTensor) for x in kept)
    assert [x.shape for x in inside] == [x.shape for x in kept]
    assert all(isinstance(x, FakeTensor) == (mode is FakeTensorMode) for x in inside)


MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_unbacked_indices")


@pytest.mark.parametrize("way", [{"exchange": "needed"}, {"exchange": "hierarchical", "hardware": HOSTS}], ids=named)
def test_sizes_that_change_from_plan_to_plan_are_marked(way: dict[str, Any]) -> None:
    """So that one graph serves all. Others bring as many keys under each mask."""
    masks = [SpanMask.sliding_window(72, reads) for reads in (10, 13)]
    plans = [spanwise.make_plan(mask, 4, balancer="contiguous", block_size=1, **way) for mask in masks]

    def on_rank(rank: int, mesh: DeviceMesh) -> list[Any]:
        return [tensors(plan.local(mesh, kernel="sdpa").chunks["default"]) for plan in plans]

    changed = 0
    for each in run_ranks(4, on_rank):
        for first, second in zip(*each, strict=True):
            for dim in [dim for dim in range(first.dim()) if first.shape[dim] != second.shape[dim]]:
                assert all(any(dim in getattr(x, name, ()) for name in MARKS) for x in (first, second))
                changed += 1
    assert changed


def test_tensors_of_a_rank_take_memory_by_its_own_tokens() -> None:
    tokens, num_ranks = 2**20, 64
    mask = SpanMask.documents(range(0, tokens + 1, 2**14))
    plan = spanwise.make_plan(mask, num_ranks, balancer="head_tail", exchange="needed")
    local = build(plan, 3)
    assert sum(x.nbytes for x in tensors(local)) < 80 * local.tokens.numel()  # indices of all are 8 * 64 a token
    assert torch.equal(local.restore, torch.from_numpy(plan.layout.slots()))
