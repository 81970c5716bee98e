"""Code that only CUDA tensors reach, on a machine without CUDA: with fake tensors where torch allows it, or stand-ins.

Fake CUDA tensors go through most operators of a torch without CUDA. Not through Python's indexing, autograd and
Dynamo's FlexAttention: "PyTorch is not linked with support for cuda devices".
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import spanwise
from benchmarks.gpu.device import seconds
from spanwise import SpanMask, _torch
from spanwise._torch import storage_id, tree_leaves
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.merge import not_saving
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from spanwise.calibrate import measure
from spanwise.calibrate.rates import Ranks
from spanwise.cli.ranks import join_torchrun
from spanwise.overlap.costs import timing
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


def test_one_rank_attends_through_the_public_function() -> None:
    plan = spanwise.make_plan(SpanMask.causal(70), 1)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 4, 70, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
        local = build(plan, 0, CUDA, kernel=KERNELS["varlen"])
        request = spanwise.AuxRequest(lse=True)
        out, aux = spanwise.context_parallel_attention(q, k, v, local, None, kernel="varlen", return_aux=request)
    assert out.device == aux.lse.device == CUDA and out.shape == q.shape


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


# ---------------------------------------------------------------- with a stand-in for torch.cuda


class Event:
    """`torch.cuda.Event`: each one recorded is 2 ms after the one before."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 2.0
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def cuda() -> Iterator[types.SimpleNamespace]:
    """Calls of `torch.cuda` that need a device."""
    properties = types.SimpleNamespace(total_memory=1 << 30, name="GPU")
    stand_ins = {
        "Event": Event,
        "synchronize": mock.Mock(),
        "device": mock.MagicMock(),
        "set_device": mock.Mock(),
        "current_device": lambda: 3,
        "get_device_name": lambda device=None: "GPU",
        "get_device_properties": lambda device=None: properties,
    }
    with mock.patch.multiple(torch.cuda, **stand_ins):
        yield types.SimpleNamespace(**stand_ins)


def test_time_by_events(cuda: types.SimpleNamespace) -> None:
    calls = []
    assert seconds(lambda: calls.append(1), torch.device("cuda")) == pytest.approx(2e-3)
    assert len(calls) == 1 and cuda.synchronize.call_count == 2
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda *size, device, **rest: empty(8, **rest)):
        assert timing.milliseconds(lambda: calls.append(1), CUDA, repeats=3) == pytest.approx(2.0)
    assert len(calls) == 1 + 2 + 3
    assert timing.name_of(CUDA) == f"GPU, torch {torch.__version__}"


def test_calibration_on_a_gpu(cuda: types.SimpleNamespace) -> None:
    group = types.SimpleNamespace(_device_types=[torch.device("cuda")])
    mesh = types.SimpleNamespace(size=lambda: 2, ndim=1, get_group=lambda: group, get_local_rank=lambda: 0)
    with mock.patch.object(dist, "get_process_group_ranks", lambda group: [0, 1]):
        ranks = Ranks(mesh, torch.device("cuda"))
    assert ranks.device == torch.device("cuda", 3)
    assert ranks.timed(lambda: 5)[1] == 5 and cuda.synchronize.call_args.args == (ranks.device,)
    assert measure._device_name(ranks.device) == "GPU" and measure._memory(ranks, 2) == 1 << 30
    assert _torch.comparison_device(group) == torch.device("cuda")  # NCCL alone carries nothing else


def test_rank_plans_are_built_on_the_current_device(cuda: types.SimpleNamespace) -> None:
    plan = spanwise.make_plan(SpanMask.causal(70), 1)
    local = build(plan, 0)
    with FakeTensorMode(), mock.patch("spanwise.attention.rank_plan.build", return_value=local) as built:
        plan.local(None, "cuda")
    assert built.call_args.args[2] == torch.device("cuda", 3) and built.call_args.kwargs["kernel"].name == "flex"


def test_ranks_of_gpus_join_with_nccl_and_gloo(cuda: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(dist, "init_process_group") as joined, mock.patch.object(torch, "set_num_threads"):
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        join_torchrun("cuda")
    assert joined.call_args.args == ("cpu:gloo,cuda:nccl",) and cuda.set_device.call_args.args == (1,)
