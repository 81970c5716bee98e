"""Models, forms of batches, masks, layouts and exchanges: loss and gradients are those of one document at a time."""

from __future__ import annotations

import copy
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
    *(("qwen3_5_text", "position_ids", layout) for layout in LAYOUTS[2:8]),
    *(("bamba", "position_ids", layout) for layout in LAYOUTS[8:]),
    *((name, "position_ids", ULYSSES) for name in ("gemma3", "bamba", "deepseek_v32", "hy_v4")),
    # The mixers of a head-tail plan run in a contiguous layout.
    *((name, "position_ids", dict(ranks=3, relayout=True)) for name in ("qwen3_next", "falcon_h1", "minimax")),
    # No layer tells these from models without experts but the loss, which must not take the plan for a mask.
    *((f"{name}, no attention", "position_ids", dict(ranks=2)) for name in ("jamba", "granitemoehybrid")),
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
    assert tiny.errors(tiny.mean_over_ranks(results), all_keys)[1] > 1e-3
    monkeypatch.setattr(indexed, "_SCORES", 100)
    tiny.check(tiny.train("deepseek_v32", tiny.packed(DOCUMENTS)), tiny.mean_over_ranks(results))


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2", "mamba"])
def test_bfloat16_rounds_no_more_than_on_one_device(name: str) -> None:
    model, batch = tiny.model_of(name).bfloat16(), tiny.packed(DOCUMENTS)
    want = tiny.reference(copy.deepcopy(model).float(), DOCUMENTS)
    alone, cut = tiny.reference(model, DOCUMENTS), tiny.mean_over_ranks(tiny.train(model, batch))

    def rounding(got: Any) -> float:
        return sum((got[1][n].float() - x).norm().item() / x.norm().item() for n, x in want[1].items()) / len(want[1])

    assert rounding(cut) <= 1.2 * rounding(alone)


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
    batch, ranks = images.batch_of(name, documents, form, model), 3 if form == "packed" else 2
    tiny.check(tiny.train(model, batch, ranks, block_size=4), images.reference(name, model, documents))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_videos(name: str) -> None:
    documents, video = images.with_video(name, images.documents_of((30, 23), (False, False)))
    batch, model = tiny.padded(documents, "right"), images.model_of(name)
    batch |= images.marks_of(name, batch["input_ids"]) | video
    alone = [images.marks_of(name, document[None]) for document in documents]
    want = tiny.reference(model, documents, [alone[0] | video, alone[1]])
    tiny.check(tiny.train(model, batch, block_size=4), want)
    other = video | {"pixel_values_videos": -video["pixel_values_videos"]}
    assert abs(tiny.reference(model, documents, [alone[0] | other, alone[1]])[0] - want[0]) > 1e-5  # the video counts


# --- tokens of images or of prefixes that read each other in both directions ------------------------------------------

