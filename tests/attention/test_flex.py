"""The flex kernel without a GPU, on torch's dense form of FlexAttention: graphs, what is kept, refusals.

`test_kernels` compares its values and gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from spanwise.attention.kernels import flex as flex_module
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.flex import Flex
from spanwise.attention.kernels.merge import merge
from spanwise.masks.span_mask import SpanMask
from tests.attention.stand_ins import attend, chunk, dense_flex
from tests.attention.test_kernels import SHAPES, check, draw, random_mask, with_empty_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # of torch's own, on import
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # read by Dynamo
]
ROWS, OPTIONS = 200, AttentionOptions(0.3)
POSITIONS = torch.arange(ROWS, dtype=torch.int32)[None]
EXACT: dict[str, Any] = {"scale": 0.3, "softcap": None}


@pytest.fixture(autouse=True)
def dense() -> Iterator[None]:
    with dense_flex():
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def run(mask: SpanMask) -> None:
    """Exact out, lse and gradients."""
    inputs = draw(mask, SHAPES[0], torch.float32)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    check(inputs, mask, attend(Flex(), *leaves, mask, OPTIONS), leaves, "both", EXACT)


def plans(count: int) -> list[SpanMask]:
    """Masks of one number of queries, all different in the number of keys, with one to four spans a row."""
    return [random_mask(ROWS, 150 + 90 * i, 1 + i % 4, batch=1 if i % 4 == 0 else 2, seed=i) for i in range(count)]


def test_fourteen_plans_share_two_graphs() -> None:
    masks = plans(14)
    assert {mask.num_spans for mask in masks} == {1, 2, 3, 4}
    assert len({Flex().capacity(mask.kv_len) for mask in masks}) >= 10
    before = graphs()
    for mask in masks:
        run(mask)
    assert graphs() - before <= 2


def test_the_lse_of_an_empty_row_is_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a GPU may give another one than torch's dense form."""
    mask, original = with_empty_rows(SpanMask.causal(ROWS)), flex_module._flex
    empty = torch.from_numpy(mask.area()[0] == 0)

    def another(*args: Any) -> tuple[torch.Tensor, AuxOutput]:
        out, aux = original(*args)
        return out, aux._replace(lse=aux.lse.masked_fill(empty, 0.0))

    monkeypatch.setattr(flex_module, "_flex", another)
    run(mask)


def test_a_change_in_place_is_noticed() -> None:
    mask = SpanMask.causal(ROWS)
    inputs = draw(mask, SHAPES[0], torch.float32)
    q = inputs.q.requires_grad_() * 1
    part = Flex().attend_part(q, *chunk(Flex(), inputs.k, inputs.v, mask, POSITIONS), POSITIONS, OPTIONS)
    out, _ = merge([part])
    q.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_largest_scores(softcap: float | None) -> None:
    """The form for CUDA, with a stand-in for FlexAttention, which reports no largest score on a CPU."""
    mask, original = with_empty_rows(SpanMask.sliding_window(256, 30)), flex_module.flex_attention
    inputs = draw(mask, (4, 2, 32, 32), torch.float32)

    def flex_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, AuxOutput]:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        assert given["enable_gqa"] and given["return_aux"] == AuxRequest(max_scores=True)
        assert min(given["value"].shape[2:]) >= 16  # what the kernel takes
        b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 4, 256, 256)), indexing="ij")
        scores = given["scale"] * given["query"] @ given["key"].repeat_interleave(2, 1).mT
        scores = scores if given["score_mod"] is None else given["score_mod"](scores, b, h, i, j)
        largest = scores.masked_fill(~given["block_mask"].mask_mod(b, h, i, j), -torch.inf).amax(3)
        return given["value"], AuxOutput(max_scores=largest.masked_fill(largest.isinf(), 1e4))  # a row without a key

    kv_pos = torch.arange(256, dtype=torch.int32)[None]
    _, _, part = chunk(Flex(), inputs.k, inputs.v, mask, kv_pos)
    with mock.patch.dict(flex_module._largest.__globals__, {"flex_attention": flex_attention}):
        got = flex_module._largest(inputs.q, inputs.k, part, kv_pos, AttentionOptions(0.3, None, softcap))
    scores = 0.3 * inputs.q.double() @ inputs.k.double().repeat_interleave(2, 1).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    want = scores.masked_fill(~torch.from_numpy(mask.dense())[:, None], -torch.inf).amax((0, 2, 3))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


def test_sizes_and_refusals() -> None:
    assert [Flex().num_spans(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 17)] == [1, 1, 4, 4, 4, 8, 8, 16, 32]
    assert [Flex().capacity(n) for n in (0, 1, 128, 256, 257, 1000)] == [256, 256, 256, 256, 384, 1024]
    with pytest.raises(ValueError, match="cpu"):
        Flex().check_device(torch.device("cpu"), None)
    inputs = draw(SpanMask.causal(ROWS), SHAPES[0], torch.float64)
    part = chunk(Flex(), inputs.k, inputs.v, SpanMask.causal(ROWS), POSITIONS)[2]
    with pytest.raises(ValueError, match="float64"):
        Flex().check(*inputs[:3], part, OPTIONS)
    assert all(x.dtype == torch.int32 for x in torch.utils._pytree.tree_leaves(part.tables))
