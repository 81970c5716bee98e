"""Models whose tokens of images or of prefixes read each other in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import images, tiny
from tests.integrations.transformers.tiny import COMMON, VOCAB

DOCUMENTS = [d.clamp(max=140) for d in tiny.documents_of((23, 41, 7, 30))]
# A model, the argument that marks tokens, and marks of causal ones, of blocks, and of further blocks.
MODELS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "gemma3": ("token_type_ids", (0, 1, 1)),
    "gemma4": ("mm_token_type_ids", (0, 1, 2)),
    "gemma4_unified": ("mm_token_type_ids", (0, 2, 1)),
    "paligemma": ("token_type_ids", (1, 0, 0)),
    "molmo2": ("mm_token_type_ids", (0, 1, 1)),
    "hrm_text": ("token_type_ids", (0, 1, 1)),
}
_TEXT = COMMON | dict(global_head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_PER_LAYER = dict(use_bidirectional_attention="vision", hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB)


def model_of(name: str) -> Any:
    """Small Gemma 4s of the other sizes amplify rounding."""
    if not name.startswith("gemma4"):
        return tiny.model_of(name) if name == "hrm_text" else images.model_of(name)
    tokens: dict[str, Any] = dict(image_token_id=150, video_token_id=151, audio_token_id=154, vision_config=None)
    text = _TEXT | (_PER_LAYER if name == "gemma4" else {})
    config = AutoConfig.for_model(name, text_config=text, audio_config=None, **tokens)
    torch.manual_seed(0)
    return tiny.randomized(transformers.AutoModelForImageTextToText.from_config(config).float()).train()


def _batch(form: str, name: str, marks: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = tiny.batch_of(DOCUMENTS, form)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return batch | {name: torch.zeros_like(batch["input_ids"]).masked_scatter(kept, torch.cat(marks))}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_read_each_other(name: str) -> None:
    """Two blocks a document, of which the first is longer than the window."""
    (argument, (causal, first, second)), model = MODELS[name], model_of(name)
    plain = [torch.full_like(d, causal) for d in DOCUMENTS]
    marks = [mark.clone() for mark in plain]
    for mark in marks:
        mark[2 : 2 + len(mark) // 2] = first
        mark[len(mark) - 3 : -1] = second
    want = tiny.reference(model, DOCUMENTS, [{argument: m[None]} for m in marks])
    assert tiny.errors(tiny.reference(model, DOCUMENTS, [{argument: m[None]} for m in plain]), want)[1] > 0.1
    for form in ("position_ids", "left", "right") if name == "paligemma" else ("position_ids",):
        tiny.check(tiny.train(model, _batch(form, argument, marks), 3, block_size=4), want)


def test_a_text_shorter_than_the_window() -> None:
    """Marks that mark nothing, as processors make them; the model looks them up by token."""
    model = images.model_of("gemma3")
    model.config.text_config.sliding_window = 512
    batch = _batch("right", "token_type_ids", [torch.zeros_like(d) for d in DOCUMENTS])
    tiny.check(tiny.train(model, batch), tiny.reference(model, DOCUMENTS))


def test_text_models_without_a_rule() -> None:
    """Text alone is taken, and images are refused."""
    config = AutoConfig.for_model("gemma4_unified_text", **_TEXT)
    batch = _batch("position_ids", "mm_token_type_ids", [torch.zeros_like(d) for d in DOCUMENTS])
    causal, mask = (hf.make_plan(batch, c, 2).masks["full_attention"] for c in (tiny.config_of("llama"), config))
    assert (causal.dense() == mask.dense()).all()
    batch["mm_token_type_ids"][0, 3:7] = 1
    with pytest.raises(ValueError, match="tokens of an image or video read each other"):
        hf.make_plan(batch, config, 2)
