"""Compiled Hugging Face models: exact, and as many graphs as kinds of masks, for any packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.gloo import GlooPool

pytestmark = [pytest.mark.compiles, pytest.mark.slow]

PACKINGS = [
    tiny.documents_of(n, seed=i) for i, n in enumerate([(31, 20, 40), (12, 50, 30), (70, 9, 18, 33), (20,) * 5])
]


def _compiled(rank: int, mesh: Any, name: str, how: str) -> Any:
    """Steps of a model whose layers are compiled, also with states in another layout, or of a compiled model."""
    torch._dynamo.reset()  # processes are reused
    model = hf.context_parallel(tiny.model_of(name), mesh)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True) if how == "whole" else model
    for layer in model.base_model.layers if how != "whole" else ():
        layer.compile(backend=counter, fullgraph=True)
    results, graphs = [], []
    for batch in (tiny.packed(d) for d in PACKINGS):
        model.zero_grad()
        if how == "relaid":
            plan = hf.make_plan(batch, model.config, mesh.size(), balancer="head_tail", block_size=4)
            batch = hf.prepare(batch, model, plan.replace(relayout=True))
        loss = run(**(hf.prepare(batch, model) if how == "whole" else batch)).loss
        loss.backward()
        results.append((loss.item(), tiny.gradients(model)))
        graphs.append(counter.frame_count)
    return results, graphs


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "layers") for name in ("gemma3", "qwen3_next", "minicpm3")),
        *((name, "whole") for name in ("gemma3", "mamba", "jamba")),
        ("qwen3_next", "relaid"),
    ],
)
def test_compiled(gloo_pool: GlooPool, name: str, how: str) -> None:
    results = gloo_pool.run(2, _compiled, name, how)
    for index, documents in enumerate(PACKINGS):
        tiny.check([result[0][index] for result in results], tiny.reference(tiny.model_of(name), documents))
    kinds = {"layers": 1 if name == "minicpm3" else 2, "whole": 1}.get(how, 0)
    for _, graphs in results:  # a graph a kind of layer, once more when the shard's length changes, and never again
        assert not kinds or (graphs[0] == kinds and graphs[2] == graphs[3] == 2 * kinds)
