"""Models whose tokens of images or of prefixes read each other in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from transformers import AutoModelForCausalLM

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import images, tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = [d.clamp(max=140) for d in tiny.documents_of((23, 41, 7, 30))]
_LAYERS = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
_NO_IMAGES = dict(vision_config=None, audio_config=None, image_token_id=150, video_token_id=151, audio_token_id=154)


def _gemma4() -> Any:
    text = dict(global_head_dim=16, use_bidirectional_attention="vision", hidden_size_per_layer_input=8)
    text |= tiny.COMMON | _LAYERS | dict(vocab_size_per_layer_input=tiny.VOCAB)
    return transformers.Gemma4ForConditionalGeneration(transformers.Gemma4Config(text_config=text, **_NO_IMAGES))


def _gemma4_unified() -> Any:
    text = tiny.COMMON | _LAYERS | dict(global_head_dim=16)
    config = transformers.Gemma4UnifiedConfig(text_config=text, **_NO_IMAGES)
    return transformers.Gemma4UnifiedForConditionalGeneration(config)


def _molmo2() -> Any:
    small = dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, intermediate_size=32
    )  # of its encoder
    config = transformers.Molmo2Config(
        text_config=tiny.COMMON | dict(additional_vocab_size=4),
        vision_config=small | dict(num_hidden_layers=1, image_size=[28, 28]),
        adapter_config=small | dict(text_hidden_size=64, vision_feature_layer=[0]),
        image_patch_id=150,
    )
    return transformers.Molmo2ForConditionalGeneration(config)


def _hrm() -> Any:
    lacks = {"num_key_value_heads", "attention_dropout"}
    values = {name: x for name, x in tiny.COMMON.items() if name not in lacks}
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("hrm_text", **values))


# A model, the argument that marks tokens, and marks of causal ones, of blocks, and of further blocks.
MODELS: dict[str, tuple[Callable[[], Any], str, tuple[int, int, int]]] = {
    "gemma3": (lambda: images.model_of("gemma3"), "token_type_ids", (0, 1, 1)),
    "gemma4": (_gemma4, "mm_token_type_ids", (0, 1, 2)),
    "gemma4_unified": (_gemma4_unified, "mm_token_type_ids", (0, 2, 1)),
    "paligemma": (lambda: images.model_of("paligemma"), "token_type_ids", (1, 0, 0)),
    "molmo2": (_molmo2, "mm_token_type_ids", (0, 1, 1)),
    "hrm_text": (_hrm, "token_type_ids", (0, 1, 1)),
}


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
    if form == "packed":
        return tiny.packed(DOCUMENTS) | {name: torch.cat(marks)[None]}
    batch = tiny.padded(DOCUMENTS, form)
    filled = torch.zeros_like(batch["input_ids"]).masked_scatter(batch["attention_mask"].bool(), torch.cat(marks))
    return batch | {name: filled}


def _train(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any]) -> Any:
    return tiny.step(hf.context_parallel(models[rank], mesh, block_size=4), batch)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_read_each_other(name: str) -> None:
    make, argument, values = MODELS[name]
    torch.manual_seed(0)
    model = tiny.randomized(make().float()).train()
    marks = _marks(DOCUMENTS, values)
    want = tiny.reference(model, DOCUMENTS, [{argument: m[None]} for m in marks])
    causal = tiny.reference(model, DOCUMENTS, [{argument: torch.full_like(m, values[0])[None]} for m in marks])
    assert tiny.errors(causal, want)[1] > 0.1  # the marks count
    for form in ("packed", "left", "right") if name == "paligemma" else ("packed",):
        tiny.check(run_ranks(3, _train, tiny.copies(model, 3), _batch(form, argument, marks)), want)


def test_a_text_shorter_than_the_window() -> None:
    """Marks that mark nothing, as processors make them; the model looks them up by token."""
    config = images.model_of("gemma3").config
    config.text_config.sliding_window = 512
    model = tiny.randomized(transformers.Gemma3ForConditionalGeneration(config)).train()
    batch = _batch("right", "token_type_ids", [torch.zeros_like(d) for d in DOCUMENTS])
    tiny.check(run_ranks(2, _train, tiny.copies(model, 2), batch), tiny.reference(model, DOCUMENTS))


def test_text_models_without_a_rule() -> None:
    """Text alone is taken, and images are refused."""
    config = transformers.AutoConfig.for_model(
        "gemma4_unified_text", **tiny.COMMON | _LAYERS | dict(global_head_dim=16)
    )
    model = tiny.randomized(AutoModelForCausalLM.from_config(config)).train()
    batch = _batch("packed", "mm_token_type_ids", [torch.zeros_like(d) for d in DOCUMENTS])
    tiny.check(run_ranks(2, _train, tiny.copies(model, 2), batch), tiny.reference(model, DOCUMENTS))
    batch["mm_token_type_ids"][0, 3:7] = 1
    with pytest.raises(ValueError, match="tokens of an image or video read each other"):
        hf.make_plan(batch, model.config, 2)


def test_marks_that_do_not_fit() -> None:
    config = images.model_of("paligemma").config
    with pytest.raises(ValueError, match=r"trains on batches with token_type_ids \[B, S\]"):
        hf.make_plan(tiny.packed(DOCUMENTS), config, 2)
    with pytest.raises(ValueError, match=r"token_type_ids must be \[B, S\] = \(1, 101\), got shape \(1, 7\)"):
        hf.make_plan(tiny.packed(DOCUMENTS) | {"token_type_ids": torch.zeros(1, 7)}, config, 2)
    config = transformers.AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="attention is not causal"):
        hf.make_plan(tiny.packed(DOCUMENTS), config, 2)


@pytest.mark.parametrize("name", ["gemma3", "molmo2"])
def test_masks(name: str) -> None:
    """Dense masks are the union of the documents' and the blocks', which end with their document."""
    marks = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0]])
    offsets = torch.tensor([0, 3, 8])
    make, argument, _ = MODELS[name]
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "cu_seq_lens_q": offsets, argument: marks}
    config = make().config
    document = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    causal = np.tril(np.ones((8, 8), bool)) & (document[:, None] == document)
    block = np.array([-1, 0, 0, 1, -2, 2 if name == "gemma3" else 1, 2 if name == "gemma3" else 1, -3])
    mask = hf.make_plan(batch, config, 1).masks["full_attention"]
    assert (mask.dense()[0] == (causal | (block[:, None] == block))).all()
