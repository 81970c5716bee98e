"""Code that only CUDA tensors reach, on a machine without CUDA: with fake tensors where torch allows it, or stand-ins.

Fake CUDA tensors go through most operators of a torch without CUDA. Not through Python's indexing, autograd and
Dynamo's FlexAttention: "PyTorch is not linked with support for cuda devices".
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

import spanwise
from benchmarks.gpu.clock import seconds
from spanwise import SpanMask, _torch
from spanwise.attention.kernels import flex as flex_module
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from spanwise.calibrate import measure
from spanwise.calibrate.rates import Ranks
from spanwise.cli.ranks import join_torchrun
from spanwise.overlap.costs import timing

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 3])
def test_varlen_attention_of_pretended_cuda_tensors(dtype: torch.dtype, ranks: int) -> None:
    mask = SpanMask.documents([0, 100, 300])
    plan = spanwise.make_plan(mask, ranks, block_size=16, exchange="needed", stages=1)
    with FakeTensorMode():
        local = build(plan, 1 % ranks, CUDA, kernel=KERNELS["varlen"])
        tokens = local.tokens.shape[1]
        for chunk in local.chunks["default"]:
            q = torch.empty(2, 4, tokens, 64, device=CUDA, dtype=dtype)
            k, v = (torch.empty(2, 2, chunk.kv_pos.shape[1], dim, device=CUDA, dtype=dtype) for dim in (64, 32))
            KERNELS["varlen"].check_device(CUDA, None)
            KERNELS["varlen"].check(q, k, v, chunk, AttentionOptions())
            out, lse = KERNELS["varlen"].attend(q, k, v, chunk, local.tokens, AttentionOptions(0.1))
            tables = chunk.tables
            of_tables = (tables.calls, tables.cu_seq_q, tables.cu_seq_k, tables.rows, tables.keys)
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


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_largest_scores_of_flex(softcap: float | None) -> None:
    """The form for CUDA on CPU tensors, with a stand-in for FlexAttention, which reports no largest score on a CPU."""
    length = 256
    rows = np.arange(length)
    read = rows % 5 > 0  # others have no key
    mask = SpanMask(np.where(read, rows // 2, 0)[None], np.where(read, rows + 1, 0)[None], length)
    chunk = build(spanwise.make_plan(mask, 1), 0, kernel=KERNELS["flex"]).chunks["default"][0]
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, length, 32, generator=draw) for n in (4, 2))

    original = flex_module.flex_attention

    def flex_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, AuxOutput]:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        assert given["enable_gqa"] and given["return_aux"] == AuxRequest(max_scores=True)
        assert min(given["value"].shape[2:]) >= 16  # what the kernel takes
        b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, length, length)), indexing="ij")
        keys = given["key"].repeat_interleave(2, 1)
        scores = given["scale"] * given["query"] @ keys.transpose(2, 3)
        if given["score_mod"] is not None:
            scores = given["score_mod"](scores, b, h, i, j)
        inside = given["block_mask"].mask_mod(b, h, i, j)
        largest = scores.masked_fill(~inside, -torch.inf).amax(3)
        return given["value"], AuxOutput(max_scores=largest.masked_fill(largest.isinf(), 1e4))  # a row without a key

    arguments = chunk, torch.arange(length)[None], AttentionOptions(0.3, None, softcap)
    with mock.patch.dict(flex_module._largest.__globals__, {"flex_attention": flex_attention}):
        got = flex_module._largest(q, k, *arguments)
    scores = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    inside = torch.from_numpy(mask.dense())[:, None]
    want = scores.masked_fill(~inside, -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


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
