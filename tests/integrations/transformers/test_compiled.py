"""Compiled Hugging Face models: exact, and as many graphs as kinds of masks, for any packing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.gloo import GlooPool

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

PACKINGS = [
    tiny.documents_of(n, seed=i) for i, n in enumerate([(31, 20, 40), (12, 50, 30), (70, 9, 18, 33), (20,) * 5])
]


def _layers(rank: int, mesh: Any, name: str, batches: list[dict[str, Any]]) -> Any:
    torch._dynamo.reset()  # processes are reused
    model = hf.context_parallel(tiny.model_of(name), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.base_model.layers:
        layer.compile(backend=counter, fullgraph=True)
    results, graphs = [], []
    for batch in batches:
        model.zero_grad()
        results.append(tiny.step(model, batch))
        graphs.append(counter.frame_count)
    return results, graphs


def _whole(rank: int, mesh: Any, name: str, batches: list[dict[str, Any]]) -> Any:
    torch._dynamo.reset()  # processes are reused
    model = hf.context_parallel(tiny.model_of(name), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    results, graphs = [], []
    for batch in batches:
        model.zero_grad()
        loss = compiled(**hf.prepare(batch, model)).loss
        loss.backward()
        results.append((loss.item(), tiny.gradients(model)))
        graphs.append(counter.frame_count)
    return results, graphs


def _compare(name: str, results: list[Any]) -> None:
    for index, documents in enumerate(PACKINGS):
        tiny.check([result[0][index] for result in results], tiny.reference(tiny.model_of(name), documents))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_compiled_layers(gloo_pool: GlooPool, name: str) -> None:
    results = gloo_pool.run(2, _layers, name, [tiny.packed(d) for d in PACKINGS])
    _compare(name, results)
    for _, graphs in results:
        # Layers of two kinds: a graph a kind, once more when the shard's length changes, and never again.
        assert graphs[0] == 2 and graphs[2] == graphs[3] == 4


@pytest.mark.parametrize("name", ["gemma3", "mamba", "jamba"])
def test_compiled_model(gloo_pool: GlooPool, name: str) -> None:
    results = gloo_pool.run(2, _whole, name, [tiny.packed(d) for d in PACKINGS])
    _compare(name, results)
    for _, graphs in results:
        assert graphs[0] == 1 and graphs[2] == graphs[3] == 2


def _relaid(rank: int, mesh: Any, name: str, batches: list[dict[str, Any]]) -> Any:
    torch._dynamo.reset()  # processes are reused
    model = hf.context_parallel(tiny.model_of(name), mesh)
    for layer in model.base_model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    results = []
    for batch in batches:
        model.zero_grad()
        plan = hf.make_plan(batch, model.config, mesh.size(), balancer="head_tail", block_size=4)
        results.append(tiny.step(model, hf.prepare(batch, model, plan.replace(relayout=True))))
    return results, []


def test_compiled_layers_with_a_layout_of_their_own(gloo_pool: GlooPool) -> None:
    _compare("qwen3_next", gloo_pool.run(2, _relaid, "qwen3_next", [tiny.packed(d) for d in PACKINGS]))
