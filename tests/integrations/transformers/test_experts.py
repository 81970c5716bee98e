"""Experts spread over the ranks of the cp mesh by transformers' own expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.gloo import GlooPool


def _step(rank: int, mesh: Any, folder: Path, batch: dict[str, Any]) -> Any:
    config = DistributedConfig(fsdp_size=mesh.size(), ep_size=mesh.size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).train()
    experts = model.model.layers[-1].mlp.experts
    hf.context_parallel(model, mesh)
    return experts.num_experts, tiny.step(model, batch)


@pytest.mark.parametrize("name", ["mixtral, auxiliary loss", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_experts_on_the_cp_mesh(gloo_pool: GlooPool, tmp_path: Path, name: str) -> None:
    documents, model = tiny.documents_of((23, 41, 7, 30)), tiny.model_of(name)
    model.save_pretrained(tmp_path)
    want = tiny.reference(model, documents)
    results = gloo_pool.run(4, _step, tmp_path, tiny.packed(documents))
    for experts, result in results:
        assert experts == 1  # of four
        tiny.check([result], want)
