"""Module paths of version 0.1 still work, and warn."""

from __future__ import annotations

import importlib

import pytest
import torch

import spanwise
from spanwise import _moved


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("cost", "H100", spanwise.H100),
        ("cost", "Hardware", spanwise.Hardware),
        ("mask", "SpanMask", spanwise.SpanMask),
        ("layout", "Layout", spanwise.Layout),
        ("packing", "Packing", spanwise.Packing),
        ("balancers", "LayoutProblem", spanwise.LayoutProblem),
        ("balancers", "LoadBalancer", spanwise.LoadBalancer),
        ("plan", "Plan", spanwise.Plan),
        ("planner", "make_plan", spanwise.make_plan),
        ("rank_plan", "RankPlan", spanwise.RankPlan),
        ("parallel", "ContextParallel", spanwise.ContextParallel),
        ("packed", "packed_attention", spanwise.packed_attention),
        ("ptrr", "ptrr_schedule", spanwise.ptrr_schedule),
        ("thd_order", "contiguous_to_dualchunk_order_thd", spanwise.contiguous_to_dualchunk_order_thd),
        ("attention", "context_parallel_attention", spanwise.context_parallel_attention),
        ("attention", "AuxRequest", spanwise.AuxRequest),
        ("batch", "shard_batch", spanwise.shard_batch),
        ("batch", "cross_entropy", spanwise.cross_entropy),
    ],
)
def test_old_paths_work_and_warn(module: str, name: str, value: object) -> None:
    with pytest.warns(DeprecationWarning, match=rf"spanwise\.{module}\.{name} is now spanwise\."):
        assert getattr(importlib.import_module(f"spanwise.{module}"), name) is value
    with pytest.warns(DeprecationWarning):
        assert getattr(getattr(spanwise, module), name) is value


def test_every_old_module_is_tried_above() -> None:
    tried = {mark.args[1][i][0] for mark in test_old_paths_work_and_warn.pytestmark for i in range(len(mark.args[1]))}  # type: ignore[attr-defined]
    assert set(_moved.MODULES) <= tried


def test_names_that_never_were_are_errors() -> None:
    with pytest.raises(AttributeError, match=r"'spanwise.cost' has no attribute 'H400'; .* spanwise.hardware"):
        importlib.import_module("spanwise.cost").H400  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        spanwise.attention.torch  # noqa: B018
    with pytest.raises(AttributeError, match="module 'spanwise' has no attribute 'costs'"):
        spanwise.costs  # noqa: B018


def test_the_old_name_of_mask_name_works_and_warns() -> None:
    masks = {"near": spanwise.SpanMask.sliding_window(8, 1), "far": spanwise.SpanMask.causal(8)}
    plan = spanwise.make_plan(masks, 1)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    attend, packed = spanwise.context_parallel_attention, spanwise.packed_attention
    thd = [x[0].transpose(0, 1) for x in (q, k, v)]
    warns = pytest.warns(DeprecationWarning, match="mask='near' is now mask_name='near'; the old name goes with")
    with warns as seen:
        assert torch.equal(attend(q, k, v, plan, None, mask="near"), attend(q, k, v, plan, mask_name="near"))
    assert seen[0].filename == __file__
    with warns as seen:
        assert torch.equal(packed(*thd, plan, None, mask="near"), packed(*thd, plan, mask_name="near"))
    assert seen[0].filename == __file__
    with warns as seen:
        assert spanwise.ContextParallel(mask="near").mask_name == "near"
    assert seen[0].filename == __file__
    with warns:
        spanwise.verify(
            lambda q, k, v, p: attend(q, k, v, p, mask_name="near"), plan, None, mask="near"
        ).raise_if_failed()
    with pytest.raises(ValueError, match="mask_name='far' and its old name mask='near' were both given"):
        attend(q, k, v, plan, mask="near", mask_name="far")
    with pytest.raises(ValueError, match="is now mask_name=; got a SpanMask"):
        attend(q, k, v, plan, mask=masks["near"])
