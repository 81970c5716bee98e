"""Models whose tokens of images or of prefixes read each other in both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
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
    if name == "hrm_text":
        return tiny.model_of(name)
    if not name.startswith("gemma4"):
        return images.model_of(name)
    text = _TEXT | (_PER_LAYER if name == "gemma4" else {})
    tokens = dict(image_token_id=150, video_token_id=151, audio_token_id=154)
    config = AutoConfig.for_model(name, text_config=text, vision_config=None, audio_config=None, **tokens)
    torch.manual_seed(0)
    return tiny.randomized(transformers.AutoModelForImageTextToText.from_config(config).float()).train()


def _marks(documents: tiny.Documents, values: tuple[int, int, int]) -> list[torch.Tensor]:
    """Two blocks a document, of which the first is longer than the window."""
    marks = []
    for document in documents:
        mark = torch.full_like(document, values[0])
        mark[2 : 2 + len(document) // 2] = values[1]
        mark[len(document) - 3 : -1] = values[2]
        marks.append(mark)
    return marks


def _batch(form: str, name: str, marks: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = tiny.batch_of(DOCUMENTS, form)
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return batch | {name: torch.zeros_like(batch["input_ids"]).masked_scatter(kept, torch.cat(marks))}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_read_each_other(name: str) -> None:
    (argument, values), model = MODELS[name], model_of(name)
    marks = _marks(DOCUMENTS, values)
    want = tiny.reference(model, DOCUMENTS, [{argument: m[None]} for m in marks])
    causal = tiny.reference(model, DOCUMENTS, [{argument: torch.full_like(m, values[0])[None]} for m in marks])
    assert tiny.errors(causal, want)[1] > 0.1  # the marks count
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


@pytest.mark.parametrize("name", ["gemma3", "molmo2"])
def test_masks(name: str) -> None:
    """Dense masks are the union of the documents' and the blocks', which end with their document."""
    marks = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0]])
    offsets = torch.tensor([0, 3, 8])
    argument, config = MODELS[name][0], model_of(name).config
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "cu_seq_lens_q": offsets, argument: marks}
    document = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    causal = np.tril(np.ones((8, 8), bool)) & (document[:, None] == document)
    block = np.array([-1, 0, 0, 1, -2, 2 if name == "gemma3" else 1, 2 if name == "gemma3" else 1, -3])
    mask = hf.make_plan(batch, config, 1).masks["full_attention"]
    assert (mask.dense()[0] == (causal | (block[:, None] == block))).all()