MARKED = [d.clamp(max=140) for d in tiny.documents_of((23, 41, 7, 30))]
# A model, the argument that marks tokens, and marks of causal ones, of blocks, and of further blocks.
BLOCKS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "gemma3": ("token_type_ids", (0, 1, 1)),
    "gemma4": ("mm_token_type_ids", (0, 1, 2)),
    "gemma4_unified": ("mm_token_type_ids", (0, 2, 1)),
    "paligemma": ("token_type_ids", (1, 0, 0)),
    "molmo2": ("mm_token_type_ids", (0, 1, 1)),
    "hrm_text": ("token_type_ids", (0, 1, 1)),
}
_TEXT = tiny.COMMON | dict(global_head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_PER_LAYER = dict(
    use_bidirectional_attention="vision", hidden_size_per_layer_input=8, vocab_size_per_layer_input=tiny.VOCAB
)


def block_model(name: str) -> Any:
    """Small Gemma 4s of the other sizes amplify rounding."""
    if not name.startswith("gemma4"):
        return tiny.model_of(name) if name == "hrm_text" else images.model_of(name)
    tokens: dict[str, Any] = dict(image_token_id=150, video_token_id=151, audio_token_id=154, vision_config=None)
    text = _TEXT | (_PER_LAYER if name == "gemma4" else {})
    config = transformers.AutoConfig.for_model(name, text_config=text, audio_config=None, **tokens)
    torch.manual_seed(0)
    return tiny.randomized(transformers.AutoModelForImageTextToText.from_config(config).float()).train()


def _batch(form: str, name: str, marks: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = tiny.batch_of(MARKED, form)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return batch | {name: torch.zeros_like(batch["input_ids"]).masked_scatter(kept, torch.cat(marks))}


@pytest.mark.parametrize("name", BLOCKS)
def test_tokens_that_read_each_other(name: str) -> None:
    """Two blocks a document, of which the first is longer than the window."""
    (argument, (causal, first, second)), model = BLOCKS[name], block_model(name)
    plain = [torch.full_like(d, causal) for d in MARKED]
    marks = [mark.clone() for mark in plain]
    for mark in marks:
        mark[2 : 2 + len(mark) // 2] = first
        mark[len(mark) - 3 : -1] = second
    want = tiny.reference(model, MARKED, [{argument: m[None]} for m in marks])
    assert tiny.errors(tiny.reference(model, MARKED, [{argument: m[None]} for m in plain]), want)[1] > 0.1
    for form in ("position_ids", "left", "right") if name == "paligemma" else ("position_ids",):
        tiny.check(tiny.train(model, _batch(form, argument, marks), 3, block_size=4), want)


def test_a_text_shorter_than_the_window() -> None:
    """Marks that mark nothing, as processors make them; the model looks them up by token."""
    model = images.model_of("gemma3")
    model.config.text_config.sliding_window = 512
    batch = _batch("right", "token_type_ids", [torch.zeros_like(d) for d in MARKED])
    tiny.check(tiny.train(model, batch), tiny.reference(model, MARKED))


def test_text_models_without_a_rule() -> None:
    """Text alone is taken, and images are refused."""
    config = transformers.AutoConfig.for_model("gemma4_unified_text", **_TEXT)
    batch = _batch("position_ids", "mm_token_type_ids", [torch.zeros_like(d) for d in MARKED])
    causal, mask = (hf.make_plan(batch, c, 2).masks["full_attention"] for c in (tiny.config_of("llama"), config))
    assert (causal.dense() == mask.dense()).all()
    batch["mm_token_type_ids"][0, 3:7] = 1
    with pytest.raises(ValueError, match="tokens of an image or video read each other"):
        hf.make_plan(batch, config, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_models_are_as_the_guide_says() -> None:
    """Exact or refused, each model type of transformers, as `every_model` found it."""
    stored = json.loads(every_model.RESULTS.read_text())
    if stored["versions"]["transformers"] != transformers.__version__:
        pytest.skip("the results are of another version of transformers")
    for kind, row in stored["models"].items():
        found = every_model.examine(kind)
        assert found["status"] == row["status"], (kind, found)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plans_price_states_and_latents() -> None:
    """Latents beside the states of other layers, too."""
    batch = tiny.packed(DOCUMENTS)
    (each,) = (hf.make_plan(batch, tiny.config_of("qwen3_next"), 2).recurrences or {}).values()
    assert (each.layers, each.heads, each.key_dim, each.value_dim) == (2, 4, 8, 12)
    for name in (*MIXERS, "llama"):
        priced = hf.make_plan(batch, tiny.config_of(name), 2).recurrences
        assert (priced is not None) == (name not in ("minimax", "llama")), name
    for name, row in (("deepseek_v3", 24), ("kimi_linear", 24), ("llama", None)):
        plan = hf.make_plan(batch, tiny.config_of(name), 2, num_q_heads=4, head_dim=24, v_head_dim=16)
        sent = plan.recv_tokens("full_attention") * 2 * (row or 4 * (24 + 16))
        assert plan.kv_row_dim == row and (plan.recv_bytes("full_attention") == sent).all() and sent.any(), name
