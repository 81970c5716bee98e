"""Activations in host memory: the same numbers with memory that is freed, the budget kept, and time against a rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.overlap_llama import prefetched
from spanwise import H100, overlap
from spanwise.overlap.costs.roofline import CostModel
from spanwise.overlap.fx.graph import to_dag
from spanwise.overlap.offload import activations, choices, with_copies
from tests.overlap.programs import Program, one, programs, run, same, traced

pytest.importorskip("torch._functorch._activation_offloading.offload_ops", reason="this torch has no offloads")
AO = torch.ops.ao


def freed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The wait of a copy: the source's memory is garbage from now on, as another tensor may get it."""
    source.fill_(77 if not source.dtype.is_floating_point else torch.nan)
    return x.view(x.shape)


def compact(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def strided(x: torch.Tensor, device: Any, size: Any = None, stride: Any = None) -> torch.Tensor:
    return torch.empty_strided(size or x.shape, stride or x.stride(), dtype=x.dtype).copy_(x)


ON_CPU = {AO.offload.default: compact, AO.reload.default: strided, AO.wait_tensor.default: freed}


def on_cpu(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with copies that run without an accelerator."""
    for node in gm.graph.nodes:
        node.target = ON_CPU.get(node.target, node.target)
    gm.recompile()
    return gm


def values(gm: fx.GraphModule, inputs: Any, late: bool) -> list[torch.Tensor]:
    """Results without their strides, which fake tensors get wrong for dims of size 1 (torch 2.13)."""
    return [compact(x) for x in run(gm, inputs, late=late)]


@settings(max_examples=60)
@given(programs(), st.integers(0, 2**32 - 1))
def test_what_comes_back_is_what_left(program: Program, seed: int) -> None:
    gm, inputs = traced(program)
    captured, rng = to_dag(gm, one), np.random.default_rng(seed)
    found = activations(captured)
    chosen = [activation for activation in found if rng.random() < 0.7]
    made = with_copies(gm, captured, chosen)
    made.graph.lint()
    assert len(to_dag(made, one).dag) >= len(captured.dag) + 4 * len(chosen)
    for late in (False, True):
        same(values(on_cpu(with_copies(gm, captured, chosen)), inputs, late), values(gm, inputs, late))
    result = overlap.optimize(made, one)  # any order of the search is as right
    same(values(on_cpu(result.graph_module), inputs, True), values(gm, inputs, False))


def step() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Forward and backward of a small network with views and layer norms, in one graph."""

    def function(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        leaves = [w.detach().requires_grad_() for w in weights]
        for w in leaves:
            x = torch.nn.functional.layer_norm(torch.tanh(x @ w), (64,)) + x
        return torch.autograd.grad(x.square().sum(), leaves)

    torch.manual_seed(0)
    given = [torch.randn(256, 64), *(torch.randn(64, 64) / 8 for _ in range(6))]
    return make_fx(function, tracing_mode="fake")(*given), given


COST = CostModel(dataclasses.replace(H100, to_host=25e9, from_host=25e9), rates={torch.float32: 1e-3})


@pytest.mark.parametrize("percent", [90, 50])
def test_a_step_fits_a_budget_below_its_peak(percent: int) -> None:
    gm, given = step()
    before = overlap.simulate(gm, COST)
    budget = before.peak_bytes * percent // 100
    result = overlap.optimize(gm, COST, memory_budget=budget, offload=True)
    assert result.timeline.peak_bytes <= budget and result.before.makespan == before.makespan
    assert result.timeline.peak_bytes == to_dag(result.graph_module, COST).dag.peak_bytes()
    assert result.offloaded is not None and f"{len(result.offloaded.num_bytes)} activations" in result.report()
    for x, y in zip(on_cpu(result.graph_module)(*given), gm(*given), strict=True):
        assert torch.equal(x, y)
    made = overlap.graph_pass(cost=COST, memory_budget=budget, offload=True)(gm, given)  # without collectives
    assert overlap.simulate(made, COST).peak_bytes <= budget
    # Never longer than PyTorch's rule on the same activations, where that fits: reloads as early as their time asks.
    rule = prefetched(gm, COST, budget)
    assert rule is None or result.timeline.makespan <= rule + 1e-9


def test_nothing_leaves_where_everything_fits_and_too_much_is_refused() -> None:
    gm, _ = step()
    budget = overlap.simulate(gm, COST).peak_bytes
    result, plain = (overlap.optimize(gm, COST, memory_budget=budget, offload=on) for on in (True, False))
    assert result.offloaded is None and result.timeline.makespan == plain.timeline.makespan
    assert list(choices(to_dag(gm, COST), budget)) == []
    for options in ({"memory_budget": 1000}, {}, {"memory_budget": 10**9, "split": True}):
        with pytest.raises(ValueError, match="do not take so much|memory_budget"):
            overlap.optimize(gm, COST, offload=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="graph_pass"):
        overlap.backend("aot_eager", cost=COST, memory_budget=10**9, offload=True)
