"""`graph_pass` in the pipeline of torchtitan's graph trainer, on the graphs of its tracer and its SimpleFSDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip(
    "torchtitan.experiments.graph_trainer", reason="torchtitan (Python 3.11), or triton, is not installed"
)

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
from torchtitan.experiments.graph_trainer.passes import (
    apply_graph_passes,
    canonicalize_graph_pass,
    deduplicate_fsdp_unshard_chains_pass,
    eliminate_dead_code_pass,
)
from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY, register_pass_pipeline
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel
from torchtitan.models.common.attention import ScaledDotProductAttention

import spanwise
from spanwise import overlap
from spanwise.overlap import _torch
from tests.integrations.torchtitan import tiny
from tests.ranks.gloo import GlooPool


def _apply(traced: Any, results: list[overlap.Result]) -> Any:
    """The graph after what a user registers: torchtitan's own clean-up, then the pass."""

    @register_pass_pipeline("spanwise")
    def passes(traced: Any, config: Any, *, parallel_dims: Any = None) -> list[Any]:
        clean = [eliminate_dead_code_pass, canonicalize_graph_pass, deduplicate_fsdp_unshard_chains_pass]
        return [*clean, overlap.graph_pass(cost=spanwise.H100, on_result=results.append, bucket=False)]

    made = PASS_PIPELINE_REGISTRY.pop("spanwise")(traced, SimpleNamespace())
    return apply_graph_passes(traced.gm, traced.example_inputs, list(made))


def _traced(mesh: DeviceMesh) -> Any:
    """Model, optimizer, the traced step, its inputs; the same weights on every rank."""
    model = data_parallel(tiny.model_of(ScaledDotProductAttention), mesh, "fully_shard")
    params = list(model.parameters())
    adam = torch.optim.AdamW(params, lr=1e-3, foreach=True)
    for p in params:
        p.grad = torch.zeros_like(p)
    adam.step()  # makes its state
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    tokens, labels = (torch.randint(0, 2048, (2, 32), generator=generator) for _ in range(2))

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = cross_entropy_loss(model(tokens), labels) / labels.numel()
        named = [p for _, p in model.named_parameters(remove_duplicate=False)]
        grads = torch.autograd.grad(loss, named)
        for p, grad in zip(named, grads, strict=True):
            p.grad = grad
        adam.step()
        for p in named:
            p.grad = None
        return [loss.detach()]

    options = {"module": model, "optimizer": adam}
    return minimal_fx_tracer(step, **options)(tokens, labels), options, (tokens, labels)


def test_the_pipeline_on_fake_ranks() -> None:
    results: list[overlap.Result] = []
    dist.init_process_group("fake", rank=0, world_size=8, store=_torch.fake_store())
    try:
        traced, _, _ = _traced(init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",)))
        _apply(traced, results)
    finally:
        dist.destroy_process_group()
    (result,) = results
    assert result.barriers == () and len(result.before.dag.starts) > 30
    assert (
        result.timeline.makespan < result.before.makespan <= 1.2 * result.timeline.makespan + result.before.exposed_ms
    )
    assert result.timeline.makespan <= 1.01 * result.bounds.makespan


def _steps(rank: int, mesh: DeviceMesh, scheduled: bool) -> list[torch.Tensor]:
    traced, options, inputs = _traced(mesh)
    if scheduled:
        traced.gm = _apply(traced, [])
    with torch.no_grad():
        losses = [run_traced(traced, **options)(*inputs)[0] for _ in range(3)]
    return [*losses, *(p.to_local() for p in options["module"].parameters())]


def test_steps_of_the_pipeline_are_the_steps(gloo_pool: GlooPool) -> None:
    expected = gloo_pool.run(2, _steps, False)
    for got, want in zip(gloo_pool.run(2, _steps, True), expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        assert got[2] < got[0]
