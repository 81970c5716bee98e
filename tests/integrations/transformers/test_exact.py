"""Models, forms of batches, layouts and exchanges: loss and gradients are those of one document at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from spanwise.integrations import transformers as hf
from spanwise.integrations.transformers import indexed
from tests.integrations.transformers import every_model, images, tiny

DOCUMENTS = tiny.documents_of((23, 41, 7, 30, 1))
# Frequencies that depend on the longest document of a batch: a document alone would get others.
EQUAL_LENGTHS = ("llama, dynamic NTK", "phi3, longrope")
# One of each way in which mixers compute, and in which plans reach them.
MIXERS = ("qwen3_next", "kimi_linear", "mamba2", "mamba", "jamba", "lfm2", "minimax")
# Six keys a query; layers that share a selection (hy_v4), and sliding layers beside (dots3_note_text).
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text")
# Each kind of mask and of correction, each way to reach attention, and each kind of state.
MODELS = (
    "llama", "gemma3", "llama4", "gpt_oss", "deepseek_v3", "llama, dynamic NTK", "qwen3_moe, auxiliary loss",
    "phi3, longrope", "mistral", "mixtral, auxiliary loss", "gemma2", "cohere2", "granite", "gpt_neox", "gpt2", "opt",
    "bert", "modernbert-decoder", "falcon_h1", "llama, YaRN", *MIXERS, *INDEXED,
)  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    dict(ranks=4), dict(ranks=2), *(
        dict(ranks=3, balancer=balancer, block_size=4)
        for balancer in ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "local")
    ),
    *(dict(ranks=2, exchange=exchange) for exchange in ("needed", "all_gather", "ring")),
)  # fmt: skip
ULYSSES = dict(ranks=2, exchange="ulysses", balancer="head_tail", block_size=4)
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((name, tiny.FORMS[i % 4], LAYOUTS[i % len(LAYOUTS)]) for i, name in enumerate(MODELS)),
    *((name, form, dict(ranks=2)) for name in ("gemma3", "qwen3_next", "mamba2") for form in ("left", "right")),
    *(("lfm2", form, dict(ranks=2)) for form in ("seq_idx", "seq_idx alone")),
    *((name, "position_ids", layout) for name in ("qwen2, sliding", "qwen3_5_text") for layout in LAYOUTS[2:8]),
    *(("bamba", "position_ids", layout) for layout in LAYOUTS[8:]),
    *((name, "position_ids", ULYSSES) for name in ("gemma3", "bamba", "deepseek_v32", "hy_v4")),
    # The mixers of a head-tail plan run in a contiguous layout.
    *((name, "position_ids", dict(ranks=3, relayout=True)) for name in ("qwen3_next", "falcon_h1", "minimax")),
]


@pytest.mark.parametrize(("name", "form", "layout"), CASES, ids=str)
def test_batches(name: str, form: str, layout: dict[str, Any]) -> None:
    documents = tiny.documents_of((31, 31)) if name in EQUAL_LENGTHS else DOCUMENTS
    model, batch, layout = tiny.model_of(name), tiny.batch_of(documents, form), dict(layout)

    def relaid(mine: Any, batch: Any) -> Any:
        plan = hf.make_plan(batch, mine.config, layout["ranks"], balancer="head_tail", block_size=4)
        return tiny.step(mine, hf.prepare(batch, mine, plan.replace(relayout=True)))

    act = relaid if layout.pop("relayout", False) else None
    tiny.check(tiny.train(model, batch, act=act, **layout), tiny.reference(model, documents))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("jamba", dict(attn_layer_period=9, attn_layer_offset=8)),
        ("granitemoehybrid", dict(layer_types=["linear_attention"] * 3)),
    ],
)
def test_an_auxiliary_loss_of_models_without_attention(name: str, changes: dict[str, Any]) -> None:
    """No layer tells them from models without experts but the loss, which must not take the plan for a mask."""
    model = tiny.model_of(name, output_router_logits=True, router_aux_loss_coef=0.1, **changes)
    tiny.check(tiny.train(model, tiny.packed(DOCUMENTS)), tiny.reference(model, DOCUMENTS))


@pytest.mark.parametrize("by", ["attention_mask", "cu_seq_lens_q"])
def test_positions_that_skip_numbers(by: str) -> None:
    """As training for long contexts on short documents makes them."""
    (document,) = tiny.documents_of((40,))
    more = {"position_ids": torch.cat([torch.arange(25), torch.arange(60, 75)])[None]}
    more["attention_mask"] = torch.ones_like(document)[None]
    batch, model = tiny.packed([document], "cu_seq_lens_q") | more, tiny.model_of("llama")
    batch = {n: x for n, x in batch.items() if n in ("input_ids", "labels", "position_ids", by)}
    tiny.check(tiny.train(model, batch), tiny.reference(model, [document], [more]))


def test_picked_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selections matter, or the tests above would show nothing; queries may be scored in parts."""
    all_keys = tiny.reference(tiny.model_of("deepseek_v32", index_topk=64), DOCUMENTS)
    results = tiny.train("deepseek_v32", tiny.packed(DOCUMENTS))
    with pytest.raises(AssertionError, match="differs"):
        tiny.check(results, all_keys)
    monkeypatch.setattr(indexed, "_SCORES", 100)
    tiny.check(tiny.train("deepseek_v32", tiny.packed(DOCUMENTS)), tiny.mean_over_ranks(results))


# Models of images whose batches are packed, too.
PACKED = {
    "llava": "one row of positions",
    "gemma3": "tokens that read each other",
    "paligemma": "prefixes that read each other",
    "qwen2_vl": "rows of positions, as the model counts them for each document alone",
    "shieldgemma2": "the model of another type",
    "granite4_vision": "features for deeper layers, by layer",
    "instructblipvideo": "positions that its encoder would take for its own",
    "got_ocr2": "an encoder without AttentionInterface",
    "nemotron_h_omni": "a decoder with a head, and layers that carry a state",
}
TEXT_AND_IMAGES = [
    *((name, form, True) for name in images.MODELS for form in ("left", "right")),
    *((name, "packed", True) for name in PACKED),
    *((name, "right", False) for name in images.MODELS),
]


@pytest.mark.parametrize(("name", "form", "held"), TEXT_AND_IMAGES)
def test_images(name: str, form: str, held: bool) -> None:
    model = images.model_of(name)
    tokens, with_image = images.tokens_of(name, model), (held, name in images.ALWAYS, held)
    documents = images.documents_of((29, 31, 25), with_image, tokens)
    results = tiny.train(
        model, images.batch_of(name, documents, form, model), 3 if form == "packed" else 2, block_size=4
    )
    tiny.check(results, images.reference(name, model, documents))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_videos(name: str) -> None:
    documents, video = images.with_video(name, images.documents_of((30, 23), (False, False)))
    batch = tiny.padded(documents, "right")
    batch |= images.marks_of(name, batch["input_ids"]) | video
    model = images.model_of(name)
    alone = [images.marks_of(name, document[None]) for document in documents]
    alone[0] |= video
    want = tiny.reference(model, documents, alone)
    tiny.check(tiny.train(model, batch, block_size=4), want)
    alone[0] |= {"pixel_values_videos": -video["pixel_values_videos"]}
    assert abs(tiny.reference(model, documents, alone)[0] - want[0]) > 1e-5  # the video counts


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
