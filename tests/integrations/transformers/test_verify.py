"""hf.verify: what users run on their own model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import spanwise
from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_exact import BLOCKS, block_model
from tests.ranks.gloo import GlooPool

DOCUMENTS = tiny.documents_of((23, 41, 7))
BATCH = tiny.packed(DOCUMENTS)


def _verify(model: Any, batch: dict[str, Any], plan: Any = None) -> Any:
    held = torch.ones_like(model.get_output_embeddings().weight)
    model.get_output_embeddings().weight.grad = held
    report = hf.verify(model, batch, plan=plan)
    assert model.training and model.get_output_embeddings().weight.grad is held
    return report


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gemma3", "position_ids"), ("gemma3", "left"), ("qwen3_moe", "position_ids"), ("qwen3_next", "position_ids"),
        *(pytest.param(name, "position_ids", marks=pytest.mark.slow) for name in ("mamba2", "jamba")),
        ("gemma3", "blocks"), ("hrm_text", "blocks"),
    ],
)  # fmt: skip
def test_models_are_verified(name: str, form: str) -> None:
    """Blocks: each document alone, with its marks; a packed forward would join the prefixes of all documents."""
    batch = BATCH if form == "blocks" else tiny.batch_of(DOCUMENTS, form)
    if form == "blocks":
        batch = batch | {BLOCKS[name][0]: torch.cat([torch.arange(len(d)) < 5 for d in DOCUMENTS])[None].long()}
    for report in tiny.train(block_model(name) if form == "blocks" else name, batch, act=_verify):
        assert report.ok and max(report.errors.values()) < 1e-5, str(report)


def _sharded(rank: int, mesh: Any) -> Any:
    model = fully_shard(hf.context_parallel(tiny.model_of("llama"), mesh), mesh=mesh)
    reports = [hf.verify(model, BATCH) for _ in range(2)]
    model(**BATCH).loss.backward()
    return reports[1]


def test_models_under_fsdp_are_verified(gloo_pool: GlooPool) -> None:
    for report in gloo_pool.run(2, _sharded, timeout=120):
        assert report.ok and max(report.errors.values()) < 1e-5, str(report)


def test_another_mask_and_wrong_positions_are_found() -> None:
    """All documents as one: rows read documents before theirs. Positions right for a document, wrong for a shard."""
    plan = spanwise.make_plan({"full_attention": spanwise.SpanMask.causal(71)}, 2, cu_seqlens=[0, 23, 64, 71])
    for report in tiny.train("llama", BATCH, act=lambda model, batch: _verify(model, batch, plan)):
        assert not report.ok and report.errors["logits"] > 0.01 and report.errors["parameters"] > 0.01

    def from_zero(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"]
        return args, kwargs | {"position_ids": torch.arange(positions.shape[1]).expand_as(positions)}

    def act(model: Any, batch: Any) -> Any:
        model.model.rotary_emb.register_forward_pre_hook(from_zero, with_kwargs=True)
        return _verify(model, batch)

    assert not any(report.ok for report in tiny.train("llama", BATCH, act=act))
