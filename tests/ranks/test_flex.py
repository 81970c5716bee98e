"""The flex kernel behind context_parallel_attention, on torch's dense stand-in for FlexAttention and gloo ranks."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise import SpanMask
from spanwise.attention.kernels import flex as flex_module
from tests.properties.cases import Case, check, on_rank
from tests.ranks.gloo import GlooPool
from tests.ranks.test_attention import packing

LENGTH = 300  # not a whole number of blocks on any rank
PADDED = packing([5, 0, 100], [0, 16, 32], 150)
CASES = {
    "all_gather": Case({"default": SpanMask.documents([0, 30, 31, 170, LENGTH])}, exchange="all_gather",
                       balancer="head_tail"),
    "needed": Case({"default": SpanMask.documents([0, 130, LENGTH], window=(40, 3), causal=False)}, stages=2,
                   balancer="lpt"),
    # The last block of keys is full, but for spare keys behind it.
    "refetched": Case({"default": SpanMask.full(LENGTH)}, stages=2, keep_kv=False),
    "padded": Case({"default": PADDED[0]}, packing=PADDED[1], balancer="lpt", exchange="ring"),
}  # fmt: skip


def on_flex(rank: int, mesh: DeviceMesh, case: Case, *given: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    with (
        warnings.catch_warnings(),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")),
        mock.patch.object(flex_module.Flex, "check_device", lambda *_: None),
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
    ):
        warnings.simplefilter("ignore")  # of Dynamo, which reads .grad of what is no leaf
        found = on_rank(rank, mesh, case, *given)
    flex_module._compiled.cache_clear()
    return found


@pytest.mark.parametrize("name", [x if x != "all_gather" else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_matches_one_device(gloo_pool: GlooPool, name: str) -> None:
    options: dict[str, Any] = {"levels": (2, 1), "kernel": "flex", "dtype": "float32", "dims": (16, 16)}
    case = dataclasses.replace(CASES[name], rank_plan=False, **options)
    check(case, lambda num_ranks, _, *given, **mesh: gloo_pool.run(num_ranks, on_flex, *given, **mesh))
