"""Models whose indexers pick the keys of each query: exact on ranks, and unchanged without a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import indexed
from tests.integrations.transformers import tiny
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

DOCUMENTS = tiny.documents_of((23, 41, 7, 3, 30))
# Six keys a query; layers that share a selection (hy_v4), and sliding layers beside (dots3_note_text).
KINDS = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text"]


@pytest.mark.parametrize(
    ("kind", "ranks", "form"),
    [*((kind, 2 + i % 3, "packed") for i, kind in enumerate(KINDS)), (KINDS[0], 3, "left"), (KINDS[2], 2, "right")],
)
def test_exact(kind: str, ranks: int, form: str) -> None:
    batch = tiny.packed(DOCUMENTS) if form == "packed" else tiny.padded(DOCUMENTS, form)
    tiny.check(tiny.train(kind, batch, ranks), tiny.reference(tiny.model_of(kind), DOCUMENTS))


def test_selections_matter() -> None:
    """Or the tests above would show nothing."""
    all_keys = tiny.reference(tiny.model_of("deepseek_v32", index_topk=64), DOCUMENTS)
    with pytest.raises(AssertionError, match="differs"):
        tiny.check(tiny.train("deepseek_v32", tiny.packed(DOCUMENTS)), all_keys)


def _step(rank: int, mesh: Any, kind: str, batch: dict[str, Any], how: str) -> Any:
    model = hf.context_parallel(tiny.model_of(kind), mesh)
    if how == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), tiny.gradients(model)


@pytest.mark.parametrize(
    ("kind", "how"), [("deepseek_v32", "fsdp"), ("hy_v4", "checkpoint"), ("dots3_note_text", "reentrant")]
)
def test_beside_others(gloo_pool: GlooPool, kind: str, how: str) -> None:
    results = gloo_pool.run(2, _step, kind, tiny.packed(DOCUMENTS), how)
    tiny.check(results[:1] if how == "fsdp" else results, tiny.reference(tiny.model_of(kind), DOCUMENTS))


def test_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_SCORES", 100)
    batch = tiny.packed(DOCUMENTS)
    tiny.check(tiny.train("deepseek_v32", batch), tiny.reference(tiny.model_of("deepseek_v32"), DOCUMENTS))


@pytest.mark.parametrize(
    ("kind", "attention"), [(KINDS[0], "sdpa"), (KINDS[0], "eager"), *((k, None) for k in KINDS[1:])]
)
def test_unchanged_without_a_plan(kind: str, attention: str | None) -> None:
    batch = {"input_ids": torch.stack([DOCUMENTS[0], DOCUMENTS[1][:23]])}
    plain, *models = (model.eval() for model in tiny.copies(tiny.model_of(kind, attention=attention), 3))

    def outputs(rank: int, mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model = hf.context_parallel(models[rank], mesh)
        with torch.no_grad():
            return model(**batch).logits, model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)

    with torch.no_grad():
        logits, ids = plain(**batch).logits, plain.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    for got, new in run_ranks(2, outputs):
        assert torch.equal(got, logits) and torch.equal(new, ids)


def test_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="tree"):
        tiny.train("deepseek_v32", hf.share_prefixes(tiny.packed(DOCUMENTS)))
