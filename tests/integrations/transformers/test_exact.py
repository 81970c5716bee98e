"""Models, forms of batches, layouts and exchanges: loss and gradients are those of one document at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import every_model, tiny
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTHS = (23, 41, 7, 30, 1)
DOCUMENTS = tiny.documents_of(LENGTHS)
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local")
FORMS = ("cu_seq_lens_q", "left", "right", "seq_idx", "seq_idx alone")
# One of each way in which mixers compute, and in which plans reach them.
MIXERS = ("qwen3_next", "kimi_linear", "mamba2", "mamba", "jamba", "lfm2", "minimax")
# No layer tells these from models without experts but the auxiliary loss, which must not take the plan for a mask.
NO_ATTENTION: dict[str, dict[str, Any]] = {
    "jamba": dict(attn_layer_period=9, attn_layer_offset=8, output_router_logits=True, router_aux_loss_coef=0.1),
    "granitemoehybrid": dict(layer_types=["linear_attention"] * 3, output_router_logits=True, router_aux_loss_coef=0.1),
}


def _form(form: str, documents: tiny.Documents) -> dict[str, torch.Tensor]:
    if form in ("left", "right"):
        return tiny.padded(documents, form)
    if not form.startswith("seq_idx"):
        return tiny.packed(documents, form)
    batch = tiny.packed(documents)
    batch["seq_idx"] = torch.arange(len(documents)).repeat_interleave(torch.tensor([len(d) for d in documents]))[None]
    return {name: x for name, x in batch.items() if form == "seq_idx" or name != "position_ids"}


CASES: list[tuple[str, str, int, dict[str, Any]]] = [  # model, form, ranks, options
    *((name, "position_ids", 2, {}) for name in MIXERS),
    *((name, form, 2, {}) for name in ("llama", "gemma3", "qwen3_next", "mamba2") for form in FORMS[:3]),
    *(("lfm2", form, 2, {}) for form in FORMS[3:]),
    *(
        (name, "position_ids", 3, dict(balancer=balancer, block_size=4))
        for name in ("qwen2, sliding", "qwen3_5") for balancer in BALANCERS
    ),
    *(("gemma3", "position_ids", 2, dict(exchange=e)) for e in ("needed", "all_gather", "ring", "ulysses")),
    *(("bamba", "position_ids", 2, dict(exchange=e)) for e in ("all_gather", "ring", "ulysses")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "ranks", "options"), CASES, ids=str)
def test_batches(name: str, form: str, ranks: int, options: dict[str, Any]) -> None:
    model = tiny.model_of(name)
    tiny.check(tiny.train(model, _form(form, DOCUMENTS), ranks, **options), tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_an_auxiliary_loss_of_models_without_attention(name: str) -> None:
    model = tiny.model_of(name, **NO_ATTENTION[name])
    tiny.check(tiny.train(model, _form("position_ids", DOCUMENTS)), tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("by", ["attention_mask", "cu_seq_lens_q"])
def test_positions_that_skip_numbers(by: str) -> None:
    """As training for long contexts on short documents makes them."""
    (document,) = tiny.documents_of((40,))
    more = {"position_ids": torch.cat([torch.arange(25), torch.arange(60, 75)])[None]}
    more["attention_mask"] = torch.ones_like(document)[None]
    batch, model = tiny.packed([document], "cu_seq_lens_q") | more, tiny.model_of("llama")
    batch = {n: x for n, x in batch.items() if n in ("input_ids", "labels", "position_ids", by)}
    tiny.check(tiny.train(model, batch), tiny.reference(model, [document], [more]))


def _relaid(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any]) -> Any:
    """The mixers of a head-tail plan run in a contiguous layout."""
    model = hf.context_parallel(models[rank], mesh)
    plan = hf.make_plan(batch, model.config, mesh.size(), balancer="head_tail", block_size=4).replace(relayout=True)
    return tiny.step(model, hf.prepare(batch, model, plan))


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "minimax"])
def test_mixers_in_a_layout_of_their_own(name: str) -> None:
    model = tiny.model_of(name)
    results = run_ranks(3, _relaid, tiny.copies(model, 3), tiny.packed(DOCUMENTS))
    tiny.check(results, tiny.reference(model, DOCUMENTS))


# Frequencies that depend on the longest document of a batch: a document alone would get others.
EQUAL_LENGTHS = ("llama, dynamic NTK", "phi3, longrope")
# On four ranks each kind of mask and of correction once; on two the other ways to reach attention.
SOME = ("llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "llama, dynamic NTK", "qwen3_moe, auxiliary loss")
OTHERS = (
    "phi3, longrope", "mistral", "mixtral, auxiliary loss", "gemma2", "cohere2", "granite", "gpt_neox", "gpt2",
    "opt", "bert", "modernbert-decoder", "falcon_h1", "llama, YaRN",
)  # fmt: skip


def _every_model(rank: int, mesh: Any, batches: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {n: tiny.step(hf.context_parallel(tiny.model_of(n), mesh), batch) for n, batch in batches.items()}


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, OTHERS, id="others, 2"),
        pytest.param(4, SOME, id="some, 4"),
        pytest.param(4, OTHERS, id="others, 4", marks=pytest.mark.slow),
    ],
)
def test_every_configuration(gloo_pool: GlooPool, ranks: int, names: tuple[str, ...]) -> None:
    documents = {n: tiny.documents_of((31, 31)) if n in EQUAL_LENGTHS else DOCUMENTS for n in names}
    results = gloo_pool.run(ranks, _every_model, {name: tiny.packed(each) for name, each in documents.items()})
    for name, each in documents.items():
        tiny.check([result[name] for result in results], tiny.reference(tiny.model_of(name), each))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", ["models", "with_images"])
def test_all_models_are_as_the_guide_says(part: str) -> None:
    """Exact or refused, each model type of transformers, as `every_model` found it."""
    stored = json.loads(every_model.RESULTS.read_text())
    if stored["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the results are of another version of transformers")
    examine = every_model.examine if part == "models" else every_model.examine_with_images
    for kind, row in stored[part].items():
        found = examine(kind)
        assert found["status"] == row["status"], (kind, found)
